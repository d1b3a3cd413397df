"""Check the arguments of `longspan.attention` and call the operator.

This file is traced when a model is compiled. Checks of the mask or plan itself run with the operator: both
are passed as data (see `longspan._compile`), so that one graph serves all of them.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan import _torch
from longspan._compile import assume_constant, create_handle, register_value, run_eagerly
from longspan.errors import PlanError, in_context
from longspan.masks import Mask
from longspan.masks.convert import advice, mask_of
from longspan.planning.plan import Plan
from longspan.run import ops
from longspan.run.simulated import SimulatedRank
from longspan.scoring.biases import Extras as Extras
from longspan.scoring.biases import check_sinks
from longspan.spans import truncated_repr
from longspan.validate import (
    SEQ_DIM,
    check_axes,
    check_captured,
    check_dtensor_shards,
    check_sharding,
    check_tensors,
    describe_group,
    group_of,
    init_hint,
    resolve_plan,
)
from longspan.validate import check_inputs as check_inputs


@dataclass(eq=False, slots=True)  # not frozen: creating a frozen dataclass takes three times as long
class Request:
    """Arguments of `longspan.attention` after q, k and v."""

    plan_or_mask: Any
    group: Any = None
    scale: Any = None
    return_lse: bool = False
    kernel: str = "auto"
    sinks: Tensor | None = None
    extras: Extras | None = None
    captured_grads: str = "sum"
    name: str = ""


def attention(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Any:
    """Return the output, or (output, lse) with `return_lse`."""
    if not isinstance(request.plan_or_mask, (Mask, Plan)):
        request.plan_or_mask = _convert_mask(request.plan_or_mask)
    if isinstance(request.scale, Tensor) and request.scale.requires_grad:
        raise PlanError(
            "scale must not require a gradient, which it would not get. Multiply q by it and pass scale=1.0, or use a"
            " score_mod."
        )
    if request.captured_grads not in ("sum", "share"):
        raise PlanError(
            f"captured_grads must be 'sum' (sum gradients of captured tensors over the group) or 'share' (leave each"
            f" rank its own share, for trainers that reduce gradients), but got {request.captured_grads!r}."
        )
    if _torch.is_dtensor(q) or _torch.is_dtensor(k) or _torch.is_dtensor(v):
        return _run_dtensors(q, k, v, request)
    if isinstance(request.plan_or_mask, Plan):
        check_sharding(request.plan_or_mask.layout, SEQ_DIM, q=q, k=k, v=v)
    if isinstance(request.group, SimulatedRank) and isinstance(request.plan_or_mask, Plan):
        return _run_simulated(q, k, v, request, request.plan_or_mask, request.group)
    return _run(q, k, v, request)


@run_eagerly
def _convert_mask(value: Any) -> Mask:
    """Return the mask of a small dense table. Raise for anything else."""
    mask = None if value is None else mask_of(value)
    if not isinstance(mask, Mask):
        raise PlanError(
            f"plan_or_mask must be a mask of longspan.masks on one device, or a plan (longspan.plan(mask, layout, ...))"
            f" over ranks, but got {'no mask' if value is None else type(value).__name__}. {advice(value)}"
        )
    return mask


def _run_simulated(q: Tensor, k: Tensor, v: Tensor, request: Request, plan: Plan, here: SimulatedRank) -> Any:
    """Run on simulated ranks: attention over whole sequences, of which each rank takes its rows."""
    resolve_plan(plan, q, k, v, (here.rank(), here.size()))

    def compute(parts: list[tuple[Tensor, ...]]) -> list[Any]:
        q, k, v = (plan.layout.unshard(tensors, SEQ_DIM) for tensors in zip(*parts, strict=True))
        out, lse = _run(q, k, v, replace(request, plan_or_mask=plan.mask, group=None, return_lse=True))
        ranks = range(here.size())
        return [(plan.layout.shard(out, r, SEQ_DIM), plan.layout.shard(lse, r, SEQ_DIM)) for r in ranks]

    out, lse = here.meet("attention", (q, k, v), compute)
    return (out, lse) if request.return_lse else out


def _run(q: Tensor, k: Tensor, v: Tensor, request: Request, group: Any = None) -> Any:
    """Run on plain tensors, over the group of the request, or over `group`, that of DTensors."""
    check_tensors(q, k, v)
    group = group if request.group is None else request.group
    group = "" if group is None else _group_name(group, request.plan_or_mask)
    sinks = request.sinks
    if sinks is not None:
        check_sinks(sinks, q.shape[1])
    scoring, recorded, score_program = None, None, ()
    if request.extras is not None and torch.compiler.is_compiling():
        recorded = request.extras.record(q, k)
        if recorded.why != "":
            return _run_outside_graph(q, k, v, request, group, recorded.why)
        score_program = recorded.text, recorded.numbers, recorded.reals, len(recorded.constants)
    elif request.extras is not None:
        scoring = request.extras.scoring(q, resolve_plan(request.plan_or_mask, q, k, v, ops.rank_and_size(group)))
    captured: list[Tensor] = []
    constants: list[Tensor] = []
    if scoring is not None:
        captured, constants = list(scoring.captured), list(scoring.constants)
        score_program = "", [], [], len(constants)
    elif recorded is not None:
        captured, constants = recorded.captured, recorded.constants
    if captured or constants:
        check_captured([*captured, *constants])
    shared = captured if sinks is None else [*captured, sinks]
    has_grad = torch.is_grad_enabled()
    needs_shared_grads = has_grad and bool(shared) and any(t.requires_grad for t in shared)
    needs_backward = needs_shared_grads or (has_grad and (q.requires_grad or k.requires_grad or v.requires_grad))
    scale = None if request.scale is None else float(request.scale)
    number = 0 if scoring is None else register_value(scoring)
    handle = request.plan_or_mask.handle  # the tensor by which the operator looks up the mask or plan
    handle = _create_handle(request.plan_or_mask) if handle is None else handle
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and (mode := _torch.fake_mode_of(q)) is not None:
        resolve_plan(request.plan_or_mask, q, k, v, ops.rank_and_size(group))  # the operator would check it
        handle = mode.from_tensor(handle)
    tensors, reduce_shared_grads = [*captured, *constants], request.captured_grads == "sum"
    others = (
        handle, group, request.kernel, scale, number, reduce_shared_grads, needs_backward, needs_shared_grads,
        request.name, ops.FORM, *score_program,
    )  # fmt: skip
    run = ops.attention if is_compiling else ops.implementation_of(ops.attention, q, k, v, sinks, *tensors)
    if run is ops.attention:
        out, lse, _ = run(q, k, v, tensors, sinks, *others)
    else:
        out, lse, _ = ops.attend(q, k, v, tensors, sinks, *others, run=run)
    return (out, lse) if request.return_lse else out


@run_eagerly
def _create_handle(plan_or_mask: Mask | Plan) -> Tensor:
    object.__setattr__(plan_or_mask, "handle", create_handle(plan_or_mask))
    return plan_or_mask.handle


def _run_outside_graph(q: Tensor, k: Tensor, v: Tensor, request: Request, group: str, why: str) -> Any:
    """Run with a score function that cannot be compiled: a graph break with a warning, or an error with fullgraph."""
    _torch.break_graph(
        f"longspan: a score function cannot be compiled: {why}. Rewrite it, compute in advance what does not depend on"
        f" the pair, or compile without fullgraph=True."
    )
    return _run_eagerly(q, k, v, request, group, why)


@run_eagerly
def _run_eagerly(q: Tensor, k: Tensor, v: Tensor, request: Request, group: str, why: str) -> Any:
    warnings.warn(f"a score function cannot be compiled and causes a graph break: {why}.", stacklevel=2)
    return _run(q, k, v, request, _torch.group_named(group) if group else None)


def call_context(
    name: str, tensors: tuple[Any, Any, Any], plan_or_mask: Any, group: Any
) -> AbstractContextManager[None]:
    """Return the context of a public call: errors name the call."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return in_context(lambda: _describe_call(name, tensors, plan_or_mask, group))


