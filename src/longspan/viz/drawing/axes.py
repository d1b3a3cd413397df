"""What pictures share: a head with title and remarks, axes with units, legends, and words for numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from longspan.viz.drawing.colors import rank_color
from longspan.viz.drawing.scene import Line, Rect, Scene, Text, clipped, text_width, wrapped

WIDTH = 860.0
MARGIN = 20.0
SMALL = 11.0
NORMAL = 12.0


def nice_ticks(most: float, num: int = 5) -> list[float]:
    """Round numbers from 0 up to `most`, about `num` steps.

    >>> nice_ticks(10.0, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if most <= 0:
        return [0.0]
    raw = most / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    return [step * i for i in range(int(most / step * 1.0001) + 1)]


def position_ticks(seq_len: int, num: int = 4) -> list[int]:
    """Positions to mark: quarters of a length that has them, else round numbers."""
    if seq_len <= num:
        return list(range(seq_len + 1))
    if seq_len % num == 0 and (seq_len // num) % 32 == 0:
        return [seq_len // num * i for i in range(num + 1)]
    return sorted({int(tick) for tick in nice_ticks(float(seq_len), num)})


def tick_text(value: float) -> str:
    """A tick without needless decimals.

    >>> tick_text(2.0), tick_text(0.25), tick_text(1500.0)
    ('2', '0.25', '1,500')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Data values as pixels."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.stop - self.start)


def headed(title: str, remarks: Iterable[str], about: str, width: float = WIDTH) -> tuple[Scene, float]:
    """A scene with its title and remarks written, and the height at which the picture begins."""
    scene = Scene(width, 0, title, about)
    room = width - 2 * MARGIN
    scene.add(Text(MARGIN, 28, clipped(title, room, 16), 16, bold=True))
    y = 48.0
    for remark in remarks:
        for line in wrapped(remark, room, NORMAL)[:3]:
            scene.add(Text(MARGIN, y, line, NORMAL, "muted"))
            y += 17
    return scene, y + 6


def bottom_axis(
    scene: Scene, scale: Scale, y: float, ticks: Iterable[float], label: str, text: Callable[[float], str] = tick_text
) -> None:
    """Ticks and their words below a picture."""
    for tick in ticks:
        x = scale(tick)
        scene.add(Line(((x, y), (x, y + 4)), "muted"))
        scene.add(Text(x, y + 17, text(tick), SMALL, "muted", "middle"))
    scene.add(Text((scale.start + scale.stop) / 2, y + 35, label, NORMAL, "ink", "middle"))


def left_axis(
    scene: Scene, scale: Scale, x: float, ticks: Iterable[float], label: str, text: Callable[[float], str] = tick_text
) -> None:
    """Ticks and their words left of a picture, and the label upright beside them."""
    widest = 0.0
    for tick in ticks:
        y = scale(tick)
        widest = max(widest, text_width(text(tick), SMALL))
        scene.add(Line(((x - 4, y), (x, y)), "muted"))
        scene.add(Text(x - 7, y + 4, text(tick), SMALL, "muted", "end"))
    middle = (scale.start + scale.stop) / 2
    scene.add(Text(x - 14 - widest, middle, label, NORMAL, "ink", "middle", upright=True))


def frame(scene: Scene, x0: float, y0: float, x1: float, y1: float) -> None:
    """A thin border."""
    scene.add(Line(((x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)), "grid"))


Key = tuple[str, str, float]
"""Words, colour, opacity of a legend's entry."""


def legend_row(scene: Scene, x: float, y: float, keys: Iterable[Key], width: float = WIDTH - 2 * MARGIN) -> float:
    """Entries side by side, on further lines where they do not fit; gives the height below them."""
    at = x
    for words, color, opacity in keys:
        wide = 18 + text_width(words, SMALL) + 16
        if at > x and at + wide > x + width:
            at, y = x, y + 18
        scene.add(Rect(at, y - 9, 12, 10, color, opacity), Text(at + 17, y, words, SMALL))
        at += wide
    return y + 18


def rank_legend(scene: Scene, x: float, y: float, world_size: int, words: Sequence[str]) -> float:
    """Which colour stands for which rank: a list of a few, a scale of many; gives the height below it."""
    if world_size <= 8:
        for rank in range(world_size):
            scene.add(Rect(x, y - 9, 12, 10, rank_color(rank, world_size)), Text(x + 18, y, words[rank], SMALL))
            y += 18
        return y
    steps, tall = min(world_size, 64), 160.0
    for i in range(steps):
        rank = round(i * (world_size - 1) / (steps - 1))
        top = y - 9 + i * tall / steps
        scene.add(Rect(x, top, 16, tall / steps + 0.5, rank_color(rank, world_size)))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        rank = round(share * (world_size - 1))
        middle = y - 9 + (0.5 + share * (steps - 1)) * tall / steps
        scene.add(Text(x + 22, middle + 4, f"rank {rank}", SMALL))
    return y + tall + 14


def shown_ranks(world_size: int, most: int, always: Iterable[int] = ()) -> list[int]:
    """Ranks to draw when there is room for `most`: all, or evenly spread ones and those that must be there.

    >>> shown_ranks(4, 8), shown_ranks(100, 5, [37])
    ([0, 1, 2, 3], [0, 33, 37, 66, 99])
    """
    if world_size <= most:
        return list(range(world_size))
    must = sorted(set(always))[:most]
    free = most - len(must)
    spread = [round(i * (world_size - 1) / max(free - 1, 1)) for i in range(free)]
    return sorted({*must, *spread})
