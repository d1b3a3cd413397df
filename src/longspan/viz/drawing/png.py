"""A scene as PNG, by matplotlib, which is loaded only here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import LongspanError
from longspan.viz.drawing.colors import light
from longspan.viz.drawing.scene import Area, Line, Rect, Scene, Text

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
