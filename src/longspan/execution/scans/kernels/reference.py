"""Plain tensor maths in chunks: any device, any dtype, gradients by autograd. Half precision is computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from longspan.execution.scans.contract import ScanKernel, ScanWork
from longspan.execution.scans.kernels.attention import ChunkedAttention, entering
from longspan.execution.scans.kernels.chunks import ChunkTable, cut
from longspan.execution.scans.kernels.elementwise import ChunkedElements
from longspan.execution.scans.recurrences import EPSILON, GatedDelta, LinearAttention, LinearRecurrence, Ssd

SIZES = 16, 32, 64
"""Tokens of a chunk. One costs about size^2 + 128 size + 4096, its pairs, its tokens (blank ones too) and its state, as
measured for 4 heads of the gated delta rule with K = V = 128: 64 is best for long segments, 16 for short ones."""


class ReferenceScan(ScanKernel):
    """All recurrences of `recurrences`."""

    name = "reference"

    def why_not(self, work: ScanWork) -> str | None:
        if isinstance(work.recurrence, GatedDelta | LinearAttention | Ssd | LinearRecurrence):
            return None
        return f"it does not know the recurrence {work.recurrence.name!r}"

    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        with _own_precision(work):
            chunked = _chunked(work)
            out, after = chunked.local(states)
            return _slots(out, chunked.table, work), after

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), _own_precision(work):
            return _chunked(work, reads=False).summary()

    def alone(self, work: ScanWork) -> tuple[Tensor, Tensor, Tensor]:
        with _own_precision(work):
            chunked = _chunked(work)
            out, after = chunked.local(chunked.zeros())
            return _slots(out, chunked.table, work), chunked.passed(), after

    def entering(self, work: ScanWork, states: Tensor) -> Tensor:
        with _own_precision(work):
            if isinstance(work.recurrence, LinearRecurrence):
                elements = _elements(work)
                return _slots(elements.entering(states), elements.table, work)
            table, q, g = _readers(work)
            return _slots(entering(table, q, g, states), table, work)


def _own_precision(work: ScanWork) -> AbstractContextManager[object]:
    """Autocast would multiply in half precision what is widened here."""
    return torch.autocast(work.tokens[0].device.type, enabled=False)


def _slots(out: Tensor, table: ChunkTable, work: ScanWork) -> Tensor:
    """Chunks of the output in their slots, in the shape and dtype of values."""
    values = work.tokens[VALUES[type(work.recurrence)]]
    return table.unfold(out.to(values.dtype)).view(values.shape)


VALUES = {GatedDelta: 2, LinearAttention: 2, Ssd: 0, LinearRecurrence: 1}
"""Which of a recurrence's tokens is like its output."""


def _chunked(work: ScanWork, reads: bool = True) -> ChunkedAttention | ChunkedElements:
    recurrence = work.recurrence
    if isinstance(recurrence, LinearRecurrence):
        return _elements(work)
    if isinstance(recurrence, Ssd):
        return _ssd(work, recurrence, reads)
    assert isinstance(recurrence, GatedDelta | LinearAttention)
    return _attention(work, recurrence, reads)


def _table(work: ScanWork, sizes: Sequence[int]) -> ChunkTable:
    """Chunks of the size with the least work."""
    batch, slots = work.tokens[0].shape[:2]
    lengths = work.segments.table[:, 2] - work.segments.table[:, 1]
    size = min(sizes, key=lambda c: int(np.sum(-(-lengths // c))) * (c * c + 128 * c + 4096))
    return cut(work.segments, size, batch, slots, work.tokens[0].device)


def _folded(work: ScanWork, table: ChunkTable) -> Callable[[Tensor], Tensor]:
    """What puts tokens (B, T, H or J, ...) into chunks (N, J, H / J or 1, C, features)."""
    dtype, groups = work.recurrence.state_dtype(work.tokens), min(x.shape[2] for x in work.tokens)

    def folded(x: Tensor) -> Tensor:
        return table.fold(x if x.ndim == 4 else x.unsqueeze(3)).to(dtype).unflatten(1, (groups, -1))

    return folded


def _attention(work: ScanWork, recurrence: GatedDelta | LinearAttention, reads: bool) -> ChunkedAttention:
    table = _table(work, SIZES)
    folded = _folded(work, table)
    l2norm = isinstance(recurrence, GatedDelta) and recurrence.l2norm
    q = _scaled(folded(work.tokens[0]), recurrence.scale, l2norm) if reads else None
    k, *rest = map(folded, work.tokens[1:])
    return ChunkedAttention(table, q, _scaled(k, 1.0, l2norm), *rest)


def _scaled(x: Tensor, factor: float, l2norm: bool) -> Tensor:
    if l2norm:
        return x * ((x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() * factor)
    return x if factor == 1.0 else x * factor


def _ssd(work: ScanWork, recurrence: Ssd, reads: bool) -> ChunkedAttention:
    table = _table(work, SIZES)
    folded = _folded(work, table)
    x, dt, b = map(folded, work.tokens[:3])
    dt, g = _stepped(dt, table, recurrence, work.shared)
    if not reads:
        return ChunkedAttention(table, None, b, x * dt, g)
    d = work.shared[1]
    skip = None if d is None else _of_heads(d, x) * x
    return ChunkedAttention(table, folded(work.tokens[3]), b, x * dt, g, skip=skip)


def _stepped(
    dt: Tensor, table: ChunkTable, recurrence: Ssd, shared: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:
    """dt as it is used, and the logarithm of the decay; both are 0 where a segment has ended."""
    a, _, bias = shared
    assert a is not None
    dt = dt if bias is None else dt + _of_heads(bias, dt)
    dt = (softplus(dt) if recurrence.softplus else dt).clamp(*recurrence.limits)
    dt = dt.masked_fill((table.slot < 0)[:, None, None, :, None], 0)
    return dt, _of_heads(a, dt) * dt


def _of_heads(shared: Tensor, x: Tensor) -> Tensor:
    """(H,) or (H, V) -> (J, R, 1, 1 or V)."""
    return shared.to(x.dtype).view(*x.shape[1:3], 1, -1)


def _readers(work: ScanWork) -> tuple[ChunkTable, Tensor, Tensor]:
    """Chunks, and of their tokens what `entering` is about: q and g."""
    table, recurrence = _table(work, SIZES), work.recurrence
    folded = _folded(work, table)
    if isinstance(recurrence, Ssd):
        return table, folded(work.tokens[3]), _stepped(folded(work.tokens[1]), table, recurrence, work.shared)[1]
    assert isinstance(recurrence, LinearAttention)
    return table, _scaled(folded(work.tokens[0]), recurrence.scale, False), folded(work.tokens[3])


def _elements(work: ScanWork) -> ChunkedElements:
    table, dtype = _table(work, SIZES), work.recurrence.state_dtype(work.tokens)
    a, b = (table.fold(x.unsqueeze(2)).squeeze(1).to(dtype) for x in work.tokens)
    return ChunkedElements(table, a.masked_fill((table.slot < 0).unsqueeze(-1), 1), b)
