"""Validate the arguments of a call: tensors, numbers, process groups, DTensors, and whether they fit the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longspan._torch import is_dtensor, version
from longspan.errors import KernelError, PlanError, ScheduleError
from longspan.layouts import Layout, contiguous
from longspan.layouts.layout import carried_layout_of, other_tokens
from longspan.masks import Mask
from longspan.planning.machine import CPU
from longspan.planning.plan import Plan, PlanRequest, build_plan, keep_few
from longspan.planning.steps import MAX_SIZE, Sizes
from longspan.spans import check_int, truncated_repr

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# -- Tensors and numbers -----------------------------------------------------------------------------------------------


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_inputs(q: Any, k: Any, v: Any, scale: Any, kernel: Any = "auto", sinks: Any = None, name: Any = "") -> None:
    """Check that q, k and v are floating-point tensors, and the types of scale, kernel, sinks and name."""
    for letter, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"{letter} must be a torch.Tensor of shape (batch, heads, tokens, features), but got"
                f" {type(tensor).__name__}. Convert it with torch.as_tensor."
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise PlanError(
                f"{letter} must be a strided tensor, but got a {kind} one. Pad or densify it; for packed documents use"
                f" a mask: longspan.masks.documents(lengths)."
            )
        if tensor.dtype not in DTYPES:
            raise PlanError(
                f"{letter} must have dtype {', '.join(map(str, DTYPES))}, but got {tensor.dtype}. Cast it first."
            )
    if isinstance(sinks, Tensor) and sinks.device != q.device:
        raise KernelError(f"sinks must be on {q.device}, the device of q, but got {sinks.device}. Move them there.")
    if not isinstance(kernel, str):
        raise KernelError(f"kernel must be a name, as in kernel='auto', but got {truncated_repr(kernel)}.")
    if not isinstance(name, str):
        raise PlanError(f"name must be a str, the same on every rank, but got {truncated_repr(name)}.")
    if scale is not None and not is_number(scale):
        raise PlanError(
            f"scale must be a finite number, or None for 1 / sqrt(head_dim), but got {truncated_repr(scale)}."
        )


def is_number(value: Any) -> bool:
    """Return whether a value is one finite number.

    >>> is_number(0.5), is_number(float("nan")), is_number("0.5"), is_number(True), is_number(torch.tensor(0.5))
    (True, False, False, False, True)
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool or value.device.type == "meta":
            return False
        return torch.compiler.is_compiling() or math.isfinite(value.detach())  # compiled, the operator checks
    if torch.compiler.is_compiling() and isinstance(value, np.ndarray):  # a number of numpy, as the compiler sees it
        return value.ndim == 0
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number: Any = value
    return -math.inf < number < math.inf  # compiled code has no math.isfinite


def check_sharding(layout: Layout, dim: int, **tensors: Any) -> None:
    """Raise if a tensor was sharded along this dim by a layout that gives this rank other tokens.

    The layout of a tensor is known if it comes directly from `Layout.shard` or `shard_batch`.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        known = carried_layout_of(tensor)
        if known is None or known.dim != dim or known.version != version(tensor):
            continue
        if other_tokens(known.layout, layout):
            raise PlanError(
                f"{name} must be sharded by {layout}, but was sharded by {known.layout}, whose slots hold other tokens"
                f" of the same sequence. Shard with the layout of the plan, as in plan.shard(...), or plan with the"
                f" layout of the batch."
            )


def as_autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as `torch.autocast` casts the inputs of PyTorch's attention."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


# -- Process groups and DTensors ---------------------------------------------------------------------------------------


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""The ranks of a sequence: a process group or a mesh of one axis. None is one device; so is
`torch.distributed.group.WORLD` before `init_process_group`."""


def group_of(group: Any) -> Any:
    """Return the process group of a mesh of one axis, and anything else unchanged."""
    return group.get_group() if isinstance(group, DeviceMesh) and group.ndim == 1 else group


