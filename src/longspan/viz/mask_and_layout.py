"""Pictures of masks and layouts: the allowed pairs in every tile of a grid, and which rank holds which tokens.

Pairs are counted in closed form: the cost depends on the number of bands and tiles, not on the sequence length.
"""

from __future__ import annotations

import numpy as np

from longspan.formatting import count_text
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.masks import bands as bd
from longspan.masks.tiles import tile_pairs
from longspan.masks.work import Pairs, block_work
from longspan.spans import Ints, by_position, join, run_table
from longspan.viz.scene import (
    FORWARD,
    LANE,
    MARGIN,
    MIXED,
    MUTED,
    PAPER,
    SMALL,
    WIDTH,
    Scene,
    begin_scene,
    legend_key,
    picture,
    rank_color,
    rank_legend,
    shown_ranks,
    token_ticks,
    wrap,
)

MAX_CALLED = 2048
"""Longest sequence for which a mask's function is called, on every pair. Pairs of longer ones are shown as open."""


def even_edges(seq_len: int, num: int) -> Ints:
    """Return the edges of at most `num` tiles of nearly equal numbers of tokens."""
    return np.unique(np.linspace(0, seq_len, min(num, max(seq_len, 1)) + 1).round().astype(np.int64))


def owner_edges(layout: Layout, edges: Ints, most: int = 520) -> Ints:
    """Return the edges, with those between owners added where there are few enough to be seen."""
    cuts = np.unique(layout.table[:, 0])
    return np.unique(np.concatenate((edges, cuts))) if len(cuts) + len(edges) <= most else edges


def equal_runs(values: Ints) -> list[tuple[int, int]]:
    """Return (start, stop) of every run of equal neighbours.

    >>> equal_runs(np.array([7, 7, 2]))
    [(0, 2), (2, 3)]
    """
    return [(start, stop) for start, stop in run_table(values[1:] != values[:-1], len(values)).tolist()]


def document_edges(mask: Mask, edges: Ints, most: int = 64) -> Ints:
    """Return the edges, with those between a few documents added, so that corners are sharp."""
    documents = stretches(mask, int(edges[-1]))
    return np.unique(np.concatenate((edges, documents.ravel()))) if len(documents) <= most else edges


def mask_name(mask: Mask) -> str:
    """Return the mask's `repr` without the brackets and its length."""
    whole = repr(mask).removeprefix("<mask ").removesuffix(">")
    return whole if mask.seq_len is None else whole.removesuffix(f", {mask.seq_len} tokens")


def owners(layout: Layout, edges: Ints) -> Ints:
    """Return the rank that holds more than half of the tokens between neighbouring edges, -1 where none does."""
    i, j = join(layout.table[:, :2], np.stack((edges[:-1], edges[1:]), axis=1))
    held = np.minimum(layout.table[i, 1], edges[j + 1]) - np.maximum(layout.table[i, 0], edges[j])
    most = np.full(len(edges) - 1, -1, dtype=np.int64)
    key, where = np.unique(j * layout.world_size + layout.table[i, 2], return_inverse=True)
    total = np.bincount(where.ravel(), weights=held.astype(np.float64), minlength=len(key))
    place, rank = key // layout.world_size, key % layout.world_size
    clear = 2 * total > np.diff(edges)[place]
    most[place[clear]] = rank[clear]
    return most


def row_work(mask: Mask, layout: Layout, row: int, head: int) -> Pairs:
    """Return the pairs in the query rows of each rank, in one plane; where a function decides, of the blocks that hold
    an allowed one."""
    by_start = layout.by_position
    work = block_work(mask.plane(row, head))
    if work is not None:
        return np.bincount(by_start[:, 2], work.in_rows(by_start), layout.world_size)
    i, j = join(mask.plane(row, head).region[:, :2], by_start[:, :2])
    pieces = mask.plane(row, head).region[i].copy()
    pieces[:, bd.Q0] = np.maximum(pieces[:, bd.Q0], by_start[j, 0])
    pieces[:, bd.Q1] = np.minimum(pieces[:, bd.Q1], by_start[j, 1])
    pairs = np.zeros(layout.world_size, dtype=np.int64)
    np.add.at(pairs, by_start[j, 2], bd.area(pieces))
    return pairs


