"""Check the arguments of a recurrence and run it, on one device or over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from longspan import _torch
from longspan.derivatives import check_derivatives
from longspan.errors import PlanError
from longspan.mixers.operators import OperatorCall, number_documents, run_operator
from longspan.mixers.scan_kernels import OwnRecurrence, PackageScan, choose_scan_kernel, scan_kernel_named
from longspan.mixers.scan_reference import LONG, Recurrence, ScanKernel, ScanWork, Segments, table_of
from longspan.mixers.scan_run import LocalSegments, RankScan, indices_of, program_of, spread
from longspan.planning.scan_plan import ScanPlan
from longspan.planning.scan_steps import StateSizes
from longspan.run.agreement import SCAN, WIDTH, Record
from longspan.run.group import Call
from longspan.run.ops import rank_and_size, run_program
from longspan.run.program import memory_for
from longspan.run.relayout import Relayout, moves
from longspan.run.transports import Loopback, Program
from longspan.spans import Ints
from longspan.validate import check_plain_numbers, check_sharding
from longspan.versions import VERSION

# -- Checks of tensors against each other and the plan -----------------------------------------------------------------


Shapes = Mapping[str, tuple[str, ...]]
"""The names of each argument's dims; there may be several alternatives."""


def check_tensors(operator: str, tensors: Mapping[str, Any], shapes: Shapes) -> dict[str, int]:
    """Check types and devices of tensors, and that their shapes fit together; return the size of every named dim.

    >>> x = torch.zeros(2, 5, 4, 3)
    >>> check_tensors("f", {"x": x}, {"x": ("batch tokens heads values",)})["heads"]
    4
    """
    sizes: dict[str, int] = {}
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise PlanError(f"{name} of {operator} must be a torch.Tensor, but got {type(tensor).__name__}.")
        check_plain_numbers(operator, name, tensor)
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise PlanError(f"{next(iter(tensors))} is on {device}, but {name} is on {tensor.device}. Move it there.")
        forms = [form.split() for form in shapes[name]]
        form = next((form for form in forms if len(form) == tensor.ndim), None)
        expected = " or ".join(f"({', '.join(form)})" for form in forms)
        if form is None:
            raise PlanError(f"{name} must be {expected}, but has shape {tuple(tensor.shape)}.")
        for dim, size in zip(form, tensor.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise PlanError(
                    f"{name} of shape {tuple(tensor.shape)}, which is {expected}, has {size} {dim}, but the arguments"
                    f" before it have {sizes[dim]}."
                )
    key_heads = sizes.get("key_heads", 1)
    if key_heads < 1 or sizes.get("heads", 0) % key_heads:
        raise PlanError(
            f"heads must be a multiple of key heads, at least 1, but got {sizes['heads']} heads and {key_heads} key"
            f" heads."
        )
    check_derivatives(*tensors.values())
    return sizes


def check_plan(plan: Any, recurrence: Recurrence, tokens: tuple[Tensor, ...], place: tuple[int, int] | None) -> None:
    """Check that the plan is a scan plan for these tensors. `place` is this rank and the group's size."""
    if not isinstance(plan, ScanPlan):
        raise PlanError(
            f"plan must be created by longspan.scan_plan, but got {type(plan).__name__}. Plans of attention and of"
            f" convolutions cannot be used."
        )
    for tensor in tokens:
        check_sharding(plan.home, 1, **{f"a tensor of shape {tuple(tensor.shape)}": tensor})
    size = plan.layout.world_size
    if size != (1 if place is None else place[1]):
        got = "group is None" if place is None else f"the group has {place[1]}"
        raise PlanError(f"the plan is for {size} ranks, but {got}. Pass group=, or plan for the group's size.")
    rank = 0 if place is None else place[0]
    batch, slots = tokens[0].shape[:2]
    if slots != plan.home.num_slots(rank):
        raise PlanError(
            f"there are {slots} tokens on rank {rank}, but the plan's layout has {plan.home.num_slots(rank)} slots"
            f" there. Shard with layout.shard(x, rank, dim=1), or plan for this layout."
        )
    heads, keys, values = recurrence.state_shape(tokens)
    _, map_rows, map_cols = recurrence.map_shape(tokens)
    dtype = recurrence.state_dtype(tokens)
    needed = StateSizes(heads, keys, values, map_rows, map_cols, int(recurrence.is_dense), dtype.itemsize, batch)
    if needed != plan.sizes:
        raise PlanError(
            f"the plan is for {_describe_sizes(plan.sizes)}, but these tensors need {_describe_sizes(needed)}. Make it"
            f" by longspan.scan_plan(documents, layout, heads={heads}, keys={keys}, values={values},"
            f" maps={map_name(needed)!r}, dtype={str(dtype).removeprefix('torch.')!r}, batch={batch})."
        )


def _describe_sizes(sizes: StateSizes) -> str:
    """Describe the shapes of states.

    >>> _describe_sizes(StateSizes(2, 4, 3, 4, 4, 1, 4, 1))
    "states of 2 heads x 4 keys x 3 values in float32, maps='matrix' and batch=1"
    """
    dtype = "float64" if sizes.itemsize == 8 else "float32"
    shape = f"{sizes.heads} heads x {sizes.keys} keys x {sizes.values} values"
    return f"states of {shape} in {dtype}, maps={map_name(sizes)!r} and batch={sizes.batch}"


def map_name(sizes: StateSizes) -> str:
    """Return the name of a segment's map in `longspan.scan_plan`."""
    if sizes.dense:
        return "matrix"
    shape = (sizes.map_rows, sizes.map_cols)
    return {(1, 1): "scalar", (sizes.keys, 1): "rows", (sizes.keys, sizes.values): "elements"}[shape]


# -- The call ----------------------------------------------------------------------------------------------------------


USAGE = "longspan.scan_plan(documents, layout, heads=..., keys=..., values=..., maps=...)"


@torch.compiler.disable(reason="recurrences over ranks run between compiled graphs")
def run(
    recurrence: Any, tokens: tuple[Any, ...], shared: tuple[Any, ...], call: OperatorCall, kernel: str = "auto"
) -> Tensor:
    """Run a recurrence on one device or over ranks."""
    plan = call.plan

    def check(place: tuple[int, int] | None) -> None:
        if place is not None:
            check_plan(plan, recurrence, tokens, place)

    return run_operator(
        call,
        {f"tokens[{i}]": x for i, x in enumerate(tokens)},
        num_sharded=len(tokens),
        layout=plan.home if isinstance(plan, ScanPlan) else None,
        usage=USAGE,
        check=check,
        run=lambda group: _run(recurrence, tokens, shared, call, kernel, group),
        run_whole=lambda whole: _run_alone(
            kernel, ScanWork(recurrence, tuple(whole), shared, Segments(plan.chains.whole))
        ),
    )


def _run(
    recurrence: Any, tokens: tuple[Any, ...], shared: tuple[Any, ...], call: OperatorCall, kernel_name: str, group: str
) -> Tensor:
    plan, place = call.plan, rank_and_size(group)
    if plan is None:
        batch, length = tokens[0].shape[:2]
        segments = _segment_documents(number_documents(call.documents, batch, length), batch, length)
        return _run_alone(kernel_name, ScanWork(recurrence, tokens, shared, segments))
    check_plan(plan, recurrence, tokens, place)
    rank = 0 if place is None else place[0]
    local = LocalSegments.of(plan, rank)
    work = ScanWork(recurrence, tokens, shared, local.segments)
    kernel = choose_scan_kernel(kernel_name, work)
    _last_kernels[plan.sizes, tokens[0].device] = kernel
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*tokens, *shared, *recurrence.captured)
    )
    if not group:  # one rank, whose spans may be out of order
        return spread(kernel, work, RankScan(plan, rank, local, _run_loopback), learns=needs_grad)

    def carry(program: Program[list[Tensor]], direction: str, number: int) -> tuple[list[Tensor], int]:
        """Run a rank's program over the group: one call in each direction."""
        device, record = tokens[0].device, None
        if direction == "forward":
            sizes = plan.sizes
            states = f"{sizes.heads} x {sizes.keys} x {sizes.values}, {map_name(sizes)}, batch {sizes.batch}"
            record = Record(
                VERSION, str(torch.__version__), plan.fingerprint[: WIDTH - 1], plan.chains.documents[:16],
                plan.layout.fingerprint[:16], states, plan.dtype, device.type, "none", f"{SCAN}{plan.scheme}",
                *_describe_options(recurrence, kernel.name), "none", "share" if needs_grad else "not wanted",
                repr(call.name) if call.name else "none",
            )  # fmt: skip
        group_call = Call(plan.fingerprint, direction, device, record, call.name, number)
        return run_program(program, group, group_call)

    ranks = RankScan(plan, rank, local, carry)
    if plan.source is None:
        return spread(kernel, work, ranks, learns=needs_grad)
    carry(_no_messages(), "forward", 0)  # ranks agree before tokens move
    process_group = _torch.group_named(group)
    moved = tuple(Relayout.apply(t, plan.source, plan.layout, process_group, 1) for t in tokens)
    out = spread(kernel, replace(work, tokens=moved), ranks, learns=needs_grad)
    return Relayout.apply(out, plan.layout, plan.source, process_group, 1)  # type: ignore[return-value]


