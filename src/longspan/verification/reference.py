"""The dense float64 reference of an attention call on one device, and how far rounding may move a correct result.

A `Meaning` can also describe a common mistake, whose result is then compared with the observed one. Shapes: B batch
rows, H heads, S tokens, D features, E features of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.layouts import Layout
from longspan.scoring.pipeline import Dropout, Scoring, Swap
from longspan.tile import accumulation_dtype
from longspan.verification.report import Check

# -- Rounding budgets, measured by random rounding ---------------------------------------------------------------------
# The reference runs again in float64 with every number that a careful implementation rounds moved by up to one rounding
# of its dtype. Hard inputs (large scores, cancellation, long sums) get the budget they need, easy ones no more.


TOTAL, ROW = 4.0, 16.0
"""Factors on the measured effect of one rounding: for a whole tensor (its norm), and for the worst single row.

Chosen from correct runs: 300 random ones in four dtypes used at most 0.33 of their budgets, 80 with scores of hundreds
to thousands in float32 at most 0.52. A single row has few numbers, so chance does not average out.
"""
SAMPLES = 5
"""Number of runs with random rounding."""


@dataclass(frozen=True)
class Budget:
    """The largest error allowed for a tensor: in all, and row by row along its tokens (None without tokens)."""

    total: float
    rows: Tensor | None


HUGE = 1e30
"""Larger numbers, such as finfo.min for logits of padding, compare as infinite."""


def comparable(x: Tensor) -> Tensor:
    """Return a tensor in float64 on the CPU; complex numbers as pairs, numbers beyond `HUGE` as infinite.

    >>> comparable(torch.tensor([1 + 2j])).tolist(), comparable(torch.tensor([-3e38])).tolist()
    ([[1.0, 2.0]], [-inf])
    """
    x = x.detach().to_dense()
    x = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double().cpu()
    return torch.where(x.abs() > HUGE, x.sign() * torch.inf, x)


def unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def units(dtype: torch.dtype) -> tuple[float, float]:
    """Return one rounding of the tensors, and of statistics and sums."""
    return unit(dtype), unit(accumulation_dtype(dtype))


def budgets(
    truth: dict[str, Tensor], samples: Sequence[dict[str, Tensor]], dim: int | None, smallest: float, factor: float
) -> dict[str, Budget]:
    """Return the budget of every tensor from samples of the truth with rounding; `dim` is the token dimension.

    `smallest` is a relative error that is always allowed, of numbers that rounding moves: constants may be large.
    """
    by_name: dict[str, Budget] = {}
    for name, right in truth.items():
        squares = torch.stack([squared_differences(sample[name], right) for sample in samples]).mean(0)
        rounded = right.isfinite() & ((squares > 0) | ~squares.any())
        floor = smallest * float(right[rounded].norm()) + 1e-300
        total = factor * (TOTAL * float(squares.sum().sqrt()) + floor)
        rows = None
        if dim is not None and right.ndim > dim:
            by_row = _by_row(squares, dim)
            least = (by_row.mean() / 8).clamp(min=0)  # for a row that is 0 by cancellation
            rows = factor * (ROW * torch.maximum(by_row, least).sqrt() + floor)
        by_name[name] = Budget(total, rows)
    return by_name


def compare_tensor(
    observed: Tensor, right: Tensor, budget: Budget, name: str, dim: int = 2
) -> tuple[Check, Tensor | None]:
    """Return the check, and each row's error over its budget; values finite on one side only are infinitely far off."""
    squares = squared_differences(observed, right)
    check = Check(name, float(squares.sum().sqrt()), budget.total)
    if budget.rows is None:
        return check, None
    rows = _by_row(squares, dim).sqrt()
    ratio = torch.where(rows > 0, rows / budget.rows, torch.zeros_like(rows)).nan_to_num(torch.inf, posinf=torch.inf)
    if check.ratio <= 1 < float(ratio.max() if ratio.numel() else 0):  # one row is wrong, too few to show in the norm
        worst = int(ratio.argmax())
        check = Check(name, float(rows[worst]), float(budget.rows[worst]))
    return check, ratio


