"""All-gather: every rank sends its K and V to every other, and computes everything once they are there."""

from __future__ import annotations

import numpy as np

from longspan.schedules.problem import Problem
from longspan.schedules.steps import Step, Transfer
from longspan.span import union


def all_gather(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The rank's two steps: local pairs while everything is in flight, then all the rest at once."""
    size = problem.layout.world_size
    held = [problem.held(other) for other in range(size)]
    transfers: list[Transfer] = []
    for other in (r for r in range(size) if r != rank):
        for src, dst in sorted(((rank, other), (other, rank))):
            if len(held[src]):
                transfers += [Transfer(src, dst, lane.kv(held[src]), until=1) for lane in problem.lanes]
    local = [compute for lane in problem.lanes for compute in problem.computes(rank, held[rank], lane)]
    others = [rows for r, rows in enumerate(held) if r != rank]
    rest = union(np.concatenate(others)) if others else held[rank][:0]
    remote = [compute for lane in problem.lanes for compute in problem.computes(rank, rest, lane)]
    return Step(tuple(transfers), tuple(local)), Step((), tuple(remote))
