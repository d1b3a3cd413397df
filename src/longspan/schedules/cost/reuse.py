"""Uses: which rows a rank's computes touch, and how often each row was touched before, for all steps at once.

Rows are cut into cells at every edge, so that between two edges all rows are used alike; a ring of a thousand steps is
then a few arrays and not a thousand unions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longspan.schedules.fetch import by_taker
from longspan.schedules.steps import Piece, Role, Sizes, Step
from longspan.span import Ints, Span, join, on_one_line, steps_within

Key = tuple[Span, Span | None, tuple[Span, ...]]
"""Heads, batch rows, and which queries are added up apart."""


@dataclass(frozen=True, eq=False)
class Uses:
    """One side of all computes with the same heads and batch: an entry per compute and cell it uses, in their order."""

    key: Key
    steps: Ints
    """The step of each compute."""
    edges: Ints
    use: Ints
    cell: Ints
    own: NDArray[np.bool_]
    """Whether the rank holds the cell itself."""
    num_queries: int
    """How many different stretches of queries there are on the other side."""

    @staticmethod
    def of(key: Key, sides: list[tuple[int, Piece]], num_queries: int, own: Ints, seq_len: int) -> Uses:
        """The uses of (step, piece), beside a rank's own sorted and disjoint rows."""
        rows = by_taker(labelled([piece for _, piece in sides]), seq_len)
        edges = np.unique(np.concatenate((rows[:, :2].ravel(), own.ravel())))
        first, last = np.searchsorted(edges, rows[:, 0]), np.searchsorted(edges, rows[:, 1])
        at = np.repeat(np.arange(len(rows)), last - first)
        cell = first[at] + steps_within(last - first)
        held = np.zeros(len(edges), dtype=np.bool_)
        held[join(np.stack((edges, edges + 1), axis=1), own)[0]] = True
        steps = np.array([number for number, _ in sides], dtype=np.int64)
        return Uses(key, steps, edges, rows[at, 2], cell, held[cell], num_queries)

    @cached_property
    def tokens(self) -> Ints:
        """The rows of each entry's cell."""
        return self.edges[self.cell + 1] - self.edges[self.cell]

    @cached_property
    def nth(self) -> Ints:
        """How many earlier computes used the entry's cell."""
        order = np.argsort(self.cell, kind="stable")
        cells = self.cell[order]
        begin = np.searchsorted(cells, cells)
        nth = np.empty(len(order), dtype=np.int64)
        nth[order] = np.arange(len(order)) - begin
        return nth

    @cached_property
    def fresh(self) -> NDArray[np.bool_]:
        """The entries that are their cell's first."""
        return self.nth == 0

    def num_rows(self, own: bool | None = None) -> int:
        """How many different rows are used: all, or only the rank's own, or only those of others."""
        which = self.fresh if own is None else self.fresh & (self.own == own)
        return int(self.tokens[which].sum())

    def merging(self, num_steps: int) -> Ints:
        """In each step, the most rows of contributions that one compute brings together, beside the sums they go into.

        Where it is a row's second, the first has been kept as it came until now.
        """
        brought = self.tokens * np.where(self.nth == 1, 2, self.nth > 1)
        most = np.zeros(num_steps, dtype=np.int64)
        np.maximum.at(most, self.steps, self._sums(brought))
        return most

    def arriving(self, num_steps: int) -> Ints:
        """In each step, rows of others that no earlier compute used."""
        rows = np.zeros(num_steps, dtype=np.int64)
        np.add.at(rows, self.steps, self._sums(self.tokens * (self.fresh & ~self.own)))
        return rows

    def num_remote(self, rows: Ints) -> Ints:
        """How many positions of each (start, stop) row are rows of others that some compute uses."""
        cells = np.sort(self.cell[self.fresh & ~self.own])
        if not len(cells):
            return np.zeros(len(rows), dtype=np.int64)
        starts, sizes = self.edges[cells], self.edges[cells + 1] - self.edges[cells]
        before = np.cumsum(sizes) - sizes
        at = np.searchsorted(starts, rows, side="right") - 1
        count = before[at] + np.minimum(rows - starts[at], sizes[at])
        count[at < 0] = 0
        return count[:, 1] - count[:, 0]

    def branching(self) -> int:
        """An upper bound on rows of dK/dV sums that wait for their sibling in the tree of sums (see `chunks`)."""
        if not self.key[2]:
            return 0
        return (self.num_queries - 1).bit_length() * int(self._sums(self.tokens).max())

    def _sums(self, values: Ints) -> Ints:
        """The values added up for each compute."""
        sums = np.zeros(len(self.steps), dtype=np.int64)
        np.add.at(sums, self.use, values)
        return sums

    def weight(self, sizes: Sizes) -> int:
        """Heads times batch rows."""
        heads, rows, _ = self.key
        return len(heads) * (sizes.batch if rows is None else len(rows))


