"""`reference` kernel of recurrences: plain tensor math in chunks, on any device and dtype, with gradients by autograd.

Half precision is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import hardshrink, pad, softplus, threshold

from longspan.mixers.recurrences import (
    EPSILON,
    GatedDelta,
    LinearAttention,
    LinearRecurrence,
    ScanKernel,
    ScanWork,
    Segments,
    Ssd,
)
from longspan.spans import Ints

# -- Decays inside of chunks -------------------------------------------------------------------------------------------
# Exponents are sums of logarithms between two tokens, never positive where decays are at most 1: what would be is
# masked before `exp`. Sums are made in float64, since the difference of two long ones has lost digits.
#
# Shapes: N chunks, J key heads, R heads that share one, C tokens of a chunk, K features; x is 1 or K.


LEAST = {torch.float32: 2.0**-100, torch.float64: 2.0**-1000}
"""Decays below are taken for 0. Products with them would leave the range in which processors are quick: a summary took
three times as long for a few chunks of such numbers."""


@dataclass(frozen=True, eq=False)
class Decays:
    """Of all chunks."""

    sums: Tensor
    """(N, J, R, C, x) in float64: logarithms of what is left, at each token, of what entered its chunk."""
    dtype: torch.dtype

    @classmethod
    def of(cls, g: Tensor) -> Decays:
        """From the logarithm of each token's decay. One that is taken for 0 may be minus infinity: sums are finite.

        >>> Decays.of(torch.tensor([-1.0, -torch.inf, -2.0]).view(1, 1, 1, 3, 1)).left.flatten().tolist()
        [0.0, 0.1353352814912796, 1.0]
        """
        return cls(g.clamp(min=math.log(LEAST[g.dtype]) - 1).double().cumsum(3), g.dtype)

    @cached_property
    def entered(self) -> Tensor:
        """(N, J, R, C, x): what is left, at each token, of what entered its chunk."""
        return self.exp(self.sums)

    @cached_property
    def left(self) -> Tensor:
        """(N, J, R, C, x): what is left of each token at the end of its chunk."""
        return self.exp(self.sums[..., -1:, :] - self.sums)

    @cached_property
    def whole(self) -> Tensor:
        """(N, J, R, x, 1): what is left of rows of a state that went through the chunk."""
        return self.entered[..., -1, :].unsqueeze(-1)

    def exp(self, logarithms: Tensor) -> Tensor:
        return threshold(logarithms.to(self.dtype).exp(), LEAST[self.dtype], 0.0)

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """(N, J, R, C, C): a_i . b_j, times what is left of token j at token i; 0 where j comes after i."""
        return (a @ b.mT) * self._pairs if self.sums.shape[-1] == 1 else self._halved(a, b)

    @cached_property
    def _pairs(self) -> Tensor:
        size = self.sums.shape[3]
        later = torch.ones(size, size, dtype=torch.bool, device=self.sums.device).triu(1)
        return self.exp((self.sums - self.sums.mT).to(self.dtype).masked_fill(later, -torch.inf))

    def _halved(self, a: Tensor, b: Tensor) -> Tensor:
        """Where each feature has its own decay: the second half of a stretch reads what its first half left at the
        border between them, both halves are halved in turn, down to tokens that read themselves.

            a_0 b_0
            [1|0]     a_1 b_1
            [2,3 | 0,1]         a_2 b_2
                                [3|2]     a_3 b_3
        """
        shape = self.sums.shape
        found = (a * b).sum(-1)[..., None, None].expand(*shape[:4], 1, 1)
        for rows, columns in self._halves:
            half = rows.shape[-2]
            first, second = (x.unflatten(3, (-1, 2, half)).select(4, at) for x, at in ((b, 0), (a, 1)))
            below = (second * rows) @ (first * columns).mT
            upper, lower = found.unflatten(3, (-1, 2)).unbind(4)
            above = torch.zeros_like(below)
            found = torch.cat((torch.cat((upper, above), -1), torch.cat((below, lower), -1)), -2)
        return found.squeeze(3)

    @cached_property
    def _halves(self) -> list[tuple[Tensor, Tensor]]:
        """For halves of 1, 2, 4... tokens: what is left of the border at each token of the second one, and of each
        token of the first one at the border."""
        found, half = [], 1
        while half < self.sums.shape[3]:
            first, second = self.sums.unflatten(3, (-1, 2, half)).unbind(4)
            border = first[..., -1:, :]
            found.append((self.exp(second - border), self.exp(border - first)))
            half *= 2
        return found


# -- Segments cut into chunks of one size ------------------------------------------------------------------------------
# Segments cut into chunks of one size: the work inside of all chunks is one batch, then states go from chunk to chunk.
# Chunks are ordered by their number within their segment; within a number, segments with more chunks come first. So
# those that still have a chunk are always the first ones. Segments of 5, 2 and 9 tokens, chunks of 4:
#
#     number 0: segment 2, segment 0, segment 1        number 1: segment 2, segment 0        number 2: segment 2


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


# -- Linear attention with decays, and the delta rule, in chunks -------------------------------------------------------
# Linear attention with decays in chunks, and the delta rule: what all recurrences but `LinearRecurrence` come down to.
# Inside of a chunk that a state S enters, with decays d from its begin to each token (one head, tokens as rows):
#
#     without the delta rule      O = d Q S + P V        P_ij = q_i . k_j (what is left of j at i), for j <= i
#     with it                     the same with V' = X - W S in the place of V, where
#                                 (I + A) [X | W] = [beta V | beta d K]    A_ij = beta_i k_i . k_j (...), for j < i
#     at the end                  S' = (decay of the chunk) S + (K, each what is left of it at the end)^T V
#
# A chunk of two tokens, K = V = 1, all k = q = 1, beta = 1, no decay, v = 3, 5, that 2 enters: A_10 = 1, so X = 3, 5 -
# 3 and W = 1, 0; V' = 3 - 2, 2; O = 2 + 1, 2 + 1 + 2. The delta rule with beta 1 reads what was written last: 3, 5.
#
# Shapes: N chunks, S segments, J key heads, R heads that share one, C tokens of a chunk, K and V features.


Step = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ChunkedDecays:
    """Tokens in chunks, in the dtype of states: what is left of states that go through them, without the delta rule."""

    table: ChunkTable
    g: Tensor
    """(N, J, R, C, 1 or K)"""

    @cached_property
    def decays(self) -> Decays:
        return Decays.of(self.g)

    def passed(self) -> Tensor:
        """(S, H, 1 or K, 1): what is left of states that went through whole segments, M."""
        sums = self.decays.sums[..., -1, :].unsqueeze(-1)
        parts = sums.split(self.table.steps)
        start = sums.new_zeros(len(self.table.order), *sums.shape[1:]).flatten(1, 2)
        return self.decays.exp(self._carried(start, lambda number, state: state + parts[number])[1])

    def _carried(self, states: Tensor, step: Step) -> tuple[list[Tensor], Tensor]:
        """States (S, H, ...), which steps see as (S, J, R, ...)."""
        before, after = self.table.carry(self._grouped(states), step)
        return before, after.flatten(1, 2)

    def _grouped(self, states: Tensor) -> Tensor:
        return states.unflatten(1, self.g.shape[1:3])


@dataclass(frozen=True, eq=False)
class ChunkedAttention(ChunkedDecays):
    """With what is written into states and read from them."""

    q: Tensor | None
    """(N, J, 1, C, K), scaled. None where nothing is read."""
    k: Tensor
    """(N, J, 1, C, K)"""
    v: Tensor
    """(N, J, R, C, V)"""
    beta: Tensor | None = None
    """(N, J, R, C, 1) with the delta rule."""
    skip: Tensor | None = None
    """(N, J, R, C, V): what is added to the output."""

    def local(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(N, H, C, V), and the states that leave (S, H, K, V)."""
        assert self.q is not None
        made: list[Tensor] = []
        step = self._decayed() if self.beta is None else self._corrected(*self._solved(), made)
        before, after = self._carried(states, step)
        values = torch.cat(made) if made else self.v
        read = (self.q * self.decays.entered) @ torch.cat((self._grouped(states)[:0], *before))
        out = _added(read, self.decays.products(self.q, self.k), values)
        return (out if self.skip is None else out + self.skip).flatten(1, 2), after

    def zeros(self) -> Tensor:
        """States (S, H, K, V)."""
        _, j, r, _, v = self.v.shape
        return self.v.new_zeros(len(self.table.order), j * r, self.k.shape[-1], v)

    def summary(self) -> tuple[Tensor, Tensor]:
        """(M, U)."""
        if self.beta is None:
            return self.passed(), self._carried(self.zeros(), self._decayed())[1]
        start, (k, v) = self.zeros(), (self.k.shape[-1], self.v.shape[-1])
        one = torch.eye(k, dtype=start.dtype, device=start.device).expand(*start.shape[:2], k, k)
        values, weights = self._solved()
        step = self._corrected(pad(values, (0, k)), weights, [])  # values [v | 0] and states [0 | I] give [U | M]
        least = LEAST[start.dtype]  # for the map shrinks and shrinks
        both = torch.cat((start, one), -1)
        _, after = self._carried(both, lambda number, state: hardshrink(step(number, state), least))
        u, m = after.split((v, k), -1)
        return m, u

    def _decayed(self) -> Step:
        added = ((self.k * self.decays.left).mT @ self.v).split(self.table.steps)
        whole = self.decays.whole.split(self.table.steps)
        return lambda number, state: torch.addcmul(added[number], whole[number], state)

    def _solved(self) -> tuple[Tensor, Tensor]:
        """X (N, J, R, C, V) and W (N, J, R, C, K)."""
        assert self.beta is not None
        system = self.decays.products(self.k, self.k) * self.beta  # the solver looks below the diagonal only
        wanted = self.v * self.beta, self.k * (self.decays.entered * self.beta)
        values, weights = (torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True) for x in wanted)
        return values, weights

    def _corrected(self, values: Tensor, weights: Tensor, made: list[Tensor]) -> Step:
        """With the delta rule; `made` gets V' of chunks of every number."""
        everything = values, weights, self.decays.whole, (self.k * self.decays.left).mT
        parts = list(zip(*(x.split(self.table.steps) for x in everything), strict=True))

        def step(number: int, state: Tensor) -> Tensor:
            values, weights, whole, keys = parts[number]
            made.append(_added(values, weights, state, -1))
            return _added(whole * state, keys, made[-1])

        return step


