"""Kernel tiles from bands: cut where the rows of a store are not contiguous, renumber to local rows, and join.

Rows that lie next to each other in a store need not be neighbours in the sequence. A rank of a zigzag layout has a
chunk from each end, and the pairs among them are one causal triangle in local rows: one tile instead of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from longspan.masks import Band, Classifier, Plane
from longspan.masks import bands as bd
from longspan.masks.tiles import EMPTY, FULL, classifier, runs_of
from longspan.planning.plan import Plan
from longspan.planning.problem import cells, cut_to_rows
from longspan.planning.steps import Compute
from longspan.run.packing import TokenStore
from longspan.spans import Ints, Span
from longspan.tile import KnownTiles, Tile

GRID = 128
"""The side of the squares in which a mask's function is classified."""
PANEL = 256
"""Query rows that share one set of column cuts."""
WORTH = 4
"""Consecutive full squares that are worth a tile of their own."""

Key = tuple[int, int, int]
"""The ids of a compute and of the runs of its queries and keys."""

_known: WeakKeyDictionary[Plan, dict[Key, tuple[KnownTiles, Any]]] = WeakKeyDictionary()
"""Tiles of computes, and what the ids of keys are of."""


def tiles_for(plan: Plan, compute: Compute, plane: Plane, q: TokenStore, kv: TokenStore) -> KnownTiles:
    """Return the tiles of one compute of a plan, cached: those of forward and backward are the same."""
    known = _known.setdefault(plan, {})
    key = id(compute), id(q.runs), id(kv.runs)
    if key not in known:
        tiles = tiles_of(compute.bands, q, kv)
        if compute.maybe:
            more = asking_tiles(compute.maybe, classifier(plane, plan.layout.seq_len, GRID, plan.mask.known), q, kv)
            tiles = sorted((*tiles, *more), key=lambda tile: (tile.q0, tile.k0))
        tight = KnownTiles(tight for tile in tiles if (tight := tile.tight()) is not None)
        known[key] = tight, (compute, q.runs, kv.runs)
    return known[key][0]


def tiles_of(bands: tuple[Band, ...], q: TokenStore, kv: TokenStore) -> list[Tile]:
    """Return the tiles of a compute, ordered by query rows and then keys, which is the order of merging.

    Of eight causal tokens in zigzag, rank 0 has 0, 1, 6, 7. In positions its own pairs are three bands. In local rows,
    which are contiguous, the three are one causal triangle, which is one kernel call::

        keys      0 1 6 7          0 1 2 3
        query 0   a . . .      0   x . . .
              1   a a . .      1   x x . .
              6   b b c .      2   x x x .
              7   b b c c      3   x x x x

    >>> from longspan.run.packing import laid_out
    >>> rows = TokenStore(laid_out(zigzag(8, 2).span_table(0)), Span(0, 1), Span(0, 1), ())
    >>> bands = tuple(Band.parse(text) for text in ("0:2x0:2/0..", "6:8x0:2", "6:8x6:8/0.."))
    >>> tiles_of(bands, rows, rows)
    [Tile(q0=0, q1=4, k0=0, k1=4, lo=0, hi=None, asks=False)]
    """
    return join_tiles(join_tiles(_tiles(_cut_to_stores(bands, q, kv), q, kv), _is_right_of), _is_below)


