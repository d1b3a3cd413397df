"""A picture of the memory a plan needs in addition to a rank's own tensors, over the time of both passes."""

from __future__ import annotations

import numpy as np

from longspan.errors import PlanError
from longspan.formatting import BYTE_UNITS, bytes_text, unit_of
from longspan.planning.plan import Plan
from longspan.spans import check_int
from longspan.viz.scene import (
    FAR,
    FORWARD,
    INK,
    LANE,
    MARGIN,
    MUTED,
    SMALL,
    WIDTH,
    Scene,
    headed,
    legend_row,
    picture,
    rank_color,
    tick_text,
)
from longspan.viz.timeline import pass_axes, runs

_FEW = 8
_LANE, _HEIGHT = 46.0, 260.0
_BINS = 400
_FAR = 4
"""A limit of more than this many times the peak is written, and not drawn: steps would be flat."""
_ABOUT = "Bytes alive on each rank over the time of forward and backward."


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
    scene, top = headed(title or f"Memory: {plan.scheme.name}", [remark], _ABOUT)
    left, right = MARGIN + 64, WIDTH - MARGIN - 78
    if size <= _FEW:
        _draw_lanes(scene, plan, peaks, left, right, top, high, line)
        scene.height = top + _LANE * size + 52
        return scene
    keys = [(f"rank {worst}, which needs most", FAR, 1.0), ("median rank", FORWARD, 1.0)]
    top = legend_row(scene, MARGIN, top + 4, [*keys, (f"all {size} ranks", FORWARD, 0.25)]) + 14
    _draw_range(scene, plan, peaks[worst], worst, left, right, top, high, line)
    scene.height = top + _HEIGHT + 52
    return scene


def _draw_lanes(
    scene: Scene, plan: Plan, peaks: list[int], left: float, right: float, top: float, high: float, limit: int | None
) -> None:
    """Draw one lane per rank, all on the same scale, whose upper edge is `high`."""
    size, pad = len(peaks), 3 / _LANE
    unit = (1 - 2 * pad) / (high or 1)
    for run, axes, _ in pass_axes(scene, runs(plan), left, right, top, _LANE * size, size):
        for rank in range(size):
            scene.box(axes, 0, rank + pad, run.timeline.seconds, 1 - 2 * pad, LANE)
            color, floor, start = rank_color(rank, size), rank + 1 - pad, 0.0
            for step, (stop, value) in enumerate(zip(run.left[rank], run.alive[rank].tolist(), strict=False)):
                note = f"rank {rank}, {run.direction} step {step}: {bytes_text(value)}"
                scene.box(axes, start, floor - value * unit, stop - start, value * unit, color, 0.8, note)
                start = stop
            if limit is not None:
                y = floor - limit * unit
                axes.plot([0, run.timeline.seconds], [y, y], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    scene.text(right + 8, top - 2, "peak", SMALL, MUTED)
    for rank, peak in enumerate(peaks):
        y = top + _LANE * (rank + 0.5) + 4
        scene.text(left - 8, y, f"rank {rank}", SMALL, MUTED, "right")
        scene.text(right + 8, y, bytes_text(peak), SMALL)


def _draw_range(
    scene: Scene,
    plan: Plan,
    peak: int,
    worst: int,
    left: float,
    right: float,
    top: float,
    high: float,
    limit: int | None,
) -> None:
    """Draw the range of all ranks, the median, and the rank that needs most."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit, weight = unit_of(float(peak), BYTE_UNITS)
    high = high * 1.08 or 1.0
    ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / weight)
    ticks = [tick * weight for tick in ticks if 0 <= tick * weight <= high]
    for number, (run, axes, _) in enumerate(pass_axes(scene, runs(plan), left, right, top, _HEIGHT, 1)):
        axes.patch.set(visible=True, alpha=0.5)
        axes.spines[:].set_visible(True)
        axes.set_ylim(0, high)
        axes.set_yticks(ticks)
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
        if limit is not None:
            axes.axhline(limit, color=INK, linewidth=1.4, linestyle=(0, (5, 4)))
    y = top + _HEIGHT * (1 - peak / high)
    scene.text(right + 8, y, "peak", SMALL)
    scene.text(right + 8, y + 14, bytes_text(peak), SMALL)
