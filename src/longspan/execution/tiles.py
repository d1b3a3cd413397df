"""Bands as kernel tiles: cut where the rows of a store are not contiguous, renumbered to local rows, and joined again.

Rows that lie next to each other in a store need not be neighbours in the sequence. A rank of a zigzag layout has a
chunk from each end, and the pairs among them are one causal triangle in local rows: one tile instead of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import numpy as np

from longspan.execution.kernels.contract import Tile
from longspan.execution.rows import Rows
from longspan.masks import Band
from longspan.masks import bands as bd
from longspan.schedules.plan import Plan
from longspan.schedules.problem import cells, in_rows
from longspan.span import Ints

Which = tuple[int, str, int]
"""Rank, direction, and which of its computes."""

_known: WeakKeyDictionary[Plan, dict[Which, list[Tile]]] = WeakKeyDictionary()
"""What was worked out before: a plan is run many times, and a compute's tiles are always the same."""


def tiles_for(plan: Plan, which: Which, bands: tuple[Band, ...], q: Rows, kv: Rows) -> list[Tile]:
    """The tiles of one compute of a plan, remembered."""
    known = _known.setdefault(plan, {})
    if which not in known:
        known[which] = tiles_of(bands, q, kv)
    return known[which]


def tiles_of(bands: tuple[Band, ...], q: Rows, kv: Rows) -> list[Tile]:
    """The tiles of a compute, in the order of query rows and then keys, which is the order of merging."""
    rows = bd.as_array(bands)
    rows, _ = in_rows(rows, q.runs[:, :2])
    rows = bd.tighten(cells(rows, kv.runs[:, :2]))
    rows = rows[np.lexsort((rows[:, bd.K0], rows[:, bd.Q0]))]
    q0, k0 = _local(q, rows[:, bd.Q0]), _local(kv, rows[:, bd.K0])
    num_q, num_k = rows[:, bd.Q1] - rows[:, bd.Q0], rows[:, bd.K1] - rows[:, bd.K0]
    shift = rows[:, bd.Q0] - rows[:, bd.K0]
    lo, hi = rows[:, bd.LO] - shift, rows[:, bd.HI] - shift
    table = np.stack((q0, q0 + num_q, k0, k0 + num_k, lo, hi), axis=1)
    open_lo, open_hi = lo <= 1 - num_k, hi >= num_q - 1  # bounds that exclude no pair of the tile
    tiles = [
        Tile(a, b, c, d, None if no_lo else low, None if no_hi else high)
        for (a, b, c, d, low, high), no_lo, no_hi in zip(
            table.tolist(), open_lo.tolist(), open_hi.tolist(), strict=True
        )
    ]
    return joined(joined(tiles, _beside), _below)


def _local(store: Rows, position: Ints) -> Ints:
    run = np.searchsorted(store.runs[:, 0], position, side="right") - 1
    return store.runs[run, 2] + position - store.runs[run, 0]


def joined(tiles: Iterable[Tile], fit: Callable[[Tile, Tile], bool]) -> list[Tile]:
    """The same pairs in fewer tiles: neighbours that fit become one where a single band says what both say.

    >>> joined([Tile(0, 4, 0, 4), Tile(0, 4, 4, 8, lo=0)], _beside)
    [Tile(q0=0, q1=4, k0=0, k1=8, lo=-4, hi=None)]
    >>> joined([Tile(0, 4, 0, 4, lo=0), Tile(4, 8, 4, 8, lo=0)], _below)  # two documents
    [Tile(q0=0, q1=4, k0=0, k1=4, lo=0, hi=None), Tile(q0=4, q1=8, k0=4, k1=8, lo=0, hi=None)]
    """
    made: list[Tile] = []
    for tile in tiles:
        both = _both(made[-1], tile) if made and fit(made[-1], tile) else None
        if both is None:
            made.append(tile)
        else:
            made[-1] = both
    return made


def _beside(a: Tile, b: Tile) -> bool:
    return (a.q0, a.q1, a.k1) == (b.q0, b.q1, b.k0)


def _below(a: Tile, b: Tile) -> bool:
    return a.q1 == b.q0 and a.k0 <= b.k0 <= a.k1 <= b.k1


def _both(a: Tile, b: Tile) -> Tile | None:
    """One tile with the pairs of two, or None if there is none. Bounds are compared as differences of local rows."""
    q0, q1, k0, k1 = a.q0, b.q1, a.k0, b.k1
    los = {t.lo + t.q0 - t.k0 for t in (a, b) if t.lo is not None}
    his = {t.hi + t.q0 - t.k0 for t in (a, b) if t.hi is not None}
    if len(los) > 1 or len(his) > 1:
        return None
    lo, hi = min(los, default=None), max(his, default=None)
    for t in (a, b):  # a bound of one must not cut the other
        if lo is not None and t.lo is None and t.q0 - t.k1 + 1 < lo:
            return None
        if hi is not None and t.hi is None and t.q1 - 1 - t.k0 > hi:
            return None
    if a.q1 == b.q0:  # the corners that belong to neither must be cut off
        if a.k1 < b.k1 and (lo is None or a.q1 - 1 - a.k1 >= lo):
            return None
        if a.k0 < b.k0 and (hi is None or b.q0 - b.k0 + 1 <= hi):
            return None
    shift = q0 - k0
    return Tile(q0, q1, k0, k1, None if lo is None else lo - shift, None if hi is None else hi - shift)
