"""Plain tensor maths: any dtype, any device, any score function, memory bounded by blocks.

Where inputs are not finite it is `careful`: a hidden pair contributes nothing, whatever its numbers, where 0 * nan
would be nan. This is looked for on CPUs only; on GPUs the host would have to wait.

Shapes: see contract.py; R = H // G query heads share one key/value head, b is the rows of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from longspan.execution.kernels.contract import Pairs, finite
from longspan.execution.tile import ALL, Tile
from longspan.execution.tile import wide as widened
from longspan.span import Span

ROWS, COLS = 256, 512
CACHED = 1 << 20
"""Scores that are worked on at once on a CPU. Parts of 1 << 17 or 1 << 18, which would fit a core's cache, were
10-30 % slower when measured: there are more calls."""


class Reference:
    """Softmax with a running maximum and sum over blocks of scores, in float32 (float64 for float64)."""

    name = "reference"
    honours = ALL

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:  # noqa: ARG002
        return None

    def forward(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        tiles: Sequence[Tile],
        scale: float,
        pairs: Pairs | None = None,
    ) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        b, h, e = q_BHQD.shape[0], q_BHQD.shape[1], v_BGKE.shape[3]
        careful = _strange(q_BHQD, k_BGKD, v_BGKE)
        for tile in tiles:
            out = q_BHQD.new_zeros((b, h, tile.rows, e), dtype=widened(q_BHQD.dtype))
            lse = out.new_full((b, h, tile.rows), -torch.inf)
            for rows in _row_blocks(tile):
                at = slice(rows.q0 - tile.q0, rows.q1 - tile.q0)
                for here, heads, q, k, v, mine in _chunks(rows, q_BHQD, k_BGKD, v_BGKE, pairs):
                    out[here, heads, at], lse[here, heads, at] = _softmax(q, k, v, rows, scale, mine, careful)
            yield tile, out, lse

    def backward(
        self,
        dout_BHQE: Tensor,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out_BHQE: Tensor,  # noqa: ARG002
        lse_BHQ: Tensor,
        tiles: Sequence[Tile],
        scale: float,
        delta_BHQ: Tensor,
        pairs: Pairs | None = None,
    ) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
        wide, group = widened(q_BHQD.dtype), q_BHQD.shape[1] // k_BGKD.shape[1]
        # exp(score - inf) is 0 for a row that saw nothing; exp(score - -inf) would be nan for everybody it meets
        lse_BHQ = lse_BHQ.to(wide).masked_fill(lse_BHQ.isneginf(), torch.inf)
        careful = _strange(q_BHQD, k_BGKD, v_BGKE, dout_BHQE, delta_BHQ)
        for tile in tiles:
            dq = torch.zeros_like(q_BHQD[:, :, tile.q0 : tile.q1], dtype=wide)
            dk = torch.zeros_like(k_BGKD[:, :, tile.k0 : tile.k1], dtype=wide)
            dv = torch.zeros_like(v_BGKE[:, :, tile.k0 : tile.k1], dtype=wide)
            for rows in _row_blocks(tile):
                for here, heads, q, k, v, mine in _chunks(rows, q_BHQD, k_BGKD, v_BGKE, pairs):
                    at, groups = (here, heads, slice(rows.q0, rows.q1)), k.shape[1]
                    lse, delta = (_by_group(x[at].to(wide), groups) for x in (lse_BHQ, delta_BHQ))
                    dout = _grouped(dout_BHQE[at], groups)
                    keys = slice(heads.start // group, heads.stop // group)
                    for block, *found in _gradients(q, k, v, dout, lse, delta, rows, scale, mine, careful):
                        cols = slice(block.k0 - tile.k0, block.k1 - tile.k0)
                        dq[here, heads, rows.q0 - tile.q0 : rows.q1 - tile.q0] += found[0]
                        dk[here, keys, cols] += found[1]
                        dv[here, keys, cols] += found[2]
            yield tile, dq, dk, dv


def _row_blocks(tile: Tile) -> Iterator[Tile]:
    for q0 in range(tile.q0, tile.q1, ROWS):
        rows = tile.part(q0, min(q0 + ROWS, tile.q1), tile.k0, tile.k1)
        if rows is not None:
            yield rows


def _col_blocks(rows: Tile) -> Iterator[Tile]:
    """Blocks of keys, cut where all rows begin and cease to see every key, so that blocks in between hide nothing."""
    far = 0 if rows.hi is None else min(max(rows.rows - 1 - rows.hi, 0), rows.cols)
    near = rows.cols if rows.lo is None else min(max(-rows.lo, far), rows.cols)
    for first, last in ((0, far), (far, near), (near, rows.cols)):
        for k0 in range(rows.k0 + first, rows.k0 + last, COLS):
            block = rows.part(rows.q0, rows.q1, k0, min(k0 + COLS, rows.k0 + last))
            if block is not None:
                yield block


Chunk = tuple[slice, slice, Tensor, Tensor, Tensor, Pairs | None]


def _chunks(rows: Tile, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, pairs: Pairs | None) -> Iterator[Chunk]:
    """Batch rows and query heads in parts that bound memory, with their tensors and pairs."""
    batch, heads, groups = q_BHQD.shape[0], q_BHQD.shape[1], k_BGKD.shape[1]
    group = heads // groups
    room = max(CACHED // (rows.rows * min(rows.cols, COLS)), 1) if q_BHQD.device.type == "cpu" else batch * heads
    step = min(max(room // group, 1), groups)
    step_b = min(max(room // heads, 1), batch)
    for b in range(0, batch, step_b):
        for g in range(0, groups, step):
            here, keys = Span(b, min(b + step_b, batch)), Span(g, min(g + step, groups))
            mine = Span(keys.start * group, keys.stop * group)
            yield (
                slice(here.start, here.stop),
                slice(mine.start, mine.stop),
                q_BHQD[here.start : here.stop, mine.start : mine.stop],
                k_BGKD[here.start : here.stop, keys.start : keys.stop],
                v_BGKE[here.start : here.stop, keys.start : keys.stop],
                None if pairs is None else pairs.part(here, mine),
            )


def _gradients(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Tile,
    scale: float,
    pairs: Pairs | None,
    careful: bool,
) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
    """(block, dq, dk, dv) of a panel of rows with one block of keys after another."""
    q = _grouped(q_BHQD[:, :, rows.q0 : rows.q1], k_BGKD.shape[1])
    for block in _col_blocks(rows):
        k, v = _keys(k_BGKD, block), _keys(v_BGKE, block)
        ds, used = _score_gradient(q, k, lse, dout @ v.mT, delta, block, rows, scale, pairs)
        if not careful:
            yield block, (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), (used.mT @ dout).sum(2)
            continue
        apart = _apart(ds, block, rows.q0, pairs)
        back = None if apart is None else apart.mT
        dq = _product(_hide(ds, apart, 0.0), k, apart)
        yield block, dq.flatten(1, 2), _product(ds.mT, q, back).sum(2), _product(used.mT, dout, back).sum(2)


def _strange(*tensors: Tensor) -> bool:
    """Whether some number is not finite, as far as one may look."""
    return tensors[0].device.type == "cpu" and not all(map(finite, tensors))


def _product(weights: Tensor, x: Tensor, apart: Tensor | None) -> Tensor:
    """weights @ x, without the pairs that may not meet, whose weights are 0, also where x is not finite.

    >>> _product(torch.tensor([[0.0, 2.0]]), torch.tensor([[torch.nan], [3.0]]), torch.tensor([[True, False]]))
    tensor([[6.]])
    """
    found = weights @ x.nan_to_num(0.0, 0.0, 0.0)
    meet = torch.ones(weights.shape[-2:], dtype=x.dtype) if apart is None else (~apart).to(x.dtype)
    up, down = (meet @ (x == value).to(x.dtype) > 0 for value in (torch.inf, -torch.inf))
    neither = (meet @ x.isnan().to(x.dtype) > 0) | (up & down)
    found = torch.where(up, torch.inf, torch.where(down, -torch.inf, found))
    return torch.where(neither, torch.nan, found)


def _grouped(x_BHbD: Tensor, groups: int) -> Tensor:
    """Query heads beside the key/value head they share: (B, G, R, b, D), widened.

    Contiguous, as keys are, or the product that runs, and with it the bits, would depend on where rows came from.
    """
    return x_BHbD.to(widened(x_BHbD.dtype)).contiguous().unflatten(1, (groups, -1))


def _by_group(x_BHb: Tensor, groups: int) -> Tensor:
    return x_BHb.unflatten(1, (groups, -1)).unsqueeze(-1)


def _keys(x_BGKD: Tensor, block: Tile) -> Tensor:
    return x_BGKD[:, :, block.k0 : block.k1].to(widened(x_BGKD.dtype)).contiguous().unsqueeze(2)


def _score_gradient(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    dp: Tensor,
    delta: Tensor,
    block: Tile,
    rows: Tile,
    scale: float,
    pairs: Pairs | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of q @ k, and the probabilities by which values were weighted."""
    raw = (q @ k.mT).mul_(scale)
    apart = _apart(raw, block, rows.q0, pairs)
    if pairs is None or not pairs.features.score_function:
        p = _exp(_hide(raw.sub_(lse), apart, -torch.inf))
        return dp.sub_(delta).mul_(p).mul_(scale), p
    panel = replace(block, q0=rows.q0, q1=rows.q1)
    raw = _hide(raw, apart, 0.0)  # of what is hidden only the place matters: it may not be finite
    scores, pull = pairs.pull(raw.flatten(1, 2), panel)
    p = _exp(_hide(scores.detach().unflatten(1, raw.shape[1:3]) - lse, apart, -torch.inf))
    factor = pairs.factor(panel, p.dtype)
    used = p
    if factor is not None:
        factor = factor.view_as(p)
        dp, used = dp * factor, p * factor
    ds = pull(_hide(dp.sub_(delta).mul_(p), apart, 0.0).flatten(1, 2)).view_as(p) * scale
    return _hide(ds, apart, 0.0), used  # a function may have no derivative where nobody looks


