"""Launches: what the computes of a step become for a kernel that takes many slices at once.

A variable-length kernel takes slices of one window in one launch: the window is counted from the diagonal that ends in
a slice's bottom-right corner, so all causal documents are one window, whatever their lengths, and all rectangles are
another. A launch packs no row twice: slices that need a row again go to another one.

    bands of a compute              window (left, right)     launch
    q 0:4  x kv 0:4,  q - kv >= 0   (open, 0)                first
    q 4:9  x kv 4:9,  q - kv >= 0   (open, 0)                first
    q 9:12 x kv 4:9                 (open, open)             second
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from longspan.masks import bands as bd
from longspan.schedules.steps import Compute, Sizes
from longspan.span import Ints

OPEN = -1
"""A window's bound where there is none."""
LANES = 6
Q_HEADS, KV_HEADS, Q_TOKENS, KV_TOKENS, BATCH, BANDS = range(LANES)


@dataclass(frozen=True, eq=False)
class LaunchTable:
    """One entry for each compute and window: how many launches, and what the largest of them packs."""

    compute: Ints
    """The number of the compute."""
    launches: Ints
    rows: Ints
    """Query rows of a launch, of one batch row."""
    cols: Ints
    slices: Ints
    """Slices of a launch, of one batch row."""

    def per_compute(self, num: int) -> NDArray[np.float64]:
        """How many launches each of the `num` computes takes."""
        return np.bincount(self.compute, self.launches, num).astype(np.float64)


def sides(computes: list[Compute], sizes: Sizes) -> Ints:
    """(query heads, key heads, query tokens, key tokens, batch rows, bands) of each compute."""
    facts = [
        (
            len(c.q.heads),
            len(c.kv.heads),
            c.q.num_tokens,
            c.kv.num_tokens,
            sizes.batch if c.q.batch is None else len(c.q.batch),
            len(c.bands) + len(c.maybe),
        )
        for c in computes
    ]
    return np.array(facts, dtype=np.int64).reshape(-1, LANES)


def bands_of(computes: list[Compute]) -> Ints:
    """The bands of all computes, one after another."""
    return bd.as_array(tuple(chain.from_iterable((*compute.bands, *compute.maybe) for compute in computes)))


def launch_table(rows: Ints, side: Ints) -> LaunchTable:
    """The launches of computes, from their bands and `sides`.

    >>> from longspan.masks import Band
    >>> bands = [Band.parse(text) for text in ("0:4x0:4/0..", "4:9x4:9/0..", "9:12x4:9")]
    >>> found = launch_table(bd.as_array(tuple(bands)), np.array([[8, 2, 12, 9, 1, 3]]))
    >>> sorted(zip(found.launches.tolist(), found.rows.tolist(), found.cols.tolist(), found.slices.tolist()))
    [(1, 3, 5, 1), (1, 9, 9, 2)]
    """
    each = np.repeat(np.arange(len(side)), side[:, BANDS])
    near, far = bd.borders(rows)
    left = np.where(far, rows[:, bd.HI] + rows[:, bd.K1] - rows[:, bd.Q1], OPEN)
    right = np.where(near, rows[:, bd.Q1] - rows[:, bd.K1] - rows[:, bd.LO], OPEN)
    windows, window = np.unique((left + 1) * (right.max(initial=0) + 2) + right + 1, return_inverse=True)
    keys, which = np.unique(each * max(len(windows), 1) + window, return_inverse=True)
    compute = keys // max(len(windows), 1)
    q, kv = (
        np.bincount(which, rows[:, end] - rows[:, begin], len(keys)).astype(np.int64)
        for begin, end in ((bd.Q0, bd.Q1), (bd.K0, bd.K1))
    )
    slices = np.bincount(which, minlength=len(keys)).astype(np.int64)
    room_q, room_kv = np.maximum(side[compute, Q_TOKENS], 1), np.maximum(side[compute, KV_TOKENS], 1)
    launches = np.minimum(np.maximum(-(-q // room_q), -(-kv // room_kv)), slices)
    return LaunchTable(compute, launches, np.minimum(q, room_q), np.minimum(kv, room_kv), -(-slices // launches))
