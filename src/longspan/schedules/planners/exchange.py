"""Exchange: only the rows the mask needs travel, from owner to user, in overlapped stages."""

from __future__ import annotations

import numpy as np

from longspan.schedules.fetch import Fetch, arrivals, moves
from longspan.schedules.planners.chunked import chunked
from longspan.schedules.problem import Problem
from longspan.schedules.steps import Step, Transfer
from longspan.span import Ints, by_position


def exchange(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The rank's steps: local pairs first, then those of each stage, while the next stage is in flight."""
    if problem.chunks is not None:
        return chunked(problem, problem.chunks, rank)
    return fetching(problem, rank, problem.needed_fetches, problem.num_stages)


def fetching(problem: Problem, rank: int, fetches: tuple[Fetch, ...], stages: int) -> tuple[Step, ...]:
    """The steps of a rank whose rows come as `fetches` say, one for each lane."""
    node, layout = problem.node, problem.layout
    # Rows from other nodes come a step later, and their ports hold them one more, which backward needs to ask again.
    num_steps = stages + 1 + 2 * (node < layout.world_size)
    transfers: list[list[Transfer]] = [[] for _ in range(num_steps)]
    arrived: list[Ints] = []
    for lane, fetch in zip(problem.lanes, fetches, strict=True):
        for (step, src, dst, until), rows in moves(fetch, layout, node, rank).items():
            transfers[step].append(Transfer(src, dst, lane.kv(rows), until))
        arrived.append(_with_steps([problem.held(rank), *arrivals(fetch, node, rank, num_steps)[1:]]))
    computes = problem.computes(rank, arrived, num_steps)
    return tuple(Step(tuple(moved), tuple(work)) for moved, work in zip(transfers, computes, strict=True))


def _with_steps(arrived: list[Ints]) -> Ints:
    """(start, stop, step) of the rows of every step, sorted by position."""
    step = np.repeat(np.arange(len(arrived)), [len(rows) for rows in arrived])
    return by_position(np.column_stack((np.concatenate(arrived), step)))
