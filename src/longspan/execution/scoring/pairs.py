"""What a kernel may ask about the pairs of one compute: the mask's function, the score function, dropout.

Kernels count local rows; here they are global positions again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.execution import _torch
from longspan.execution.scoring.captured import Swap, Totals
from longspan.execution.scoring.pipeline import Scoring
from longspan.execution.tile import Features, Tile
from longspan.masks import Predicate
from longspan.span import Ints, Span

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
            self._answers[tile] = answers.to(self.where.tensors[0].device)
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