_last_kernels: dict[tuple[StateSizes, torch.device], ScanKernel] = {}
"""The kernel of the last call with states of these sizes on a device."""


def prepare(plan: ScanPlan, rank: int, device: torch.device, kernel: str, *, backward: bool) -> None:
    """Do what the first call with a plan does on a rank before its messages: record programs, build tables. A plan does
    not tell its recurrence, so "auto" is the kernel of the last call with such states, and `reference` before."""
    chosen = scan_kernel_named("reference" if kernel == "auto" else kernel)
    if kernel == "auto":
        chosen = _last_kernels.get((plan.sizes, device), chosen)
    indices_of(plan, rank, device)
    for direction in ("forward", "backward") if backward else ("forward",):
        memory_for(program_of(plan, rank, direction), device)
    if plan.source is not None:
        moves(plan.source, plan.layout, rank)
        moves(plan.layout, plan.source, rank)
    local, shape = LocalSegments.of(plan, rank), (plan.sizes.batch, int(plan.layout.num_slots(rank)))
    left = local.segments.select(local.left)
    for segments in (local.segments, left):
        chosen.prepare(segments, shape, device)
    if isinstance(chosen, PackageScan) and not plan.sizes.dense:
        table_of(left, shape, device, LONG)  # `diagonal_maps`


