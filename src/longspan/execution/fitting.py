"""What a call's tensors must fit: the plan that was given, or the one that a mask has on one device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from longspan.errors import PlanError, ScheduleError
from longspan.layouts import contiguous
from longspan.masks import Mask
from longspan.schedules.cost.presets import CPU
from longspan.schedules.plan import Plan, PlanRequest, keep_few, planned
from longspan.schedules.steps import MAX_SIZE, Sizes
from longspan.span import whole

SEQ_DIM = 2
Shape = tuple[int, ...]


def fitting_plan(plan_or_mask: Mask | Plan, q: Tensor, k: Tensor, v: Tensor, place: tuple[int, int] | None) -> Plan:
    """The plan for these tensors: the given one, or that of the given mask. `place` is this rank and the group's size.
    What does not fit is refused."""
    if isinstance(plan_or_mask, Mask):
        return _plan_of_mask(plan_or_mask, q.shape, k.shape, v.shape, q.dtype)
    _check_place(plan_or_mask, place)
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    _check_shapes(shapes, q.dtype, plan_or_mask, 0 if place is None else place[0])
    return plan_or_mask


def _plan_of_mask(mask: Mask, q: Shape, k: Shape, v: Shape, dtype: torch.dtype) -> Plan:
    """The plan of a mask on one device. A mask without functions remembers which one was found to fit these shapes, as
    long as the plan is there: comparing masks and layouts takes longer than all other checks."""
    key = q, k, v, dtype
    found = mask.plans.get(key)
    plan = None if found is None else found()
    if plan is None:
        shapes = tuple(q), tuple(k), tuple(v)
        plan = one_device_plan(*shapes, dtype, mask)
        _check_shapes(shapes, dtype, plan, 0)
        if mask.is_structured:
            keep_few(mask.plans)[key] = ref(plan)
    return plan


def one_device_plan(q: Shape, k: Shape, v: Shape, dtype: Any, mask: Mask) -> Plan:
    """The plan of tensors of these shapes on one device."""
    return planned(mask, _request(q, k, v, dtype))


@lru_cache(maxsize=64)
def _request(q: Shape, k: Shape, v: Shape, dtype: Any) -> PlanRequest:
    whole(v[3], "v_head_dim", "a plan", ScheduleError, low=1, high=MAX_SIZE)
    sizes = Sizes(q[1], k[1], q[3], v[3], dtype.itemsize, q[0])
    return PlanRequest(
        contiguous(q[SEQ_DIM], 1), sizes, str(dtype).removeprefix("torch."), "exchange", CPU, assumed=True
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses tensors that are not (batch, heads, tokens, features), or not of one kind."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise PlanError(
                f"{name} must have 4 dims (batch, heads, tokens, features), but has shape {tuple(tensor.shape)}."
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise PlanError(
                f"q is {q.dtype} on {q.device}, but {name} is {tensor.dtype} on {tensor.device}. All three must agree."
            )


def _check_place(plan: Plan, place: tuple[int, int] | None) -> None:
    size = plan.layout.world_size
    if place is None and size > 1:
        raise PlanError(
            f"the plan is for {size} ranks, so it needs group= (a process group or a mesh axis), but NoneType was"
            f" given."
        )
    if place is not None and place[1] != size:
        raise PlanError(f"the plan is for {size} ranks, but the group has {place[1]}. Plan for the group's size.")


def _check_shapes(shapes: tuple[Shape, Shape, Shape], dtype: torch.dtype, plan: Plan, rank: int) -> None:
    sizes = plan.sizes
    tokens = plan.layout.num_slots(rank)
    expected = (
        (sizes.batch, sizes.q_heads, tokens, sizes.head_dim),
        (sizes.batch, sizes.kv_heads, tokens, sizes.head_dim),
        (sizes.batch, sizes.kv_heads, tokens, sizes.v_head_dim),
    )
    for name, shape, wanted in zip("qkv", shapes, expected, strict=True):
        if shape != wanted:
            raise PlanError(
                f"{name} has shape {shape}, but on rank {rank} the plan expects (batch, heads, tokens, features) ="
                f" {wanted}. Shard with layout.shard(x, rank, dim=2), or plan for these shapes."
            )
    if str(dtype).removeprefix("torch.") != plan.dtype:
        raise PlanError(f"q has dtype {dtype}, but the plan is for {plan.dtype}. Cast the tensors, or plan for it.")
