"""Check the arguments of a recurrence and run it, on one device or over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import PlanError, in_context
from longspan.masks.document_rows import document_rows
from longspan.mixers.recurrences import Recurrence, ScanKernel, ScanWork, Segments
from longspan.mixers.scan_kernels import OwnRecurrence, choose_scan_kernel
from longspan.mixers.scan_run import LocalSegments, RankScan, spread
from longspan.planning.scan_plan import ScanPlan
from longspan.planning.scan_steps import StateSizes
from longspan.run.agreement import SCAN, WIDTH, Record
from longspan.run.group import Call, Safety
from longspan.run.ops import run_over, settings_of, told_in
from longspan.run.relayout import Relayout
from longspan.run.simulated import SimulatedRank
from longspan.run.transports import Loopback, Program
from longspan.spans import Ints, shortened
from longspan.validate import check_carried, check_no_tangent, check_plain_numbers, group_of, planned_group
from longspan.versions import VERSION

# -- Checks of tensors against each other and the plan -----------------------------------------------------------------


Shapes = Mapping[str, tuple[str, ...]]
"""For each argument the names of its dims; there may be several forms."""


def check_tensors(operator: str, tensors: Mapping[str, Any], shapes: Shapes) -> dict[str, int]:
    """The size of every named dim. Refuses what is no tensor of the right kind, and shapes that do not fit together.

    >>> x = torch.zeros(2, 5, 4, 3)
    >>> check_tensors("f", {"x": x}, {"x": ("batch tokens heads values",)})["heads"]
    4
    """
    sizes: dict[str, int] = {}
    device: torch.device | None = None
    for name, tensor in tensors.items():
        _check_kind(operator, name, tensor)
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise PlanError(f"{next(iter(tensors))} is on {device}, but {name} is on {tensor.device}. Move it there.")
        forms = [form.split() for form in shapes[name]]
        form = next((form for form in forms if len(form) == tensor.ndim), None)
        wanted = " or ".join(f"({', '.join(form)})" for form in forms)
        if form is None:
            raise PlanError(f"{name} must be {wanted}, but has shape {tuple(tensor.shape)}.")
        for dim, size in zip(form, tensor.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise PlanError(
                    f"{name} of shape {tuple(tensor.shape)}, which is {wanted}, has {size} {dim}, but the arguments"
                    f" before it have {sizes[dim]}."
                )
    if sizes.get("heads", 0) % sizes.get("key_heads", 1):
        raise PlanError(
            f"{sizes['heads']} heads share {sizes['key_heads']} heads of keys, which leaves"
            f" {sizes['heads'] % sizes['key_heads']} over. Heads must be a multiple of key heads."
        )
    check_no_tangent(**tensors)
    return sizes


def _check_kind(operator: str, name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise PlanError(f"{name} must be a torch.Tensor, but {type(tensor).__name__} was given to {operator}.")
    check_plain_numbers(operator, name, tensor)


def state_sizes(recurrence: Recurrence, tokens: tuple[Tensor, ...]) -> StateSizes:
    """What states of these tokens weigh."""
    heads, keys, values = recurrence.state_shape(tokens)
    _, rows, cols = recurrence.map_shape(tokens)
    itemsize = recurrence.state_dtype(tokens).itemsize
    return StateSizes(heads, keys, values, rows, cols, int(recurrence.is_dense), itemsize, tokens[0].shape[0])


def check_plan(plan: Any, recurrence: Recurrence, tokens: tuple[Tensor, ...], place: tuple[int, int] | None) -> None:
    """Refuses what is no scan plan, or one for other tensors. `place` is this rank and the group's size."""
    if not isinstance(plan, ScanPlan):
        raise PlanError(
            f"plan= takes a plan made by longspan.scan_plan, but {type(plan).__name__} was given. Plans of attention"
            f" and of convolutions are others."
        )
    for tensor in tokens:
        check_carried(plan.home, 1, **{f"a tensor of shape {tuple(tensor.shape)}": tensor})
    size, found = plan.layout.world_size, 1 if place is None else place[1]
    if found != size:
        what = "no group was given" if place is None else f"the group has {found}"
        raise PlanError(f"the plan is for {size} ranks, but {what}. Pass group=, or plan for the group's size.")
    rank = 0 if place is None else place[0]
    batch, slots = tokens[0].shape[:2]
    if slots != plan.home.num_slots(rank):
        raise PlanError(
            f"there are {slots} tokens on rank {rank}, but the plan's layout has {plan.home.num_slots(rank)} slots"
            f" there. Shard with layout.shard(x, rank, dim=1), or plan for this layout."
        )
    wanted = state_sizes(recurrence, tokens)
    if wanted != plan.sizes:
        raise PlanError(
            f"the plan is for {_describe_shapes(plan.sizes)}, but these tensors need"
            f" {_describe_shapes(wanted)}. Make it by"
            f" longspan.scan_plan(documents, layout, heads={wanted.heads}, keys={wanted.keys}, values={wanted.values},"
            f" maps={map_name(wanted)!r}, dtype={str(recurrence.state_dtype(tokens)).removeprefix('torch.')!r},"
            f" batch={batch})."
        )


def _describe_shapes(sizes: StateSizes) -> str:
    """States in words.

    >>> _describe_shapes(StateSizes(2, 4, 3, 4, 4, 1, 4, 1))
    "states of 2 heads x 4 keys x 3 values in float32, maps='matrix' and batch=1"
    """
    dtype = "float64" if sizes.itemsize == 8 else "float32"
    shape = f"{sizes.heads} heads x {sizes.keys} keys x {sizes.values} values"
    return f"states of {shape} in {dtype}, maps={map_name(sizes)!r} and batch={sizes.batch}"


def map_name(sizes: StateSizes) -> str:
    """What the map of a segment is called in `longspan.scan_plan`."""
    if sizes.dense:
        return "matrix"
    shape = (sizes.map_rows, sizes.map_cols)
    return {(1, 1): "scalar", (sizes.keys, 1): "rows", (sizes.keys, sizes.values): "elements"}[shape]


# -- The call ----------------------------------------------------------------------------------------------------------


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
    with in_context(lambda: _described(asked, tokens, group)), told_in(name):
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

    >>> from longspan.mixers.recurrences import GatedDelta
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
