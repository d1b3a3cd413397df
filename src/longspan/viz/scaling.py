"""Curves over the number of ranks: time and bytes of each scheme, as the plan predicts them."""

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
    MARGIN,
    SERIES,
    SMALL,
    Line,
    Rect,
    Scale,
    Scene,
    Text,
    bottom_axis,
    frame,
    headed,
    text_width,
)

SCHEMES = ("auto", "exchange", "all_to_all", "ring", "all_gather")
CHOSEN = {"auto": "auto (what plan() takes)", "quickest": "quickest of all"}
"""Lines that lie upon another one's, and what the legend says of them."""
_TALL, _WIDE = 300.0, 320.0


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """What a plan predicts for one scheme on one number of ranks: bytes of the rank that receives most, and time
    and memory of ranks likely to be busiest."""

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
    """Plans of every scheme for every number of ranks, over balanced layouts unless `layout` makes others."""
    make = layout or (lambda mask, size: balanced(mask, world_size=size))
    points: list[ScalingPoint] = []
    for size in ranks:
        held = make(mask, size)
        for name in schemes:
            one = plan(mask, held, scheme=name, **sizes)
            reason = next(reason for reason in one.reasons if reason.chosen)
            points.append(ScalingPoint(name, size, reason.seconds, reason.bytes_received, reason.peak_bytes))
    return tuple(points)


def scaling_picture(
    points: Sequence[ScalingPoint], *, title: str = "Scaling", remark: str = "Simulated, not run."
) -> Scene:
    """Time, and bytes received, over the number of ranks, one line per scheme, on logarithmic axes."""
    if not points:
        raise PlanError("a picture of no points was asked for. Give scaling_points one number of ranks or more.")
    scene, top = headed(title, [remark], "Time and bytes of each scheme over the number of ranks.")
    top += 26
    names = list(dict.fromkeys(point.scheme for point in points))
    sides = (
        ("time, forward and backward", lambda point: point.seconds, seconds_text),
        ("most bytes received by a rank", lambda point: float(point.bytes_received), bytes_text),
    )
    for number, (label, value, text) in enumerate(sides):
        left = MARGIN + 62 + number * (_WIDE + 106)
        scene.add(Text(left, top - 8, label, SMALL, bold=True))
        _panel(scene, (left, top), points, names, value, text, ideal=number == 0)
    scene.height = _legend(scene, names, top + _TALL + 64) + 8
    return scene


def _panel(
    scene: Scene,
    corner: tuple[float, float],
    points: Sequence[ScalingPoint],
    names: list[str],
    value: Callable[[ScalingPoint], float],
    text: Callable[[float], str],
    ideal: bool,
) -> None:
    left, top = corner
    some = [value(point) for point in points if value(point) > 0] or [1.0]
    low, high = _outwards(min(some), max(some))
    ranks = sorted({point.ranks for point in points})
    x = Scale(math.log2(ranks[0]), math.log2(ranks[-1]), left + 10, left + _WIDE - 10)
    y = Scale(math.log10(low), math.log10(high), top + _TALL, top)
    scene.add(Rect(left, top, _WIDE, _TALL, "lane", 0.5))
    for tick in _log_ticks(low, high, base=10 if ideal else 2):
        at = y(math.log10(tick))
        scene.add(Line(((left, at), (left + _WIDE, at)), "grid", 0.7))
        scene.add(Text(left - 6, at + 4, _short(text(tick)), SMALL, "muted", "end"))
    every = max(1, math.ceil(len(ranks) / 8))
    bottom_axis(scene, x, top + _TALL, [math.log2(r) for r in ranks[::every]], "ranks", lambda t: f"{2**t:,.0f}")
    for name in sorted(names, key=lambda name: name not in CHOSEN):  # what was chosen lies below, wider
        mine = [p for p in sorted(points, key=lambda p: p.ranks) if p.scheme == name and value(p) > 0]
        line = tuple((x(math.log2(p.ranks)), y(math.log10(value(p)))) for p in mine)
        color = _color(name, names)
        side = 10.0 if name in CHOSEN else 5.0
        if len(line) > 1:
            scene.add(Line(line, color, 8.0 if name in CHOSEN else 1.8))
        for at, p in zip(line, mine, strict=True):
            note = f"{name}, {p.ranks} ranks: {text(value(p))}"
            scene.add(Rect(at[0] - side / 2, at[1] - side / 2, side, side, color, note=note))
    if ideal and len(ranks) > 1:
        first = min(value(point) for point in points if point.ranks == ranks[0])
        ends = [(r, first * ranks[0] / r) for r in (ranks[0], min(ranks[-1], ranks[0] * first / low))]
        scene.add(Line(tuple((x(math.log2(r)), y(math.log10(v))) for r, v in ends), "muted", 1, dashed=True))
    frame(scene, left, top, left + _WIDE, top + _TALL)


def _color(name: str, names: list[str]) -> str:
    others = [other for other in names if other not in CHOSEN]
    return "#aab4bf" if name in CHOSEN else SERIES[others.index(name) % len(SERIES)]


def _legend(scene: Scene, names: list[str], y: float) -> float:
    """Which line is which, in as many rows as fit the picture; gives the height below them."""
    first = at = MARGIN + 62
    for name in [*names, None]:
        words = "ideal" if name is None else CHOSEN.get(name) or name
        wide = 26 + text_width(words, SMALL) + 20
        if at > first and at + wide > scene.width - MARGIN:
            at, y = first, y + 18
        color = "muted" if name is None else _color(name, names)
        width = 1.0 if name is None else 8.0 if name in CHOSEN else 2.0
        scene.add(Line(((at, y - 4), (at + 20, y - 4)), color, width, dashed=name is None))
        scene.add(Text(at + 26, y, words, SMALL))
        at += wide
    return y + 18


def _outwards(low: float, high: float) -> tuple[float, float]:
    """The range, wider by a little on a logarithmic scale."""
    room = 10 ** (0.06 * max(math.log10(high / low), 0.5))
    return low / room, high * room


def _log_ticks(low: float, high: float, base: int) -> list[float]:
    """Round values in a range: 1, 2 and 5 times powers of ten, or powers of two, fewer in a wide range."""
    if base == 2:
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        return [2.0**power for power in powers][:: max(1, math.ceil(len(powers) / 7))]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 2.2 else (1,)
    return [factor * 10.0**d for d in decades for factor in factors if low <= factor * 10.0**d <= high]


def _short(text: str) -> str:
    """A tick's words without zeros after the point."""
    value, unit = text.split(" ")
    return f"{float(value):g} {unit}"
