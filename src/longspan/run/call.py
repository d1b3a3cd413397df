"""Check the arguments of `longspan.attention` and call the operator.

All of this is traced when a model is compiled. Checks that depend on the mask or the plan itself are made when the
operator runs: both are passed as data (see `longspan._compile`), so that one graph serves them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from longspan import _torch
from longspan._compile import handle_of, number_of, untraced
from longspan.errors import PlanError, in_context
from longspan.masks import Mask
from longspan.masks.convert import advice, mask_of
from longspan.planning.plan import Plan
from longspan.run import ops
from longspan.run.group import told
from longspan.run.simulated import SimulatedRank
from longspan.scoring.biases import Extras as Extras
from longspan.scoring.biases import check_sinks
from longspan.spans import shortened
from longspan.validate import (
    SEQ_DIM,
    check_axes,
    check_captured,
    check_carried,
    check_cut,
    check_tensors,
    fitting_plan,
    group_handed,
    group_of,
    not_yet,
)
from longspan.validate import check_inputs as check_inputs


@dataclass(eq=False, slots=True)  # frozen ones take three times as long to make
class Request:
    """What is asked for beside q, k and v; see `longspan.attention`."""

    plan_or_mask: Any
    group: Any = None
    scale: Any = None
    return_lse: bool = False
    kernel: str = "auto"
    sinks: Tensor | None = None
    extras: Extras | None = None
    captured_grads: str = "sum"
    name: str = ""


def attention(q: Tensor, k: Tensor, v: Tensor, asked: Request) -> Any:
    """Output, or output and lse, as asked."""
    if not isinstance(asked.plan_or_mask, (Mask, Plan)):
        asked.plan_or_mask = _mask_given(asked.plan_or_mask)
    if isinstance(asked.scale, Tensor) and asked.scale.requires_grad:
        raise PlanError(
            "scale is a tensor that needs a gradient, which it would not get. Multiply q by it and pass scale=1.0, or"
            " use a score_mod."
        )
    if asked.captured_grads not in ("sum", "share"):
        raise PlanError(
            f"captured_grads = {asked.captured_grads!r} was asked for. 'sum' adds gradients of captured tensors up over"
            f" the group; 'share' leaves each rank its own share, for trainers that reduce them with all others."
        )
    if isinstance(q, DTensor) or isinstance(k, DTensor) or isinstance(v, DTensor):
        return _of_dtensors(q, k, v, asked)
    if isinstance(asked.plan_or_mask, Plan):
        check_carried(asked.plan_or_mask.layout, SEQ_DIM, q=q, k=k, v=v)
    if isinstance(asked.group, SimulatedRank) and isinstance(asked.plan_or_mask, Plan):
        return _together(q, k, v, asked, asked.plan_or_mask, asked.group)
    return _run(q, k, v, asked)


@untraced
def _mask_given(value: Any) -> Mask:
    """The mask that a small table says; refuses what is neither mask nor plan."""
    if value is None:
        raise PlanError(
            f"attention(q, k, v) was called without a mask. {advice(value)} Over ranks it takes a plan:"
            f" longspan.plan(mask, layout, ...)."
        )
    mask = mask_of(value)
    if not isinstance(mask, Mask):
        raise PlanError(
            f"attention(q, k, v, mask) or attention(q, k, v, plan, group=...) was expected, but the fourth argument is"
            f" {type(value).__name__}. {advice(value)}"
        )
    return mask


def _together(q: Tensor, k: Tensor, v: Tensor, asked: Request, plan: Plan, here: SimulatedRank) -> Any:
    """All ranks are in this process: whole sequences under the plan's mask, of which each rank takes its rows."""
    fitting_plan(plan, q, k, v, (here.rank(), here.size()))

    def compute(parts: list[tuple[Tensor, ...]]) -> list[Any]:
        q, k, v = (plan.layout.unshard(tensors, SEQ_DIM) for tensors in zip(*parts, strict=True))
        out, lse = _run(q, k, v, replace(asked, plan_or_mask=plan.mask, group=None, return_lse=True))
        ranks = range(here.size())
        return [(plan.layout.shard(out, r, SEQ_DIM), plan.layout.shard(lse, r, SEQ_DIM)) for r in ranks]

    out, lse = here.meet("attention", (q, k, v), compute)
    return (out, lse) if asked.return_lse else out


