"""Time, bytes and memory of each scheme, as plans predict them: curves over the number of ranks, or bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.api import plan
from longspan.errors import PlanError
from longspan.formatting import bytes_text, seconds_text
from longspan.layouts import Layout, balanced
from longspan.masks import Mask
from longspan.viz.scene import (
    FAR,
    FORWARD,
    LANE,
    MARGIN,
    MUTED,
    SERIES,
    SMALL,
    WIDTH,
    Scene,
    begin_scene,
    legend_row,
    picture,
)

SCHEMES = ("auto", "exchange", "all_to_all", "ring", "all_gather")
CHOSEN = {"auto": "auto (what plan() takes)"}
"""Lines that lie on top of another scheme's, and their names in the legend."""
_HEIGHT, _WIDTH = 300.0, 320.0
_ROW, _BAR, _VALUE = 21.0, 13.0, 62.0
"""Height of a row of bars and of a bar; room for the value next to a bar."""


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The predictions of a plan for one scheme on one number of ranks: time of all ranks, bytes of the rank that
    receives most, and memory of ranks likely to be busiest. Schemes of PyTorch begin with its name."""

    scheme: str
    ranks: int
    seconds: float
    bytes_received: int
    peak_bytes: int


def scaling_points(
    mask: Mask,
    ranks: Iterable[int],
    *,
    schemes: Sequence[str] = SCHEMES,
    layout: Callable[[Mask, int], Layout] | None = None,
    **sizes: Any,
) -> tuple[ScalingPoint, ...]:
    """Plan every scheme for every number of ranks, over balanced layouts unless `layout` returns others."""
    build = layout or (lambda mask, size: balanced(mask, world_size=size))
    points: list[ScalingPoint] = []
    for size in ranks:
        held = build(mask, size)
        for name in schemes:
            reason = next(reason for reason in plan(mask, held, scheme=name, **sizes).reasons if reason.chosen)
            points.append(ScalingPoint(name, size, reason.seconds, reason.bytes_received, reason.peak_bytes))
    return tuple(points)


@picture
def scaling_picture(
    points: Sequence[ScalingPoint], *, title: str = "Scaling", remark: str = "Simulated, not run."
) -> Scene:
    """Draw time, and bytes received, over the number of ranks, one line per scheme, on logarithmic axes."""
    if not points:
        raise PlanError("`points` must hold at least one point, but got none. Pass scaling_points a number of ranks.")
    scene, top = begin_scene(title, [remark], "Time and bytes of each scheme over the number of ranks.")
    top += 26
    left = MARGIN + 62
    names = list(dict.fromkeys(point.scheme for point in points))
    others = [name for name in names if name not in CHOSEN]
    colors = {name: SERIES[i % len(SERIES)] for i, name in enumerate(others)} | dict.fromkeys(CHOSEN, "#aab4bf")
    _panel(scene, left, top, points, colors, is_time=True)
    _panel(scene, left + _WIDTH + 106, top, points, colors, is_time=False)

    x, y = left, top + _HEIGHT + 64
    for name in [*names, "ideal"]:
        text = CHOSEN.get(name) or name
        width = 26 + scene.text_width(text, SMALL) + 20
        if x > left and x + width > scene.width - MARGIN:
            x, y = left, y + 18
        scene.canvas.plot([x, x + 20], [y - 4, y - 4], **_line(name, colors))
        scene.text(x + 26, y, text, SMALL)
        x += width
    scene.height = y + 26
    return scene


@picture
def bars_picture(
    points: Sequence[ScalingPoint], *, title: str = "Schemes", remark: str = "Simulated, not run."
) -> Scene:
    """Draw bars of time, bytes received and memory, one row per point, for each number of ranks in turn.

    Rows keep the order of `points`; those of PyTorch, whose names begin with it, have another colour.
    """
    if not points:
        raise PlanError("`points` must hold at least one point, but got none. Pass one for each scheme.")
    scene, top = begin_scene(title, [remark], "Time, bytes and memory of each scheme, as bars.")
    keys = [("Longspan", FORWARD, 1.0), ("PyTorch", FAR, 1.0)]
    top = legend_row(scene, MARGIN, top + 6, keys) + 6
    names = max(scene.text_width(point.scheme, SMALL) for point in points)
    left = MARGIN + min(names * 1.15, WIDTH / 3) + 12
    panel = (WIDTH - MARGIN - left) / 3
    for ranks in dict.fromkeys(point.ranks for point in points):
        mine = [point for point in points if point.ranks == ranks]
        scene.text(MARGIN, top + 10, f"{ranks:,} ranks" if ranks > 1 else "1 rank", SMALL, bold=True)
        columns = (
            ("time, both passes", [point.seconds for point in mine], seconds_text),
            ("most bytes received", [float(point.bytes_received) for point in mine], bytes_text),
            ("memory beyond own tensors", [float(point.peak_bytes) for point in mine], bytes_text),
        )
        for number, point in enumerate(mine):
            scene.text(left - 10, top + 31 + _ROW * number, point.scheme, SMALL, align="right", bold=number == 0)
        for column, (head, values, text) in enumerate(columns):
            x, most = left + panel * column, max(values) or 1.0
            scene.text(x, top + 10, head, SMALL, bold=True)
            for number, (point, value) in enumerate(zip(mine, values, strict=True)):
                y, full = top + 20 + _ROW * number, panel - _VALUE
                color = FAR if point.scheme.startswith("PyTorch") else FORWARD
                scene.box(scene.canvas, x, y, full, _BAR, LANE)
                note = f"{point.scheme}, {ranks} ranks, {head}: {text(value)}"
                scene.box(scene.canvas, x, y, max(full * value / most, 1.0), _BAR, color, note=note)
                scene.text(x + full + 6, y + 11, text(value), SMALL, MUTED)
        top += 20 + _ROW * len(mine) + 18
    scene.height = top
    return scene


def _line(name: str, colors: dict[str, str]) -> dict[str, Any]:
    """Return the style of a scheme's line, or of the ideal."""
    if name not in colors:
        return {"color": MUTED, "linewidth": 1, "linestyle": (0, (5, 4))}
    # A chosen scheme's line is wide, under the others. PyTorch's are dashed, above ours, which may be equal.
    wide, is_theirs = name in CHOSEN, name.startswith("PyTorch")
    return {
        "color": colors[name],
        "linewidth": 6 if wide else 1.8,
        "alpha": 0.55 if wide else 1,
        "solid_capstyle": "butt",
        "linestyle": (0, (3, 1.5)) if is_theirs else "-",
        "zorder": 1.5 if wide else 2.5 if is_theirs else 2,
    }


