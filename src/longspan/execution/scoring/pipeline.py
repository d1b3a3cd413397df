"""Scoring: all that happens to scores between the product and the softmax, and to probabilities after it.

A score goes through the soft cap, then ALiBi, the relative bias and the bias tensor, then `score_mod`; the mask hides
pairs after that, and dropout strikes probabilities at last. All of them see global positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.execution.inputs import check_no_tangent
from longspan.execution.scoring.captured import Seen, found_in
from longspan.execution.scoring.dropout import Dropout
from longspan.execution.tile import wide
from longspan.masks.functions.elementwise import Elementwise, check_signature, elementwise
from longspan.masks.functions.frozen import frozen
from longspan.masks.functions.reads import Reads, exclude_arguments

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