def _run(q: Tensor, k: Tensor, v: Tensor, asked: Request, group: Any = None) -> Any:
    """On plain tensors, over the group that was asked for, or over `group`, which is that of DTensors."""
    check_tensors(q, k, v)
    group = group if asked.group is None else asked.group
    group = "" if group is None else _group_name(group, asked.plan_or_mask)
    if asked.sinks is not None:
        check_sinks(asked.sinks, q.shape[1])
    scoring, recorded, said = None, None, ()
    if asked.extras is not None and torch.compiler.is_compiling():
        recorded = asked.extras.recorded(q, k)
        if recorded.why != "":
            return _outside_of_graph(q, k, v, asked, group, recorded.why)
        said = recorded.text, recorded.numbers, recorded.reals, len(recorded.constants)
    elif asked.extras is not None:
        scoring = asked.extras.scoring(q, fitting_plan(asked.plan_or_mask, q, k, v, ops.place_in(group)))
    captured = [] if scoring is None else list(scoring.captured)
    captured = captured if recorded is None else recorded.captured
    constants = [] if recorded is None else recorded.constants
    if captured or constants:
        check_captured([*captured, *constants])
    shared = captured if asked.sinks is None else [*captured, asked.sinks]
    records = torch.is_grad_enabled()
    learns = records and bool(shared) and any(t.requires_grad for t in shared)
    saves = learns or (records and (q.requires_grad or k.requires_grad or v.requires_grad))
    scale = None if asked.scale is None else float(asked.scale)
    number = 0 if scoring is None else number_of(scoring)
    handle = asked.plan_or_mask.handle  # the tensor under which the operator finds the mask or plan
    handle = _given_handle(asked.plan_or_mask) if handle is None else handle
    tensors, sums = [*captured, *constants], asked.captured_grads == "sum"
    others = handle, group, asked.kernel, scale, number, sums, saves, learns, asked.name, ops.FORM, *said
    run = ops.attention if torch.compiler.is_compiling() else ops.run_of(ops.attention, q, k, v, asked.sinks, *tensors)
    if run is ops.attention:
        out, lse, _ = run(q, k, v, tensors, asked.sinks, *others)
    else:
        out, lse, _ = ops.attend(q, k, v, tensors, asked.sinks, *others, run=run)
    return (out, lse) if asked.return_lse else out


@torch.compiler.disable(reason="the mask or plan was made before torch was loaded")
def _given_handle(plan_or_mask: Mask | Plan) -> Tensor:
    object.__setattr__(plan_or_mask, "handle", handle_of(plan_or_mask))
    return plan_or_mask.handle


def _outside_of_graph(q: Tensor, k: Tensor, v: Tensor, asked: Request, group: str, why: str) -> Any:
    """With a score function that cannot be compiled: refused where the whole graph was asked for, else run between two
    graphs, and that is told."""
    _torch.break_graph(
        f"longspan: a score function cannot be compiled: {why}. Write it otherwise, work out beforehand what does not"
        f" depend on the pair, or compile without fullgraph=True."
    )
    return _run_eagerly(q, k, v, asked, group, why)


@torch.compiler.disable(reason="a score function cannot be compiled")
def _run_eagerly(q: Tensor, k: Tensor, v: Tensor, asked: Request, group: str, why: str) -> Any:
    warnings.warn(
        f"a score function cannot be compiled, so the graph ends before it and another begins after it: {why}.",
        stacklevel=2,
    )
    return _run(q, k, v, asked, _torch.group_named(group) if group else None)


