"""Validate the arguments of a call: tensors, numbers, process groups, DTensors, and whether they fit the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longspan._torch import find_tangent, version
from longspan.errors import KernelError, PlanError, ScheduleError
from longspan.layouts import Layout, contiguous
from longspan.layouts.layout import carried, other_tokens
from longspan.masks import Mask
from longspan.planning.machine import CPU
from longspan.planning.plan import Plan, PlanRequest, keep_few, planned
from longspan.planning.steps import MAX_SIZE, Sizes
from longspan.spans import shortened, whole

# -- Tensors and numbers, checked once before anything runs ------------------------------------------------------------


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_inputs(q: Any, k: Any, v: Any, scale: Any, kernel: Any = "auto", sinks: Any = None, name: Any = "") -> None:
    """Raises unless q, k and v are floating-point tensors, the scale is a number and the kernel a name."""
    for letter, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"{letter} must be a torch.Tensor of shape (batch, heads, tokens, features), but got"
                f" {type(tensor).__name__}. Convert it with torch.as_tensor."
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise PlanError(
                f"{letter} is a tensor of kind {kind}, but attention takes plain ones. Pad or densify it; documents"
                f" are a mask: longspan.masks.documents(lengths)."
            )
        if tensor.dtype not in DTYPES:
            raise PlanError(
                f"{letter} has dtype {tensor.dtype}, but attention takes {', '.join(map(str, DTYPES))}. Cast it first."
            )
    check_no_tangent(q=q, k=k, v=v, sinks=sinks, scale=scale)
    if isinstance(sinks, Tensor) and sinks.device != q.device:
        raise KernelError(f"sinks are on {sinks.device}, but q is on {q.device}. Move them there.")
    if not isinstance(kernel, str):
        raise KernelError(f"kernel = {shortened(kernel)} was given. A kernel goes by its name, as in kernel='auto'.")
    if not isinstance(name, str):
        raise PlanError(f"name = {shortened(name)} was given. A call's name is a str, the same one on every rank.")
    if scale is not None and not is_number(scale):
        raise PlanError(
            f"scale = {shortened(scale)} was given. It multiplies scores: one finite number, or None for"
            f" 1 / sqrt(head_dim)."
        )


def is_number(value: Any) -> bool:
    """Whether a value is one finite number.

    >>> is_number(0.5), is_number(float("nan")), is_number("0.5"), is_number(True), is_number(torch.tensor(0.5))
    (True, False, False, False, True)
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool or value.device.type == "meta":
            return False
        return torch.compiler.is_compiling() or math.isfinite(value.detach())  # compiled, the operator looks
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number: Any = value
    return -math.inf < number < math.inf  # compiled code has no math.isfinite


def check_no_tangent(**tensors: Any) -> None:
    """Refuses tensors that carry a forward-mode derivative, which would be lost on the way."""
    if not torch.compiler.is_compiling() and (name := find_tangent(tensors)) is not None:
        raise PlanError(
            f"{name} carries a forward-mode derivative (torch.func.jvp, jacfwd, hessian or a dual number), which"
            f" Longspan does not compute. Differentiate by backward, as in torch.autograd.grad, or detach it if no"
            f" derivative is meant."
        )


def check_carried(layout: Layout, dim: int, **tensors: Any) -> None:
    """Refuses tensors that another layout of the same sequence cut along this dim, as long as that is known: they came
    straight from `Layout.shard` or `shard_batch` and were not written into since."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        known = carried(tensor)
        if known is None or known.dim != dim or known.version != version(tensor):
            continue
        if other_tokens(known.layout, layout):
            raise PlanError(
                f"{name} was cut by {known.layout}, but here tokens are those of {layout}, another one: its slots hold"
                f" other tokens of the same sequence. Cut with the layout of the plan, as in plan.shard(...), or plan"
                f" over the layout that cut the batch."
            )


def as_autocast(tensor: Tensor) -> Tensor:
    """What `torch.autocast` makes of an input of PyTorch's attention, for hosts that take its place."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


