"""Span: a half-open range of global token positions, and arithmetic on many of them at once.

Single spans are objects with a name; thousands of them are `(n, 2)` int64 arrays of (start, stop) rows, because a plan
for ten million tokens must not loop over Python objects.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex, cast

import numpy as np
from numpy.typing import NDArray

from longspan.errors import LongspanError

Ints = NDArray[np.int64]

LIMIT = 1 << 40
"""Stands for "no end": further than any position, small enough that sums of a few stay inside int64."""


def check_int(
    value: object, name: str, where: str, error: type[LongspanError] = LongspanError, low: int = 0, high: int = LIMIT
) -> int:
    """Return `value` as an int, or raise if it is not an integer from `low` to `high`. A bool is not an integer here.

    >>> check_int(np.int64(3), "seq_len", "causal()")
    3
    """
    try:
        number = None if type(value) in (bool, np.bool_) else operator.index(cast(SupportsIndex, value))
    except (TypeError, ValueError):  # ValueError: a tensor with several elements
        number = None
    if number is None or not low <= number <= high:
        raise error(
            f"{where}: {name} must be an integer, at least {low} and at most {high}, but got {name} ="
            f" {truncated_repr(value)}."
        )
    return number


def truncated_repr(value: object, width: int = 60) -> str:
    """Return the repr of a value on one line, truncated to `width` characters, for error messages."""
    text = " ".join(repr(value).split())
    return text if len(text) <= width else text[: width - 3] + "..."


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Positions start, start + 1, ..., stop - 1.

    >>> Span(2, 5), len(Span(2, 5))
    (2:5, 3)
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if type(self.start) is not int or type(self.stop) is not int:  # plans build thousands: skip `whole` for ints
            object.__setattr__(self, "start", check_int(self.start, "start", "Span()"))
            object.__setattr__(self, "stop", check_int(self.stop, "stop", "Span()"))
        if not 0 <= self.start <= self.stop <= LIMIT:
            raise LongspanError(
                f"a Span must have 0 <= start <= stop <= {LIMIT}, but got start = {self.start} and stop = {self.stop}."
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"{self.start}:{self.stop}"

    @staticmethod
    def parse(text: str) -> Span:
        """Parse the output of `repr`.

        >>> Span.parse("3:9")
        3:9
        """
        start, _, stop = text.partition(":")
        form = "a span is written start:stop, as in 3:9"
        return Span(parse_number(start, form, text), parse_number(stop, form, text))


def parse_number(text: str, form: str, within: str, error: type[LongspanError] = LongspanError) -> int:
    """Parse a position or count of decimal digits; `form` and `within` describe the text it is part of in errors.

    >>> parse_number("12", "a span is written start:stop", "12:20")
    12
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 13):  # as many digits as LIMIT has
        raise error(f"{form}, with numbers of 1 to 13 digits, but got {truncated_repr(within)}.")
    return int(text)


def as_spans(rows: Ints) -> tuple[Span, ...]:
    """Return the rows of an `(n, 2)` array as spans."""
    return tuple(Span(start, stop) for start, stop in rows.tolist())


def as_table(spans: Iterable[Span]) -> Ints:
    """Return spans as the rows of an `(n, 2)` array."""
    return np.array([(span.start, span.stop) for span in spans], dtype=np.int64).reshape(-1, 2)


def total(rows: Ints) -> int:
    """Return the number of positions of the rows; overlaps count twice."""
    return int((rows[:, 1] - rows[:, 0]).sum())


def by_position(rows: Ints) -> Ints:
    """Return (start, stop, ...) rows sorted by start.

    >>> by_position(np.array([[4, 6, 0], [0, 2, 1]])).tolist()
    [[0, 2, 1], [4, 6, 0]]
    """
    return rows[np.argsort(rows[:, 0], kind="stable")]


