"""From a user's tensors to the operator: what is asked must fit the plan, or the call is refused."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from longspan.errors import PlanError
from longspan.execution import ops
from longspan.execution.extras import Extras, check_sinks
from longspan.execution.handed import check_cut, group_handed
from longspan.execution.kernels import Asked, choose_kernel
from longspan.execution.members import told
from longspan.layouts import contiguous
from longspan.masks import Mask
from longspan.schedules.machines import CPU
from longspan.schedules.plan import Plan, made_plan
from longspan.schedules.steps import Sizes

SEQ_DIM = 2


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    what: Mask | Plan,
    *,
    group: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    extras: Extras | None = None,
    captured_grads: str = "sum",
) -> Tensor | tuple[Tensor, Tensor]:
    """See `longspan.attention`."""
    arguments = (q, k, v, what, group, scale, return_lse, kernel, sinks, extras, captured_grads)
    with telling(q, group):
        return _checked(*arguments)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    what: Any,
    group: Any,
    scale: Any,
    return_lse: bool,
    kernel: str,
    sinks: Tensor | None,
    extras: Extras | None,
    captured_grads: str,
) -> Tensor | tuple[Tensor, Tensor]:
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise PlanError(
            "scale is a tensor that needs a gradient, which it would not get. Multiply q by it and pass scale=1.0, or"
            " use a score_mod."
        )
    if captured_grads not in ("sum", "share"):
        raise PlanError(
            f"captured_grads = {captured_grads!r} was asked for. 'sum' adds gradients of captured tensors up over the"
            f" group; 'share' leaves each rank its own share, for trainers that reduce them with all others."
        )
    if extras is not None:
        run = _scored
    elif any(isinstance(t, DTensor) for t in (q, k, v)):
        run = _of_dtensors
    else:
        run = _run
    return run(q, k, v, what, group, scale, return_lse, kernel, sinks, extras, captured_grads)  # type: ignore[arg-type]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    what: Any,
    group: Any,
    scale: float | None,
    return_lse: bool,
    kernel: str,
    sinks: Tensor | None,
    extras: Extras | None,
    captured_grads: str,
) -> Tensor | tuple[Tensor, Tensor]:
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    plan, name, rank, opaque, chunks = _resolved(*shapes, q.dtype, what, group)
    _check_tensors(q, k, v)
    if sinks is not None:
        check_sinks(sinks, q.shape[1])
    scoring = None if extras is None else extras.scoring(q, ops.plan_named(plan))
    drops = scoring is not None and scoring.dropout is not None
    chosen = choose_kernel(kernel, q, k, v, Asked(opaque, scoring is not None, drops, chunks is not None))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    captured = [] if scoring is None else list(scoring.captured)
    wanted = (q, k, v, *captured, *([] if sinks is None else [sinks]))
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in wanted)
    if saves and chunks is not None and any(t.requires_grad for t in wanted[3:]):
        raise PlanError(
            f"the plan has chunks = {chunks}, which promises the same bits on any number of ranks, but sinks or a"
            f" tensor that a score function uses needs a gradient, which is summed over ranks in an order that their"
            f" number decides. Detach it, or plan without chunks."
        )
    names = plan, name, rank, chosen, scale, ops.known_scoring(scoring)
    out, lse, _ = ops.attention(q, k, v, captured, sinks, *names, captured_grads == "sum", saves)
    return (out, lse) if return_lse else out


@torch.compiler.disable(reason="a score function is called on tiles, not traced: compile without fullgraph=True")
def _scored(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """With functions of scores, which are called tile by tile and not traced: compiled code stops before and goes on
    after."""
    dtensors = any(isinstance(t, DTensor) for t in (q, k, v))
    return (_of_dtensors if dtensors else _run)(q, k, v, *rest)


@torch.compiler.assume_constant_result
def _resolved(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    dtype: torch.dtype,
    what: Any,
    group: Any,
) -> tuple[str, str, int, bool, int | None]:
    """The names of plan and group, this rank, whether a function decides on pairs, and the plan's chunks; what does not
    fit is refused."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise PlanError(f"{name} must have 4 dims (batch, heads, tokens, features), but has shape {shape}.")
    if isinstance(what, Mask):
        if group is not None:
            raise PlanError(
                "a group was given with a mask. Make a plan first: longspan.plan(mask, layout, ...), and pass the plan."
            )
        plan, group_name, rank = one_device_plan(q, k, v, dtype, what), "", 0
    elif isinstance(what, Plan):
        plan = what
        group_name, rank = _place(plan, group)
    else:
        raise PlanError(
            f"attention(q, k, v, mask) or attention(q, k, v, plan, group=...) was expected, but the fourth argument is"
            f" {type(what).__name__}."
        )
    _check_shapes(q, k, v, dtype, plan, rank)
    return ops.known(plan), group_name, rank, not plan.mask.is_structured, plan.chunks