def _hide(x: Tensor, apart: Tensor | None, value: float) -> Tensor:
    """In place: another value where a pair may not meet."""
    return x if apart is None else x.masked_fill_(apart, value)


def _apart(scores: Tensor, block: Tile, first_row: int, pairs: Pairs | None) -> Tensor | None:
    """Which pairs of a panel's rows with one block of keys may not meet; None if all may."""
    rows, first = scores.shape[-2], block.q0 - first_row
    apart = None
    if block.rows != rows or block.lo is not None or block.hi is not None:
        apart = _outside(rows, first, block.rows, block.cols, block.lo, block.hi, scores.device)
    if block.asks:
        assert pairs is not None
        hidden = ~pairs.allowed(block)
        if apart is None:
            return hidden
        apart = apart.clone()
        apart[first : first + block.rows] |= hidden
    return apart


@lru_cache(maxsize=32)
def _outside(
    rows: int, first: int, num: int, cols: int, lo: int | None, hi: int | None, device: torch.device
) -> Tensor:
    """(rows, cols) pairs outside a band over some of the rows. Remembered: a dozen shapes serve a long mask."""
    i = torch.arange(-first, rows - first, device=device)[:, None]
    j = torch.arange(cols, device=device)
    apart = ((i < 0) | (i >= num)).expand(rows, cols)
    if lo is not None:
        apart = apart | (i - j < lo)
    if hi is not None:
        apart = apart | (i - j > hi)
    return apart


