"""`reference`: plain tensor math. Any dtype, any device, any score function; memory is bounded by blocks.

Shapes: see contract.py; R = H // G query heads share one key/value head, b is the rows of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from longspan.kernels.contract import Group, TileWork, Upstream, one_by_one
from longspan.scoring.pipeline import TilePairs
from longspan.spans import Span
from longspan.tile import ALL, Tile
from longspan.tile import accumulation_dtype as widened

ROWS, COLS = 256, 512
CACHED = 1 << 20
"""Scores that are computed at once on a CPU. Parts of 1 << 17 or 1 << 18, which would fit a core's cache, were 10-30%
slower when measured: there are more calls."""


class Reference:
    """Softmax with a running maximum and sum over blocks of scores, in float32 (float64 for float64)."""

    name = "reference"
    honours = ALL

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:  # noqa: ARG002
        return None

    def groups(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> Sequence[Group]:  # noqa: ARG002
        return one_by_one(tiles)

    def forward(self, work: TileWork) -> Iterator[tuple[Tensor, Tensor]]:
        q_BHQD, v_BGKE = work.q_BHQD, work.v_BGKE
        b, h, e = q_BHQD.shape[0], q_BHQD.shape[1], v_BGKE.shape[3]
        for tile in work.tiles:
            out = q_BHQD.new_zeros((b, h, tile.rows, e), dtype=widened(q_BHQD.dtype))
            lse = out.new_full((b, h, tile.rows), -torch.inf)
            for panel in _panels(tile, work):
                at = panel.batch, panel.heads, slice(panel.rows.q0 - tile.q0, panel.rows.q1 - tile.q0)
                out[at], lse[at] = _softmax(panel)
            yield out, lse

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        q_BHQD, k_BGKD, v_BGKE, lse_BHQ = work.q_BHQD, work.k_BGKD, work.v_BGKE, upstream.lse_BHQ
        wide, group = widened(q_BHQD.dtype), q_BHQD.shape[1] // k_BGKD.shape[1]
        # exp(score - inf) is 0 for a row that saw nothing; exp(score - -inf) would be nan for all its keys
        lse_BHQ = lse_BHQ.to(wide).masked_fill(lse_BHQ.isneginf(), torch.inf)
        for tile in work.tiles:
            dq = torch.zeros_like(q_BHQD[:, :, tile.q0 : tile.q1], dtype=wide)
            dk = torch.zeros_like(k_BGKD[:, :, tile.k0 : tile.k1], dtype=wide)
            dv = torch.zeros_like(v_BGKE[:, :, tile.k0 : tile.k1], dtype=wide)
            for panel in _panels(tile, work):
                batch, heads, rows, groups = panel.batch, panel.heads, panel.rows, panel.k_BGKD.shape[1]
                at = batch, heads, slice(rows.q0, rows.q1)
                lse, delta = (
                    x[at].to(wide).unflatten(1, (groups, -1)).unsqueeze(-1) for x in (lse_BHQ, upstream.delta_BHQ)
                )
                dout = _group_queries(upstream.dout_BHQE[at], groups)
                keys = slice(heads.start // group, heads.stop // group)
                for block, dq_part, dk_part, dv_part in _gradients(panel, dout, lse, delta):
                    cols = slice(block.k0 - tile.k0, block.k1 - tile.k0)
                    dq[batch, heads, rows.q0 - tile.q0 : rows.q1 - tile.q0] += dq_part
                    dk[batch, keys, cols] += dk_part
                    dv[batch, keys, cols] += dv_part
            yield dq, dk, dv


def _row_blocks(tile: Tile) -> Iterator[Tile]:
    for q0 in range(tile.q0, tile.q1, ROWS):
        rows = tile.part(q0, min(q0 + ROWS, tile.q1), tile.k0, tile.k1)
        if rows is not None:
            yield rows


def _col_blocks(rows: Tile) -> Iterator[Tile]:
    """Yield blocks of keys, cut where all rows begin and cease to see every key: blocks in between hide nothing."""
    far = 0 if rows.hi is None else min(max(rows.rows - 1 - rows.hi, 0), rows.cols)
    near = rows.cols if rows.lo is None else min(max(-rows.lo, far), rows.cols)
    for first, last in ((0, far), (far, near), (near, rows.cols)):
        for k0 in range(rows.k0 + first, rows.k0 + last, COLS):
            block = rows.part(rows.q0, rows.q1, k0, min(k0 + COLS, rows.k0 + last))
            if block is not None:
                yield block


@dataclass(frozen=True, eq=False)
class _Panel:
    """Some rows of a tile, for some batch rows and query heads: what is computed at once."""

    batch: slice
    heads: slice
    q_BHQD: Tensor
    k_BGKD: Tensor
    v_BGKE: Tensor
    rows: Tile
    scale: float
    pairs: TilePairs | None

    @property
    def q(self) -> Tensor:
        """The rows' queries, grouped by key/value head."""
        return _group_queries(self.q_BHQD[:, :, self.rows.q0 : self.rows.q1], self.k_BGKD.shape[1])

    def with_all_rows(self, block: Tile) -> Tile:
        return replace(block, q0=self.rows.q0, q1=self.rows.q1)


