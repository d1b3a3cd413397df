"""The recurrences that kernels compute: their tokens, the shapes of states and maps, and the interface of a kernel.

Shapes: B batch, T slots, H heads, J key heads (H % J == 0, each serves H // J consecutive heads), K and V rows and
columns of a state, D channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from longspan.spans import Ints
from longspan.tile import wide

# -- The interface of a recurrence kernel ------------------------------------------------------------------------------
# A linear recurrence S_t = A_t S_{t-1} + B_t maps the state that enters a stretch of tokens to the state that leaves
# it: S_out = M S_in + U. A *segment* is such a stretch: consecutive tokens of one document on one rank. States of all
# segments are one tensor (segments, heads, K, V), float32 or wider; M is
#
# - dense, (segments, heads, K, K), and acts from the left (delta rules), or
# - diagonal, (segments, heads, 1 or K, 1 or V), and multiplies elementwise (decays).
#
# A tiny worked example, one head with K = V = 1, decays 1/2, inputs k v = 1, 1, 1 in one segment that a state s enters:
#
#     S = s/2 + 1,  s/4 + 3/2,  s/8 + 7/4        M = 1/8, U = 7/4
#
# Tokens have shape (batch, slots, ...); slots that no segment has are padding: their output is 0, and so are gradients.


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


# -- Delta rule, linear attention, Mamba-2 (SSD), elementwise recurrence -----------------------------------------------


EPSILON = 1e-6
"""What is added to the sum of squares where queries and keys are normalised."""


@dataclass(frozen=True)
class GatedDelta(Recurrence):
    """The gated delta rule; with a decay for every row of the state it is KDA.

    Tokens q, k (B, T, J, K), v (B, T, H, V), g (B, T, H) or (B, T, H, K), beta (B, T, H):

        R_t = exp(g_t) S_{t-1}        what is left of the state
        S_t = R_t + k_t (beta_t (v_t - k_t^T R_t))^T
        o_t = scale * q_t^T S_t

    With K = V = 1, g = 0, k = 1, beta = 1/2, v = 4 and a state 2: S = 2 + (4 - 2) / 2 = 3, so M = 1/2 and U = 2.
    """

    scale: float
    l2norm: bool
    """Whether q and k are divided by the root of their sum of squares plus 1e-6 first."""
    name = "gated_delta"
    is_dense = True

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[2].shape[2], tokens[1].shape[3], tokens[2].shape[3]

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[2].shape[2], tokens[1].shape[3], tokens[1].shape[3]


@dataclass(frozen=True)
class LinearAttention(Recurrence):
    """Linear attention with a decay: lightning attention, RetNet, and GLA with one for every row of the state.

    Tokens q, k (B, T, J, K), v (B, T, H, V), g (B, T, H) or (B, T, H, K):

        S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * q_t^T S_t
    """

    scale: float
    name = "linear_attention"
    is_dense = False

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[2].shape[2], tokens[1].shape[3], tokens[2].shape[3]

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        g = tokens[3]
        return g.shape[2], g.shape[3] if g.ndim == 4 else 1, 1


@dataclass(frozen=True)
class Ssd(Recurrence):
    """Mamba-2.

    Tokens x (B, T, H, V), dt (B, T, H), B and C (B, T, J, K); shared A (H,), D (H,) or (H, V) or None, dt_bias (H,) or
    None:

        d_t = clamp(softplus(dt_t + dt_bias), limits)
        S_t = exp(A d_t) S_{t-1} + d_t B_t x_t^T        y_t = C_t^T S_t + D x_t
    """

    softplus: bool
    limits: tuple[float, float]
    name = "ssd"
    is_dense = False

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[0].shape[2], tokens[2].shape[3], tokens[0].shape[3]

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return tokens[0].shape[2], 1, 1


@dataclass(frozen=True)
class LinearRecurrence(Recurrence):
    """Every channel for itself: RG-LRU, Mamba-1. Decays are any numbers, also 0 and negative ones.

    Tokens a, b (B, T, D):

        S_t = a_t S_{t-1} + b_t        o_t = S_t
    """

    name = "linear_recurrence"
    is_dense = False

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return 1, tokens[0].shape[2], 1

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:
        return 1, tokens[0].shape[2], 1


Elementwise = LinearRecurrence
