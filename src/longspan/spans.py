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


def whole(
    value: object, name: str, where: str, error: type[LongspanError] = LongspanError, low: int = 0, high: int = LIMIT
) -> int:
    """The value as an int; what is not a whole number within the bounds is refused.

    >>> whole(np.int64(3), "seq_len", "causal()")
    3
    """
    try:
        # True counts as 1 in Python, but nobody means it as a length.
        number = cast(SupportsIndex, value)
        found = None if type(number) in (bool, np.bool_) else operator.index(number)
    except (TypeError, ValueError):  # a tensor of several numbers raises the latter
        found = None
    if found is None or not low <= found <= high:
        raise error(
            f"{where} was given {name} = {shortened(value)}. {name} must be a whole number, {low} or more and at most"
            f" {high}."
        )
    return found


def shortened(value: object, width: int = 60) -> str:
    """A value as errors quote it: its repr on one line, cut where it is long."""
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
        if type(self.start) is not int or type(self.stop) is not int:  # plans make thousands: what is right is quick
            object.__setattr__(self, "start", whole(self.start, "start", "Span()"))
            object.__setattr__(self, "stop", whole(self.stop, "stop", "Span()"))
        if not 0 <= self.start <= self.stop <= LIMIT:
            raise LongspanError(
                f"a Span is a half-open range of positions with 0 <= start <= stop <= {LIMIT}, "
                f"but start = {shortened(self.start)} and stop = {shortened(self.stop)} were given."
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"{self.start}:{self.stop}"

    @staticmethod
    def parse(text: str) -> Span:
        """The span that `repr` wrote.

        >>> Span.parse("3:9")
        3:9
        """
        start, _, stop = text.partition(":")
        form = "a span is written start:stop, as in 3:9"
        return Span(parsed_number(start, form, text), parsed_number(stop, form, text))


def parsed_number(text: str, form: str, within: str, error: type[LongspanError] = LongspanError) -> int:
    """A position or count that was written as decimal digits, as part of a text `within` that has a form.

    >>> parsed_number("12", "a span is written start:stop", "12:20")
    12
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 13):  # as many digits as LIMIT has
        raise error(f"{form}, with numbers of 1 to 13 digits, but {shortened(within)} was found.")
    return int(text)


MAX_TEXT = 64 << 20


def checked_text(text: object, what: str, error: type[LongspanError]) -> str:
    """The text, if it can be what `text()` of something wrote: printable ASCII of bounded size."""
    if not isinstance(text, str):
        raise error(f"{what} is read from a str, but {type(text).__name__} was given. Decode or print it first.")
    if len(text) > MAX_TEXT:
        raise error(f"{what} text of {len(text)} characters was given; the limit is {MAX_TEXT}.")
    if not text.isascii() or not text.replace("\n", "").isprintable():
        place = next(i for i, c in enumerate(text) if c != "\n" and not (c.isascii() and c.isprintable()))
        raise error(
            f"{what} text has {text[place]!r} at character {place}. Such texts are printable ASCII with line breaks:"
            f" pass what text() wrote."
        )
    return text


def as_spans(rows: Ints) -> tuple[Span, ...]:
    """The rows of an `(n, 2)` array as objects."""
    return tuple(Span(start, stop) for start, stop in rows.tolist())


def as_table(spans: Iterable[Span]) -> Ints:
    """Objects as the rows of an `(n, 2)` array."""
    return np.array([(span.start, span.stop) for span in spans], dtype=np.int64).reshape(-1, 2)


def total(rows: Ints) -> int:
    """How many positions the rows hold, overlaps counted twice."""
    return int((rows[:, 1] - rows[:, 0]).sum())


def by_position(rows: Ints) -> Ints:
    """(start, stop, ...) rows sorted by where they start.

    >>> by_position(np.array([[4, 6, 0], [0, 2, 1]])).tolist()
    [[0, 2, 1], [4, 6, 0]]
    """
    return rows[np.argsort(rows[:, 0], kind="stable")]


def run_table(apart: NDArray[np.bool_], count: int) -> Ints:
    """(start, stop) of the runs of `count` things, of which i + 1 begins another run than i where `apart[i]` says so.

    >>> values = np.array([7, 7, 2])
    >>> run_table(values[1:] != values[:-1], len(values)).tolist()
    [[0, 2], [2, 3]]
    """
    edges = np.concatenate(([0] * (count > 0), np.flatnonzero(apart) + 1, [count])).astype(np.int64)
    return np.stack((edges[:-1], edges[1:]), axis=1)


def true_runs(flags: NDArray[np.bool_]) -> Ints:
    """(line, start, stop) of every run of true flags in the lines of a table.

    >>> true_runs(np.array([[True, False, True, True], [False, True, False, False]])).tolist()
    [[0, 0, 1], [0, 2, 4], [1, 1, 2]]
    """
    edges = np.diff(flags.astype(np.int8), axis=1, prepend=0, append=0)
    line, start = np.nonzero(edges > 0)
    return np.stack((line, start, np.nonzero(edges < 0)[1]), axis=1)


def on_one_line(rows: Ints, number: Ints, seq_len: int) -> Ints:
    """(start, stop) rows of many sequences, which are laid one after another: one union or join serves all of them.

    Sequence n begins at n * (seq_len + 1), so that the end of one does not touch the start of the next:

    >>> on_one_line(np.array([[2, 4], [0, 3]]), np.array([0, 1]), seq_len=4).tolist()
    [[2, 4], [5, 8]]
    """
    return rows[:, :2] + (number * (seq_len + 1))[:, None]


def union(rows: Ints) -> Ints:
    """The same positions as sorted, disjoint, non-touching, non-empty rows.

    >>> union(np.array([[5, 9], [0, 2], [2, 4], [6, 7]])).tolist()
    [[0, 4], [5, 9]]
    """
    rows = rows[rows[:, 1] > rows[:, 0]]
    if len(rows) < 2:
        return rows
    rows = by_position(rows)
    reach = np.maximum.accumulate(rows[:, 1])
    # Not by `run_table`: this is asked thousands of times in planning, and flags are quicker than numbers.
    first = np.concatenate(([True], rows[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((rows[first, 0], reach[last]), axis=1)


def steps_within(counts: Ints) -> Ints:
    """0, 1, ... within each of the groups of these sizes.

    >>> steps_within(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def join(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Index pairs (i, j) of rows of `a` and `b` that share a position; `b` must be sorted and disjoint."""
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    high = np.searchsorted(b[:, 0], a[:, 1], side="left")
    count = np.maximum(high - low, 0)
    left = np.repeat(np.arange(len(a), dtype=np.int64), count)
    return left, np.repeat(low, count) + steps_within(count)


def intersect(a: Ints, b: Ints) -> Ints:
    """Positions in both; `b` must be sorted and disjoint. Rows come in the order of `a`.

    >>> intersect(np.array([[0, 6]]), np.array([[1, 2], [4, 9]])).tolist()
    [[1, 2], [4, 6]]
    """
    i, j = join(a, b)
    return np.stack((np.maximum(a[i, 0], b[j, 0]), np.minimum(a[i, 1], b[j, 1])), axis=1)


def subtract(a: Ints, b: Ints) -> Ints:
    """Positions in `a` and not in `b`; both must be sorted and disjoint.

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
