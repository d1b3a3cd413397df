"""Packing: pieces as bytes of a message, and token stores, which look up rows by global position.

A token store holds a rank's own shard, or rows received from other ranks, until they are used or sent.

Shapes: B batch rows, H heads, T tokens, D features. Positions are global; indices into a tensor are named `_local`.
Runs are tables of (start, stop, start_local), sorted by position: where each run of positions lies in dim 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.masks.tiles import runs_of as runs_of_true
from longspan.planning.steps import Moved, Piece, Role, Sizes
from longspan.run.recorder import Buffer, Recorder, Rows
from longspan.spans import Ints, Span, as_table, by_position, intersect, join, total
from longspan.tile import accumulation_dtype

# -- Pieces as bytes ---------------------------------------------------------------------------------------------------
# All pieces between two ranks in a step are one message, whose size the plan determines.


@dataclass(frozen=True)
class Format:
    """Which tensors make up a piece of each role, and how they lie in a message."""

    sizes: Sizes
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of statistics and of sums that are not complete."""
        return accumulation_dtype(self.dtype)

    def fields(self, role: Role) -> list[tuple[int, torch.dtype]]:
        """(features, dtype) of each tensor of a piece; one feature is a number per row."""
        qk, v, narrow, wide = self.sizes.head_dim, self.sizes.v_head_dim, self.dtype, self.wide
        fields = {
            Role.Q: [(qk, narrow)],
            Role.KV: [(qk, narrow), (v, narrow)],
            Role.OUT: [(v, narrow), (1, wide)],
            Role.DOUT: [(v, narrow), (1, wide), (1, wide)],
            Role.DQ: [(qk, narrow)],
            Role.DKV: [(qk, wide), (v, wide)],
        }[role]
        return fields if v else [field for field in fields if field[0]]

    @property
    def alignment(self) -> int:
        """Alignment of messages in a shared buffer, in bytes: most rows are multiples of their size apart then, so that
        operations on rows of many messages can be one."""
        sizes = (self.sizes.head_dim, self.sizes.v_head_dim or 1)
        return lcm(16, *(size * dtype.itemsize for size in sizes for dtype in (self.dtype, self.wide)))

    def batch(self, piece: Piece) -> Span:
        return Span(0, self.sizes.batch) if piece.batch is None else piece.batch

    def num_bytes(self, transfers: Sequence[Moved]) -> int:
        return sum(t.piece.num_bytes(self.sizes) for t in transfers)

    def tensors(self, recorder: Recorder, piece: Piece, message: Buffer, offset: int) -> tuple[list[Rows], int]:
        """Return the piece's tensors as parts of a message, and the offset of the next piece."""
        shape = (len(self.batch(piece)), len(piece.heads), piece.num_tokens)
        tensors: list[Rows] = []
        for features, dtype in self.fields(piece.role):
            tensors.append(recorder.new((*shape, features), dtype, inside=message, offset=offset))
            offset += tensors[-1].buffer.num_bytes
        return tensors, offset


# -- Token stores ------------------------------------------------------------------------------------------------------


Bools = NDArray[np.bool_]
Moves = list[tuple[slice, slice]]
"""Local rows of a source and of a target that hold the same positions, in the order of the target."""


def runs_of(spans: tuple[Span, ...]) -> Ints:
    """Return the runs of rows in the order of spans.

    >>> runs_of((Span(6, 8), Span(0, 3))).tolist()
    [[0, 3, 2], [6, 8, 0]]
    """
    return laid_out(as_table(spans))


def laid_out(spans: Ints) -> Ints:
    """Return the runs of rows in the order of a table of (start, stop)."""
    sizes = spans[:, 1] - spans[:, 0]
    return by_position(np.column_stack((spans, np.cumsum(sizes) - sizes)))


def have_all(runs: Ints, wanted: Ints) -> bool:
    """Return whether `runs` contain every position of `wanted`.

    >>> have_all(laid_out(np.array([[0, 8]])), laid_out(np.array([[6, 8], [0, 3]])))
    True
    """
    return runs is wanted or total(intersect(wanted[:, :2], runs[:, :2])) == total(wanted)


def common_rows(source: Ints, target: Ints) -> Moves:
    """Return pairs of local slices that hold the same positions.

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
        """Return the tensors narrowed to some heads and batch rows."""
        if heads == self.heads and batch == self.batch:
            return self.tensors
        h0, b0 = heads.start - self.heads.start, batch.start - self.batch.start
        return tuple(t[b0 : b0 + len(batch), h0 : h0 + len(heads)] for t in self.tensors)

    def positions(self) -> Ints:
        """Return the global position of every local row."""
        positions = np.empty(total(self.runs), dtype=np.int64)
        for start, stop, local in self.runs.tolist():
            positions[local : local + stop - start] = np.arange(start, stop)
        return positions

    def has(self, heads: Span, batch: Span) -> bool:
        """Return whether the store has these heads and batch rows."""
        return (
            self.heads.start <= heads.start
            and heads.stop <= self.heads.stop
            and self.batch.start <= batch.start
            and batch.stop <= self.batch.stop
        )

    def copy_to(self, target: TokenStore, moves: Moves) -> None:
        """Copy rows to a store with a subset of the heads and batch rows."""
        parts = self.part(target.heads, target.batch)
        for tensor, part in zip(target.tensors, parts, strict=True):
            for here, there in moves:
                tensor[:, :, there].copy_(part[:, :, here])


def gather(stores: Sequence[TokenStore], target: TokenStore, what: str) -> None:
    """Copy all rows of the target from stores that have some, each row once.

    The validator proves for every schedule that the rows are held, so a missing row is a bug.
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
    """Yield the parts of two slices whose target rows are missing."""
    if missing[there].all():
        yield here, there
        return
    for start, stop in runs_of_true(missing[there]):
        yield (
            slice(here.start + start, here.start + stop),
            slice(there.start + start, there.start + stop),
        )
