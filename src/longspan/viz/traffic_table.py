"""A picture of who sends how much to whom, forward and backward."""

from __future__ import annotations

import numpy as np

from longspan.formatting import BYTE_UNITS, bytes_text, three, unit_of
from longspan.planning.plan import Plan
from longspan.spans import Ints
from longspan.viz.layout import SimulatedPass, runs
from longspan.viz.scene import HEAT, MARGIN, NORMAL, SMALL, WIDTH, Line, Rect, Scene, Text, frame, headed

_SIDE = 330.0
_NUMBERS = 8
"""Cells have room for their number up to this many ranks."""


def traffic(plan: Plan, direction: str) -> Ints:
    """Bytes from each rank (row) to each rank (column) in one pass.

    >>> from longspan import layouts, masks
    >>> from longspan.api import plan
    >>> made = plan(masks.causal(), layouts.zigzag(64, 2), q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    >>> int(traffic(made, "forward")[:, 0].sum()) == made.bytes_received(0)
    True
    """
    return _matrix(runs(plan)[direction == "backward"])


def _matrix(run: SimulatedPass) -> Ints:
    size = run.schedule.world_size
    num_bytes = np.zeros((size, size), dtype=np.int64)
    for _, transfer in run.schedule.transfers():
        num_bytes[transfer.src, transfer.dst] += transfer.piece.num_bytes(run.schedule.sizes)
    return num_bytes


def traffic_picture(plan: Plan, *, title: str | None = None) -> Scene:
    """Bytes from rank to rank as two heat maps on one scale; numbers stand in the cells where they have room."""
    both = [_matrix(run) for run in runs(plan)]
    most = int(max(matrix.max(initial=0) for matrix in both))
    unit, size = unit_of(float(most), BYTE_UNITS)
    words = [f"{name} {bytes_text(int(m.sum()))}" for name, m in zip(("forward", "backward"), both, strict=True)]
    remark = f"{', '.join(words)} in all; a row sends, a column receives, bars show the sums."
    scene, top = headed(title or f"Traffic: {plan.scheme.name}", [remark], _ABOUT)
    top += 50
    for number, (name, matrix) in enumerate(zip(("forward", "backward"), both, strict=True)):
        left = MARGIN + 42 + number * (_SIDE + 92)
        _heat(scene, matrix, left, top, most, size, plan.machine.node)
        scene.add(Text(left + _SIDE / 2, top - 42, f"{name}, {unit}", NORMAL, "ink", "middle", bold=True))
    _scale(scene, top + _SIDE + 84, most)
    scene.height = top + _SIDE + 116
    return scene


_ABOUT = "Two matrices, sender by receiver: the darker a cell, the more bytes go from one rank to the other."


def _heat(scene: Scene, matrix: Ints, left: float, top: float, most: int, unit: float, node: int) -> None:
    size = len(matrix)
    cell = _SIDE / size
    gap = 1.0 if cell > 12 else 0.0
    scene.add(Rect(left, top, _SIDE, _SIDE, "lane"))
    for src, dst in np.argwhere(matrix).tolist():
        value = int(matrix[src, dst])
        share, x, y = value / most, left + dst * cell, top + src * cell
        note = f"rank {src} to rank {dst}: {bytes_text(value)}"
        scene.add(Rect(x, y, cell - gap, cell - gap, HEAT, _opacity(share), note if size <= 16 else ""))
        if size <= _NUMBERS:
            color = "#ffffff" if share > 0.7 else "ink"
            words = three(value / unit)
            scene.add(Text(x + cell / 2, y + cell / 2 + 4, words, min(SMALL, cell / 3.4), color, "middle"))
    if node < size <= 128:
        for edge in range(node, size, node):
            at = edge * cell
            scene.add(Line(((left + at, top), (left + at, top + _SIDE)), "muted", 0.5))
            scene.add(Line(((left, top + at), (left + _SIDE, top + at)), "muted", 0.5))
    frame(scene, left, top, left + _SIDE, top + _SIDE)
    _sums(scene, matrix, left, top, cell)
    every = 1 if size <= 16 else 8 if size <= 64 else 16
    for rank in range(0, size, every):
        middle = (rank + 0.5) * cell
        scene.add(Text(left - 6, top + middle + 4, str(rank), SMALL, "muted", "end"))
        scene.add(Text(left + middle, top - 6, str(rank), SMALL, "muted", "middle"))
    scene.add(Text(left + _SIDE / 2, top - 22, "receiving rank", NORMAL, "ink", "middle"))
    scene.add(Text(left - 28, top + _SIDE / 2, "sending rank", NORMAL, "ink", "middle", upright=True))


def _sums(scene: Scene, matrix: Ints, left: float, top: float, cell: float) -> None:
    """Bars of what each rank sends (right) and receives (below), on one scale."""
    sent, received = matrix.sum(axis=1), matrix.sum(axis=0)
    top_sum = max(int(sent.max(initial=0)), int(received.max(initial=0)), 1)
    pad = 1.0 if cell > 4 else 0.0
    for rank in range(len(matrix)):
        wide, tall = 30.0 * int(sent[rank]) / top_sum, 30.0 * int(received[rank]) / top_sum
        at = rank * cell
        sends, gets = (f"rank {rank} {what}" for what in ("sends", "receives"))
        scene.add(
            Rect(
                left + _SIDE + 4,
                top + at + pad,
                wide,
                cell - 2 * pad,
                HEAT,
                0.7,
                f"{sends} {bytes_text(sent[rank])}",
            ),
            Rect(
                left + at + pad,
                top + _SIDE + 4,
                cell - 2 * pad,
                tall,
                HEAT,
                0.7,
                f"{gets} {bytes_text(received[rank])}",
            ),
        )
    least, most = bytes_text(int(received.min())), bytes_text(int(received.max()))
    words = f"every rank receives {most}" if least == most else f"a rank receives {least} to {most}"
    scene.add(Text(left + _SIDE / 2, top + _SIDE + 52, words, SMALL, "muted", "middle"))


def _scale(scene: Scene, y: float, most: int) -> None:
    left, wide, steps = WIDTH / 2 - 120, 240.0, 24
    for i in range(steps):
        scene.add(Rect(left + wide * i / steps, y, wide / steps, 10, HEAT, _opacity((i + 1) / steps)))
    scene.add(Text(left - 8, y + 9, "0", SMALL, "muted", "end"))
    scene.add(Text(left + wide + 8, y + 9, f"{bytes_text(most)} from one rank to another", SMALL, "muted"))


def _opacity(share: float) -> float:
    return 0.12 + 0.88 * share