def in_call(name: str, tensors: tuple[Any, Any, Any], plan_or_mask: Any, group: Any) -> AbstractContextManager[None]:
    """What a public call runs in. Errors say which call it was, and the other ranks, who may be waiting in the same
    one, are told when this one refuses before anything was sent."""
    if torch.compiler.is_compiling():
        return nullcontext()
    if group is None and not isinstance(tensors[0], DTensor):
        return in_context(lambda: _described(name, tensors, plan_or_mask, None))
    return _in_call(name, tensors, plan_or_mask, group)


@contextmanager
def _in_call(name: str, tensors: tuple[Any, Any, Any], plan_or_mask: Any, group: Any) -> Iterator[None]:
    if group is None and isinstance(tensors[0], DTensor):
        group = tensors[0].device_mesh
    group = group_of(group)
    members = group if isinstance(group, dist.ProcessGroup) else None
    telling = nullcontext() if members is None else told(members)
    with in_context(lambda: _described(name, tensors, plan_or_mask, members)), telling:
        yield


def _described(name: str, tensors: tuple[Any, Any, Any], plan_or_mask: Any, group: dist.ProcessGroup | None) -> str:
    """The call in a sentence, as far as its arguments are what they should be."""
    shapes = [f"{n} {tuple(t.shape)}" for n, t in zip("qkv", tensors, strict=True) if _has_shape(t)]
    parts = [f"{name} of {', '.join(shapes)}" if shapes else name]
    if isinstance(plan_or_mask, Plan):
        over = shortened(plan_or_mask.layout, 120)
        parts.append(f"by {plan_or_mask.scheme.name} of {shortened(plan_or_mask.mask, 120)} over {over}")
    elif isinstance(plan_or_mask, Mask):
        parts.append(f"under {shortened(plan_or_mask, 120)}")
    if group is not None:
        parts.append(f"on rank {group.rank()} of {group.size()}")
    return f"The call: {', '.join(parts)}."


def _has_shape(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not tensor.is_nested


def _group_name(group: Any, plan_or_mask: Mask | Plan) -> str:
    """The name under which PyTorch knows the group."""
    if isinstance(plan_or_mask, Mask):
        raise PlanError(
            "a group was given with a mask. Make a plan first: longspan.plan(mask, layout, ...), and pass the plan."
        )
    name = _name_of(group)
    if name is None:
        raise PlanError(
            f"the plan is for {plan_or_mask.layout.world_size} ranks, so it needs group= (a process group or a mesh"
            f" axis), but {group_handed(group)}.{not_yet()}"
        )
    return name


@torch.compiler.assume_constant_result
def _name_of(group: Any) -> str | None:
    group = group_of(group)
    check_axes(group)
    return group.group_name if isinstance(group, dist.ProcessGroup) else None


def _of_dtensors(q: Any, k: Any, v: Any, asked: Request) -> Any:
    """DTensors that are sharded along the sequence on one mesh axis: their local parts, wrapped again afterwards."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, DTensor):
            raise PlanError(f"{name} is a plain tensor while others are DTensors. Pass all three of one kind.")
        if tuple(tensor.placements) != (Shard(SEQ_DIM),) or tensor.device_mesh != q.device_mesh:
            raise PlanError(
                f"{name} is placed {tensor.placements} on {tensor.device_mesh}. A DTensor must be placed"
                f" (Shard({SEQ_DIM}),), along its tokens, on the one-dimensional mesh of q."
            )
    if not torch.compiler.is_compiling():  # compiled, the operator refuses other shapes
        check_cut(q, asked.plan_or_mask)
    mesh = q.device_mesh
    local = _run(q.to_local(), k.to_local(), v.to_local(), asked, mesh)
    parts: tuple[Tensor, ...] = local if isinstance(local, tuple) else (local,)
    shape = (*q.shape[:3], v.shape[3])
    wrapped = [
        DTensor.from_local(part, mesh, (Shard(SEQ_DIM),), shape=full, stride=_strides(full))
        for part, full in zip(parts, (torch.Size(shape), q.shape[:3]), strict=False)
    ]
    return tuple(wrapped) if asked.return_lse else wrapped[0]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))