def _exp(x: Tensor) -> Tensor:
    """exp in place, exactly 0 where it would be a denormal number or nearly: beside a sum of 1 those are below any
    rounding. They are what far keys under ALiBi come to, and exp takes a hundred times as long over them (0.5 ns
    an element; 45-65 ns where the result is denormal, 4-10 ns at -inf)."""
    tiny = torch.finfo(x.dtype).tiny
    return torch.threshold_(x.clamp_(min=math.log(2 * tiny)).exp_(), 3 * tiny, 0.0)


def _scores(q: Tensor, k_BGKD: Tensor, block: Tile, rows: Tile, scale: float, pairs: Pairs | None) -> Tensor:
    """Scores of a panel's rows with one block of keys after all functions, -inf where a pair may not meet."""
    scores = (q @ _keys(k_BGKD, block).mT).mul_(scale)
    apart = _apart(scores, block, rows.q0, pairs)
    if pairs is not None and pairs.features.score_function:
        changed = pairs.change(scores.flatten(1, 2), replace(block, q0=rows.q0, q1=rows.q1))
        changed = changed.unflatten(1, scores.shape[1:3])
        return changed if apart is None else changed.masked_fill(apart, -torch.inf)  # it may be the user's own tensor
    return scores if apart is None else scores.masked_fill_(apart, -torch.inf)


def _softmax(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, rows: Tile, scale: float, pairs: Pairs | None, careful: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one panel of rows."""
    q = _grouped(q_BHQD[:, :, rows.q0 : rows.q1], k_BGKD.shape[1])
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(top)
    acc = q.new_zeros((*q.shape[:-1], v_BGKE.shape[3]))
    for block in _col_blocks(rows):
        scores = _scores(q, k_BGKD, block, rows, scale, pairs)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top.isneginf(), 0.0)  # -inf minus -inf is nan, not "nothing yet"
        p, shrink = _exp(scores - base), (top - base).exp_()
        total = total * shrink + p.sum(-1, keepdim=True)
        factor = None if pairs is None else pairs.factor(replace(block, q0=rows.q0, q1=rows.q1), p.dtype)
        p = p if factor is None else p.mul_(factor.view_as(p))
        v = _keys(v_BGKE, block)
        acc = acc * shrink + (_product(p, v, _apart(p, block, rows.q0, pairs)) if careful else p @ v)
        top = new_top
    out = acc / total.clamp(min=torch.finfo(total.dtype).tiny)  # 0 where nothing was seen
    return out.flatten(1, 2), (top + total.log()).squeeze(-1).flatten(1, 2)


def highest(q_BHQD: Tensor, k_BGKD: Tensor, tile: Tile, scale: float, pairs: Pairs | None) -> Tensor:
    """The highest score of every row of a tile, (B, H, q); -inf for rows that see nothing."""
    top = q_BHQD.new_full((*q_BHQD.shape[:2], tile.rows), -torch.inf, dtype=widened(q_BHQD.dtype))
    for rows in _row_blocks(tile):
        q = _grouped(q_BHQD[:, :, rows.q0 : rows.q1], k_BGKD.shape[1])
        at = top[:, :, rows.q0 - tile.q0 : rows.q1 - tile.q0]
        for block in _col_blocks(rows):
            scores = _scores(q, k_BGKD, block, rows, scale, pairs)
            at.copy_(torch.maximum(at, scores.amax(-1).flatten(1, 2)))
    return top
