"""Plans of scans: planners, the transposed schedule for backward, predicted costs, and ScanPlan.

A plan has documents, a layout, a schedule and the reasons for its choice. It is a frozen value with a fingerprint and a
text form.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from longspan._compile import opaque
from longspan.errors import PlanError
from longspan.formatting import bytes_text, format_count
from longspan.layouts import Layout
from longspan.planning.choose import REASON_HEAD, Reason
from longspan.planning.machine import Floats, Machine, Work
from longspan.planning.scan_steps import (
    ChainPiece,
    Chains,
    Draft,
    ScanRole,
    ScanSchedule,
    ScanStep,
    StateSizes,
    StateTransfer,
)
from longspan.planning.validator import validate_scan
from longspan.spans import Ints, truncated_repr

# -- Planners: how the owner of every segment gets the state that enters it --------------------------------------------
# Each planner writes one chain, given the ranks of its segments, from step 0 on; chains are independent. Eight segments
# on ranks 0 to 7, what rank 7 receives:
#
#     chain        state[0:7)                                    after 7 steps, each rank waiting for the one before
#     doubling     [5:6) is joined by [4:5), then by [2:4) and so on: maps double their reach in every step, and the
#                  state [0:7) comes from rank 6 in the last one (1 + log2 7 steps)


ScanPlanner = Callable[[Draft, int, Sequence[int]], None]
"""Writes a chain, by number, with the ranks of its segments."""


def one_after_another(draft: Draft, chain: int, ranks: Sequence[int]) -> None:
    """A rank waits for the state that enters it, and passes on the one that leaves it. Only states travel."""
    step = 0
    for i, (rank, after) in enumerate(itertools.pairwise(ranks)):
        draft.fold(step, rank, chain, (0, i, i + 1))
        draft.send(step, (rank, after), chain, (0, i + 1))
        step += rank != after


def doubling(draft: Draft, chain: int, ranks: Sequence[int]) -> None:
    """In every step the piece that ends with a segment is joined with the one before, of the same length.

    Folds of a step come before its transfers, so what a transfer brought is folded in the next step.
    """
    step, reach, count = 0, 1, len(ranks) - 1
    starts = list(range(count))
    while reach < count:
        for i in range(reach, count):
            draft.send(step, (ranks[i - reach], ranks[i]), chain, (starts[i - reach], i - reach + 1))
        step += 1
        new = list(starts)
        for i in range(reach, count):
            new[i] = starts[i - reach]
            draft.fold(step, ranks[i], chain, (new[i], starts[i], i + 1))
        starts, reach = new, 2 * reach
    for i in range(count):
        draft.send(step, (ranks[i], ranks[i + 1]), chain, (0, i + 1))


SCAN_PLANNERS: dict[str, ScanPlanner] = {"chain": one_after_another, "doubling": doubling}


def build_draft(name: str, chains: Chains) -> Draft:
    """Return the draft of all chains by the planner of this name."""
    if name not in SCAN_PLANNERS:
        raise PlanError(
            f"scheme of a scan must be one of {', '.join(SCAN_PLANNERS)} and auto, but got {truncated_repr(name)}."
        )
    draft = Draft(chains.batches)
    for number, ranks in enumerate(chains.ranks()):
        if len(ranks) > 1:
            SCAN_PLANNERS[name](draft, number, ranks)
    return draft


# -- Backward: the transposed schedule ---------------------------------------------------------------------------------
# Gradients of states travel back along the path of the states. Forward is linear in the added terms (U) for given maps
# (M), so backward is its transpose. Where forward folded [i:k) and [k:j), backward gives M_right^T times the gradient
# of the whole to the left part and the gradient itself to the right part; where a piece was sent, its gradient comes
# back, and all gradients of one piece are added. No map travels twice: a rank keeps the M of every right part that it
# folded.
#
# Backward begins with the gradient of every entering state [0:i), without contributions of later segments, and ends
# with the gradient of every [i:i+1): the gradient of the state that leaves segment i, from all segments after it.
#
#     forward    step 0  0 ── state[0:1] ──► 1      step 1  1 folds state[0:1] map[1:2], 1 ── state[0:2] ──► 2
#     backward   step 0  2 ── dstate[0:2] ──► 1     step 1  1 splits it, 1 ── dstate[0:1] ──► 0         step 2


def transpose_steps(steps: tuple[ScanStep, ...]) -> tuple[ScanStep, ...]:
    """Return one rank's backward steps from its forward steps.

    >>> from longspan.planning.scan_steps import Fold
    >>> from longspan.spans import Span
    >>> state, mapped, whole = (ChainPiece.of(0, *ends, Span(0, 1)) for ends in ((0, 1), (1, 2), (0, 2)))
    >>> came = StateTransfer(0, 1, state, 2)
    >>> went = StateTransfer(1, 2, whole, 2)
    >>> for step in transpose_steps((ScanStep((came,)), ScanStep((went,), (Fold(1, state, mapped),)), ScanStep())):
    ...     print(step.transfers, step.computes)
    (2>1 dstate[0:2]c0b0:1,) ()
    (1>0 dstate[0:1]c0b0:1,) (fold state[0:1]c0b0:1 map[1:2]c0b0:1,)
    () ()
    """
    count = len(steps)
    backward: list[ScanStep] = []
    for number in reversed(range(count)):
        before = steps[number - 1].transfers if number else ()
        back = [StateTransfer(t.dst, t.src, t.piece.to_gradient(), count) for t in before]
        backward.append(ScanStep(tuple(back), steps[number].computes[::-1]))
    return tuple(backward)


# -- Cost of a scan on a machine ---------------------------------------------------------------------------------------
# Bytes are exact. Times assume that all ranks enter every step together. A step takes as long as its slowest rank: its
# folds, then the messages of its busiest link. Folds of dense maps are matrix products in float32, at about a quarter
# of a device's half-precision speed.


WIDE_SHARE = 0.25
STEP, SRC, DST, CHAIN, FIRST, END = range(6)


def price(name: str, draft: Draft, world_size: int, sizes: StateSizes, machine: Machine) -> tuple[Reason, Ints]:
    """Return the costs of all chains of the draft, and the bytes that each rank receives in both passes."""
    batch = np.array([len(rows) for rows in draft.batches], dtype=np.int64)
    moved, folds = draft.transfers, draft.folds
    there = batch[moved[:, CHAIN]] * (sizes.state_bytes + np.where(moved[:, FIRST] > 0, sizes.map_bytes, 0))
    back = batch[moved[:, CHAIN]] * sizes.state_bytes
    received = np.bincount(moved[:, DST], there, world_size).astype(np.int64)
    received_back = np.bincount(moved[:, SRC], back, world_size).astype(np.int64)
    forward = _message_seconds(moved, there, draft.num_steps, machine, world_size)
    forward += _draft_fold_seconds(draft, sizes, machine, batch, "forward")
    backward = _message_seconds(moved[:, (STEP, DST, SRC)], back, draft.num_steps, machine, world_size)
    backward += _draft_fold_seconds(draft, sizes, machine, batch, "backward")
    # Memory beyond own segments' states: pieces that arrived, and results of folds.
    folded = batch[folds[:, 2]] * (sizes.state_bytes + np.where(folds[:, 3] > 0, sizes.map_bytes, 0))
    held = received + np.bincount(folds[:, 1], folded, world_size).astype(np.int64)
    pairs = np.unique((moved[:, STEP] * world_size + moved[:, SRC]) * world_size + moved[:, DST])  # one message each
    messages = np.bincount(np.concatenate((pairs // world_size % world_size, pairs % world_size)), minlength=world_size)
    ops = np.bincount(folds[:, 1], minlength=world_size) * 2 + messages
    host = 2.0 * float((ops * machine.launch_seconds + messages * machine.message_seconds).max(initial=0.0))
    both = received + received_back
    reason = Reason(
        name,
        max(forward, host / 2) + machine.call_seconds,
        max(backward, host / 2) + machine.call_seconds,
        int(both.max(initial=0)),
        int(held.max(initial=0)),
        host_seconds=host + 2 * machine.call_seconds,
    )
    return reason, both


def _message_seconds(moved: Ints, num_bytes: Ints, num_steps: int, machine: Machine, world_size: int) -> float:
    """Return how long messages take, step by step: the time of the busiest port of any rank."""
    if not len(moved):
        return 0.0
    levels = machine.levels(moved[:, SRC], moved[:, DST])
    ports: Floats = np.zeros((num_steps, len(machine.links), 2, world_size))
    for side, end in enumerate((SRC, DST)):
        np.add.at(ports, (moved[:, STEP], levels, np.full(len(moved), side), moved[:, end]), num_bytes)
    return float(machine.link_seconds(ports.max(axis=(2, 3))).sum())


def _fold_seconds(is_composed: NDArray[np.bool_], batch: Ints, sizes: StateSizes, machine: Machine) -> Floats:
    """Return the time of each fold; `is_composed` if the maps are multiplied too."""
    if sizes.dense:
        flop = 2.0 * sizes.heads * sizes.keys * sizes.keys * (sizes.values + np.where(is_composed, sizes.keys, 0))
    else:
        flop = np.full(len(batch), 2.0 * sizes.heads * sizes.keys * sizes.values)
    each = flop * batch / (machine.flops * WIDE_SHARE) + 2 * machine.op_seconds
    return each + 3.0 * sizes.state_bytes * batch / machine.copy_bandwidth


def _draft_fold_seconds(draft: Draft, sizes: StateSizes, machine: Machine, batch: Ints, direction: str) -> float:
    """Return the time of the folds of every step on the busiest rank. Backward uses maps without composing them."""
    folds = draft.folds
    if not len(folds):
        return 0.0
    is_composed = (folds[:, 3] > 0) & (direction == "forward")
    each = _fold_seconds(is_composed, batch[folds[:, 2]], sizes, machine)
    width = int(folds[:, 1].max()) + 1
    sums = np.bincount(folds[:, 0] * width + folds[:, 1], each)
    return float(np.pad(sums, (0, -len(sums) % width)).reshape(-1, width).max(axis=1).sum())


def step_seconds(step: ScanStep, sizes: StateSizes, machine: Machine, direction: str) -> float:
    """Return the time of one rank's folds of one step."""
    if not step.computes:
        return 0.0
    is_composed = [fold.whole.role is ScanRole.MAP and direction == "forward" for fold in step.computes]
    batch = np.array([len(fold.left.batch) for fold in step.computes], dtype=np.int64)
    return float(_fold_seconds(np.array(is_composed), batch, sizes, machine).sum())


