"""Plain tensor maths in chunks: any device, any dtype, gradients by autograd. Half precision is computed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from longspan.execution.scans.contract import ScanKernel, ScanWork
from longspan.execution.scans.kernels.attention import ChunkedAttention
from longspan.execution.scans.kernels.chunks import ChunkTable, cut
from longspan.execution.scans.kernels.elementwise import ChunkedElements
from longspan.execution.scans.recurrences import EPSILON, GatedDelta, LinearAttention, LinearRecurrence, Ssd

SIZES = 16, 32, 64
"""Tokens of a chunk."""


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
            return _chunked(work).summary()

    def alone(self, work: ScanWork) -> tuple[Tensor, Tensor, Tensor]:
        with _own_precision(work):
            chunked = _chunked(work)
            out, after = chunked.local(chunked.zeros())
            return _slots(out, chunked.table, work), chunked.passed(), after

    def entering(self, work: ScanWork, states: Tensor) -> Tensor:
        with _own_precision(work):
            chunked = _chunked(work)
            return _slots(chunked.entering(states), chunked.table, work)


def _own_precision(work: ScanWork) -> AbstractContextManager[object]:
    """Autocast would multiply in half precision what is widened here."""
    return torch.autocast(work.tokens[0].device.type, enabled=False)


def _slots(out: Tensor, table: ChunkTable, work: ScanWork) -> Tensor:
    """Chunks of the output in their slots, in the dtype of values."""
    values = work.tokens[VALUES[type(work.recurrence)]]
    return table.unfold(out.to(values.dtype), values.shape[0])


def _chunked(work: ScanWork) -> ChunkedAttention | ChunkedElements:
    recurrence = work.recurrence
    if isinstance(recurrence, LinearRecurrence):
        return _elements(work)
    return _ssd(work, recurrence) if isinstance(recurrence, Ssd) else _attention(work)


VALUES = {GatedDelta: 2, LinearAttention: 2, Ssd: 0, LinearRecurrence: 1}
"""Which of a recurrence's tokens has the dtype of its output."""


def _table(work: ScanWork, sizes: Sequence[int]) -> ChunkTable:
    """Chunks of the size with the least work: it grows with tokens, blank ones too, and with pairs of them."""
    batch, slots = work.tokens[0].shape[:2]
    lengths = work.segments.table[:, 2] - work.segments.table[:, 1]
    size = min(sizes, key=lambda c: (int(np.sum(-(-lengths // c))) * c * (c + 256), -c))
    return cut(work.segments, size, batch, slots, work.tokens[0].device)


def _attention(work: ScanWork) -> ChunkedAttention:
    recurrence, table = work.recurrence, _table(work, SIZES)
    assert isinstance(recurrence, GatedDelta | LinearAttention)
    q, k, v, g, *beta = _by_heads(work, table)
    if isinstance(recurrence, GatedDelta) and recurrence.l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (q, k))
    return ChunkedAttention(table, q * recurrence.scale, k, v, g, *beta)


def _by_heads(work: ScanWork, table: ChunkTable) -> list[Tensor]:
    """Tokens (B, T, H or J, ...) in chunks, (N, J, H / J or 1, C, features)."""
    heads, *_ = work.recurrence.state_shape(work.tokens)
    dtype, groups = work.recurrence.state_dtype(work.tokens), min(x.shape[2] for x in work.tokens)
    assert heads % groups == 0
    found = []
    for x in work.tokens:
        rows = table.fold(x if x.ndim == 4 else x.unsqueeze(3)).to(dtype)
        found.append(rows.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).contiguous())
    return found


def _ssd(work: ScanWork, recurrence: Ssd) -> ChunkedAttention:
    table = _table(work, SIZES)
    x, dt, b, c = _by_heads(work, table)
    a, d, bias = (_of_heads(p, x) for p in work.shared)
    assert a is not None
    dt = dt if bias is None else dt + bias
    dt = (softplus(dt) if recurrence.softplus else dt).clamp(*recurrence.limits)
    dt = dt.masked_fill(table.blank[:, None, None, :, None], 0)
    return ChunkedAttention(table, c, b, x * dt, a * dt, skip=None if d is None else d * x)


def _of_heads(shared: Tensor | None, x: Tensor) -> Tensor | None:
    """(H,) or (H, V) -> (J, R, 1, 1 or V)."""
    if shared is None:
        return None
    return shared.to(x.dtype).unflatten(0, x.shape[1:3]).unsqueeze(2).view(*x.shape[1:3], 1, -1)


def _elements(work: ScanWork) -> ChunkedElements:
    table, dtype = _table(work, SIZES), work.recurrence.state_dtype(work.tokens)
    a, b = (table.fold(x).to(dtype) for x in work.tokens)
    return ChunkedElements(table, a.masked_fill(table.blank.unsqueeze(-1), 1), b)
