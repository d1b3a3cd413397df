"""Scenes: plain data of a picture, drawn as SVG by the standard library or as PNG by matplotlib."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import LongspanError

# Colours that colour-blind readers can tell apart, and roles that change with a light or a dark page.


ROLES = {
    "ink": ("#1f2328", "#e6e8eb"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#d5dae0", "#3a424b"),
    "lane": ("#eff1f3", "#232930"),
    "paper": ("#ffffff", "#15191e"),
}
"""Light and dark value of every colour that is not data."""

FORWARD, BACKWARD = "#0072b2", "#cc79a7"
NEAR, FAR = "#009e73", "#d55e00"
MIXED = "#8a9099"
HEAT = "#1b85c9"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8500", "#7b4fa3")
"""Okabe and Ito's colours, less black and yellow, which vanish on one of the two papers."""

_RAMP = ("#6b4fb3", "#4f6cc0", "#3786b9", "#2a9a9d", "#35ad7b", "#66bd55", "#a3c93c")
"""From dark to light without a turn, so that it can be read without colours, and between the two papers."""


def light(color: str) -> str:
    """The colour on a light page; data colours are the same on both."""
    return ROLES[color][0] if color in ROLES else color


def ramp(share: float) -> str:
    """A colour of the ordered scale, 0 to 1.

    >>> ramp(0.0), ramp(1.0)
    ('#6b4fb3', '#a3c93c')
    """
    at = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    a, b = (_channels(color) for color in _RAMP[low : low + 2])
    mixed = (round(x + (y - x) * (at - low)) for x, y in zip(a, b, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def rank_color(rank: int, world_size: int) -> str:
    """A colour of its own for each of a few ranks; a place on an ordered scale for each of many.

    >>> rank_color(0, 4) != rank_color(3, 4)
    True
    """
    return SERIES[rank] if world_size <= len(SERIES) else ramp(rank / (world_size - 1))


# Scene: a picture as plain data (rectangles, lines, areas, words), drawn as SVG text here and as PNG in `png.py`.
# Lengths are pixels from the upper left corner. Colours are data colours (#rrggbb) or roles of `colors.ROLES`, which a
# browser turns dark with its page; every other reader of SVG sees the light ones.


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, escaped or not."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled box; `note` is shown where the mouse rests."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    opacity: float = 1.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[Point, ...]
    stroke: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon."""

    points: tuple[Point, ...]
    fill: str
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """Words at a point on their base line."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: str = "ink"
    anchor: str = "start"
    bold: bool = False
    upright: bool = False
    """Whether they read from below upwards."""


Item = Rect | Line | Area | Text


@dataclass
class Scene:
    """A picture that is being put together: items are drawn in order, later ones on top."""

    width: float
    height: float
    title: str
    about: str = ""
    """What a reader who cannot see the picture is told."""
    items: list[Item] = field(default_factory=list)

    def add(self, *items: Item) -> None:
        self.items += items

    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        return svg(self)


def escaped(text: str) -> str:
    """Text that is safe inside XML and HTML, in elements and in quoted attributes.

    >>> escaped('</script><b title="1">\\x1b')
    '&lt;/script&gt;&lt;b title=&quot;1&quot;&gt;\\ufffd'
    """
    return html.escape(_NOT_XML.sub("\ufffd", text), quote=True)


def number(value: float) -> str:
    """A coordinate with two decimals at most.

    >>> number(3.0), number(0.1234)
    ('3', '0.12')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def text_width(text: str, size: float) -> float:
    """About how wide words are, on the generous side: the fonts of browsers differ."""
    return len(text) * size * 0.58


def clipped(text: str, width: float, size: float) -> str:
    """The text, with its end replaced by an ellipsis where it is wider than `width`."""
    room = max(int(width / (size * 0.58)), 1)
    return text if len(text) <= room else text[: room - 1] + "…"


def wrapped(text: str, width: float, size: float) -> list[str]:
    """The text in lines that are not wider than `width`; words too long for a line are clipped."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(clipped(word, width, size))
    return [line for line in lines if line]


def svg(scene: Scene) -> str:
    """The picture as the text of an SVG file."""
    size = f"{number(scene.width)} {number(scene.height)}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{number(scene.width)}"'
        f' height="{number(scene.height)}" font-family="{escaped(FONT)}" class="ls-scene" role="img">'
    )
    words = f"<title>{escaped(scene.title)}</title><desc>{escaped(scene.about)}</desc>"
    back = _rect(Rect(0, 0, scene.width, scene.height, "paper"))
    return "\n".join((head, words, f"<style>{_STYLE}</style>", back, *_items(scene.items), "</svg>"))


def _items(items: Iterable[Item]) -> Iterable[str]:
    for item in items:
        match item:
            case Rect():
                yield _rect(item)
            case Line():
                dash = ' stroke-dasharray="5 4"' if item.dashed else ""
                stroke = _paint("stroke", item.stroke)
                yield (
                    f'<polyline points="{_points(item.points)}" fill="none" {stroke}'
                    f' stroke-width="{number(item.width)}" stroke-linejoin="round"{dash}/>'
                )
            case Area():
                points = _points(item.points)
                yield f'<polygon points="{points}" {_paint("fill", item.fill)}{_opacity(item.opacity)}/>'
            case Text():
                yield _text(item)


def _rect(item: Rect) -> str:
    box = (
        f'<rect x="{number(item.x)}" y="{number(item.y)}" width="{number(item.width)}" height="{number(item.height)}"'
        f" {_paint('fill', item.fill)}{_opacity(item.opacity)}"
    )
    return f"{box}><title>{escaped(item.note)}</title></rect>" if item.note else f"{box}/>"


def _text(item: Text) -> str:
    anchor = "" if item.anchor == "start" else f' text-anchor="{item.anchor}"'
    bold = ' font-weight="600"' if item.bold else ""
    x, y = number(item.x), number(item.y)
    turn = f' transform="rotate(-90 {x} {y})"' if item.upright else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{number(item.size)}" {_paint("fill", item.fill)}{anchor}{bold}{turn}>'
        f"{escaped(item.text)}</text>"
    )


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)


