"""Scene: a picture as plain data (rectangles, lines, areas, words), drawn as SVG text here and as PNG in `png.py`.

Lengths are pixels from the upper left corner. Colours are data colours (#rrggbb) or roles of `colors.ROLES`, which a
browser turns dark with its page; every other reader of SVG sees the light ones.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from longspan.viz.drawing.colors import ROLES, light

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
