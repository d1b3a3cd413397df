"""All-gather: every rank gets the K and V of every other, and computes the rest once they are there.

It is an exchange in which everybody needs everything, in one stage. Between nodes every row crosses once per node, as
in the collective of the same name.
"""

from __future__ import annotations

from longspan.schedules.planners.exchange import fetching
from longspan.schedules.problem import Problem
from longspan.schedules.steps import Step


def all_gather(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The rank's steps: local pairs while everything is in flight, then all the rest at once."""
    return fetching(problem, rank, (problem.gather_fetch,) * len(problem.lanes), min(problem.layout.world_size - 1, 1))
