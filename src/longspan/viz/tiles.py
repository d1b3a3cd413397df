"""Allowed pairs per tile of a grid, in closed form: what it costs follows bands and tiles, never the sequence."""

from __future__ import annotations

import numpy as np

from longspan.layouts import Layout
from longspan.masks import Mask, Plane
from longspan.masks import bands as bd
from longspan.span import Ints, by_position, join, run_table

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
