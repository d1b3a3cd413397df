"""A whole plan in one process: every rank's run, forward and backward, on the loopback transport."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.execution.engine.backward import Backward, Saved
from longspan.execution.engine.forward import Forward
from longspan.execution.engine.runner import Job
from longspan.execution.engine.transports import Loopback, Program
from longspan.execution.kernels import Features, choose_kernel, kernel_named
from longspan.execution.scoring.biases import Extras
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
