"""What a layout needs to know of masks, in closed form: work per row, and the segments that are cheap to keep whole.

A segment is a stretch of rows that look at one another (a document, a chunk, the tokens of a global prefix); between
two segments a cut costs nothing. Work is counted in allowed pairs. The number of keys a row sees is linear between the
edges and bends of the bands, so the pairs before any row are quadratic there: nothing here grows with the sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.masks import bands as bd
from longspan.span import Ints, intersect, join, union

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Profile:
    """Twice the allowed pairs in the rows before each edge, and the quadratic that holds until the next edge.

    Twice, so that triangles of pairs stay whole numbers.
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
        """Twice the allowed pairs in the rows before each of `rows`.

        >>> profile_of(np.array([[0, 4, 0, 4, 0, bd.LIMIT]]), 4).before(np.arange(5)).tolist()
        [0, 2, 6, 12, 20]
        """
        k = np.searchsorted(self.edges, rows, side="right") - 1
        d = rows - self.edges[k]
        return self.twice[k] + d * (self.linear[k] + d * self.square[k])

    def of_spans(self, spans: Ints) -> Ints:
        """Twice the allowed pairs in the rows of each span."""
        return self.before(spans[:, 1]) - self.before(spans[:, 0])

    def reader(self) -> Callable[[int], int]:
        """`before` for one row at a time, fast: numpy is slow on single numbers."""
        edges, twice, linear, square = (part.tolist() for part in (self.edges, self.twice, self.linear, self.square))

        def before(row: int) -> int:
            k = bisect_right(edges, row) - 1
            d = row - edges[k]
            return twice[k] + d * (linear[k] + d * square[k])

        return before


def profile_of(bands: Ints, seq_len: int, weights: Ints | None = None) -> Profile:
    """The work of bands over rows 0 to seq_len; `weights` says how often each band counts."""
    rows, weight = bands, np.ones(len(bands), dtype=np.int64) if weights is None else weights
    position, value, slope = _bends(rows, weight)
    edges, where = np.unique(np.concatenate((position, [0, seq_len])), return_inverse=True)
    jump, bend = np.zeros(len(edges), dtype=np.int64), np.zeros(len(edges), dtype=np.int64)
    np.add.at(jump, where[:-2], value)
    np.add.at(bend, where[:-2], slope)
    slopes = np.cumsum(bend)
    width = np.diff(edges)
    jump[1:] += slopes[:-1] * width
    values = np.cumsum(jump)
    linear = 2 * values - slopes
    twice = np.concatenate(([0], np.cumsum(width * (linear[:-1] + width * slopes[:-1]))))
    return Profile(edges, twice, linear, slopes)


def _bends(rows: Ints, weight: Ints) -> tuple[Ints, Ints, Ints]:
    """Where the number of keys per row jumps or bends: positions, jumps of the value, changes of the slope.

    Row q of a band sees keys from max(k0, q - hi) up to min(k1, q - lo + 1): the upper end stops rising at `flat`, the
    lower end starts rising at `lift`.
    """
    q0, q1, k0, k1, lo, hi = rows.T
    flat, lift = k1 + lo - 1, k0 + hi

    def seen(q: Ints) -> Ints:
        return np.minimum(k1, q - lo + 1) - np.maximum(k0, q - hi)

    at_flat, at_lift = (q0 < flat) & (flat < q1), (q0 < lift) & (lift < q1)
    position = np.concatenate((q0, q1, flat[at_flat], lift[at_lift]))
    none = np.zeros(int(at_flat.sum()) + int(at_lift.sum()), dtype=np.int64)
    value = np.concatenate((weight * seen(q0), -weight * seen(q1), none))
    first = (q0 < flat).astype(np.int64) - (q0 >= lift)
    last = (flat >= q1).astype(np.int64) - (lift < q1)
    slope = np.concatenate((weight * first, -weight * last, -weight[at_flat], -weight[at_lift]))
    return position, value, slope