# -- Process groups and DTensors ---------------------------------------------------------------------------------------
# Refuses groups that this rank is not a member of, DTensors where none are accepted, and DTensors with another
# placement than the plan's layout.


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""The ranks of a sequence, as users give them; a mesh has one axis. None is one device, and it is
`torch.distributed.group.WORLD` before ranks have met."""


def group_of(group: Any) -> Any:
    """The process group of a mesh of one axis; anything else as it was given."""
    return group.get_group() if isinstance(group, DeviceMesh) and group.ndim == 1 else group


def group_handed(group: Any) -> str:
    """What was given instead of a group, as the end of an error.

    >>> group_handed(3)
    'int was given'
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return (
            "this process is not a member of the group that was given: torch.distributed.new_group gave it a number"
            " instead. Call this on the group's members alone"
        )
    return f"{type(group).__name__} was given"


def not_yet() -> str:
    """What to do about ranks that have not met yet; nothing where they have.

    >>> not_yet()
    ' This process has not joined the others yet: call torch.distributed.init_process_group() first, under torchrun.'
    """
    if not dist.is_available() or dist.is_initialized():
        return ""
    return (
        " This process has not joined the others yet: call torch.distributed.init_process_group() first, under"
        " torchrun."
    )


def check_axes(group: Any) -> None:
    """Refuses a mesh of several axes."""
    if isinstance(group, DeviceMesh):
        raise PlanError(
            f"group is a mesh of {group.ndim} axes {group.mesh_dim_names}. Pass the one that holds the sequence, as"
            f" in mesh['cp']."
        )


def planned_group(group: Any, plan: Any, documents: Any, how: str) -> str:
    """The name under which PyTorch knows the group of a call by a plan; "" for one device. `how` says how plans are
    made."""
    if plan is not None and documents is not None:
        raise PlanError("documents and a plan were given, but a plan has documents of its own. Leave one of them out.")
    if group is None:
        return ""
    if plan is None:
        raise PlanError(f"a group was given without a plan. Make one: {how}, and pass plan=.")
    check_axes(group)
    if not isinstance(group, dist.ProcessGroup):
        raise PlanError(f"group= takes a process group or a mesh of one axis, but {group_handed(group)}.{not_yet()}")
    return group.group_name


def check_plain_numbers(operator: str, name: str, tensor: Tensor) -> None:
    """Refuses DTensors, nested tensors and other dtypes than those that are computed with."""
    if isinstance(tensor, DTensor):
        raise PlanError(
            f"{name} is a DTensor, placed {tensor.placements}, but {operator} takes plain tensors. Pass"
            f" {name}.to_local(), or {name}.full_tensor() where every rank needs all of it."
        )
    if tensor.is_nested or tensor.dtype not in DTYPES:
        kind = "nested" if tensor.is_nested else f"of {tensor.dtype}"
        raise PlanError(
            f"{name} is {kind}, but {operator} takes plain tensors of {', '.join(map(str, DTYPES))}. Pad or cast it"
            f" first; packed documents are said by their lengths: documents=[...]."
        )


def check_plain(name: str, tensor: object) -> None:
    """Refuses a DTensor among tensors that every rank passes whole."""
    if isinstance(tensor, DTensor):
        raise KernelError(
            f"{name} is a DTensor, placed {tensor.placements}, but every rank passes a plain tensor with all query"
            f" heads that it computes. Pass {name}.to_local() where it is replicated, or {name}.full_tensor()."
        )


def check_captured(tensors: Sequence[object]) -> None:
    """Refuses DTensors among what score functions use."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            raise KernelError(
                f"a score function uses a DTensor of shape {tuple(tensor.shape)}, placed {tensor.placements}, but q, k"
                f" and v are handed to it as plain tensors. Let it use tensor.to_local() where that is replicated, or"
                f" tensor.full_tensor()."
            )


def check_cut(q: DTensor, plan_or_mask: Any) -> None:
    """Refuses a DTensor whose parts are not those of the plan's layout."""
    if not isinstance(plan_or_mask, Plan) or q.device_mesh.size() != plan_or_mask.layout.world_size:
        return  # which is refused elsewhere
    rank, layout = q.device_mesh.get_local_rank(), plan_or_mask.layout
    tokens, wanted = q.to_local().shape[2], layout.num_slots(rank)
    if tokens != wanted and q.shape[2] == layout.seq_len:
        raise PlanError(
            f"rank {rank} holds {tokens} tokens of a DTensor of {layout.seq_len}, but {layout} gives it {wanted}."
            f" DTensor cuts as torch.chunk does: plan with layouts.like_dtensor({layout.seq_len}, {layout.world_size})."
        )


# -- Tensors against a plan, or against the plan of a mask on one device -----------------------------------------------


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
