"""The planners: pure functions from a problem and a rank to that rank's steps. A new one is a file and a line here."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from longspan.errors import PlanError
from longspan.schedules.planners.all_gather import all_gather
from longspan.schedules.planners.exchange import exchange
from longspan.schedules.planners.hybrid import Planner, Slices, all_to_all, hybrid
from longspan.schedules.planners.ring import ring
from longspan.schedules.problem import Problem
from longspan.schedules.steps import Schedule, Step

PLANNERS: dict[str, Planner] = {
    "ring": ring,
    "all_gather": all_gather,
    "exchange": exchange,
    "all_to_all": all_to_all,
}

_HYBRID = re.compile(r"hybrid\((\d{1,6})(?:,\s*(\w+))?\)")


def planner(scheme: str, problem: Problem) -> Callable[[int], tuple[Step, ...]]:
    """The function from rank to steps that a scheme's name stands for: a planner, or `hybrid(HEADS, PLANNER)`."""
    if scheme == "all_to_all":
        return partial(all_to_all, problem, slices=Slices(problem, problem.layout.world_size))
    if scheme in PLANNERS:
        return partial(PLANNERS[scheme], problem)
    found = _HYBRID.fullmatch(scheme)
    if found:
        heads, inner = int(found[1]), found[2] or "ring"
        if inner in PLANNERS and inner != "all_to_all":
            return partial(hybrid, problem, heads=heads, inner=PLANNERS[inner], slices=Slices(problem, heads))
    raise PlanError(
        f"schedule {scheme!r} was asked for. There are {', '.join(PLANNERS)} and hybrid(HEADS, PLANNER), as in"
        f" hybrid(8, exchange); 'auto' compares them."
    )


def schedule(scheme: str, problem: Problem) -> Schedule:
    """Every rank's forward steps, written out."""
    steps = planner(scheme, problem)
    ranks = tuple(steps(rank) for rank in range(problem.layout.world_size))
    return Schedule(scheme.replace(" ", ""), "forward", problem.layout, problem.sizes, ranks)


__all__ = ["PLANNERS", "Planner", "all_gather", "all_to_all", "exchange", "hybrid", "planner", "ring", "schedule"]