def distance(observed: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two tensors; see `squared_differences`."""
    return float(squared_differences(observed, expected).sum().sqrt())


def squared_differences(observed: Tensor, right: Tensor) -> Tensor:
    """Return squared differences, infinite where one is not finite and the other is not the same."""
    observed, right = observed.double(), right.double()
    same = (observed == right) | (observed.isnan() & right.isnan())
    difference = torch.where(same, torch.zeros_like(right), observed - right)
    return difference.square().nan_to_num(torch.inf, posinf=torch.inf)


def _by_row(squares: Tensor, dim: int) -> Tensor:
    return squares.movedim(dim, 0).flatten(1).sum(1)


# -- Token positions as tensors, and masks with common mistakes, in global positions -----------------------------------


@dataclass(frozen=True, eq=False)
class Places:
    """For every global position: its rank, its slot there, and its index in the concatenated shards."""

    owner: Tensor
    slot: Tensor
    joined: Tensor
    counts: tuple[int, ...]

    @staticmethod
    def of(layout: Layout) -> Places:
        rank, slot = layout.locate(np.arange(layout.seq_len, dtype=np.int64))
        before = np.cumsum(layout.num_tokens) - layout.num_tokens
        owner, at, joined = (torch.as_tensor(np.ascontiguousarray(x)) for x in (rank, slot, before[rank] + slot))
        return Places(owner, at, joined, tuple(layout.num_tokens.tolist()))

    @property
    def size(self) -> int:
        return len(self.counts)

    @property
    def remote(self) -> Tensor:
        """Return pairs (S, S) of different ranks."""
        return self.owner[:, None] != self.owner

    @property
    def are_equal(self) -> bool:
        return len(set(self.counts)) == 1

    def neighbour(self, shift: int) -> Tensor:
        """Return the position in the same slot of the rank `shift` after each position's own (equal shards)."""
        at = torch.empty(self.size, max(self.counts), dtype=torch.int64)
        at[self.owner, self.slot] = torch.arange(len(self.owner))
        return at[(self.owner + shift) % self.size, self.slot]


WrongMask = tuple[str, str, Tensor]
"""Cause, evidence, and which pairs (B, H, S, S) attend."""


def mask_mistakes(seen: Tensor, places: Places) -> Iterator[WrongMask]:
    """Yield masks that a broken integration may have used in place of `seen`, the likeliest first."""
    at = torch.arange(seen.shape[2])
    causal = (at[:, None] >= at).expand_as(seen)
    is_causal = bool((seen <= causal).all())
    joined = _same_component(seen)
    result = "The result is that of"
    text = f"{result} the same documents without a window: every token sees all it is connected with."
    yield "window dropped", text, joined & causal if is_causal else joined
    yield "mask replaced by plain causal", f"{result} a plain causal mask.", causal
    yield "documents leak", f"{result} the same offsets without documents.", _same_offsets(seen)
    if is_causal:
        yield "the future is seen", f"{result} a mask which also shows later tokens.", seen | seen.mT
    else:
        yield "mask made causal", f"{result} the mask without the pairs that look ahead.", seen & causal
    yield "mask dropped", f"{result} no mask: every token sees every token.", torch.ones_like(seen)
    if places.size > 1:  # mistakes that come from shards
        near, slot, joined = ~places.remote, places.slot, places.joined
        local = ((slot[:, None] >= slot) & near).expand_as(seen)
        last = slot + len(slot) - torch.tensor(places.counts)[places.owner]
        alone = "no exchange between ranks"
        yield alone, f"{result} ranks which see their own tokens only, under the right mask.", seen & near
        yield alone, f"{result} plain causal attention over each rank's own shard.", causal & near
        yield alone, f"{result} causal attention in local order over each rank's own shard.", local
        yield alone, f"{result} full attention over each rank's own shard.", near.expand_as(seen)
        order = "K/V in wrong order"
        yield order, f"{result} the mask over keys in rank order, not in global order.", seen[..., joined]
        yield order, f"{result} a causal mask over keys in rank order.", causal[..., joined]
        by_slot, text = "mask sees local positions", f"{result} the mask evaluated at each query's place in its shard"
        yield by_slot, f"{text}, and keys in rank order.", seen[:, :, slot][..., joined]
        yield by_slot, f"{text}, and keys in global order.", seen[:, :, slot]
        text = f"{result} a causal mask that"
        yield by_slot, f"{text} starts at every shard's first row.", causal[:, :, slot][..., joined]
        yield by_slot, f"{text} ends at every shard's last row.", causal[:, :, last][..., joined]
        for shift in range(1, places.size):
            text = f"{result} ranks which never see the keys of the rank {shift} after them."
            hop = places.owner != (places.owner[:, None] + shift) % places.size
            yield "keys of some ranks missing", text, seen & hop
    if seen.shape[1] > 1:
        yield "one head's mask used for all", f"{result} head 0's mask for every head.", seen[:, :1].expand_as(seen)
    if seen.shape[0] > 1:
        yield "one row's mask used for all", f"{result} batch row 0's mask for every row.", seen[:1].expand_as(seen)


def _same_component(seen: Tensor) -> Tensor:
    """Return pairs of tokens that are connected through any number of allowed pairs, row by batch row."""
    linked = (seen | seen.mT).any(1)
    size = linked.shape[-1]
    label = torch.arange(size).expand(linked.shape[:2]).clone()
    while True:
        reached = torch.where(linked, label[:, None, :], size).amin(-1)
        new = torch.minimum(label, reached)
        if torch.equal(new, label):
            return (label[:, :, None] == label[:, None, :])[:, None].expand_as(seen)
        label = new


def _same_offsets(seen: Tensor) -> Tensor:
    """Return pairs whose distance is allowed anywhere."""
    size = seen.shape[-1]
    diagonals = [seen.diagonal(-d, 2, 3).any(-1) for d in range(1 - size, size)]
    at = torch.arange(size)
    return torch.stack(diagonals, -1)[:, :, at[:, None] - at + size - 1]


# -- Meanings and their dense results ----------------------------------------------------------------------------------


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Whole q, k, v, and the gradient of the output."""
Answer = dict[str, Tensor]
"""Tensors by name: out, lse, dq, dk, dv, and gradients of captured tensors."""


@dataclass(frozen=True, eq=False)
class Meaning:
    """Everything beyond q, k and v that determines the result; None where a call has no such option."""

    seen: Tensor
    """Which pairs attend (B, H, S, S)."""
    scale: float
    scoring: Scoring | None = None
    sinks: Tensor | None = None
    names: tuple[str, ...] = ()
    """Of captured tensors, and of sinks last."""
    q_at: Tensor | None = None
    """The position that score functions see for each query (S); its own, unless a mistake is simulated."""
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
    """Random rounding in float64: every number that a careful implementation rounds moves by that much."""

    narrow: float
    """The relative error of one rounding to the dtype of the tensors."""
    wide: float
    """The same for scores, statistics and sums."""
    draw: torch.Generator

    def noise(self, like: Tensor) -> Tensor:
        noise = torch.rand(like.shape, generator=self.draw, dtype=torch.float64) * 2 - 1
        return noise.to(like.device)

    def add_rounding(self, x: Tensor, unit: float | None = None) -> Tensor:
        """Return the tensor with each number off by up to one rounding."""
        return x * (1 + (self.narrow if unit is None else unit) * self.noise(x))

    def scores(self, scores: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return scores whose products were rounded, and whose statistics (lse) are numbers of their size."""
        summed = abs(scale) * (q.detach().square() @ k.detach().square().mT).sqrt()
        return scores + self.wide * (summed + scores.detach().abs()) * self.noise(scores)


def reference_result(
    meaning: Meaning, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, jitter: Jitter | None = None
) -> Answer:
    """Return output, lse and all gradients."""
    if meaning.is_swapped:
        k, v = v, k
    q, k, v = leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scoring = meaning.scoring
    captured = () if scoring is None else scoring.captured
    swap = Swap(captured, [t.detach().double() for t in captured])
    sinks = None if meaning.sinks is None else meaning.sinks.detach().cpu().double().requires_grad_()
    out, lse = _forward(meaning, (q, k, v), sinks, swap, jitter, dout.double())
    shared = swap.leaves + ([] if sinks is None else [sinks])
    gradients = torch.autograd.grad(out, [*leaves, *shared], dout.double(), allow_unused=True)
    grads = [
        (torch.zeros_like(t) if g is None else g).cpu() for g, t in zip(gradients, [*leaves, *shared], strict=True)
    ]
    if meaning.is_swapped:
        grads[1], grads[2] = grads[2], grads[1]
    tensors = [out.detach(), lse.detach(), *grads]
    if jitter is not None:
        tensors = [tensors[0], jitter.add_rounding(lse.detach(), jitter.wide), *map(jitter.add_rounding, grads)]
    return dict(zip(("out", "lse", "dq", "dk", "dv", *meaning.names), tensors, strict=True))


def _forward(
    meaning: Meaning, inputs: tuple[Tensor, Tensor, Tensor], sinks: Any, swap: Swap, jitter: Jitter | None, dout: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat(1, group, 1, 1) if meaning.is_tiled else t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k.mT
    if set(meaning.cut) & {"q", "k"}:
        left, right = (t.detach() if name in meaning.cut else t for name, t in (("q", q), ("k", k)))
        scores = torch.where(meaning.remote, left @ right.mT, scores)  # type: ignore[arg-type]
    scores = meaning.scale * scores
    if jitter is not None:
        scores = jitter.scores(scores, q, k, meaning.scale)
    scores = _apply_score(meaning, scores, swap)
    if jitter is not None:
        scores.register_hook(jitter.add_rounding)
    scores = scores.masked_fill(~meaning.seen, -torch.inf)
    if meaning.empty_mean:
        scores = torch.where(~meaning.seen.any(-1, keepdim=True), torch.zeros_like(scores), scores)
    if meaning.blocks is not None:
        return _mean_of_blocks(scores, meaning.blocks, v), torch.logsumexp(scores.detach(), -1)
    return _softmax(meaning, scores, sinks, v, jitter, dout)


def _apply_score(meaning: Meaning, scores: Tensor, swap: Swap) -> Tensor:
    if meaning.scoring is None:
        return scores
    # The reference is computed on the CPU, but tensors that the functions read may be on another device.
    like = meaning.scoring.like
    there = scores if like is None else scores.to(like.device)
    index = _index(there, meaning.q_at, meaning.kv_at)
    return meaning.scoring.on_tile(there, index, swap.run).to(scores.device)


def _index(scores: Tensor, q_at: Tensor | None, kv_at: Tensor | None) -> Inputs:
    b, h, s, _ = (torch.arange(n, device=scores.device) for n in scores.shape)
    q, kv = (s if at is None else at.to(s.device) for at in (q_at, kv_at))
    return b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q.view(1, 1, -1, 1), kv.view(1, 1, 1, -1)


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
    factor = _dropout_factor(meaning, scores[..., : v.shape[2]])
    p = p if factor is None else p * factor
    p = p if jitter is None else jitter.add_rounding(p)
    if meaning.v_from is None and "v" not in meaning.cut:
        out = p @ v
    else:
        assert meaning.remote is not None
        far = v.detach() if "v" in meaning.cut else v
        far = far if meaning.v_from is None else far[:, :, meaning.v_from]
        out = p.masked_fill(meaning.remote, 0.0) @ v + p.masked_fill(~meaning.remote, 0.0) @ far
    lse = (top + torch.log(total)).masked_fill(nothing, -torch.inf).squeeze(-1)
    if jitter is not None:
        # Backward sums dout * v and dout * out over features, the latter rounded already; their difference may be 0.
        products = (dout.square() @ v.detach().square().mT).sqrt()
        p.register_hook(lambda g: g + 2 * jitter.wide * products * jitter.noise(g))
        size = (jitter.narrow + 2 * jitter.wide) * (dout * out.detach()).norm(dim=-1, keepdim=True) / total.detach()
        total.register_hook(lambda g: g + size * jitter.noise(g))
        # Backward recomputes p from lse, a rounded number of the size of the scores: all p of the row are off equally.
        level = 2 * jitter.wide * (1 + lse.detach().abs().masked_fill(nothing.squeeze(-1), 0.0)).unsqueeze(-1)
        out.register_hook(lambda g: g * (1 + level * jitter.noise(level)))
        out = jitter.add_rounding(out)
    return out, lse


def _dropout_factor(meaning: Meaning, scores: Tensor) -> Tensor | None:
    dropout = None if meaning.scoring is None else meaning.scoring.dropout
    if dropout is None:
        return None
    b, h, q, kv = (i.expand(scores.shape).contiguous() for i in _index(scores, None, None))
    if meaning.seeds is None:
        return dropout.factor(b, h, q, kv, scores.dtype)
    factors = torch.zeros_like(scores)
    for seed in meaning.seeds.unique().tolist():
        factor = Dropout(dropout.p, int(seed)).factor(b, h, q, kv, scores.dtype)
        factors = torch.where((meaning.seeds == seed).view(-1, 1), factor, factors)
    return factors


def _mean_of_blocks(scores: Tensor, owner: Tensor, v: Tensor) -> Tensor:
    total, count = torch.zeros_like(scores[..., :1]) * v[..., :1, :], torch.zeros_like(scores[..., :1])
    for rank in owner.unique().tolist():
        part = scores.masked_fill(owner != rank, -torch.inf)
        some = (part > -torch.inf).any(-1, keepdim=True)
        p = torch.softmax(part.masked_fill(~some, 0.0), -1) * some
        total, count = total + p @ v, count + some
    return total / count.clamp(min=1)
