"""Which planners there are, and what a scheme's name stands for. A new planner is a file and a line here.

`VOLUMES` says in closed form how much every rank receives under a planner; a planner without an entry is summed up step
by step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.errors import PlanError
from longspan.schedules.cost.traffic import received
from longspan.schedules.planners.all_gather import all_gather
from longspan.schedules.planners.exchange import exchange
from longspan.schedules.planners.hybrid import Planner, Slices, alone, hybrid
from longspan.schedules.planners.ring import ring
from longspan.schedules.planners.volume import (
    Volume,
    all_gather_volume,
    alone_volume,
    exchange_volume,
    hybrid_volume,
    ring_volume,
)
from longspan.schedules.problem import Problem
from longspan.schedules.reversal import reverse
from longspan.schedules.steps import Schedule, Step
from longspan.span import Ints

PLANNERS: dict[str, Planner] = {
    "ring": ring,
    "all_gather": all_gather,
    "exchange": exchange,
}
VOLUMES: dict[Planner, Callable[[Problem], Volume]] = {
    ring: ring_volume,
    all_gather: all_gather_volume,
    exchange: exchange_volume,
    alone: alone_volume,
}

_HYBRID = re.compile(r"hybrid\((\d{1,6})(?:,\s*(\w+))?\)")


@dataclass(frozen=True, eq=False)
class Scheme:
    """A planner, spread over `heads` ranks by heads, bound to a problem."""

    name: str
    problem: Problem
    heads: int
    inner: Planner

    def __post_init__(self) -> None:
        _ = self._slices  # refuses groups that the ranks do not divide into, now and not at the first call

    @cached_property
    def _slices(self) -> Slices:
        return Slices(self.problem, self.heads)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The forward steps of one rank."""
        if not 0 <= rank < self.problem.layout.world_size:
            raise PlanError(f"{self.problem.layout} has no rank {rank}.")
        return hybrid(self._slices, rank, self.inner)

    @cached_property
    def work(self) -> Ints:
        """Allowed pairs that each rank computes, all heads and batch rows together."""
        if self.heads == 1:
            return self.problem.work
        kinds = [self._slices.kind(number) for number in range(self.heads)]
        alike = {kind: self._slices.slice(kinds.index(kind)).work for kind in set(kinds)}
        return np.stack([alike[kind] for kind in kinds], axis=1).ravel()

    @cached_property
    def _volume(self) -> Volume:
        return hybrid_volume(self._slices, VOLUMES[self.inner])

    def received(self, direction: str, *, keep: bool) -> Ints:
        """Bytes that each rank takes from the wire in one pass."""
        sizes = self.problem.sizes
        if self.inner in VOLUMES and self.problem.chunks is None:
            return self._volume.received(sizes, direction, keep=keep)
        num_bytes: list[int] = []
        for rank in range(self.problem.layout.world_size):
            steps = self.steps(rank)
            num_bytes.append(
                received(steps if direction == "forward" else reverse(steps, rank, keep=keep)[0], rank, sizes)
            )
        return np.array(num_bytes, dtype=np.int64)

    def schedule(self) -> Schedule:
        """Every rank's forward steps, written out."""
        ranks = tuple(self.steps(rank) for rank in range(self.problem.layout.world_size))
        return Schedule(self.name, "forward", self.problem.layout, self.problem.sizes, ranks)


def scheme(name: str, problem: Problem) -> Scheme:
    """What a name stands for: a planner, `all_to_all`, or `hybrid(HEADS, PLANNER)`.

    >>> from longspan import masks, layouts
    >>> from longspan.schedules import Problem, Sizes
    >>> problem = Problem.make(masks.causal(), layouts.zigzag(64, 4), Sizes(8, 2, 64, 64, 2))
    >>> scheme("hybrid(2, exchange)", problem).name
    'hybrid(2,exchange)'
    """
    name = name.replace(" ", "")
    if problem.chunks is not None and name != "exchange":
        raise PlanError(
            f"scheme {name!r} was asked for with chunks = {problem.chunks.num}. Only an exchange computes in chunks"
            f" and keeps queries at home, where their real output is; others add gradients up in an order that"
            f" depends on the number of ranks. Use 'exchange' or 'auto', or leave chunks out."
        )
    if name in PLANNERS:
        return Scheme(name, problem, 1, PLANNERS[name])
    if name == "all_to_all":
        return Scheme(name, problem, problem.layout.world_size, alone)
    match = _HYBRID.fullmatch(name)
    if match and (match[2] or "ring") in PLANNERS:
        return Scheme(name, problem, int(match[1]), PLANNERS[match[2] or "ring"])
    raise PlanError(
        f"scheme {name!r} was asked for. Choose one of {', '.join(PLANNERS)}, all_to_all and hybrid(HEADS, PLANNER),"
        f" as in hybrid(8, exchange); 'auto' compares them."
    )
