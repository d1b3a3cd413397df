"""Run tiles on fused operators that have no bands.

Tiles are cut into the shapes that such an operator supports (full, top-left causal, additive bias), and the results are
merged. Shapes: see contract.py.

The sizes of the parts were measured (CPU flash operator, 1 thread, H=8, D=64, bfloat16 and float32; ms forward,
backward):

    causal, rows see `t` keys before the diagonal      rectangle + triangle    one call with a bias
      256 rows, t = 64,   bfloat16                           1.2    7.4             0.9    4.4
      512 rows, t = 512,  bfloat16                           5.9   25.4             4.7   24.3
     1024 rows, t = 1024, bfloat16                          16.0   67.2            21.2   74.3
     4096 rows, t = 4096, bfloat16                         208   1041             406   1329
     4096 rows, t = 256,  float32                          185    480             404    991

    window of w keys, 4096 rows        panels of 256 rows with a bias    panels of 1024 rows, bias on the far border
      w = 512,  bfloat16                     37   176                          (wider than the window)
      w = 1024, bfloat16                     53   280                          68   276
      w = 1280, float32                     120   295                         142   313
      w = 2048, bfloat16                     81   458                          85   354
      w = 2048, float32                     158   407                         168   370

Turning the far border into a causal triangle by reversing rows was not faster (8192 rows, w = 4096: 230 / 1023 against
242 / 1027).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.kernels.contract import Group, TileWork, Upstream, one_by_one, pad_last_dim
from longspan.scoring.pipeline import TilePairs
from longspan.tile import Features, Tile, as_dtype, cached
from longspan.tile import accumulation_dtype as widened

# -- Panels ------------------------------------------------------------------------------------------------------------


SMALL = (512, 1024)  # rows x columns up to which one call with a bias beats cutting
NARROW = 2048  # bands narrower than this go in panels of NARROW_ROWS with a bias, wider ones in panels of WIDE_ROWS
NARROW_ROWS = 256
WIDE_ROWS = 1024  # <= NARROW, or the borders would overlap; also bounds the bias, a triangle of that size


ForwardOp = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
"""(q, k, v, bias, causal, scale) -> (out, lse) of one piece; bias is None or an additive (q, k) mask in q's dtype."""
BackwardOp = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]
]
"""(dout, q, k, v, out, lse, bias, causal, scale) -> (dq, dk, dv); dout and out may have another dtype."""


def split(tile: Tile) -> Iterator[Tile]:
    """Yield disjoint tight tiles with the same pairs, each full, causal (lo == 0) or small enough for a bias.

    >>> [(piece.k0, piece.k1, piece.lo) for piece in split(Tile(0, 4096, 0, 5120, lo=-1024))]
    [(0, 1024, None), (1024, 5120, 0)]
    """
    tight = tile.tight()
    if tight is None:
        return
    lo, hi = tight.lo, tight.hi
    if tight.asks:
        for panel in _panels(tight, SMALL[0]):
            for k0 in range(panel.k0, panel.k1, SMALL[1]):
                block = panel.part(panel.q0, panel.q1, k0, min(k0 + SMALL[1], panel.k1))
                if block is not None:
                    yield block
    elif (hi is None and lo in (None, 0)) or (tight.rows <= SMALL[0] and tight.cols <= SMALL[1]):
        yield tight
    elif hi is None:
        yield from _borders(tight)
    elif lo is not None and hi - lo + 1 < NARROW:
        yield from _panels(tight, NARROW_ROWS)
    elif tight.rows <= WIDE_ROWS or (lo is None and tight.rows - 1 - hi < tight.cols):
        yield from _borders(tight)
    else:
        for panel in _panels(tight, WIDE_ROWS):
            yield from _borders(panel)


def _panels(tile: Tile, rows: int) -> Iterator[Tile]:
    for q0 in range(tile.q0, tile.q1, rows):
        panel = tile.part(q0, min(q0 + rows, tile.q1), tile.k0, tile.k1)
        if panel is not None:
            yield panel


def _borders(tile: Tile) -> Iterator[Tile]:
    """Yield the columns that all rows see, the triangle at the diagonal, and the far border of a window."""
    far = 0 if tile.hi is None else min(max(tile.rows - 1 - tile.hi, 0), tile.cols)
    near = tile.cols if tile.lo is None else -tile.lo
    assert far <= near, f"the borders of {tile} overlap"
    q0, q1, k0, k1 = tile.q0, tile.q1, tile.k0, tile.k1
    for first, last in ((k0 + far, k0 + near), (k0 + near, k1), (k0, k0 + far)):
        piece = tile.part(q0, q1, first, last) if first < last else None
        if piece is None:
            continue
        if piece.hi is None or piece.rows <= WIDE_ROWS:
            yield piece
        else:
            for panel in _panels(piece, WIDE_ROWS):
                yield from _borders(panel)


