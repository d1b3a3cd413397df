"""What a call's tensors must fit: the plan that was given, or the one that a mask has on one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from longspan.errors import PlanError, ScheduleError
from longspan.execution.handed import not_yet
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
        _check_one_sequence(*shapes, mask)
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
                + _about_three(name, tensor)
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise PlanError(
                f"q is {q.dtype} on {q.device}, but {name} is {tensor.dtype} on {tensor.device}. All three must agree."
            )


def _about_three(name: str, tensor: Tensor) -> str:
    if tensor.ndim != 3:
        return ""
    return (
        f" Features of all heads in one dim are split by {name}.unflatten(-1, (heads, -1)).transpose(1, 2); packed rows"
        f" (tokens, heads, features) are {name}.transpose(0, 1)[None], with masks.from_cu_seqlens(cu_seqlens) &"
        f" masks.causal()."
    )


def _check_place(plan: Plan, place: tuple[int, int] | None) -> None:
    size = plan.layout.world_size
    if place is None and size > 1:
        raise PlanError(
            f"the plan is for {size} ranks, so it needs group= (a process group or a mesh axis), but NoneType was"
            f" given.{not_yet()}"
        )
    if place is not None and place[1] != size:
        raise PlanError(f"the plan is for {size} ranks, but the group has {place[1]}. Plan for the group's size.")


def _check_order(shapes: Sequence[Shape], tokens: int | None) -> None:
    """Refuses (batch, tokens, heads, features) by name, where the shapes reveal it: the second dim is as long as the
    sequence, or, where no length is known, 8 query and 2 key/value heads would be 8 and 2 tokens of many heads."""
    q, k, v = shapes
    shared = q[1] == k[1] == v[1] > q[2] > k[2] == v[2] > 0 and q[2] % k[2] == 0
    if shared if tokens is None else all(shape[1] == tokens != shape[2] for shape in shapes):
        raise PlanError(
            f"q, k and v have shapes {', '.join(map(str, shapes))}, which look like (batch, tokens, heads, features)."
            f" Attention takes (batch, heads, tokens, features), as PyTorch's does: pass q.transpose(1, 2),"
            f" k.transpose(1, 2) and v.transpose(1, 2), and transpose the output back."
        )


def _check_one_sequence(q: Shape, k: Shape, v: Shape, mask: Mask) -> None:
    """Refuses queries and keys of different lengths, or of another length than the mask's."""
    tokens = mask.seq_len
    if q[2] == k[2] == v[2] and tokens in (None, q[2]):
        return
    _check_order((q, k, v), tokens)
    if q[2] != k[2] or k[2] != v[2]:
        raise PlanError(
            f"q has {q[2]} tokens, k {k[2]} and v {v[2]}, but attention is over one sequence: (batch, heads, tokens,"
            f" features), with as many tokens each. longspan.flex_attention takes keys of another length."
        )


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
            _check_order(shapes, tokens)
            raise PlanError(
                f"{name} has shape {shape}, but on rank {rank} the plan expects (batch, heads, tokens, features) ="
                f" {wanted}. Shard with layout.shard(x, rank, dim=2), or plan for these shapes."
            )
    if str(dtype).removeprefix("torch.") != plan.dtype:
        raise PlanError(f"q has dtype {dtype}, but the plan is for {plan.dtype}. Cast the tensors, or plan for it.")
