"""The base of every picture: a matplotlib figure measured in pixels, its colours, legends and tooltips, as SVG or PNG.

matplotlib is imported when the first picture is drawn, not with this module.
"""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from longspan.errors import LongspanError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

# -- colours -----------------------------------------------------------------------------------------------------------

ROLES = {
    "ink": ("#1f2328", "#e6e8eb"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#d5dae0", "#3a424b"),
    "lane": ("#eff1f3", "#232930"),
    "paper": ("#ffffff", "#15191e"),
}
"""Light and dark value of every colour that does not stand for data. A browser picks one by the reader's preference."""
INK, MUTED, GRID, LANE, PAPER = (light for light, _ in ROLES.values())
ON_DARK, ON_LIGHT = "#fefefe", "#1f2329"
"""Labels on bars: the same on light and dark pages, hence not quite the colour of a role."""

FORWARD, BACKWARD = "#0072b2", "#cc79a7"
NEAR, FAR = "#009e73", "#d55e00"
MIXED = "#8a9099"
HEAT = "#1b85c9"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8500", "#7b4fa3")
"""Okabe and Ito's colours without black and yellow, which are invisible on a dark or a light page."""
_RAMP = ("#6b4fb3", "#4f6cc0", "#3786b9", "#2a9a9d", "#35ad7b", "#66bd55", "#a3c93c")
"""An ordered scale: its brightness rises steadily, so that it can be read without colours."""


def rank_color(rank: int, world_size: int) -> str:
    """Return a rank's colour: a distinct one up to 8 ranks, a place on the ordered scale for more.

    >>> rank_color(0, 4) != rank_color(3, 4), rank_color(0, 64), rank_color(63, 64)
    (True, '#6b4fb3', '#a3c93c')
    """
    if world_size <= len(SERIES):
        return SERIES[rank]
    place, after = divmod(rank * (len(_RAMP) - 1), world_size - 1)
    ends = [_RAMP[place], _RAMP[min(place + 1, len(_RAMP) - 1)]]
    a, b = ([int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in ends)
    return "#" + "".join(f"{round(x + (y - x) * after / (world_size - 1)):02x}" for x, y in zip(a, b, strict=True))


# -- the figure --------------------------------------------------------------------------------------------------------

WIDTH, MARGIN = 860.0, 20.0
SMALL, NORMAL = 11.0, 12.0
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
_DPI = 72  # a point of matplotlib is then a pixel
_RC_GROUPS = ("axes.", "figure.", "font.", "grid.", "lines.", "patch.", "savefig.", "svg.", "text.", "xtick.", "ytick.")
_RC = {
    "axes.edgecolor": GRID, "axes.labelcolor": INK, "axes.labelsize": NORMAL, "axes.facecolor": LANE,
    "axes.linewidth": 1.0, "axes.axisbelow": True, "figure.dpi": _DPI, "figure.facecolor": PAPER, "font.size": SMALL,
    "grid.color": GRID, "grid.linewidth": 0.7, "svg.fonttype": "none", "svg.hashsalt": "longspan",
    "text.color": INK, "text.parse_math": False, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "xtick.minor.size": 0, "ytick.minor.size": 0,
}  # fmt: skip
P = ParamSpec("P")
Key = tuple[str, str, float]
"""An entry of a legend: text, colour, opacity."""


@contextmanager
def _style() -> Iterator[None]:
    """Use matplotlib's defaults and the settings of our pictures, whatever the user's own settings are."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise LongspanError(
            "`matplotlib` is required to draw pictures, but it is not installed. Run: pip install matplotlib."
        ) from error
    settings: dict[Any, Any] = {
        name: value for name, value in matplotlib.rcParamsDefault.items() if name.startswith(_RC_GROUPS)
    }
    settings.update(_RC)
    with matplotlib.rc_context(settings):
        yield


def picture(draw: Callable[P, Scene]) -> Callable[P, Scene]:
    """Run a function that draws with the settings of our pictures."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Scene:
        with _style():
            return draw(*args, **kwargs)

    return styled


class Scene:
    """A picture. `figure` is its matplotlib figure; sizes and positions are pixels from the upper left corner.

    `canvas` is an invisible pair of axes over the whole figure whose coordinates are pixels: for text, legends and
    diagrams. Axes with data coordinates are placed on it by `axes`. `about` describes the picture to readers who cannot
    see it, and `notes` are the tooltips of its boxes in SVG.
    """

    def __init__(self, width: float, height: float, title: str, about: str = "") -> None:
        with _style():
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure

            self.figure = Figure()
            self._renderer = FigureCanvasAgg(self.figure).get_renderer()
            self.canvas = self.figure.add_axes((0, 0, 1, 1), zorder=-1)
        self.canvas.set(xticks=[], yticks=[], frame_on=False)
        self.width, self.title, self.about = width, title, about
        self.notes: list[str] = []
        self._placed: list[tuple[Axes, tuple[float, float, float, float]]] = []
        self.height = height

    @property
    def height(self) -> float:
        return self._height

    @height.setter
    def height(self, height: float) -> None:
        """Set the height; what was drawn keeps its distance from the upper edge."""
        self._height = height
        self.figure.set_size_inches(self.width / _DPI, max(height, 1) / _DPI)
        self.canvas.set(xlim=(0, self.width), ylim=(max(height, 1), 0))
        for axes, (x, y, w, h) in self._placed:
            axes.set_position((x / self.width, 1 - (y + h) / height, w / self.width, h / height))

    def axes(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        xlim: tuple[float, float] = (0, 1),
        ylim: tuple[float, float] = (0, 1),
        has_frame: bool = True,
    ) -> Axes:
        """Return new axes without ticks at a place of the picture. Without a frame they have no background either."""
        axes = self.figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=xlim, ylim=ylim, xticks=[], yticks=[])
        if not has_frame:
            axes.patch.set_visible(False)
            axes.spines[:].set_visible(False)
        axes.tick_params(length=4 if has_frame else 0, pad=3 if has_frame else 5)
        self._placed.append((axes, (x, y, max(width, 1.0), height)))
        return axes

    def box(
        self, axes: Axes, x: float, y: float, width: float, height: float, color: str, alpha: float = 1, note: str = ""
    ) -> Rectangle:
        """Draw a filled box in the coordinates of the axes; `note` is its tooltip in SVG."""
        from matplotlib.patches import Rectangle

        patch = Rectangle((x, y), width, height, facecolor=color, alpha=alpha if alpha < 1 else None, linewidth=0)
        patch.set(antialiased=False, clip_on=False)
        if note:
            patch.set_gid(f"note{len(self.notes)}")
            self.notes.append(note)
        axes.add_artist(patch)
        return patch

    def boxes(self, axes: Axes, boxes: Sequence[tuple[float, float, float, float]], colors: Sequence[Any]) -> None:
        """Draw many filled boxes (x, y, width, height) without tooltips, quicker than one by one."""
        from matplotlib.collections import PolyCollection

        corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in boxes]
        shapes = PolyCollection(corners, facecolors=colors, linewidths=0, antialiaseds=False, clip_on=False)
        axes.add_collection(shapes, autolim=False)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = NORMAL,
        color: str = INK,
        align: str = "left",
        *,
        bold: bool = False,
        axes: Axes | None = None,
    ) -> None:
        """Write text on its base line at pixels of the picture, or around the height `y` of other axes."""
        (axes or self.canvas).text(
            x, y, printable(text), fontsize=size, color=color, horizontalalignment=align,
            verticalalignment="baseline" if axes is None else "center_baseline",
            fontweight="bold" if bold else "normal", clip_on=False,
        )  # fmt: skip

    def text_width(self, text: str, size: float) -> float:
        """Return how many pixels wide the text is."""
        from matplotlib.font_manager import FontProperties

        return self._renderer.get_text_width_height_descent(text, FontProperties(size=size), False)[0]

    def svg(self) -> str:
        """Return the picture as the text of an SVG file that can be a part of an HTML page, too."""
        file = io.StringIO()
        with _style():
            self.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        body = file.getvalue().partition("</defs>")[2]  # after matplotlib's own style, which is for whole pages
        body = re.sub(r"\s*font-family: [^;\"]*;", "", body)
        body = re.sub(r' transform="rotate\(-0 [^"]*"|(?<=<g) id="(?!note)[^"]*"', "", body)
        body = re.sub(r'<g id="note(\d+)">', lambda n: f"<g><title>{escape(self.notes[int(n[1])])}</title>", body)
        body = re.sub(r"\s*\n\s*+(?!<)", " ", body)  # path data in one line
        body = re.sub(r"\n\s*", "\n", body)
        size = f"{self.width:g}", f"{self.height:g}"
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
            f' viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}" font-family="{escape(FONT)}"'
            f' class="ls-scene" role="img">\n<title>{escape(self.title)}</title><desc>{escape(self.about)}</desc>\n'
            f"<style>{_CSS}</style>{body}"
        )


