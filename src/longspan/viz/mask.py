"""A picture of a mask: queries go down, keys go right, tiles have the colour of the rank that holds the queries."""

from __future__ import annotations

import numpy as np

from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.number_words import count_text
from longspan.viz.drawing.axes import (
    MARGIN,
    SMALL,
    Scale,
    bottom_axis,
    frame,
    headed,
    left_axis,
    position_ticks,
    rank_legend,
)
from longspan.viz.drawing.colors import FORWARD, MIXED, rank_color
from longspan.viz.drawing.scene import Rect, Scene, Text, wrapped
from longspan.viz.tiles import document_edges, equal_runs, even_edges, mask_name, owner_edges, owners, row_work, shares

SIDE = 520.0
TILES = 104
_LEVELS = 5

Edges = tuple[np.ndarray, np.ndarray]
"""Of query rows and of keys."""


def mask_picture(
    mask: Mask,
    layout: Layout | None = None,
    *,
    seq_len: int | None = None,
    row: int = 0,
    head: int = 0,
    title: str | None = None,
    ask: bool = True,
) -> Scene:
    """What may attend to what, in tiles. With a layout they have the colour of the rank that holds the query rows.

    The larger the share of a tile's pairs that is allowed, the darker it is. Functions are asked about every pair of
    short sequences; `ask=False` shows their pairs as open instead, as those of longer ones always are.
    """
    length = layout.seq_len if layout is not None and mask.seq_len is None else mask.length(seq_len)
    mask = mask.resized(length)
    edges = document_edges(mask, even_edges(length, TILES))
    q_edges = edges if layout is None else owner_edges(layout, edges)
    share, is_open = shares(mask.plane(row, head), length, q_edges, edges, ask)
    owner = None if layout is None else owners(layout, q_edges)
    scene, top = headed(
        title or f"Mask: {mask_name(mask)}", _remarks(mask, length, row, head, share, is_open, (q_edges, edges)), _ABOUT
    )
    left = MARGIN + 92
    x, y = Scale(0, max(length, 1), left, left + SIDE), Scale(0, max(length, 1), top + 4, top + 4 + SIDE)
    scene.add(Rect(left, y(0), SIDE, SIDE, "lane"))
    _tiles(scene, x, y, (q_edges, edges), share, is_open, _colors(owner, len(share), layout))
    if owner is not None and layout is not None:
        _owner_strip(scene, x(0) - 14, y, q_edges, owner, layout)
    frame(scene, left, y(0), left + SIDE, y.stop)
    ticks = [float(tick) for tick in position_ticks(length)]
    count = lambda tick: count_text(int(tick))  # noqa: E731
    bottom_axis(scene, x, y.stop, ticks, "key position (tokens)", count)
    left_axis(scene, y, left - (18 if owner is not None else 4), ticks, "query position (tokens)", count)
    _legend(scene, (left + SIDE + 24, y(0) + 10), mask, layout, (row, head), bool(is_open.any()), owner)
    scene.height = y.stop + 52
    return scene


_ABOUT = "Queries go down, keys go right; a tile is the darker the more of its pairs are allowed."


def _remarks(
    mask: Mask, length: int, row: int, head: int, share: np.ndarray, is_open: np.ndarray, edges: Edges
) -> list[str]:
    allowed = float(np.diff(edges[0]) @ share @ np.diff(edges[1])) / max(length, 1) ** 2
    words = f"{count_text(length)} tokens, {100 * allowed:.3g}% of all pairs allowed"
    if is_open.any():
        words += " for sure, more where its function says so"
    which = [
        f"{what} {index} of {size}"
        for what, index, size in (("batch row", row, mask.num_rows), ("head", head, mask.num_heads))
        if size > 1
    ]
    return [", ".join((words, *which))]


def _colors(owner: np.ndarray | None, num: int, layout: Layout | None) -> list[str]:
    if owner is None or layout is None:
        return [FORWARD] * num
    return [MIXED if rank < 0 else rank_color(int(rank), layout.world_size) for rank in owner]


def _tiles(
    scene: Scene,
    x: Scale,
    y: Scale,
    edges: Edges,
    share: np.ndarray,
    is_open: np.ndarray,
    colors: list[str],
) -> None:
    """Boxes of neighbouring tiles with the same shade."""
    level = np.where(share >= 1, _LEVELS, np.ceil(share * (_LEVELS - 1) - 1e-12).astype(np.int64))
    level = np.where((level == 0) & is_open, -1, level)
    for i, line in enumerate(level):
        top, bottom = y(float(edges[0][i])), y(float(edges[0][i + 1]))
        for start, stop in equal_runs(line):
            if line[start]:
                begin, end = x(float(edges[1][start])), x(float(edges[1][stop]))
                scene.add(Rect(begin, top, end - begin, bottom - top, colors[i], _opacity(int(line[start]))))


def _opacity(level: int) -> float:
    return 0.16 if level < 0 else 1.0 if level == _LEVELS else 0.24 + 0.46 * level / (_LEVELS - 1)


def _owner_strip(scene: Scene, x: float, y: Scale, edges: np.ndarray, owner: np.ndarray, layout: Layout) -> None:
    for start, stop in equal_runs(owner):
        rank = int(owner[start])
        begin, end = y(float(edges[start])), y(float(edges[stop]))
        color = MIXED if rank < 0 else rank_color(rank, layout.world_size)
        scene.add(Rect(x, begin, 10, end - begin, color, note="several ranks" if rank < 0 else f"rank {rank}"))


def _legend(
    scene: Scene,
    corner: tuple[float, float],
    mask: Mask,
    layout: Layout | None,
    plane: tuple[int, int],
    is_open: bool,
    owner: np.ndarray | None,
) -> None:
    x, y = corner
    color = MIXED if layout is not None else FORWARD
    if layout is not None:
        work = row_work(mask, layout, *plane).astype(np.float64)
        part = work / (work.sum() or 1.0)
        scene.add(Text(x, y, "query rows held by", SMALL, bold=True))
        words = [f"rank {rank}: {100 * value:.1f}% of pairs" for rank, value in enumerate(part.tolist())]
        y = rank_legend(scene, x, y + 20, layout.world_size, words)
        if owner is not None and (owner < 0).any():
            scene.add(Rect(x, y - 9, 12, 10, MIXED), Text(x + 18, y, "several ranks", SMALL))
            y += 18
        spread = float(work.max(initial=0.0)) / (float(work.mean()) or 1.0)
        for line in wrapped(f"most pairs in a rank's rows / mean: {spread:.3f}", 190, SMALL):
            scene.add(Text(x, y + 2, line, SMALL, "muted"))
            y += 16
        y += 16
    scene.add(Text(x, y, "shade of a tile", SMALL, bold=True))
    keys = [("all pairs allowed", _LEVELS), ("most", _LEVELS - 1), ("some", 1)]
    for words, level in (*keys, *([("a function decides", -1)] if is_open else [])):
        y += 18
        scene.add(Rect(x, y - 9, 12, 10, color, _opacity(level)), Text(x + 18, y, words, SMALL))
    scene.add(Rect(x, y + 9, 12, 10, "lane"), Text(x + 18, y + 18, "none", SMALL))
