"""Chains: the segments of every document in order, and who holds them. Any layout has them, so none needs another.

Two documents of 5 and 3 tokens, and ranks that hold 0:3 6:8 and 3:6:

    rank      0 0 0 1 1 1 0 0
    document  a a a a a b b b        chain a: 0:3 on rank 0, 3:5 on rank 1;  chain b: 5:6 on rank 1, 6:8 on rank 0
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.span import Ints, Span, run_table

CHAIN, PLACE, START, STOP, RANK = range(5)


@dataclass(frozen=True, eq=False)
class Chains:
    """The segments of all documents of a batch.

    Batch rows in a row whose documents are cut alike have their chains in common.
    """

    layout: Layout
    table: Ints
    """(chain, place in it, start, stop, rank) of every segment, by chain and place."""
    batches: tuple[Span, ...]
    """The batch rows of every chain."""

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of documents and owners."""
        return hashlib.sha256(repr(self.batches).encode() + self.table.tobytes()).hexdigest()

    @cached_property
    def documents(self) -> str:
        """A hex digest of documents alone, whoever holds them."""
        begin = self.table[self.table[:, PLACE] == 0][:, (CHAIN, START)]
        return hashlib.sha256(repr(self.batches).encode() + begin.tobytes()).hexdigest()

    @property
    def first(self) -> Ints:
        """The number of every chain's first segment, and of all segments."""
        return np.searchsorted(self.table[:, CHAIN], np.arange(len(self.batches) + 1, dtype=np.int64))

    @property
    def whole(self) -> Ints:
        """(batch row, start, stop) of every document, whoever holds it, by batch row."""
        first = self.first
        start, stop = self.table[first[:-1], START], self.table[first[1:] - 1, STOP]
        rows = [
            (row, *ends)
            for rows, *ends in zip(self.batches, start, stop, strict=True)
            for row in range(rows.start, rows.stop)
        ]
        return np.array(sorted(rows), dtype=np.int64).reshape(-1, 3)

    def ranks(self) -> list[list[int]]:
        """Who holds the segments of every chain."""
        first = self.first.tolist()
        ranks: list[int] = self.table[:, RANK].tolist()
        return [ranks[start:stop] for start, stop in itertools.pairwise(first)]

    def of_rank(self, rank: int) -> Ints:
        """The rank's segments, (chain, place, first slot, end slot), by slot."""
        mine = self.table[self.table[:, RANK] == rank]
        _, slot = self.layout.locate(mine[:, START])
        local = np.stack((mine[:, CHAIN], mine[:, PLACE], slot, slot + mine[:, STOP] - mine[:, START]), axis=1)
        return local[np.lexsort((local[:, 0], local[:, 2]))]


def chains_of(numbers: Ints, layout: Layout, batch: int) -> Chains:
    """The chains of documents that are numbered per position, (R, S) with R = 1 where all batch rows are alike.

    >>> found = chains_of(np.array([[0, 0, 0, 0, 0, 1, 1, 1]]), Layout.from_spans(8, [[(0, 3), (6, 8)], [(3, 6)]]), 1)
    >>> found.table.tolist()
    [[0, 0, 0, 3, 0], [0, 1, 3, 5, 1], [1, 0, 5, 6, 1], [1, 1, 6, 8, 0]]
    """
    if len(numbers) not in (1, batch):
        raise PlanError(f"documents are given for {len(numbers)} batch rows, but the plan is for batch = {batch}.")
    borders = numbers[:, 1:] != numbers[:, :-1]
    alike = run_table((borders[1:] != borders[:-1]).any(axis=1), len(numbers))
    tables: list[Ints] = []
    batches: list[Span] = []
    for start, stop in alike.tolist():
        edges = np.concatenate(([0], np.flatnonzero(borders[start]) + 1, [layout.seq_len])).astype(np.int64)
        tables.append(_segments(edges, layout, len(batches)))
        rows = Span(0, batch) if len(numbers) == 1 else Span(start, stop)
        batches += [rows] * (len(edges) - 1 if layout.seq_len else 0)
    return Chains(layout, np.concatenate(tables), tuple(batches))


def _segments(edges: Ints, layout: Layout, first: int) -> Ints:
    """The segments of documents with these edges, whose chains are numbered from `first` on."""
    if not layout.seq_len:
        return np.empty((0, 5), dtype=np.int64)
    spans = layout.by_position
    starts = np.union1d(spans[:, 0], edges[:-1])
    stops = np.append(starts[1:], layout.seq_len)
    rank = spans[np.searchsorted(spans[:, 0], starts, side="right") - 1, 2]
    chain = np.searchsorted(edges, starts, side="right") - 1
    place = np.arange(len(starts)) - np.searchsorted(chain, chain)
    return np.stack((chain + first, place, starts, stops, rank), axis=1).astype(np.int64)
