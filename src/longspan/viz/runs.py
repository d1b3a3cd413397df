"""Both passes of a plan, written out for every rank and simulated: what pictures of time, traffic and memory show."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from longspan.errors import PlanError
from longspan.schedules.cost.machine import queued_at, steps_work
from longspan.schedules.cost.memory import live_bytes
from longspan.schedules.cost.simulator import Timeline, simulate
from longspan.schedules.plan import Plan
from longspan.schedules.steps import Schedule
from longspan.span import Ints

MAX_RANKS = 128
"""Pictures that need every rank's steps are drawn up to here: simulating 256 ranks takes half a minute."""


@dataclass(frozen=True, eq=False)
class SimulatedPass:
    """One pass: its schedule, what the simulator saw, and when each rank left each step."""

    direction: str
    schedule: Schedule
    timeline: Timeline
    left: tuple[tuple[float, ...], ...]

    @cached_property
    def alive(self) -> tuple[Ints, ...]:
        """For each rank, the bytes alive in each of its steps."""
        schedule = self.schedule
        kept = schedule.kept or ((),) * schedule.world_size
        return tuple(
            live_bytes(steps, rank, schedule.layout, schedule.sizes, self.direction, kept[rank])
            for rank, steps in enumerate(schedule.ranks)
        )


@lru_cache(maxsize=4)
def runs(plan: Plan) -> tuple[SimulatedPass, SimulatedPass]:
    """Forward and backward of the plan."""
    size = plan.layout.world_size
    if size > MAX_RANKS:
        raise PlanError(
            f"a picture of every rank's steps was asked for, and {plan!r} has {size} ranks, which would be simulated"
            f" one by one. Ask for {MAX_RANKS} ranks or fewer; masks and layouts are drawn for any number."
        )
    return _run(plan, "forward"), _run(plan, "backward")


def _run(plan: Plan, direction: str) -> SimulatedPass:
    schedule = plan.schedule(direction)
    timeline = simulate(schedule, plan.machine)
    arrived: dict[tuple[int, int], float] = {}
    for event in timeline.events:
        if event.kind == "message":
            for rank in (event.rank, event.peer):
                key = rank, event.step
                arrived[key] = max(arrived.get(key, 0.0), event.stop)
    left: list[tuple[float, ...]] = []
    for rank, steps in enumerate(schedule.ranks):
        now, times = 0.0, list[float]()
        works = steps_work(steps, rank, plan.sizes, plan.machine, direction)
        for number, (work, queued) in enumerate(zip(works, queued_at(works, plan.machine), strict=True)):
            now = max(now + work.seconds(plan.machine, direction), queued, arrived.get((rank, number), 0.0))
            times.append(now)
        left.append(tuple(times))
    return SimulatedPass(direction, schedule, timeline, tuple(left))