class _Biases:
    """Additive masks; only the last is kept, because the panels of one window follow each other and share it."""

    def __init__(self, like: Tensor, pairs: TilePairs | None) -> None:
        self._like, self._pairs = like, pairs
        self._shape: tuple[int, int, int | None, int | None] | None = None
        self._bias: Tensor | None = None
        self.blind: Tensor | None = None
        """(q, 1) rows of the last piece that see none of its keys, if a function decided; None if known to be none."""

    def of(self, piece: Tile) -> tuple[Tensor | None, bool]:
        """Return (bias, causal) for the pairs of a piece."""
        self.blind = None
        if piece.asks:
            return self._answers(piece), False
        if piece.hi is None and piece.lo in (None, 0):
            return None, piece.lo == 0
        shape = (piece.rows, piece.cols, piece.lo, piece.hi)
        if shape != self._shape:
            self._shape, self._bias = shape, additive(*shape, like=self._like)
        return self._bias, False

    def _answers(self, piece: Tile) -> Tensor:
        assert self._pairs is not None
        bias = additive(piece.rows, piece.cols, piece.lo, piece.hi, like=self._like)
        bias.masked_fill_(~self._pairs.allowed_pairs(piece), -torch.inf)
        blind = bias.isneginf().all(1, keepdim=True)
        # Asking a device whether there are any would make the host wait for it.
        self.blind = blind if blind.device.type != "cpu" or bool(blind.any()) else None
        return bias


