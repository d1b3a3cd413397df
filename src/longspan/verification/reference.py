"""What a call means, and its answer on one device: dense, in float64, every pair written out.

A `Meaning` can also be wrong on purpose: mistakes that people make are meanings, too, so their answers can be compared
with what was found. Shapes: B batch rows, H heads, S tokens, D features, E of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.execution.scoring.captured import Swap
from longspan.execution.scoring.dropout import Dropout
from longspan.execution.scoring.pipeline import Scoring

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Whole q, k, v, and the gradient of the output."""
Answer = dict[str, Tensor]
"""Tensors by name: out, lse, dq, dk, dv, and gradients of captured tensors."""


@dataclass(frozen=True, eq=False)
class Meaning:
    """Everything beside q, k and v that decides the answer; None where a call has no such thing."""

    seen: Tensor
    """Which pairs attend (B, H, S, S)."""
    scale: float
    scoring: Scoring | None = None
    sinks: Tensor | None = None
    names: tuple[str, ...] = ()
    """Of captured tensors, and of sinks last."""
    q_at: Tensor | None = None
    """The position that score functions see for each query (S); its own, unless a mistake is acted out."""
    kv_at: Tensor | None = None
    seeds: Tensor | None = None
    """The seed of dropout for each query row (S), where it differs between rows."""
    remote: Tensor | None = None
    """Pairs whose two sides lie on different ranks (S, S)."""
    cut: str = ""
    """q, k, v: which of them get no gradient through remote pairs."""
    v_from: Tensor | None = None
    """Whose values remote pairs take in place of each key's own (S)."""
    is_tiled: bool = False
    """Query head h uses key head h % kv_heads, where right is h // (heads per key head)."""
    is_swapped: bool = False
    """Keys serve as values and values as keys."""
    blocks: Tensor | None = None
    """The rank of each key (S), if blocks of keys are averaged without their weights."""
    empty_mean: bool = False
    """Rows that see nothing average everything."""


