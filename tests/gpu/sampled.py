"""Sampled queries and keys of a long sequence in float64, computed by the ranks from the shards that they hold.

A sampled query is compared with all keys (out, lse, dq), a sampled key with all queries (dk, dv). The latter takes lse
and out from the call, as kernels do; errors in these are found in the sampled queries. Cost is linear in the sequence.

How far rounding may move a result is the expected square of its error, summed over its pairs. Shapes: H query heads,
G key heads, T tokens of this rank, N samples, D features of queries and keys, E of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspan.planning.plan import Plan
from longspan.tile import accumulation_dtype
from longspan.verification.reference import budgets, compare_tensor, unit, units
from longspan.verification.report import Check
from tests.gpu.site import Site

NUM_SAMPLES = 64
MIN_ROUNDINGS = 8
"""Budgets are at least this many roundings of statistics, of the whole tensor's norm."""
LSE_SHARE = 0.1
"""Error of an lse that is not visible, as a share of the rounding of probabilities."""
LEAST = -1e30
"""In the place of -inf, where a rank has no key for a query."""


@dataclass(frozen=True, eq=False)
class Shard:
    """The inputs and results of a call on this rank, with batch 1."""

    site: Site
    plan: Plan
    documents: Tensor
    """The document of each global position."""
    tensors: dict[str, Tensor]
    """q, k, v, dout, out, lse, dq, dk and dv."""
    window: int | None = None
    """How many keys before its own a query attends to; None: all."""

    @property
    def positions(self) -> Tensor:
        return torch.as_tensor(self.plan.layout.positions(self.site.ranks.rank), device=self.site.ranks.device)

    def sees(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return which pairs of positions attend: the same document, causal, and in the window. Padding has no
        document."""
        documents = torch.cat((self.documents, self.documents.new_tensor([-1])))
        mine, theirs = (documents[at.clamp(max=len(self.documents))] for at in (q, kv))
        distance = q[:, None] - kv
        reach = len(self.documents) if self.window is None else self.window
        return (mine[:, None] == theirs) & (distance >= 0) & (distance <= reach) & (mine[:, None] >= 0)

    def rows(self, name: str, positions: Tensor) -> Tensor:
        """Return rows of all ranks at these positions, which must be sorted by rank, as float64 (heads, N, ...)."""
        rank, slot = self.plan.layout.locate(positions.cpu().numpy())
        here = torch.as_tensor(slot[rank == self.site.ranks.rank], device=positions.device)
        mine = self.tensors[name][0].index_select(1, here).transpose(0, 1).double().contiguous()
        return torch.cat(self.site.ranks.gather(mine)).to(positions.device).transpose(0, 1)

    def each(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, stacked."""
        return torch.cat(self.site.ranks.gather(mine.unsqueeze(0))).to(mine.device)


def sample(plan: Plan, seed: int) -> Tensor:
    """Return positions that are spread over the sequence, sorted by the rank that holds them."""
    ends = np.linspace(0, plan.layout.seq_len, min(NUM_SAMPLES, plan.layout.seq_len) + 1).astype(np.int64)
    positions = np.random.default_rng(seed).integers(ends[:-1], ends[1:])
    return torch.from_numpy(positions[np.argsort(plan.layout.owner(positions), kind="stable")])


def check_samples(shard: Shard, seed: int) -> list[Check]:
    """Compare sampled rows of all results with float64; every rank returns the same checks."""
    truth: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    observed: dict[str, Tensor] = {}
    device = shard.site.ranks.device
    for compute, names, number in ((_queries, ("out", "lse", "dq"), 2 * seed), (_keys, ("dk", "dv"), 2 * seed + 1)):
        positions = sample(shard.plan, number).to(device)
        for name, (right, square) in zip(names, compute(shard, positions), strict=True):
            truth[name], squares[name] = right.cpu().unsqueeze(0), square.cpu().unsqueeze(0)
            observed[name] = shard.rows(name, positions).cpu().unsqueeze(0)
    rounded = {name: truth[name] + squares[name].sqrt() for name in truth}
    smallest = MIN_ROUNDINGS * unit(accumulation_dtype(shard.tensors["q"].dtype))
    allowed = budgets(truth, [rounded], 2, smallest, 1.0)
    return [compare_tensor(observed[name], truth[name], allowed[name], name)[0] for name in truth]


Expected = tuple[Tensor, Tensor]
"""A result, and the expected square of its error."""


def _final(parts: Tensor, squares: Tensor, terms: Tensor, narrow: float, wide: float) -> Expected:
    """Return the sum of all parts, each of which is rounded, as is the sum; sums of many terms are rounded often."""
    whole = parts.sum(0)
    roundings = narrow**2 / 3 * (parts.square().sum(0) + whole.square())
    return whole, squares.sum(0) + roundings + wide**2 * terms[..., None] * whole.square()


def _queries(shard: Shard, positions: Tensor) -> tuple[Expected, Expected, Expected]:
    t, scale = shard.tensors, shard.plan.sizes.head_dim**-0.5
    narrow, wide = units(t["q"].dtype)
    q, dout = (shard.rows(name, positions) for name in ("q", "dout"))
    seen = shard.sees(positions, shard.positions)
    terms = shard.each(seen.sum(-1).double()).sum(0)
    heads, group = q.shape[0], q.shape[0] // t["k"].shape[1]

    def scores(h: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (t[name][0, h // group].double() for name in ("k", "v"))
        return (scale * q[h] @ k.mT).masked_fill(~seen, LEAST), k, v

    tops, totals, sums = [], [], []
    for h in range(heads):
        s, _, v = scores(h)
        tops.append(s.amax(-1))
        weights = torch.exp(s - tops[-1][:, None]).masked_fill(~seen, 0.0)
        totals.append(weights.sum(-1))
        sums.append(weights @ v)
    top = shard.each(torch.stack(tops))  # (ranks, H, N)
    share = torch.exp(top - top.amax(0))
    total = (share * shard.each(torch.stack(totals))).sum(0)
    out_parts = share[..., None] * shard.each(torch.stack(sums)) / total[..., None]
    lse, out = top.amax(0) + total.log(), out_parts.sum(0)
    delta = (dout * out).sum(-1, keepdim=True)
    delta_error = (narrow + 2 * wide) * (dout * out).norm(dim=-1, keepdim=True)

    parts: list[tuple[Tensor, ...]] = []
    for h in range(heads):
        s, k, v = scores(h)
        p, dp = torch.exp(s - lse[h][:, None]), dout[h] @ v.mT
        ds = p * (dp - delta[h])
        rough = (narrow**2 + (wide * _score_error(s, q[h], k, scale)).square()) / 3
        dp_error = wide * _product_error(dout[h], v)
        dq_square = scale**2 * (ds.square() * rough + p.square() * dp_error.square()) @ k.square()
        pk = scale * p @ k  # an error of delta moves all of a row's ds
        lse_square = (p.square() * rough).sum(-1) if narrow == wide else torch.zeros_like(lse[h])
        parts.append((scale * ds @ k, dq_square, pk, (p.square() * rough) @ v.square(), lse_square))
    dq, dq_square, pk, out_square, lse_square = (shard.each(torch.stack(x)) for x in zip(*parts, strict=True))
    level = (2 * wide * (1 + lse.abs())).square()
    dq_whole, dq_error = _final(dq, dq_square, terms, narrow, wide)
    dq_error = dq_error + (delta_error * pk.sum(0)).square() + level[..., None] * dq_whole.square()
    more = (LSE_SHARE * narrow) ** 2 if narrow != wide else 0.0
    lse_error = lse_square.sum(0) + level + wide**2 * terms + more
    return _final(out_parts, out_square, terms, narrow, wide), (lse, lse_error), (dq_whole, dq_error)


def _keys(shard: Shard, positions: Tensor) -> tuple[Expected, Expected]:
    t, scale = shard.tensors, shard.plan.sizes.head_dim**-0.5
    narrow, wide = units(t["q"].dtype)
    k, v = (shard.rows(name, positions) for name in ("k", "v"))
    seen = shard.sees(shard.positions, positions)
    heads, groups = t["q"].shape[1], k.shape[0]
    terms = heads // groups * shard.each(seen.sum(0).double()).sum(0)
    parts: list[tuple[Tensor, ...]] = []
    for h in range(heads):
        g = h * groups // heads
        q, dout, out = (t[name][0, h].double() for name in ("q", "dout", "out"))
        lse = t["lse"][0, h].double()[:, None]
        s = scale * q @ k[g].mT
        p = torch.exp(s - lse).masked_fill(~seen, 0.0)
        ds = p * (dout @ v[g].mT - (dout * out).sum(-1, keepdim=True))
        rough = (narrow**2 + (wide * _score_error(s, q, k[g], scale)).square()) / 3
        rough = rough + (2 * wide * (1 + lse.abs().masked_fill(lse.isinf(), 0.0))).square()
        ds_error = wide * _product_error(dout, v[g]) + (narrow + 2 * wide) * (dout * out).norm(dim=-1, keepdim=True)
        dk_square = scale**2 * (ds.square() * rough + p.square() * ds_error.square()).mT @ q.square()
        parts.append((scale * ds.mT @ q, dk_square, p.mT @ dout, (p.square() * rough).mT @ dout.square()))
    # (ranks x heads of a group, G, N, D or E): a kernel may round the part of each query head
    dk, dk_square, dv, dv_square = (
        shard.each(torch.stack(x)).unflatten(1, (groups, -1)).transpose(1, 2).flatten(0, 1)
        for x in zip(*parts, strict=True)
    )
    return _final(dk, dk_square, terms, narrow, wide), _final(dv, dv_square, terms, narrow, wide)


def _product_error(a: Tensor, b: Tensor) -> Tensor:
    """Return the size of the products in `a @ b.mT`, added in squares."""
    return a.norm(dim=-1)[:, None] * b.norm(dim=-1) / math.sqrt(a.shape[-1])


def _score_error(s: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the error of scores, in roundings; those of pairs that do not attend do not matter."""
    return scale * _product_error(q, k) + s.abs().masked_fill(s == LEAST, 0.0)
