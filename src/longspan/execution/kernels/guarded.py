"""Fused operators at the edges of their range: scales that are not above 0, and numbers that are not finite.

Shapes: see contract.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from longspan.execution.kernels.contract import Group, Kernel, TileWork, Upstream, finite
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

    def groups(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> Sequence[Group]:
        return self.kernel.groups(tiles, num_q, num_k)

    def forward(self, work: TileWork) -> Iterator[tuple[Tensor, Tensor]]:
        _, above = _above(work)
        for tiles, (out, lse) in zip(self._groups(work), self.kernel.forward(above), strict=True):
            if self.looks and not finite(out):
                yield from self.careful.forward(replace(work, tiles=tiles))
            else:
                yield out, lse

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        sign, above = _above(work)
        for tiles, (dq, dk, dv) in zip(self._groups(work), self.kernel.backward(above, upstream), strict=True):
            if self.looks and not (finite(dq) and finite(dk) and finite(dv)):
                yield from self.careful.backward(replace(work, tiles=tiles), upstream)
            else:
                yield dq if sign == 1.0 else dq * sign, dk, dv

    def _groups(self, work: TileWork) -> Sequence[Group]:
        return self.kernel.groups(work.tiles, work.q_BHQD.shape[2], work.k_BGKD.shape[2])


def _above(work: TileWork) -> tuple[float, TileWork]:
    """A factor of q, and the same work with q so multiplied and a scale above 0."""
    sign, scale = signed(work.scale)
    return sign, work if sign == 1.0 else replace(work, q_BHQD=work.q_BHQD * sign, scale=scale)


def signed(scale: float) -> tuple[float, float]:
    """A factor of q (1, -1 or 0) and a scale above 0 that together are the scale.

    >>> signed(0.5), signed(-0.5), signed(0.0)
    ((1.0, 0.5), (-1.0, 0.5), (0.0, 1.0))
    """
    if scale == 0.0:
        return 0.0, 1.0
    return (1.0, scale) if scale > 0.0 else (-1.0, -scale)
