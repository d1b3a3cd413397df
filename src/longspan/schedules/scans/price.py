"""What a scan costs on a machine: bytes exactly, time as if all ranks entered every step together.

A step takes as long as its slowest rank: its folds, and then the messages of its busiest link. Folds of dense maps are
matrix products in float32, for which a device has about a quarter of its half-precision speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longspan.schedules.cost.machine import Floats, Machine, Work
from longspan.schedules.scans.draft import Draft
from longspan.schedules.scans.words import ScanRole, ScanStep, StateSizes
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
    forward = _seconds(moved, there, draft.num_steps, machine, world_size)
    forward += _fold_seconds(draft, sizes, machine, rows, "forward")
    backward = _seconds(moved[:, (STEP, DST, SRC)], back, draft.num_steps, machine, world_size)
    backward += _fold_seconds(draft, sizes, machine, rows, "backward")
    made = rows[folds[:, 2]] * (sizes.state_bytes + np.where(folds[:, 3] > 0, sizes.map_bytes, 0))
    held = received[0] + np.bincount(folds[:, 1], made, world_size).astype(np.int64)
    pairs = np.unique((moved[:, STEP] * world_size + moved[:, SRC]) * world_size + moved[:, DST])  # one message each
    messages = np.bincount(np.concatenate((pairs // world_size % world_size, pairs % world_size)), minlength=world_size)
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


def fold_seconds(flop: Floats, rows: Ints, sizes: StateSizes, machine: Machine) -> Floats:
    """Of folds of so many operations and batch rows each."""
    each = flop * rows / (machine.flops * WIDE_SHARE) + 2 * machine.op_seconds
    return each + 3.0 * sizes.state_bytes * rows / machine.copy_bandwidth


def _fold_seconds(draft: Draft, sizes: StateSizes, machine: Machine, rows: Ints, direction: str) -> float:
    """Folds of every step on the rank that has most. In backward maps are used as they are."""
    folds = draft.folds
    if not len(folds):
        return 0.0
    composed = (folds[:, 3] > 0) & (direction == "forward")
    flop = np.where(composed, fold_flop(sizes, True), fold_flop(sizes, False))
    each = fold_seconds(flop, rows[folds[:, 2]], sizes, machine)
    width = int(folds[:, 1].max()) + 1
    sums = np.bincount(folds[:, 0] * width + folds[:, 1], each)
    return float(np.pad(sums, (0, -len(sums) % width)).reshape(-1, width).max(axis=1).sum())


def step_seconds(step: ScanStep, sizes: StateSizes, machine: Machine, direction: str) -> float:
    """One rank's folds of one step."""
    if not step.computes:
        return 0.0
    composed = [fold.whole.role is ScanRole.MAP and direction == "forward" for fold in step.computes]
    flop = np.array([fold_flop(sizes, each) for each in composed])
    rows = np.array([len(fold.left.batch) for fold in step.computes], dtype=np.int64)
    return float(fold_seconds(flop, rows, sizes, machine).sum())


def step_work(step: ScanStep, rank: int) -> Work:
    """What one rank's host queues in one step: folds, and messages."""
    peers = {(t.src, t.dst) for t in step.transfers}
    sent = sum(src == rank for src, _ in peers)
    return Work(ops=2.0 * len(step.computes) + sent + bool(peers), messages=float(len(peers)))


def held_bytes(steps: tuple[ScanStep, ...], rank: int, sizes: StateSizes, direction: str) -> int:
    """What a rank holds at the end: pieces that came, and results of folds."""
    came = sum(t.piece.num_bytes(sizes) for step in steps for t in step.transfers if t.dst == rank)
    folds = [fold for step in steps for fold in step.computes]
    made = [fold.whole if direction == "forward" else fold.whole.to_gradient() for fold in folds]
    return came + sum(piece.num_bytes(sizes) for piece in made)
