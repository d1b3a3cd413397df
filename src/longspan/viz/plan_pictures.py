"""Pictures of a plan: its timeline, the bytes from rank to rank, and its memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from longspan.errors import PlanError
from longspan.formatting import BYTE_UNITS, SECOND_UNITS, bytes_text, seconds_text, three_digits, unit_of
from longspan.planning.cost import live_bytes
from longspan.planning.machine import Machine, queue_times, steps_work
from longspan.planning.plan import Plan
from longspan.planning.simulator import Event, Timeline, simulate
from longspan.planning.steps import Schedule
from longspan.spans import Ints, check_int
from longspan.viz.scene import (
    BACKWARD,
    FAR,
    FORWARD,
    HEAT,
    INK,
    LANE,
    MARGIN,
    MUTED,
    NEAR,
    NORMAL,
    ON_DARK,
    ON_LIGHT,
    SMALL,
    WIDTH,
    Key,
    Scene,
    begin_scene,
    legend_row,
    picture,
    rank_color,
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
    pairs_of = plan.scheme.problem.pairs_of
    timeline = simulate(schedule, plan.machine, pairs_of=pairs_of)
    arrived: dict[tuple[int, int], float] = {}
    for event in timeline.events:
        if event.kind == "message":
            for rank in (event.rank, event.peer):
                key = rank, event.step
                arrived[key] = max(arrived.get(key, 0.0), event.stop)
    left: list[tuple[float, ...]] = []
    for rank, steps in enumerate(schedule.ranks):
        now, times = 0.0, list[float]()
        works = steps_work(steps, rank, plan.sizes, plan.machine, direction, pairs_of=pairs_of)
        for number, (work, queued) in enumerate(zip(works, queue_times(works, plan.machine), strict=True)):
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
    scene, top = begin_scene(
        title or f"Timeline: {plan.scheme.name}",
        remarks,
        "One lane per rank: upper bars are computes, lower bars are messages that reach the rank.",
    )

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


_SIDE = 330.0
_NUMBERS, _NOTES = 8, 16
"""Most ranks whose cells have room for a number, and most whose cells have tooltips."""


def traffic(plan: Plan, direction: str) -> Ints:
    """Return the bytes from each rank (row) to each rank (column) in one pass.

    >>> from longspan import layouts, masks
    >>> from longspan.api import plan
    >>> ring = plan(masks.causal(), layouts.zigzag(64, 2), q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    >>> int(traffic(ring, "forward")[:, 0].sum()) == ring.bytes_received(0)
    True
    """
    schedule = runs(plan)[direction == "backward"].schedule
    num_bytes = np.zeros((schedule.world_size, schedule.world_size), dtype=np.int64)
    for _, transfer in schedule.transfers():
        num_bytes[transfer.src, transfer.dst] += transfer.piece.num_bytes(schedule.sizes)
    return num_bytes


@picture
def traffic_picture(plan: Plan, *, title: str | None = None) -> Scene:
    """Draw the bytes from rank to rank as two heat maps on one scale, with numbers in the cells of a few ranks."""
    both = {direction: traffic(plan, direction) for direction in ("forward", "backward")}
    most = int(max(matrix.max(initial=0) for matrix in both.values()))
    unit, weight = unit_of(float(most), BYTE_UNITS)
    sums = ", ".join(f"{name} {bytes_text(int(matrix.sum()))}" for name, matrix in both.items())
    remark = f"{sums} in all; a row sends, a column receives, bars show the sums."
    scene, top = begin_scene(
        title or f"Traffic: {plan.scheme.name}",
        [remark],
        "Two matrices, sender by receiver: the darker a cell, the more bytes go from one rank to the other.",
    )
    top += 50
    for number, (name, matrix) in enumerate(both.items()):
        left = MARGIN + 42 + number * (_SIDE + 92)
        _heat_map(scene, matrix, left, top, most, weight, plan.machine.node)
        scene.text(left + _SIDE / 2, top - 42, f"{name}, {unit}", NORMAL, align="center", bold=True)

    y, left, width, steps = top + _SIDE + 84, WIDTH / 2 - 120, 240.0, 24
    for i in range(steps):
        scene.box(scene.canvas, left + width * i / steps, y, width / steps, 10, HEAT, _opacity((i + 1) / steps))
    scene.text(left - 8, y + 9, "0", SMALL, MUTED, "right")
    scene.text(left + width + 8, y + 9, f"{bytes_text(most)} from one rank to another", SMALL, MUTED)
    scene.height = y + 32
    return scene


def _heat_map(scene: Scene, matrix: Ints, left: float, top: float, most: int, weight: float, node: int) -> None:
    size = len(matrix)
    cell = _SIDE / size
    axes = scene.axes(left, top, _SIDE, _SIDE, xlim=(0, size), ylim=(size, 0))
    labels = range(0, size, 1 if size <= 16 else 8 if size <= 64 else 16)
    axes.set_xticks([rank + 0.5 for rank in labels], [str(rank) for rank in labels])
    axes.set_yticks([rank + 0.5 for rank in labels], [str(rank) for rank in labels])
    axes.tick_params(length=0, pad=6, labelbottom=False, labeltop=True)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("receiving rank", labelpad=6)
    axes.set_ylabel("sending rank")

    side = 1 - 1 / cell if cell > 12 else 1.0  # a gap of a pixel
    cells = np.argwhere(matrix).tolist()
    if size > _NOTES:
        colors = [(HEAT, _opacity(int(matrix[src, dst]) / most)) for src, dst in cells]
        scene.boxes(axes, [(dst, src, side, side) for src, dst in cells], colors)
    else:
        for src, dst in cells:
            value = int(matrix[src, dst])
            note = f"rank {src} to rank {dst}: {bytes_text(value)}"
            scene.box(axes, dst, src, side, side, HEAT, _opacity(value / most), note)
            if size <= _NUMBERS:
                color = ON_DARK if value / most > 0.7 else INK
                number = three_digits(value / weight)
                scene.text(dst + 0.5, src + 0.5, number, min(SMALL, cell / 3.4), color, "center", axes=axes)
    if node < size <= 128:
        edges = range(node, size, node)
        axes.vlines(edges, 0, size, color=MUTED, linewidth=0.5)
        axes.hlines(edges, 0, size, color=MUTED, linewidth=0.5)

    # Bars of the sums: what a rank sends on the right, what it receives below, on one scale.
    sent, received = matrix.sum(axis=1), matrix.sum(axis=0)
    longest = max(int(sent.max(initial=0)), int(received.max(initial=0)), 1)
    pad = 1 / cell if cell > 4 else 0.0
    begin = size + 4 / cell
    for rank in range(size):
        lengths = [30 / cell * int(sums[rank]) / longest for sums in (sent, received)]
        sends, receives = (bytes_text(int(sums[rank])) for sums in (sent, received))
        scene.box(axes, begin, rank + pad, lengths[0], 1 - 2 * pad, HEAT, 0.7, f"rank {rank} sends {sends}")
        scene.box(axes, rank + pad, begin, 1 - 2 * pad, lengths[1], HEAT, 0.7, f"rank {rank} receives {receives}")
    least, highest = bytes_text(int(received.min())), bytes_text(int(received.max()))
    text = f"every rank receives {highest}" if least == highest else f"a rank receives {least} to {highest}"
    scene.text(left + _SIDE / 2, top + _SIDE + 52, text, SMALL, MUTED, "center")


def _opacity(share: float) -> float:
    return 0.12 + 0.88 * share


_FEW = 8
_LANE, _HEIGHT = 46.0, 260.0
_BINS = 400
_FAR = 4
"""A limit of more than this many times the peak is written, and not drawn: steps would be flat."""


@picture
def memory_picture(plan: Plan, *, title: str | None = None, limit_bytes: int | None = None) -> Scene:
    """Draw the bytes alive over simulated time: a lane for each of up to 8 ranks, else the range of all ranks.

    `limit_bytes` is what a device has left for these bytes. It is drawn as a line, or written if it is far above.
    """
    if limit_bytes is not None:
        limit_bytes = check_int(limit_bytes, "limit_bytes", "memory_picture()", PlanError, low=1)
    both, size = runs(plan), plan.layout.world_size
    peaks = [max(int(run.alive[rank].max(initial=0)) for run in both) for rank in range(size)]
    worst = peaks.index(max(peaks))
    workspace = next(reason for reason in plan.reasons if reason.chosen).workspace_bytes
    inside = "not known" if workspace is None else f"{bytes_text(workspace)} at most"
    remark = (
        f"peak {bytes_text(peaks[worst])} on rank {worst}, {bytes_text(min(peaks))} on the rank with least; in addition"
        f" to its own q, k, v, results and gradients, and to what kernels allocate inside ({inside}). Times are"
        " simulated."
    )
    high = float(peaks[worst])
    line = limit_bytes if limit_bytes is not None and limit_bytes <= _FAR * high else None
    if line is not None:
        high = max(high, line * 1.06)
    if limit_bytes is not None:
        where = "beyond this picture" if line is None else "the dashed line"
        remark += f" The device has {bytes_text(limit_bytes)} left for it ({where})."
    if size <= _FEW:
        remark += f" Each lane is {bytes_text(high)} high."
    scene, top = begin_scene(
        title or f"Memory: {plan.scheme.name}",
        [remark],
        "Bytes alive on each rank over the time of forward and backward.",
    )
    left, right = MARGIN + 64, WIDTH - MARGIN - 78
    if size <= _FEW:  # a lane for each rank; its upper edge is `high`
        pad = 3 / _LANE
        scale = (1 - 2 * pad) / (high or 1)
        for run, axes, _ in pass_axes(scene, both, left, right, top, _LANE * size, size):
            for rank in range(size):
                scene.box(axes, 0, rank + pad, run.timeline.seconds, 1 - 2 * pad, LANE)
                color, floor, start = rank_color(rank, size), rank + 1 - pad, 0.0
                for step, (stop, value) in enumerate(zip(run.left[rank], run.alive[rank].tolist(), strict=False)):
                    note = f"rank {rank}, {run.direction} step {step}: {bytes_text(value)}"
                    scene.box(axes, start, floor - value * scale, stop - start, value * scale, color, 0.8, note)
                    start = stop
                if line is not None:
                    y = floor - line * scale
                    axes.plot([0, run.timeline.seconds], [y, y], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        scene.text(right + 8, top - 2, "peak", SMALL, MUTED)
        for rank, peak in enumerate(peaks):
            y = top + _LANE * (rank + 0.5) + 4
            scene.text(left - 8, y, f"rank {rank}", SMALL, MUTED, "right")
            scene.text(right + 8, y, bytes_text(peak), SMALL)
        scene.height = top + _LANE * size + 52
        return scene

    # The range of all ranks, the median, and the rank that needs most.
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    keys = [(f"rank {worst}, which needs most", FAR, 1.0), ("median rank", FORWARD, 1.0)]
    top = legend_row(scene, MARGIN, top + 4, [*keys, (f"all {size} ranks", FORWARD, 0.25)]) + 14
    peak = peaks[worst]
    unit, weight = unit_of(float(peak), BYTE_UNITS)
    high = high * 1.08 or 1.0
    ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / weight)
    for number, (run, axes, _) in enumerate(pass_axes(scene, both, left, right, top, _HEIGHT, 1)):
        axes.patch.set(visible=True, alpha=0.5)
        axes.spines[:].set_visible(True)
        axes.set_ylim(0, high)
        axes.set_yticks([tick * weight for tick in ticks if 0 <= tick * weight <= high])
        axes.grid(axis="y")
        axes.tick_params(axis="y", length=4 * (number == 0), labelleft=number == 0, pad=3)
        if number == 0:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value / weight)))
            axes.set_ylabel(f"alive, {unit}")
        times = np.linspace(0.0, run.timeline.seconds, _BINS)
        steps = [np.append(alive[: len(ends)], 0) for alive, ends in zip(run.alive, run.left, strict=True)]
        at = [alive[np.searchsorted(ends, times, side="left")] for alive, ends in zip(steps, run.left, strict=True)]
        axes.fill_between(times, np.min(at, axis=0), np.max(at, axis=0), color=FORWARD, alpha=0.25, linewidth=0)
        axes.plot(times, np.median(at, axis=0), color=FORWARD, linewidth=1.6)
        ends = run.left[worst] or (0.0,)
        axes.step([0.0, *ends, ends[-1]], [steps[worst][0], *steps[worst]], where="pre", color=FAR, linewidth=1.8)
        axes.axhline(peak, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        if line is not None:
            axes.axhline(line, color=INK, linewidth=1.4, linestyle=(0, (5, 4)))
    y = top + _HEIGHT * (1 - peak / high)
    scene.text(right + 8, y, "peak", SMALL)
    scene.text(right + 8, y + 14, bytes_text(peak), SMALL)
    scene.height = top + _HEIGHT + 52
    return scene
