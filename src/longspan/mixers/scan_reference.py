"""Recurrences, the interface of their kernels, and the `reference` kernel: plain tensor math in chunks.

The reference kernel runs on any device and dtype, with gradients by autograd. Half precision is computed in float32.

Shapes: B batch, T slots, H heads, J key heads (H % J == 0, each serves H // J consecutive heads), K and V rows and
columns of a state, D channels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import hardshrink, pad, softplus, threshold

from longspan.device_tables import keep_recent
from longspan.layouts.layout import to_device
from longspan.spans import Ints
from longspan.tile import accumulation_dtype

# -- The interface of a recurrence kernel ------------------------------------------------------------------------------
# A linear recurrence S_t = A_t S_{t-1} + B_t maps the state that enters a segment to the state that leaves it:
# S_out = M S_in + U. A *segment* is a range of consecutive tokens of one document on one rank. States of all
# segments are one tensor (segments, heads, K, V), float32 or wider; M is
#
# - dense, (segments, heads, K, K), and acts from the left (delta rules), or
# - diagonal, (segments, heads, 1 or K, 1 or V), and multiplies elementwise (decays).
#
# A tiny worked example, one head with K = V = 1, decays 1/2, inputs k v = 1, 1, 1 in one segment that a state s enters:
#
#     S = s/2 + 1,  s/4 + 3/2,  s/8 + 7/4        M = 1/8, U = 7/4
#
# Tokens have shape (batch, slots, ...); slots outside of segments are padding: their output and gradients are 0.


@dataclass(frozen=True, eq=False)
class Segments:
    """A rank's segments, in the order of their states: rows of (batch row, first slot, end slot)."""

    table: Ints

    def __len__(self) -> int:
        return len(self.table)

    def select(self, which: Ints) -> Segments:
        return Segments(self.table[which])


class Recurrence(ABC):
    """A kind of recurrence with the options of one call."""

    name: ClassVar[str]
    is_dense: bool
    """Whether M is a matrix for each head."""

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """Return further tensors that may require gradients, next to tokens and shared parameters."""
        return ()

    @abstractmethod
    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        """Return (heads, K, V) of a state."""

    @abstractmethod
    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        """Return (heads, rows, columns) of M."""

    def state_dtype(self, tokens: tuple[Tensor, ...]) -> torch.dtype:
        """Return the dtype of states and maps: float32, or float64 if any token is."""
        return accumulation_dtype(reduce(torch.promote_types, (x.dtype for x in tokens)))


@dataclass(frozen=True, eq=False)
class ScanWork:
    """One rank's share of a recurrence."""

    recurrence: Recurrence
    tokens: tuple[Tensor, ...]
    """(batch, slots, ...) each."""
    shared: tuple[Tensor | None, ...]
    """Parameters that all tokens and all ranks share."""
    segments: Segments

    def zero_states(self) -> Tensor:
        """Return zeros for the states that enter all segments."""
        shape = (len(self.segments), *self.recurrence.state_shape(self.tokens))
        return torch.zeros(shape, dtype=self.recurrence.state_dtype(self.tokens), device=self.tokens[0].device)


