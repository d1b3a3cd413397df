"""What a recurrence's tensors must fit: each other, and the plan that was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.execution.handed import check_plain_numbers
from longspan.execution.inputs import check_carried, check_no_tangent
from longspan.execution.scans.contract import Recurrence
from longspan.schedules.scans.plan import ScanPlan
from longspan.schedules.scans.words import StateSizes

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
            f"the plan is for {_described(plan.sizes)}, but these tensors need {_described(wanted)}. Make it by"
            f" longspan.scan_plan(documents, layout, heads={wanted.heads}, keys={wanted.keys}, values={wanted.values},"
            f" maps={map_name(wanted)!r}, dtype={str(recurrence.state_dtype(tokens)).removeprefix('torch.')!r},"
            f" batch={batch})."
        )


def _described(sizes: StateSizes) -> str:
    """States in words.

    >>> _described(StateSizes(2, 4, 3, 4, 4, 1, 4, 1))
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
