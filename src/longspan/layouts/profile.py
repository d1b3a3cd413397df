"""The work in the rows of masks: how many pairs lie before any row.

The number of keys that a row attends to is linear between the edges and bends of the bands, so the number of pairs
before any row is quadratic there. No cost grows with the length of the sequence. Where a function decides, pairs are
those of the blocks that kernels compute (`masks.work`), equally many in every row of a row of blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.masks import Mask, Plane
from longspan.masks import bands as bd
from longspan.masks.work import block_work
from longspan.spans import Ints

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Profile:
    """Twice the allowed pairs in the rows before each edge, and the quadratic that holds until the next edge.

    Twice, so that triangles of pairs are integers.
    """

    edges: Ints
    twice: Ints
    linear: Ints
    square: Ints

    @property
    def whole(self) -> int:
        """Twice the allowed pairs of all rows."""
        return int(self.twice[-1])

    def before(self, rows: Ints) -> Ints:
        """Return twice the allowed pairs in the rows before each of `rows`.

        >>> profile_of(np.array([[0, 4, 0, 4, 0, bd.LIMIT]]), 4).before(np.arange(5)).tolist()
        [0, 2, 6, 12, 20]
        """
        k = np.searchsorted(self.edges, rows, side="right") - 1
        d = rows - self.edges[k]
        return self.twice[k] + d * (self.linear[k] + d * self.square[k])

    def of_spans(self, spans: Ints) -> Ints:
        """Return twice the allowed pairs in the rows of each span."""
        return self.before(spans[:, 1]) - self.before(spans[:, 0])

    def reader(self) -> Callable[[int], int]:
        """Return `before` for one row at a time, without numpy, which is slow on single numbers."""
        edges, twice, linear, square = (part.tolist() for part in (self.edges, self.twice, self.linear, self.square))

        def before(row: int) -> int:
            k = bisect_right(edges, row) - 1
            d = row - edges[k]
            return twice[k] + d * (linear[k] + d * square[k])

        return before


def profile_of(bands: Ints, seq_len: int, weights: Ints | None = None, rows: Ints | None = None) -> Profile:
    """Return the work of bands over rows 0 to seq_len; `weights` says how often each band counts.

    To it is added that of `rows`, (start, stop, keys of each row), in which functions decide.

    Row q of a band attends to keys from max(k0, q - hi) up to min(k1, q - lo + 1): the upper end stops rising at
    `flat`, the lower end starts rising at `lift`. There, and at the band's edges, the number of keys jumps or bends.
    """
    weight = np.ones(len(bands), dtype=np.int64) if weights is None else weights
    q0, q1, k0, k1, lo, hi = bands.T
    flat, lift = k1 + lo - 1, k0 + hi
    rows = np.empty((0, 3), dtype=np.int64) if rows is None else rows

    def num_keys(q: Ints) -> Ints:
        return np.minimum(k1, q - lo + 1) - np.maximum(k0, q - hi)

    at_flat, at_lift = (q0 < flat) & (flat < q1), (q0 < lift) & (lift < q1)
    position = np.concatenate((q0, q1, flat[at_flat], lift[at_lift]))
    edges, where = np.unique(np.concatenate((position, [0, seq_len], *rows[:, :2].T)), return_inverse=True)
    where, where_rows = where[: len(position)], where[len(position) + 2 :]
    jump, bend = np.zeros(len(edges), dtype=np.int64), np.zeros(len(edges), dtype=np.int64)
    np.add.at(jump, where[: 2 * len(bands)], np.concatenate((weight * num_keys(q0), -weight * num_keys(q1))))
    np.add.at(jump, where_rows, np.concatenate((rows[:, 2], -rows[:, 2])))
    first = (q0 < flat).astype(np.int64) - (q0 >= lift)
    last = (flat >= q1).astype(np.int64) - (lift < q1)
    np.add.at(bend, where, np.concatenate((weight * first, -weight * last, -weight[at_flat], -weight[at_lift])))
    slopes = np.cumsum(bend)
    width = np.diff(edges)
    jump[1:] += slopes[:-1] * width
    linear = 2 * np.cumsum(jump) - slopes
    twice = np.concatenate(([0], np.cumsum(width * (linear[:-1] + width * slopes[:-1]))))
    return Profile(edges, twice, linear, slopes)


def profile_of_plane(plane: Plane, seq_len: int) -> Profile:
    """Return the work of one plane."""
    work = block_work(plane)
    if work is None:
        return profile_of(plane.region, seq_len)
    return profile_of(bd.empty(), seq_len, rows=_inside(work.per_row(), seq_len))


def _inside(rows: Ints, seq_len: int) -> Ints:
    """Return the rows without what the last blocks have beyond the sequence."""
    return np.column_stack((np.minimum(rows[:, :2], seq_len), rows[:, 2:]))


@dataclass(frozen=True, slots=True)
class View:
    """One mask as bands, each with the number of heads and batch rows that use it, and the rows of its functions.

    Bands in which a function decides have the weight 0: what they cost is in `rows`, (start, stop, keys of each row).
    """

    bands: Ints
    weights: Ints
    rows: Ints

    @staticmethod
    def of(mask: Mask, seq_len: int) -> View:
        mask = mask.resized(seq_len)
        users = Counter(id(plane) for row in mask.grid for plane in row)
        regions = [bd.tighten(region) for region in mask.regions(seq_len)]
        rows, count = [np.empty((0, 3), dtype=np.int64)], list[int]()
        for plane in mask.distinct_planes():
            work = block_work(plane)
            count.append(users[id(plane)] if work is None else 0)
            if work is not None:
                rows.append(work.per_row() * [1, 1, users[id(plane)]])
        weights = np.repeat(np.array(count, dtype=np.int64), [len(region) for region in regions])
        return View(np.concatenate(regions), weights, _inside(np.concatenate(rows), seq_len))

    def profile(self, seq_len: int) -> Profile:
        return profile_of(self.bands, seq_len, self.weights, self.rows)

    def mirror(self, seq_len: int) -> View:
        """Return the same pairs with positions counted from the end."""
        q0, q1, k0, k1, lo, hi = self.bands.T
        turned = (seq_len - q1, seq_len - q0, seq_len - k1, seq_len - k0, -hi, -lo)
        start, stop, keys = self.rows.T
        rows = np.stack((seq_len - stop, seq_len - start, keys), axis=1)
        return View(np.stack(turned, axis=1), self.weights, rows)
