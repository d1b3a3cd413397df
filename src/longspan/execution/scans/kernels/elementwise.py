"""S_t = a_t S_{t-1} + b_t for every channel, in chunks: token by token inside of all chunks at once, then from chunk to
chunk. Nothing is divided and no logarithm is taken, so decays may be 0 or negative.

Shapes: N chunks, S segments, C tokens of a chunk, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan.execution.scans.kernels.chunks import ChunkTable


@dataclass(frozen=True, eq=False)
class ChunkedElements:
    """Tokens in chunks, (N, C, D), in the dtype of states; a is 1 where a segment has ended."""

    table: ChunkTable
    a: Tensor
    b: Tensor

    def local(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 1, C, D), and the states that leave (S, 1, D, 1)."""
        before, after = self._continued(states)
        return (self._sums + self._products * before.unsqueeze(1)).unsqueeze(1), after

    def zeros(self) -> Tensor:
        """States (S, 1, D, 1)."""
        return self.a.new_zeros(len(self.table.order), 1, self.a.shape[-1], 1)

    def summary(self) -> tuple[Tensor, Tensor]:
        """(M, U)."""
        return self.passed(), self._continued(self.zeros())[1]

    def passed(self) -> Tensor:
        """(S, 1, D, 1): M."""
        whole = self._products[:, -1].split(self.table.steps)
        return self._carried(torch.ones_like(self.zeros()), lambda number, state: whole[number] * state)[1]

    def _continued(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States before each chunk (N, D), and those that leave."""
        whole, added = (x[:, -1].split(self.table.steps) for x in (self._products, self._sums))
        return self._carried(states, lambda number, state: whole[number] * state + added[number])

    def _carried(self, states: Tensor, step: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """`ChunkTable.carry` of states (S, 1, D, 1), with what was before every chunk (N, D) as one tensor."""
        flat = states.flatten(1)
        before, after = self.table.carry(flat, step)
        return torch.cat((flat[:0], *before)), after.view(states.shape)

    @cached_property
    def _sums(self) -> Tensor:
        """(N, C, D): the output as if nothing had entered the chunk."""
        return self._scanned(self.b)

    @cached_property
    def _products(self) -> Tensor:
        """(N, C, D): of decays from the chunk's begin up to each token."""
        return self._scanned(None)

    def _scanned(self, b: Tensor | None) -> Tensor:
        decays = self.a.unbind(1)
        added = None if b is None else b.unbind(1)
        found = [decays[0] if added is None else added[0]]
        for t in range(1, len(decays)):
            carried = decays[t] * found[-1]
            found.append(carried if added is None else carried + added[t])
        return torch.stack(found, 1)
