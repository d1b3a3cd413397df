"""Segments cut into chunks of one size: the work inside of all chunks is one batch, then states go from chunk to chunk.

Chunks are ordered by their number within their segment; within a number, segments with more chunks come first. So those
that still have a chunk are always the first ones. Segments of 5, 2 and 9 tokens, chunks of 4:

    number 0: segment 2, segment 0, segment 1        number 1: segment 2, segment 0        number 2: segment 2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.execution.scans.contract import Segments
from longspan.span import Ints


@dataclass(frozen=True, eq=False)
class RowMoves:
    """Where rows come from: a row of the result is a row of what is given, or blank. No row is taken twice."""

    taken: Tensor
    """For every row of the result; 0 where it is blank."""
    blank: Tensor
    """Rows of the result that are zeros."""

    @classmethod
    def of(cls, source: Tensor) -> RowMoves:
        """From the row that each row of the result takes, or -1."""
        source = source.flatten()
        return cls(source.clamp(min=0), (source < 0).nonzero().flatten())

    def take(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros((len(self.taken), *x.shape[1:]))
        found = x.index_select(0, self.taken)
        return found.index_fill_(0, self.blank, 0) if len(self.blank) else found


class MovedRows(torch.autograd.Function):
    """Rows that are taken once go back by the inverse table: adding them up one by one takes far longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: RowMoves, back: RowMoves) -> Tensor:
        ctx.tables = back, there
        return there.take(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return MovedRows.apply(gradients[0], *ctx.tables), None, None


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Segments, cut."""

    size: int
    """Tokens of a chunk."""
    steps: tuple[int, ...]
    """How many segments have a chunk of each number."""
    order: Tensor
    """Segments, those with most chunks first."""
    place: Tensor
    """Where each segment is in that order."""
    slot: Tensor
    """(chunks, size): the slot of every token, counted through batch rows; -1 where a segment has ended."""
    home: Tensor
    """(batch, slots): the chunk's token in every slot, counted through chunks; -1 where no segment is."""

    def fold(self, x: Tensor) -> Tensor:
        """(batch, slots, heads, ...) -> (chunks, heads, size, ...); zeros where a segment has ended."""
        heads = x.shape[2]
        rows = MovedRows.apply(x.flatten(0, 2), *_tables(self, heads))
        assert isinstance(rows, Tensor)
        return rows.view(len(self.slot), heads, self.size, *x.shape[3:])

    def unfold(self, x: Tensor) -> Tensor:
        """(chunks, heads, size, ...) -> (batch, slots, heads, ...); zeros in slots that no segment has."""
        heads = x.shape[1]
        into, out_of = _tables(self, heads)
        rows = MovedRows.apply(x.flatten(0, 2), out_of, into)
        assert isinstance(rows, Tensor)
        return rows.view(*self.home.shape, heads, *x.shape[3:])

    def carry(self, states: Tensor, step: Callable[[int, Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        """States go through the chunks of their segments: `step` makes those after chunks of a number from those
        before. Returns the states before the chunks of every number, and those that leave segments.

        >>> import numpy as np
        >>> table = cut(Segments(np.array([[0, 0, 5], [0, 5, 7], [0, 7, 16]])), 4, 1, 16, torch.device("cpu"))
        >>> table.steps, table.order.tolist()
        ((3, 2, 1), [2, 0, 1])
        >>> before, after = table.carry(torch.tensor([10.0, 20.0, 30.0]), lambda number, state: state + 1)
        >>> [state.tolist() for state in before], after.tolist()
        ([[30.0, 10.0, 20.0], [31.0, 11.0], [32.0]], [12.0, 21.0, 33.0])
        """
        state, before, left = states[self.order], [], []
        for number, going_on in enumerate(self.steps):
            if going_on < len(state):
                left.append(state[going_on:])
                state = state[:going_on]
            before.append(state)
            state = step(number, state)
        left.append(state)
        return before, torch.cat(left[::-1])[self.place]


def cut(segments: Segments, size: int, batch: int, slots: int, device: torch.device) -> ChunkTable:
    """The chunks of segments of tokens (batch, slots, ...). They are remembered: layers and steps have the same."""
    return _cut(_written(segments), size, batch, slots, device)


def _written(segments: Segments) -> bytes:
    return segments.table.astype(np.int64).tobytes()


def _read(segments: bytes) -> Ints:
    """Batch rows, first slots and end slots."""
    return np.frombuffer(segments, dtype=np.int64).reshape(-1, 3).T


@lru_cache(maxsize=64)
def _cut(segments: bytes, size: int, batch: int, slots: int, device: torch.device) -> ChunkTable:
    row, first, end = _read(segments)
    counts = -(-(end - first) // size)
    order = np.argsort(-counts, kind="stable")
    most = int(counts.max(initial=0))
    steps = (counts[:, None] > np.arange(most)).sum(0)
    number = np.repeat(np.arange(most), steps)
    segment = order[np.arange(len(number)) - np.repeat(np.cumsum(steps) - steps, steps)]
    slot = (first[segment] + number * size)[:, None] + np.arange(size)
    slot = np.where(slot < end[segment][:, None], slot + row[segment][:, None] * slots, -1)
    home = np.full(batch * slots, -1)
    home[slot[slot >= 0]] = np.flatnonzero(slot.ravel() >= 0)
    tensors = (torch.as_tensor(x, device=device) for x in (order, np.argsort(order), slot, home.reshape(batch, slots)))
    return ChunkTable(size, tuple(steps.tolist()), *tensors)


@lru_cache(maxsize=64)
def _tables(table: ChunkTable, heads: int) -> tuple[RowMoves, RowMoves]:
    """Rows of heads of chunks out of those of slots, and back. Token t of head h is row t * heads + h among slots; in
    chunks the heads of a chunk come first, then its tokens."""
    head = torch.arange(heads, device=table.slot.device)
    slot, chunk, token = table.slot[:, None], table.home // table.size, table.home % table.size
    into = torch.where(slot < 0, -1, slot * heads + head[:, None])
    home = ((chunk * heads).unsqueeze(-1) + head) * table.size + token.unsqueeze(-1)
    return RowMoves.of(into), RowMoves.of(torch.where(table.home.unsqueeze(-1) < 0, -1, home))


@dataclass(frozen=True, eq=False)
class Packing:
    """Segments one after the other, as kernels with `cu_seqlens` want them."""

    edges: Tensor
    """0, and where each segment ends."""
    into: RowMoves
    out_of: RowMoves

    def pack(self, x: Tensor) -> Tensor:
        """(batch, slots, ...) -> (1, tokens, ...)."""
        found = MovedRows.apply(x.flatten(0, 1), self.into, self.out_of)
        assert isinstance(found, Tensor)
        return found.unsqueeze(0)

    def unpack(self, x: Tensor, shape: torch.Size) -> Tensor:
        found = MovedRows.apply(x.squeeze(0), self.out_of, self.into)
        assert isinstance(found, Tensor)
        return found.view(shape)


def packing(segments: Segments, batch: int, slots: int, device: torch.device) -> Packing:
    """The order in which segments of tokens (batch, slots, ...) are packed is that of their states.

    >>> import numpy as np
    >>> made = packing(Segments(np.array([[0, 3, 5], [0, 0, 2]])), 1, 6, torch.device("cpu"))
    >>> made.edges.tolist(), made.pack(torch.arange(6).view(1, 6)).tolist()
    ([0, 2, 4], [[3, 4, 0, 1]])
    >>> made.unpack(torch.tensor([[3, 4, 7, 1]]), torch.Size((1, 6))).tolist()
    [[7, 1, 0, 3, 4, 0]]
    """
    return _packing(_written(segments), batch, slots, device)


@lru_cache(maxsize=64)
def _packing(segments: bytes, batch: int, slots: int, device: torch.device) -> Packing:
    row, first, end = _read(segments)
    edges = np.concatenate(([0], np.cumsum(end - first)))
    taken = np.repeat(row * slots + first - edges[:-1], end - first) + np.arange(edges[-1])
    home = np.full(batch * slots, -1)
    home[taken] = np.arange(len(taken))
    edges, taken, home = (torch.as_tensor(x, device=device) for x in (edges, taken, home))
    return Packing(edges, RowMoves.of(taken), RowMoves.of(home))