_DARK = "".join(
    f'.ls-scene [style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
    for light, dark in ROLES.values()
    for kind in ("fill", "stroke")
)
_CSS = (
    '.ls-scene{stroke-linejoin:round}.ls-scene path[style^="fill: #"]{shape-rendering:crispEdges}'
    f"@media screen and (prefers-color-scheme:dark){{{_DARK}}}"
)
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_png(scene: Scene, path: str | Path, *, scale: float = 2.0) -> None:
    """Write the picture on light paper, with `scale` dots per pixel."""
    with _style():
        metadata = {"Title": scene.title, "Software": None}
        scene.figure.savefig(path, format="png", dpi=_DPI * scale, metadata=metadata)


def printable(text: str) -> str:
    """Replace characters that no XML document may hold, and line breaks."""
    return _NOT_XML.sub("\ufffd", text).replace("\n", " ")


def escape(text: str) -> str:
    """Escape text for XML and HTML, in elements and in quoted attributes.

    >>> escape('</script><b title="1">\\x1b')
    '&lt;/script&gt;&lt;b title=&quot;1&quot;&gt;\\ufffd'
    """
    return html.escape(_NOT_XML.sub("\ufffd", text), quote=True)


# -- parts of pictures -------------------------------------------------------------------------------------------------


def wrap(scene: Scene, text: str, width: float, size: float) -> list[str]:
    """Return the text in lines that are at most `width` wide; words that are wider are cut."""
    lines = [""]
    for word in printable(text).split():
        longer = f"{lines[-1]} {word}".strip()
        if scene.text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            while scene.text_width(word, size) > width:
                word = word[: len(word) * 9 // 10].rstrip("…") + "…"
            lines.append(word)
    return [line for line in lines if line]


def begin_scene(title: str, remarks: Iterable[str], about: str) -> tuple[Scene, float]:
    """Return a scene with its title and remarks written, and the height at which the picture begins."""
    scene = Scene(WIDTH, 100, title, about)
    room = WIDTH - 2 * MARGIN
    lines = wrap(scene, title, room * 0.92, 16)  # bold is wider
    scene.text(MARGIN, 28, lines[0] + "…" * (len(lines) > 1) if lines else "", 16, bold=True)
    y = 48.0
    for remark in remarks:
        for line in wrap(scene, remark, room, NORMAL)[:3]:
            scene.text(MARGIN, y, line, color=MUTED)
            y += 17
    return scene, y + 6


def legend_key(scene: Scene, x: float, y: float, text: str, color: str, alpha: float = 1.0) -> None:
    """Draw one entry of a legend."""
    scene.box(scene.canvas, x, y - 9, 12, 10, color, alpha)
    scene.text(x + 18, y, text, SMALL)


def legend_row(scene: Scene, x: float, y: float, keys: Iterable[Key]) -> float:
    """Draw entries from left to right, in as many rows as they need; return the height below them."""
    left = x
    for text, color, alpha in keys:
        width = 18 + scene.text_width(text, SMALL) + 16
        if left > x and left + width > WIDTH - MARGIN:
            left, y = x, y + 18
        legend_key(scene, left, y, text, color, alpha)
        left += width
    return y + 18


def rank_legend(scene: Scene, x: float, y: float, world_size: int, texts: Sequence[str]) -> float:
    """Draw the colours of up to 8 ranks as a list, of more as a scale; return the height below."""
    if world_size <= 8:
        for rank in range(world_size):
            legend_key(scene, x, y + 18 * rank, texts[rank], rank_color(rank, world_size))
        return y + 18 * world_size
    steps, height = min(world_size, 64), 160.0
    for i in range(steps):
        rank = round(i * (world_size - 1) / (steps - 1))
        scene.box(scene.canvas, x, y - 9 + i * height / steps, 16, height / steps + 0.5, rank_color(rank, world_size))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        middle = y - 9 + (0.5 + share * (steps - 1)) * height / steps
        scene.text(x + 22, middle + 4, f"rank {round(share * (world_size - 1))}", SMALL)
    return y + height + 14


def token_ticks(seq_len: int, num: int = 4) -> tuple[list[int], list[str]]:
    """Return positions to mark, and their labels: quarters of a length that has round ones, else round numbers.

    >>> token_ticks(1024)
    ([0, 256, 512, 768, 1024], ['0', '256', '512', '768', '1,024'])
    """
    if seq_len <= num or seq_len % (32 * num) == 0:
        ticks = list(range(0, seq_len + 1, max(seq_len // num, 1)))
    else:
        from matplotlib.ticker import MaxNLocator

        values = MaxNLocator(num, steps=[1, 2, 2.5, 5, 10], integer=True).tick_values(0, seq_len)
        ticks = [int(tick) for tick in values if 0 <= tick <= seq_len]
    return ticks, [f"{tick:,}" for tick in ticks]


def tick_text(value: float, _position: object = None) -> str:
    """Format a tick without needless decimals.

    >>> tick_text(2.0), tick_text(0.25), tick_text(1500.0)
    ('2', '0.25', '1,500')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown_ranks(world_size: int, most: int, always: Iterable[int] = ()) -> list[int]:
    """Return the ranks to draw: all of a few, else `most` evenly spread ones, those in `always` among them.

    >>> shown_ranks(4, 8), shown_ranks(100, 5, [37])
    ([0, 1, 2, 3], [0, 33, 37, 66, 99])
    """
    if world_size <= most:
        return list(range(world_size))
    must = sorted(set(always))[:most]
    free = most - len(must)
    spread = [round(i * (world_size - 1) / max(free - 1, 1)) for i in range(free)]
    return sorted({*must, *spread})