def _panels(tile: Tile, work: TileWork) -> Iterator[_Panel]:
    """Yield blocks of rows, for batch rows and query heads in parts that bound memory."""
    q_BHQD, k_BGKD, v_BGKE, pairs = work.q_BHQD, work.k_BGKD, work.v_BGKE, work.pairs
    batch, heads, groups = q_BHQD.shape[0], q_BHQD.shape[1], k_BGKD.shape[1]
    group = heads // groups
    for rows in _row_blocks(tile):
        room = max(CACHED // (rows.rows * min(rows.cols, COLS)), 1) if q_BHQD.device.type == "cpu" else batch * heads
        step = min(max(room // group, 1), groups)
        step_b = min(max(room // heads, 1), batch)
        for b in range(0, batch, step_b):
            for g in range(0, groups, step):
                here, keys = slice(b, min(b + step_b, batch)), slice(g, min(g + step, groups))
                mine = slice(keys.start * group, keys.stop * group)
                part = None if pairs is None else pairs.part(Span(here.start, here.stop), Span(mine.start, mine.stop))
                tensors = q_BHQD[here, mine], k_BGKD[here, keys], v_BGKE[here, keys]
                yield _Panel(here, mine, *tensors, rows, work.scale, part)


def _gradients(
    panel: _Panel, dout: Tensor, lse: Tensor, delta: Tensor
) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
    """Yield (block, dq, dk, dv) of a panel for one block of keys after another."""
    q = panel.q
    for block in _col_blocks(panel.rows):
        k, v = _keys(panel.k_BGKD, block), _keys(panel.v_BGKE, block)
        ds, used = _score_gradient(panel, block, (q @ k.mT).mul_(panel.scale), lse, dout @ v.mT, delta)
        yield block, (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), (used.mT @ dout).sum(2)


def _group_queries(x_BHbD: Tensor, groups: int) -> Tensor:
    """Return queries grouped by key/value head, (B, G, R, b, D), widened.

    Contiguous, as keys are: otherwise the matmul that runs, and its rounding, would depend on the memory layout.
    """
    return x_BHbD.to(widened(x_BHbD.dtype)).contiguous().unflatten(1, (groups, -1))


def _keys(x_BGKD: Tensor, block: Tile) -> Tensor:
    return x_BGKD[:, :, block.k0 : block.k1].to(widened(x_BGKD.dtype)).contiguous().unsqueeze(2)


def _score_gradient(
    panel: _Panel, block: Tile, raw: Tensor, lse: Tensor, dp: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of q @ k from the scaled scores, and the probabilities by which values were weighted."""
    pairs, scale = panel.pairs, panel.scale
    hidden = _hidden_pairs(raw, block, panel)
    if pairs is None or not pairs.features.score_function:
        p = _exp(_hide(raw.sub_(lse), hidden, -torch.inf))
        return dp.sub_(delta).mul_(p).mul_(scale), p
    whole = panel.with_all_rows(block)
    raw = _hide(raw, hidden, 0.0)  # hidden scores may not be finite
    scores, pull = pairs.pull(raw.flatten(1, 2), whole)
    p = _exp(_hide(scores.detach().unflatten(1, raw.shape[1:3]) - lse, hidden, -torch.inf))
    factor = pairs.factor(whole, p.dtype)
    used = p
    if factor is not None:
        factor = factor.view_as(p)
        dp, used = dp * factor, p * factor
    ds = pull(_hide(dp.sub_(delta).mul_(p), hidden, 0.0).flatten(1, 2)).view_as(p) * scale
    return _hide(ds, hidden, 0.0), used  # a function may have no derivative at hidden pairs


def _hide(x: Tensor, hidden: Tensor | None, value: float) -> Tensor:
    """Write a value to hidden pairs, in place."""
    return x if hidden is None else x.masked_fill_(hidden, value)


def _hidden_pairs(scores: Tensor, block: Tile, panel: _Panel) -> Tensor | None:
    """Return which pairs of a panel's rows with one block of keys are hidden; None if none are."""
    rows, first = scores.shape[-2], block.q0 - panel.rows.q0
    hidden = None
    if block.rows != rows or block.lo is not None or block.hi is not None:
        hidden = _outside_band(rows, first, block.rows, block.cols, block.lo, block.hi, scores.device)
    if block.asks:
        assert panel.pairs is not None
        forbidden = ~panel.pairs.allowed_pairs(block)
        if hidden is None:
            return forbidden
        hidden = hidden.clone()
        hidden[first : first + block.rows] |= forbidden
    return hidden


@lru_cache(maxsize=32)
def _outside_band(
    rows: int, first: int, num: int, cols: int, lo: int | None, hi: int | None, device: torch.device
) -> Tensor:
    """Return (rows, cols) pairs outside a band over some of the rows. Cached: a long mask has a dozen shapes."""
    i = torch.arange(-first, rows - first, device=device)[:, None]
    j = torch.arange(cols, device=device)
    outside = ((i < 0) | (i >= num)).expand(rows, cols)
    if lo is not None:
        outside = outside | (i - j < lo)
    if hi is not None:
        outside = outside | (i - j > hi)
    return outside


def _exp(x: Tensor) -> Tensor:
    """Compute exp in place, with 0 for results that are denormal or nearly so, which are below the rounding of a sum
    of 1. Distant keys under ALiBi give such results, and exp takes a hundred times longer for them (0.5 ns an element;
    45-65 ns if the result is denormal, 4-10 ns at -inf)."""
    tiny = torch.finfo(x.dtype).tiny
    return torch.threshold_(x.clamp_(min=math.log(2 * tiny)).exp_(), 3 * tiny, 0.0)


def _scores(panel: _Panel, q: Tensor, block: Tile) -> Tensor:
    """Return scores of a panel's rows with one block of keys after all functions, -inf for hidden pairs."""
    scores = (q @ _keys(panel.k_BGKD, block).mT).mul_(panel.scale)
    hidden = _hidden_pairs(scores, block, panel)
    if panel.pairs is not None and panel.pairs.features.score_function:
        changed = panel.pairs.change(scores.flatten(1, 2), panel.with_all_rows(block))
        changed = changed.unflatten(1, scores.shape[1:3])
        return changed if hidden is None else changed.masked_fill(hidden, -torch.inf)  # it may be a tensor of the user
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _softmax(panel: _Panel) -> tuple[Tensor, Tensor]:
    q, pairs = panel.q, panel.pairs
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(top)
    acc = q.new_zeros((*q.shape[:-1], panel.v_BGKE.shape[3]))
    for block in _col_blocks(panel.rows):
        scores = _scores(panel, q, block)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top.isneginf(), 0.0)  # -inf minus -inf is nan, not "nothing yet"
        p, shrink = _exp(scores - base), (top - base).exp_()
        total = total * shrink + p.sum(-1, keepdim=True)
        factor = None if pairs is None else pairs.factor(panel.with_all_rows(block), p.dtype)
        p = p if factor is None else p.mul_(factor.view_as(p))
        v = _keys(panel.v_BGKE, block)
        acc = acc * shrink + p @ v
        top = new_top
    out = acc / total.clamp(min=torch.finfo(total.dtype).tiny)  # 0 where nothing was seen
    return out.flatten(1, 2), (top + total.log()).squeeze(-1).flatten(1, 2)


def highest(work: TileWork) -> Tensor:
    """Return the highest score of every row of the one tile, (B, H, q); -inf for rows that see nothing."""
    (tile,), q_BHQD = work.tiles, work.q_BHQD
    top = q_BHQD.new_full((*q_BHQD.shape[:2], tile.rows), -torch.inf, dtype=widened(q_BHQD.dtype))
    for rows in _row_blocks(tile):
        panel = _Panel(
            slice(None), slice(None), q_BHQD, work.k_BGKD, work.v_BGKE, rows, work.scale, work.pairs
        )  # fmt: skip
        q, at = panel.q, top[:, :, rows.q0 - tile.q0 : rows.q1 - tile.q0]
        for block in _col_blocks(rows):
            at.copy_(torch.maximum(at, _scores(panel, q, block).amax(-1).flatten(1, 2)))
    return top
