"""Tensors with NaN around them: a kernel that reads beside its operands shows it in its results.

Before and after an operand, and in between where it is a slice of something wider, there is memory of NaN. A kernel
that takes a tensor for laid out otherwise than it is, or reads behind its end, brings NaN into its results; what it
writes there is found afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

GUARD = 512
"""Numbers of NaN before and after; a multiple of what kernels read at once, so that operands stay aligned."""
LAYOUTS = ("dense", "rows first", "sliced", "odd rows")


class GuardedMemory:
    """Operands in memory of NaN, and a copy of all of it."""

    def __init__(self) -> None:
        self._made: list[tuple[str, Tensor, Tensor]] = []

    def placed(self, name: str, x: Tensor, layout: str = "dense") -> Tensor:
        """The same numbers, laid out so. Shapes are (batch, heads, rows, features) or (batch, heads, rows).

        >>> x = torch.arange(8.0).view(1, 2, 2, 2)
        >>> found = GuardedMemory().placed("q", x, "rows first")
        >>> found.stride(), bool((found == x).all()), int(found.untyped_storage().nbytes() // 4) - 2 * GUARD
        ((8, 2, 4, 1), True, 8)
        """
        order = (0, 2, 1, 3)[: x.dim()] if layout == "rows first" else tuple(range(x.dim()))
        room = [0] * x.dim()
        if layout == "sliced":  # some rows of a longer tensor
            room[2] = 32
        if layout == "odd rows" and x.dim() == 4:  # rows that no vector of 16 bytes begins with
            room[3] = 1
        sizes = [x.shape[dim] + room[dim] for dim in order]
        memory = torch.full((2 * GUARD + _product(sizes),), torch.nan, dtype=x.dtype, device=x.device)
        inner = memory[GUARD : memory.numel() - GUARD].view(sizes).permute([order.index(dim) for dim in range(x.dim())])
        starts = [size // 2 for size in room]
        for dim, start in enumerate(starts):
            inner = inner.narrow(dim, start, x.shape[dim])
        inner.copy_(x)
        self._made.append((name, memory, memory.clone()))
        return inner

    def changed(self) -> list[str]:
        """Names of operands that were written to, or beside."""
        return [name for name, memory, before in self._made if not torch.equal(_bits(memory), _bits(before))]


def _bits(x: Tensor) -> Tensor:
    """NaN equals nothing, but its bits do."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _product(sizes: list[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found
