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

from longspan.execution.scans.kernels.chunks import ChunkTable
from longspan.execution.scans.kernels.decays import Decays


@dataclass(frozen=True, eq=False)
class ChunkedAttention:
    """Tokens in chunks, in the dtype of states."""

    table: ChunkTable
    q: Tensor
    """(N, J, 1, C, K), scaled; k too."""
    k: Tensor
    v: Tensor
    """(N, J, R, C, V)"""
    g: Tensor
    """(N, J, R, C, 1 or K)"""
    beta: Tensor | None = None
    """(N, J, R, C, 1) with the delta rule."""
    skip: Tensor | None = None
    """(N, J, R, C, V): what is added to the output."""

    @cached_property
    def decays(self) -> Decays:
        return Decays.of(self.g)

    def local(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C, H, V), and the states that leave (S, H, K, V)."""
        if self.beta is None:
            before, after = self._decayed(states)
            values = self.v
        else:
            before, values, after = self._corrected(*self._solved(), states)
        read = (self.q * self.decays.entered) @ before
        out = read + self.decays.products(self.q, self.k) @ values
        return _as_tokens(out if self.skip is None else out + self.skip), after

    def zeros(self) -> Tensor:
        """States (S, H, K, V)."""
        _, j, r, _, v = self.v.shape
        return self.v.new_zeros(len(self.table.order), j * r, self.k.shape[-1], v)

    def summary(self) -> tuple[Tensor, Tensor]:
        """(M, U)."""
        if self.beta is None:
            return self.passed(), self._decayed(self.zeros())[1]
        start, (k, v) = self.zeros(), (self.k.shape[-1], self.v.shape[-1])
        one = torch.eye(k, dtype=start.dtype, device=start.device).expand(*start.shape[:2], k, k)
        values, weights = self._solved()
        values = torch.nn.functional.pad(values, (0, k))  # values [v | 0] and states [0 | I] give [U | M]
        after = self._corrected(values, weights, torch.cat((start, one), -1))[2]
        u, m = after.split((v, k), -1)
        return m, u

    def passed(self) -> Tensor:
        """(S, H, 1 or K, 1): what is left of states that go through whole segments."""
        return self._logarithms()[1].to(self.g.dtype).exp()

    def entering(self, states: Tensor) -> Tensor:
        """(N, C, H, V): what entering states add to the output, without the delta rule."""
        before, _ = self._logarithms()
        decays = self.decays.exp(before.mT + self.decays.sums)
        return _as_tokens((self.q * decays) @ self._carried(states, lambda _, state: state)[0])

    def _logarithms(self) -> tuple[Tensor, Tensor]:
        """Of what is left of entering states when a chunk begins (N, J, R, 1 or K, 1), and when a segment ends."""
        sums = self.decays.sums[..., -1, :].unsqueeze(-1)
        parts = sums.split(self.table.steps)
        start = sums.new_zeros(len(self.table.order), *sums.shape[1:]).flatten(1, 2)
        return self._carried(start, lambda number, state: state + parts[number])

    def _decayed(self, states: Tensor) -> tuple[Tensor, Tensor]:
        added = ((self.k * self.decays.left).mT @ self.v).split(self.table.steps)
        whole = self.decays.whole.split(self.table.steps)
        return self._carried(states, lambda number, state: torch.addcmul(added[number], whole[number], state))

    def _solved(self) -> tuple[Tensor, Tensor]:
        """X (N, J, R, C, V) and W (N, J, R, C, K)."""
        assert self.beta is not None
        system = self.decays.products(self.k, self.k) * self.beta  # the solver looks below the diagonal only
        wanted = torch.cat((self.v * self.beta, self.k * (self.decays.entered * self.beta)), -1)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        values, weights = solved.split((self.v.shape[-1], self.k.shape[-1]), -1)
        return values, weights

    def _corrected(self, values: Tensor, weights: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, made = self.table.steps, []
        keys = (self.k * self.decays.left).mT.split(steps)
        values_of, weights_of, whole = (x.split(steps) for x in (values, weights, self.decays.whole))

        def step(number: int, state: Tensor) -> Tensor:
            made.append(values_of[number] - weights_of[number] @ state)
            return whole[number] * state + keys[number] @ made[-1]

        before, after = self._carried(states, step)
        return before, torch.cat(made) if made else values, after

    def _carried(self, states: Tensor, step: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """`ChunkTable.carry` of states (S, H, ...), with what was before every chunk (N, J, R, ...) as one tensor."""
        by_key_heads = states.unflatten(1, (self.v.shape[1], -1))
        before, after = self.table.carry(by_key_heads, step)
        return torch.cat((by_key_heads[:0], *before)), after.flatten(1, 2)


def _as_tokens(x: Tensor) -> Tensor:
    """(N, J, R, C, V) -> (N, C, H, V)."""
    return x.flatten(1, 2).transpose(1, 2)
