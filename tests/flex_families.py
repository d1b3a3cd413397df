"""Families of FlexAttention calls: score functions, captured tensors, masks, shapes and layouts, with a dense oracle.

The oracle computes all scores in float64 and calls score and mask functions on one pair at a time (four nested
`torch.vmap`), as PyTorch defines them. It shares no code with longspan.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    noop_mask,
    or_masks,
)

F64 = torch.float64
MINUS_INF = float("-inf")
LENGTH, HEADS, BATCH = 22, 4, 2
BLOCK = 8


@dataclass(frozen=True)
class Case:
    """One call: functions, sizes, and how its mask is built."""

    score: Any = None
    mask: Any = None
    learned: tuple[Tensor, ...] = ()
    """Tensors behind the score function that get a gradient."""
    block: Callable[..., Any] | None = None
    """Builds the block mask of a case; None: `create_block_mask` with `created`."""
    created: dict[str, Any] = field(default_factory=lambda: {"BLOCK_SIZE": BLOCK})
    listed: Tensor | None = None
    """Pairs in listed blocks, if the block lists hide more than the mask function."""
    batch: int = BATCH
    heads: int = HEADS
    groups: int = HEADS
    queries: int = LENGTH
    keys: int = LENGTH
    dim: int = 8
    v_dim: int = 8
    key_batch: int = BATCH
    scale: float | None = None
    in_eager: bool = True
    """Whether PyTorch's eager operator computes the same."""
    takes: Callable[..., Any] | None = None
    """Returns the score function and learned tensors, given q, k and v."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        keys = self.key_batch, self.groups, self.keys
        return (self.batch, self.heads, self.queries, self.dim), (*keys, self.dim), (*keys, self.v_dim)

    @property
    def fits_plan(self) -> bool:
        return self.queries == self.keys and self.batch == self.key_batch

    def inputs(self, seed: int, dtype: torch.dtype = F64) -> list[Tensor]:
        """Return random q, k, v and gradients of output and lse."""
        draw = torch.Generator().manual_seed(seed)
        out = self.batch, self.heads, self.queries, self.v_dim
        shapes = *self.shapes, out, out[:3]
        return [torch.randn(shape, generator=draw, dtype=F64).to(dtype) for shape in shapes]

    def block_mask(self) -> Any:
        if self.block is not None:
            return self.block(self)
        if self.mask is None:
            return None
        given = {"B": self.batch, "H": self.heads, "device": "cpu"} | self.created
        return create_block_mask(self.mask, Q_LEN=self.queries, KV_LEN=self.keys, **given)

    def seen(self) -> Tensor:
        """Return which pairs may attend, (B, H, Q, K)."""
        shape = self.batch, self.heads, self.queries, self.keys
        seen = torch.ones(shape, dtype=torch.bool)
        if self.mask is not None:
            seen = pair_by_pair(lambda _, *at: self.mask(*at), torch.zeros(shape, dtype=F64)).expand(shape)
        return seen if self.listed is None else seen & self.listed


# -- the oracle --------------------------------------------------------------------------------------------------------


def pair_by_pair(function: Callable[..., Tensor], scores: Tensor) -> Tensor:
    """Return a function's value for every pair; it gets five scalars at a time."""
    keys = (0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, None, None)
    for dims in keys:
        function = torch.vmap(function, in_dims=dims)
    return function(scores, *(torch.arange(size) for size in scores.shape))


def dense(case: Case, q: Tensor, k: Tensor, v: Tensor, score: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, lse and maxima of a case; rows without a finite score: 0 and -inf."""
    k, v = (t.expand(case.batch, -1, -1, -1).repeat_interleave(case.heads // case.groups, 1) for t in (k, v))
    scores = q @ k.mT * (case.dim**-0.5 if case.scale is None else case.scale)
    if score is not None:
        scores = pair_by_pair(score, scores).to(q.dtype)
    scores = scores.masked_fill(~case.seen(), MINUS_INF)
    top = scores.detach().amax(-1)
    nothing = top == MINUS_INF
    weights = torch.exp(scores - top.masked_fill(nothing, 0.0).unsqueeze(-1))
    total = weights.sum(-1).masked_fill(nothing, 1.0)
    lse = (top.masked_fill(nothing, 0.0) + total.log()).masked_fill(nothing, MINUS_INF)
    return weights / total.unsqueeze(-1) @ v, lse, top


# -- score functions ---------------------------------------------------------------------------------------------------

Builder = Callable[[Callable[..., Tensor]], Case]
FAMILIES: dict[str, dict[str, Builder]] = {}
"""family: {name: function that builds a case, given a function that draws float64 tensors}."""


def family(name: str, number: int) -> Callable[[Callable[[], dict[str, Builder]]], None]:
    """Register a family, and check how many cases it has: a case that is lost would go unnoticed."""

    def register(build: Callable[[], dict[str, Builder]]) -> None:
        FAMILIES[name] = build()
        assert len(FAMILIES[name]) == number, f"{name}: {len(FAMILIES[name])}"

    return register


def causal(b, h, q, kv):
    return q >= kv


class Mask(torch.autograd.Function):
    """Hides pairs by a function with its own derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score, seen):
        return torch.where(seen, score, MINUS_INF)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(ctx.saved_tensors[0], gradient, 0.0), None


