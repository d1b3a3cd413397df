"""A picture of the memory a plan needs beside a rank's own tensors, over the time of both passes."""

from __future__ import annotations

import numpy as np

from longspan.formatting import BYTE_UNITS, SECOND_UNITS, bytes_text, unit_of
from longspan.planning.plan import Plan
from longspan.viz.layout import SimulatedPass, runs
from longspan.viz.scene import (
    FAR,
    FORWARD,
    MARGIN,
    SMALL,
    WIDTH,
    Area,
    Key,
    Line,
    Point,
    Rect,
    Scale,
    Scene,
    Text,
    bottom_axis,
    frame,
    headed,
    left_axis,
    legend_row,
    nice_ticks,
    rank_color,
)

_TALL = 260.0
_LANE = 46.0
_GAP = 28.0
_FEW = 8
_BINS = 400


def memory_picture(plan: Plan, *, title: str | None = None) -> Scene:
    """Bytes alive on the ranks over simulated time: a lane for each of a few ranks, else the range of all of them."""
    both = runs(plan)
    size = plan.layout.world_size
    peaks = [max(int(run.alive[rank].max(initial=0)) for run in both) for rank in range(size)]
    worst = peaks.index(max(peaks))
    remark = (
        f"peak {bytes_text(peaks[worst])} on rank {worst}, {bytes_text(min(peaks))} on the rank with least; beside its"
        f" own q, k, v, results and gradients, and what kernels allocate inside ({_inside(plan)}). Times are simulated."
    )
    scene, top = headed(title or f"Memory: {plan.scheme.name}", [remark], _ABOUT)
    left, right = MARGIN + 64, WIDTH - MARGIN - 78
    if size > _FEW:
        top = legend_row(scene, MARGIN, top + 4, _keys(size, worst)) + 14
    tall = _TALL if size > _FEW else _LANE * size
    unit, seconds = unit_of(max(run.timeline.seconds for run in both), SECOND_UNITS)
    total = sum(run.timeline.seconds for run in both) or 1.0
    begin = left
    for run in both:
        wide = (right - left - _GAP) * run.timeline.seconds / total
        x = Scale(0.0, run.timeline.seconds, begin, begin + wide)
        if size > _FEW:
            _range(scene, run, x, top, peaks, worst)
        else:
            _lanes(scene, run, x, top, peaks)
        scale = Scale(0.0, run.timeline.seconds / seconds, begin, begin + wide)
        ticks = nice_ticks(scale.high, max(int(wide / 80), 1))
        bottom_axis(scene, scale, top + tall, ticks, f"{run.direction}: time in {unit}")
        begin += wide + _GAP
    if size > _FEW:
        _bytes_axis(scene, left, top, peaks[worst])
    else:
        _names(scene, left, right, top, peaks)
    scene.height = top + tall + 52
    return scene


def _inside(plan: Plan) -> str:
    chosen = next(reason for reason in plan.reasons if reason.chosen)
    return "not known" if chosen.workspace_bytes is None else f"{bytes_text(chosen.workspace_bytes)} at most"


_ABOUT = "Bytes alive on each rank over the time of forward and backward."


def _names(scene: Scene, left: float, right: float, top: float, peaks: list[int]) -> None:
    scene.add(Text(right + 8, top - 2, "peak", SMALL, "muted"))
    for rank, peak in enumerate(peaks):
        y = top + _LANE * (rank + 0.5) + 4
        scene.add(Text(left - 8, y, f"rank {rank}", SMALL, "muted", "end"))
        scene.add(Text(right + 8, y, bytes_text(peak), SMALL, "ink"))


