"""From a user's tensors to a recurrence's output, on one device or over ranks; what makes no sense is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import PlanError, in_context
from longspan.execution.engine.transports import Loopback, Program
from longspan.execution.handed import group_of, planned_group
from longspan.execution.ops import run_over, settings_of, told_in
from longspan.execution.relayouts import Relayout
from longspan.execution.scans.contract import Recurrence, ScanKernel, ScanWork, Segments
from longspan.execution.scans.fitting import check_plan, map_name
from longspan.execution.scans.kernels import choose_scan_kernel
from longspan.execution.scans.own import OwnRecurrence
from longspan.execution.scans.spread import LocalSegments, RankScan, spread
from longspan.execution.simulated import SimulatedRank
from longspan.execution.trust.agreement import SCAN, WIDTH, Record
from longspan.execution.trust.group import Call
from longspan.execution.trust.settings import Safety
from longspan.masks.document_rows import document_rows
from longspan.schedules.scans.plan import ScanPlan
from longspan.span import Ints, shortened
from longspan.version import VERSION

HOW = "longspan.scan_plan(documents, layout, heads=..., keys=..., values=..., maps=...)"
"""How plans of these calls are made."""


@dataclass(frozen=True, eq=False)
class ScanRequest:
    """What is asked for beside tensors; see `longspan.gated_delta_rule`."""

    operator: str
    documents: Any = None
    plan: Any = None
    group: Any = None
    kernel: str = "auto"
    name: str = ""


@torch.compiler.disable(reason="recurrences over ranks run between compiled graphs")
def run(recurrence: Any, tokens: tuple[Any, ...], shared: tuple[Any, ...], asked: ScanRequest) -> Tensor:
    """The output of this rank's tokens, with the errors of a public call."""
    group = group_of(asked.group)
    if isinstance(group, SimulatedRank) and isinstance(asked.plan, ScanPlan):
        return _together(recurrence, tokens, shared, asked, group)
    name = planned_group(group, asked.plan, asked.documents, HOW)
    with in_context(lambda: _described(asked, tokens, group)), told_in(name) if name else nullcontext():
        if not isinstance(asked.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(
                f"name = {shortened(asked.name)} was given. A call's name is a str, the same on every rank."
            )
        place = (group.rank(), group.size()) if name else None
        if asked.plan is None:
            work = ScanWork(recurrence, tokens, shared, _whole(tokens[0], asked.documents))
            return alone(choose_scan_kernel(asked.kernel, work), work)
        check_plan(asked.plan, recurrence, tokens, place)
        plan, rank = asked.plan, 0 if place is None else place[0]
        local = _local(plan, rank)
        work = ScanWork(recurrence, tokens, shared, local.segments)
        kernel = choose_scan_kernel(asked.kernel, work)
        learns = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (*tokens, *shared, *recurrence.captured)
        )
        if not name:  # one rank, whose spans may be out of order
            return spread(kernel, work, RankScan(plan, rank, local, _by_itself, nullcontext), learns=learns)
        carrier = Carrier(plan, name, asked.name, tokens[0].device, recurrence, kernel.name, learns)
        ranks = RankScan(plan, rank, local, carrier, lambda: told_in(name))
        if plan.source is None:
            return spread(kernel, work, ranks, learns=learns)
        carrier(_nothing(), "forward", 0)  # ranks agree before tokens move
        there = tuple(Relayout.apply(t, plan.source, plan.layout, group, 1) for t in tokens)
        out = spread(kernel, replace(work, tokens=there), ranks, learns=learns)
        return Relayout.apply(out, plan.layout, plan.source, group, 1)  # type: ignore[return-value]