class Slope(torch.nn.Module):
    """A score function that is a module."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(slopes)

    def forward(self, score, b, h, q, kv):
        return score - self.slopes[h] * (q - kv).abs()

    def method(self, score, b, h, q, kv):
        return self(score, b, h, q, kv)


def scaled(score, b, h, q, kv, by=1.0, shift=0):
    return score * by + shift * (q - kv)


def hide(seen: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the score function that sets hidden pairs to minus infinity."""
    return lambda s, b, h, q, kv: torch.where(seen(b, h, q, kv), s, MINUS_INF)


def relative(s, b, h, q, kv):
    return s + (q - kv)


def grid(at):
    return at / 5, at % 5  # a true division: rows of a picture are fractions


def near_in_picture(b, h, q, kv):
    (row, column), (other_row, other_column) = grid(q), grid(kv)
    return ((row - other_row).abs() <= 2) | ((column - other_column).abs() <= 1)


@family("score functions", 34)
def _() -> dict[str, Builder]:
    plain = {
        "identity": lambda s, b, h, q, kv: s,
        "times two": lambda s, b, h, q, kv: s * 2,
        "squared": lambda s, b, h, q, kv: s * s,
        "cubed by pow": lambda s, b, h, q, kv: s**3,
        "causal": hide(causal),
        "inverse causal": hide(lambda b, h, q, kv: q <= kv),
        "relative": relative,
        "relative causal": lambda s, b, h, q, kv: torch.where(q >= kv, s + (q - kv), MINUS_INF),
        "alibi": lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
        "window": hide(lambda b, h, q, kv: (q + 3 >= kv) & (q - kv < 9)),
        "trigonometric": lambda s, b, h, q, kv: torch.sin(torch.cos(s)) + torch.tan(b),
        "trigonometric, used twice": lambda s, b, h, q, kv: torch.cos(s) * torch.sin(s) + torch.tan(b),
        "silu": lambda s, b, h, q, kv: functional.silu(s),
        "soft cap": lambda s, b, h, q, kv: 3.0 * torch.tanh(s / 3.0),
        "even keys": hide(lambda b, h, q, kv: kv % 2 == 0),
        "composition": lambda s, b, h, q, kv: hide(lambda *at: at[2] <= at[3])(relative(s, b, h, q, kv), b, h, q, kv),
        "floor division": lambda s, b, h, q, kv: s - q // (1 + kv),
        "true division": hide(near_in_picture),
        "no score": lambda s, b, h, q, kv: (q - kv).abs() * -0.1,
        "own derivative": lambda s, b, h, q, kv: Mask.apply(s, q <= kv),
        "in place": lambda s, b, h, q, kv: s.mul_(2).add_(h),
        "clamped": lambda s, b, h, q, kv: s.clamp(-0.5, 0.5) + s.clamp_min(0),
        "detached": lambda s, b, h, q, kv: s * s.detach(),
        "without gradient": lambda s, b, h, q, kv: torch.zeros_like(s) - (q - kv).abs(),
        "new zeros": lambda s, b, h, q, kv: s + h.new_zeros(h.shape) + s.new_ones(()),
        "boolean added": lambda s, b, h, q, kv: s + (q >= kv),
        "narrower result": lambda s, b, h, q, kv: (q - kv).float() * 0.125,
        "hidden by score": lambda s, b, h, q, kv: torch.where(s <= b + 0.5, s, MINUS_INF),
        "all batch rows differ": lambda s, b, h, q, kv: s * (b + 1) - h * 0.5,
        "partial": functools.partial(scaled, by=0.5, shift=2),
        "positions as floats": lambda s, b, h, q, kv: s - torch.log1p((q - kv).abs().to(s.dtype)),
        "nested where": lambda s, b, h, q, kv: torch.where(
            q > kv, s, torch.where(q == kv, s * 2, torch.where(kv < q + 5, s - 1, MINUS_INF))
        ),
        "maximum": lambda s, b, h, q, kv: torch.maximum(s, -s) + torch.minimum(q, kv) * 0.1,
        "large": lambda s, b, h, q, kv: s * 50 + 700,
    }
    narrower = {"no score", "narrower result"}  # PyTorch computes in the dtype of the result, float32
    return {
        name: lambda draw, name=name, score=score: Case(score, in_eager=name not in narrower)
        for name, score in plain.items()
    }


