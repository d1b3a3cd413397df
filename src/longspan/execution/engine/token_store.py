"""Token store: tensors whose rows are tokens, found by their global positions. Here a rank's own shard, and what has
arrived from others, wait until they are computed with or sent.

Shapes: B batch rows, H heads, T tokens, D features. Positions are global; indices into a tensor are named `_local`.

Runs are tables of (start, stop, start_local), sorted by position: where each stretch of positions lies in dim 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.execution.engine.flat.recorder import Rows
from longspan.masks.classifier import runs_of as runs_of_true
from longspan.span import Ints, Span, as_table, by_position, intersect, join, total

Bools = NDArray[np.bool_]
Moves = list[tuple[slice, slice]]
"""Local rows of a source, and those of a target that hold the same positions; in the order of the target's."""


def runs_of(spans: tuple[Span, ...]) -> Ints:
    """Rows laid out in the order of spans.

    >>> runs_of((Span(6, 8), Span(0, 3))).tolist()
    [[0, 3, 2], [6, 8, 0]]
    """
    return laid_out(as_table(spans))


def laid_out(spans: Ints) -> Ints:
    """The runs of rows in the order of `(start, stop)` spans."""
    sizes = spans[:, 1] - spans[:, 0]
    return by_position(np.column_stack((spans, np.cumsum(sizes) - sizes)))


def have_all(runs: Ints, wanted: Ints) -> bool:
    """Whether every position of the wanted runs is in the others.

    >>> have_all(laid_out(np.array([[0, 8]])), laid_out(np.array([[6, 8], [0, 3]])))
    True
    """
    return runs is wanted or total(intersect(wanted[:, :2], runs[:, :2])) == total(wanted)


def common_rows(source: Ints, target: Ints) -> Moves:
    """Pairs of local slices that hold the same positions in both.

    >>> common_rows(laid_out(np.array([[0, 8]])), laid_out(np.array([[6, 8], [0, 3]])))
    [(slice(6, 8, None), slice(0, 2, None)), (slice(0, 3, None), slice(2, 5, None))]
    """
    i, j = join(target[:, :2], source[:, :2])
    start = np.maximum(target[i, 0], source[j, 0])
    size = np.minimum(target[i, 1], source[j, 1]) - start
    here, there = source[j, 2] + start - source[j, 0], target[i, 2] + start - target[i, 0]
    table = np.stack((here, here + size, there, there + size), axis=1)[np.argsort(there, kind="stable")]
    return [(slice(a, b), slice(c, d)) for a, b, c, d in table.tolist()]


@dataclass(frozen=True, eq=False)
class TokenStore:
    """`(B, H, T, D)` tensors over the same positions, heads and batch rows."""

    runs: Ints
    heads: Span
    batch: Span
    tensors: tuple[Rows, ...]

    def part(self, heads: Span, batch: Span) -> tuple[Rows, ...]:
        """The tensors narrowed to some of their heads and batch rows."""
        if heads == self.heads and batch == self.batch:
            return self.tensors
        h0, b0 = heads.start - self.heads.start, batch.start - self.batch.start
        return tuple(t[b0 : b0 + len(batch), h0 : h0 + len(heads)] for t in self.tensors)

    def positions(self) -> Ints:
        """The global position of every local row."""
        found = np.empty(total(self.runs), dtype=np.int64)
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

    def copy_to(self, target: TokenStore, moves: Moves) -> None:
        """Copies rows to a store of fewer heads or batch rows, or as many."""
        parts = self.part(target.heads, target.batch)
        for tensor, part in zip(target.tensors, parts, strict=True):
            for here, there in moves:
                tensor[:, :, there].copy_(part[:, :, here])


def gather(stores: Sequence[TokenStore], target: TokenStore, what: str) -> None:
    """Copies all rows of the target from stores that have some, each row once.

    That the rows are there is what the validator proves of every schedule, so a gap here is our own bug.
    """
    missing = np.ones(total(target.runs), dtype=np.bool_)
    for store in stores:
        if not missing.any():
            break
        moves = [part for here, there in common_rows(store.runs, target.runs) for part in _still(here, there, missing)]
        store.copy_to(target, moves)
        for _, there in moves:
            missing[there] = False
    assert not missing.any(), f"{what} is not all held"


def _still(
    here: slice, there: slice, missing: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Iterator[tuple[slice, slice]]:
    """The parts of two slices whose rows of the target are missing."""
    if missing[there].all():
        yield here, there
        return
    for start, stop in runs_of_true(missing[there]):
        yield (
            slice(here.start + start, here.start + stop),
            slice(there.start + start, there.start + stop),
        )