def _describe_call(name: str, tensors: tuple[Any, Any, Any], plan_or_mask: Any, group: Any) -> str:
    """Describe the call for error messages."""
    group = group_of(tensors[0].device_mesh if group is None and _torch.is_dtensor(tensors[0]) else group)
    shapes = [
        f"{letter} {tuple(tensor.shape)}"
        for letter, tensor in zip("qkv", tensors, strict=True)
        if isinstance(tensor, Tensor) and not tensor.is_nested
    ]
    parts = [f"{name} of {', '.join(shapes)}" if shapes else name]
    if isinstance(plan_or_mask, Plan):
        over = truncated_repr(plan_or_mask.layout, 120)
        parts.append(f"by {plan_or_mask.scheme.name} of {truncated_repr(plan_or_mask.mask, 120)} over {over}")
    elif isinstance(plan_or_mask, Mask):
        parts.append(f"under {truncated_repr(plan_or_mask, 120)}")
    if isinstance(group, dist.ProcessGroup):
        parts.append(f"on rank {group.rank()} of {group.size()}")
    return f"The call: {', '.join(parts)}."


def _group_name(group: Any, plan_or_mask: Mask | Plan) -> str:
    """Return PyTorch's name of the group."""
    if isinstance(plan_or_mask, Mask):
        raise PlanError("group must be None with a mask. Create a plan, longspan.plan(mask, layout, ...), and pass it.")
    name = _name_of(group)
    if name is None:
        raise PlanError(
            f"group must be a process group or a mesh axis of the plan's {plan_or_mask.layout.world_size} ranks, but"
            f" {describe_group(group)}.{init_hint()}"
        )
    return name


@assume_constant
def _name_of(group: Any) -> str | None:
    group = group_of(group)
    check_axes(group)
    return group.group_name if isinstance(group, dist.ProcessGroup) else None


def _run_dtensors(q: Any, k: Any, v: Any, request: Request) -> Any:
    """Run on the local tensors of DTensors that are sharded along the sequence, and wrap the results."""
    from torch.distributed.tensor import DTensor, Shard

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not _torch.is_dtensor(tensor):
            raise PlanError(f"{name} must be a DTensor like the others, but got a plain tensor.")
        if tuple(tensor.placements) != (Shard(SEQ_DIM),) or tensor.device_mesh != q.device_mesh:
            raise PlanError(
                f"{name} must have placements (Shard({SEQ_DIM}),), along its tokens, on the one-dimensional mesh of q,"
                f" but got {tensor.placements} on {tensor.device_mesh}."
            )
    if not torch.compiler.is_compiling():  # in compiled code the operator checks shapes
        check_dtensor_shards(q, request.plan_or_mask)
    mesh = q.device_mesh
    local = _run(q.to_local(), k.to_local(), v.to_local(), request, mesh)
    parts: tuple[Tensor, ...] = local if isinstance(local, tuple) else (local,)
    wrapped: list[Tensor] = []
    for part, shape in zip(parts, (torch.Size((*q.shape[:3], v.shape[3])), q.shape[:3]), strict=False):
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        wrapped.append(DTensor.from_local(part, mesh, (Shard(SEQ_DIM),), shape=shape, stride=stride))
    return tuple(wrapped) if request.return_lse else wrapped[0]
