"""Run all ranks of a plan in one process: attention and convolutions on the loopback transport, recurrences in threads.

Only the transport differs from a run over processes: kernels, programs and autograd are the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.kernels import Features, choose_kernel, kernel_named
from longspan.mixers.convolution import OwnRows, convolved
from longspan.planning.conv_plan import ConvPlan
from longspan.planning.plan import Plan
from longspan.run.halo import HaloBackward, HaloForward, HaloTask
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Loopback, Program
from longspan.run.walk import Job
from longspan.scoring.biases import Extras

# -- Attention and convolutions: every rank's run, forward and backward, on the loopback transport ---------------------


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


# -- Recurrences: one thread per rank, which meet where messages are exchanged -----------------------------------------


StateProgram = Program[list[Tensor]]


class MeetingPoint:
    """Where ranks bring their programs; when all are there, they are run together."""

    def __init__(self, world_size: int, transport: Any = None) -> None:
        self.transport = Loopback() if transport is None else transport
        self.programs: dict[int, StateProgram] = {}
        self.world_size = world_size
        self.results: list[list[Tensor]] = []
        self.barrier = threading.Barrier(world_size, action=self._run)

    def _run(self) -> None:
        self.results = self.transport.run([self.programs[rank] for rank in range(self.world_size)])

    def carrier(self, rank: int) -> Callable[[StateProgram, str, int], tuple[list[Tensor], int]]:
        """What carries the rank's messages."""

        def carry(program: StateProgram, direction: str, number: int) -> tuple[list[Tensor], int]:  # noqa: ARG001
            self.programs[rank] = program
            self.barrier.wait(timeout=120)
            return self.results[rank], 0

        return carry


def each_rank(work: Callable[[int], Any], world_size: int, meeting: MeetingPoint) -> list[Any]:
    """What `work` gives on every rank; the first error, if any raises."""
    found: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in real or errors:
        raise error
    return found


def shards(tensors: Sequence[Tensor], layout: Any, rank: int, dim: int = 1) -> list[Tensor]:
    """The rank's parts, as leaves that want gradients where the whole does."""
    parts = [layout.shard(t.detach(), rank, dim) for t in tensors]
    return [part.requires_grad_(t.requires_grad) for part, t in zip(parts, tensors, strict=True)]
