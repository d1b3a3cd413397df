"""Board: who holds which rows, for proofs over whole schedules.

Positions are cut at every edge that occurs, so that between two neighbouring edges everything happens to all rows
alike; heads and batch rows likewise. A proof then works on a few thousand cells, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from longspan.schedules.steps import Compute, Piece, Role, Schedule
from longspan.span import Ints, Span, as_table

Key = tuple[int, int]
"""Head atom and batch-row atom."""


class Board:
    """Cells of positions, heads and batch rows that a schedule never cuts."""

    def __init__(self, schedule: Schedule) -> None:
        pieces = list(_pieces(schedule))
        sizes = schedule.sizes
        spans = [span for piece in pieces for span in piece.spans] + [
            span for c in _computes(schedule) for band in (*c.bands, *c.maybe) for span in (band.q, band.kv)
        ]
        ends = [value for span in spans for value in (span.start, span.stop)]
        self.edges = np.unique(np.array([0, schedule.layout.seq_len, *schedule.layout.table[:, 0], *ends]))
        self.num_cells = len(self.edges) - 1
        self.sizes = np.diff(self.edges)
        self._q = _edges((p.heads for p in pieces if p.role not in (Role.KV, Role.DKV)), sizes.q_heads)
        self._kv = _edges((p.heads for p in pieces if p.role in (Role.KV, Role.DKV)), sizes.kv_heads)
        self._rows = _edges((p.batch for p in pieces if p.batch is not None), sizes.batch)
        self._seen: dict[Piece, tuple[Ints, list[Key]]] = {}

    def cells(self, spans: tuple[Span, ...]) -> Ints:
        """The numbers of the cells that the spans cover."""
        if not spans:
            return np.empty(0, dtype=np.int64)
        ends = np.searchsorted(self.edges, as_table(spans))
        return np.concatenate([np.arange(low, high, dtype=np.int64) for low, high in ends.tolist()])

    def place(self, piece: Piece) -> tuple[Ints, list[Key]]:
        """Cells and (head, batch row) atoms of a piece."""
        if piece not in self._seen:
            heads = self._kv if piece.role in (Role.KV, Role.DKV) else self._q
            self._seen[piece] = (
                self.cells(piece.spans),
                [(h, b) for h in _atoms(heads, piece.heads) for b in _atoms(self._rows, piece.batch)],
            )
        return self._seen[piece]

    def head_atoms(self) -> Iterator[tuple[int, int]]:
        """(atom, a query head in it)."""
        return ((atom, int(head)) for atom, head in enumerate(self._q[:-1]))

    def row_atoms(self) -> Iterator[tuple[int, int]]:
        """(atom, a batch row in it)."""
        return ((atom, int(row)) for atom, row in enumerate(self._rows[:-1]))


def _edges(spans: Iterator[Span], size: int) -> Ints:
    return np.unique(np.array([0, size, *(value for span in spans for value in (span.start, span.stop))]))


def _atoms(edges: Ints, span: Span | None) -> range:
    if span is None:
        return range(len(edges) - 1)
    low, high = np.searchsorted(edges, [span.start, span.stop]).tolist()
    return range(low, high)


def _computes(schedule: Schedule) -> Iterator[Compute]:
    return (compute for steps in schedule.ranks for step in steps for compute in step.computes)


def _pieces(schedule: Schedule) -> Iterator[Piece]:
    for compute in _computes(schedule):
        yield from (compute.q, compute.kv)
    yield from (transfer.piece for _, transfer in schedule.transfers())
    yield from (piece for pieces in schedule.kept for piece in pieces)
