"""Which tiles of a plane are empty, partial or full. Functions are asked about the tiles that matter, once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.functions.memo import ByIdentity
from longspan.masks.plane import Bools, Plane
from longspan.span import Ints, Span, true_runs, union, whole

EMPTY, PARTIAL, FULL = 0, 1, 2


def classifier(plane: Plane, seq_len: int, tile: int, known: dict[Any, Any]) -> Classifier:
    """The classifier of a plane, remembered in `known`, which belongs to its mask and ends with it."""
    key = (ByIdentity(plane), seq_len, tile)
    if key not in known:
        known[key] = Classifier(plane, seq_len, tile)
    return known[key]


class Classifier:
    """Which tiles of a plane are empty, partial or full, asked lazily and remembered.

    >>> from longspan.masks import from_mask_mod
    >>> classifier = Classifier(from_mask_mod(lambda b, h, q, kv: q >= kv).plane(), seq_len=6, tile=2)
    >>> classifier.classify(Span(2, 6), Span(0, 6)).tolist()
    [[2, 1, 0], [2, 2, 1]]
    """

    def __init__(self, plane: Plane, seq_len: int, tile: int = 128) -> None:
        tile = whole(tile, "tile", "classify()", MaskError, low=1)
        self.plane = plane
        self.seq_len = seq_len
        self.tile = tile
        self._seen: dict[int, NDArray[np.int8]] = {}  # by tile row; -1 is not yet known

    def classify(self, q: Span, kv: Span) -> NDArray[np.int8]:
        """EMPTY, PARTIAL or FULL for every tile that the two spans touch; tiles lie on a global grid."""
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
                self._evaluate(q, first + start, first + stop, known)
        return known[first:last].copy()

    def _evaluate(self, rows: tuple[int, int], first: int, last: int, known: NDArray[np.int8]) -> None:
        tile = self.tile
        q = np.arange(*rows, dtype=np.int64)
        for start in range(first, last, 64):  # 64 tiles at a time keeps the temporary at one megabyte
            stop = min(start + 64, last)
            kv = np.arange(start * tile, min(stop * tile, self.seq_len), dtype=np.int64)
            allowed = self._allowed(q, kv)
            edges = np.arange(0, len(kv), tile)
            any_allowed = np.logical_or.reduceat(allowed.any(axis=0), edges)
            all_allowed = np.logical_and.reduceat(allowed.all(axis=0), edges)
            known[start:stop] = np.where(all_allowed, FULL, np.where(any_allowed, PARTIAL, EMPTY))

    def _allowed(self, q: Ints, kv: Ints) -> Bools:
        """The pairs of a rectangle. Where the function alone decides, it alone is asked: bands cost ten times more."""
        plane = self.plane
        sides = (int(q[0]), int(q[-1]) + 1), (int(kv[0]), int(kv[-1]) + 1)
        if plane.predicate is not None and _fills(bd.cut(plane.maybe, *sides), q, kv):
            return plane.predicate.allows(q[:, None], kv[None, :])
        return plane.allows(q[:, None], kv[None, :])


def _fills(bands: Ints, q: Ints, kv: Ints) -> bool:
    """Whether one band holds every pair of a rectangle."""
    if len(bands) != 1:
        return False
    q0, q1, k0, k1, lo, hi = bands[0].tolist()
    rows, cols = (int(q[0]), int(q[-1]) + 1), (int(kv[0]), int(kv[-1]) + 1)
    return (q0, q1, k0, k1) == (*rows, *cols) and lo <= rows[0] - cols[1] + 1 and hi >= rows[1] - 1 - cols[0]


def runs_of(flags: Bools) -> list[tuple[int, int]]:
    """(start, stop) of every run of true flags.

    >>> runs_of(np.array([True, False, True, True]))
    [(0, 1), (2, 4)]
    """
    return [(start, stop) for _, start, stop in true_runs(flags[None]).tolist()]
