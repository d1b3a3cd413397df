"""Chunks: equal stretches of the sequence that no layout may cut, so that any number of ranks computes alike.

Every kernel call is between the queries of one chunk and the keys of one chunk, and partial results of a query merge in
one order of key chunks. Gradients of keys come from queries on several ranks: they are added along a binary tree over
query chunks, of which a rank adds whole branches, so that no sum depends on who held which chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.span import Ints, Span

MAX_CHUNKS = 1 << 10
"""Plans list pairs of chunks, so there cannot be very many; more is taken for a number of tokens given by mistake."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """A layout's sequence in `num` equal chunks, each whole on one rank.

    >>> from longspan import layouts
    >>> Chunks.of(layouts.zigzag(64, 2), 8).branches.tolist()
    [[0, 2], [0, 2], [2, 4], [2, 4], [4, 6], [4, 6], [6, 8], [6, 8]]
    """

    num: int
    length: int
    owner: Ints
    """The rank that holds each chunk."""
    run: Ints
    """A run number per chunk: consecutive chunks on one rank share it."""

    @staticmethod
    def of(layout: Layout, num: int) -> Chunks:
        """The layout's chunks; refused where it cuts inside of one."""
        if not layout.seq_len or layout.seq_len % num:
            more = -(-layout.seq_len // num) * num or num
            raise PlanError(
                f"chunks = {num} equal chunks were asked for, but {layout} has {layout.seq_len} positions, which leaves"
                f" {layout.seq_len % num} over. Pad the sequence to {more}, or use a divisor of its length."
            )
        length, rows = layout.seq_len // num, layout.by_position
        inside = rows[rows[:, 0] % length > 0]
        if len(inside):
            raise PlanError(
                f"chunks = {num} was asked for, which is chunks of {length} positions, but {layout} begins a span at"
                f" {int(inside[0, 0])}, inside of one. Use a layout that is cut at multiples of {length} only"
                f" (contiguous if {num} is a multiple of the ranks, zigzag if it is a multiple of twice the ranks), or"
                f" other chunks."
            )
        at = np.searchsorted(rows[:, 0], np.arange(num, dtype=np.int64) * length, side="right") - 1
        owner = rows[at, 2]
        return Chunks(num, length, owner, np.cumsum(np.diff(owner, prepend=owner[:1]) != 0))

    @cached_property
    def branches(self) -> Ints:
        """For each chunk, (first, last + 1) of the largest branch of the tree that its rank holds all of."""
        table = np.arange(self.num, dtype=np.int64)[:, None] + np.array([0, 1])
        size = 2
        while size <= self.num:
            for first in range(0, self.num - size + 1, size):
                if (self.owner[first : first + size] == self.owner[first]).all():
                    table[first : first + size] = first, first + size
            size *= 2
        return table

    def branch(self, chunk: int) -> Span:
        """The query rows of the chunk's branch: their contributions to a key's gradient are summed on one rank."""
        first, last = self.branches[chunk].tolist()
        return Span(first * self.length, last * self.length)

    @cached_property
    def rows(self) -> Ints:
        """(start, stop) of every chunk."""
        return (np.arange(self.num, dtype=np.int64)[:, None] + np.array([0, 1])) * self.length
