"""Text pictures of masks: queries go down, keys go right."""

from __future__ import annotations

import numpy as np

from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.plane import Plane
from longspan.span import Ints, whole

_OPAQUE_LIMIT = 4096


def draw(plane: Plane, seq_len: int, width: int) -> str:
    """One character per square of pairs: all allowed, some allowed, none allowed."""
    width = whole(width, "width", "draw()", MaskError, low=1, high=4096)
    edges = np.linspace(0, seq_len, min(width, max(seq_len, 1)) + 1).astype(np.int64)
    sizes = np.diff(edges)
    counts = _counts(plane, seq_len, edges)
    cells = np.where(counts == 0, "·", np.where(counts == sizes[:, None] * sizes, "█", "▒"))
    return "\n".join("".join(line) for line in cells.tolist())


def _counts(plane: Plane, seq_len: int, edges: Ints) -> Ints:
    num = len(edges) - 1
    if plane.predicate is not None:
        if seq_len > _OPAQUE_LIMIT:
            raise MaskError(
                f"drawing an opaque mask asks its function about every pair, and {seq_len} tokens are more than"
                f" {_OPAQUE_LIMIT}. Draw a shorter stretch, or classify() the tiles you want to see."
            )
        position = np.arange(seq_len, dtype=np.int64)
        allowed = plane.allows(position[:, None], position[None, :]).astype(np.int64)
        return np.add.reduceat(np.add.reduceat(allowed, edges[:-1], axis=0), edges[:-1], axis=1)
    # Every strip of rows is cut once, then every square of it from the strip: work follows the bands that are there.
    counts = np.zeros((num, num), dtype=np.int64)
    for i in range(num):
        strip = bd.tighten(bd.cut(plane.sure, (int(edges[i]), int(edges[i + 1])), (0, seq_len)))
        for j in range(num):
            counts[i, j] = bd.area(bd.cut(strip, (0, seq_len), (int(edges[j]), int(edges[j + 1])))).sum()
    return counts