def stretches(mask: Mask, seq_len: int) -> Ints:
    """Return (start, stop) of the parts of the sequence that do not see each other: documents, in most cases.

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


# -- the picture -------------------------------------------------------------------------------------------------------

SIDE = 520.0
TILES = 104
_LEVELS = 5


@picture
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
    """Draw which queries may attend to which keys, in tiles.

    Args:
        mask: The mask.
        layout: With a layout, a tile has the colour of the rank that holds its query rows.
        seq_len: Number of tokens, for a mask without a length of its own.
        row: Batch row of a mask that differs from row to row.
        head: Head of a mask that differs from head to head.
        title: Title of the picture.
        ask: Call the function of a mask on every pair of a short sequence. With False, and for long sequences, the
            pairs on which it decides are shown as open.

    Returns:
        The picture. The larger the share of a tile's pairs that is allowed, the darker the tile.
    """
    length = layout.seq_len if layout is not None and mask.seq_len is None else mask.length(seq_len)
    mask = mask.resized(length)
    edges = document_edges(mask, even_edges(length, TILES))
    q_edges = edges if layout is None else owner_edges(layout, edges)
    plane = mask.plane(row, head)
    calls = plane.predicate is not None and ask and length <= MAX_CALLED
    share = tile_pairs(plane if calls else plane.sure, q_edges, edges) / (np.diff(q_edges)[:, None] * np.diff(edges))
    is_open = np.zeros(share.shape, dtype=np.bool_) if calls else tile_pairs(plane.maybe, q_edges, edges) > 0
    allowed = float(np.diff(q_edges) @ share @ np.diff(edges)) / max(length, 1) ** 2
    remark = f"{count_text(length)} tokens, {100 * allowed:.3g}% of all pairs allowed"
    remark += ", and more where its function allows them" if is_open.any() else ""
    remark += f", batch row {row} of {mask.num_rows}" if mask.num_rows > 1 else ""
    remark += f", head {head} of {mask.num_heads}" if mask.num_heads > 1 else ""
    scene, top = begin_scene(
        title or f"Mask: {mask_name(mask)}",
        [remark],
        "Queries go down, keys go right; a tile is the darker the more of its pairs are allowed.",
    )

    left, top, end = MARGIN + 92, top + 4, max(length, 1)
    axes = scene.axes(left, top, SIDE, SIDE, xlim=(0, end), ylim=(end, 0))
    axes.set_xticks(*token_ticks(length))
    axes.set_yticks(*token_ticks(length))
    axes.set(xlabel="key position (tokens)", ylabel="query position (tokens)")
    colors = [FORWARD] * len(share)
    owner = None if layout is None else owners(layout, q_edges)
    if owner is not None and layout is not None:
        colors = [MIXED if rank < 0 else rank_color(rank, layout.world_size) for rank in owner.tolist()]
        axes.tick_params(axis="y", pad=18)
        strip = scene.axes(left - 14, top, 10, SIDE, ylim=(end, 0), has_frame=False)
        for start, stop in equal_runs(owner):
            note = "several ranks" if owner[start] < 0 else f"rank {owner[start]}"
            scene.box(strip, 0, q_edges[start], 1, q_edges[stop] - q_edges[start], colors[start], note=note)

    # Neighbouring tiles of one shade are one box.
    level = np.where(share >= 1, _LEVELS, np.ceil(share * (_LEVELS - 1) - 1e-12).astype(np.int64))
    level = np.where((level == 0) & is_open, -1, level)
    boxes: list[tuple[float, float, float, float]] = []
    shades: list[tuple[str, float]] = []
    for i, line in enumerate(level):
        for start, stop in equal_runs(line):
            if line[start]:
                width = edges[stop] - edges[start]
                boxes.append((edges[start], q_edges[i], width, q_edges[i + 1] - q_edges[i]))
                shades.append((colors[i], _opacity(int(line[start]))))
    scene.boxes(axes, boxes, shades)
    _legend(scene, left + SIDE + 24, top + 10, mask, layout, (row, head), bool(is_open.any()), owner)
    scene.height = top + SIDE + 52
    return scene


def _opacity(level: int) -> float:
    return 0.16 if level < 0 else 1.0 if level == _LEVELS else 0.24 + 0.46 * level / (_LEVELS - 1)


def _legend(
    scene: Scene,
    x: float,
    y: float,
    mask: Mask,
    layout: Layout | None,
    plane: tuple[int, int],
    is_open: bool,
    owner: Ints | None,
) -> None:
    color = FORWARD
    if layout is not None and owner is not None:
        color = MIXED
        work = row_work(mask, layout, *plane).astype(np.float64)
        shares_of_work = (work / (work.sum() or 1.0)).tolist()
        scene.text(x, y, "query rows held by", SMALL, bold=True)
        texts = [f"rank {rank}: {100 * value:.1f}% of pairs" for rank, value in enumerate(shares_of_work)]
        y = rank_legend(scene, x, y + 20, layout.world_size, texts)
        if (owner < 0).any():
            legend_key(scene, x, y, "several ranks", MIXED)
            y += 18
        imbalance = float(work.max(initial=0.0)) / (float(work.mean()) or 1.0)
        what = "pairs" if mask.plane(*plane).predicate is None else "work"
        for line in wrap(scene, f"most {what} in a rank's rows / mean: {imbalance:.3f}", 190, SMALL):
            scene.text(x, y + 2, line, SMALL, MUTED)
            y += 16
        y += 16
    scene.text(x, y, "shade of a tile", SMALL, bold=True)
    keys = [("all pairs allowed", _LEVELS), ("most", _LEVELS - 1), ("some", 1)]
    for text, level in (*keys, *([("a function decides", -1)] if is_open else [])):
        y += 18
        legend_key(scene, x, y, text, color, _opacity(level))
    legend_key(scene, x, y + 18, "none", LANE)


_BINS = 620
_LANES = 64


@picture
def layout_picture(layout: Layout, mask: Mask | None = None, *, title: str | None = None) -> Scene:
    """Draw which rank holds which tokens. With a mask, documents (parts that do not see each other) are marked."""
    size, length = layout.world_size, layout.seq_len
    ranks = shown_ranks(size, _LANES)
    documents = [] if mask is None else stretches(mask.resized(length), length).tolist()
    remark = f"{count_text(length)} tokens on {size} ranks in {count_text(len(layout.table))} spans"
    if layout.local_len is not None:
        padding = sum(layout.num_padding(rank) for rank in range(size))
        remark += f", {count_text(layout.local_len)} slots each ({count_text(padding)} of padding)"
    if len(documents) > 1:
        remark += f"; {count_text(len(documents))} documents, which do not see each other"
    remarks = [remark]
    if len(ranks) < size:
        remarks.append(f"{len(ranks)} of {size} ranks are drawn, evenly spread.")
    scene, top = begin_scene(
        title or f"Layout: {layout.name}",
        remarks,
        "One strip per rank, filled where the rank holds tokens of the sequence.",
    )

    left, right, end = MARGIN + 72, WIDTH - MARGIN - 98, max(length, 1)
    pixel = end / (right - left)
    top += 10
    if len(documents) > 1:
        scene.text(left - 8, top + 11, "documents", SMALL, MUTED, "right")
        axes = scene.axes(left, top, right - left, 14, xlim=(0, end), has_frame=False)
        scene.box(axes, 0, 0, end, 1, LANE)
        for number, (start, stop) in enumerate(documents):
            if stop - start >= 0.7 * pixel:
                note = f"document {number}: {start:,} to {stop:,}, {stop - start:,} tokens"
                scene.box(axes, start, 0, stop - start, 1, MIXED, 0.85 if number % 2 else 0.5, note)
        top += 26

    lane = 22.0 if len(ranks) <= 8 else 14.0 if len(ranks) <= 16 else 11.0 if len(ranks) <= 32 else 8.5
    labels = range(0, len(ranks), 1 if lane > 10 else 4)
    axes = scene.axes(left, top, right - left, lane * len(ranks), xlim=(0, end), ylim=(len(ranks), 0))
    axes.patch.set_facecolor(PAPER)
    axes.set_xticks(*token_ticks(length))
    axes.set_yticks([order + 0.5 for order in labels], [f"rank {ranks[order]}" for order in labels])
    axes.tick_params(axis="y", length=0, pad=8)
    axes.set_xlabel("position in the sequence (tokens)")
    scene.text(right + 10, top - 8, "tokens", SMALL, MUTED)
    for order in labels:
        tokens = count_text(int(layout.num_tokens[ranks[order]]))
        scene.text(right + 10, top + lane * (order + 0.5) + 4, tokens, SMALL, MUTED)

    gap, edges = 1 / lane, even_edges(length, _BINS)
    for order, rank in enumerate(ranks):
        scene.box(axes, 0, order + gap, end, 1 - 2 * gap, LANE)
        color, spans = rank_color(rank, size), layout.span_table(rank)
        if len(spans) <= 400:
            for start, stop in spans.tolist():
                note = f"rank {rank}: {start:,} to {stop:,}"
                scene.box(axes, start, order + gap, max(stop - start, pixel), 1 - 2 * gap, color, note=note)
        else:  # spans too narrow to be seen: the share of each bin that they fill
            i, j = join(spans, np.stack((edges[:-1], edges[1:]), axis=1))
            held = np.minimum(spans[i, 1], edges[j + 1]) - np.maximum(spans[i, 0], edges[j])
            share = np.bincount(j, weights=held.astype(np.float64), minlength=len(edges) - 1) / np.diff(edges)
            level = np.ceil(share * 4 - 1e-9).astype(np.int64)
            filled = [(start, stop) for start, stop in equal_runs(level) if level[start]]
            boxes = [(edges[a], order + gap, edges[b] - edges[a], 1 - 2 * gap) for a, b in filled]
            scene.boxes(axes, boxes, [(color, 0.2 + 0.2 * int(level[a])) for a, _ in filled])
    if 1 < len(documents) <= 48:
        axes.vlines([start for start, _ in documents[1:]], 0, len(ranks), color=PAPER, linewidth=1.2)
    scene.height = top + lane * len(ranks) + 52
    return scene
