"""Both passes of a plan, simulated for every rank, and a picture of when ranks compute and receive messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from longspan.errors import PlanError
from longspan.formatting import SECOND_UNITS, bytes_text, seconds_text, unit_of
from longspan.planning.cost import live_bytes
from longspan.planning.machine import Machine, queued_at, steps_work
from longspan.planning.plan import Plan
from longspan.planning.simulator import Event, Timeline, simulate
from longspan.planning.steps import Schedule
from longspan.spans import Ints
from longspan.viz.scene import (
    BACKWARD,
    FAR,
    FORWARD,
    LANE,
    MARGIN,
    MUTED,
    NEAR,
    ON_DARK,
    ON_LIGHT,
    SMALL,
    WIDTH,
    Key,
    Scene,
    headed,
    legend_row,
    picture,
    shown_ranks,
    tick_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# -- simulated passes --------------------------------------------------------------------------------------------------

MAX_RANKS = 128
"""Most ranks whose steps are drawn one by one: simulating 256 takes half a minute."""


@dataclass(frozen=True, eq=False)
class SimulatedPass:
    """One pass: its schedule, its simulated timeline, and when each rank leaves each step."""

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
    """Simulate forward and backward of the plan."""
    size = plan.layout.world_size
    if size > MAX_RANKS:
        raise PlanError(
            f"`plan` must have at most {MAX_RANKS} ranks for a picture of every rank's steps, but got {plan!r} with"
            f" {size}. Plan for {MAX_RANKS} ranks or fewer; masks and layouts are drawn for any number."
        )
    return _simulate_pass(plan, "forward"), _simulate_pass(plan, "backward")


def _simulate_pass(plan: Plan, direction: str) -> SimulatedPass:
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
            pack, compute, unpack = work.parts(plan.machine, direction)
            now = max(max(now + pack + compute, arrived.get((rank, number), 0.0)) + unpack, queued)
            times.append(now)
        left.append(tuple(times))
    return SimulatedPass(direction, schedule, timeline, tuple(left))


def pass_axes(
    scene: Scene, both: tuple[SimulatedPass, SimulatedPass], left: float, right: float, top: float, height: float,
    lanes: int,
) -> Iterator[tuple[SimulatedPass, Axes, float]]:  # fmt: skip
    """Yield each pass with axes as wide as its time, `lanes` lanes from the top, and the seconds of a pixel.

    Times are in seconds; the labels of the time axis are in the unit of the longer pass.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit, weight = unit_of(max(run.timeline.seconds for run in both), SECOND_UNITS)
    total, room = sum(run.timeline.seconds for run in both) or 1.0, right - left - 28
    for run in both:
        width = max(room * run.timeline.seconds / total, 1.0)
        end = run.timeline.seconds or 1.0
        axes = scene.axes(left, top, width, height, xlim=(0, end), ylim=(lanes, 0), has_frame=False)
        ticks = MaxNLocator(max(int(width / 80), 1), steps=[1, 2, 2.5, 5, 10]).tick_values(0, end / weight)
        axes.set_xticks([tick * weight for tick in ticks if 0 <= tick <= end / weight * 1.0001])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value / weight)))
        axes.tick_params(axis="x", length=4)
        axes.set_xlabel(f"{run.direction}: time in {unit}" if width > 60 else "")
        yield run, axes, end / width
        left += width + 28


# -- the picture -------------------------------------------------------------------------------------------------------

_LANES = 64
_ABOUT = "One lane per rank: upper bars are computes, lower bars are messages that reach the rank."


