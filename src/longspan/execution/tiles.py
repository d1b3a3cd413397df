"""Bands as kernel tiles: cut where the rows of a store are not contiguous, and renumbered to local rows."""

from __future__ import annotations

import numpy as np

from longspan.execution.kernels.contract import Tile
from longspan.execution.rows import Rows
from longspan.masks import Band
from longspan.masks import bands as bd
from longspan.schedules.problem import cells, in_rows
from longspan.span import Ints


def tiles_of(bands: tuple[Band, ...], q: Rows, kv: Rows) -> list[Tile]:
    """The tiles of a compute, in the order of query rows and then keys, which is the order of merging."""
    rows = bd.as_array(bands)
    rows, _ = in_rows(rows, q.runs[:, :2])
    rows = bd.tighten(cells(rows, kv.runs[:, :2]))
    rows = rows[np.lexsort((rows[:, bd.K0], rows[:, bd.Q0]))]
    q0, k0 = _local(q, rows[:, bd.Q0]), _local(kv, rows[:, bd.K0])
    num_q, num_k = rows[:, bd.Q1] - rows[:, bd.Q0], rows[:, bd.K1] - rows[:, bd.K0]
    shift = rows[:, bd.Q0] - rows[:, bd.K0]
    lo, hi = rows[:, bd.LO] - shift, rows[:, bd.HI] - shift
    table = np.stack((q0, q0 + num_q, k0, k0 + num_k, lo, hi), axis=1)
    open_lo, open_hi = lo <= 1 - num_k, hi >= num_q - 1  # bounds that exclude no pair of the tile
    return [
        Tile(a, b, c, d, None if no_lo else low, None if no_hi else high)
        for (a, b, c, d, low, high), no_lo, no_hi in zip(
            table.tolist(), open_lo.tolist(), open_hi.tolist(), strict=True
        )
    ]


def _local(store: Rows, position: Ints) -> Ints:
    run = np.searchsorted(store.runs[:, 0], position, side="right") - 1
    return store.runs[run, 2] + position - store.runs[run, 0]
