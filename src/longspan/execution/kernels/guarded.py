"""Fused operators at the edges of their range: scales that are not above 0, and numbers that are not finite.

Shapes: see contract.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from longspan.execution.kernels.contract import Kernel, Pairs, finite
from longspan.execution.tile import Features, Tile


@dataclass(frozen=True)
class Guarded:
    """A kernel whose operators hide pairs by adding -inf, and multiply probabilities of 0 with whatever is there.

    They take a scale above 0 only: some multiply the -inf by it. The sign belongs to q as well, and so does a 0.
    Where a tile's result is not finite, `careful` computes it again: there hidden pairs contribute nothing, whatever
    their numbers. Looking at results costs a pass over them, on CPUs; on GPUs it would make the host wait, and is left.
    """

    kernel: Kernel
    careful: Kernel
    looks: bool
    """Whether results are looked at."""

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def honours(self) -> Features:
        return self.kernel.honours

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:
        return self.kernel.refuses(q_BHQD, k_BGKD, v_BGKE)

    def forward(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        tiles: Sequence[Tile],
        scale: float,
        pairs: Pairs | None = None,
    ) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        sign, above = signed(scale)
        signed_q = q_BHQD if sign == 1.0 else q_BHQD * sign
        for tile, out, lse in self.kernel.forward(signed_q, k_BGKD, v_BGKE, tiles, above, pairs):
            if self.looks and not finite(out):
                yield from self.careful.forward(q_BHQD, k_BGKD, v_BGKE, [tile], scale, pairs)
            else:
                yield tile, out, lse

    def backward(
        self,
        dout_BHQE: Tensor,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out_BHQE: Tensor,
        lse_BHQ: Tensor,
        tiles: Sequence[Tile],
        scale: float,
        delta_BHQ: Tensor,
        pairs: Pairs | None = None,
    ) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
        sign, above = signed(scale)
        signed_q = q_BHQD if sign == 1.0 else q_BHQD * sign
        rest = k_BGKD, v_BGKE, out_BHQE, lse_BHQ
        for tile, dq, dk, dv in self.kernel.backward(dout_BHQE, signed_q, *rest, tiles, above, delta_BHQ, pairs):
            if self.looks and not (finite(dq) and finite(dk) and finite(dv)):
                yield from self.careful.backward(dout_BHQE, q_BHQD, *rest, [tile], scale, delta_BHQ, pairs)
            else:
                yield tile, dq if sign == 1.0 else dq * sign, dk, dv


def signed(scale: float) -> tuple[float, float]:
    """A factor of q (1, -1 or 0) and a scale above 0 that together are the scale.

    >>> signed(0.5), signed(-0.5), signed(0.0)
    ((1.0, 0.5), (-1.0, 0.5), (0.0, 1.0))
    """
    if scale == 0.0:
        return 0.0, 1.0
    return (1.0, scale) if scale > 0.0 else (-1.0, -scale)
