"""Band: the closed-form piece of structured masks, and operations on arrays of disjoint bands.

A band allows the pairs (q, kv) with q in one span, kv in another and `lo <= q - kv <= hi`. A single
band is an object; many bands are an `(n, 6)` int64 array with the columns below. Every function here takes and returns
arrays of *disjoint* bands, at a cost that does not grow with the length of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import MaskError
from longspan.spans import LIMIT, Ints, Span, check_int, join, parse_number, run_table, steps_within, truncated_repr

Q0, Q1, K0, K1, LO, HI = range(6)
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Band:
    """Pairs (q, kv) in `q` x `kv` with `lo <= q - kv <= hi`; an open bound is None.

    >>> Band(Span(0, 4), Span(0, 4), lo=0, hi=None).area
    10
    """

    q: Span
    kv: Span
    lo: int | None
    hi: int | None

    @property
    def area(self) -> int:
        return int(area(as_array((self,)))[0])

    def __repr__(self) -> str:
        lo = "" if self.lo is None else self.lo
        hi = "" if self.hi is None else self.hi
        return f"{self.q}x{self.kv}" + ("" if lo == hi == "" else f"/{lo}..{hi}")

    @staticmethod
    def parse(text: str) -> Band:
        """Return the band of a `repr`.

        >>> Band.parse("0:4x0:9/-2..")
        0:4x0:9/-2..
        """
        place, _, bounds = text.partition("/")
        q, _, kv = place.partition("x")
        lo, _, hi = bounds.partition("..")

        def parse_bound(bound: str) -> int | None:
            digits = bound.removeprefix("-")
            form = "a band is written Q x KV / LO..HI without blanks, as in 0:4x0:9/-2..3"
            return parse_number(digits, form, text, MaskError) * (1 if digits == bound else -1) if bound else None

        return Band(Span.parse(q), Span.parse(kv), parse_bound(lo), parse_bound(hi))


def as_positions(value: ArrayLike, name: str) -> Ints:
    """Return positions as int64; raise for anything but integers."""
    positions = np.asarray(value)
    if positions.size and not np.issubdtype(positions.dtype, np.integer):
        raise MaskError(
            f"allows() got {name} = {truncated_repr(value)} of type {positions.dtype}. Positions are whole numbers."
        )
    return positions.astype(np.int64)


def length_or_none(seq_len: object, where: str) -> int | None:
    return None if seq_len is None else check_int(seq_len, "seq_len", where, MaskError)


def empty() -> Ints:
    return np.empty((0, 6), dtype=np.int64)


def rectangles(q0: ArrayLike, q1: ArrayLike, k0: ArrayLike, k1: ArrayLike) -> Ints:
    """Return a band without bounds for each rectangle of queries q0 to q1 and keys k0 to k1; arguments broadcast.

    >>> as_bands(rectangles(0, 4, [0, 6], [2, 9]))
    (0:4x0:2, 0:4x6:9)
    """
    return np.stack(np.broadcast_arrays(*np.atleast_1d(q0, q1, k0, k1, -LIMIT, LIMIT)), axis=1).astype(np.int64)


def as_array(bands: tuple[Band, ...]) -> Ints:
    """Return bands as rows; an open bound becomes +-LIMIT."""
    rows = [
        (b.q.start, b.q.stop, b.kv.start, b.kv.stop, -LIMIT if b.lo is None else b.lo, LIMIT if b.hi is None else b.hi)
        for b in bands
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def as_bands(rows: Ints) -> tuple[Band, ...]:
    """Return rows as bands; a bound that excludes nothing becomes None, so that equal bands have equal reprs."""
    lo_open = rows[:, LO] <= rows[:, Q0] - rows[:, K1] + 1
    hi_open = rows[:, HI] >= rows[:, Q1] - 1 - rows[:, K0]
    return tuple(
        Band(Span(q0, q1), Span(k0, k1), None if no_lo else lo, None if no_hi else hi)
        for (q0, q1, k0, k1, lo, hi), no_lo, no_hi in zip(
            rows.tolist(), lo_open.tolist(), hi_open.tolist(), strict=True
        )
    )


def drop_empty(rows: Ints) -> Ints:
    """Return the rows that allow a pair: both spans are non-empty and some difference q - kv is within the bounds."""
    low = np.maximum(rows[:, LO], rows[:, Q0] - rows[:, K1] + 1)
    high = np.minimum(rows[:, HI], rows[:, Q1] - 1 - rows[:, K0])
    return rows[(rows[:, Q1] > rows[:, Q0]) & (rows[:, K1] > rows[:, K0]) & (low <= high)]


def tighten(rows: Ints) -> Ints:
    """Return the same pairs with spans shrunk to the queries and keys that occur in them."""
    rows = drop_empty(rows).copy()
    for _ in range(2):  # shrinking one side may shrink the other once more
        rows[:, K0] = np.maximum(rows[:, K0], rows[:, Q0] - rows[:, HI])
        rows[:, K1] = np.minimum(rows[:, K1], rows[:, Q1] - rows[:, LO])
        rows[:, Q0] = np.maximum(rows[:, Q0], rows[:, K0] + rows[:, LO])
        rows[:, Q1] = np.minimum(rows[:, Q1], rows[:, K1] + rows[:, HI])
    return rows


def _half(x: NDArray[np.int64]) -> Ints:
    """Return 0 + 1 + ... + x, and 0 below zero; halves before multiplying, which stays exact modulo 2**64."""
    x = np.maximum(x, 0)
    return np.where(x & 1, x * ((x + 1) >> 1), (x >> 1) * (x + 1))


def borders(rows: Ints) -> tuple[Bools, Bools]:
    """Return whether each band's near diagonal (`lo`: no later key) and far diagonal (`hi`) cut through its rectangle.

    >>> borders(as_array([Band.parse(text) for text in ("0:9x0:9", "0:9x0:9/0..", "0:9x0:9/0..3")]))
    (array([False,  True,  True]), array([False, False,  True]))
    """
    return rows[:, LO] > rows[:, Q0] - rows[:, K1] + 1, rows[:, HI] < rows[:, Q1] - 1 - rows[:, K0]


def area(rows: Ints) -> Ints:
    """Return the number of allowed pairs of each band (exact below 2**63, else modulo 2**64).

    Pairs with q - kv <= d are counted column by column: column kv holds clamp(kv + d + 1 - q0, 0, num_q) of them, a
    ramp whose sum is a difference of triangular numbers.
    """
    num_q = rows[:, Q1] - rows[:, Q0]

    def at_most(difference: Ints) -> Ints:
        ramp = difference + 1 - rows[:, Q0]
        first, last = rows[:, K0] - 1 + ramp, rows[:, K1] - 1 + ramp
        return _half(last) - _half(first) - _half(last - num_q) + _half(first - num_q)

    with np.errstate(over="ignore"):
        low = np.maximum(rows[:, LO], rows[:, Q0] - rows[:, K1] + 1)
        high = np.minimum(rows[:, HI], rows[:, Q1] - 1 - rows[:, K0])
        return np.where(low <= high, at_most(high) - at_most(low - 1), 0)


def row_counts(rows: Ints, q: Ints) -> Ints:
    """Return how many keys each query position `q` may see."""
    first = np.maximum(rows[:, K0], q[:, None] - rows[:, HI])
    last = np.minimum(rows[:, K1], q[:, None] - rows[:, LO] + 1)
    inside = (q[:, None] >= rows[:, Q0]) & (q[:, None] < rows[:, Q1])
    return np.where(inside, np.maximum(last - first, 0), 0).sum(axis=1)


def cut(rows: Ints, q: tuple[int, int], kv: tuple[int, int]) -> Ints:
    """Return the bands inside a rectangle."""
    return intersect(rows, np.array([[*q, *kv, -LIMIT, LIMIT]], dtype=np.int64))


def intersect(a: Ints, b: Ints) -> Ints:
    """Return the pairs allowed by both: pairwise intersections, which are disjoint because each side is."""
    if len(a) == 1:
        a, b = b, a
    if len(b) == 1:
        i, j = np.arange(len(a)), np.zeros(len(a), dtype=np.int64)
    else:
        # Index pairs of bands whose query spans overlap, slab by slab, so that distant bands are never compared.
        slabs = slabs_of(a, b)
        a_band, a_slab = join(a[:, :2], slabs)
        b_band, first, count = by_slab(b, slabs)
        first, count = first[a_slab], count[a_slab]
        pairs = np.stack((np.repeat(a_band, count), b_band[np.repeat(first, count) + steps_within(count)]), axis=1)
        i, j = np.unique(pairs, axis=0).T
    a, b = a[i], b[j]
    meet = np.maximum(a, b)
    meet[:, [Q1, K1, HI]] = np.minimum(a, b)[:, [Q1, K1, HI]]
    return drop_empty(meet)


def slabs_of(*sets: Ints) -> Ints:
    """Return the spans between neighbouring query edges: within such a slab every band spans all rows or none."""
    edges = np.sort(np.concatenate([rows[:, :2].ravel() for rows in sets]))
    edges = edges[np.diff(edges, prepend=edges[:1] - 1) > 0]  # np.unique imports numpy.ma when it is first called
    return np.stack((edges[:-1], edges[1:]), axis=1)


def by_slab(rows: Ints, slabs: Ints) -> tuple[Ints, Ints, Ints]:
    """Return band indices grouped by slab, and the start and the size of each group."""
    band, slab = join(rows[:, :2], slabs)
    count = np.bincount(slab, minlength=len(slabs))
    return band[np.argsort(slab, kind="stable")], np.cumsum(count) - count, count


def subtract(a: Ints, b: Ints) -> Ints:
    """Return the pairs allowed by `a` and not by `b`.

    All bands are cut at all query edges, so that inside one slab every band spans all rows; then the k-th band of
    `b` in a slab is taken from every piece of that slab at once, for k = 0, 1, ... The loop runs as often as bands of
    `b` overlap in one row, which is a handful in practice.
    """
    slabs = slabs_of(a, b) if len(a) and len(b) else empty()
    if not len(slabs):
        return a
    a_band, slab = join(a[:, :2], slabs)
    b_band, first, count = by_slab(b, slabs)
    pieces = a[a_band]
    pieces[:, :2] = slabs[slab]
    done: list[Ints] = []
    for k in range(int(count.max())):
        more = count[slab] > k
        done.append(pieces[~more])
        pieces, slab = pieces[more], slab[more]
        pieces, slab = _minus(pieces, slab, b[b_band[first[slab] + k]])
    return coalesce(drop_empty(np.concatenate((*done, pieces))))  # a cut can leave a slab with rows but no pair


def _minus(pieces: Ints, slab: Ints, band: Ints) -> tuple[Ints, Ints]:
    """Return piece i without band i, both over the same rows: the parts left, right, below and above it."""
    k0, k1 = np.maximum(pieces[:, K0], band[:, K0]), np.minimum(pieces[:, K1], band[:, K1])
    low = np.maximum.reduce((pieces[:, LO], band[:, LO], pieces[:, Q0] - k1 + 1))
    high = np.minimum.reduce((pieces[:, HI], band[:, HI], pieces[:, Q1] - 1 - k0))
    apart = (k0 >= k1) | (low > high)
    left, right, below, above = (pieces[~apart].copy() for _ in range(4))
    k0, k1, band = k0[~apart], k1[~apart], band[~apart]
    left[:, K1] = k0
    right[:, K0] = k1
    below[:, K0] = above[:, K0] = k0
    below[:, K1] = above[:, K1] = k1
    below[:, HI] = np.minimum(below[:, HI], band[:, LO] - 1)
    above[:, LO] = np.maximum(above[:, LO], band[:, HI] + 1)
    rest = np.concatenate((pieces[apart], left, right, below, above))
    slabs = np.concatenate((slab[apart], *[slab[~apart]] * 4))
    low = np.maximum(rest[:, LO], rest[:, Q0] - rest[:, K1] + 1)
    high = np.minimum(rest[:, HI], rest[:, Q1] - 1 - rest[:, K0])
    keep = (rest[:, K1] > rest[:, K0]) & (low <= high)
    return rest[keep], slabs[keep]


def unite(a: Ints, b: Ints) -> Ints:
    """Return the pairs allowed by either."""
    if not len(a) or not len(b):
        return a if len(a) else b
    return coalesce(np.concatenate((a, subtract(b, a))))


def coalesce(rows: Ints) -> Ints:
    """Join neighbouring bands that differ in one span only; the result is sorted by query, then key."""
    for start, stop in ((Q0, Q1), (K0, K1)):
        if len(rows) < 2:
            return rows
        others = [column for column in range(6) if column not in (start, stop)]
        rows = rows[np.lexsort((rows[:, start], *(rows[:, column] for column in others)))]
        same = (rows[1:, others] == rows[:-1, others]).all(axis=1) & (rows[1:, start] == rows[:-1, stop])
        first, after = run_table(~same, len(rows)).T
        last = rows[after - 1, stop]
        rows = rows[first]
        rows[:, stop] = last
    return rows[np.lexsort((rows[:, LO], rows[:, K0], rows[:, Q0]))]


def contains(rows: Ints, q: Ints, kv: Ints) -> NDArray[np.bool_]:
    """Return whether each pair of two equally shaped arrays is allowed."""
    flat_q, flat_kv = q.ravel(), kv.ravel()
    allowed = np.zeros(flat_q.shape, dtype=np.bool_)
    slabs = slabs_of(rows) if len(rows) else empty()
    if not len(slabs) or not len(flat_q):
        return allowed.reshape(q.shape)
    band, first, count = by_slab(rows, slabs)
    slab = np.clip(np.searchsorted(slabs[:, 0], flat_q, side="right") - 1, 0, None)
    inside = (flat_q >= slabs[slab, 0]) & (flat_q < slabs[slab, 1])
    for k in range(int(count.max())):
        at = np.flatnonzero(inside & (count[slab] > k) & ~allowed)
        row = rows[band[first[slab[at]] + k]]
        difference = flat_q[at] - flat_kv[at]
        allowed[at] = (
            (flat_kv[at] >= row[:, K0])
            & (flat_kv[at] < row[:, K1])
            & (difference >= row[:, LO])
            & (difference <= row[:, HI])
        )
    return allowed.reshape(q.shape)