class ScanKernel(ABC):
    """Computes recurrences on one device, differentiable by autograd unless noted."""

    name: ClassVar[str]

    @abstractmethod
    def why_not(self, work: ScanWork) -> str | None:
        """Return why it cannot compute this, or None."""

    @abstractmethod
    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (batch, slots, ...) and the states that leave, from those that enter."""

    @abstractmethod
    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        """Return (M, U) of every segment, without gradients."""

    def prepare(self, segments: Segments, shape: Sequence[int], device: torch.device) -> None:  # noqa: B027
        """Build the tables of segments of tokens (batch, slots), which are cached."""


# -- Delta rule, linear attention, Mamba-2 (SSD), elementwise recurrence -----------------------------------------------


EPSILON = 1e-6
"""Added to the sum of squares when queries and keys are normalized."""


@dataclass(frozen=True)
class GatedDelta(Recurrence):
    """The gated delta rule; with a decay per row of the state it is KDA.

    Tokens q, k (B, T, J, K), v (B, T, H, V), g (B, T, H) or (B, T, H, K), beta (B, T, H):

        R_t = exp(g_t) S_{t-1}        the decayed state
        S_t = R_t + k_t (beta_t (v_t - k_t^T R_t))^T
        o_t = scale * q_t^T S_t

    With K = V = 1, g = 0, k = 1, beta = 1/2, v = 4 and a state 2: S = 2 + (4 - 2) / 2 = 3, so M = 1/2 and U = 2.
    """

    scale: float
    l2norm: bool
    """Whether q and k are first divided by the root of their sum of squares plus 1e-6."""
    name = "gated_delta"
    is_dense = True

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[2].shape[2], tokens[1].shape[3], tokens[2].shape[3]

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[2].shape[2], tokens[1].shape[3], tokens[1].shape[3]


@dataclass(frozen=True)
class LinearAttention(Recurrence):
    """Linear attention with a decay: lightning attention, RetNet, and GLA with one per row of the state.

    Tokens q, k (B, T, J, K), v (B, T, H, V), g (B, T, H) or (B, T, H, K):

        S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * q_t^T S_t
    """

    scale: float
    name = "linear_attention"
    is_dense = False

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[2].shape[2], tokens[1].shape[3], tokens[2].shape[3]

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        g = tokens[3]
        return g.shape[2], g.shape[3] if g.ndim == 4 else 1, 1


@dataclass(frozen=True)
class Ssd(Recurrence):
    """Mamba-2.

    Tokens x (B, T, H, V), dt (B, T, H), B and C (B, T, J, K); shared A (H,), D (H,) or (H, V) or None, dt_bias (H,) or
    None:

        d_t = clamp(softplus(dt_t + dt_bias), limits)
        S_t = exp(A d_t) S_{t-1} + d_t B_t x_t^T        y_t = C_t^T S_t + D x_t
    """

    softplus: bool
    limits: tuple[float, float]
    name = "ssd"
    is_dense = False

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[0].shape[2], tokens[2].shape[3], tokens[0].shape[3]

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[0].shape[2], 1, 1


@dataclass(frozen=True)
class LinearRecurrence(Recurrence):
    """Independent channels: RG-LRU, Mamba-1. Decays are any numbers, including 0 and negative ones.

    Tokens a, b (B, T, D):

        S_t = a_t S_{t-1} + b_t        o_t = S_t
    """

    name = "linear_recurrence"
    is_dense = False

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return 1, tokens[0].shape[2], 1

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return 1, tokens[0].shape[2], 1


# -- Decays inside of chunks -------------------------------------------------------------------------------------------
# Exponents are sums of logarithms between two tokens, never positive where decays are at most 1: others are masked
# before `exp`. Sums are computed in float64, since the difference of two long sums loses digits.
#
# "Decay from i to j" is the factor by which a state at token i has decayed at token j.
# Shapes: N chunks, J key heads, R heads that share one, C tokens of a chunk, K features; x is 1 or K.


LEAST = {torch.float32: 2.0**-100, torch.float64: 2.0**-1000}
"""Smaller decays are replaced by 0. Products with them would be subnormal, which is slow: a summary took three times as
long for a few chunks of such numbers."""


@dataclass(frozen=True, eq=False)
class Decays:
    """Decays inside of all chunks."""

    sums: Tensor
    """(N, J, R, C, x) in float64: logarithms of decays from the chunk's begin to each token."""
    dtype: torch.dtype

    @classmethod
    def of(cls, g: Tensor) -> Decays:
        """Build from the logarithm of each token's decay. One of minus infinity is clamped, so that sums are finite.

        >>> Decays.of(torch.tensor([-1.0, -torch.inf, -2.0]).view(1, 1, 1, 3, 1)).to_end.flatten().tolist()
        [0.0, 0.1353352814912796, 1.0]
        """
        return cls(g.clamp(min=math.log(LEAST[g.dtype]) - 1).double().cumsum(3), g.dtype)

    @cached_property
    def from_start(self) -> Tensor:
        """(N, J, R, C, x): decays from the chunk's begin to each token."""
        return self.exp(self.sums)

    @cached_property
    def to_end(self) -> Tensor:
        """(N, J, R, C, x): decays from each token to the chunk's end."""
        return self.exp(self.sums[..., -1:, :] - self.sums)

    @cached_property
    def whole(self) -> Tensor:
        """(N, J, R, x, 1): decays of whole chunks, for rows of a state."""
        return self.from_start[..., -1, :].unsqueeze(-1)

    def exp(self, logarithms: Tensor) -> Tensor:
        return threshold(logarithms.to(self.dtype).exp(), LEAST[self.dtype], 0.0)

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Return (N, J, R, C, C): a_i . b_j times the decay from j to i; 0 if j is after i."""
        return (a @ b.mT) * self._pairs if self.sums.shape[-1] == 1 else self._multiply_by_halves(a, b)

    @cached_property
    def _pairs(self) -> Tensor:
        size = self.sums.shape[3]
        later = torch.ones(size, size, dtype=torch.bool, device=self.sums.device).triu(1)
        return self.exp((self.sums - self.sums.mT).to(self.dtype).masked_fill(later, -torch.inf))

    def _multiply_by_halves(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute `products` for one decay per feature: the second half of a range reads its first half through the
        border between them, and both halves are split in turn, down to tokens that read themselves.

            a_0 b_0
            [1|0]     a_1 b_1
            [2,3 | 0,1]         a_2 b_2
                                [3|2]     a_3 b_3
        """
        shape = self.sums.shape
        out = (a * b).sum(-1)[..., None, None].expand(*shape[:4], 1, 1)
        for rows, columns in self._halves:
            half = rows.shape[-2]
            first, second = (x.unflatten(3, (-1, 2, half)).select(4, at) for x, at in ((b, 0), (a, 1)))
            below = (second * rows) @ (first * columns).mT
            upper, lower = out.unflatten(3, (-1, 2)).unbind(4)
            above = torch.zeros_like(below)
            out = torch.cat((torch.cat((upper, above), -1), torch.cat((below, lower), -1)), -2)
        return out.squeeze(3)

    @cached_property
    def _halves(self) -> list[tuple[Tensor, Tensor]]:
        """For halves of 1, 2, 4... tokens: decays from the border to each token of the second half, and from each token
        of the first half to the border."""
        halves, half = [], 1
        while half < self.sums.shape[3]:
            first, second = self.sums.unflatten(3, (-1, 2, half)).unbind(4)
            border = first[..., -1:, :]
            halves.append((self.exp(second - border), self.exp(border - first)))
            half *= 2
        return halves


