"""Pack pieces into bytes of a message, and look up rows by global position in token stores. `walk.py` packs with these.

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
from longspan.spans import Ints, Span, as_table, by_position, join, run_table, steps_within, total
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


class PieceRuns:
    """The runs of a rank's pieces: the same array for the same rows, in both directions."""

    def __init__(self, own: Ints) -> None:
        self.own = own
        self._by_spans: dict[tuple[Span, ...], Ints] = {}
        self._by_id: dict[int, tuple[tuple[Span, ...], Ints]] = {}
        """With the spans, so that no others get their id; most pieces share them, and a hash takes long."""

    def of(self, spans: tuple[Span, ...]) -> Ints:
        known = self._by_id.get(id(spans))
        if known is None:
            runs = self._by_spans.get(spans)
            if runs is None:
                runs = self._by_spans[spans] = runs_of(spans)
            known = self._by_id[id(spans)] = spans, runs
        return known[1]


def laid_out(spans: Ints) -> Ints:
    """Return the runs of rows in the order of a table of (start, stop)."""
    sizes = spans[:, 1] - spans[:, 0]
    return by_position(np.column_stack((spans, np.cumsum(sizes) - sizes)))


def have_all(runs: Ints, wanted: Ints) -> bool:
    """Return whether `runs` contain every position of `wanted`.

    >>> have_all(laid_out(np.array([[0, 8]])), laid_out(np.array([[6, 8], [0, 3]])))
    True
    """
    if runs is wanted or not len(wanted):
        return True
    if not len(runs) or wanted[0, 0] < runs[0, 0] or wanted[-1, 1] > runs[-1, 1]:  # mostly, if not all
        return False
    return cached(_have_all, runs, wanted)


def _have_all(runs: Ints, wanted: Ints) -> bool:
    return sum([num for _, _, num in common_rows(runs, wanted)]) == total(wanted)


MAX_CACHED = 2048
_cached: dict[tuple[Any, ...], tuple[tuple[Ints, ...], Any]] = {}
"""Results for arrays, with the arrays, so that no others get their ids."""


def cached(function: Callable[..., T], *arrays: Ints) -> T:
    """Return the function of arrays that never change. Pieces of one plan and rank share their arrays of runs."""
    key = function, *map(id, arrays)
    entry = _cached.get(key)
    if entry is None:
        if len(_cached) >= MAX_CACHED:
            _cached.clear()
        entry = _cached[key] = arrays, function(*arrays)
    return entry[1]


def common_rows(source: Ints, target: Ints) -> list[Run]:
    """Return runs of local rows that hold the same positions, in the order of the target: first row of the target,
    first row of the source, and number of rows.

    >>> common_rows(laid_out(np.array([[0, 8]])), laid_out(np.array([[6, 8], [0, 3]])))
    [(0, 6, 2), (2, 0, 3)]
    """
    return cached(_common_rows, source, target)


def _common_rows(source: Ints, target: Ints) -> list[Run]:
    i, j = join(target, source)
    target, source = target[i], source[j]
    start = np.maximum(target[:, 0], source[:, 0])
    there, here = (runs[:, 2] + (start - runs[:, 0]) for runs in (target, source))
    return _as_runs(there, here, np.minimum(target[:, 1], source[:, 1]) - start)


def _as_runs(there: Ints, here: Ints, size: Ints) -> list[Run]:
    """Return runs in the order of the target."""
    order = there.argsort(kind="stable")
    return list(zip(there[order].tolist(), here[order].tolist(), size[order].tolist(), strict=True))


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


def gather(stores: Sequence[TokenStore], target: TokenStore, what: object) -> None:
    """Copy all rows of the target from stores that have some, each row once, from the first store that has it.

    The validator proves for every schedule that the rows are held, so a missing row is a bug.
    """
    if stores and have_all(stores[0].runs, target.runs):
        return stores[0].copy_to(target, common_rows(stores[0].runs, target.runs))
    assert stores, f"{what} is not held"
    for store, runs in zip(stores, cached(first_rows, target.runs, *[store.runs for store in stores]), strict=True):
        store.copy_to(target, runs)
    return None


def first_rows(target: Ints, *sources: Ints) -> list[list[Run]]:
    """Return for each source the runs of local rows that no earlier source has, as `common_rows` does.

    >>> first_rows(laid_out(np.array([[0, 5]])), laid_out(np.array([[2, 4]])), laid_out(np.array([[0, 6]])))
    [[(2, 0, 2)], [(0, 0, 2), (4, 4, 1)]]
    """
    held = np.concatenate(sources)
    # No run of a source or of the target has an edge inside a cell.
    edges = np.unique(np.concatenate((held[:, :2].ravel(), target[:, :2].ravel())))
    owners = []
    for runs in (target, held[::-1]):  # from the last source to the first, which overwrites the others
        low, high = edges.searchsorted(runs[:, 0]), edges.searchsorted(runs[:, 1])
        owner = np.full(len(edges) - 1, -1, dtype=np.int64)
        owner[np.repeat(low, high - low) + steps_within(high - low)] = np.repeat(np.arange(len(runs)), high - low)
        owners.append(owner)
    wanted, held_by = owners[0], len(held) - 1 - owners[1]
    held_by[owners[1] < 0] = -1
    cells = np.flatnonzero(wanted >= 0)
    assert (held_by[cells] >= 0).all(), "not all rows are held"
    i, j = wanted[cells], held_by[cells]
    parts = run_table((i[1:] != i[:-1]) | (j[1:] != j[:-1]), len(cells))
    first, last = parts[:, 0], parts[:, 1] - 1
    start, stop = edges[cells[first]], edges[cells[last] + 1]
    i, j = i[first], j[first]
    there, here = target[i, 2] + start - target[i, 0], held[j, 2] + start - held[j, 0]
    source = np.repeat(np.arange(len(sources)), [len(runs) for runs in sources])[j]
    return [_as_runs(there[of], here[of], (stop - start)[of]) for of in (source == n for n in range(len(sources)))]
