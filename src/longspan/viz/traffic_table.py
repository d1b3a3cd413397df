"""A picture of how many bytes go from which rank to which, forward and backward."""

from __future__ import annotations

import numpy as np

from longspan.formatting import BYTE_UNITS, bytes_text, three, unit_of
from longspan.planning.plan import Plan
from longspan.spans import Ints
from longspan.viz.scene import HEAT, INK, MARGIN, MUTED, NORMAL, ON_DARK, SMALL, WIDTH, Scene, headed, picture
from longspan.viz.timeline import runs

_SIDE = 330.0
_NUMBERS, _NOTES = 8, 16
"""Most ranks whose cells have room for a number, and most whose cells have tooltips."""
_ABOUT = "Two matrices, sender by receiver: the darker a cell, the more bytes go from one rank to the other."


def traffic(plan: Plan, direction: str) -> Ints:
    """Return the bytes from each rank (row) to each rank (column) in one pass.

    >>> from longspan import layouts, masks
    >>> from longspan.api import plan
    >>> ring = plan(masks.causal(), layouts.zigzag(64, 2), q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    >>> int(traffic(ring, "forward")[:, 0].sum()) == ring.bytes_received(0)
    True
    """
    schedule = runs(plan)[direction == "backward"].schedule
    num_bytes = np.zeros((schedule.world_size, schedule.world_size), dtype=np.int64)
    for _, transfer in schedule.transfers():
        num_bytes[transfer.src, transfer.dst] += transfer.piece.num_bytes(schedule.sizes)
    return num_bytes


@picture
def traffic_picture(plan: Plan, *, title: str | None = None) -> Scene:
    """Draw the bytes from rank to rank as two heat maps on one scale, with numbers in the cells of a few ranks."""
    both = {direction: traffic(plan, direction) for direction in ("forward", "backward")}
    most = int(max(matrix.max(initial=0) for matrix in both.values()))
    unit, weight = unit_of(float(most), BYTE_UNITS)
    sums = ", ".join(f"{name} {bytes_text(int(matrix.sum()))}" for name, matrix in both.items())
    remark = f"{sums} in all; a row sends, a column receives, bars show the sums."
    scene, top = headed(title or f"Traffic: {plan.scheme.name}", [remark], _ABOUT)
    top += 50
    for number, (name, matrix) in enumerate(both.items()):
        left = MARGIN + 42 + number * (_SIDE + 92)
        _heat_map(scene, matrix, left, top, most, weight, plan.machine.node)
        scene.text(left + _SIDE / 2, top - 42, f"{name}, {unit}", NORMAL, align="center", bold=True)

    y, left, width, steps = top + _SIDE + 84, WIDTH / 2 - 120, 240.0, 24
    for i in range(steps):
        scene.box(scene.canvas, left + width * i / steps, y, width / steps, 10, HEAT, _opacity((i + 1) / steps))
    scene.text(left - 8, y + 9, "0", SMALL, MUTED, "right")
    scene.text(left + width + 8, y + 9, f"{bytes_text(most)} from one rank to another", SMALL, MUTED)
    scene.height = y + 32
    return scene


def _heat_map(scene: Scene, matrix: Ints, left: float, top: float, most: int, weight: float, node: int) -> None:
    size = len(matrix)
    cell = _SIDE / size
    axes = scene.axes(left, top, _SIDE, _SIDE, xlim=(0, size), ylim=(size, 0))
    labels = range(0, size, 1 if size <= 16 else 8 if size <= 64 else 16)
    axes.set_xticks([rank + 0.5 for rank in labels], [str(rank) for rank in labels])
    axes.set_yticks([rank + 0.5 for rank in labels], [str(rank) for rank in labels])
    axes.tick_params(length=0, pad=6, labelbottom=False, labeltop=True)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("receiving rank", labelpad=6)
    axes.set_ylabel("sending rank")

    side = 1 - 1 / cell if cell > 12 else 1.0  # a gap of a pixel
    cells = np.argwhere(matrix).tolist()
    if size > _NOTES:
        colors = [(HEAT, _opacity(int(matrix[src, dst]) / most)) for src, dst in cells]
        scene.boxes(axes, [(dst, src, side, side) for src, dst in cells], colors)
    else:
        for src, dst in cells:
            value = int(matrix[src, dst])
            note = f"rank {src} to rank {dst}: {bytes_text(value)}"
            scene.box(axes, dst, src, side, side, HEAT, _opacity(value / most), note)
            if size <= _NUMBERS:
                color = ON_DARK if value / most > 0.7 else INK
                number = three(value / weight)
                scene.text(dst + 0.5, src + 0.5, number, min(SMALL, cell / 3.4), color, "center", axes=axes)
    if node < size <= 128:
        edges = range(node, size, node)
        axes.vlines(edges, 0, size, color=MUTED, linewidth=0.5)
        axes.hlines(edges, 0, size, color=MUTED, linewidth=0.5)

    # Bars of the sums: what a rank sends on the right, what it receives below, on one scale.
    sent, received = matrix.sum(axis=1), matrix.sum(axis=0)
    longest = max(int(sent.max(initial=0)), int(received.max(initial=0)), 1)
    pad = 1 / cell if cell > 4 else 0.0
    begin = size + 4 / cell
    for rank in range(size):
        lengths = [30 / cell * int(sums[rank]) / longest for sums in (sent, received)]
        sends, receives = (bytes_text(int(sums[rank])) for sums in (sent, received))
        scene.box(axes, begin, rank + pad, lengths[0], 1 - 2 * pad, HEAT, 0.7, f"rank {rank} sends {sends}")
        scene.box(axes, rank + pad, begin, 1 - 2 * pad, lengths[1], HEAT, 0.7, f"rank {rank} receives {receives}")
    least, highest = bytes_text(int(received.min())), bytes_text(int(received.max()))
    text = f"every rank receives {highest}" if least == highest else f"a rank receives {least} to {highest}"
    scene.text(left + _SIDE / 2, top + _SIDE + 52, text, SMALL, MUTED, "center")


def _opacity(share: float) -> float:
    return 0.12 + 0.88 * share