def asking_tiles(maybe: tuple[Band, ...], kinds: Classifier, q: TokenStore, kv: TokenStore) -> list[Tile]:
    """Return tiles of the pairs on which a function decides, without pairs that it hides.

    A panel of rows is cut where the function begins to allow nothing or everything. Short stretches of full squares
    stay with their neighbours: one call with the function costs less than three calls.
    """
    cuts = _cut_to_stores(maybe, q, kv)
    tiles: list[Tile] = []
    for band, tile in zip(cuts.tolist(), _tiles(cuts, q, kv), strict=True):
        q0, q1, k0, k1 = band[:4]
        for first in range(q0 // PANEL * PANEL, q1, PANEL):
            rows = Span(max(first, q0), min(first + PANEL, q1))
            for start, stop, asks in stretches(kinds.classify(rows, Span(k0, k1)), k0 // GRID):
                a, b = max(start * GRID, k0) - k0 + tile.k0, min(stop * GRID, k1) - k0 + tile.k0
                part = tile.part(rows.start - q0 + tile.q0, rows.stop - q0 + tile.q0, a, b)
                tiles += [] if part is None else [replace(part, asks=asks)]
    plain = join_tiles(join_tiles([tile for tile in tiles if not tile.asks], _is_right_of), _is_below)
    return [*plain, *(tile for tile in tiles if tile.asks)]


def stretches(kinds: NDArray[np.int8], first: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, asks) of columns that some row of a panel sees; `kinds` classify its squares.

    >>> list(stretches(np.array([[2, 2, 2, 2, 1, 0, 1, 2, 1]], dtype=np.int8), first=10))
    [(10, 14, False), (14, 15, True), (16, 19, True)]
    """
    some, every = (kinds != EMPTY).any(axis=0), (kinds == FULL).all(axis=0)
    for start, stop in runs_of(every):
        touches = (start > 0 and some[start - 1]) or (stop < len(some) and some[stop])
        if touches and stop - start < WORTH:
            every[start:stop] = False
    for flags, asks in ((every, False), (some & ~every, True)):
        yield from ((first + start, first + stop, asks) for start, stop in runs_of(flags))


def _cut_to_stores(bands: tuple[Band, ...], q: TokenStore, kv: TokenStore) -> Ints:
    """Cut bands where rows of the stores are not contiguous; sort them by query and key."""
    rows, _ = cut_to_rows(bd.as_array(bands), q.runs[:, :2])
    rows = bd.tighten(cells(rows, kv.runs[:, :2]))
    return rows[np.lexsort((rows[:, bd.K0], rows[:, bd.Q0]))]


def _tiles(rows: Ints, q: TokenStore, kv: TokenStore) -> list[Tile]:
    """Convert bands that lie in one run of each store to local rows."""
    q0, k0 = _local(q, rows[:, bd.Q0]), _local(kv, rows[:, bd.K0])
    num_q, num_k = rows[:, bd.Q1] - rows[:, bd.Q0], rows[:, bd.K1] - rows[:, bd.K0]
    shift = rows[:, bd.Q0] - rows[:, bd.K0]
    lo, hi = rows[:, bd.LO] - shift, rows[:, bd.HI] - shift
    table = np.stack((q0, q0 + num_q, k0, k0 + num_k, lo, hi), axis=1)
    open_lo, open_hi = lo <= 1 - num_k, hi >= num_q - 1  # bounds that exclude no pair of the tile
    return [
        Tile(a, b, c, d, None if no_lo else low, None if no_hi else high)
        for (a, b, c, d, low, high), no_lo, no_hi in zip(
            table.tolist(), open_lo.tolist(), open_hi.tolist(), strict=True
        )
    ]


def _local(store: TokenStore, position: Ints) -> Ints:
    run = np.searchsorted(store.runs[:, 0], position, side="right") - 1
    return store.runs[run, 2] + position - store.runs[run, 0]


def join_tiles(tiles: Iterable[Tile], fit: Callable[[Tile, Tile], bool]) -> list[Tile]:
    """Join neighbouring tiles that fit and whose pairs are one band.

    >>> join_tiles([Tile(0, 4, 0, 4), Tile(0, 4, 4, 8, lo=0)], _is_right_of)
    [Tile(q0=0, q1=4, k0=0, k1=8, lo=-4, hi=None, asks=False)]
    >>> join_tiles([Tile(0, 4, 0, 4, lo=0), Tile(4, 8, 4, 8, lo=0)], _is_below)  # two documents
    [Tile(q0=0, q1=4, k0=0, k1=4, lo=0, hi=None, asks=False), Tile(q0=4, q1=8, k0=4, k1=8, lo=0, hi=None, asks=False)]
    """
    joint: list[Tile] = []
    for tile in tiles:
        both = _both(joint[-1], tile) if joint and fit(joint[-1], tile) else None
        if both is None:
            joint.append(tile)
        else:
            joint[-1] = both
    return joint


def _is_right_of(a: Tile, b: Tile) -> bool:
    return (a.q0, a.q1, a.k1) == (b.q0, b.q1, b.k0)


def _is_below(a: Tile, b: Tile) -> bool:
    return a.q1 == b.q0 and a.k0 <= b.k0 <= a.k1 <= b.k1


def _both(a: Tile, b: Tile) -> Tile | None:
    """Return one tile with the pairs of both, or None. Bounds are compared as differences of local rows."""
    q0, q1, k0, k1 = a.q0, b.q1, a.k0, b.k1
    los = {t.lo + t.q0 - t.k0 for t in (a, b) if t.lo is not None}
    his = {t.hi + t.q0 - t.k0 for t in (a, b) if t.hi is not None}
    if len(los) > 1 or len(his) > 1:
        return None
    lo, hi = min(los, default=None), max(his, default=None)
    for t in (a, b):  # a bound of one tile must not exclude pairs of the other
        if lo is not None and t.lo is None and t.q0 - t.k1 + 1 < lo:
            return None
        if hi is not None and t.hi is None and t.q1 - 1 - t.k0 > hi:
            return None
    if a.q1 == b.q0:  # bounds must exclude the corners that belong to neither tile
        if a.k1 < b.k1 and (lo is None or a.q1 - 1 - a.k1 >= lo):
            return None
        if a.k0 < b.k0 and (hi is None or b.q0 - b.k0 + 1 <= hi):
            return None
    shift = q0 - k0
    return Tile(q0, q1, k0, k1, None if lo is None else lo - shift, None if hi is None else hi - shift)
