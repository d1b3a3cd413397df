"""Pictures of masks: allowed pairs per tile of a grid, counted in closed form, and the grid drawn.

The cost depends on the number of bands and tiles, not on the sequence length.
"""

from __future__ import annotations

import numpy as np

from longspan.formatting import count_text
from longspan.layouts import Layout
from longspan.masks import Mask, Plane
from longspan.masks import bands as bd
from longspan.spans import Ints, by_position, join, run_table
from longspan.viz.scene import (
    FORWARD,
    MARGIN,
    MIXED,
    SMALL,
    Rect,
    Scale,
    Scene,
    Text,
    bottom_axis,
    frame,
    headed,
    left_axis,
    position_ticks,
    rank_color,
    rank_legend,
    wrapped,
)

ASKED = 2048
"""A mask's function is asked about every pair of sequences up to this length; of longer ones it is shown as open."""


def tile_pairs(bands: Ints, q_edges: Ints, kv_edges: Ints) -> Ints:
    """How many pairs the bands allow in every tile between neighbouring edges.

    >>> from longspan import masks
    >>> tile_pairs(masks.causal(4).plane().sure, np.array([0, 2, 4]), np.array([0, 2, 4])).tolist()
    [[3, 0], [4, 3]]
    """
    counts = np.zeros((len(q_edges) - 1, len(kv_edges) - 1), dtype=np.int64)
    pieces, row = _cut(bands, bd.Q0, bd.Q1, q_edges)
    tight = pieces.copy()
    tight[:, bd.K0] = np.maximum(pieces[:, bd.K0], pieces[:, bd.Q0] - pieces[:, bd.HI])
    tight[:, bd.K1] = np.minimum(pieces[:, bd.K1], pieces[:, bd.Q1] - pieces[:, bd.LO])
    keep = tight[:, bd.K1] > tight[:, bd.K0]
    cut, column = _cut(tight[keep], bd.K0, bd.K1, kv_edges)
    origin = _origin(tight[keep], kv_edges)
    np.add.at(counts, (row[keep][origin], column), bd.area(cut))
    return counts


def _cut(bands: Ints, start: int, stop: int, edges: Ints) -> tuple[Ints, Ints]:
    """Bands cut at edges along one side, and the number of the interval each part lies in."""
    i, j = join(bands[:, start : stop + 1], np.stack((edges[:-1], edges[1:]), axis=1))
    parts = bands[i].copy()
    parts[:, start] = np.maximum(parts[:, start], edges[j])
    parts[:, stop] = np.minimum(parts[:, stop], edges[j + 1])
    return parts, j


def _origin(bands: Ints, edges: Ints) -> Ints:
    """For each part that `_cut` makes along keys, the band it came from."""
    return join(bands[:, bd.K0 : bd.K1 + 1], np.stack((edges[:-1], edges[1:]), axis=1))[0]


def shares(plane: Plane, seq_len: int, q_edges: Ints, kv_edges: Ints, ask: bool) -> tuple[np.ndarray, np.ndarray]:
    """For each tile, the share of pairs that are allowed, and whether a function that was not asked may allow more."""
    sizes = np.diff(q_edges)[:, None] * np.diff(kv_edges).astype(np.float64)
    if plane.predicate is not None and ask and seq_len <= ASKED:
        at = np.arange(seq_len, dtype=np.int64)
        allowed = plane.allows(at[:, None], at[None, :]).astype(np.int64)
        counts = np.add.reduceat(np.add.reduceat(allowed, q_edges[:-1], axis=0), kv_edges[:-1], axis=1)
        return counts / sizes, np.zeros(counts.shape, dtype=np.bool_)
    sure = tile_pairs(plane.sure, q_edges, kv_edges)
    return sure / sizes, tile_pairs(plane.maybe, q_edges, kv_edges) > 0


