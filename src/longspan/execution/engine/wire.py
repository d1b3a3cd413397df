"""Wire: pieces as bytes. All pieces between two ranks in a step are one message, whose size is what the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch

from longspan.execution.engine.flat.recorder import Buffer, Recorder, Rows
from longspan.execution.tile import wide
from longspan.schedules.steps import Moved, Piece, Role, Sizes
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
        fields = {
            Role.Q: [(qk, narrow)],
            Role.KV: [(qk, narrow), (v, narrow)],
            Role.OUT: [(v, narrow), (1, wide)],
            Role.DOUT: [(v, narrow), (1, wide), (1, wide)],
            Role.DQ: [(qk, narrow)],
            Role.DKV: [(qk, wide), (v, wide)],
        }[role]
        return fields if v else [field for field in fields if field[0]]

    @property
    def alignment(self) -> int:
        """Bytes on whose multiples messages begin in a buffer of several: then most rows begin on multiples of their
        own size, and operations on rows of many messages can be one."""
        sizes = (self.sizes.head_dim, self.sizes.v_head_dim or 1)
        return lcm(16, *(size * dtype.itemsize for size in sizes for dtype in (self.dtype, self.wide)))

    def batch(self, piece: Piece) -> Span:
        return Span(0, self.sizes.batch) if piece.batch is None else piece.batch

    def num_bytes(self, transfers: Sequence[Moved]) -> int:
        return sum(t.piece.num_bytes(self.sizes) for t in transfers)

    def tensors(self, recorder: Recorder, piece: Piece, message: Buffer, offset: int) -> tuple[list[Rows], int]:
        """The piece's tensors as parts of a message, and where the next piece begins."""
        shape = (len(self.batch(piece)), len(piece.heads), piece.num_tokens)
        found: list[Rows] = []
        for features, dtype in self.fields(piece.role):
            found.append(recorder.new((*shape, features), dtype, inside=message, offset=offset))
            offset += found[-1].buffer.num_bytes
        return found, offset
