"""Operators of our own, registered by the calls that `torch.library.custom_op` is made of.

`custom_op` looks through all arguments several times in every call, which takes 0.2 ms of the host; these take 0.05 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from longspan.errors import PlanError
from longspan.execution import _torch, _torch_compiler
from longspan.untraced import untraced

_runs: dict[Any, Callable[..., Any]] = {}
"""What operators run, by operator."""


def _library(name: str, *, anew: bool = False) -> torch.library.Library:
    """The library of one operator. It is kept where PyTorch keeps operators: when modules of ours are imported again (a
    notebook that reloads them), the one of before must go first."""
    kept: dict[str, torch.library.Library] = vars(torch.ops.longspan).setdefault("_libraries", {})
    if anew and name in kept:
        _torch.destroy(kept.pop(name))
    if name not in kept:
        kept[name] = torch.library.Library("longspan", "FRAGMENT")
    return kept[name]


def defined(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator of this name, for all devices. Its schema is that of `run`, which changes no argument and returns
    nothing that shares memory with one; `fake` makes results without data."""
    schema = torch.library.infer_schema(run, mutates_args=())
    short = name.partition("::")[2]
    library = _library(name, anew=True)
    library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag, *_torch.CUDAGRAPH_UNSAFE))

    def called(*args: Any) -> Any:
        with _torch_compiler.as_in_eager():
            return run(*args)

    library.impl(short, untraced(called), "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    operator = getattr(torch.ops.longspan, short).default
    _runs[operator] = run
    return operator


def run_of(operator: Any, *tensors: torch.Tensor | None) -> Callable[..., Any]:
    """What to call below autograd: the operator, or, where nobody looks on, what it runs. PyTorch's dispatcher hands
    arguments from Python to Python, which takes 20 us of the host each time."""
    known = operator in _runs  # not after this module was imported again
    return _runs[operator] if known and _torch_compiler.is_unobserved(tensors) else operator


def differentiate(operator: Any, run: Callable[..., Any]) -> None:
    """Runs this instead of the operator where autograd looks on; it calls the operator below autograd."""
    _library(operator.name()).impl(operator, run, "Autograd")


def refuse_derivative(operator: Any) -> None:
    """Lets the operator run, and refuses a gradient of what it returns."""

    @wraps(operator)
    def run(*args: Any) -> Any:
        with _torch.below_autograd():
            found = operator(*args)
        tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, torch.Tensor)]
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return found
        return _torch.tree_map(lambda t: _NoDerivative.apply(t, *tensors) if t.is_floating_point() else t, found)

    _library(operator.name()).impl(operator, run, "Autograd")


class _NoDerivative(torch.autograd.Function):
    """A tensor as it is, of which there is no gradient."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]  # noqa: ARG004
        raise PlanError(
            "a second derivative of an operator of Longspan was asked for (a backward through gradients, as"
            " create_graph=True makes it possible), and there is none. Use first derivatives only."
        )
