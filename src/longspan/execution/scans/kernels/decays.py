"""Decays inside of chunks.

Exponents are sums of logarithms between two tokens, never positive where decays are at most 1: what would be is masked
before `exp`. Sums are made in float64, since the difference of two long ones has lost digits.

Shapes: N chunks, J key heads, R heads that share one, C tokens of a chunk, K features; x is 1 or K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import threshold

LEAST = {torch.float32: 2.0**-100, torch.float64: 2.0**-1000}
"""Decays below are taken for 0. Products with them would leave the range in which processors are quick: a summary took
three times as long for a few chunks of such numbers."""


@dataclass(frozen=True, eq=False)
class Decays:
    """Of all chunks."""

    sums: Tensor
    """(N, J, R, C, x) in float64: logarithms of what is left, at each token, of what entered its chunk."""
    dtype: torch.dtype

    @classmethod
    def of(cls, g: Tensor) -> Decays:
        """From the logarithm of each token's decay. One that is taken for 0 may be minus infinity: sums are finite.

        >>> Decays.of(torch.tensor([-1.0, -torch.inf, -2.0]).view(1, 1, 1, 3, 1)).left.flatten().tolist()
        [0.0, 0.1353352814912796, 1.0]
        """
        return cls(g.clamp(min=math.log(LEAST[g.dtype]) - 1).double().cumsum(3), g.dtype)

    @cached_property
    def entered(self) -> Tensor:
        """(N, J, R, C, x): what is left, at each token, of what entered its chunk."""
        return self.exp(self.sums)

    @cached_property
    def left(self) -> Tensor:
        """(N, J, R, C, x): what is left of each token at the end of its chunk."""
        return self.exp(self.sums[..., -1:, :] - self.sums)

    @cached_property
    def whole(self) -> Tensor:
        """(N, J, R, x, 1): what is left of rows of a state that went through the chunk."""
        return self.entered[..., -1, :].unsqueeze(-1)

    def exp(self, logarithms: Tensor) -> Tensor:
        return threshold(logarithms.to(self.dtype).exp(), LEAST[self.dtype], 0.0)

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """(N, J, R, C, C): a_i . b_j, times what is left of token j at token i; 0 where j comes after i."""
        return (a @ b.mT) * self._pairs if self.sums.shape[-1] == 1 else self._halved(a, b)

    @cached_property
    def _pairs(self) -> Tensor:
        size = self.sums.shape[3]
        later = torch.ones(size, size, dtype=torch.bool, device=self.sums.device).triu(1)
        return self.exp((self.sums - self.sums.mT).to(self.dtype).masked_fill(later, -torch.inf))

    def _halved(self, a: Tensor, b: Tensor) -> Tensor:
        """Where each feature has its own decay: the second half of a stretch reads what its first half left at the
        border between them, both halves are halved in turn, down to tokens that read themselves.

            a_0 b_0
            [1|0]     a_1 b_1
            [2,3 | 0,1]         a_2 b_2
                                [3|2]     a_3 b_3
        """
        shape = self.sums.shape
        found = (a * b).sum(-1)[..., None, None].expand(*shape[:4], 1, 1)
        for rows, columns in self._halves:
            half = rows.shape[-2]
            first, second = (x.unflatten(3, (-1, 2, half)).select(4, at) for x, at in ((b, 0), (a, 1)))
            below = (second * rows) @ (first * columns).mT
            upper, lower = found.unflatten(3, (-1, 2)).unbind(4)
            above = torch.zeros_like(below)
            found = torch.cat((torch.cat((upper, above), -1), torch.cat((below, lower), -1)), -2)
        return found.squeeze(3)

    @cached_property
    def _halves(self) -> list[tuple[Tensor, Tensor]]:
        """For halves of 1, 2, 4... tokens: what is left of the border at each token of the second one, and of each
        token of the first one at the border."""
        found, half = [], 1
        while half < self.sums.shape[3]:
            first, second = self.sums.unflatten(3, (-1, 2, half)).unbind(4)
            border = first[..., -1:, :]
            found.append((self.exp(second - border), self.exp(border - first)))
            half *= 2
        return found
