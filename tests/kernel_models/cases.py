"""A dense float64 oracle for kernels, nothing of it shared with the package, and random cases."""

import math
import random
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from longspan.kernels import cpu_flash, panels, reference
from longspan.kernels.contract import TileWork, Upstream
from longspan.tile import Tile

INF = math.inf
WIDE = {torch.float64: torch.float64}
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}
LSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-5, torch.float16: 4e-5}


# ---- the oracle: one boolean matrix, float64, nothing shared with the package ----------------------------------------


def allowed(tile, num_q, num_k):
    """(num_q, num_k) bool: the pairs of a tile."""
    found = torch.zeros(num_q, num_k, dtype=torch.bool)
    for i in range(tile.q0, tile.q1):
        first = tile.k0 if tile.hi is None else max(tile.k0, tile.k0 + (i - tile.q0) - tile.hi)
        last = tile.k1 - 1 if tile.lo is None else min(tile.k1 - 1, tile.k0 + (i - tile.q0) - tile.lo)
        if first <= last:
            found[i, first : last + 1] = True
    return found


def dense(q, k, v, mask, scale, dout, saved=torch.float64):
    """(out, lse, dq, dk, dv) in float64; rows that see nothing are (0, -inf) and give nothing.

    `saved` is the dtype in which backward reads `out`: kernels compute delta = rowsum(dout * out) from a rounded one.
    """
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    groups = k.shape[1]
    share = q.shape[1] // groups
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = (torch.einsum("bhqd,bhkd->bhqk", q, k) * scale).masked_fill(~mask, -INF)
    lse = scores.logsumexp(-1)
    p = torch.where(mask, (scores - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp(), 0.0)
    out = p @ v
    ds = p * (torch.einsum("bhqe,bhke->bhqk", dout, v) - (dout * out.to(saved)).sum(-1, keepdim=True)) * scale
    dk, dv = torch.einsum("bhqk,bhqd->bhkd", ds, q), torch.einsum("bhqk,bhqe->bhke", p, dout)
    return out, lse, ds @ k, dk.unflatten(1, (groups, share)).sum(2), dv.unflatten(1, (groups, share)).sum(2)


def one_call(q, k, v, mask, scale, dout):
    """(out, dq, dk, dv) of PyTorch's fused attention in one call, in the inputs' dtype; head dims made equal for it."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    wide, gqa, e = max(q.shape[3], v.shape[3]), q.shape[1] != k.shape[1], v.shape[3]
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -INF)
    even = (pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
    out = scaled_dot_product_attention(*even, attn_mask=bias, scale=scale, enable_gqa=gqa)[..., :e]
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def off(x, true):
    """Relative error; the gradient of a row that sees one key is 0, and is measured against what others are like."""
    return ((x.double() - true).norm() / true.norm().clamp(min=0.1 * math.sqrt(true.numel()))).item()


@dataclass
class Case:
    """Several tiles over the same tensors, their pairs disjoint."""

    dtype: torch.dtype
    tiles: list[Tile]
    num_q: int
    num_k: int
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (16, 16)
    batch: int = 1
    seed: int = 0
    gain: float = 1.0

    def tensors(self):
        make = torch.Generator().manual_seed(self.seed)
        shapes = [(self.heads[0], self.num_q, self.dims[0]), (self.heads[1], self.num_k, self.dims[0])]
        shapes += [(self.heads[1], self.num_k, self.dims[1]), (self.heads[0], self.num_q, self.dims[1])]
        q, k, v, dout = (torch.randn(self.batch, *s, generator=make, dtype=torch.float64) for s in shapes)
        return tuple(x.to(self.dtype) for x in (q * self.gain, k, v, dout))


class Answers:
    """What a mask's function says of all pairs, for tiles that ask."""

    def __init__(self, mask):
        self.mask = mask

    def allowed_pairs(self, tile):
        return self.mask[tile.q0 : tile.q1, tile.k0 : tile.k1]


def by_tile(kernel, work, upstream=None):
    """What a kernel finds, tile by tile: the results of a group cut into those of its tiles, or of parts of them."""
    groups = kernel.groups(work.tiles, work.q_BHQD.shape[2], work.k_BGKD.shape[2])
    found = kernel.forward(work) if upstream is None else kernel.backward(work, upstream)
    for group, parts in zip(groups, found, strict=True):
        rows, cols = [tile.rows for tile in group], [tile.cols for tile in group]
        sizes = (rows, rows) if upstream is None else (rows, cols, cols)
        yield from zip(group, *(x.split(size, 2) for x, size in zip(parts, sizes, strict=True)), strict=True)


def check(kernel, case, tensors=None, answers=None, laid=lambda x: x):
    """Forward tile by tile, merged in float64; backward from the global out and lse; both within twice one call.

    `answers` (bool, query rows x keys) are for tiles that ask; `laid` says how what forward leaves lies in memory.
    """
    q, k, v, dout = tensors or case.tensors()
    scale = 0.9 / math.sqrt(case.dims[0])
    masks = [allowed(tile, case.num_q, case.num_k) for tile in case.tiles]
    masks = [mask & answers if tile.asks else mask for tile, mask in zip(case.tiles, masks, strict=True)]
    mask = torch.stack(masks).any(0)
    pairs = None if answers is None else Answers(answers)
    assert sum(int(m.sum()) for m in masks) == int(mask.sum()), "tiles of a case are disjoint"
    out, lse, *grads = dense(q, k, v, mask, scale, dout)
    theirs = one_call(q, k, v, mask, scale, dout)
    wide = WIDE.get(case.dtype, torch.float32)

    tiles = [tile.tight() for tile in case.tiles]  # as the runner hands them over
    work = TileWork(q, k, v, tiles, scale, pairs)
    found = list(by_tile(kernel, work))
    shown = [allowed(tile, case.num_q, case.num_k) & (answers if tile.asks else True) for tile, _, _ in found]
    assert torch.equal(sum(shown), mask.long()), "every pair once"
    merged = torch.zeros_like(out)
    for m, (tile, part, part_lse) in zip(shown, found, strict=True):
        rows = slice(tile.q0, tile.q1)
        assert part.shape == (case.batch, case.heads[0], tile.rows, case.dims[1])
        assert part_lse.shape == part.shape[:3]
        assert part_lse.dtype == wide, part_lse.dtype
        assert part.dtype in (case.dtype, wide), part.dtype
        dead = ~m[rows].any(-1)
        assert torch.equal(part_lse == -INF, dead.expand_as(part_lse)), "-inf exactly where geometry says"
        assert not part[:, :, dead].any()
        merged[:, :, rows] += (
            part.double() * (part_lse.double() - lse[:, :, rows].nan_to_num(neginf=0.0)).exp()[..., None]
        )
        true = dense(q, k, v, m, scale, dout)[1][:, :, rows]
        if not dead.all():
            size = 1 + true[:, :, ~dead].abs().max()
            assert ((part_lse - true)[:, :, ~dead].abs().max() / size) < LSE[case.dtype], "lse"
    close("out", merged, out, theirs[0], case.dtype)

    delta = (dout.double() * out).sum(-1).to(wide)
    sums = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    upstream = Upstream(dout, laid(out.to(case.dtype)), laid(lse.to(wide)), laid(delta))
    seen = []
    for tile, dq, dk, dv in by_tile(kernel, work, upstream):
        seen.append(tile)
        assert dq.shape[2] == tile.rows
        assert dk.shape[2] == dv.shape[2] == tile.cols
        sums[0][:, :, tile.q0 : tile.q1] += dq
        sums[1][:, :, tile.k0 : tile.k1] += dk
        sums[2][:, :, tile.k0 : tile.k1] += dv
    assert seen == [tile for tile, _, _ in found]
    rounded = dense(q, k, v, mask, scale, dout, saved=case.dtype)[2:]
    for name, mine, true, their, least in zip(("dq", "dk", "dv"), sums, grads, theirs[1:], rounded, strict=True):
        close(name, mine, true, their, case.dtype, off(least, true))


def close(name, mine, true, their, dtype, more=0.0):
    """Check that `mine` is within twice the error of one call; `more` is an error that reading `out` alone makes."""
    assert mine.isfinite().all(), f"{name} is not finite"
    limit = FLOOR[dtype] if dtype == torch.float64 else 2 * off(their, true) + more + FLOOR[dtype]
    assert off(mine, true) <= limit, f"{name}: {off(mine, true):.2e} > {limit:.2e}"


# ---- cases -----------------------------------------------------------------------------------------------------------


def cut(rng, num_q, num_k, lo, hi, keep=0.85):
    """A band over num_q x num_k, cut into rectangles at random edges; some are dropped, so that rows see nothing."""
    edges = [sorted({0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 3)))}) for n in (num_q, num_k)]
    tiles = []
    for (a, b), (c, d) in product(pairwise(edges[0]), pairwise(edges[1])):
        low, high = (None if bound is None else bound - (a - c) for bound in (lo, hi))
        tile = Tile(a, b, c, d, low, high)
        if allowed(tile, num_q, num_k).any() and rng.random() < keep:
            tiles.append(tile)
    return tiles


