"""ScanPlan: documents, a layout and a schedule, a frozen value with a fingerprint, a text form and reasons."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.number_words import bytes_text, counted
from longspan.schedules.choose import REASON_HEAD, Reason
from longspan.schedules.cost.machine import Machine
from longspan.schedules.scans.chains import Chains
from longspan.schedules.scans.draft import Draft
from longspan.schedules.scans.planners import SCAN_PLANNERS, scan_planner
from longspan.schedules.scans.price import price
from longspan.schedules.scans.proof import validate_scan
from longspan.schedules.scans.relayout import relayout_price
from longspan.schedules.scans.transposed import kept, transposed
from longspan.schedules.scans.words import ChainPiece, ScanSchedule, ScanStep, StateSizes
from longspan.sealed import sealed

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
