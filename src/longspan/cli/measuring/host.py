"""What queueing costs the host of a GPU: for each operation, for each message, for each call.

Whole attentions are queued as users queue them, with so few tokens that nothing else takes time, and the clock is read
before anybody waits for the device. Plans with few and with many operations tell a call's fixed part from the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.launch import JobRanks
from longspan.cli.measuring.runs import DIRECTIONS, MeasuredRun
from longspan.schedules.cost.machine import Machine, steps_work
from longspan.schedules.plan import Plan
from longspan.schedules.steps import Sizes

TOKENS = 64
"""Tokens of each rank."""
SCHEMES = ("exchange", "ring", "all_to_all", "all_gather")


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the host."""

    launch: float
    message: float
    call: float

    def put_into(self, machine: Machine) -> Machine:
        return replace(machine, launch_seconds=self.launch, message_seconds=self.message, call_seconds=self.call)


def host_costs(
    ranks: JobRanks, machine: Machine, sizes: Sizes, dtype: str, rounds: int, advance: Callable[[str], None]
) -> HostCosts:
    """The host's costs, the most of any rank."""
    advance("host")
    message = ranks.most(_message_seconds(ranks, rounds))
    rows: list[tuple[float, float]] = []
    for made in _plans(ranks, machine, sizes, dtype):
        for way, seconds in zip(DIRECTIONS, _queueing(MeasuredRun(made, ranks), rounds), strict=True):
            works = steps_work(made.steps(ranks.rank, way), ranks.rank, made.sizes, made.machine, way)
            spent = ranks.most(seconds) - message * sum(work.messages for work in works)
            rows.append((sum(work.ops for work in works), spent))
    launch, call = line(rows)
    return HostCosts(launch, message, call)


def line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and height of the straight line nearest to (operations, seconds); neither is below nothing.

    >>> [round(value, 9) for value in line([(2, 0.0002), (12, 0.0003)])]
    [1e-05, 0.00018]
    """
    ops, seconds = np.array(rows).T
    spread = float(((ops - ops.mean()) ** 2).sum())
    slope = float(((ops - ops.mean()) * (seconds - seconds.mean())).sum()) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return slope, max(float(seconds.mean() - slope * ops.mean()), 0.0)


def _plans(ranks: JobRanks, machine: Machine, sizes: Sizes, dtype: str) -> list[Plan]:
    mask = masks.causal(TOKENS * ranks.size)
    layout = layouts.zigzag(TOKENS * ranks.size, ranks.size)
    names = SCHEMES if ranks.size > 1 else SCHEMES[:1]
    return [
        plan(
            mask, layout, q_heads=sizes.q_heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, dtype=dtype,
            scheme=name, machine=machine,
        )
        for name in names
        if name != "all_to_all" or ranks.size <= sizes.q_heads
    ]  # fmt: skip


def _queueing(run: MeasuredRun, rounds: int) -> tuple[float, float]:
    """Seconds until forward and backward have been queued, in the median round."""
    run.once()  # to warm up
    spent: list[tuple[float, float]] = []
    (q, k, v), several = run.inputs, run.ranks.size > 1
    for _ in range(rounds):
        run.ranks.barrier()
        begin = time.perf_counter()
        out = attention(q, k, v, run.plan if several else run.plan.mask, group=run.group if several else None)
        middle = time.perf_counter()
        run.ranks.barrier()
        again = time.perf_counter()
        torch.autograd.grad(out, run.inputs, run.upstream)
        spent.append((middle - begin, time.perf_counter() - again))
        run.ranks.finish()
    forward, backward = np.median(np.array(spent), axis=0).tolist()
    return forward, backward


def _message_seconds(ranks: JobRanks, rounds: int, together: int = 8) -> float:
    """Seconds until a message of a batch has been started, in the median round."""
    if ranks.size == 1:
        return 0.0
    spent: list[float] = []
    buffers = torch.zeros(2, together, 256, dtype=torch.uint8, device=ranks.device)
    ahead, behind = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for _ in range(rounds + 1):
        ranks.barrier()
        begin = time.perf_counter()
        ends = [dist.P2POp(dist.isend, t, ahead) for t in buffers[0]]
        ends += [dist.P2POp(dist.irecv, t, behind) for t in buffers[1]]
        works = dist.batch_isend_irecv(ends)
        spent.append((time.perf_counter() - begin) / len(ends))
        for work in works:
            work.wait()
        ranks.finish()
    return float(np.median(spent[1:]))