def run_table(apart: NDArray[np.bool_], count: int) -> Ints:
    """Return (start, stop) of the runs of `count` items; item i + 1 begins a new run where `apart[i]` is true.

    >>> values = np.array([7, 7, 2])
    >>> run_table(values[1:] != values[:-1], len(values)).tolist()
    [[0, 2], [2, 3]]
    """
    edges = np.concatenate(([0] * (count > 0), np.flatnonzero(apart) + 1, [count])).astype(np.int64)
    return np.stack((edges[:-1], edges[1:]), axis=1)


def true_runs(flags: NDArray[np.bool_]) -> Ints:
    """Return (row, start, stop) of every run of true flags in the rows of a table.

    >>> true_runs(np.array([[True, False, True, True], [False, True, False, False]])).tolist()
    [[0, 0, 1], [0, 2, 4], [1, 1, 2]]
    """
    edges = np.diff(flags.astype(np.int8), axis=1, prepend=0, append=0)
    line, start = np.nonzero(edges > 0)
    return np.stack((line, start, np.nonzero(edges < 0)[1]), axis=1)


def on_one_line(rows: Ints, number: Ints, seq_len: int) -> Ints:
    """Lay (start, stop) rows of many sequences end to end, so that one union or join serves all of them.

    Sequence n begins at n * (seq_len + 1), so that the end of one does not touch the start of the next:

    >>> on_one_line(np.array([[2, 4], [0, 3]]), np.array([0, 1]), seq_len=4).tolist()
    [[2, 4], [5, 8]]
    """
    return rows[:, :2] + (number * (seq_len + 1))[:, None]


def union(rows: Ints) -> Ints:
    """Return the same positions as sorted, disjoint, non-touching, non-empty rows.

    >>> union(np.array([[5, 9], [0, 2], [2, 4], [6, 7]])).tolist()
    [[0, 4], [5, 9]]
    """
    rows = rows[rows[:, 1] > rows[:, 0]]
    if len(rows) < 2:
        return rows
    rows = by_position(rows)
    reach = np.maximum.accumulate(rows[:, 1])
    # Flags, not `run_table`: planning calls this thousands of times, and flags are faster.
    first = np.concatenate(([True], rows[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((rows[first, 0], reach[last]), axis=1)


def steps_within(counts: Ints) -> Ints:
    """Return 0, 1, ... within each of the groups of these sizes.

    >>> steps_within(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def join(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Return index pairs (i, j) of rows of `a` and `b` that share a position; `b` must be sorted and disjoint."""
    low = b[:, 1].searchsorted(a[:, 0], side="right")
    high = b[:, 0].searchsorted(a[:, 1], side="left")
    count = np.maximum(high - low, 0)
    left = np.arange(len(a), dtype=np.int64)
    if (count == 1).all():  # often, and faster
        return left, low
    return left.repeat(count), low.repeat(count) + steps_within(count)


def intersect(a: Ints, b: Ints) -> Ints:
    """Return positions in both; `b` must be sorted and disjoint. Rows come in the order of `a`.

    >>> intersect(np.array([[0, 6]]), np.array([[1, 2], [4, 9]])).tolist()
    [[1, 2], [4, 6]]
    """
    i, j = join(a, b)
    return np.stack((np.maximum(a[i, 0], b[j, 0]), np.minimum(a[i, 1], b[j, 1])), axis=1)


def subtract(a: Ints, b: Ints) -> Ints:
    """Return positions in `a` and not in `b`; both must be sorted and disjoint.

    >>> subtract(np.array([[0, 6], [8, 9]]), np.array([[1, 2], [4, 9]])).tolist()
    [[0, 1], [2, 4]]
    """
    if not len(a) or not len(b):
        return a
    i, j = join(a, b)
    # Each row of `a` is left with the gaps before, between and after the rows of `b` that meet it.
    starts = np.concatenate((a[:, 0], b[j, 1]))
    stops = np.concatenate((b[j, 0], a[:, 1]))
    row = np.arange(len(a), dtype=np.int64)
    starts = starts[np.lexsort((starts, np.concatenate((row, i))))]
    stops = stops[np.lexsort((stops, np.concatenate((i, row))))]
    keep = stops > starts
    return np.stack((starts[keep], stops[keep]), axis=1)