@dataclass(frozen=True)
class Jitter:
    """Rounding, played at random in float64: every number that a careful implementation rounds moves by that much."""

    narrow: float
    """The relative error of one rounding to the dtype of the tensors."""
    wide: float
    """The same for scores, statistics and sums."""
    draw: torch.Generator

    def noise(self, like: Tensor) -> Tensor:
        """Uniform in -1 to 1."""
        noise = torch.rand(like.shape, generator=self.draw, dtype=torch.float64) * 2 - 1
        return noise.to(like.device)

    def rounded(self, x: Tensor, unit: float | None = None) -> Tensor:
        """The tensor, each number off by up to one rounding."""
        return x * (1 + (self.narrow if unit is None else unit) * self.noise(x))

    def scores(self, scores: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Scores whose products were rounded, and whose statistics (lse) are numbers of their size."""
        summed = abs(scale) * (q.detach().square() @ k.detach().square().mT).sqrt()
        return scores + self.wide * (summed + scores.detach().abs()) * self.noise(scores)


def answer(meaning: Meaning, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, jitter: Jitter | None = None) -> Answer:
    """Output, lse and all gradients."""
    if meaning.is_swapped:
        k, v = v, k
    q, k, v = leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scoring = meaning.scoring
    captured = () if scoring is None else scoring.captured
    swap = Swap(captured, [t.detach().double() for t in captured], by_element=False)
    sinks = None if meaning.sinks is None else meaning.sinks.detach().cpu().double().requires_grad_()
    out, lse = _forward(meaning, (q, k, v), sinks, swap, jitter, dout.double())
    shared = [leaf for _, _, leaf in swap.taken] + ([] if sinks is None else [sinks])
    gradients = torch.autograd.grad(out, [*leaves, *shared], dout.double(), allow_unused=True)
    grads = [
        (torch.zeros_like(t) if g is None else g).cpu() for g, t in zip(gradients, [*leaves, *shared], strict=True)
    ]
    if meaning.is_swapped:
        grads[1], grads[2] = grads[2], grads[1]
    tensors = [out.detach(), lse.detach(), *grads]
    if jitter is not None:
        tensors = [tensors[0], jitter.rounded(lse.detach(), jitter.wide), *map(jitter.rounded, grads)]
    return dict(zip(("out", "lse", "dq", "dk", "dv", *meaning.names), tensors, strict=True))


def _forward(
    meaning: Meaning, inputs: tuple[Tensor, Tensor, Tensor], sinks: Any, swap: Swap, jitter: Jitter | None, dout: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (
        t.repeat(1, group, 1, 1) if meaning.is_tiled else t.repeat_interleave(group, dim=1) for t in (k, v)
    )
    scores = meaning.scale * _product(meaning, q, wide_k)
    if jitter is not None:
        scores = jitter.scores(scores, q, wide_k, meaning.scale)
    scores = _scored(meaning, scores, swap)
    if jitter is not None:
        scores.register_hook(jitter.rounded)
    scores = scores.masked_fill(~meaning.seen, -torch.inf)
    if meaning.empty_mean:
        nothing = ~meaning.seen.any(-1, keepdim=True)
        scores = torch.where(nothing, torch.zeros_like(scores), scores)
    if meaning.blocks is not None:
        return _mean_of_blocks(scores, meaning.blocks, wide_v), torch.logsumexp(scores.detach(), -1)
    return _softmax(meaning, scores, sinks, wide_v, jitter, dout)


def _product(meaning: Meaning, q: Tensor, k: Tensor) -> Tensor:
    """q . k for all pairs; through remote ones, only gradients that are not cut."""
    scores = q @ k.mT
    if not set(meaning.cut) & {"q", "k"}:
        return scores
    left = q.detach() if "q" in meaning.cut else q
    right = k.detach() if "k" in meaning.cut else k
    return torch.where(meaning.remote, left @ right.mT, scores)  # type: ignore[arg-type]


def _scored(meaning: Meaning, scores: Tensor, swap: Swap) -> Tensor:
    if meaning.scoring is None:
        return scores
    # The reference is computed on the CPU, but tensors that the functions read may be on another device.
    like = meaning.scoring.like
    there = scores if like is None else scores.to(like.device)
    index = _index(there, meaning.q_at, meaning.kv_at)
    return meaning.scoring.settled(there, *index).apply(there, *index, swap).to(scores.device)


def _index(scores: Tensor, q_at: Tensor | None, kv_at: Tensor | None) -> Inputs:
    b, h, s, _ = (torch.arange(n, device=scores.device) for n in scores.shape)
    q, kv = (s if at is None else at.to(s.device) for at in (q_at, kv_at))
    return b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1), kv


def _softmax(
    meaning: Meaning, scores: Tensor, sinks: Tensor | None, v: Tensor, jitter: Jitter | None, dout: Tensor
) -> tuple[Tensor, Tensor]:
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    top = scores.detach().amax(-1, keepdim=True).masked_fill(nothing, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True).masked_fill(nothing, 1.0)
    p = (weights / total)[..., : v.shape[2]]
    kept = _kept(meaning, scores[..., : v.shape[2]])
    p = p if kept is None else p * kept
    p = p if jitter is None else jitter.rounded(p)
    out = _values(meaning, p, v)
    lse = (top + torch.log(total)).masked_fill(nothing, -torch.inf).squeeze(-1)
    if jitter is not None:
        # Backward sums dout * v and dout * out over features, the latter rounded already; their difference may be 0.
        products = (dout.square() @ v.detach().square().mT).sqrt()
        p.register_hook(lambda g: g + 2 * jitter.wide * products * jitter.noise(g))
        size = (jitter.narrow + 2 * jitter.wide) * (dout * out.detach()).norm(dim=-1, keepdim=True) / total.detach()
        total.register_hook(lambda g: g + size * jitter.noise(g))
        # Backward makes p again from lse, a rounded number of the size of the scores: the row's p are all off alike.
        level = 2 * jitter.wide * (1 + lse.detach().abs().masked_fill(nothing.squeeze(-1), 0.0)).unsqueeze(-1)
        out.register_hook(lambda g: g * (1 + level * jitter.noise(level)))
        out = jitter.rounded(out)
    return out, lse


def _values(meaning: Meaning, p: Tensor, v: Tensor) -> Tensor:
    if meaning.v_from is None and "v" not in meaning.cut:
        return p @ v
    assert meaning.remote is not None
    far = v.detach() if "v" in meaning.cut else v
    far = far if meaning.v_from is None else far[:, :, meaning.v_from]
    return p.masked_fill(meaning.remote, 0.0) @ v + p.masked_fill(~meaning.remote, 0.0) @ far


def _kept(meaning: Meaning, scores: Tensor) -> Tensor | None:
    dropout = None if meaning.scoring is None else meaning.scoring.dropout
    if dropout is None:
        return None
    b, h, q, kv = (i.expand(scores.shape).contiguous() for i in _index(scores, None, None))
    if meaning.seeds is None:
        return dropout.factor(b, h, q, kv, scores.dtype)
    kept = torch.zeros_like(scores)
    for seed in meaning.seeds.unique().tolist():
        factor = Dropout(dropout.p, int(seed)).factor(b, h, q, kv, scores.dtype)
        kept = torch.where((meaning.seeds == seed).view(-1, 1), factor, kept)
    return kept


def _mean_of_blocks(scores: Tensor, owner: Tensor, v: Tensor) -> Tensor:
    total, count = torch.zeros_like(scores[..., :1]) * v[..., :1, :], torch.zeros_like(scores[..., :1])
    for rank in owner.unique().tolist():
        part = scores.masked_fill(owner != rank, -torch.inf)
        some = (part > -torch.inf).any(-1, keepdim=True)
        p = torch.softmax(part.masked_fill(~some, 0.0), -1) * some
        total, count = total + p @ v, count + some
    return total / count.clamp(min=1)
