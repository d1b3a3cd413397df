"""What a scan costs on a machine: bytes exactly, time as if all ranks entered every step together.

A step takes as long as its slowest rank: its folds, and then the messages of its busiest link. Folds of dense maps are
matrix products in float32, for which a device has about a quarter of its half-precision speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longspan.schedules.cost.machine import Floats, Machine
from longspan.schedules.scans.draft import Draft
from longspan.schedules.scans.words import StateSizes
from longspan.span import Ints

WIDE_SHARE = 0.25
STEP, SRC, DST, CHAIN, FIRST, END = range(6)


@dataclass(frozen=True)
class Price:
    """Both passes of a draft on a machine."""

    forward_seconds: float
    backward_seconds: float
    received: tuple[Ints, Ints]
    """Bytes that each rank takes from the wire in each pass."""
    peak_bytes: int
    """What the rank with most holds beside its own segments' states: pieces that came, results of folds."""
    host_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def price(draft: Draft, world_size: int, sizes: StateSizes, machine: Machine) -> Price:
    """Of all chains of the draft."""
    rows = np.array([len(batch) for batch in draft.batches], dtype=np.int64)
    moved, folds = draft.transfers, draft.folds
    batch = rows[moved[:, CHAIN]]
    there = batch * (sizes.state_bytes + np.where(moved[:, FIRST] > 0, sizes.map_bytes, 0))
    back = batch * sizes.state_bytes
    received = tuple(
        np.bincount(ends, weights, world_size).astype(np.int64)
        for ends, weights in ((moved[:, DST], there), (moved[:, SRC], back))
    )
    work = _fold_seconds(draft, sizes, machine, rows)
    forward = _seconds(moved, there, draft.num_steps, machine, world_size) + work
    turned = moved[:, (STEP, DST, SRC)]
    backward = _seconds(turned, back, draft.num_steps, machine, world_size) + work
    made = rows[folds[:, 2]] * (sizes.state_bytes + np.where(folds[:, 3] > 0, sizes.map_bytes, 0))
    held = received[0] + np.bincount(folds[:, 1], made, world_size).astype(np.int64)
    messages = np.bincount(np.concatenate((moved[:, SRC], moved[:, DST])), minlength=world_size)
    ops = np.bincount(folds[:, 1], minlength=world_size) * 2 + messages
    host = 2.0 * float((ops * machine.launch_seconds + messages * machine.message_seconds).max(initial=0.0))
    overhead = 2 * machine.call_seconds
    return Price(
        max(float(forward), host / 2) + machine.call_seconds,
        max(float(backward), host / 2) + machine.call_seconds,
        (received[0], received[1]),
        int(held.max(initial=0)),
        host + overhead,
    )


def _seconds(moved: Ints, weights: Ints, num_steps: int, machine: Machine, world_size: int) -> float:
    """How long messages take, step by step: the busiest port of any rank."""
    if not len(moved):
        return 0.0
    levels = machine.levels(moved[:, SRC], moved[:, DST])
    ports: Floats = np.zeros((num_steps, len(machine.links), 2, world_size))
    for way, end in enumerate((SRC, DST)):
        ways = np.full(len(moved), way, dtype=np.int64)
        np.add.at(ports, (moved[:, STEP], levels, ways, moved[:, end]), weights)
    busiest = ports.max(axis=(2, 3))
    latency = np.array([link.latency for link in machine.links])
    bandwidth = np.array([link.bandwidth for link in machine.links])
    return float(np.where(busiest > 0, latency + busiest / bandwidth, 0.0).max(axis=1).sum())


def fold_flop(sizes: StateSizes, composed: bool) -> float:
    """Of one fold of one batch row; `composed` if M is joined too."""
    if not sizes.dense:
        return 2.0 * sizes.heads * sizes.keys * sizes.values
    return 2.0 * sizes.heads * sizes.keys * sizes.keys * (sizes.values + (sizes.keys if composed else 0))


def _fold_seconds(draft: Draft, sizes: StateSizes, machine: Machine, rows: Ints) -> float:
    """Folds of every step on the rank that has most."""
    folds = draft.folds
    if not len(folds):
        return 0.0
    flop = np.where(folds[:, 3] > 0, fold_flop(sizes, True), fold_flop(sizes, False)) * rows[folds[:, 2]]
    each = flop / (machine.flops * WIDE_SHARE) + 2 * machine.op_seconds
    each = each + 3.0 * sizes.state_bytes * rows[folds[:, 2]] / machine.copy_bandwidth
    width = int(folds[:, 1].max()) + 1
    sums = np.bincount(folds[:, 0] * width + folds[:, 1], each)
    return float(np.pad(sums, (0, -len(sums) % width)).reshape(-1, width).max(axis=1).sum())