def _paint(what: str, color: str) -> str:
    role = f' class="ls-{what}-{color}"' if color in ROLES else ""
    return f'{what}="{light(color)}"{role}'


def _opacity(value: float) -> str:
    return "" if value >= 1 else f' fill-opacity="{number(value)}"'


_DARK = "".join(
    f".ls-{what}-{role}{{{what}:{dark}}}" for role, (_, dark) in ROLES.items() for what in ("fill", "stroke")
)
_STYLE = f".ls-scene rect{{shape-rendering:crispEdges}}@media screen and (prefers-color-scheme:dark){{{_DARK}}}"


# What pictures share: a head with title and remarks, axes with units, legends, and words for numbers.


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


# -- PNG ---------------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS = 100
"""Pixels of a scene per inch of a figure."""


def write_png(scene: Scene, path: str | Path, *, scale: float = 2.0) -> None:
    """Writes the scene, `scale` dots per pixel, on light paper."""
    figure = _figure(scene)
    figure.savefig(path, format="png", dpi=_DOTS * scale, metadata={"Title": scene.title})


def _figure(scene: Scene) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LongspanError(
            "a PNG was asked for, which matplotlib draws, and matplotlib is not installed. Install longspan[viz], or"
            " ask for SVG or HTML, which need nothing."
        ) from error

    figure = Figure(figsize=(scene.width / _DOTS, scene.height / _DOTS), facecolor=light("paper"))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.axis("off")
    for order, item in enumerate(_batches(scene)):
        _draw(axes, item, order)
    return figure


def _batches(scene: Scene) -> list[Any]:
    """Items in order, neighbouring boxes as one list: a collection draws ten thousand at once."""
    batches: list[Any] = []
    for item in scene.items:
        if isinstance(item, Rect):
            if not (batches and isinstance(batches[-1], list)):
                batches.append([])
            batches[-1].append(item)
        else:
            batches.append(item)
    return batches


def _draw(axes: Any, item: Any, order: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    match item:
        case list():
            corners = [
                ((r.x, r.y), (r.x + r.width, r.y), (r.x + r.width, r.y + r.height), (r.x, r.y + r.height)) for r in item
            ]
            colors = [to_rgba(light(r.fill), r.opacity) for r in item]
            axes.add_collection(PolyCollection(corners, facecolors=colors, linewidths=0, zorder=order), autolim=False)
        case Area():
            color = to_rgba(light(item.fill), item.opacity)
            shape = PolyCollection([item.points], facecolors=[color], linewidths=0, zorder=order)
            axes.add_collection(shape, autolim=False)
        case Line():
            x, y = zip(*item.points, strict=True)
            dash = (0, (5, 4)) if item.dashed else "solid"
            points = item.width * 72 / _DOTS
            axes.plot(
                x, y, color=light(item.stroke), linewidth=points, linestyle=dash, zorder=order,
                solid_capstyle="butt", dash_capstyle="butt",
            )  # fmt: skip
        case Text():
            axes.text(
                item.x, item.y, item.text, color=light(item.fill), fontsize=item.size * 72 / _DOTS,
                ha={"start": "left", "middle": "center", "end": "right"}[item.anchor], va="baseline",
                fontweight="bold" if item.bold else "normal", rotation=90 if item.upright else 0,
                rotation_mode="anchor", zorder=order, parse_math=False,
            )  # fmt: skip