@dataclass(frozen=True, slots=True)
class Cuts:
    """Stretches that together are the whole sequence; `deep` where late rows look back to the beginning."""

    edges: Ints
    deep: Bools

    @property
    def spans(self) -> Ints:
        return np.stack((self.edges[:-1], self.edges[1:]), axis=1)


def segments_of(bands: Ints, seq_len: int, grain: int) -> Cuts:
    """The segments of bands. Neighbours shorter than `grain` tokens are joined, up to about `grain` together.

    A band joins the keys it shows to rows among them. Rows that only look far away (at a global prefix, at the root of
    a tree) need those keys wherever they are held, so that look joins nothing.

    >>> segments_of(np.array([[0, 6, 0, 6, 0, 9], [6, 9, 6, 9, 0, 9], [0, 9, 0, 1, 0, 9]]), 9, 1).edges.tolist()
    [0, 6, 9]
    """
    near = bands[np.maximum(bands[:, bd.Q0], bands[:, bd.K0]) < np.minimum(bands[:, bd.Q1], bands[:, bd.K1])]
    links = near[np.argsort(near[:, bd.K0], kind="stable")]
    reach = np.maximum.accumulate(links[:, bd.K1])
    first = np.concatenate(([True], links[1:, bd.K0] >= reach[:-1]))[: len(links)]
    last = np.concatenate((first[1:], [True]))[: len(links)]
    linked = np.stack((links[first, bd.K0], reach[last]), axis=1)
    loose = np.concatenate((bands[:, : bd.K0].ravel(), [0, seq_len]))
    block = np.searchsorted(linked[:, 0], loose, side="right") - 1
    inside = (block >= 0) & (loose < linked[block, 1]) if len(linked) else np.zeros(len(loose), dtype=np.bool_)
    edges = np.unique(np.concatenate((linked.ravel(), loose[~inside], [0, seq_len])))
    edges = _joined(edges, grain)
    back = np.minimum(near[:, bd.HI], near[:, bd.Q1] - 1 - near[:, bd.K0])
    furthest = np.zeros(len(edges) - 1, dtype=np.int64)
    np.maximum.at(furthest, np.searchsorted(edges, near[:, bd.K0], side="right") - 1, back)
    return Cuts(edges, 2 * furthest + 2 >= np.diff(edges))


def _joined(edges: Ints, grain: int) -> Ints:
    """Without the edges between short neighbours that begin in the same `grain` of the sequence."""
    if len(edges) < 3:
        return edges
    short = np.diff(edges) < grain
    bucket = edges[:-1] // max(grain, 1)
    drop = short[1:] & short[:-1] & (bucket[1:] == bucket[:-1])
    return edges[np.concatenate(([True], ~drop, [True]))]


def remote_rows(bands: Ints, rows: Ints, world_size: int, seq_len: int) -> Ints:
    """How many keys each rank needs and does not hold; `rows` are its (start, stop, rank), sorted by position.

    >>> remote_rows(np.array([[0, 8, 0, 8, 0, 8]]), np.array([[0, 3, 0], [3, 5, 1], [5, 8, 0]]), 2, 8).tolist()
    [2, 3]
    """
    band, span = join(bands[:, : bd.K0], rows[:, :2])
    cut, held = bands[band], rows[span]
    first = np.maximum(cut[:, bd.K0], np.maximum(cut[:, bd.Q0], held[:, 0]) - cut[:, bd.HI])
    last = np.minimum(cut[:, bd.K1], np.minimum(cut[:, bd.Q1], held[:, 1]) - cut[:, bd.LO])
    # One number line per rank, so that all ranks are counted at once.
    line = seq_len + 1
    needed = union(np.stack((first, last), axis=1) + held[:, 2:] * line)
    own = rows[np.argsort(rows[:, 2], kind="stable")]
    present = intersect(needed, union(own[:, :2] + own[:, 2:] * line))
    count = np.bincount(needed[:, 0] // line, weights=needed[:, 1] - needed[:, 0], minlength=world_size)
    count -= np.bincount(present[:, 0] // line, weights=present[:, 1] - present[:, 0], minlength=world_size)
    return count.astype(np.int64)