def one_device_plan(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], dtype: Any, mask: Mask) -> Plan:
    """The plan of tensors of these shapes on one device."""
    sizes = Sizes(q[1], k[1], q[3], v[3], dtype.itemsize, q[0])
    layout = contiguous(q[SEQ_DIM], 1)
    name = str(dtype).removeprefix("torch.")
    return made_plan(mask, layout, sizes, name, "exchange", CPU, True, False, None)


def telling(q: Any, group: Any) -> AbstractContextManager[None]:
    """Tells the other ranks, who may be waiting in the same call, when this one refuses before anything was sent."""
    if torch.compiler.is_compiling():
        return nullcontext()
    if group is None and isinstance(q, DTensor):
        group = q.device_mesh
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    return told(group) if isinstance(group, dist.ProcessGroup) else nullcontext()


def _place(plan: Plan, group: Any) -> tuple[str, int]:
    """The group's name and this process's rank in it."""
    size = plan.layout.world_size
    if group is None and size == 1:
        return "", 0
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise PlanError(
                f"group is a mesh of {group.ndim} axes {group.mesh_dim_names}. Pass the one that holds the sequence, as"
                f" in mesh['cp']."
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise PlanError(
            f"the plan is for {size} ranks, so it needs group= (a process group or a mesh axis), but"
            f" {group_handed(group)}."
        )
    if group.size() != size:
        raise PlanError(f"the plan is for {size} ranks, but the group has {group.size()}. Plan for the group's size.")
    return group.group_name, group.rank()


def _check_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype, plan: Plan, rank: int
) -> None:
    sizes = plan.sizes
    tokens = int(plan.layout.num_tokens[rank]) + plan.layout.num_padding(rank)
    expected = {
        "q": (q, (sizes.batch, sizes.q_heads, tokens, sizes.head_dim)),
        "k": (k, (sizes.batch, sizes.kv_heads, tokens, sizes.head_dim)),
        "v": (v, (sizes.batch, sizes.kv_heads, tokens, sizes.v_head_dim)),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise PlanError(
                f"{name} has shape {found}, but on rank {rank} the plan expects (batch, heads, tokens, features) ="
                f" {wanted}. Shard with layout.shard(x, rank, dim=2), or plan for these shapes."
            )
    if str(dtype).removeprefix("torch.") != plan.dtype:
        raise PlanError(f"q has dtype {dtype}, but the plan is for {plan.dtype}. Cast the tensors, or plan for it.")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise PlanError(
                f"q is {q.dtype} on {q.device}, but {name} is {tensor.dtype} on {tensor.device}. All three must agree."
            )


def _of_dtensors(q: Any, k: Any, v: Any, what: Any, group: Any, scale: Any, return_lse: bool, *rest: Any) -> Any:
    """DTensors that are sharded along the sequence on one mesh axis: their local parts, wrapped again afterwards."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, DTensor):
            raise PlanError(f"{name} is a plain tensor while others are DTensors. Pass all three of one kind.")
        if tuple(tensor.placements) != (Shard(SEQ_DIM),) or tensor.device_mesh != q.device_mesh:
            raise PlanError(
                f"{name} is placed {tensor.placements} on {tensor.device_mesh}. A DTensor must be placed"
                f" (Shard({SEQ_DIM}),), along its tokens, on the one-dimensional mesh of q."
            )
    check_cut(q, what)
    mesh = q.device_mesh
    group = mesh if group is None else group
    local = _run(q.to_local(), k.to_local(), v.to_local(), what, group, scale, return_lse, *rest)
    parts: tuple[Tensor, ...] = local if isinstance(local, tuple) else (local,)
    shape = (*q.shape[:3], v.shape[3])
    wrapped = [
        DTensor.from_local(part, mesh, (Shard(SEQ_DIM),), shape=full, stride=_strides(full))
        for part, full in zip(parts, (torch.Size(shape), q.shape[:3]), strict=False)
    ]
    return tuple(wrapped) if return_lse else wrapped[0]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))
