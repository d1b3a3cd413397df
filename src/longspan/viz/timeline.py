"""A picture of a plan in time: for each rank when it computes and when messages reach it, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from longspan.formatting import SECOND_UNITS, bytes_text, seconds_text, unit_of
from longspan.planning.machine import Machine
from longspan.planning.plan import Plan
from longspan.planning.simulator import Event
from longspan.viz.layout import SimulatedPass, runs
from longspan.viz.scene import (
    BACKWARD,
    FAR,
    FORWARD,
    MARGIN,
    NEAR,
    SMALL,
    WIDTH,
    Key,
    Rect,
    Scale,
    Scene,
    Text,
    bottom_axis,
    headed,
    legend_row,
    nice_ticks,
    shown_ranks,
    text_width,
)

_LANES = 64
_GAP = 28.0


def timeline_picture(plan: Plan, *, title: str | None = None) -> Scene:
    """When every rank computes and receives, simulated on the plan's machine; forward and backward on one scale."""
    both = runs(plan)
    slowest = {run.timeline.finished.index(max(run.timeline.finished)) for run in both}
    ranks = shown_ranks(plan.layout.world_size, _LANES, slowest)
    scene, top = headed(title or f"Timeline: {plan.scheme.name}", _remarks(plan, both, len(ranks)), _ABOUT)
    top = legend_row(scene, MARGIN, top + 4, _keys(plan, both)) + 12
    left, right = MARGIN + 62, WIDTH - MARGIN - 52
    total = sum(run.timeline.seconds for run in both) or 1.0
    lane = 36.0 if len(ranks) <= 8 else 22.0 if len(ranks) <= 16 else 14.0 if len(ranks) <= 32 else 10.0
    bottom = top + lane * len(ranks)
    unit, size = unit_of(max(run.timeline.seconds for run in both), SECOND_UNITS)
    begin = left
    for run in both:
        wide = (right - left - _GAP) * run.timeline.seconds / total
        x = Scale(0.0, run.timeline.seconds, begin, begin + wide)
        _panel(scene, run, plan.machine, x, top, lane, ranks)
        scale = Scale(0.0, run.timeline.seconds / size, begin, begin + wide)
        ticks = nice_ticks(run.timeline.seconds / size, max(int(wide / 80), 1))
        bottom_axis(scene, scale, bottom, ticks, f"{run.direction}: time in {unit}")
        begin += wide + _GAP
    _labels(scene, both, ranks, left, right, top, lane)
    scene.height = bottom + 52
    return scene


_ABOUT = "One lane per rank: upper bars are computes, lower bars are messages that reach the rank."


def _remarks(plan: Plan, both: tuple[SimulatedPass, SimulatedPass], num_shown: int) -> list[str]:
    parts = [f"{run.direction} {seconds_text(run.timeline.seconds)}" for run in both]
    words = f"{', '.join(parts)} on {plan.machine.name} (simulated, not run); upper bars compute, lower bars receive."
    size = plan.layout.world_size
    return [words, *([f"{num_shown} of {size} ranks are drawn, the slowest among them."] if num_shown < size else [])]


def _keys(plan: Plan, both: tuple[SimulatedPass, SimulatedPass]) -> list[Key]:
    keys: list[Key] = [("computes, forward", FORWARD, 1.0), ("computes, backward", BACKWARD, 1.0)]
    levels = {_is_far(event, plan.machine) for run in both for event in run.timeline.events if event.peer >= 0}
    alone = plan.layout.world_size <= plan.machine.node
    near = "messages" if alone else f"messages inside a node of {plan.machine.node}"
    keys += [(near, NEAR, 1.0)] if False in levels else []
    keys += [("messages between nodes", FAR, 1.0)] if True in levels else []
    return [*keys, ("waits, or packs messages", "lane", 1.0)]


def _is_far(event: Event, machine: Machine) -> bool:
    return machine.level(event.peer, event.rank) > 0


def _panel(
    scene: Scene, run: SimulatedPass, machine: Machine, x: Scale, top: float, lane: float, ranks: list[int]
) -> None:
    row = {rank: top + lane * order for order, rank in enumerate(ranks)}
    pad = 3.0 if lane > 20 else 1.0
    tall = (lane - 2 * pad) * 0.6
    for y in row.values():
        scene.add(Rect(x.start, y + pad, x.stop - x.start, lane - 2 * pad, "lane"))
    color, label = (FORWARD, "#ffffff") if run.direction == "forward" else (BACKWARD, "#1f2328")
    for event in run.timeline.events:
        if event.kind == "compute" and event.rank in row:
            begin, wide = x(event.start), x(event.stop) - x(event.start)
            note = f"rank {event.rank}, step {event.step}: computes {seconds_text(event.stop - event.start)}"
            wide = max(wide - 1.0, 1.0) if wide < 3 or lane > 12 else wide - 0.5  # a gap between steps
            scene.add(Rect(begin, row[event.rank] + pad, wide, tall, color, note=note))
            words = f"step {event.step}"
            if lane > 20 and text_width(words, 10) < wide - 6:
                scene.add(Text(begin + 4, row[event.rank] + pad + tall / 2 + 4, words, 10, label))
    for rank, far, start, stop, note, words in _messages(run, machine, ranks):
        begin, wide = x(start), x(stop) - x(start)
        y = row[rank] + pad + tall + 1
        scene.add(Rect(begin, y, max(wide, 1.0), lane - 2 * pad - tall - 1, FAR if far else NEAR, note=note))
        if lane > 30 and text_width(words, 9) < wide - 6:
            scene.add(Text(begin + 3, y + 9, words, 9, "#ffffff"))


def _messages(
    run: SimulatedPass, machine: Machine, ranks: list[int]
) -> Iterator[tuple[int, bool, float, float, str, str]]:
    """Messages that a rank gets in one step over one kind of link, joined where they overlap."""
    groups: dict[tuple[int, int, bool], list[Event]] = {}
    for event in run.timeline.events:
        if event.kind == "message":
            groups.setdefault((event.rank, event.step, _is_far(event, machine)), []).append(event)
    shown = set(ranks)
    for (rank, step, far), events in groups.items():
        if rank not in shown:
            continue
        peers = sorted({event.peer for event in events})
        size = bytes_text(sum(event.num_bytes for event in events))
        names = ", ".join(map(str, peers)) if len(peers) <= 4 else f"{len(peers)} ranks"
        note = f"rank {rank}, step {step}: {size} from {names}"
        for start, stop in _joined([(event.start, event.stop) for event in events]):
            yield rank, far, start, stop, note, f"from {names}"


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _labels(
    scene: Scene,
    both: tuple[SimulatedPass, SimulatedPass],
    ranks: list[int],
    left: float,
    right: float,
    top: float,
    lane: float,
) -> None:
    total = sum(run.timeline.seconds for run in both) or 1.0
    every = 1 if lane > 12 else 4
    busy = dict.fromkeys(ranks, 0.0)
    for run in both:
        for event in run.timeline.events:
            if event.kind == "compute" and event.rank in busy:
                busy[event.rank] += event.stop - event.start
    scene.add(Text(right + 8, top - 4, "busy", SMALL, "muted"))
    for order, rank in enumerate(ranks):
        if order % every == 0:
            y = top + lane * (order + 0.5) + 4
            scene.add(Text(left - 8, y, f"rank {rank}", SMALL, "muted", "end"))
            scene.add(Text(right + 8, y, f"{100 * busy[rank] / total:.0f}%", SMALL, "muted"))