def _lanes(scene: Scene, run: SimulatedPass, x: Scale, top: float, peaks: list[int]) -> None:
    """One lane per rank, all with the same scale, whose upper edge is the largest peak."""
    size = len(peaks)
    for rank in range(size):
        y = Scale(0.0, float(max(peaks)) or 1.0, top + _LANE * (rank + 1) - 3, top + _LANE * rank + 3)
        scene.add(Rect(x.start, y.stop, x.stop - x.start, y.start - y.stop, "lane"))
        color, start = rank_color(rank, size), 0.0
        for step, (stop, value) in enumerate(zip(run.left[rank], run.alive[rank].tolist(), strict=False)):
            note = f"rank {rank}, {run.direction} step {step}: {bytes_text(value)}"
            scene.add(Rect(x(start), y(value), x(stop) - x(start), y.start - y(value), color, 0.8, note))
            start = stop


def _keys(size: int, worst: int) -> list[Key]:
    return [
        (f"rank {worst}, which needs most", FAR, 1.0),
        ("median rank", FORWARD, 1.0),
        (f"all {size} ranks", FORWARD, 0.25),
    ]


def _high(peak: int) -> float:
    return peak * 1.08 or 1.0


def _bytes_axis(scene: Scene, left: float, top: float, peak: int) -> None:
    unit, weight = unit_of(float(peak), BYTE_UNITS)
    scale = Scale(0.0, _high(peak) / weight, top + _TALL, top)
    left_axis(scene, scale, left, nice_ticks(scale.high, 4), f"alive, {unit}")
    at = scale(peak / weight)
    scene.add(Text(WIDTH - MARGIN - 72, at, "peak", SMALL), Text(WIDTH - MARGIN - 72, at + 14, bytes_text(peak), SMALL))


def _range(scene: Scene, run: SimulatedPass, x: Scale, top: float, peaks: list[int], worst: int) -> None:
    """The range of all ranks, the median, and the rank that needs most."""
    peak, size = peaks[worst], len(peaks)
    y = Scale(0.0, _high(peak), top + _TALL, top)
    weight = unit_of(float(peak), BYTE_UNITS)[1]
    scene.add(Rect(x.start, top, x.stop - x.start, _TALL, "lane", 0.5))
    for tick in nice_ticks(_high(peak) / weight, 4):
        scene.add(Line(((x.start, y(tick * weight)), (x.stop, y(tick * weight))), "grid", 0.7))
    times = np.linspace(0.0, run.timeline.seconds, _BINS)
    alive = np.stack([_at(run, rank, times) for rank in range(size)])
    there, back = _points(times, alive.max(axis=0), x, y), _points(times, alive.min(axis=0), x, y)[::-1]
    scene.add(Area((*there, *back), FORWARD, 0.25))
    scene.add(Line(_points(times, np.median(alive, axis=0), x, y), FORWARD, 1.6))
    scene.add(Line(_stairs(run, worst, x, y), FAR, 1.8))
    scene.add(Line(((x.start, y(peak)), (x.stop, y(peak))), "muted", 1, dashed=True))
    frame(scene, x.start, top, x.stop, top + _TALL)


def _points(times: np.ndarray, values: np.ndarray, x: Scale, y: Scale) -> tuple[Point, ...]:
    return tuple((x(time), y(value)) for time, value in zip(times.tolist(), values.tolist(), strict=True))


def _at(run: SimulatedPass, rank: int, times: np.ndarray) -> np.ndarray:
    """The rank's bytes at each time; nothing after it has finished."""
    alive = np.append(run.alive[rank][: len(run.left[rank])], 0)
    return alive[np.searchsorted(np.array(run.left[rank]), times, side="left")]


def _stairs(run: SimulatedPass, rank: int, x: Scale, y: Scale) -> tuple[Point, ...]:
    """The rank's bytes, constant within a step."""
    points: list[Point] = []
    start = 0.0
    for stop, value in zip(run.left[rank], run.alive[rank].tolist(), strict=False):
        points += [(x(start), y(value)), (x(stop), y(value))]
        start = stop
    return (*points, (x(start), y(0.0))) if points else ((x(0.0), y(0.0)), (x(0.0), y(0.0)))
