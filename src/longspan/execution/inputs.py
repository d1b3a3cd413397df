"""What attention takes: tensors of the right kind, and numbers that are numbers. Checked once, before anything runs."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from longspan.errors import KernelError, PlanError
from longspan.execution._torch import has_tangent, version
from longspan.layouts import Layout
from longspan.layouts.carried import carried, other_tokens
from longspan.span import shortened

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_inputs(q: Any, k: Any, v: Any, scale: Any, kernel: Any = "auto", sinks: Any = None, name: Any = "") -> None:
    """Raises unless q, k and v are floating-point tensors, the scale is a number and the kernel a name."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"{name} must be a torch.Tensor of shape (batch, heads, tokens, features), but {type(tensor).__name__}"
                f" was given. Convert it with torch.as_tensor."
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise PlanError(
                f"{name} is a tensor of kind {kind}, but attention takes plain ones. Pad or densify it; documents"
                f" are a mask: longspan.masks.documents(lengths)."
            )
        if tensor.dtype not in DTYPES:
            raise PlanError(
                f"{name} has dtype {tensor.dtype}, but attention takes {', '.join(map(str, DTYPES))}. Cast it first."
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
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and has_tangent(tensor):
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
