"""Scoring: what happens to scores between the product and the softmax, and to probabilities after it.

A score goes through the soft cap, then ALiBi, the relative bias and the bias tensor, then `score_mod`; the mask hides
pairs after that, and dropout acts on probabilities at the end. All of them get global positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan import _torch
from longspan.errors import KernelError
from longspan.layouts.layout import to_device
from longspan.masks import Predicate
from longspan.masks.captures import Reads, exclude_arguments, frozen
from longspan.masks.functions import Elementwise, check_signature, elementwise
from longspan.scoring.captured import Seen, Swap, Totals, found_in
from longspan.spans import Ints, Span
from longspan.tile import Features, Tile, wide
from longspan.validate import check_no_tangent

# -- Dropout: a hash of (seed, batch row, head, query, key) decides every pair -----------------------------------------
# It does not depend on rank, scheme, tile or order of computation, so one device and a thousand drop the same pairs.


# Multipliers of splitmix64, as signed numbers: torch has no unsigned arithmetic, but signed arithmetic wraps.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = 24


@dataclass(frozen=True)
class Dropout:
    """Every pair is dropped with probability `p`, the others are scaled by 1 / (1 - p)."""

    p: float
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral) or not 0 <= self.seed < 1 << 63:
            raise KernelError(f"dropout was given seed = {self.seed!r}. It is a whole number from 0 to 2**63 - 1.")
        if isinstance(self.p, bool) or not isinstance(self.p, Real) or not 0.0 <= self.p < 1.0:
            raise KernelError(f"dropout = {self.p} was asked for. It is a probability, 0 or more and below 1.")
        object.__setattr__(self, "p", float(self.p))  # numpy's numbers mean the same, and are written alike
        object.__setattr__(self, "seed", int(self.seed))

    def keeps(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Which pairs stay.

        >>> position = torch.arange(200)
        >>> kept = Dropout(0.25, seed=7).keeps(torch.tensor(0), torch.tensor(3), position[:, None], position)
        >>> 0.73 < kept.float().mean() < 0.77
        tensor(True)
        """
        row = _mixed(_mixed(_mixed(_mixed(torch.full_like(b, self.seed)) + b) + h) + q)
        drawn = _mixed(row + _mixed(kv * 2 + 1)) >> (64 - _BITS)
        return drawn & ((1 << _BITS) - 1) >= round(self.p * (1 << _BITS))

    def factor(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
        """What each pair's probability is multiplied by."""
        return self.keeps(b, h, q, kv).to(dtype).div_(1.0 - self.p)


def dropout_of(p: float, seed: int) -> Dropout | None:
    """Dropout with this probability and seed, both of which must make sense; None where nothing is dropped."""
    dropout = Dropout(p, seed)
    return None if dropout.p == 0.0 else dropout


def _mixed(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of the input (int64, wrapping)."""
    x = x + _GOLDEN
    x ^= (x >> 30) & ((1 << 34) - 1)  # >> keeps the sign: cut off what it brings in
    x *= _FIRST
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _SECOND
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


# -- Scoring -----------------------------------------------------------------------------------------------------------


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, b, h, q_idx, kv_idx) -> score."""
PLAIN = nullcontext()


@dataclass(frozen=True, eq=False)
class Scoring:
    """All that happens to scores and probabilities in one call."""

    functions: tuple[ScoreMod, ...]
    captured: tuple[Tensor, ...] = ()
    """Tensors that the functions use and that need a gradient, in the order of first use."""
    dropout: Dropout | None = None
    seen: tuple[Seen, ...] = ()
    """All tensors that the functions read, as far as one pair shows them."""
    reads: tuple[Reads, ...] = ()
    """What each of the functions reads."""
    like: Tensor | None = None
    """A score."""

    @staticmethod
    def of(functions: Sequence[ScoreMod], dropout: Dropout | None, like: Tensor) -> Scoring | None:
        """The functions in order; None if there is nothing to do."""
        if not functions and dropout is None:
            return None
        score = torch.zeros((), dtype=wide(like.dtype), device=like.device)
        scoring = Scoring(tuple(functions), (), dropout, like=score)
        captured, seen = found_in(lambda mode: scoring.apply(score, *scoring._pair(), mode))
        for tensor, _ in seen:
            check_no_tangent(**{f"a tensor of shape {tuple(tensor.shape)} that changes scores": tensor})
        return Scoring(scoring.functions, captured, dropout, seen, scoring._now(), score)

    def _pair(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(b, h, q_idx, kv_idx) of the first pair."""
        assert self.like is not None
        index = torch.zeros((), dtype=torch.int64, device=self.like.device)
        return index, index, index, index

    def _now(self) -> tuple[Reads, ...]:
        """What each of the functions reads now."""
        before = self.reads or (None,) * len(self.functions)
        return tuple(
            Reads.of(_called(function), partial(self._run, function), known)
            for function, known in zip(self.functions, before, strict=True)
        )

    def _run(self, function: ScoreMod, finder: Any) -> None:
        assert self.like is not None
        arguments = self.like.clone(), *self._pair()
        exclude_arguments(finder, *arguments)
        with finder:
            function(*arguments)

    def settle(self) -> None:
        """After forward: what functions changed themselves is no reason to refuse backward."""
        pairs = zip(self.reads, self.functions, strict=False)
        object.__setattr__(self, "reads", tuple(reads.settled(_called(function)) for reads, function in pairs))

    def check_unchanged(self) -> None:
        """Refuses when what the functions read has changed since forward: backward calls them again."""
        change = next(
            (change for a, b in zip(self.reads, self._now(), strict=True) if (change := a.difference(b))), None
        )
        if change is not None:
            raise KernelError(
                f"what a score function reads has changed between forward and backward, which calls it again: {change}."
                f" Backward would differentiate another attention. Run backward before the change, or give the function"
                f" a copy of what it reads."
            )

    def settled(self, score: Tensor, *index: Tensor) -> Scoring:
        """Itself, after finding out on a real tile how the user's functions want to be called."""
        for function in self.functions:
            if isinstance(function, ScoreFunction):
                with torch.no_grad():
                    function.elementwise.settle(score, *index)
        return self

    @property
    def broadcasts(self) -> bool:
        """Whether every function takes whole tiles."""
        return all(f.elementwise.broadcasts is not False for f in self.functions if isinstance(f, ScoreFunction))

    def apply(
        self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, mode: AbstractContextManager[Any] = PLAIN
    ) -> Tensor:
        """Scores after every function, each called under `mode`."""
        for function in self.functions:
            with mode:
                result = function(score, b, h, q, kv)
            if not isinstance(result, Tensor) or not result.is_floating_point() or not _fits(result, score):
                kind = (
                    f"{result.dtype} of shape {tuple(result.shape)}"
                    if isinstance(result, Tensor)
                    else type(result).__name__
                )
                raise KernelError(
                    f"score_mod got scores of shape {tuple(score.shape)} and returned {kind}. It must return a"
                    f" floating-point tensor with a score for every pair. To hide pairs use a mask."
                )
            with mode:  # what is handed on was made here, not captured
                score = result.expand(score.shape).to(score.dtype)
        return score


def _called(function: ScoreMod) -> Any:
    """The function itself, with the variables that it had when it was given."""
    return function.elementwise.function if isinstance(function, ScoreFunction) else function


def _fits(result: Tensor, score: Tensor) -> bool:
    pairs = zip(reversed(result.shape), reversed(score.shape), strict=False)
    return result.ndim <= score.ndim and all(a in (1, b) for a, b in pairs)


class ScoreFunction:
    """A user's score_mod, called on tiles; mapped over single pairs where tiles would be misread."""

    def __init__(self, function: ScoreMod) -> None:
        if not callable(function):
            raise KernelError(
                f"score_mod is a function (score, b, h, q_idx, kv_idx) -> score, but {type(function).__name__} was"
                f" given."
            )
        check_signature(function, ("score", "b", "h", "q_idx", "kv_idx"), "score_mod", KernelError)
        self.elementwise: Elementwise = elementwise(function, frozen(function))

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.elementwise(score, b, h, q, kv)


# -- The pairs of one compute: mask function, score function, dropout --------------------------------------------------
# Kernels count local rows; here they become global positions.


REMEMBERED = 32
"""Answers of a mask's function that are kept: a kernel asks again about the same tiles for the next heads."""


@dataclass(frozen=True, eq=False)
class TilePositions:
    """Global batch rows, heads and positions of the rows and columns that a compute's tiles count."""

    batch: Span
    heads: Span
    q: Ints
    kv: Ints
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """The same four as tensors of four dims that broadcast."""

    @staticmethod
    def of(batch: Span, heads: Span, q: Ints, kv: Ints, device: torch.device) -> TilePositions:
        numbers = _counted(batch), _counted(heads), q, kv
        b, h, q_idx, kv_idx = (torch.as_tensor(n, device=device) for n in numbers)
        tensors = b[:, None, None, None], h[None, :, None, None], q_idx[None, None, :, None], kv_idx[None, None, None]
        return TilePositions(batch, heads, q, kv, tensors)

    def part(self, batch: Span, heads: Span) -> TilePositions:
        """Some of the batch rows and heads, counted from the first."""
        b, h, q, kv = self.tensors
        tensors = b[batch.start : batch.stop], h[:, heads.start : heads.stop], q, kv
        return TilePositions(_inner(self.batch, batch), _inner(self.heads, heads), self.q, self.kv, tensors)

    def index(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(b, h, q_idx, kv_idx) of a tile's pairs, each of four dims, broadcasting."""
        b, h, q, kv = self.tensors
        return b, h, q[:, :, tile.q0 : tile.q1], kv[..., tile.k0 : tile.k1]


def _inner(span: Span, part: Span) -> Span:
    return Span(span.start + part.start, span.start + part.stop)


def _counted(span: Span) -> Ints:
    return np.arange(span.start, span.stop, dtype=np.int64)


class TilePairs:
    """`Pairs` of one compute: knows where its rows lie in the sequence."""

    def __init__(
        self,
        where: TilePositions,
        scoring: Scoring | None,
        predicate: Predicate | None,
        totals: Totals,
        known: dict[Any, Any] | None = None,
    ) -> None:
        self.where, self.scoring, self.predicate, self.totals = where, scoring, predicate, totals
        self.known: dict[Any, Any] = {} if known is None else known
        dropout = scoring is not None and scoring.dropout is not None
        self.features = Features(predicate is not None, scoring is not None, dropout)
        self._answers: dict[Tile, Tensor] = {}

    def part(self, batch: Span, heads: Span) -> TilePairs:
        """Some of the batch rows and heads, counted from the first."""
        part = TilePairs(self.where.part(batch, heads), self.scoring, self.predicate, self.totals, self.known)
        part._answers = self._answers  # of one plane, whatever the head
        return part

    def allowed(self, tile: Tile) -> Tensor:
        assert self.predicate is not None, "only tiles of an opaque plane ask"
        if tile not in self._answers:
            q, kv = self.where.q[tile.q0 : tile.q1], self.where.kv[tile.k0 : tile.k1]
            answers = torch.from_numpy(np.array(self.predicate.allows(q[:, None], kv[None, :])))
            if len(self._answers) >= REMEMBERED:
                self._answers.pop(next(iter(self._answers)))
            self._answers[tile] = to_device(answers, self.where.tensors[0].device)
        return self._answers[tile]

    def change(self, scores_BHqk: Tensor, tile: Tile) -> Tensor:
        assert self.scoring is not None
        index = self.where.index(tile)
        scoring = self.scoring.settled(scores_BHqk, *index)
        with torch.no_grad():
            return scoring.apply(scores_BHqk, *index)

    def pull(self, scores_BHqk: Tensor, tile: Tile) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        assert self.scoring is not None
        index = self.where.index(tile)
        scoring = self.scoring.settled(scores_BHqk, *index)
        swap = Swap(scoring.captured, self.totals.values, by_element=scoring.broadcasts)
        with _torch.recording():
            leaf = scores_BHqk.detach().requires_grad_()
            changed = scoring.apply(leaf.clone(), *index, swap)  # a function may work in place

        def pulled(gradient: Tensor) -> Tensor:
            if not changed.requires_grad:
                return torch.zeros_like(gradient)
            leaves = [leaf, *(taken for _, _, taken in swap.taken)]
            with _torch.recording():
                first, *rest = torch.autograd.grad(changed, leaves, gradient, allow_unused=True)
            for (number, at, _), grad in zip(swap.taken, rest, strict=True):
                if grad is not None:
                    self.totals.add(number, at, grad)
            return torch.zeros_like(gradient) if first is None else first

        return changed, pulled

    def factor(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        dropout = None if self.scoring is None else self.scoring.dropout
        return None if dropout is None else dropout.factor(*self.where.index(tile), dtype)
