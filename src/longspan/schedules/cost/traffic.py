"""What a rank's steps move, as one table: thousands of transfers are summed at once, not one by one."""

from __future__ import annotations

import numpy as np

from longspan.schedules.steps import Piece, Role, Sizes, Step
from longspan.span import Ints

STEP, SRC, DST, UNTIL, BYTES, ADDED = range(6)
_ADDED = (Role.OUT, Role.DQ, Role.DKV)
"""What is put to a rank's own rows when it comes home; all else is used where it arrived."""


def traffic(steps: tuple[Step, ...], sizes: Sizes) -> Ints:
    """(step, source, target, until, bytes, whether it is added to own rows) of every transfer, step by step."""
    moved = [(number, t) for number, step in enumerate(steps) for t in step.transfers]
    weights = piece_bytes([t.piece for _, t in moved], sizes)
    rows = [
        (number, t.src, t.dst, t.until, weight, t.piece.role in _ADDED)
        for (number, t), weight in zip(moved, weights, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def piece_bytes(pieces: list[Piece], sizes: Sizes) -> list[int]:
    """`Piece.num_bytes` of each piece."""
    row_bytes = {role: sizes.row_bytes(role) for role in Role}
    tokens: dict[int, int] = {}  # a piece, its gradient and its copies share one tuple of spans
    num_bytes: list[int] = []
    for piece in pieces:
        spans = piece.spans
        if id(spans) not in tokens:
            tokens[id(spans)] = sum([span.stop - span.start for span in spans])
        rows, heads = piece.batch, piece.heads
        weight = (heads.stop - heads.start) * (sizes.batch if rows is None else rows.stop - rows.start)
        num_bytes.append(tokens[id(spans)] * weight * row_bytes[piece.role])
    return num_bytes


def received(steps: tuple[Step, ...], rank: int, sizes: Sizes) -> int:
    """Bytes the rank takes from the wire."""
    return sum(piece_bytes([t.piece for step in steps for t in step.transfers if t.dst == rank], sizes))
