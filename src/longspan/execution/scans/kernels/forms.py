"""A rank's share of a recurrence in chunks, whatever the recurrence. Half precision is widened."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from longspan.execution.scans.contract import ScanWork
from longspan.execution.scans.kernels.attention import ChunkedAttention, ChunkedDecays
from longspan.execution.scans.kernels.chunks import ChunkTable, cut
from longspan.execution.scans.kernels.elementwise import ChunkedElements
from longspan.execution.scans.recurrences import EPSILON, GatedDelta, LinearAttention, LinearRecurrence, Ssd
from longspan.span import Ints

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