def describe_group(group: Any) -> str:
    """Describe a value that is not a group, for the end of an error message.

    >>> describe_group(3)
    'got int'
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return (
            "this process is not a member of it: torch.distributed.new_group returned a placeholder. Call this on the"
            " group's members only"
        )
    return f"got {type(group).__name__}"


def init_hint() -> str:
    """Return a hint for error messages if the process group is not initialized.

    >>> init_hint()
    ' torch.distributed is not initialized: call torch.distributed.init_process_group() first, under torchrun.'
    """
    if not dist.is_available() or dist.is_initialized():
        return ""
    return " torch.distributed is not initialized: call torch.distributed.init_process_group() first, under torchrun."


def check_axes(group: Any) -> None:
    """Raise for a mesh of several axes."""
    if isinstance(group, DeviceMesh):
        raise PlanError(
            f"group must be a mesh of one axis, but got {group.ndim} axes {group.mesh_dim_names}. Pass the axis that"
            f" holds the sequence, as in mesh['cp']."
        )


def check_planned_group(group: Any, plan: Any, documents: Any, how: str) -> str:
    """Return PyTorch's name of the group of a planned call; "" for one device. `how` shows how to create a plan."""
    if plan is not None and documents is not None:
        raise PlanError("documents must be None with a plan, which has its own documents. Pass one of them.")
    if group is None:
        return ""
    if plan is None:
        raise PlanError(f"group must be None without a plan. Create a plan, {how}, and pass plan=.")
    check_axes(group)
    if not isinstance(group, dist.ProcessGroup):
        raise PlanError(
            f"group must be a process group or a mesh of one axis, but {describe_group(group)}.{init_hint()}"
        )
    return group.group_name


def check_plain_numbers(operator: str, name: str, tensor: Tensor) -> None:
    """Raise for DTensors, nested tensors and unsupported dtypes."""
    if is_dtensor(tensor):
        raise PlanError(
            f"{name} must be a plain tensor for {operator}, but got a DTensor with placements {tensor.placements}. Pass"
            f" {name}.to_local(), or {name}.full_tensor() if every rank needs all of it."
        )
    if tensor.is_nested or tensor.dtype not in DTYPES:
        kind = "a nested one" if tensor.is_nested else f"{tensor.dtype}"
        raise PlanError(
            f"{name} must be a plain tensor of {', '.join(map(str, DTYPES))} for {operator}, but got {kind}. Pad or"
            f" cast it first; pass packed documents by their lengths: documents=[...]."
        )


def check_plain(name: str, tensor: object) -> None:
    """Raise for a DTensor among tensors that every rank passes whole."""
    if is_dtensor(tensor):
        raise KernelError(
            f"{name} must be a plain tensor with all query heads that the rank computes, but got a DTensor with"
            f" placements {tensor.placements}. Pass {name}.to_local() if it is replicated, or {name}.full_tensor()."
        )


def check_captured(tensors: Sequence[object]) -> None:
    """Raise for DTensors among the captured tensors of score functions."""
    for tensor in tensors:
        if is_dtensor(tensor):
            raise KernelError(
                f"Captured tensors of a score function must be plain tensors, but got a DTensor of shape"
                f" {tuple(tensor.shape)} with placements {tensor.placements}. Capture tensor.to_local() if it is"
                f" replicated, or tensor.full_tensor()."
            )


def check_dtensor_shards(q: DTensor, plan_or_mask: Any) -> None:
    """Raise for a DTensor whose shards are not those of the plan's layout."""
    if not isinstance(plan_or_mask, Plan) or q.device_mesh.size() != plan_or_mask.layout.world_size:
        return  # raised elsewhere
    rank, layout = q.device_mesh.get_local_rank(), plan_or_mask.layout
    tokens, wanted = q.to_local().shape[2], layout.num_slots(rank)
    if tokens != wanted and q.shape[2] == layout.seq_len:
        raise PlanError(
            f"q must have {wanted} tokens on rank {rank} by {layout}, but the DTensor has {tokens} of {layout.seq_len}."
            f" DTensor shards like torch.chunk: plan with layouts.like_dtensor({layout.seq_len}, {layout.world_size})."
        )


# -- Tensors against a plan, or against the plan of a mask on one device -----------------------------------------------


SEQ_DIM = 2
Shape = tuple[int, ...]


