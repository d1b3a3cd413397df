"""Plain tensor maths: any dtype, any device, memory bounded by blocks. Also the kernel of float64 on GPUs.

Shapes: see contract.py; R = H // G query heads share one key/value head, b is the rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.execution.kernels.contract import Tile

BLOCK = 512


class Reference:
    """Softmax with a running maximum and sum over 512 x 512 blocks, in float32 (float64 for float64)."""

    name = "reference"

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:  # noqa: ARG002
        return None

    def forward(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        tiles: Sequence[Tile],
        scale: float,
    ) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        b, h, e = q_BHQD.shape[0], q_BHQD.shape[1], v_BGKE.shape[3]
        for tile in tiles:
            out = q_BHQD.new_zeros((b, h, tile.rows, e), dtype=_wide(q_BHQD))
            lse = out.new_full((b, h, tile.rows), -torch.inf)
            for rows in _row_blocks(tile):
                at = slice(rows.q0 - tile.q0, rows.q1 - tile.q0)
                out[:, :, at], lse[:, :, at] = _softmax(q_BHQD, k_BGKD, v_BGKE, rows, scale)
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
    ) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
        wide, groups = _wide(q_BHQD), k_BGKD.shape[1]
        # exp(score - inf) is 0 for a row that saw nothing; exp(score - -inf) would be nan for everybody it meets
        lse_BHQ = lse_BHQ.to(wide).masked_fill(lse_BHQ.isneginf(), torch.inf)
        for tile in tiles:
            dq = torch.zeros_like(q_BHQD[:, :, tile.q0 : tile.q1], dtype=wide)
            dk = torch.zeros_like(k_BGKD[:, :, tile.k0 : tile.k1], dtype=wide)
            dv = torch.zeros_like(v_BGKE[:, :, tile.k0 : tile.k1], dtype=wide)
            for rows in _row_blocks(tile):
                q = _grouped(q_BHQD[:, :, rows.q0 : rows.q1], groups)
                dout = _grouped(dout_BHQE[:, :, rows.q0 : rows.q1], groups)
                lse = _by_group(lse_BHQ[:, :, rows.q0 : rows.q1], groups)
                delta = _by_group(delta_BHQ[:, :, rows.q0 : rows.q1].to(wide), groups)
                for block in _col_blocks(rows):
                    k, v = _keys(k_BGKD, block), _keys(v_BGKE, block)
                    p = (_scores(q, k, block, rows.q0, scale) - lse).exp()
                    ds = p * (dout @ v.mT - delta) * scale
                    at = slice(block.k0 - tile.k0, block.k1 - tile.k0)
                    dq[:, :, rows.q0 - tile.q0 : rows.q1 - tile.q0] += (ds @ k).flatten(1, 2)
                    dk[:, :, at] += (ds.mT @ q).sum(2)
                    dv[:, :, at] += (p.mT @ dout).sum(2)
            yield tile, dq, dk, dv


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_blocks(tile: Tile) -> Iterator[Tile]:
    for q0 in range(tile.q0, tile.q1, BLOCK):
        rows = tile.part(q0, min(q0 + BLOCK, tile.q1), tile.k0, tile.k1)
        if rows is not None:
            yield rows


def _col_blocks(rows: Tile) -> Iterator[Tile]:
    for k0 in range(rows.k0, rows.k1, BLOCK):
        block = rows.part(rows.q0, rows.q1, k0, min(k0 + BLOCK, rows.k1))
        if block is not None:
            yield block


def _grouped(x_BHbD: Tensor, groups: int) -> Tensor:
    """Query heads beside the key/value head they share: (B, G, R, b, D), widened."""
    return x_BHbD.to(_wide(x_BHbD)).unflatten(1, (groups, -1))


def _by_group(x_BHb: Tensor, groups: int) -> Tensor:
    return x_BHb.unflatten(1, (groups, -1)).unsqueeze(-1)


def _keys(x_BGKD: Tensor, block: Tile) -> Tensor:
    return x_BGKD[:, :, block.k0 : block.k1].to(_wide(x_BGKD)).unsqueeze(2)


def _scores(q_BGRbD: Tensor, k_BG1bD: Tensor, block: Tile, first_row: int, scale: float) -> Tensor:
    """Scaled scores of all rows of the panel against one block of keys, -inf where the pair may not meet."""
    scores = (q_BGRbD @ k_BG1bD.mT) * scale
    if block.rows == scores.shape[-2] and block.lo is None and block.hi is None:
        return scores
    i = torch.arange(scores.shape[-2], device=scores.device)[:, None] + (first_row - block.q0)
    j = torch.arange(block.cols, device=scores.device)
    apart = (i < 0) | (i >= block.rows)  # rows of the panel that this block does not touch at all
    if block.lo is not None:
        apart = apart | (i - j < block.lo)
    if block.hi is not None:
        apart = apart | (i - j > block.hi)
    return scores.masked_fill(apart, -torch.inf)


def _softmax(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, rows: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of one panel of rows, every one of which sees a key."""
    q = _grouped(q_BHQD[:, :, rows.q0 : rows.q1], k_BGKD.shape[1])
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(top)
    acc = q.new_zeros((*q.shape[:-1], v_BGKE.shape[3]))
    for block in _col_blocks(rows):
        scores = _scores(q, _keys(k_BGKD, block), block, rows.q0, scale)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top.isneginf(), 0.0)  # -inf minus -inf is nan, not "nothing yet"
        p, shrink = (scores - base).exp_(), (top - base).exp_()
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + p @ _keys(v_BGKE, block)
        top = new_top
    return (acc / total).flatten(1, 2), (top + total.log()).squeeze(-1).flatten(1, 2)
