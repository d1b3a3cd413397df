"""What kernels compute where a function decides: the blocks that hold an allowed pair, counted or sampled.

Kernels skip a block of 128 x 128 pairs of which none is allowed, and compute any other whole. Up to `SIDE` tokens the
function is called on every pair, and the blocks are counted. In longer sequences it is called on `SIDE` rows and `SIDE`
keys, spread evenly over the blocks: at 131,072 tokens on 16 pairs of each. The pairs lie at fixed places, the same on
every rank, and at other distances in every block, so that no stride of a mask falls between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longspan.masks import bands as bd
from longspan.masks.plane import Bools, Plane
from longspan.masks.tiles import EMPTY, Classifier, tile_pairs
from longspan.spans import Ints, Span, join

Floats = NDArray[np.float64]
Pairs = NDArray[np.int64 | np.float64]

BLOCK = 128
SIDE = 4096
MAX_BLOCKS = 1024
"""Blocks of a side; in longer sequences they are larger."""
ROWS = 64
"""Rows of blocks that are called together."""


@dataclass(frozen=True, eq=False)
class BlockWork:
    """The blocks of one plane that kernels compute: as many as all, 1 each, or a part where closed form decides.

    A block that the sample met only once also counts for those that it missed.
    """

    block: int
    """Tokens of a block's side."""
    before: NDArray[np.float32]
    """The blocks before each row and column of blocks."""
    totals: Floats
    """The blocks in the rows before each row of blocks."""
    variance: Floats
    """Of the number of blocks in each row of blocks; 0 if they were counted."""
    is_counted: bool
    region: Ints

    @staticmethod
    def of(block: int, opened: NDArray[np.float32], variance: Floats, is_counted: bool, region: Ints) -> BlockWork:
        totals = np.concatenate(([0.0], np.cumsum(opened.sum(axis=1, dtype=np.float64))))
        return BlockWork(block, _before(opened), totals, variance, is_counted, region)

    @property
    def opened(self) -> NDArray[np.float32]:
        """How much of each block is computed, rows by keys."""
        return np.diff(np.diff(self.before, axis=0), axis=1)

    @cached_property
    def _region_before(self) -> NDArray[np.float32]:
        edges = self.block * np.arange(len(self.totals), dtype=np.int64)
        return _before((tile_pairs(self.region, edges, edges) / self.block**2).astype(np.float32))

    def per_row(self) -> Ints:
        """Return (start, stop, keys that each of these rows is computed with) of every row of blocks."""
        starts = self.block * np.arange(len(self.variance), dtype=np.int64)
        keys = np.round(self.block * np.diff(self.totals)).astype(np.int64)
        return np.stack((starts, starts + self.block, keys), axis=1)

    def in_rows(self, spans: Ints) -> Floats:
        """Return the pairs that are computed in the rows of each (start, stop) span."""
        at: Floats = np.interp(spans[:, :2] / self.block, np.arange(len(self.totals)), self.totals)
        return (at[:, 1] - at[:, 0]) * self.block**2

    def variance_of_rows(self, spans: Ints, owner: Ints, num: int) -> Floats:
        """Return the variance of `in_rows`, summed by the owner of each span."""
        starts = self.block * np.arange(len(self.variance), dtype=np.int64)
        i, j = join(spans[:, :2], np.stack((starts, starts + self.block), axis=1))
        held = np.minimum(spans[i, 1], starts[j] + self.block) - np.maximum(spans[i, 0], starts[j])
        share = np.zeros((num, len(starts)))
        np.add.at(share, (owner[i], j), held / self.block)
        return share**2 @ self.variance * float(self.block) ** 4

    def row_at(self, rows: Ints, share: float) -> int:
        """Return the position in sorted (start, stop) rows before which `share` of their pairs lie."""
        pairs = self.in_rows(rows)
        before: Floats = np.cumsum(pairs) - pairs
        target = share * float(pairs.sum())
        k = int(np.searchsorted(before, target, side="right")) - 1
        blocks = np.arange(len(self.totals), dtype=np.float64)
        block_at: Floats = np.interp(rows[k, :1] / self.block, blocks, self.totals)
        there: Floats = block_at + (target - before[k]) / self.block**2
        at: Floats = np.interp(there, self.totals, blocks)
        return min(max(round(float(at[0]) * self.block), int(rows[k, 0])), int(rows[k, 1]))

    def in_bands(self, bands: Ints) -> Floats:
        """Return the pairs that are computed of parts of the plane's bands.

        Bands whose rectangles overlap share what is computed there by their own pairs.
        """
        found = _in_rectangles(self.before, bands / self.block)
        if len(self.region) > 1:
            held = _in_rectangles(self._region_before, bands / self.block) * self.block**2
            return found * self.block**2 * bd.area(bands) / np.maximum(held, 1.0)
        return found * self.block**2