def resolve_plan(plan_or_mask: Mask | Plan, q: Tensor, k: Tensor, v: Tensor, place: tuple[int, int] | None) -> Plan:
    """Return the plan for these tensors: the argument, or the one-device plan of a mask. Raise if they do not fit.

    `place` is (rank, size) in the group. A mask without functions caches the plan of each set of shapes, because
    comparing masks and layouts takes longer than all other checks.
    """
    if isinstance(plan_or_mask, Mask):
        mask, key = plan_or_mask, (q.shape, k.shape, v.shape, q.dtype)
        cached = mask.plans.get(key)
        plan = None if cached is None else cached()
        if plan is None:
            shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
            _check_one_sequence(*shapes, mask)
            plan = one_device_plan(*shapes, q.dtype, mask)
            _check_shapes(shapes, q.dtype, plan, 0)
            if mask.is_structured:
                keep_few(mask.plans)[key] = ref(plan)
        return plan
    size = plan_or_mask.layout.world_size
    if place is None and size > 1:
        raise PlanError(
            f"group must be a process group or a mesh axis of the plan's {size} ranks, but got NoneType.{init_hint()}"
        )
    if place is not None and place[1] != size:
        raise PlanError(f"group must have the plan's {size} ranks, but got {place[1]}. Plan for the group's size.")
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    _check_shapes(shapes, q.dtype, plan_or_mask, 0 if place is None else place[0])
    return plan_or_mask


def one_device_plan(q: Shape, k: Shape, v: Shape, dtype: Any, mask: Mask) -> Plan:
    """Return the plan of tensors of these shapes on one device."""
    return build_plan(mask, _request(q, k, v, dtype))


@lru_cache(maxsize=64)
def _request(q: Shape, k: Shape, v: Shape, dtype: Any) -> PlanRequest:
    check_int(v[3], "v_head_dim", "a plan", ScheduleError, low=1, high=MAX_SIZE)
    sizes = Sizes(q[1], k[1], q[3], v[3], dtype.itemsize, q[0])
    return PlanRequest(
        contiguous(q[SEQ_DIM], 1), sizes, str(dtype).removeprefix("torch."), "exchange", CPU, assumed=True
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that tensors are (batch, heads, tokens, features), of one dtype and on one device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            hint = (
                f" If the last dim holds all heads, use {name}.unflatten(-1, (heads, -1)).transpose(1, 2). For packed"
                f" rows (tokens, heads, features), use {name}.transpose(0, 1)[None] and"
                f" masks.from_cu_seqlens(cu_seqlens) & masks.causal()."
            )
            raise PlanError(
                f"{name} must have 4 dims (batch, heads, tokens, features), but got shape {tuple(tensor.shape)}."
                + (hint if tensor.ndim == 3 else "")
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise PlanError(
                f"{name} must be {q.dtype} on {q.device} like q, but got {tensor.dtype} on {tensor.device}."
            )


def _check_order(shapes: Sequence[Shape], tokens: int | None) -> None:
    """Raise for (batch, tokens, heads, features) if the shapes show it: the second dim is as long as the sequence, or,
    if the length is not known, the heads would be fewer than the tokens and grouped."""
    q, k, v = shapes
    grouped = q[1] == k[1] == v[1] > q[2] > k[2] == v[2] > 0 and q[2] % k[2] == 0
    if grouped if tokens is None else all(shape[1] == tokens != shape[2] for shape in shapes):
        raise PlanError(
            f"q, k and v must be (batch, heads, tokens, features), as in PyTorch, but got"
            f" {', '.join(map(str, shapes))}, which look like (batch, tokens, heads, features). Pass"
            f" q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2), and transpose the output back."
        )


def _check_one_sequence(q: Shape, k: Shape, v: Shape, mask: Mask) -> None:
    """Check that queries and keys have one length, that of the mask."""
    tokens = mask.seq_len
    if q[2] == k[2] == v[2] and tokens in (None, q[2]):
        return
    _check_order((q, k, v), tokens)
    if q[2] != k[2] or k[2] != v[2]:
        raise PlanError(
            f"q, k and v must have the same number of tokens, (batch, heads, tokens, features), but got {q[2]}, {k[2]}"
            f" and {v[2]}. longspan.flex_attention accepts keys of another length."
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
                f"{name} must have shape (batch, heads, tokens, features) = {wanted} on rank {rank} of the plan, but"
                f" got {shape}. Shard with layout.shard(x, rank, dim=2), or plan for these shapes."
            )
    if str(dtype).removeprefix("torch.") != plan.dtype:
        raise PlanError(
            f"q must have the plan's dtype {plan.dtype}, but got {dtype}. Cast the tensors, or plan for it."
        )
