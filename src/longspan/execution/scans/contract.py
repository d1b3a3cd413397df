"""What a kernel of recurrences must give.

A linear recurrence S_t = A_t S_{t-1} + B_t maps the state that enters a stretch of tokens to the state that leaves it:
S_out = M S_in + U. A *segment* is such a stretch: consecutive tokens of one document on one rank. States of all
segments are one tensor (segments, heads, K, V), float32 or wider; M is

- dense, (segments, heads, K, K), and acts from the left (delta rules), or
- diagonal, (segments, heads, 1 or K, 1 or V), and multiplies elementwise (decays).

A tiny worked example, one head with K = V = 1, decays 1/2, inputs k v = 1, 1, 1 in one segment that a state s enters:

    S = s/2 + 1,  s/4 + 3/2,  s/8 + 7/4        M = 1/8, U = 7/4

Tokens have shape (batch, slots, ...); slots that no segment has are padding: their output is 0, and so are gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from longspan.execution.tile import wide
from longspan.span import Ints


@dataclass(frozen=True, eq=False)
class Segments:
    """A rank's segments, in the order of their states: rows of (batch row, first slot, end slot)."""

    table: Ints

    def __len__(self) -> int:
        return len(self.table)

    def of(self, which: Ints) -> Segments:
        """Some of them, by number."""
        return Segments(self.table[which])


class Recurrence(ABC):
    """What is computed: a frozen value with the options of one call. See `recurrences`."""

    name: ClassVar[str]
    is_dense: bool
    """Whether M is a matrix for each head."""

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """Tensors that want gradients beside tokens and what is shared."""
        return ()

    @abstractmethod
    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        """(heads, K, V) of a state."""

    @abstractmethod
    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        """(heads, rows, columns) of M."""

    def state_dtype(self, tokens: tuple[Tensor, ...]) -> torch.dtype:
        """Of states and maps: float32, or float64 where any token is."""
        return wide(reduce(torch.promote_types, (x.dtype for x in tokens)))


@dataclass(frozen=True, eq=False)
class ScanWork:
    """One rank's share of a recurrence."""

    recurrence: Recurrence
    tokens: tuple[Tensor, ...]
    """(batch, slots, ...) each."""
    shared: tuple[Tensor | None, ...]
    """What all tokens and all ranks share."""
    segments: Segments


class ScanKernel(ABC):
    """Computes recurrences on one device. All results carry gradients of PyTorch's autograd, unless said otherwise."""

    name: ClassVar[str]

    @abstractmethod
    def why_not(self, work: ScanWork) -> str | None:
        """Why it cannot compute this, or None."""

    @abstractmethod
    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        """Output (batch, slots, ...) and the states that leave, given those that enter."""

    @abstractmethod
    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        """(M, U) of every segment, without gradients."""
