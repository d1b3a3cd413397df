"""Tensors surrounded by NaN: a kernel that reads outside its operands gets NaN into its results.

There is NaN before and after an operand, and in between where it is a slice of something wider. A kernel that assumes
other strides, or reads beyond the end, is found by its results; one that writes there, by a comparison afterwards.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

GUARD = 512
"""NaNs before and after an operand; a multiple of what kernels read at once, so that operands stay aligned."""
LAYOUTS = ("dense", "rows first", "sliced", "odd rows")


class GuardedMemory:
    """Operands surrounded by NaN, and a copy of all of their memory."""

    def __init__(self) -> None:
        self._operands: list[tuple[str, Tensor, Tensor]] = []

    def place(self, name: str, x: Tensor, layout: str = "dense") -> Tensor:
        """Return a copy with this layout. Shapes are (batch, heads, rows, features) or (batch, heads, rows).

        >>> x = torch.arange(8.0).view(1, 2, 2, 2)
        >>> copy = GuardedMemory().place("q", x, "rows first")
        >>> copy.stride(), bool((copy == x).all()), int(copy.untyped_storage().nbytes() // 4) - 2 * GUARD
        ((8, 2, 4, 1), True, 8)
        """
        order = (0, 2, 1, 3)[: x.dim()] if layout == "rows first" else tuple(range(x.dim()))
        margin = [0] * x.dim()
        if layout == "sliced":  # some rows of a longer tensor
            margin[2] = 32
        if layout == "odd rows" and x.dim() == 4:  # rows that are not aligned to 16 bytes
            margin[3] = 1
        sizes = [x.shape[dim] + margin[dim] for dim in order]
        memory = torch.full((2 * GUARD + prod(sizes),), torch.nan, dtype=x.dtype, device=x.device)
        inner = memory[GUARD : memory.numel() - GUARD].view(sizes).permute([order.index(dim) for dim in range(x.dim())])
        for dim, size in enumerate(margin):
            inner = inner.narrow(dim, size // 2, x.shape[dim])
        inner.copy_(x)
        self._operands.append((name, memory, memory.clone()))
        return inner

    def changed(self) -> list[str]:
        """Return the names of operands that were written to, or next to."""
        return [name for name, memory, before in self._operands if not torch.equal(_bits(memory), _bits(before))]


def _bits(x: Tensor) -> Tensor:
    """Return a view as integers, since NaN does not equal itself."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
