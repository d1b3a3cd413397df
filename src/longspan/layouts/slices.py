"""Slices of equal length, for masks whose work follows no rule: equal tokens and equal work, wherever the rows lie.

A rank gets as few slices as balance the work, 1, 2, 4, ..., 16: the heaviest goes first, to the rank with the least
work that lacks a slice; then slices of the busiest rank are swapped with others. Slices are whole blocks of kernels
if they are long enough, and what is left at the end of the sequence goes to the ranks in turn.

>>> from longspan.layouts.profile import View
>>> from longspan.masks import causal
>>> profile = View.of(causal(8), 8).profile(8)
>>> deal_slices([profile], 8, 2).tolist()
[[0, 4, 1], [4, 8, 0]]

Eight tokens are too few for slices of two, which take at least 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from longspan.layouts.profile import Profile
from longspan.masks.work import BLOCK
from longspan.spans import Ints

Floats = NDArray[np.float64]

EACH = (1, 2, 4, 8, 16)
"""Slices of a rank."""
ENOUGH = 1.015
"""Imbalance (largest rank / mean) at which no more slices are tried."""
GOOD = 1.05
"""The same before slices that are shorter than a block."""
SHORTEST = 16
SWAPS = 256


def deal_slices(profiles: Sequence[Profile], seq_len: int, world_size: int) -> Ints:
    """Return (start, stop, rank) rows, unsorted; tokens of ranks differ by at most one."""
    best, least = np.empty((0, 3), dtype=np.int64), np.inf
    for each in EACH:
        size = seq_len // (each * world_size)
        if (each > 1 and size < SHORTEST) or least <= (ENOUGH if size >= BLOCK else GOOD):
            break
        rows, imbalance = _deal(profiles, seq_len, world_size, each, _rounded(size))
        if imbalance < least:
            best, least = rows, imbalance
    return best


def _rounded(size: int) -> int:
    """Round the size of slices down to whole blocks, or to parts of blocks of at most a quarter of it."""
    grid = BLOCK
    while size % grid and 4 * grid > size:
        grid //= 2
    return size // grid * grid


def _deal(profiles: Sequence[Profile], seq_len: int, world: int, each: int, size: int) -> tuple[Ints, float]:
    """Return the rows of `each` slices of `size` tokens for each rank and of what is left, and the imbalance."""
    ranks = np.arange(world + 1, dtype=np.int64)
    starts = np.arange(each * world, dtype=np.int64) * size
    slices = np.stack((starts, starts + size), axis=1)
    ends = each * world * size + ranks * seq_len // world - ranks * each * size
    rest = np.stack((ends[:-1], ends[1:]), axis=1)
    # (slices, masks): shares of a rank's mean work
    works, load = (
        np.stack([profile.of_spans(spans) * world / max(profile.whole, 1) for profile in profiles], axis=1)
        for spans in (slices, rest)
    )
    rank, room = np.empty(len(slices), dtype=np.int64), np.full(world, each)
    for i in np.argsort(-works.max(axis=1), kind="stable").tolist():
        rank[i] = np.where(room > 0, (load + works[i]).max(axis=1), np.inf).argmin()
        load[rank[i]] += works[i]
        room[rank[i]] -= 1
    _swap(works, load, rank)
    rows = np.concatenate((np.column_stack((slices, rank)), np.column_stack((rest, ranks[:-1]))))
    return rows[rows[:, 1] > rows[:, 0]], float(load.max(initial=0.0))


def _swap(works: Floats, load: Floats, rank: Ints) -> None:
    """Swap slices of the busiest rank with others as long as its work, and that of the other rank, becomes less."""
    for _ in range(SWAPS):
        busiest = int(load.max(axis=1).argmax())
        mine, others = np.flatnonzero(rank == busiest), np.flatnonzero(rank != busiest)
        if not len(mine) or not len(others):
            return
        less = works[mine][:, None] - works[others]
        after = np.maximum((load[busiest] - less).max(axis=-1), (load[rank[others]] + less).max(axis=-1))
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] > load[busiest].max() - 1e-6:
            return
        load[busiest] -= less[i, j]
        load[rank[others[j]]] += less[i, j]
        rank[mine[i]], rank[others[j]] = rank[others[j]], busiest