def additive(rows: int, cols: int, lo: int | None, hi: int | None, like: Tensor) -> Tensor:
    """Return 0 where row i may attend to column j, -inf elsewhere, in the dtype of `like`."""
    # Memory-efficient attention on GPUs reads the bias in runs of 16, so every row has room for whole runs.
    room = -(-cols // 16) * 16
    bias = like.new_full((rows, room), -torch.inf) if lo is not None else like.new_zeros((rows, room))
    if lo is not None:
        bias.triu_(1 - lo)
    if hi is not None:
        bias += like.new_full((rows, room), -torch.inf).tril_(-hi - 1)
    return bias.narrow(1, 0, cols)


@dataclass(frozen=True)
class PanelKernel(ABC):
    """A kernel on a fused operator with full, causal and biased attention, and without bands.

    Head dims are padded with zeros to the larger of the two, and to a multiple of `multiple`.
    """

    name: str
    op: ForwardOp
    backward_op: BackwardOp
    honours: Features
    multiple: int = 1

    @abstractmethod
    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None: ...

    def groups(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> Sequence[Group]:  # noqa: ARG002
        return one_by_one(tiles)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, /
    ) -> tuple[Tensor, Tensor]:
        return self.op(q, k, v, bias, causal, scale)

    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
        causal: bool, scale: float, /,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self.backward_op(dout, q, k, v, out, lse, bias, causal, scale)

    def forward(self, work: TileWork) -> Iterator[tuple[Tensor, Tensor]]:
        q_BHQD, k_BGKD, v_BGKE, multiple = work.q_BHQD, work.k_BGKD, work.v_BGKE, self.multiple
        biases, e = _Biases(q_BHQD, work.pairs), v_BGKE.shape[3]
        width = -(-max(q_BHQD.shape[3], e) // multiple) * multiple
        run = self.op if type(self).run is PanelKernel.run else self.run  # one call less for every tile
        for tile, pieces in cached(work.tiles, _pieces):
            out = lse = None
            for number, piece in enumerate(pieces):
                part, part_lse = run(
                    _operand(q_BHQD, piece.q0, piece.q1, width, multiple),
                    _operand(k_BGKD, piece.k0, piece.k1, width, multiple),
                    _operand(v_BGKE, piece.k0, piece.k1, width, multiple),
                    *biases.of(piece),
                    work.scale,
                )
                part = part if width == e else part.narrow(3, 0, e)
                if biases.blind is not None:  # operators write finite numbers there
                    part = part.masked_fill(biases.blind, 0.0)
                    part_lse = part_lse.masked_fill(biases.blind[:, 0], -torch.inf)
                if lse is None or out is None:
                    if piece.q0 == tile.q0 and piece.q1 == tile.q1:
                        out, lse = part, part_lse
                        continue
                    b, h = part.shape[:2]
                    out = part.new_zeros((b, h, tile.rows, e), dtype=part_lse.dtype)
                    lse = part_lse.new_full((b, h, tile.rows), -torch.inf)
                out = out.to(lse.dtype)
                rows = (2, piece.q0 - tile.q0, piece.rows)
                if all(piece.q0 >= other.q1 or other.q0 >= piece.q1 for other in pieces[:number]):  # rows not seen yet
                    out.narrow(*rows).copy_(part)
                    lse.narrow(*rows).copy_(part_lse)
                else:
                    merge(out.narrow(*rows), lse.narrow(*rows), part, part_lse)
            assert out is not None, f"{tile} has no pair"
            assert lse is not None
            yield out, lse

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Gradients of pieces are summed in float32 (float64 for float64)."""
        q_BHQD, k_BGKD, v_BGKE, lse_BHQ = work.q_BHQD, work.k_BGKD, work.v_BGKE, upstream.lse_BHQ
        wide, d, e, multiple = widened(q_BHQD.dtype), q_BHQD.shape[3], v_BGKE.shape[3], self.multiple
        biases, width = _Biases(q_BHQD, work.pairs), -(-max(d, e) // multiple) * multiple
        run = self.backward_op if type(self).run_backward is PanelKernel.run_backward else self.run_backward
        # exp(score - inf) is 0 for a row that saw nothing; exp(score - -inf) would be nan for all its keys
        lse_BHQ = as_dtype(lse_BHQ, wide).masked_fill(lse_BHQ.isneginf(), torch.inf)
        for tile, pieces in cached(work.tiles, _pieces):
            sums: tuple[Tensor, ...] | None = None
            for piece in pieces:
                rows, keys = (piece.q0, piece.q1), (piece.k0, piece.k1)
                gradients = run(
                    _operand(upstream.dout_BHQE, *rows, width, multiple),
                    _operand(q_BHQD, *rows, width, multiple),
                    _operand(k_BGKD, *keys, width, multiple),
                    _operand(v_BGKE, *keys, width, multiple),
                    _operand(upstream.out_BHQE, *rows, width, multiple),
                    lse_BHQ if rows == (0, lse_BHQ.shape[2]) else lse_BHQ.narrow(2, piece.q0, piece.rows),
                    *biases.of(piece),
                    work.scale,
                )
                if not d == e == width:
                    sides = zip(gradients, (d, d, e), strict=True)
                    gradients = tuple(x if x.shape[3] == dim else x.narrow(3, 0, dim) for x, dim in sides)
                if sums is None:
                    if rows == (tile.q0, tile.q1) and keys == (tile.k0, tile.k1):
                        sums = gradients
                        continue
                    sizes = zip((q_BHQD, k_BGKD, v_BGKE), (tile.rows, tile.cols, tile.cols), strict=True)
                    sums = tuple(x.new_zeros((*x.shape[:2], size, x.shape[3]), dtype=wide) for x, size in sizes)
                starts = piece.q0 - tile.q0, piece.k0 - tile.k0, piece.k0 - tile.k0
                for total, start, part in zip(sums, starts, gradients, strict=True):
                    total.narrow(2, start, part.shape[2]).add_(part)
            assert sums is not None, f"{tile} has no pair"
            dq, dk, dv = sums
            yield dq, dk, dv


def _pieces(tiles: Sequence[Tile]) -> list[tuple[Tile, tuple[Tile, ...]]]:
    return [(tile, tuple(split(tile))) for tile in tiles]


def _operand(x: Tensor, start: int, stop: int, width: int, multiple: int) -> Tensor:
    """Return rows of a tensor, with last dims padded to `width`, as operators can read them (see `pad_last_dim`)."""
    rows = x if stop - start == x.shape[2] else x.narrow(2, start, stop - start)
    if multiple == 1 and rows.shape[3] == width and rows.stride(3) == 1:
        return rows
    return pad_last_dim(rows, width, multiple)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result over other keys into (out, lse), in place.

    The two weights sum to one by dividing, not by subtracting a rounded lse: with |lse| of 1e4 that keeps
    three more digits. A row that neither has seen stays (0, -inf).

    Not `run.merge.merge`, which has a third tensor for the sum and divides at the end: a row of a tile is in two or
    three pieces, the first is the operator's own output in its own dtype, and most tiles are one piece and merge none.
    """
    top = torch.maximum(lse, part_lse)
    base = top.masked_fill(top.isneginf(), 0.0)  # -inf minus -inf is nan, not "nothing"
    mine, other = (lse - base).exp_(), (part_lse - base).exp_()
    total = mine + other
    lse.copy_(top + total.log())
    total.clamp_(min=0.5)  # at least 1 wherever something was seen
    out.mul_((mine / total).unsqueeze(-1)).add_(part * (other / total).unsqueeze(-1))
