"""What kernels and plans take of a device's memory beside what `memory` counts: workspace of launches, tables of rows.

A launch's workspace is there while it runs, so a pass needs that of its largest launch. Tables say which rows are
packed, gathered and added; they stay on the device as long as the plan: four bytes for every row of every piece that is
sent, received or computed on.
"""

from __future__ import annotations

import numpy as np

from longspan.schedules.cost.kernels import KERNELS, LaunchShape, workspace_of
from longspan.schedules.cost.launches import (
    BATCH,
    KV_HEADS,
    KV_TOKENS,
    Q_HEADS,
    Q_TOKENS,
    bands_of,
    launch_table,
    sides,
)
from longspan.schedules.cost.machine import Machine
from longspan.schedules.steps import Sizes, Step

INDEX_BYTES = 4
VECTOR = 8
"""Features that GPU kernels read at once: heads are padded to a multiple of it."""


def launched(steps: tuple[Step, ...], sizes: Sizes) -> list[LaunchShape]:
    """The largest launch of every compute and window."""
    computes = [compute for step in steps for compute in step.computes]
    if not computes:
        return []
    side = sides(computes, sizes)
    table = launch_table(bands_of(computes), side)
    width = -(-max(sizes.head_dim, sizes.v_head_dim) // VECTOR) * VECTOR
    whole = (table.rows == side[table.compute, Q_TOKENS]) & (table.cols == side[table.compute, KV_TOKENS])
    packed = (~whole & (table.slices > 1)).astype(np.int64)
    heads = (side[table.compute, i] for i in (Q_HEADS, KV_HEADS, BATCH))
    columns = (table.rows, table.cols, table.slices, *heads, packed)
    rows = np.unique(np.stack(columns, axis=1), axis=0)
    return [LaunchShape(*row, width=width, itemsize=sizes.itemsize) for row in rows.tolist()]


def workspace_bytes(
    backward: tuple[Step, ...], sizes: Sizes, machine: Machine, *, deterministic: bool = False
) -> int | None:
    """The largest workspace of one launch, or None where the machine's kernel does not tell.

    Backward has forward's launches, and needs more for each: its steps are enough.
    """
    if machine.kernel not in KERNELS or KERNELS[machine.kernel].workspace is None:
        return None
    if not machine.one_launch:  # a CPU's kernel takes tiles one by one, and rows where they lie
        return 0
    found = [
        workspace_of(machine.kernel, launch, "backward", machine.slots, deterministic=deterministic)
        for launch in launched(backward, sizes)
    ]
    return max((size for size in found if size is not None), default=0)


def table_bytes(forward: tuple[Step, ...], backward: tuple[Step, ...], machine: Machine) -> int:
    """Tables of rows that a plan keeps on a GPU; CPUs keep none worth counting."""
    if not machine.one_launch:
        return 0
    moved = [t.piece for steps in (forward, backward) for step in steps for t in step.transfers]
    used = [piece for step in forward for compute in step.computes for piece in (compute.q, compute.kv)]
    tokens: dict[int, int] = {}  # pieces share tuples of spans
    total = 0
    for piece in (*moved, *used, *used):  # the computes of both passes
        spans = id(piece.spans)
        if spans not in tokens:
            tokens[spans] = piece.num_tokens
        total += tokens[spans]
    return INDEX_BYTES * total
