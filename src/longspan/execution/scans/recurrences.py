"""Recurrences that kernels know: what tokens they have, and the shapes of states and maps.

Shapes: B batch, T slots, H heads, J key heads (H % J == 0, each serves H // J heads that follow one another), K and V
rows and columns of a state, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longspan.execution.scans.contract import Recurrence

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