def uses_of(steps: tuple[Step, ...], role: Role, own: Ints, seq_len: int) -> list[Uses]:
    """The query or key sides of all computes, by heads, batch rows and what is added up apart."""
    sides: dict[Key, list[tuple[int, Piece]]] = {}
    queries: dict[Key, set[int]] = {}
    for number, step in enumerate(steps):
        for compute in step.computes:
            piece = compute.q if role is Role.Q else compute.kv
            sides.setdefault(key_of(piece), []).append((number, piece))
            queries.setdefault(key_of(piece), set()).add(compute.q.spans[0].start)
    return [Uses.of(key, pieces, len(queries[key]), own, seq_len) for key, pieces in sides.items()]


def key_of(piece: Piece) -> Key:
    return piece.heads, piece.batch, piece.apart


def labelled(pieces: list[Piece]) -> Ints:
    """(start, stop, number) of every span of the pieces, in their order."""
    rows = [(span.start, span.stop, number) for number, piece in enumerate(pieces) for span in piece.spans]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def in_one_piece(steps: Ints, rows: Ints, pieces: Ints, window: Ints, seq_len: int) -> NDArray[np.bool_]:
    """Whether all rows of each compute lie in one of the pieces that are there in its step.

    `rows` and `pieces` are (start, stop, number) as `by_taker` gives them; a piece is there in the steps after
    `window[:, 0]` up to `window[:, 1]`.
    """
    first = np.searchsorted(rows[:, 2], np.arange(len(steps)))
    points, which = np.unique(rows[first, 0], return_inverse=True)  # a piece with all rows has the first
    order = np.argsort(which, kind="stable")
    begin = np.searchsorted(which[order], np.arange(len(points) + 1))
    i, point = join(pieces[:, :2], np.stack((points, points + 1), axis=1))
    count = (begin[1:] - begin[:-1])[point]
    piece = np.repeat(pieces[i, 2], count)
    compute = order[np.repeat(begin[point], count) + steps_within(count)]
    there = (window[piece, 0] < steps[compute]) & (steps[compute] <= window[piece, 1])
    piece, compute = piece[there], compute[there]
    # Every row of the compute is looked for in the piece, all pieces laid one after another on a long line.
    last = np.append(first[1:], len(rows))
    sizes = last[compute] - first[compute]
    pair = np.repeat(np.arange(len(piece)), sizes)
    row = rows[first[compute][pair] + steps_within(sizes), :2]
    row, line = on_one_line(row, piece[pair], seq_len), on_one_line(pieces, pieces[:, 2], seq_len)
    at = np.searchsorted(line[:, 0], row[:, 0], side="right") - 1
    missing = (at < 0) | (line[at, 1] < row[:, 1]) if len(line) else np.ones(len(row), dtype=np.bool_)
    whole = np.ones(len(piece), dtype=np.bool_)
    whole[pair[missing]] = False
    answer = np.zeros(len(steps), dtype=np.bool_)
    answer[compute[whole]] = True
    return answer