def _run_loopback(program: Program[list[Tensor]], direction: str, number: int) -> tuple[list[Tensor], int]:  # noqa: ARG001
    return Loopback().run([program])[0], 0


def _no_messages() -> Program[list[Tensor]]:
    yield from ()
    return []


def _run_alone(kernel: str, work: ScanWork) -> Tensor:
    """Run on one device, where every document is one segment."""
    return choose_scan_kernel(kernel, work).local(work, work.zero_states())[0]


def _segment_documents(numbers: Ints, batch: int, tokens: int) -> Segments:
    rows: list[Ints] = []
    for row in range(batch if tokens else 0):
        edges = np.flatnonzero(np.diff(numbers[row if len(numbers) > 1 else 0])) + 1
        starts, stops = np.append(0, edges), np.append(edges, tokens)
        rows.append(np.stack((np.full(len(starts), row), starts, stops), axis=1))
    return Segments(np.concatenate(rows) if rows else np.empty((0, 3), dtype=np.int64))


def _describe_options(recurrence: Recurrence, kernel: str) -> tuple[str, str]:
    """Return the scale, and the other options that distinguish recurrences over the same states.

    >>> from longspan.mixers.scan_reference import GatedDelta
    >>> _describe_options(GatedDelta(0.5, l2norm=True), "reference")
    ('0.5', 'gated_delta, l2norm=True, reference')
    """
    if isinstance(recurrence, OwnRecurrence):
        return "none", repr(recurrence)
    options = {field.name: getattr(recurrence, field.name) for field in fields(cast(Any, recurrence))}
    scale = repr(options.pop("scale", "none"))
    return scale, ", ".join((recurrence.name, *(f"{name}={value}" for name, value in options.items()), kernel))