def _added(x: Tensor, a: Tensor, b: Tensor, factor: int = 1) -> Tensor:
    """x + factor * a @ b, of as many dims."""
    flat = torch.baddbmm(x.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2), alpha=factor)
    return flat.view(x.shape)


# -- Elementwise recurrences in chunks: S_t = a_t S_{t-1} + b_t for every channel --------------------------------------
# All chunks are computed at once, token by token inside, then from chunk to chunk. Nothing is divided and no logarithm
# is taken, so decays may be 0 or negative.
#
# Shapes: N chunks, S segments, C tokens of a chunk, D channels.


@dataclass(frozen=True, eq=False)
class ChunkedElements:
    """Tokens in chunks, (N, C, D), in the dtype of states; a is 1 where a segment has ended."""

    table: ChunkTable
    a: Tensor
    b: Tensor

    def local(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 1, C, D), and the states that leave (S, 1, D, 1)."""
        before, after = self._continued(states)
        return (self._sums + self._products * before.unsqueeze(1)).unsqueeze(1), after

    def zeros(self) -> Tensor:
        """States (S, 1, D, 1)."""
        return self.a.new_zeros(len(self.table.order), 1, self.a.shape[-1], 1)

    def summary(self) -> tuple[Tensor, Tensor]:
        """(M, U)."""
        return self.passed(), self._continued(self.zeros())[1]

    def passed(self) -> Tensor:
        """(S, 1, D, 1): M."""
        whole = self._products[:, -1].split(self.table.steps)
        return self._carried(torch.ones_like(self.zeros()), lambda number, state: whole[number] * state)[1]

    def _continued(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States before each chunk (N, D), and those that leave."""
        whole, added = (x[:, -1].split(self.table.steps) for x in (self._products, self._sums))
        return self._carried(states, lambda number, state: whole[number] * state + added[number])

    def _carried(self, states: Tensor, step: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """`ChunkTable.carry` of states (S, 1, D, 1), with what was before every chunk (N, D) as one tensor."""
        flat = states.flatten(1)
        before, after = self.table.carry(flat, step)
        return torch.cat((flat[:0], *before)), after.view(states.shape)

    @cached_property
    def _sums(self) -> Tensor:
        """(N, C, D): the output as if nothing had entered the chunk."""
        return self._scanned(self.b)

    @cached_property
    def _products(self) -> Tensor:
        """(N, C, D): of decays from the chunk's begin up to each token."""
        return self._scanned(None)

    def _scanned(self, b: Tensor | None) -> Tensor:
        decays = self.a.unbind(1)
        added = None if b is None else b.unbind(1)
        found = [decays[0] if added is None else added[0]]
        for t in range(1, len(decays)):
            carried = decays[t] * found[-1]
            found.append(carried if added is None else carried + added[t])
        return torch.stack(found, 1)


# -- A rank's share of any recurrence in chunks ------------------------------------------------------------------------
# Half precision is widened.


SHORT = {size: size * size + 128 * size + 4096 for size in (16, 32, 64)}
"""Tokens of a chunk, and what one costs: its pairs, its tokens (blank ones too) and its state, as measured for 4 heads
of the gated delta rule with K = V = 128. 64 is best for long segments, 16 for short ones."""
LONG = {size: size + 64 for size in (16, 64, 256, 1024, 4096)}
"""The same where no pairs are looked at."""
VALUES = {GatedDelta: 2, LinearAttention: 2, Ssd: 0, LinearRecurrence: 1}
"""Which of a recurrence's tokens is like its output."""


def values_of(work: ScanWork) -> Tensor:
    return work.tokens[VALUES[type(work.recurrence)]]


def in_slots(out: Tensor, table: ChunkTable, work: ScanWork) -> Tensor:
    """Chunks of the output in their slots, in the shape and dtype of values."""
    values = values_of(work)
    return table.unfold(out.to(values.dtype)).view(values.shape)


def in_chunks(work: ScanWork, reads: bool = True) -> ChunkedAttention | ChunkedElements:
    """Everything that outputs and states are made of; without what only outputs are made of, unless it `reads`."""
    recurrence = work.recurrence
    if isinstance(recurrence, LinearRecurrence):
        return _elements(work)
    if isinstance(recurrence, Ssd):
        return _ssd(work, recurrence, reads)
    assert isinstance(recurrence, GatedDelta | LinearAttention)
    return _attention(work, recurrence, reads)


def stages_of_segments(work: ScanWork) -> list[Ints]:
    """Cut segments where a number is not finite for the first time, so that no such token is in a chunk with tokens
    before it. Stage i has the i-th parts, as rows of (segment, batch row, first slot, end slot).

    Once is enough for each number of a token and each of NaN, inf and -inf: what it writes into a state stays there.
    Queries write nothing, so segments are not cut there.
    """
    if isinstance(work.recurrence, LinearRecurrence):  # computed token by token
        return []
    queries = 3 if isinstance(work.recurrence, Ssd) else 0
    writes = [x.detach().flatten(2) for at, x in enumerate(work.tokens) if at != queries]
    bad = torch.cat([found for x in writes for found in (x.isnan(), x.isposinf(), x.isneginf())], -1)
    stages: dict[int, list[tuple[int, ...]]] = {}
    for segment, (row, first, end) in enumerate(work.segments.table.tolist()):
        here = bad[row, first:end]
        cuts = here[:, here.any(0)].int().argmax(0).unique().tolist()
        edges = [first, *(first + cut for cut in cuts if cut), end]
        for stage, part in enumerate(pairwise(edges)):
            stages.setdefault(stage, []).append((segment, row, *part))
    return [np.array(stage, dtype=np.int64) for stage in stages.values()]


def passed(work: ScanWork) -> Tensor:
    """Diagonal maps only: M of every segment."""
    recurrence = work.recurrence
    if isinstance(recurrence, LinearRecurrence):
        return _elements(work).passed()
    table = _table(work, LONG)
    folded = _folded(work, table)
    if isinstance(recurrence, Ssd):
        blank = (table.slot < 0)[:, None, None, :, None]
        return ChunkedDecays(table, stepped(folded(work.tokens[1]), blank, recurrence, work.shared)[1]).passed()
    assert isinstance(recurrence, LinearAttention)
    return ChunkedDecays(table, folded(work.tokens[3])).passed()


def _table(work: ScanWork, costs: dict[int, int]) -> ChunkTable:
    """Chunks of the size with the least work."""
    batch, slots = work.tokens[0].shape[:2]
    lengths = work.segments.table[:, 2] - work.segments.table[:, 1]
    size = min(costs, key=lambda size: int(np.sum(-(-lengths // size))) * costs[size])
    return cut(work.segments, size, batch, slots, work.tokens[0].device)


def _folded(work: ScanWork, table: ChunkTable) -> Callable[[Tensor], Tensor]:
    """What puts tokens (B, T, H or J, ...) into chunks (N, J, H / J or 1, C, features)."""
    dtype, groups = work.recurrence.state_dtype(work.tokens), min(x.shape[2] for x in work.tokens)

    def folded(x: Tensor) -> Tensor:
        return table.fold(x if x.ndim == 4 else x.unsqueeze(3)).to(dtype).unflatten(1, (groups, -1))

    return folded


def _attention(work: ScanWork, recurrence: GatedDelta | LinearAttention, reads: bool) -> ChunkedAttention:
    table = _table(work, SHORT)
    folded = _folded(work, table)
    l2norm = isinstance(recurrence, GatedDelta) and recurrence.l2norm
    q = _scaled(folded(work.tokens[0]), recurrence.scale, l2norm) if reads else None
    k, v, g, *beta = map(folded, work.tokens[1:])
    return ChunkedAttention(table, g, q, _scaled(k, 1.0, l2norm), v, *beta)


def _scaled(x: Tensor, factor: float, l2norm: bool) -> Tensor:
    if l2norm:
        return x * ((x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() * factor)
    return x if factor == 1.0 else x * factor


def _ssd(work: ScanWork, recurrence: Ssd, reads: bool) -> ChunkedAttention:
    table = _table(work, SHORT)
    folded = _folded(work, table)
    x, dt, b = map(folded, work.tokens[:3])
    dt, g = stepped(dt, (table.slot < 0)[:, None, None, :, None], recurrence, work.shared)
    if not reads:
        return ChunkedAttention(table, g, None, b, x * dt)
    d = work.shared[1]
    skip = None if d is None else _of_heads(d, x) * x
    return ChunkedAttention(table, g, folded(work.tokens[3]), b, x * dt, skip=skip)


def stepped(dt: Tensor, ended: Tensor, recurrence: Ssd, shared: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    """dt as it is used, and the logarithm of the decay; both are 0 where a segment has ended."""
    a, _, bias = shared
    assert a is not None
    dt = dt if bias is None else dt + _of_heads(bias, dt)
    dt = (softplus(dt) if recurrence.softplus else dt).clamp(*recurrence.limits).masked_fill(ended, 0)
    return dt, _of_heads(a, dt) * dt


def _of_heads(shared: Tensor, x: Tensor) -> Tensor:
    """(H,) or (H, V) -> (J, R, 1, 1 or V)."""
    return shared.to(x.dtype).view(*x.shape[1:3], 1, -1)


def _elements(work: ScanWork) -> ChunkedElements:
    table, dtype = _table(work, SHORT), work.recurrence.state_dtype(work.tokens)
    a, b = (table.fold(x.unsqueeze(2)).squeeze(1).to(dtype) for x in work.tokens)
    return ChunkedElements(table, a.masked_fill((table.slot < 0).unsqueeze(-1), 1), b)


# -- The kernel --------------------------------------------------------------------------------------------------------


class ReferenceScan(ScanKernel):
    """All recurrences of `recurrences`."""

    name = "reference"

    def why_not(self, work: ScanWork) -> str | None:
        known = type(work.recurrence) in VALUES
        return None if known else f"it does not know the recurrence {work.recurrence.name!r}"

    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        """A NaN or infinite token of a chunk reaches all of the chunk, so tokens before it are computed apart from it.

        Only outputs are looked at, and only on CPUs: a GPU would have to wait for the answer.
        """
        with own_precision(work):
            out, after = _computed(work, states)
            if out.is_cpu and not out.detach().sum(dtype=after.dtype).isfinite():
                stages = stages_of_segments(work)
                if len(stages) > 1:
                    return _computed_in_stages(work, states, stages)
            return out, after

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), own_precision(work):
            return in_chunks(work, reads=False).summary()


def _computed(work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
    chunked = in_chunks(work)
    out, after = chunked.local(states)
    return in_slots(out, chunked.table, work), after


def _computed_in_stages(work: ScanWork, states: Tensor, stages: list[Ints]) -> tuple[Tensor, Tensor]:
    """As `_computed`: the parts of a segment one after the other, the first parts of all segments together."""
    out: Tensor | None = None
    for stage in stages:
        which = torch.as_tensor(stage[:, 0])
        part, after = _computed(replace(work, segments=Segments(stage[:, 1:])), states[which])
        out = part if out is None else out + part  # zeros but for their own slots
        states = states.index_copy(0, which, after)
    assert out is not None
    return out, states


def own_precision(work: ScanWork) -> AbstractContextManager[object]:
    """Autocast would multiply in half precision what is widened here."""
    return torch.autocast(work.tokens[0].device.type, enabled=False)