# -- captured tensors --------------------------------------------------------------------------------------------------


def lengths_to_numbers(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@family("captured tensors", 32)
def _() -> dict[str, Builder]:
    n, documents = LENGTH, lengths_to_numbers(9, 6, 7)

    def case(score: Callable[..., Any]) -> Builder:
        return lambda draw: Case(score(draw))

    def every_index(draw):
        head, row, token = draw(HEADS), draw(BATCH), draw(n)
        return lambda s, b, h, q, kv: s + token[q] + row[b] + head[h] + token[kv]

    def jagged(draw):
        starts = torch.tensor([0, 9, 15])

        def score(s, b, h, q, kv):
            return hide(causal)(s, b, h, q - starts[documents[q]], kv - starts[documents[kv]])

        return score

    def distances(draw):
        places, lengths = draw(n, 3), torch.logspace(-1, 1, HEADS, dtype=F64)

        def score(s, b, h, q, kv):
            distance = (places[q] - places[kv]).pow(2).sum(-1).add(1e-3).sqrt()
            return torch.exp(-distance / lengths[h]) * s

        return score

    def switched(draw):
        add, by = True, draw()
        return lambda s, b, h, q, kv: s + by if add else s * by

    def in_containers(draw):
        tables = {"a": [draw(n), draw(HEADS)]}
        return lambda s, b, h, q, kv: s + tables["a"][0][kv] * tables["a"][1][h]

    def video(draw):
        ends = torch.tensor([4, 13], dtype=torch.int32)
        return hide(lambda b, h, q, kv: ((q <= ends[b]) & (kv <= ends[b])) | (q >= kv))

    def indexed(table, at):
        return lambda draw: Case((lambda t: lambda s, b, h, q, kv: s + at(t, b, h, q, kv))(table(draw)))

    return {
        "head scale": case(lambda draw: (lambda t: lambda s, b, h, q, kv: s * t[h])(draw(HEADS))),
        "every index": case(every_index),
        "two indices in turn": indexed(lambda draw: draw(BATCH, n), lambda t, b, h, q, kv: t[b][q]),
        "three indices in turn": indexed(lambda draw: draw(3, BATCH, HEADS, n), lambda t, b, h, q, kv: t[0][b, h][q]),
        "an index that is captured": indexed(
            lambda draw: (draw(BATCH, HEADS, 3, n), torch.tensor(2)), lambda t, b, h, q, kv: t[0][b][h][t[1], q]
        ),
        "table of pairs": indexed(lambda draw: draw(n, n), lambda t, b, h, q, kv: t[q, kv]),
        "table of rows and pairs": indexed(lambda draw: draw(BATCH, n, n), lambda t, b, h, q, kv: t[b, q, kv]),
        "full table": indexed(lambda draw: draw(BATCH, HEADS, n, n), lambda t, b, h, q, kv: t[b, h, q, kv]),
        "transposed view": indexed(lambda draw: draw(n, n).T, lambda t, b, h, q, kv: t[q, kv]),
        "expanded view": indexed(lambda draw: draw(1, n).expand(BATCH, n), lambda t, b, h, q, kv: t[b, kv]),
        "strided view": indexed(lambda draw: draw(2 * n, 2)[::2, 1], lambda t, b, h, q, kv: t[kv]),
        "relative table": indexed(lambda draw: draw(2 * n), lambda t, b, h, q, kv: t[q - kv + n]),
        "negative index": indexed(lambda draw: draw(2 * n), lambda t, b, h, q, kv: t[q - kv]),
        "blocks of keys": indexed(lambda draw: draw(BATCH, n, n // 4 + 1), lambda t, b, h, q, kv: t[b, q, kv // 4]),
        "integer table": indexed(lambda draw: torch.arange(n, dtype=torch.int32) % 5, lambda t, b, h, q, kv: t[kv]),
        "integer scalar": indexed(lambda draw: torch.ones((), dtype=torch.int32), lambda t, b, h, q, kv: t),
        "scalar": indexed(lambda draw: draw(), lambda t, b, h, q, kv: t * kv),
        "boolean table added": indexed(lambda draw: draw(n, n) > 0, lambda t, b, h, q, kv: t[q, kv]),
        "reduced": indexed(lambda draw: draw(BATCH, 8), lambda t, b, h, q, kv: t[b].sum(dim=-1)),
        "reduced outside of the pair": indexed(lambda draw: draw(n), lambda t, b, h, q, kv: t.softmax(0)[kv]),
        "narrow table": indexed(lambda draw: draw(1).abs().half(), lambda t, b, h, q, kv: torch.log(t[0])),
        "bfloat16 tables": indexed(lambda draw: draw(2, n).bfloat16(), lambda t, b, h, q, kv: t[0, q] + t[1, kv]),
        "index_select": indexed(
            lambda draw: draw(n), lambda t, b, h, q, kv: torch.index_select(t, 0, kv.flatten()).view(kv.shape)
        ),
        "embedding": indexed(lambda draw: draw(n, 2), lambda t, b, h, q, kv: functional.embedding(q, t)[..., 1]),
        "documents": case(lambda draw: hide(lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv]))),
        "two halves": case(lambda draw: (lambda t: hide(lambda b, h, q, kv: t[q] == t[kv]))(torch.arange(n) >= n // 2)),
        "video": case(video),
        "jagged": case(jagged),
        "distances": case(distances),
        "switched": case(switched),
        "in containers": case(in_containers),
        "dot product": case(
            lambda draw: (lambda t: lambda s, b, h, q, kv: s + (t[q] * t[kv]).sum(-1))(draw(n, 3)),
        ),
    }  # fmt: skip


# -- captured tensors with gradients -----------------------------------------------------------------------------------


@family("learned tensors", 34)
def _() -> dict[str, Builder]:
    n = LENGTH

    def case(shape, score, dtype=F64, **more) -> Builder:
        def build(draw):
            table = draw(*shape).to(dtype).requires_grad_()
            return Case(lambda s, b, h, q, kv: score(s, table, b, h, q, kv), learned=(table,), **more)

        return build

    def added(shape, at, **more) -> Builder:
        return case(shape, lambda s, t, b, h, q, kv: s + at(t, b, h, q, kv), **more)

    def two(first, second) -> Builder:
        def build(draw):
            x, y = draw(n).to(first).requires_grad_(), draw(n).to(second).requires_grad_()
            return Case(lambda s, b, h, q, kv: s + x[q] + y[kv], learned=(x, y))

        return build

    def offsets(draw):
        table, at = draw(n).requires_grad_(), (draw(n).abs() * 7).long() % n
        return Case(lambda s, b, h, q, kv: s + table[at[q]], learned=(table,))

    def network(draw):
        """Tables that a small network computes: the gradient goes through it."""
        first, last, gate = (draw(*shape).requires_grad_() for shape in ((2, 6), (6, HEADS), (HEADS,)))
        places = draw(n, 2)
        table, share = torch.tanh(places @ first) @ last, torch.sigmoid(gate)
        return Case(
            lambda s, b, h, q, kv: s + share[h] * (table[q, h] - table[kv, h]) * (q >= 2), learned=(first, last, gate)
        )

    def module(bound: bool) -> Builder:
        def build(draw):
            slope = Slope(draw(HEADS))
            return Case(slope.method if bound else slope, learned=(slope.slopes,), in_eager=bound)

        return build

    def of_queries(draw):
        """A bias from the queries, which then get two gradients."""
        table = draw(5, 8).requires_grad_()

        def takes(q, k, v):
            bias = torch.einsum("bhqd,nd->bhqn", q, table)
            return lambda s, b, h, q_idx, kv_idx: s + bias[b, h, q_idx, kv_idx // 5]

        return Case(learned=(table,), takes=takes)

    def some_frozen(draw):
        table, frozen = draw(n).requires_grad_(), draw(n)
        return Case(lambda s, b, h, q, kv: s * frozen[q] + table[kv] * frozen[kv], learned=(table,))

    return {
        "relative": added((2 * n,), lambda t, b, h, q, kv: t[torch.abs(q - kv)]),
        "sum of positions": added((2 * n,), lambda t, b, h, q, kv: t[q + kv]),
        "pairs": added((n, n), lambda t, b, h, q, kv: t[q, kv]),
        "flipped": added((n, n), lambda t, b, h, q, kv: t[kv, q]),
        "pairs in turn": added((n, n), lambda t, b, h, q, kv: t[q][kv]),
        "transposed": added((n, n), lambda t, b, h, q, kv: t.T[q, kv]),
        "heads": added((HEADS,), lambda t, b, h, q, kv: t[h]),
        "heads and pairs": added((HEADS, n, n), lambda t, b, h, q, kv: t[h, q, kv]),
        "heads and pairs, flipped": added((HEADS, n, n), lambda t, b, h, q, kv: t[h, kv, q]),
        "all": added((BATCH, HEADS, n, n), lambda t, b, h, q, kv: t[b, h, q, kv]),
        "multiplied": case((n,), lambda s, t, b, h, q, kv: s * t[q]),
        "gate": case((HEADS,), lambda s, t, b, h, q, kv: s * torch.sigmoid(t[h])),
        "window": added((9,), lambda t, b, h, q, kv: t[torch.clamp(q - kv + 4, 0, 8)]),
        "keys": added((n,), lambda t, b, h, q, kv: t[kv]),
        "constant index": added((BATCH, HEADS, 3, n), lambda t, b, h, q, kv: t[b, h, 1, q]),
        "one tensor twice": added((n,), lambda t, b, h, q, kv: t[q] + t[kv]),
        "one tensor twice, multiplied": added((n,), lambda t, b, h, q, kv: t[q] * t[kv]),
        "scalar": case((), lambda s, t, b, h, q, kv: s * t),
        "scalar and index": case((3,), lambda s, t, b, h, q, kv: s * t[0] + t[1] * h + t[2]),
        "nonlinear in the whole": added((n,), lambda t, b, h, q, kv: t.softmax(0)[kv]),
        "slices": added((n, 3), lambda t, b, h, q, kv: t[:, 1][q] + t[..., 2][kv]),
        "index_select": added((n,), lambda t, b, h, q, kv: torch.index_select(t, 0, kv.flatten()).view(kv.shape)),
        "vectors": added((n, 3), lambda t, b, h, q, kv: (t[q] * t[kv]).sum(-1)),
        "float32": added((n,), lambda t, b, h, q, kv: t[kv], dtype=torch.float32),
        "bfloat16": added((HEADS,), lambda t, b, h, q, kv: t[h], dtype=torch.bfloat16),
        "unused pairs": added((3 * n,), lambda t, b, h, q, kv: t[q + n], mask=causal),
        "two tensors": two(F64, F64),
        "two dtypes": two(F64, torch.float32),
        "indirect": offsets,
        "network": network,
        "module": module(bound=False),
        "method": module(bound=True),
        "of queries": of_queries,
        "some frozen": some_frozen,
    }


# -- masks -------------------------------------------------------------------------------------------------------------


def window(b, h, q, kv):
    return q - kv <= 6


def near_past(b, h, q, kv):
    return (q >= kv) & (q - kv <= 6)


def later(b, h, q, kv):
    return q < kv


@family("mask functions", 28)
def _() -> dict[str, Builder]:
    n, documents = LENGTH, lengths_to_numbers(9, 6, 7)
    half = torch.tensor([False, True, True, False])
    ends, table = torch.tensor([7, 15]), torch.arange(n * n).view(n, n) % 7 < 4
    rows = torch.tensor([[0] * 9 + [1] * 13, [0] * 16 + [1] * 6])
    offset, top = torch.tensor(5, dtype=torch.int32), torch.tensor(3.5)

    def near(b, h, q, kv, width):
        return (q - kv).abs() < width

    masks = {
        "none": noop_mask,
        "causal": causal,
        "inverse causal": lambda b, h, q, kv: q <= kv,
        "strictly causal": lambda b, h, q, kv: q > kv,
        "window": and_masks(causal, window),
        "causal or window": or_masks(causal, lambda b, h, q, kv: (q - kv).abs() <= 4),
        "nothing": and_masks(causal, later),
        "everything": or_masks(causal, later),
        "no masks and": and_masks(),
        "no masks or": or_masks(),
        "nested": or_masks(and_masks(causal, window), and_masks(later, lambda b, h, q, kv: kv % 5 == 0)),
        "prefix": or_masks(causal, lambda b, h, q, kv: kv < 6),
        "documents": lambda b, h, q, kv: documents[q] == documents[kv],
        "causal documents": and_masks(causal, lambda b, h, q, kv: documents[q] == documents[kv]),
        "clamped documents": lambda b, h, q, kv: documents[q.clamp(0, n - 1)] == documents[kv.clamp(0, n - 1)],
        "documents by row": lambda b, h, q, kv: rows[b, q] == rows[b, kv],
        "lengths by row": lambda b, h, q, kv: (q < ends[b]) & (kv < ends[b]),
        "odd rows see nothing": lambda b, h, q, kv: (q >= kv) & (b % 2 == 0),
        "some heads causal": lambda b, h, q, kv: half[h] & (q >= kv),
        "rows and heads": lambda b, h, q, kv: q + h >= kv + b,
        "first queries": lambda b, h, q, kv: q < n // 2,
        "last keys": lambda b, h, q, kv: kv >= n // 2,
        "two ranges of keys": lambda b, h, q, kv: (kv < 5) | (kv >= 17),
        "even keys": lambda b, h, q, kv: kv % 2 == 0,
        "table": lambda b, h, q, kv: table[q, kv],
        "picture": near_in_picture,
        "captured offset": lambda b, h, q, kv: kv + 9 >= q + offset,
        "partial": functools.partial(near, width=top),
    }
    return {name: lambda draw, mask=mask: Case(mask=mask) for name, mask in masks.items()}


@family("scores and masks", 6)
def _() -> dict[str, Builder]:
    def learned(draw):
        table = draw(HEADS, 2 * LENGTH).requires_grad_()
        return Case(
            lambda s, b, h, q, kv: s + table[h, q - kv + LENGTH], mask=and_masks(causal, window), learned=(table,)
        )

    def poisoned(draw):
        """Values at hidden pairs are nan: they are not used."""
        table = draw(LENGTH, LENGTH)
        table[torch.ones(LENGTH, LENGTH).triu(1).bool()] = torch.nan
        return Case(lambda s, b, h, q, kv: s + table[q, kv], mask=causal)

    return {
        "learned, window": learned,
        "nan at hidden pairs": poisoned,
        "score hides what the mask shows": lambda draw: Case(hide(lambda b, h, q, kv: kv % 3 == 0), mask=causal),
        "score and mask hide": lambda draw: Case(hide(lambda b, h, q, kv: q <= kv), mask=causal),
        "score and mask hide all": lambda draw: Case(hide(later), mask=causal),
        "squared, rows without keys": lambda draw: Case(
            lambda s, b, h, q, kv: s * s, mask=lambda b, h, q, kv: (q >= kv) & (q % 5 != 0)
        ),
    }


# -- block masks -------------------------------------------------------------------------------------------------------


def listed_pairs(table: Tensor, size: tuple[int, int], case: Case) -> Tensor:
    """Return the pairs of listed blocks."""
    pairs = table.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)
    return pairs[..., : case.queries, : case.keys].expand(case.batch, case.heads, -1, -1)


def by_hand(
    partial: list[list[int]], full: list[list[int]] | None, mask: Any, **more: Any
) -> Callable[[Case], BlockMask]:
    """Return a function that builds a block mask from lists of blocks, one list for each block of queries."""

    def lists(blocks: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = -(-LENGTH // BLOCK)
        counts = torch.tensor([len(row) for row in blocks], dtype=torch.int32)
        rows = [row + [-1] * (width - len(row)) for row in blocks]
        return counts[None, None], torch.tensor(rows, dtype=torch.int32)[None, None]

    def build(case: Case) -> BlockMask:
        counts = *lists(partial), *((None, None) if full is None else lists(full))
        lengths = case.queries, case.keys
        return BlockMask.from_kv_blocks(*counts, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=lengths, **more)

    return build


def sliced(case: Case, index: Any, mask: Any, lengths: tuple[int, int]) -> BlockMask:
    """Take a part of a causal block mask of 32 tokens, and give it a mask function and lengths again."""
    whole = create_block_mask(causal, 3, HEADS, 32, 32, device="cpu", BLOCK_SIZE=BLOCK)
    part = whole[index]
    part.mask_mod, part.seq_lengths = mask, lengths
    return part


@family("block masks", 28)
def _() -> dict[str, Builder]:
    triangle = [[0], [0, 1], [0, 1, 2]]
    lower = torch.ones(3, 3).tril().bool()
    holes = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()

    def sizes(size, mask=near_past, **more) -> Builder:
        return lambda draw: Case(mask=mask, created={"BLOCK_SIZE": size} | more)

    def hand(partial, full, mask, table, in_eager=True, **more) -> Builder:
        def build(draw):
            case = Case(mask=mask, block=by_hand(partial, full, mask, **more), in_eager=in_eager)
            return replace(case, listed=listed_pairs(table, (BLOCK, BLOCK), case))

        return build

    def adjusted(queries, keys) -> Builder:
        def block(case):
            whole = create_block_mask(near_past, None, None, 40, 40, device="cpu", BLOCK_SIZE=BLOCK)
            part = whole._adjust(queries, keys)
            part.seq_lengths = queries, keys
            return part

        return lambda draw: Case(mask=near_past, block=block, queries=queries, keys=keys)

    def part_of(index, mask, lengths, listed=None, **more) -> Builder:
        def build(draw):
            case = Case(
                mask=mask, block=lambda c: sliced(c, index, mask, lengths), queries=lengths[0], keys=lengths[1], **more
            )
            return case if listed is None else replace(case, listed=listed_pairs(listed, (BLOCK, BLOCK), case))

        return build

    one_row = {"batch": 1, "key_batch": 1}
    return {
        "size 1": sizes(1),
        "size 16": sizes(16),
        "size 22": sizes(LENGTH),
        "size 128": sizes(128),
        "size 96": sizes(96),
        "sizes 4 and 16": sizes((4, 16)),
        "sizes 16 and 4": sizes((16, 4)),
        "sizes 1 and 8": sizes((1, 8)),
        "all rows and heads share": sizes(BLOCK, B=None, H=None),
        "rows share": sizes(BLOCK, B=None),
        "heads share": sizes(BLOCK, H=None),
        "one row and head": sizes(BLOCK, B=1, H=1),
        "and_masks, all rows and heads share": sizes(BLOCK, and_masks(causal, window), B=None, H=None),
        "or_masks, all rows and heads share": sizes(BLOCK, or_masks(causal, window), B=None, H=None),
        "by hand": hand(triangle, None, causal, lower),
        "by hand, full and partial": hand([[0], [1], [2]], [[], [0], [0, 1]], causal, lower),
        "by hand, blocks left out": hand([[0], [1], [2, 0]], None, causal, holes, in_eager=False),
        "by hand, full blocks left out": hand([[], [], []], [[0], [1], [0, 2]], noop_mask, holes, in_eager=False),
        "by hand, a block row without blocks": hand(
            [[0], [], [2]], None, noop_mask, torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 1]]).bool(), in_eager=False
        ),
        "by hand, no lists of queries": hand(triangle, None, causal, lower, compute_q_blocks=False),
        "adjusted": adjusted(LENGTH, LENGTH),
        "adjusted, fewer queries": adjusted(5, LENGTH),
        "adjusted, fewer keys": adjusted(LENGTH, 11),
        "slice, a row": part_of((1,), causal, (32, 32), **one_row),
        "slice, a head": part_of((slice(0, 2), slice(1, 2)), causal, (32, 32)),
        "slice, a block of queries": part_of(
            (slice(0, 2), slice(None), 2), lambda b, h, q, kv: q + 17 >= kv, (1, 32),
            listed=torch.tensor([[1, 1, 1, 0]]).bool(),
        ),
        "slice, two blocks of queries": part_of(
            (slice(0, 2), slice(None), slice(1, 3)), lambda b, h, q, kv: q + 8 >= kv, (16, 32),
            listed=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]).bool(),
        ),
        "moved": lambda draw: Case(
            mask=causal, block=lambda c: create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu").to("cpu")
        ),
    }  # fmt: skip