def _panel(
    scene: Scene, left: float, top: float, points: Sequence[ScalingPoint], colors: dict[str, str], *, is_time: bool
) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    def value(point: ScalingPoint) -> float:
        return point.seconds if is_time else float(point.bytes_received)

    def label(tick: float) -> str:
        number, unit = text(tick).split(" ")
        return f"{float(number):g} {unit}"

    text = seconds_text if is_time else bytes_text
    some = [value(point) for point in points if value(point) > 0] or [1.0]
    room = 10 ** (0.06 * max(math.log10(max(some) / min(some)), 0.5))
    low, high = min(some) / room, max(some) * room
    ranks = sorted({point.ranks for point in points})
    margin = (ranks[-1] / ranks[0]) ** (10 / (_WIDTH - 20)) if len(ranks) > 1 else 1.5
    axes = scene.axes(left, top, _WIDTH, _HEIGHT)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10 if is_time else 2)
    axes.set(xlim=(ranks[0] / margin, ranks[-1] * margin), ylim=(low, high), xlabel="ranks")
    subs = (1.0, 2.0, 5.0) if is_time and high / low < 10**2.2 else (1.0,)
    locator = LogLocator(base=10 if is_time else 2, subs=subs, numticks=12 if is_time else 8)
    ticks = [tick for tick in locator.tick_values(low, high) if low <= tick <= high]
    axes.set_yticks(ticks, [label(tick) for tick in ticks])
    numbers = ranks[:: max(1, math.ceil(len(ranks) / 8))]
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="y", length=0, pad=6)
    axes.patch.set_alpha(0.5)
    axes.grid(axis="y")
    title = "time, forward and backward" if is_time else "most bytes received by a rank"
    scene.text(left, top - 8, title, SMALL, bold=True)

    for name in dict.fromkeys(point.scheme for point in points):
        mine = sorted((p for p in points if p.scheme == name and value(p) > 0), key=lambda p: p.ranks)
        style = _line(name, colors)
        axes.plot([p.ranks for p in mine], [value(p) for p in mine], **style)
        for p in mine:  # one by one, for their tooltips
            size = 9 if name in CHOSEN else 5
            kind = {key: style[key] for key in ("color", "alpha", "zorder")}
            marker = axes.plot([p.ranks], [value(p)], "s", markersize=size, **kind)
            marker[0].set(gid=f"note{len(scene.notes)}", markeredgewidth=0)
            scene.notes.append(f"{name}, {p.ranks} ranks: {text(value(p))}")
    if is_time and len(ranks) > 1:
        first = min(value(point) for point in points if point.ranks == ranks[0])
        last = min(ranks[-1], ranks[0] * first / low)
        axes.plot([ranks[0], last], [first, first * ranks[0] / last], **_line("ideal", colors))
