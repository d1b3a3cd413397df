"""Dropout whose pattern belongs to the sequence: a hash of (seed, batch row, head, query, key) decides on every pair.

No rank, scheme, tile or order of computation enters, so one device and a thousand drop the same pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from longspan.errors import KernelError

# Multipliers of splitmix64, as signed numbers: torch has no unsigned arithmetic, but wraps around all the same.
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
