"""A whole plan in one process: every rank's run, forward and backward, on the loopback transport."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.execution.convolution.own_rows import OwnRows, convolved
from longspan.execution.engine.backward import Backward, Saved
from longspan.execution.engine.forward import Forward
from longspan.execution.engine.halo import HaloBackward, HaloForward, HaloTask
from longspan.execution.engine.runner import Job
from longspan.execution.engine.transports import Loopback, Program
from longspan.execution.kernels import Features, choose_kernel, kernel_named
from longspan.execution.scoring.biases import Extras
from longspan.schedules.convolution import ConvPlan
from longspan.schedules.plan import Plan

SEQ_DIM = 2


class Transport(Protocol):
    """What runs all ranks' programs and returns their results, by rank."""

    def run(self, programs: Sequence[Program[Any]]) -> list[Any]: ...


@torch.no_grad()
def run_loopback(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    kernel: str = "auto",
    scale: float | None = None,
    sinks: Tensor | None = None,
    extras: Extras | None = None,
    transport: Transport | None = None,
) -> tuple[Tensor, ...]:
    """Output, lse, dq, dk and dv of whole tensors, computed by all ranks of the plan together.

    The ranks take turns, unless a transport says otherwise (see `tests.simulation.network`). Then, in the
    order of their first use, the gradients of tensors that score functions captured, and that of sinks: summed over the
    ranks.
    """
    plan.mask.read_anew()
    layout, carry = plan.layout, Loopback() if transport is None else transport
    scoring = None if extras is None else extras.scoring(q, plan)
    captured = () if scoring is None else scoring.captured
    drops = scoring is not None and scoring.dropout is not None
    asked = Features(not plan.mask.is_structured, scoring is not None, drops, plan.chunks is not None)
    chosen = kernel_named(choose_kernel(kernel, q, k, v, asked))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    jobs = [Job(plan, rank, chosen, scale, q.dtype, scoring, sinks) for rank in range(layout.world_size)]
    ranks = range(layout.world_size)
    own = [tuple(layout.shard(t, rank, SEQ_DIM) for t in (q, k, v)) for rank in ranks]
    upstream = [layout.shard(dout, rank, SEQ_DIM) for rank in ranks]
    forward = carry.run([Forward(jobs[r], *own[r], captured=captured).program(saves=True) for r in ranks])
    runs: list[Backward] = []
    for r in ranks:
        (q, k, v), (out, lse, kept) = own[r], forward[r]
        runs.append(Backward(jobs[r], Saved(q, k, v, out, lse, kept, captured), upstream[r]))
    gradients = carry.run([run.program() for run in runs])
    shared = [run.shared_gradients() for run in runs]
    parts = [(*forward[r][:2], *gradients[r]) for r in ranks]
    whole = [layout.unshard([part[i] for part in parts], SEQ_DIM) for i in range(5)]
    return *whole, *(torch.stack(found).sum(0) for found in zip(*shared, strict=True))


def run_conv_loopback(
    plan: ConvPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    *,
    activation: str | None = None,
    transport: Transport | None = None,
) -> tuple[Tensor, ...]:
    """Output, dx, dweight and, with a bias, dbias of whole tensors, computed by all ranks of the plan together; the
    shares of the last two are added up. Padding slots hold nan, which must not show."""
    layout, carry = plan.layout, Loopback() if transport is None else transport
    ranks = range(layout.world_size)
    tasks = [HaloTask(plan, rank, x.dtype) for rank in ranks]
    shared = [t.detach().requires_grad_() for t in (weight, bias) if t is not None]
    rows = carry.run([HaloForward(tasks[r], layout.shard(x.detach(), r, 1, torch.nan)).program() for r in ranks])
    parts: list[Tensor] = []
    drows: list[Tensor] = []
    gradients: list[list[Tensor]] = []
    for r in ranks:
        rows[r].requires_grad_()
        own = OwnRows.of(plan, r, x.device)
        out = convolved(rows[r], shared[0], shared[1] if len(shared) > 1 else None, own, activation)
        drow, *found = torch.autograd.grad(out, (rows[r], *shared), layout.shard(dout, r, 1, torch.nan))
        parts.append(out.detach())
        drows.append(drow)
        gradients.append(found)
    dx = carry.run([HaloBackward(tasks[r], drows[r]).program() for r in ranks])
    sums = [torch.stack(found).sum(0) for found in zip(*gradients, strict=True)]
    return layout.unshard(parts, 1), layout.unshard(dx, 1), *sums