def _together(
    recurrence: Any, tokens: tuple[Any, ...], shared: tuple[Any, ...], asked: ScanRequest, here: SimulatedRank
) -> Tensor:
    """All ranks are in this process: whole documents, of which each rank takes its tokens."""
    plan, layout = asked.plan, asked.plan.home
    check_plan(plan, recurrence, tokens, (here.rank(), here.size()))

    def compute(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
        whole = tuple(layout.unshard(tensors, 1) for tensors in zip(*parts, strict=True))
        work = ScanWork(recurrence, whole, shared, Segments(plan.chains.whole))
        out = alone(choose_scan_kernel(asked.kernel, work), work)
        return [layout.shard(out, rank, 1) for rank in range(here.size())]

    return here.meet(asked.operator, tokens, compute)


def _by_itself(program: Program[list[Tensor]], direction: str, number: int) -> tuple[list[Tensor], int]:  # noqa: ARG001
    return Loopback().run([program])[0], 0


def _nothing() -> Program[list[Tensor]]:
    """A program without messages."""
    yield from ()
    return []


def alone(kernel: ScanKernel, work: ScanWork) -> Tensor:
    """On one device, where every document is one segment."""
    shape = (len(work.segments), *work.recurrence.state_shape(work.tokens))
    dtype = work.recurrence.state_dtype(work.tokens)
    return kernel.local(work, torch.zeros(shape, dtype=dtype, device=work.tokens[0].device))[0]


def _whole(x: Tensor, documents: Any) -> Segments:
    batch, tokens = x.shape[:2]
    numbers = document_rows(documents, tokens, PlanError)
    if len(numbers) not in (1, batch):
        raise PlanError(
            f"documents are given for {len(numbers)} batch rows, but there are {batch}. Give one list of lengths for"
            f" all rows, or one per row."
        )
    rows: list[Ints] = []
    for row in range(batch if tokens else 0):
        edges = np.flatnonzero(np.diff(numbers[row if len(numbers) > 1 else 0])) + 1
        starts, stops = np.append(0, edges), np.append(edges, tokens)
        rows.append(np.stack((np.full(len(starts), row), starts, stops), axis=1))
    return Segments(np.concatenate(rows) if rows else np.empty((0, 3), dtype=np.int64))


_known: WeakKeyDictionary[ScanPlan, dict[int, LocalSegments]] = WeakKeyDictionary()


def _local(plan: ScanPlan, rank: int) -> LocalSegments:
    known = _known.setdefault(plan, {})
    if rank not in known:
        known[rank] = LocalSegments.of(plan, rank)
    return known[rank]


@dataclass(frozen=True, eq=False)
class Carrier:
    """Carries a rank's messages over a process group: one call in each direction."""

    plan: ScanPlan
    group: str
    name: str
    device: torch.device
    recurrence: Recurrence
    kernel: str
    learns: bool

    def __call__(self, program: Program[list[Tensor]], direction: str, number: int) -> tuple[list[Tensor], int]:
        backward = direction == "backward"
        safety = settings_of(self.group, backward=backward)
        record = None if backward else self._record(safety)
        dtype, steps = getattr(torch, self.plan.dtype), self.plan.draft.num_steps
        call = Call(self.plan.fingerprint, direction, steps, dtype, self.device, safety, record, self.name, number)
        return run_over(program, self.group, call)

    def _record(self, safety: Safety) -> Record:
        plan, sizes = self.plan, self.plan.sizes
        states = f"{sizes.heads} x {sizes.keys} x {sizes.values}, {map_name(sizes)}, batch {sizes.batch}"
        return Record(
            VERSION, str(torch.__version__), plan.fingerprint[: WIDTH - 1], plan.chains.documents[:16],
            plan.layout.fingerprint[:16], states, plan.dtype, self.device.type, f"{SCAN}{plan.scheme}",
            *_options(self.recurrence, self.kernel), "none", "share" if self.learns else "not wanted",
            str(safety.checked), repr(self.name) if self.name else "none",
        )  # fmt: skip


def _options(recurrence: Recurrence, kernel: str) -> tuple[str, str]:
    """The scale, and what else tells apart recurrences over the same states.

    >>> from longspan.execution.scans.recurrences import GatedDelta
    >>> _options(GatedDelta(0.5, l2norm=True), "reference")
    ('0.5', 'gated_delta, l2norm=True, reference')
    """
    if isinstance(recurrence, OwnRecurrence):
        return "none", repr(recurrence)
    options = {field.name: getattr(recurrence, field.name) for field in fields(cast(Any, recurrence))}
    scale = repr(options.pop("scale", "none"))
    return scale, ", ".join((recurrence.name, *(f"{name}={value}" for name, value in options.items()), kernel))


def _described(asked: ScanRequest, tokens: tuple[Any, ...], group: Any) -> str:
    """The call in a sentence, as far as its arguments are what they should be."""
    shapes = ", ".join(str(tuple(t.shape)) for t in tokens if isinstance(t, Tensor))
    parts = [f"{asked.operator} of {shapes}"]
    if isinstance(asked.plan, ScanPlan):
        parts.append(f"by {shortened(asked.plan, 160)}")
    if isinstance(group, dist.ProcessGroup):
        parts.append(f"on rank {group.rank()} of {group.size()}")
    return f"The call: {', '.join(parts)}."