def step_work(step: ScanStep, rank: int) -> Work:
    """Return what one rank's host queues in one step: folds and messages."""
    peers = {(t.src, t.dst) for t in step.transfers}
    sent = sum(src == rank for src, _ in peers)
    return Work(ops=2.0 * len(step.computes) + sent + bool(peers), messages=float(len(peers)))


def held_bytes(steps: tuple[ScanStep, ...], rank: int, sizes: StateSizes, direction: str) -> int:
    """Return the bytes that a rank holds at the end: pieces that arrived, and results of folds."""
    pieces = [t.piece for step in steps for t in step.transfers if t.dst == rank]
    folded = [fold.whole for step in steps for fold in step.computes]
    pieces += folded if direction == "forward" else [piece.to_gradient() for piece in folded]
    return sum(piece.num_bytes(sizes) for piece in pieces)


# -- Moving tokens to a contiguous layout and back ---------------------------------------------------------------------
# A layout that suits attention may split every document over all ranks (striped, zigzag per document), which makes
# chains long. After one relayout the tokens of a rank are contiguous. What travels is every row whose owner changes:
# inputs and outputs in forward, their gradients in backward.


def moved_tokens(source: Layout, target: Layout) -> Ints:
    """Return (source rank, target rank, tokens) of the tokens that change their owner.

    >>> from longspan.layouts import contiguous, zigzag
    >>> moved_tokens(zigzag(8, 2), contiguous(8, 2)).tolist()
    [[0, 1, 2], [1, 0, 2]]
    """
    starts = np.union1d(source.by_position[:, 0], target.by_position[:, 0])
    lengths = np.diff(np.append(starts, source.seq_len))
    ends = [
        layout.by_position[np.searchsorted(layout.by_position[:, 0], starts, side="right") - 1, 2]
        for layout in (source, target)
    ]
    pair = ends[0] * source.world_size + ends[1]
    tokens = np.bincount(pair, lengths, source.world_size**2).astype(np.int64)
    pairs = np.flatnonzero(tokens)
    table = np.stack((pairs // source.world_size, pairs % source.world_size, tokens[pairs]), axis=1)
    return table[table[:, 0] != table[:, 1]]


def _relayout_price(source: Layout, target: Layout, token_bytes: int, machine: Machine) -> tuple[float, Ints]:
    """Return the seconds of one pass, and the bytes that every rank receives in it; `token_bytes`: both ways."""
    moved = moved_tokens(source, target)
    num_bytes, size = moved[:, 2] * token_bytes, source.world_size
    ports: Floats = np.zeros((len(machine.links), 2, size))
    levels = machine.levels(moved[:, 0], moved[:, 1])
    for side in range(2):
        np.add.at(ports, (levels, np.full(len(moved), side), moved[:, side]), num_bytes)
    seconds = float(machine.link_seconds(ports.max(axis=(1, 2)), hops=2))
    copied = 2.0 * float(source.num_tokens.max(initial=0)) * token_bytes / machine.copy_bandwidth
    return seconds + copied, np.bincount(moved[:, 1], num_bytes, size).astype(np.int64)


# -- Plans -------------------------------------------------------------------------------------------------------------


RELAYOUT = "relayout"


@opaque
@dataclass(frozen=True, eq=False, repr=False)
class ScanPlan:
    """How states of a recurrence get from segment to segment. Make one with `longspan.scan_plan`."""

    chains: Chains
    sizes: StateSizes
    dtype: str
    """The dtype of states."""
    scheme: str
    machine: Machine
    draft: Draft
    reasons: tuple[Reason, ...]
    source: Layout | None = None
    """The layout of tokens before a relayout; None: tokens are not moved."""

    prepare: ClassVar[Callable[..., None]]
    """`plan.prepare(rank, device)`, as that of a plan of attention."""

    @property
    def layout(self) -> Layout:
        """The layout of tokens while the recurrence is computed."""
        return self.chains.layout

    @property
    def home(self) -> Layout:
        """The layout of tokens before and after."""
        return self.layout if self.source is None else self.source

    @cached_property
    def _steps(self) -> dict[int, tuple[tuple[ScanStep, ...], tuple[ScanStep, ...]]]:
        return {}

    def steps(self, rank: int, direction: str = "forward") -> tuple[ScanStep, ...]:
        """Return the steps of one rank."""
        if direction not in ("forward", "backward"):
            raise PlanError(f"direction must be 'forward' or 'backward', but got {direction!r}.")
        if rank not in self._steps:
            forward = self.draft.steps(rank)
            self._steps[rank] = forward, transpose_steps(forward)
        return self._steps[rank][direction == "backward"]

    def kept(self, rank: int) -> tuple[ChainPiece, ...]:
        """Return the pieces whose M the rank keeps from forward to backward, in the order of their first fold."""
        return tuple(dict.fromkeys(fold.right for step in self.steps(rank) for fold in step.computes))

    def schedule(self, direction: str = "forward") -> ScanSchedule:
        """Return every rank's steps, written out."""
        steps = tuple(self.steps(rank, direction) for rank in range(self.layout.world_size))
        return ScanSchedule(self.scheme, direction, self.layout, self.sizes, steps)

    def bytes_received(self, rank: int, direction: str = "forward") -> int:
        """Return the bytes that the rank receives in one pass."""
        steps = self.steps(rank, direction)
        return sum(t.piece.num_bytes(self.sizes) for step in steps for t in step.transfers if t.dst == rank)

    def validate(self) -> None:
        """Raise ScheduleError unless the schedules are correct; the proof does not depend on the planner."""
        validate_scan(self.schedule(), self.schedule("backward"), self.chains)

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest that ranks compare."""
        parts = self.scheme, self.dtype, self.sizes.text(), self.home.fingerprint, self.chains.fingerprint
        return hashlib.sha256(f"scan {' '.join(parts)}".encode()).hexdigest()

    def text(self) -> str:
        """Return layout, steps and chains as text."""
        lines = [self.schedule().text()]
        lines += [f"chain {n}: {' '.join(map(str, ranks))}" for n, ranks in enumerate(self.chains.ranks())]
        return "\n".join(lines)

    def explain(self) -> str:
        """Return a text with the costs of the compared schemes."""
        most = self.reasons[0].bytes_received
        lines = [
            f"{self.scheme} over {self.home}: {format_count(len(self.chains.batches), 'chain')},"
            f" {format_count(len(self.chains.table), 'segment')}, {format_count(self.draft.num_steps, 'step')}, at most"
            f" {bytes_text(most)} a rank in both passes, on {self.machine.name}.",
            REASON_HEAD,
        ]
        return "\n".join((*lines, *map(str, self.reasons)))

    def __repr__(self) -> str:
        return f"<scan plan {self.scheme}, {format_count(len(self.chains.batches), 'chain')} over {self.home}>"

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScanPlan) and self.fingerprint == other.fingerprint


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """Another layout in which the recurrence could be computed: its chains, and the bytes of a token both ways."""

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
    """Return the plan of the named scheme, or of the fastest one on the machine."""
    if scheme == RELAYOUT and elsewhere is not None:
        return _relayout_plan(chains.layout, elsewhere, sizes, dtype, machine)
    judged: list[tuple[Reason, Draft]] = []
    for name in SCAN_PLANNERS if scheme == "auto" else (scheme,):
        draft = build_draft(name, chains)
        judged.append((price(name, draft, chains.layout.world_size, sizes, machine)[0], draft))
    judged.sort(key=lambda pair: (pair[0].seconds, pair[0].bytes_received))
    chosen = replace(judged[0][0], chosen=True)
    others = tuple(reason for reason, _ in judged[1:])
    stays = ScanPlan(chains, sizes, dtype, chosen.scheme, machine, judged[0][1], (chosen, *others))
    if scheme != "auto" or elsewhere is None:
        return stays
    moves = _relayout_plan(chains.layout, elsewhere, sizes, dtype, machine)
    first, second = sorted((stays, moves), key=lambda plan: plan.reasons[0].seconds)
    slower = sorted((replace(second.reasons[0], chosen=False), *others), key=lambda reason: reason.seconds)
    reasons = first.reasons[0], *slower
    return ScanPlan(first.chains, sizes, dtype, first.scheme, machine, first.draft, reasons, first.source)


def _relayout_plan(source: Layout, elsewhere: Elsewhere, sizes: StateSizes, dtype: str, machine: Machine) -> ScanPlan:
    """Return the fastest plan in another layout, with tokens moved there and back."""
    plan = planned_scan(elsewhere.chains, sizes, dtype, "auto", machine)
    seconds, received = _relayout_price(source, plan.layout, elsewhere.token_bytes, machine)
    inner = plan.reasons[0]
    _, states = price(inner.scheme, plan.draft, plan.layout.world_size, sizes, machine)
    reason = replace(
        inner,
        scheme=f"{RELAYOUT}, {inner.scheme}",
        forward_seconds=inner.forward_seconds + seconds,
        backward_seconds=inner.backward_seconds + seconds,
        bytes_received=int((2 * received + states).max(initial=0)),
        peak_bytes=inner.peak_bytes + int(received.max(initial=0)),
    )
    return ScanPlan(plan.chains, sizes, dtype, reason.scheme, machine, plan.draft, (reason,), source)