# -- shapes and decoding -----------------------------------------------------------------------------------------------


def alibi(s, b, h, q, kv):
    return s + (kv - q) * torch.exp2(-(h + 1.0))


@family("shapes", 30)
def _() -> dict[str, Builder]:
    def case(**sizes) -> Builder:
        return lambda draw: Case(**({"score": alibi, "mask": causal} | sizes))

    everything = {"mask": None}
    return {
        "groups of 2": case(groups=2),
        "groups of 4": case(groups=1),
        "groups of 3": case(heads=6, groups=2),
        "groups, by head": case(groups=2, mask=lambda b, h, q, kv: q + 2 * h >= kv),
        "groups, not squared": case(groups=2, queries=5, keys=30),
        "more keys": case(keys=37),
        "more keys, no mask": case(keys=37, **everything),
        "more queries": case(queries=37),
        "more queries, no mask": case(queries=37, **everything),
        "more queries, no function": case(queries=37, score=None, **everything),
        "more keys, no function": case(keys=37, score=None, **everything),
        "one query, one key": case(queries=1, keys=1),
        "one query": case(queries=1, **everything),
        "one key": case(keys=1),
        "one token on each side, one head": case(queries=1, keys=1, heads=1, groups=1, batch=1, key_batch=1),
        "one batch of keys": case(key_batch=1, batch=3),
        "one batch of keys, by row": case(key_batch=1, batch=3, mask=lambda b, h, q, kv: q >= kv + b),
        "one batch of keys, groups": case(key_batch=1, batch=5, groups=2),
        "one batch of keys, more keys": case(key_batch=1, batch=2, keys=30),
        "narrow values": case(v_dim=3),
        "wide values": case(v_dim=20),
        "17 features": case(dim=17, v_dim=17),
        "24 features": case(dim=24, v_dim=24),
        "1 feature": case(dim=1, v_dim=1),
        "scale": case(scale=0.3),
        "whole scale": case(scale=1),
        "no functions": case(score=None, **everything),
        "mask alone": case(score=None),
        "no mask": case(**everything),
        "63 tokens, blocks of 128": case(queries=63, keys=63, created={}),
    }


