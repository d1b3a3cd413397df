"""Token store: tensors whose rows are tokens, found by their global positions. Here a rank's own shard, and what has
arrived from others, wait until they are computed with or sent.

Shapes: B batch rows, H heads, T tokens, D features. Positions are global; indices into a tensor are named `_local`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from longspan.schedules.steps import Piece
from longspan.span import Ints, Span, as_table, intersect, join, total


@dataclass(frozen=True, eq=False)
class TokenStore:
    """`(B, H, T, D)` tensors over the same positions, heads and batch rows."""

    runs: Ints
    """(start, stop, start_local), sorted by position: where each stretch of positions lies in dim 2."""
    heads: Span
    batch: Span
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(spans: Ints, heads: Span, batch: Span, tensors: Sequence[Tensor]) -> TokenStore:
        """A store laid out in the order of `(start, stop)` spans."""
        sizes = spans[:, 1] - spans[:, 0]
        runs = np.column_stack((spans, np.cumsum(sizes) - sizes))
        return TokenStore(runs[np.argsort(runs[:, 0], kind="stable")], heads, batch, tuple(tensors))

    def part(self, heads: Span, batch: Span) -> tuple[Tensor, ...]:
        """The tensors narrowed to some of their heads and batch rows."""
        h0, b0 = heads.start - self.heads.start, batch.start - self.batch.start
        return tuple(t[b0 : b0 + len(batch), h0 : h0 + len(heads)] for t in self.tensors)

    def positions(self) -> Ints:
        """The global position of every local row."""
        found = np.empty(int((self.runs[:, 1] - self.runs[:, 0]).sum()), dtype=np.int64)
        for start, stop, local in self.runs.tolist():
            found[local : local + stop - start] = np.arange(start, stop)
        return found

    def has(self, heads: Span, batch: Span) -> bool:
        """Whether these heads and batch rows are here."""
        return (
            self.heads.start <= heads.start
            and heads.stop <= self.heads.stop
            and self.batch.start <= batch.start
            and batch.stop <= self.batch.stop
        )

    def covers(self, spans: Ints, heads: Span, batch: Span) -> bool:
        """Whether every one of these rows is here."""
        return self.has(heads, batch) and total(intersect(spans, self.runs[:, :2])) == total(spans)

    def pieces(self, spans: Ints) -> Iterator[tuple[int, int, int]]:
        """(start, stop, start_local) of the parts of the spans that are here, in the order of the spans."""
        i, j = join(spans, self.runs[:, :2])
        start = np.maximum(spans[i, 0], self.runs[j, 0])
        stop = np.minimum(spans[i, 1], self.runs[j, 1])
        local = self.runs[j, 2] + start - self.runs[j, 0]
        yield from zip(start.tolist(), stop.tolist(), local.tolist(), strict=True)

    def write(self, piece: Piece, targets: Sequence[Tensor]) -> None:
        """Copies the piece's rows, in its order, into tensors that have these rows only."""
        at = 0
        for start, stop, local in self.pieces(as_table(piece.spans)):
            size = stop - start
            for target, tensor in zip(targets, self.tensors, strict=True):
                target[:, :, at : at + size] = tensor[:, :, local : local + size]
            at += size


def gather(stores: Sequence[TokenStore], piece: Piece, batch: Span) -> TokenStore:
    """The piece's rows as one store: one that has them all, or a copy put together from several.

    That the rows are there is what the validator proves of every schedule, so a gap here is our own bug.
    """
    spans = as_table(piece.spans)
    for store in stores:
        if store.covers(spans, piece.heads, batch):
            return TokenStore(store.runs, piece.heads, batch, store.part(piece.heads, batch))
    first = stores[0].tensors
    size = total(spans)
    made = TokenStore.of(
        spans, piece.heads, batch, [t.new_empty((len(batch), len(piece.heads), size, t.shape[3])) for t in first]
    )
    found = np.zeros(size, dtype=np.bool_)
    for store in stores:
        if not store.has(piece.heads, batch):
            continue
        for source, target in copies(store, made, spans):
            for here, there in zip(store.part(piece.heads, batch), made.tensors, strict=True):
                there[:, :, target] = here[:, :, source]
            found[target] = True
    assert found.all(), f"{piece!r} is not all held"
    return made


def copies(source: TokenStore, target: TokenStore, spans: Ints) -> Iterator[tuple[slice, slice]]:
    """Pairs of local slices that hold the same positions in both, within the spans."""
    for start, stop, local in source.pieces(spans):
        for begin, end, there in target.pieces(np.array([[start, stop]], dtype=np.int64)):
            here = local + begin - start
            yield slice(here, here + end - begin), slice(there, there + end - begin)