def _before(cells: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sum of the cells before each row and column."""
    sums = np.zeros((cells.shape[0] + 1, cells.shape[1] + 1), dtype=np.float32)
    sums[1:, 1:] = cells.cumsum(axis=0, dtype=np.float64).cumsum(axis=1)
    return sums


def _in_rectangles(sums: NDArray[np.float32], edges: Floats) -> Floats:
    """Return the sum of cells in rectangles, by `_before`; `edges` has first and last row and column of each."""

    def before(q: Floats, k: Floats) -> Floats:
        i, j = (np.clip(x.astype(np.int64), 0, size - 2) for x, size in zip((q, k), sums.shape, strict=True))
        f, g = np.clip(q - i, 0, 1), np.clip(k - j, 0, 1)
        low = sums[i, j] * (1 - g) + sums[i, j + 1] * g
        high = sums[i + 1, j] * (1 - g) + sums[i + 1, j + 1] * g
        return low * (1 - f) + high * f

    q0, q1, k0, k1 = edges[:, :4].T
    return np.maximum(before(q1, k1) - before(q0, k1) - before(q1, k0) + before(q0, k0), 0)


# -- Planes, with or without a function --------------------------------------------------------------------------------


def block_work(plane: Plane) -> BlockWork | None:
    """Return the blocks that kernels compute of a plane in which a function decides; None where bands say it.

    The plane keeps them.
    """
    if plane.predicate is None or plane.is_blocks:
        return None
    if not plane.measured:
        plane.measured.append(_measure(plane))
    return plane.measured[0]


def pairs_in(plane: Plane, bands: Ints) -> Pairs:
    """Return how many pairs kernels compute of parts of the plane's bands."""
    work = block_work(plane)
    return bd.area(bands) if work is None else work.in_bands(bands)


def num_pairs(plane: Plane) -> int:
    """Return how many pairs of the plane kernels compute."""
    work = block_work(plane)
    return int(bd.area(plane.region).sum()) if work is None else int(work.totals[-1] * work.block**2)


# -- Counting and sampling ---------------------------------------------------------------------------------------------


def _measure(plane: Plane) -> BlockWork:
    side = int(plane.region[:, [bd.Q1, bd.K1]].max())
    block = BLOCK
    while -(-side // block) > MAX_BLOCKS:
        block *= 2
    edges = block * np.arange(-(-side // block) + 1, dtype=np.int64)
    asked = Plane(bd.empty(), plane.maybe, plane.predicate)
    variance = np.zeros(len(edges) - 1)
    if side <= SIDE:
        whole = Span(0, side)
        opened = (Classifier(asked, side, BLOCK).classify(whole, whole) != EMPTY).astype(np.float32)
    else:
        opened, variance = _sample(asked, edges)
    if len(plane.sure):
        opened = np.maximum(opened, (tile_pairs(plane.sure, edges, edges) / block**2).astype(np.float32))
    return BlockWork.of(block, opened, variance, side <= SIDE, plane.region)


def _sample(plane: Plane, edges: Ints) -> tuple[NDArray[np.float32], Floats]:
    """Call the function on some pairs of every block that its bands touch.

    Of blocks that hold few allowed pairs, some are missed. If n blocks were met by one pair and m by two, about
    n * n / 2m were met by none (Chao's estimate of unseen species), which are added to the n. The variance is the
    jackknife's over the rows: how far the number of opened blocks changes without one row of every block.
    """
    assert plane.predicate is not None
    num, block = len(edges) - 1, int(edges[1])
    each = 1 << (SIDE // num).bit_length() - 1  # rows, and keys, of a block
    low, high = plane.maybe[:, [bd.Q0, bd.K0]].min(axis=0), plane.maybe[:, [bd.Q1, bd.K1]].max(axis=0) - 1
    touched = _touched(plane.maybe, edges)
    met = np.zeros((num, num), dtype=np.int16)
    without = np.zeros((2, each, num))  # blocks met at all, and once, without one of the rows
    for first in range(0, num, ROWS):
        mine = np.arange(first, min(first + ROWS, num), dtype=np.int64)
        columns = np.flatnonzero(touched[mine].any(axis=0))
        found = np.zeros((each, len(mine), len(columns)), dtype=np.int16)
        for row in range(each if len(columns) else 0):
            q = _places(mine * each + row, block // each, 0)
            parts = np.arange(each, dtype=np.int64)[:, None] + columns * each
            kv = _places(parts.ravel(), block // each, 1 + first * each + row)
            pairs = np.clip(q, low[0], high[0])[:, None], np.clip(kv, low[1], high[1])[None, :]
            answers = plane.predicate.allows(*pairs).reshape(len(mine), each, len(columns))
            found[row] = answers.sum(axis=1, dtype=np.int16)
        found *= touched[mine[:, None], columns]
        whole = found.sum(axis=0, dtype=np.int16)
        met[mine[:, None], columns] = whole
        without[0][:, mine] = (whole > found).sum(axis=-1)
        without[1][:, mine] = (whole == found + 1).sum(axis=-1)
    once, twice = int((met == 1).sum()), int((met == 2).sum())
    missed = max(once - 1, 0) / (2 * (twice + 1))  # of each that was met once
    counts = without[0] + missed * without[1]
    variance = ((counts - counts.mean(axis=0)) ** 2).sum(axis=0) * (each - 1) / each
    return (met > 0) + np.float32(missed) * (met == 1), variance


def _touched(bands: Ints, edges: Ints) -> Bools:
    """Return the blocks in which the bands have a pair, rows by keys."""
    num, block = len(edges) - 1, int(edges[1])
    i, j = join(bands[:, :2], np.stack((edges[:-1], edges[1:]), axis=1))
    first, last = np.maximum(bands[i, bd.Q0], edges[j]), np.minimum(bands[i, bd.Q1], edges[j + 1])
    start = np.maximum(bands[i, bd.K0], first - bands[i, bd.HI])
    stop = np.minimum(bands[i, bd.K1], last - bands[i, bd.LO])
    keep = stop > start
    change = np.zeros((num, num + 1), dtype=np.int32)
    np.add.at(change, (j[keep], start[keep] // block), 1)
    np.add.at(change, (j[keep], (stop[keep] - 1) // block + 1), -1)
    return change.cumsum(axis=1)[:, :num] > 0


def _places(parts: Ints, size: int, seed: int) -> Ints:
    """Return a position in each of these parts of `size` positions, at a place that looks random and is the same in
    every process."""
    mixed = (parts + (seed << 32)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return parts * size + (mixed >> np.uint64(40)).astype(np.int64) % size