def pages(draw: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Return a page table of 2 rows and 5 pages, and which page of a row's text a page of the cache holds."""
    table = torch.tensor([[6, 1, 4, -1, -1], [0, 3, 2, 5, 7]])
    logical = torch.full((2, 8), -1)
    for row in range(2):
        for number, page in enumerate(table[row].tolist()):
            if page >= 0:
                logical[row, page] = number
    return table, logical


@family("decoding", 17)
def _() -> dict[str, Builder]:
    cache = 75

    def case(**given) -> Builder:
        return lambda draw: Case(**({"queries": 1, "keys": cache, "created": {"BLOCK_SIZE": 16}} | given))

    def at(position, dtype=torch.int32):
        offset = torch.tensor(position, dtype=dtype)
        return lambda b, h, q, kv: q + offset >= kv

    lengths = torch.tensor([31, 68])
    half = torch.tensor([True, False, True, False])

    def captured(draw):
        q, kv, head, row = draw(1), draw(cache), draw(HEADS), draw(BATCH)
        return Case(lambda s, b, h, i, j: s + q[i] + kv[j] + head[h] + row[b], queries=1, keys=cache)

    def paged(queries, **more) -> Builder:
        """A cache of 8 pages of 9 tokens in one batch row, which two rows of text share."""

        def build(draw):
            _, logical = pages(draw)
            slopes, size = draw(HEADS), 9

            def place(b, kv):
                return logical[b, kv // size] * size + kv % size

            def mask(b, h, q, kv):
                return (logical[b, kv // size] >= 0) & (place(b, kv) <= lengths[b] - queries + q)

            def score(s, b, h, q, kv):
                return torch.where(logical[b, kv // size] >= 0, s + place(b, kv) * slopes[h], MINUS_INF)

            return Case(score, mask, queries=queries, keys=72, key_batch=1, created={"BLOCK_SIZE": size}, **more)

        return build

    return {
        "no mask": case(),
        "position": case(mask=at(40)),
        "position, last": case(mask=at(cache - 1)),
        "position, first": case(mask=at(0, torch.int64)),
        "position by row": case(mask=lambda b, h, q, kv: kv <= lengths[b] + q),
        "from a position": case(mask=lambda b, h, q, kv: kv >= q + 33),
        "three queries": case(mask=at(40), queries=3),
        "window": case(mask=lambda b, h, q, kv: (kv <= q + 40) & (kv > q + 40 - 9), score=alibi),
        "groups of 4": case(mask=at(40), groups=1, score=alibi),
        "groups of 2": case(mask=at(40), groups=2, score=alibi),
        "groups of 8": case(mask=at(40), heads=16, groups=2),
        "by head": case(mask=lambda b, h, q, kv: half[h] & (kv <= 40)),
        "blocks of 1 and 16": case(mask=at(40), created={"BLOCK_SIZE": (1, 16)}),
        "captured": captured,
        "paged": paged(1),
        "paged, three queries": paged(3),
        "paged, groups": paged(1, groups=2),
    }


def build_case(group: str, name: str) -> Case:
    draw = torch.Generator().manual_seed(sum(map(ord, group + name)))
    return FAMILIES[group][name](lambda *shape: torch.randn(shape, generator=draw, dtype=F64))
