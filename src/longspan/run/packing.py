"""Packing: pieces as bytes of a message, and token stores, which look up rows by global position.

A token store holds a rank's own shard, or rows received from other ranks, until they are used or sent.

Shapes: B batch rows, H heads, T tokens, D features. Positions are global; indices into a tensor are named `_local`.
Runs are tables of (start, stop, start_local), sorted by position: where each run of positions lies in dim 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.planning.steps import Moved, Piece, Role, Sizes
from longspan.run.recorder import Buffer, Recorder, Rows, Run
from longspan.spans import Ints, Span, as_table, by_position, intersect, join, subtract, total
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
        return self._fields[role]

    @cached_property
    def _fields(self) -> dict[Role, list[tuple[int, torch.dtype]]]:
        qk, v, narrow, wide = self.sizes.head_dim, self.sizes.v_head_dim, self.dtype, self.wide
        fields = {
            Role.Q: [(qk, narrow)],
            Role.KV: [(qk, narrow), (v, narrow)],
            Role.OUT: [(v, narrow), (1, wide)],
            Role.DOUT: [(v, narrow), (1, wide), (1, wide)],
            Role.DQ: [(qk, narrow)],
            Role.DKV: [(qk, wide), (v, wide)],
        }
        return fields if v else {role: [part for part in parts if part[0]] for role, parts in fields.items()}

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
T = TypeVar("T")


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
    return runs is wanted or cached(_have_all, runs, wanted)


def _have_all(runs: Ints, wanted: Ints) -> bool:
    return total(intersect(wanted[:, :2], runs[:, :2])) == total(wanted)


MAX_CACHED = 2048
_cached: dict[tuple[Any, int, int], tuple[Ints, Ints, Any]] = {}
"""Results for two arrays, with the arrays, so that no others get their ids."""


def cached(function: Callable[[Ints, Ints], T], a: Ints, b: Ints) -> T:
    """Return the function of two arrays that never change. Pieces of one walk share their arrays of runs."""
    entry = _cached.get((function, id(a), id(b)))
    if entry is None:
        if len(_cached) >= MAX_CACHED:
            _cached.clear()
        entry = _cached[function, id(a), id(b)] = a, b, function(a, b)
    return entry[2]


def common_rows(source: Ints, target: Ints) -> list[Run]:
    """Return runs of local rows that hold the same positions, in the order of the target: first row of the target,
    first row of the source, and number of rows.

    >>> common_rows(laid_out(np.array([[0, 8]])), laid_out(np.array([[6, 8], [0, 3]])))
    [(0, 6, 2), (2, 0, 3)]
    """
    return cached(_common_rows, source, target)


def _common_rows(source: Ints, target: Ints) -> list[Run]:
    i, j = join(target[:, :2], source[:, :2])
    start = np.maximum(target[i, 0], source[j, 0])
    size = np.minimum(target[i, 1], source[j, 1]) - start
    here, there = source[j, 2] + start - source[j, 0], target[i, 2] + start - target[i, 0]
    table = np.stack((there, here, size), axis=1)[np.argsort(there, kind="stable")]
    return [(dst, src, num) for dst, src, num in table.tolist()]


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

    def copy_to(self, target: TokenStore, runs: Sequence[Run]) -> None:
        """Copy runs of rows to a store with a subset of the heads and batch rows."""
        for tensor, part in zip(target.tensors, self.part(target.heads, target.batch), strict=True):
            tensor.recorder.copy_runs(tensor, part, runs)


def gather(stores: Sequence[TokenStore], target: TokenStore, what: str) -> None:
    """Copy all rows of the target from stores that have some, each row once.

    The validator proves for every schedule that the rows are held, so a missing row is a bug.
    """
    missing = target.runs
    for store in stores:
        if not len(missing):
            break
        runs = common_rows(store.runs, missing)
        if runs:
            store.copy_to(target, runs)
            if sum(run[2] for run in runs) == total(missing):  # mostly the first store has all rows
                return
            missing = without(missing, store.runs)
    assert not len(missing), f"{what} is not all held"


def without(runs: Ints, others: Ints) -> Ints:
    """Return the parts of runs whose positions are in none of the others.

    >>> without(runs_of((Span(6, 8), Span(0, 3))), runs_of((Span(1, 7),))).tolist()
    [[0, 1, 2], [7, 8, 1]]
    """
    spans = subtract(runs[:, :2], others[:, :2])
    run = np.searchsorted(runs[:, 0], spans[:, 0], side="right") - 1
    return np.column_stack((spans, runs[run, 2] + spans[:, 0] - runs[run, 0]))