def even_edges(seq_len: int, num: int) -> Ints:
    """Edges of at most `num` tiles as even as whole tokens allow."""
    return np.unique(np.linspace(0, seq_len, min(num, max(seq_len, 1)) + 1).round().astype(np.int64))


def owner_edges(layout: Layout, edges: Ints, most: int = 520) -> Ints:
    """The edges, and those between owners where there are few enough to be seen."""
    cuts = np.unique(layout.table[:, 0])
    return np.unique(np.concatenate((edges, cuts))) if len(cuts) + len(edges) <= most else edges


def equal_runs(values: Ints) -> list[tuple[int, int]]:
    """(start, stop) of every stretch of equal neighbours.

    >>> equal_runs(np.array([7, 7, 2]))
    [(0, 2), (2, 3)]
    """
    return [(start, stop) for start, stop in run_table(values[1:] != values[:-1], len(values)).tolist()]


def document_edges(mask: Mask, edges: Ints, most: int = 64) -> Ints:
    """The edges, and those between a few documents, so that corners are sharp."""
    documents = stretches(mask, int(edges[-1]))
    return np.unique(np.concatenate((edges, documents.ravel()))) if len(documents) <= most else edges


def mask_name(mask: Mask) -> str:
    """The mask in words, without the brackets around all of it."""
    whole = repr(mask).removeprefix("<mask ").removesuffix(">")
    return whole if mask.seq_len is None else whole.removesuffix(f", {mask.seq_len} tokens")


def owners(layout: Layout, edges: Ints) -> Ints:
    """The rank that holds more than half of the tokens between neighbouring edges; -1 where none does."""
    i, j = join(layout.table[:, :2], np.stack((edges[:-1], edges[1:]), axis=1))
    held = np.minimum(layout.table[i, 1], edges[j + 1]) - np.maximum(layout.table[i, 0], edges[j])
    most = np.full(len(edges) - 1, -1, dtype=np.int64)
    key, where = np.unique(j * layout.world_size + layout.table[i, 2], return_inverse=True)
    total = np.bincount(where.ravel(), weights=held.astype(np.float64), minlength=len(key))
    place, rank = key // layout.world_size, key % layout.world_size
    clear = 2 * total > np.diff(edges)[place]
    most[place[clear]] = rank[clear]
    return most


def row_work(mask: Mask, layout: Layout, row: int, head: int) -> Ints:
    """Pairs in the query rows of each rank, in one plane (of a function's pairs: at most)."""
    by_start = layout.by_position
    i, j = join(mask.plane(row, head).region[:, :2], by_start[:, :2])
    pieces = mask.plane(row, head).region[i].copy()
    pieces[:, bd.Q0] = np.maximum(pieces[:, bd.Q0], by_start[j, 0])
    pieces[:, bd.Q1] = np.minimum(pieces[:, bd.Q1], by_start[j, 1])
    pairs = np.zeros(layout.world_size, dtype=np.int64)
    np.add.at(pairs, by_start[j, 2], bd.area(pieces))
    return pairs


def stretches(mask: Mask, seq_len: int) -> Ints:
    """(start, stop) rows of the sequence such that no pair of tokens in different ones is allowed: documents, mostly.

    >>> from longspan import masks
    >>> stretches(masks.documents([3, 2]) & masks.causal(), 5).tolist()
    [[0, 3], [3, 5]]
    """
    extents: list[Ints] = []
    for region in mask.regions(seq_len):
        tight = bd.tighten(region)
        low, high = np.minimum(tight[:, bd.Q0], tight[:, bd.K0]), np.maximum(tight[:, bd.Q1], tight[:, bd.K1])
        extents.append(np.stack((low, high), axis=1))
    rows = by_position(np.concatenate(extents))
    reach = np.maximum.accumulate(rows[:, 1])
    first, after = run_table(rows[1:, 0] >= reach[:-1], len(rows)).T
    return np.stack((rows[first, 0], reach[after - 1]), axis=1)


# A picture of a mask: queries go down, keys go right, tiles have the colour of the rank that holds the queries.


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
