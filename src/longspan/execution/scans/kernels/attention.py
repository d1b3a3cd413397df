"""Linear attention with decays in chunks, and the delta rule: what all recurrences but `LinearRecurrence` come down to.

Inside of a chunk that a state S enters, with decays d from its begin to each token (one head, tokens as rows):

    without the delta rule      O = d Q S + P V        P_ij = q_i . k_j (what is left of j at i), for j <= i
    with it                     the same with V' = X - W S in the place of V, where
                                (I + A) [X | W] = [beta V | beta d K]    A_ij = beta_i k_i . k_j (...), for j < i
    at the end                  S' = (decay of the chunk) S + (K, each what is left of it at the end)^T V

A chunk of two tokens, K = V = 1, all k = q = 1, beta = 1, no decay, v = 3, 5, that 2 enters: A_10 = 1, so X = 3, 5 - 3
and W = 1, 0; V' = 3 - 2, 2; O = 2 + 1, 2 + 1 + 2. The delta rule with beta 1 reads what was written last: 3, 5.

Shapes: N chunks, S segments, J key heads, R heads that share one, C tokens of a chunk, K and V features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import hardshrink, pad

from longspan.execution.scans.kernels.chunks import ChunkTable
from longspan.execution.scans.kernels.decays import LEAST, Decays

Step = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ChunkedDecays:
    """Tokens in chunks, in the dtype of states: what is left of states that go through them, without the delta rule."""

    table: ChunkTable
    g: Tensor
    """(N, J, R, C, 1 or K)"""

    @cached_property
    def decays(self) -> Decays:
        return Decays.of(self.g)

    def passed(self) -> Tensor:
        """(S, H, 1 or K, 1): what is left of states that went through whole segments, M."""
        sums = self.decays.sums[..., -1, :].unsqueeze(-1)
        parts = sums.split(self.table.steps)
        start = sums.new_zeros(len(self.table.order), *sums.shape[1:]).flatten(1, 2)
        return self.decays.exp(self._carried(start, lambda number, state: state + parts[number])[1])

    def _carried(self, states: Tensor, step: Step) -> tuple[list[Tensor], Tensor]:
        """States (S, H, ...), which steps see as (S, J, R, ...)."""
        before, after = self.table.carry(self._grouped(states), step)
        return before, after.flatten(1, 2)

    def _grouped(self, states: Tensor) -> Tensor:
        return states.unflatten(1, self.g.shape[1:3])


@dataclass(frozen=True, eq=False)
class ChunkedAttention(ChunkedDecays):
    """With what is written into states and read from them."""

    q: Tensor | None
    """(N, J, 1, C, K), scaled. None where nothing is read."""
    k: Tensor
    """(N, J, 1, C, K)"""
    v: Tensor
    """(N, J, R, C, V)"""
    beta: Tensor | None = None
    """(N, J, R, C, 1) with the delta rule."""
    skip: Tensor | None = None
    """(N, J, R, C, V): what is added to the output."""

    def local(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(N, H, C, V), and the states that leave (S, H, K, V)."""
        assert self.q is not None
        made: list[Tensor] = []
        step = self._decayed() if self.beta is None else self._corrected(*self._solved(), made)
        before, after = self._carried(states, step)
        values = torch.cat(made) if made else self.v
        read = (self.q * self.decays.entered) @ torch.cat((self._grouped(states)[:0], *before))
        out = _added(read, self.decays.products(self.q, self.k), values)
        return (out if self.skip is None else out + self.skip).flatten(1, 2), after

    def zeros(self) -> Tensor:
        """States (S, H, K, V)."""
        _, j, r, _, v = self.v.shape
        return self.v.new_zeros(len(self.table.order), j * r, self.k.shape[-1], v)

    def summary(self) -> tuple[Tensor, Tensor]:
        """(M, U)."""
        if self.beta is None:
            return self.passed(), self._carried(self.zeros(), self._decayed())[1]
        start, (k, v) = self.zeros(), (self.k.shape[-1], self.v.shape[-1])
        one = torch.eye(k, dtype=start.dtype, device=start.device).expand(*start.shape[:2], k, k)
        values, weights = self._solved()
        step = self._corrected(pad(values, (0, k)), weights, [])  # values [v | 0] and states [0 | I] give [U | M]
        least = LEAST[start.dtype]  # for the map shrinks and shrinks
        both = torch.cat((start, one), -1)
        _, after = self._carried(both, lambda number, state: hardshrink(step(number, state), least))
        u, m = after.split((v, k), -1)
        return m, u

    def _decayed(self) -> Step:
        added = ((self.k * self.decays.left).mT @ self.v).split(self.table.steps)
        whole = self.decays.whole.split(self.table.steps)
        return lambda number, state: torch.addcmul(added[number], whole[number], state)

    def _solved(self) -> tuple[Tensor, Tensor]:
        """X (N, J, R, C, V) and W (N, J, R, C, K)."""
        assert self.beta is not None
        system = self.decays.products(self.k, self.k) * self.beta  # the solver looks below the diagonal only
        wanted = self.v * self.beta, self.k * (self.decays.entered * self.beta)
        values, weights = (torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True) for x in wanted)
        return values, weights

    def _corrected(self, values: Tensor, weights: Tensor, made: list[Tensor]) -> Step:
        """With the delta rule; `made` gets V' of chunks of every number."""
        everything = values, weights, self.decays.whole, (self.k * self.decays.left).mT
        parts = list(zip(*(x.split(self.table.steps) for x in everything), strict=True))

        def step(number: int, state: Tensor) -> Tensor:
            values, weights, whole, keys = parts[number]
            made.append(_added(values, weights, state, -1))
            return _added(whole * state, keys, made[-1])

        return step


def _added(x: Tensor, a: Tensor, b: Tensor, factor: int = 1) -> Tensor:
    """x + factor * a @ b, of as many dims."""
    flat = torch.baddbmm(x.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2), alpha=factor)
    return flat.view(x.shape)