def random_case(seed, most=60, dtypes=tuple(FLOOR)):
    rng = random.Random(seed)
    while True:
        num_q, num_k = rng.randint(1, most), rng.randint(1, most)
        kind = rng.choice(("full", "causal", "offset", "window", "window", "far"))
        lo = {"full": None, "causal": 0, "far": None}.get(kind, rng.randint(-num_k, num_q - 1))
        width = rng.randint(0, most)
        hi = {"window": (lo or 0) + width, "far": rng.randint(-num_k + 1, num_q)}.get(kind)
        if tiles := cut(rng, num_q, num_k, lo, hi):
            break
    group = rng.choice(((1, 1), (2, 2), (4, 2), (3, 1)))
    dims = rng.choice(((16, 16), (16, 16), (7, 7), (24, 8), (5, 11), (1, 1)))
    return Case(rng.choice(dtypes), tiles, num_q, num_k, group, dims, rng.choice((1, 1, 2)), seed)


def shrink_blocks(monkeypatch):
    """Brings the sizes at which tiles are cut down, so that short sequences go through every way of cutting."""
    monkeypatch.setattr(panels, "SMALL", (4, 6))
    monkeypatch.setattr(panels, "NARROW", 12)
    monkeypatch.setattr(panels, "NARROW_ROWS", 5)
    monkeypatch.setattr(panels, "WIDE_ROWS", 9)
    monkeypatch.setattr(reference, "ROWS", 13)
    monkeypatch.setattr(reference, "COLS", 11)
    monkeypatch.setattr(cpu_flash, "SHORT", 11)
