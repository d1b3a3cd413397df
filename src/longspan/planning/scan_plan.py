"""ScanPlan: documents, a layout and a schedule of a recurrence, with its predicted cost and the reasons for the choice.

A plan is a frozen value with a fingerprint and a text form.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from longspan._compile import sealed
from longspan.errors import PlanError
from longspan.formatting import bytes_text, counted
from longspan.layouts import Layout
from longspan.planning.choose import REASON_HEAD, Reason
from longspan.planning.machine import Floats, Machine, Work
from longspan.planning.scan_planners import SCAN_PLANNERS, kept, relayout_price, scan_planner, transposed
from longspan.planning.scan_steps import ChainPiece, Chains, Draft, ScanRole, ScanSchedule, ScanStep, StateSizes
from longspan.planning.scan_validate import validate_scan
from longspan.spans import Ints

# -- Cost of a scan on a machine ---------------------------------------------------------------------------------------
# Bytes are exact. Times assume that all ranks enter every step together. A step takes as long as its slowest rank: its
# folds, then the messages of its busiest link. Folds of dense maps are matrix products in float32, at about a quarter
# of a device's half-precision speed.


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


# -- Plans -------------------------------------------------------------------------------------------------------------


RELAYOUT = "relayout"
MAX_SENDS = 20_000
"""Of an exchange, about: more are not worth writing down."""


@sealed
@dataclass(frozen=True, eq=False, repr=False)
class ScanPlan:
    """How states of a recurrence get from segment to segment. Make one with `longspan.scan_plan`."""

    chains: Chains
    sizes: StateSizes
    dtype: str
    """Of states."""
    scheme: str
    machine: Machine
    draft: Draft
    reasons: tuple[Reason, ...]
    source: Layout | None = None
    """Where tokens are before they are moved; None: they stay where they are."""

    @property
    def layout(self) -> Layout:
        """Who holds which tokens while the recurrence is computed."""
        return self.chains.layout

    @property
    def home(self) -> Layout:
        """Who holds which tokens before and after."""
        return self.layout if self.source is None else self.source

    @cached_property
    def _steps(self) -> dict[int, tuple[tuple[ScanStep, ...], tuple[ScanStep, ...]]]:
        return {}

    def steps(self, rank: int, direction: str = "forward") -> tuple[ScanStep, ...]:
        """What one rank does, step by step."""
        if direction not in ("forward", "backward"):
            raise PlanError(f"direction is 'forward' or 'backward', but {direction!r} was asked for.")
        if rank not in self._steps:
            forward = self.draft.steps(rank)
            self._steps[rank] = forward, transposed(forward)
        return self._steps[rank][direction == "backward"]

    def kept(self, rank: int) -> tuple[ChainPiece, ...]:
        """The pieces whose M the rank keeps from forward to backward."""
        return kept(self.steps(rank))

    def schedule(self, direction: str = "forward") -> ScanSchedule:
        """Every rank's steps, written out."""
        ranks = range(self.layout.world_size)
        steps = tuple(self.steps(rank, direction) for rank in ranks)
        return ScanSchedule(self.scheme, direction, self.layout, self.sizes, steps)

    def bytes_received(self, rank: int, direction: str = "forward") -> int:
        """What the rank takes from the wire in one pass."""
        steps = self.steps(rank, direction)
        return sum(t.piece.num_bytes(self.sizes) for step in steps for t in step.transfers if t.dst == rank)

    def validate(self) -> None:
        """Proves the plan without knowing its planner; raises ScheduleError otherwise."""
        validate_scan(self.schedule(), self.schedule("backward"), self.chains)

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest that ranks compare."""
        parts = self.scheme, self.dtype, self.sizes.text(), self.home.fingerprint, self.chains.fingerprint
        return hashlib.sha256(f"scan {' '.join(parts)}".encode()).hexdigest()

    def text(self) -> str:
        """Layout, chains and steps, in words that people read."""
        lines = [self.schedule().text()]
        lines += [f"chain {n}: {' '.join(map(str, ranks))}" for n, ranks in enumerate(self.chains.ranks())]
        return "\n".join(lines)

    def explain(self) -> str:
        """What was compared, with figures."""
        most = self.reasons[0].bytes_received
        lines = [
            f"{self.scheme} over {self.home}: {counted(len(self.chains.batches), 'chain')},"
            f" {counted(len(self.chains.table), 'segment')}, {counted(self.draft.num_steps, 'step')}, at most"
            f" {bytes_text(most)} a rank in both passes, on {self.machine.name}.",
            REASON_HEAD,
        ]
        return "\n".join((*lines, *map(str, self.reasons)))

    def __repr__(self) -> str:
        return f"<scan plan {self.scheme}, {counted(len(self.chains.batches), 'chain')} over {self.home}>"

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScanPlan) and self.fingerprint == other.fingerprint


def drafted(name: str, chains: Chains, node: int) -> Draft:
    """What the planner of this name writes for all chains."""
    planner, node = scan_planner(name, node)
    draft = Draft(chains.batches)
    for number, ranks in enumerate(chains.ranks()):
        if len(ranks) > 1:
            planner(draft, number, ranks, node)
    return draft


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """Another layout in which the recurrence could be computed: its chains, and what a token weighs that goes there and
    comes back."""

    chains: Chains
    token_bytes: int


def planned_scan(
    chains: Chains,
    sizes: StateSizes,
    dtype: str,
    scheme: str,
    machine: Machine,
    elsewhere: Elsewhere | None = None,
) -> ScanPlan:
    """The plan by the named scheme, or by the quickest on the machine."""
    if scheme == RELAYOUT and elsewhere is not None:
        return _moved(chains.layout, elsewhere, planned_scan(elsewhere.chains, sizes, dtype, "auto", machine))
    names = _candidates(chains, machine) if scheme == "auto" else [scheme]
    names = [f"two_level({machine.node})" if name == "two_level" else name for name in names]  # it tells plans apart
    judged: list[tuple[Reason, Draft]] = []
    for name in names:
        draft = drafted(name, chains, machine.node)
        judged.append((_reason(name, draft, chains, sizes, machine), draft))
    judged.sort(key=lambda pair: (pair[0].seconds, pair[0].bytes_received))
    chosen = replace(judged[0][0], chosen=True)
    others = tuple(reason for reason, _ in judged[1:])
    stays = ScanPlan(chains, sizes, dtype, chosen.scheme, machine, judged[0][1], (chosen, *others))
    if scheme != "auto" or elsewhere is None:
        return stays
    moves = _moved(chains.layout, elsewhere, planned_scan(elsewhere.chains, sizes, dtype, "auto", machine))
    first, second = sorted((stays, moves), key=lambda plan: plan.reasons[0].seconds)
    reasons = first.reasons[0], *sorted((replace(second.reasons[0], chosen=False), *others), key=lambda r: r.seconds)
    return _told(first, reasons, first.source)


def _moved(source: Layout, elsewhere: Elsewhere, plan: ScanPlan) -> ScanPlan:
    """The plan of another layout, with tokens moved there and back."""
    seconds, received = relayout_price(source, plan.layout, elsewhere.token_bytes, plan.machine)
    inner = plan.reasons[0]
    both = price(plan.draft, plan.layout.world_size, plan.sizes, plan.machine).received
    reason = replace(
        inner, scheme=f"{RELAYOUT}, {inner.scheme}", forward_seconds=inner.forward_seconds + seconds,
        backward_seconds=inner.backward_seconds + seconds,
        bytes_received=int((2 * received + both[0] + both[1]).max(initial=0)),
        peak_bytes=inner.peak_bytes + int(received.max(initial=0)),
    )  # fmt: skip
    return _told(plan, (reason,), source)


def _told(plan: ScanPlan, reasons: tuple[Reason, ...], source: Layout | None) -> ScanPlan:
    """The plan with other reasons, the first of which is its own."""
    return ScanPlan(
        plan.chains, plan.sizes, plan.dtype, reasons[0].scheme, plan.machine, plan.draft, reasons, source
    )  # fmt: skip


def _candidates(chains: Chains, machine: Machine) -> list[str]:
    """What is worth comparing: an exchange of very long chains is not, nor levels where there is one node."""
    sends = sum(len(ranks) ** 2 for ranks in chains.ranks() if len(ranks) > 1)
    names = [name for name in SCAN_PLANNERS if name != "two_level"]
    if chains.layout.world_size > machine.node:
        names.append(f"two_level({machine.node})")
    return [name for name in names if name != "exchange" or sends <= MAX_SENDS]


def _reason(name: str, draft: Draft, chains: Chains, sizes: StateSizes, machine: Machine) -> Reason:
    found = price(draft, chains.layout.world_size, sizes, machine)
    both = found.received[0] + found.received[1]
    return Reason(
        name, found.forward_seconds, found.backward_seconds, int(both.max(initial=0)), found.peak_bytes,
        host_seconds=found.host_seconds,
    )  # fmt: skip
