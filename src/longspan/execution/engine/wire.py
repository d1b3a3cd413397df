"""Wire: pieces as bytes. All pieces between two ranks in a step are one message, whose size is what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.execution.tile import wide
from longspan.schedules.steps import Piece, Role, Sizes, Transfer
from longspan.span import Span


@dataclass(frozen=True)
class Format:
    """Which tensors make up a piece of each role, and how they lie in a message."""

    sizes: Sizes
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of statistics and of sums that are not complete."""
        return wide(self.dtype)

    def fields(self, role: Role) -> list[tuple[int, torch.dtype]]:
        """(features, dtype) of each tensor of a piece; one feature is a number per row."""
        qk, v, narrow, wide = self.sizes.head_dim, self.sizes.v_head_dim, self.dtype, self.wide
        return {
            Role.Q: [(qk, narrow)],
            Role.KV: [(qk, narrow), (v, narrow)],
            Role.OUT: [(v, narrow), (1, wide)],
            Role.DOUT: [(v, narrow), (1, wide), (1, wide)],
            Role.DQ: [(qk, narrow)],
            Role.DKV: [(qk, wide), (v, wide)],
        }[role]

    def batch(self, piece: Piece) -> Span:
        return Span(0, self.sizes.batch) if piece.batch is None else piece.batch

    def num_bytes(self, transfers: Sequence[Transfer]) -> int:
        return sum(t.piece.num_bytes(self.sizes) for t in transfers)

    def tensors(self, piece: Piece, message: Tensor, offset: int) -> tuple[list[Tensor], int]:
        """The piece's tensors as views of a message, and where the next piece begins."""
        shape = (len(self.batch(piece)), len(piece.heads), piece.num_tokens)
        found: list[Tensor] = []
        for features, dtype in self.fields(piece.role):
            size = shape[0] * shape[1] * shape[2] * features * dtype.itemsize
            part = message[offset : offset + size]
            if offset % dtype.itemsize:
                part = part.clone()  # a view of wider numbers must begin on a multiple of their size
            found.append(part.view(dtype).view(*shape, features))
            offset += size
        return found, offset

    def pack(self, piece: Piece, message: Tensor, offset: int, fill: Callable[[Sequence[Tensor]], None]) -> int:
        """Lets `fill` write the piece's tensors into the message; returns where the next piece begins."""
        tensors, end = self.tensors(piece, message, offset)
        fill(tensors)
        for tensor in tensors:
            size = tensor.numel() * tensor.itemsize
            if offset % tensor.itemsize:  # not a view of the message, see above
                message[offset : offset + size] = tensor.view(-1).view(torch.uint8)
            offset += size
        return end