# -- Segments cut into chunks of one size ------------------------------------------------------------------------------
# The work inside of all chunks is one batch, then states are passed from chunk to chunk. Chunks are ordered by their
# number within their segment; within a number, segments with more chunks come first. So those that still have a chunk
# are always the first ones. Segments of 5, 2 and 9 tokens, chunks of 4:
#
#     number 0: segment 2, segment 0, segment 1        number 1: segment 2, segment 0        number 2: segment 2


@dataclass(frozen=True, eq=False)
class RowMoves:
    """A gather of rows: each row of the result is a row of the input, none twice, or blank."""

    taken: Tensor
    """The input row of every row of the result; 0 if it is blank."""
    blank: Tensor
    """Rows of the result that are zeros."""

    def take(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros((len(self.taken), *x.shape[1:]))
        rows = x.index_select(0, self.taken)
        return rows.index_fill_(0, self.blank, 0) if len(self.blank) else rows


class MovedRows(torch.autograd.Function):
    """A gather whose gradient is the inverse gather: accumulating rows one by one takes far longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: RowMoves, inverse: RowMoves) -> Tensor:
        ctx.tables = inverse, moves
        return moves.take(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return MovedRows.apply(gradients[0], *ctx.tables), None, None


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Segments cut into chunks."""

    size: int
    """Tokens of a chunk."""
    steps: tuple[int, ...]
    """The number of segments that have a chunk of each number."""
    order: Tensor
    """Segments, those with most chunks first."""
    place: Tensor
    """The index of each segment in that order."""
    slot: Tensor
    """(chunks, size): the slot of every token, counted through batch rows; -1 after a segment's end."""
    home: Tensor
    """(batch, slots): the index of every slot's token among those of chunks; -1 outside of segments."""
    ended: Tensor
    """Tokens of chunks after a segment's end, counted through chunks."""
    outside: Tensor
    """Slots outside of segments, counted through batch rows."""

    def fold(self, x: Tensor) -> Tensor:
        """(batch, slots, heads, ...) -> (chunks, heads, size, ...); zeros after a segment's end."""
        heads = x.shape[2]
        rows = MovedRows.apply(x.flatten(0, 2), *_tables(self, heads))
        assert isinstance(rows, Tensor)
        return rows.view(len(self.slot), heads, self.size, *x.shape[3:])

    def unfold(self, x: Tensor) -> Tensor:
        """(chunks, heads, size, ...) -> (batch, slots, heads, ...); zeros outside of segments."""
        heads = x.shape[1]
        into, out_of = _tables(self, heads)
        rows = MovedRows.apply(x.flatten(0, 2), out_of, into)
        assert isinstance(rows, Tensor)
        return rows.view(*self.home.shape, heads, *x.shape[3:])

    def carry(self, states: Tensor, step: Callable[[int, Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        """Pass states through the chunks of their segments: `step` maps those before chunks of a number to those after.
        Return the states before the chunks of every number, and those that leave segments.

        >>> import numpy as np
        >>> segments = Segments(np.array([[0, 0, 5], [0, 5, 7], [0, 7, 16]]))
        >>> table = build_chunk_table(segments, 4, 1, 16, torch.device("cpu"))
        >>> table.steps, table.order.tolist()
        ((3, 2, 1), [2, 0, 1])
        >>> before, after = table.carry(torch.tensor([10.0, 20.0, 30.0]), lambda number, state: state + 1)
        >>> [state.tolist() for state in before], after.tolist()
        ([[30.0, 10.0, 20.0], [31.0, 11.0], [32.0]], [12.0, 21.0, 33.0])
        """
        state, before, left = states[self.order], [], []
        for number, num_segments in enumerate(self.steps):
            if num_segments < len(state):
                left.append(state[num_segments:])
                state = state[:num_segments]
            before.append(state)
            state = step(number, state)
        left.append(state)
        return before, torch.cat(left[::-1])[self.place]


def build_chunk_table(segments: Segments, size: int, batch: int, slots: int, device: torch.device) -> ChunkTable:
    """Cut segments of tokens (batch, slots, ...) into chunks. Cached: layers and training steps have the same."""
    return _build_chunk_table(segments.table.astype(np.int64).tobytes(), size, batch, slots, device)


def _read_segments(segments: bytes) -> Ints:
    """Return batch rows, first slots and end slots."""
    return np.frombuffer(segments, dtype=np.int64).reshape(-1, 3).T


@keep_recent(least=8)
def _build_chunk_table(segments: bytes, size: int, batch: int, slots: int, device: torch.device) -> ChunkTable:
    row, first, end = _read_segments(segments)
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
    tables = order, np.argsort(order), slot, home.reshape(batch, slots), *map(np.flatnonzero, (slot < 0, home < 0))
    return ChunkTable(size, tuple(steps.tolist()), *(to_device(torch.from_numpy(x), device) for x in tables))


@keep_recent(least=8)
def _tables(table: ChunkTable, heads: int) -> tuple[RowMoves, RowMoves]:
    """Return the moves from rows of slots to rows of chunks, and back. Token t of head h is row t * heads + h among
    slots; in chunks the heads of a chunk come first, then its tokens."""
    head = torch.arange(heads, device=table.slot.device)

    def row(index: Tensor) -> Tensor:
        """The row among those of chunks of each head of a token."""
        return ((index // table.size * heads).unsqueeze(-1) + head) * table.size + (index % table.size).unsqueeze(-1)

    into = table.slot.clamp(min=0)[:, None] * heads + head[:, None]
    outside = table.outside[:, None] * heads + head
    return (
        RowMoves(into.flatten(), row(table.ended).flatten()),
        RowMoves(row(table.home.clamp(min=0)).flatten(), outside.flatten()),
    )


@dataclass(frozen=True, eq=False)
class Packing:
    """Segments packed one after the other, for kernels with `cu_seqlens`."""

    edges: Tensor
    """0, and the end of each segment."""
    into: RowMoves
    out_of: RowMoves

    def pack(self, x: Tensor) -> Tensor:
        """(batch, slots, ...) -> (1, tokens, ...)."""
        rows = MovedRows.apply(x.flatten(0, 1), self.into, self.out_of)
        assert isinstance(rows, Tensor)
        return rows.unsqueeze(0)

    def unpack(self, x: Tensor, shape: torch.Size) -> Tensor:
        rows = MovedRows.apply(x.squeeze(0), self.out_of, self.into)
        assert isinstance(rows, Tensor)
        return rows.view(shape)


def packing(segments: Segments, batch: int, slots: int, device: torch.device) -> Packing:
    """Return the packing of segments of tokens (batch, slots, ...), in the order of their states.

    >>> import numpy as np
    >>> packed = packing(Segments(np.array([[0, 3, 5], [0, 0, 2]])), 1, 6, torch.device("cpu"))
    >>> packed.edges.tolist(), packed.pack(torch.arange(6).view(1, 6)).tolist()
    ([0, 2, 4], [[3, 4, 0, 1]])
    >>> packed.unpack(torch.tensor([[3, 4, 7, 1]]), torch.Size((1, 6))).tolist()
    [[7, 1, 0, 3, 4, 0]]
    """
    return _packing(segments.table.astype(np.int64).tobytes(), batch, slots, device)


@keep_recent(least=8)
def _packing(segments: bytes, batch: int, slots: int, device: torch.device) -> Packing:
    row, first, end = _read_segments(segments)
    edges = np.concatenate(([0], np.cumsum(end - first)))
    taken = np.repeat(row * slots + first - edges[:-1], end - first) + np.arange(edges[-1])
    home = np.full(batch * slots, -1)
    home[taken] = np.arange(len(taken))
    tables = edges, taken, np.maximum(home, 0), np.flatnonzero(home < 0)
    edges, taken, home, outside = (to_device(torch.from_numpy(x), device) for x in tables)
    return Packing(edges, RowMoves(taken, taken[:0]), RowMoves(home, outside))


# -- Linear attention with decays, and the delta rule, in chunks -------------------------------------------------------
# All recurrences but `LinearRecurrence` are reduced to this. Inside of a chunk that a state S enters, with decays d
# from its begin to each token (one head, tokens as rows):
#
#     without the delta rule      O = d Q S + P V        P_ij = q_i . k_j (decay from j to i), for j <= i
#     with it                     the same with V' = X - W S in the place of V, where
#                                 (I + A) [X | W] = [beta V | beta d K]    A_ij = beta_i k_i . k_j (...), for j < i
#     at the end                  S' = (decay of the chunk) S + (K, each decayed to the chunk's end)^T V
#
# A chunk of two tokens, K = V = 1, all k = q = 1, beta = 1, no decay, v = 3, 5, that 2 enters: A_10 = 1, so X = 3, 5 -
# 3 and W = 1, 0; V' = 3 - 2, 2; O = 2 + 1, 2 + 1 + 2. The delta rule with beta 1 reads what was written last: 3, 5.
#
# Shapes: N chunks, S segments, J key heads, R heads that share one, C tokens of a chunk, K and V features.


Step = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ChunkedDecays:
    """Decays of tokens in chunks, in the dtype of states."""

    table: ChunkTable
    g: Tensor
    """(N, J, R, C, 1 or K)"""

    @cached_property
    def decays(self) -> Decays:
        return Decays.of(self.g)

    def segment_decays(self) -> Tensor:
        """Return M without the delta rule, (S, H, 1 or K, 1): decays of whole segments."""
        sums = self.decays.sums[..., -1, :].unsqueeze(-1)
        parts = sums.split(self.table.steps)
        start = sums.new_zeros(len(self.table.order), *sums.shape[1:]).flatten(1, 2)
        return self.decays.exp(self._carry_states(start, lambda number, state: state + parts[number])[1])

    def _carry_states(self, states: Tensor, step: Step) -> tuple[list[Tensor], Tensor]:
        """Pass states (S, H, ...) through chunks; `step` gets them as (S, J, R, ...)."""
        before, after = self.table.carry(self._group_heads(states), step)
        return before, after.flatten(1, 2)

    def _group_heads(self, states: Tensor) -> Tensor:
        return states.unflatten(1, self.g.shape[1:3])


@dataclass(frozen=True, eq=False)
class ChunkedAttention(ChunkedDecays):
    """Queries, keys and values of tokens in chunks."""

    q: Tensor | None
    """(N, J, 1, C, K), scaled. None if no output is computed."""
    k: Tensor
    """(N, J, 1, C, K)"""
    v: Tensor
    """(N, J, R, C, V)"""
    beta: Tensor | None = None
    """(N, J, R, C, 1) with the delta rule."""
    skip: Tensor | None = None
    """(N, J, R, C, V): added to the output."""

    def local(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (N, H, C, V), and the states that leave (S, H, K, V)."""
        assert self.q is not None
        corrected: list[Tensor] = []
        step = self._decay_step() if self.beta is None else self._delta_step(*self._solve(), corrected)
        before, after = self._carry_states(states, step)
        values = torch.cat(corrected) if corrected else self.v
        read = (self.q * self.decays.from_start) @ torch.cat((self._group_heads(states)[:0], *before))
        out = _add_product(read, self.decays.products(self.q, self.k), values)
        return (out if self.skip is None else out + self.skip).flatten(1, 2), after

    def zeros(self) -> Tensor:
        """Return zero states (S, H, K, V)."""
        _, j, r, _, v = self.v.shape
        return self.v.new_zeros(len(self.table.order), j * r, self.k.shape[-1], v)

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return (M, U)."""
        if self.beta is None:
            return self.segment_decays(), self._carry_states(self.zeros(), self._decay_step())[1]
        start, (k, v) = self.zeros(), (self.k.shape[-1], self.v.shape[-1])
        one = torch.eye(k, dtype=start.dtype, device=start.device).expand(*start.shape[:2], k, k)
        values, weights = self._solve()
        step = self._delta_step(pad(values, (0, k)), weights, [])  # values [v | 0] and states [0 | I] give [U | M]
        least = LEAST[start.dtype]  # the map gets smaller with every chunk
        both = torch.cat((start, one), -1)
        _, after = self._carry_states(both, lambda number, state: hardshrink(step(number, state), least))
        u, m = after.split((v, k), -1)
        return m, u

    def _decay_step(self) -> Step:
        added = ((self.k * self.decays.to_end).mT @ self.v).split(self.table.steps)
        whole = self.decays.whole.split(self.table.steps)
        return lambda number, state: torch.addcmul(added[number], whole[number], state)

    def _solve(self) -> tuple[Tensor, Tensor]:
        """Return X (N, J, R, C, V) and W (N, J, R, C, K)."""
        assert self.beta is not None
        system = self.decays.products(self.k, self.k) * self.beta  # the solver reads below the diagonal only
        sides = self.v * self.beta, self.k * (self.decays.from_start * self.beta)
        values, weights = (torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True) for x in sides)
        return values, weights

    def _delta_step(self, values: Tensor, weights: Tensor, corrected: list[Tensor]) -> Step:
        """Return a step with the delta rule, which appends V' of chunks of every number to `corrected`."""
        everything = values, weights, self.decays.whole, (self.k * self.decays.to_end).mT
        parts = list(zip(*(x.split(self.table.steps) for x in everything), strict=True))

        def step(number: int, state: Tensor) -> Tensor:
            values, weights, whole, keys = parts[number]
            corrected.append(_add_product(values, weights, state, -1))
            return _add_product(whole * state, keys, corrected[-1])

        return step


def _add_product(x: Tensor, a: Tensor, b: Tensor, factor: int = 1) -> Tensor:
    """Return x + factor * a @ b."""
    flat = torch.baddbmm(x.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2), alpha=factor)
    return flat.view(x.shape)


# -- Elementwise recurrences in chunks: S_t = a_t S_{t-1} + b_t for every channel --------------------------------------
# All chunks are computed at once, token by token inside, then from chunk to chunk. Nothing is divided and no logarithm
# is taken, so decays may be 0 or negative.
#
# Shapes: N chunks, S segments, C tokens of a chunk, D channels.


@dataclass(frozen=True, eq=False)
class ChunkedElements:
    """Tokens in chunks, (N, C, D), in the dtype of states; a is 1 after a segment's end."""

    table: ChunkTable
    a: Tensor
    b: Tensor

    def local(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (N, 1, C, D), and the states that leave (S, 1, D, 1)."""
        before, after = self._continue_states(states)
        return (self._sums + self._products * before.unsqueeze(1)).unsqueeze(1), after

    def zeros(self) -> Tensor:
        """Return zero states (S, 1, D, 1)."""
        return self.a.new_zeros(len(self.table.order), 1, self.a.shape[-1], 1)

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return (M, U)."""
        return self.segment_decays(), self._continue_states(self.zeros())[1]

    def segment_decays(self) -> Tensor:
        """Return M, (S, 1, D, 1)."""
        whole = self._products[:, -1].split(self.table.steps)
        return self._carry_states(torch.ones_like(self.zeros()), lambda number, state: whole[number] * state)[1]

    def _continue_states(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk (N, D), and those that leave."""
        whole, added = (x[:, -1].split(self.table.steps) for x in (self._products, self._sums))
        return self._carry_states(states, lambda number, state: whole[number] * state + added[number])

    def _carry_states(self, states: Tensor, step: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Run `ChunkTable.carry` on states (S, 1, D, 1); those before every chunk are one tensor (N, D)."""
        flat = states.flatten(1)
        before, after = self.table.carry(flat, step)
        return torch.cat((flat[:0], *before)), after.view(states.shape)

    @cached_property
    def _sums(self) -> Tensor:
        """(N, C, D): the output for zero states."""
        return self._scan_chunks(self.b)

    @cached_property
    def _products(self) -> Tensor:
        """(N, C, D): products of decays from the chunk's begin to each token."""
        return self._scan_chunks(None)

    def _scan_chunks(self, b: Tensor | None) -> Tensor:
        decays = self.a.unbind(1)
        added = None if b is None else b.unbind(1)
        out = [decays[0] if added is None else added[0]]
        for t in range(1, len(decays)):
            carried = decays[t] * out[-1]
            out.append(carried if added is None else carried + added[t])
        return torch.stack(out, 1)


# -- A rank's share of any recurrence in chunks ------------------------------------------------------------------------


SHORT = {size: size * size + 128 * size + 4096 for size in (16, 32, 64)}
"""The cost of a chunk by its size: its pairs, its tokens (with padding) and its state, as measured for 4 heads of the
gated delta rule with K = V = 128. 64 is best for long segments, 16 for short ones."""
LONG = {size: size + 64 for size in (16, 64, 256, 1024, 4096)}
"""The same without pairs."""
VALUES = {GatedDelta: 2, LinearAttention: 2, Ssd: 0, LinearRecurrence: 1}
"""The index of the token tensor that has the shape of the output."""


def values_of(work: ScanWork) -> Tensor:
    return work.tokens[VALUES[type(work.recurrence)]]


def unfold_output(out: Tensor, table: ChunkTable, work: ScanWork) -> Tensor:
    """Return the output in slots from chunks, in the shape and dtype of values."""
    values = values_of(work)
    return table.unfold(out.to(values.dtype)).view(values.shape)


def fold_inputs(work: ScanWork, reads: bool = True) -> ChunkedAttention | ChunkedElements:
    """Return all inputs in chunks; with `reads=False`, without those that only outputs need."""
    recurrence = work.recurrence
    if isinstance(recurrence, LinearRecurrence):
        return _elements(work)
    if isinstance(recurrence, Ssd):
        return _ssd(work, recurrence, reads)
    assert isinstance(recurrence, GatedDelta | LinearAttention)
    return _attention(work, recurrence, reads)


def diagonal_maps(work: ScanWork) -> Tensor:
    """Return M of every segment, for diagonal maps only."""
    recurrence = work.recurrence
    if isinstance(recurrence, LinearRecurrence):
        return _elements(work).segment_decays()
    table = table_of(work.segments, work.tokens[0].shape[:2], work.tokens[0].device, LONG)
    folded = _token_folder(work, table)
    if isinstance(recurrence, Ssd):
        blank = (table.slot < 0)[:, None, None, :, None]
        return ChunkedDecays(
            table, discretize(folded(work.tokens[1]), blank, recurrence, work.shared)[1]
        ).segment_decays()
    assert isinstance(recurrence, LinearAttention)
    return ChunkedDecays(table, folded(work.tokens[3])).segment_decays()


def table_of(segments: Segments, shape: Sequence[int], device: torch.device, costs: dict[int, int]) -> ChunkTable:
    """Cut segments of tokens (batch, slots) into chunks of the size with the least cost."""
    lengths = segments.table[:, 2] - segments.table[:, 1]
    size = min(costs, key=lambda size: int(np.sum(-(-lengths // size))) * costs[size])
    batch, slots = shape
    return build_chunk_table(segments, size, batch, slots, device)


def _table(work: ScanWork) -> ChunkTable:
    return table_of(work.segments, work.tokens[0].shape[:2], work.tokens[0].device, SHORT)


def _token_folder(work: ScanWork, table: ChunkTable) -> Callable[[Tensor], Tensor]:
    """Return a function that cuts tokens (B, T, H or J, ...) into chunks (N, J, H / J or 1, C, features)."""
    dtype, groups = work.recurrence.state_dtype(work.tokens), min(x.shape[2] for x in work.tokens)

    def folded(x: Tensor) -> Tensor:
        return table.fold(x if x.ndim == 4 else x.unsqueeze(3)).to(dtype).unflatten(1, (groups, -1))

    return folded


def _attention(work: ScanWork, recurrence: GatedDelta | LinearAttention, reads: bool) -> ChunkedAttention:
    table = _table(work)
    folded = _token_folder(work, table)
    l2norm = isinstance(recurrence, GatedDelta) and recurrence.l2norm
    q = _scale(folded(work.tokens[0]), recurrence.scale, l2norm) if reads else None
    k, v, g, *beta = map(folded, work.tokens[1:])
    return ChunkedAttention(table, g, q, _scale(k, 1.0, l2norm), v, *beta)


def _scale(x: Tensor, factor: float, l2norm: bool) -> Tensor:
    if l2norm:
        return x * ((x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() * factor)
    return x if factor == 1.0 else x * factor


def _ssd(work: ScanWork, recurrence: Ssd, reads: bool) -> ChunkedAttention:
    table = _table(work)
    folded = _token_folder(work, table)
    x, dt, b = map(folded, work.tokens[:3])
    dt, g = discretize(dt, (table.slot < 0)[:, None, None, :, None], recurrence, work.shared)
    if not reads:
        return ChunkedAttention(table, g, None, b, x * dt)
    d = work.shared[1]
    skip = None if d is None else _of_heads(d, x) * x
    return ChunkedAttention(table, g, folded(work.tokens[3]), b, x * dt, skip=skip)


def discretize(dt: Tensor, ended: Tensor, recurrence: Ssd, shared: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    """Return the final dt and the logarithm of the decay; both are 0 after a segment's end."""
    a, _, bias = shared
    assert a is not None
    dt = dt if bias is None else dt + _of_heads(bias, dt)
    dt = (softplus(dt) if recurrence.softplus else dt).clamp(*recurrence.limits).masked_fill(ended, 0)
    return dt, _of_heads(a, dt) * dt


def _of_heads(shared: Tensor, x: Tensor) -> Tensor:
    """(H,) or (H, V) -> (J, R, 1, 1 or V)."""
    return shared.to(x.dtype).view(*x.shape[1:3], 1, -1)


def _elements(work: ScanWork) -> ChunkedElements:
    table, dtype = _table(work), work.recurrence.state_dtype(work.tokens)
    a, b = (table.fold(x.unsqueeze(2)).squeeze(1).to(dtype) for x in work.tokens)
    return ChunkedElements(table, a.masked_fill((table.slot < 0).unsqueeze(-1), 1), b)


# -- The kernel --------------------------------------------------------------------------------------------------------


class ReferenceScan(ScanKernel):
    """The reference kernel, for all recurrences of this file."""

    name = "reference"

    def why_not(self, work: ScanWork) -> str | None:
        known = type(work.recurrence) in VALUES
        return None if known else f"it does not know the recurrence {work.recurrence.name!r}"

    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        with without_autocast(work):
            chunked = fold_inputs(work)
            out, after = chunked.local(states)
            return unfold_output(out, chunked.table, work), after

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), without_autocast(work):
            return fold_inputs(work, reads=False).summary()

    def prepare(self, segments: Segments, shape: Sequence[int], device: torch.device) -> None:
        table_of(segments, shape, device, SHORT)


def without_autocast(work: ScanWork) -> AbstractContextManager[object]:
    """Disable autocast, which would multiply in half precision."""
    return torch.autocast(work.tokens[0].device.type, enabled=False)
