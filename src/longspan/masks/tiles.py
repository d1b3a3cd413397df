"""Tiles and key spans of a plane: which tiles are empty, partial or full, and which spans of keys each row sees."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.plane import Bools, ByIdentity, Plane
from longspan.spans import Ints, Span, check_int, join, run_table, steps_within, true_runs, union

EMPTY, PARTIAL, FULL = 0, 1, 2


def classifier(plane: Plane, seq_len: int, tile: int, known: dict[Any, Any]) -> Classifier:
    """Return the classifier of a plane, cached in `known`, which belongs to its mask."""
    key = (ByIdentity(plane), seq_len, tile)
    if key not in known:
        known[key] = Classifier(plane, seq_len, tile)
    return known[key]


class Classifier:
    """Which tiles of a plane are empty, partial or full; computed when needed, and cached.

    >>> from longspan.masks import from_mask_mod
    >>> classifier = Classifier(from_mask_mod(lambda b, h, q, kv: q >= kv).plane(), seq_len=6, tile=2)
    >>> classifier.classify(Span(2, 6), Span(0, 6)).tolist()
    [[2, 1, 0], [2, 2, 1]]
    """

    def __init__(self, plane: Plane, seq_len: int, tile: int = 128) -> None:
        self.plane, self.seq_len = plane, seq_len
        self.tile = check_int(tile, "tile", "classify()", MaskError, low=1)
        self._seen: dict[int, NDArray[np.int8]] = {}  # by tile row; -1 is not yet known

    def classify(self, q: Span, kv: Span) -> NDArray[np.int8]:
        """Return EMPTY, PARTIAL or FULL for every tile that the two spans touch; tiles lie on a global grid."""
        tile = self.tile
        stop = min(q.stop, self.seq_len), min(kv.stop, self.seq_len)
        first, last = kv.start // tile, -(-stop[1] // tile)
        rows = [self._tile_row(row, first, last) for row in range(q.start // tile, -(-stop[0] // tile))]
        return np.stack(rows) if rows else np.empty((0, max(last - first, 0)), dtype=np.int8)

    def _tile_row(self, row: int, first: int, last: int) -> NDArray[np.int8]:
        tile = self.tile
        known = self._seen.get(row)
        if known is None:
            known = self._seen[row] = np.full(-(-self.seq_len // tile), -1, dtype=np.int8)
        unknown = known[first:last] < 0
        if unknown.any():
            q = row * tile, min((row + 1) * tile, self.seq_len)
            region = bd.tighten(bd.cut(self.plane.region, q, (first * tile, min(last * tile, self.seq_len))))
            touched = np.zeros_like(unknown)
            for start, stop in union(region[:, 2:4]).tolist():
                touched[start // tile - first : -(-stop // tile) - first] = True
            known[first:last][unknown & ~touched] = EMPTY
            for start, stop in runs_of(unknown & touched):
                for at in range(first + start, first + stop, 64):  # 64 tiles at a time: a temporary of one megabyte
                    end = min(at + 64, first + stop)
                    keys = np.arange(at * tile, min(end * tile, self.seq_len), dtype=np.int64)
                    allowed = self.plane.allows(np.arange(*q, dtype=np.int64)[:, None], keys[None, :])
                    edges = np.arange(0, int(allowed.shape[1]), tile, dtype=np.int64)
                    any_allowed = np.logical_or.reduceat(allowed.any(axis=0), edges)
                    all_allowed = np.logical_and.reduceat(allowed.all(axis=0), edges)
                    known[at:end] = np.where(all_allowed, FULL, np.where(any_allowed, PARTIAL, EMPTY))
        return known[first:last].copy()


def tile_pairs(pairs: Plane | Ints, q_edges: Ints, kv_edges: Ints) -> Ints:
    """Return how many pairs bands allow in every tile between neighbouring edges; a plane's function is called on all.

    >>> from longspan import masks
    >>> tile_pairs(masks.causal(4).plane().sure, np.array([0, 2, 4]), np.array([0, 2, 4])).tolist()
    [[3, 0], [4, 3]]
    """
    if isinstance(pairs, Plane) and pairs.predicate is not None:
        q, kv = (np.arange(edges[0], edges[-1], dtype=np.int64) for edges in (q_edges, kv_edges))
        allowed = pairs.allows(q[:, None], kv[None, :]).astype(np.int64)
        below = np.pad(allowed.cumsum(axis=0).cumsum(axis=1), (1, 0))  # pairs before each pair's row and column
        corners = below[np.ix_(q_edges - q_edges[0], kv_edges - kv_edges[0])]
        return np.diff(np.diff(corners, axis=0), axis=1)
    parts = pairs.sure if isinstance(pairs, Plane) else pairs
    place: list[Ints] = []
    for start, stop, edges in ((bd.Q0, bd.Q1, q_edges), (bd.K0, bd.K1, kv_edges)):
        band, interval = join(parts[:, start : stop + 1], np.stack((edges[:-1], edges[1:]), axis=1))
        parts = parts[band].copy()
        parts[:, start] = np.maximum(parts[:, start], edges[interval])
        parts[:, stop] = np.minimum(parts[:, stop], edges[interval + 1])
        place = [*(index[band] for index in place), interval]
        if start == bd.Q0:  # the keys that these rows see
            parts[:, bd.K0] = np.maximum(parts[:, bd.K0], parts[:, bd.Q0] - parts[:, bd.HI])
            parts[:, bd.K1] = np.minimum(parts[:, bd.K1], parts[:, bd.Q1] - parts[:, bd.LO])
            keep = parts[:, bd.K1] > parts[:, bd.K0]
            parts, place = parts[keep], [interval[keep]]
    counts = np.zeros((len(q_edges) - 1, len(kv_edges) - 1), dtype=np.int64)
    np.add.at(counts, tuple(place), bd.area(parts))
    return counts


def runs_of(flags: Bools) -> list[tuple[int, int]]:
    """Return (start, stop) of every run of true flags.

    >>> runs_of(np.array([True, False, True, True]))
    [(0, 1), (2, 4)]
    """
    return [(start, stop) for _, start, stop in true_runs(flags[None]).tolist()]


# -- Key spans by row --------------------------------------------------------------------------------------------------
# With any bands, one query row sees a few spans of keys.


KeySpans = tuple[Ints, Ints, Ints]
"""Row, first key and the key after the last one of every span that rows see: by row, then by key."""


def key_spans(bands: Ints, positions: Ints) -> KeySpans:
    """Return the spans of keys that each row (a position, or -1) sees; spans that touch are joined.

    A window of two keys over tokens 2 and 3, and the first token, which all may see:

    >>> window, first = bd.Band.parse("2:4x1:4/0..1"), bd.Band.parse("2:4x0:1")
    >>> row, start, stop = key_spans(bd.as_array((window, first)), np.array([3, 2]))
    >>> [(int(i), int(a), int(b)) for i, a, b in zip(row, start, stop)]
    [(0, 0, 1), (0, 2, 4), (1, 0, 3)]
    """
    if not len(bands):
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing
    slabs = bd.slabs_of(bands)
    band, first, count = bd.by_slab(bands, slabs)
    slab = np.clip(np.searchsorted(slabs[:, 0], positions, side="right") - 1, 0, None)
    many = np.where((positions >= slabs[slab, 0]) & (positions < slabs[slab, 1]), count[slab], 0)
    row = np.repeat(np.arange(len(positions), dtype=np.int64), many)
    mine = bands[band[first[slab[row]] + steps_within(many)]]
    start = np.maximum(mine[:, bd.K0], positions[row] - mine[:, bd.HI])
    stop = np.minimum(mine[:, bd.K1], positions[row] - mine[:, bd.LO] + 1)
    keep = stop > start
    row, start, stop = row[keep], start[keep], stop[keep]
    order = np.lexsort((start, row))
    row, start, stop = row[order], start[order], stop[order]
    first, after = run_table((row[1:] != row[:-1]) | (start[1:] != stop[:-1]), len(row)).T
    return row[first], start[first], stop[after - 1]


def most_spans(spans: KeySpans) -> int:
    """Return the largest number of spans of a row."""
    return int(np.bincount(spans[0]).max(initial=0))


def span_table(spans: KeySpans, depth: int, num_rows: int) -> Ints:
    """Return where the k-th span of every row starts and stops, (depth, 2, rows); missing spans are empty.

    >>> span_table((np.array([0, 0, 2]), np.array([0, 5, 1]), np.array([2, 6, 4])), 2, 3).tolist()
    [[[0, 0, 1], [2, 0, 4]], [[5, 0, 0], [6, 0, 0]]]
    """
    row, start, stop = spans
    table = np.zeros((depth, 2, num_rows), dtype=np.int64)
    k = steps_within(np.bincount(row, minlength=num_rows))
    table[k, 0, row], table[k, 1, row] = start, stop
    return table


def pairs_per_block(spans: KeySpans, num_rows: int, keys: Ints, size: int) -> Ints:
    """Return how many pairs of every block the spans hold; `keys` are the columns' positions, padding (-1) last.

    A row whose keys end at column c of block t has `size` keys in each block before t and c - t * size in t itself;
    what begins at a column is taken off in the same way. So only the blocks of the ends are written to.

    >>> pairs_per_block((np.array([0, 1]), np.array([0, 1]), np.array([1, 4])), 2, np.arange(4), 2).tolist()
    [[2, 2]]
    """
    row, start, stop = spans
    height, width = -(-num_rows // size), -(-len(keys) // size) + 1
    ends, rest = np.zeros(height * width), np.zeros(height * width)
    # Columns as stretches of ascending positions: a span of keys is one span in each stretch.
    real = keys[keys >= 0]
    cuts = np.flatnonzero(real[1:] < real[:-1]) + 1
    for offset, stretch in zip([0, *cuts.tolist()], np.split(real, cuts), strict=True):
        for edge, sign in ((start, -1), (stop, 1)):
            column = offset + np.searchsorted(stretch, edge)
            place = row // size * width + column // size
            ends += sign * np.bincount(place, minlength=height * width)
            rest += sign * np.bincount(place, weights=column % size, minlength=height * width)
    before = np.cumsum(ends.reshape(height, width), axis=1)  # as many spans begin as end: what is not before is after
    return (rest.reshape(height, width) - size * before)[:, :-1].astype(np.int64)


def list_chosen_first(chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the number of chosen blocks in every row of blocks (the last dim), and all blocks, chosen ones first.

    >>> [part.tolist() for part in list_chosen_first(np.array([[False, True, True]]))]
    [[2], [[1, 2, 0]]]
    """
    return chosen.sum(axis=-1, dtype=np.int32), np.argsort(~chosen, axis=-1, kind="stable").astype(np.int32)