@picture
def timeline_picture(plan: Plan, *, title: str | None = None) -> Scene:
    """Draw when every rank computes and receives, simulated on the plan's machine; both passes on one scale."""
    both, size, machine = runs(plan), plan.layout.world_size, plan.machine
    slowest = {run.timeline.finished.index(max(run.timeline.finished)) for run in both}
    ranks = shown_ranks(size, _LANES, slowest)
    times = ", ".join(f"{run.direction} {seconds_text(run.timeline.seconds)}" for run in both)
    remarks = [f"{times} on {machine.name} (simulated, not run); upper bars compute, lower bars receive."]
    if len(ranks) < size:
        remarks.append(f"{len(ranks)} of {size} ranks are drawn, the slowest among them.")
    scene, top = headed(title or f"Timeline: {plan.scheme.name}", remarks, _ABOUT)

    keys: list[Key] = [("computes, forward", FORWARD, 1.0), ("computes, backward", BACKWARD, 1.0)]
    levels = {_is_far(event, machine) for run in both for event in run.timeline.events if event.peer >= 0}
    if False in levels:
        text = "messages" if size <= machine.node else f"messages inside a node of {machine.node}"
        keys.append((text, NEAR, 1.0))
    if True in levels:
        keys.append(("messages between nodes", FAR, 1.0))
    top = legend_row(scene, MARGIN, top + 4, [*keys, ("waits, or packs messages", LANE, 1.0)]) + 12

    left, right = MARGIN + 62, WIDTH - MARGIN - 52
    lane = 36.0 if len(ranks) <= 8 else 22.0 if len(ranks) <= 16 else 14.0 if len(ranks) <= 32 else 10.0
    row = {rank: order for order, rank in enumerate(ranks)}
    pad = (3.0 if lane > 20 else 1.0) / lane
    height = (1 - 2 * pad) * 0.6
    busy = dict.fromkeys(ranks, 0.0)
    for run, axes, pixel in pass_axes(scene, both, left, right, top, lane * len(ranks), len(ranks)):
        scene.boxes(axes, [(0, y + pad, run.timeline.seconds, 1 - 2 * pad) for y in row.values()], [LANE])
        color, label = (FORWARD, ON_DARK) if run.direction == "forward" else (BACKWARD, ON_LIGHT)
        for event in run.timeline.events:
            if event.kind != "compute" or event.rank not in row:
                continue
            busy[event.rank] += event.stop - event.start
            note = f"rank {event.rank}, step {event.step}: computes {seconds_text(event.stop - event.start)}"
            width = (event.stop - event.start) / pixel
            width = max(width - 1.0, 1.0) if width < 3 or lane > 12 else width - 0.5  # a gap between steps
            y = row[event.rank] + pad
            scene.box(axes, event.start, y, width * pixel, height, color, note=note)
            text = f"step {event.step}"
            if lane > 20 and scene.text_width(text, 10) < width - 6:
                scene.text(event.start + 4 * pixel, y + height / 2, text, 10, label, axes=axes)
        for rank, is_far, start, stop, note, text in _messages(run, machine, row):
            y = row[rank] + pad + height + 1 / lane
            tall, width = 1 - 2 * pad - height - 1 / lane, max(stop - start, pixel)
            scene.box(axes, start, y, width, tall, FAR if is_far else NEAR, note=note)
            if lane > 30 and scene.text_width(text, 10) < width / pixel - 6:
                scene.text(start + 3 * pixel, y + tall / 2, text, 10, ON_DARK, axes=axes)

    total = sum(run.timeline.seconds for run in both) or 1.0
    scene.text(right + 8, top - 8, "busy", SMALL, MUTED)
    for order in range(0, len(ranks), 1 if lane > 12 else 4):
        y = top + lane * (order + 0.5) + 4
        scene.text(left - 8, y, f"rank {ranks[order]}", SMALL, MUTED, "right")
        scene.text(right + 8, y, f"{100 * busy[ranks[order]] / total:.0f}%", SMALL, MUTED)
    scene.height = top + lane * len(ranks) + 52
    return scene


def _is_far(event: Event, machine: Machine) -> bool:
    return machine.level(event.peer, event.rank) > 0


def _messages(
    run: SimulatedPass, machine: Machine, row: dict[int, int]
) -> Iterator[tuple[int, bool, float, float, str, str]]:
    """Yield the messages that a rank gets in one step over one kind of link, joined where they overlap in time."""
    groups: dict[tuple[int, int, bool], list[Event]] = {}
    for event in run.timeline.events:
        if event.kind == "message" and event.rank in row:
            groups.setdefault((event.rank, event.step, _is_far(event, machine)), []).append(event)
    for (rank, step, is_far), events in groups.items():
        peers = sorted({event.peer for event in events})
        num_bytes = bytes_text(sum(event.num_bytes for event in events))
        names = ", ".join(map(str, peers)) if len(peers) <= 4 else f"{len(peers)} ranks"
        joined: list[list[float]] = []
        for start, stop in sorted((event.start, event.stop) for event in events):
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], stop)
            else:
                joined.append([start, stop])
        for start, stop in joined:
            yield rank, is_far, start, stop, f"rank {rank}, step {step}: {num_bytes} from {names}", f"from {names}"
