"""What a convolution's tensors must fit: each other, and the plan that was given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longspan.errors import PlanError
from longspan.execution.handed import check_plain_numbers
from longspan.execution.inputs import check_no_tangent
from longspan.schedules.convolution import ConvPlan

ACTIVATIONS = (None, "silu", "swish")


def check_tensors(x: Any, weight: Any, bias: Any, activation: Any) -> None:
    """Refuses what is no tensor of the right kind, and shapes that do not belong together."""
    shapes = {"x": "(batch, tokens, channels)", "weight": "(channels, width)", "bias": "(channels,)"}
    dims = {"x": 3, "weight": 2, "bias": 1}
    given: dict[str, Any] = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        _check_kind(name, tensor, shapes[name])
        if tensor.ndim != dims[name]:
            hint = " Pass weight.squeeze(1) of a Conv1d." if name == "weight" and tensor.ndim == 3 else ""
            raise PlanError(f"{name} must be {shapes[name]}, but has shape {tuple(tensor.shape)}.{hint}")
        if tensor.device != x.device:
            raise PlanError(f"x is on {x.device}, but {name} is on {tensor.device}. Move it there.")
        channels = tensor.shape[2 if name == "x" else 0]
        if channels != x.shape[2]:
            raise PlanError(
                f"x has {x.shape[2]} channels, but {name} of shape {tuple(tensor.shape)} is for {channels}. x is"
                f" (batch, tokens, channels): transpose it if its tokens are last."
            )
    if not weight.shape[1]:
        raise PlanError(f"weight has shape {tuple(weight.shape)}: a width of 0. A convolution takes 1 token or more.")
    if activation not in ACTIVATIONS:
        raise PlanError(
            f"activation = {activation!r} was asked for. Choose None, 'silu' or 'swish', which is the same."
        )
    check_no_tangent(x=x, weight=weight, bias=bias)


def _check_kind(name: str, tensor: Any, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise PlanError(
            f"{name} must be a torch.Tensor of shape {shape}, but {type(tensor).__name__} was given. Convert it with"
            f" torch.as_tensor."
        )
    check_plain_numbers("causal_conv1d", name, tensor)


def check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuses different dtypes; autocast would make them the same."""
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise PlanError(
                f"x is {x.dtype}, but {name} is {tensor.dtype}. Cast one of them, or call this under torch.autocast."
            )


def check_plan(plan: Any, weight: Tensor) -> None:
    """Refuses what is no plan of a convolution, or one of another width."""
    if not isinstance(plan, ConvPlan):
        kind = type(plan).__name__
        raise PlanError(
            f"causal_conv1d takes a plan of longspan.conv_plan, but {kind} was given"
            f"{', which is a plan of attention' if kind == 'Plan' else ''}. Make one: longspan.conv_plan(documents,"
            f" layout, channels=..., width=..., dtype=...)."
        )
    if weight.shape[1] != plan.width:
        raise PlanError(
            f"weight has shape {tuple(weight.shape)}, a width of {weight.shape[1]}, but the plan is for width"
            f" {plan.width}. Plan for the width of the weight."
        )


def check_rows(plan: ConvPlan, x: Tensor, place: tuple[int, int] | None) -> None:
    """Refuses rows that do not fit the plan. `place` is this rank and the group's size."""
    size = plan.layout.world_size
    if place is None and size > 1:
        raise PlanError(
            f"the plan is for {size} ranks, so it needs group= (a process group or a mesh axis), but NoneType was"
            f" given."
        )
    if place is not None and place[1] != size:
        raise PlanError(f"the plan is for {size} ranks, but the group has {place[1]}. Plan for the group's size.")
    rank = 0 if place is None else place[0]
    wanted = (plan.batch, plan.layout.num_slots(rank), plan.channels)
    if tuple(x.shape) != wanted:
        raise PlanError(
            f"x has shape {tuple(x.shape)}, but on rank {rank} the plan expects (batch, tokens, channels) = {wanted}."
            f" Shard with layout.shard(x, rank, dim=1), or plan for these shapes."
        )
    if str(x.dtype).removeprefix("torch.") != plan.dtype:
        raise PlanError(f"x has dtype {x.dtype}, but the plan is for {plan.dtype}. Cast x, or plan for it.")
