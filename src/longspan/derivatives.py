"""First derivatives in reverse mode are what operators have; others, which PyTorch would drop silently, raise here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from longspan._torch import loses_derivative
from longspan.errors import PlanError


class FirstDerivative(torch.autograd.Function):
    """An autograd function whose gradient raises where it is differentiated again.

    PyTorch's `once_differentiable` looks at the incoming gradient alone: a gradient penalty would silently be 0.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.backward = staticmethod(_differentiated_once(cls.backward))


def _differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the results of a backward function raise where they are differentiated, in the incoming gradients or in
    tensors saved by forward."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        results = results if isinstance(results, tuple) else (results,)
        sources = [x for x in (*ctx.saved_tensors, *gradients) if x is not None and x.requires_grad]
        return tuple(None if x is None else _SecondDerivative.apply(x, *sources) for x in results)

    return run


class _SecondDerivative(torch.autograd.Function):
    """Identity of the first tensor, whose gradient raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]  # noqa: ARG004
        raise PlanError(
            "the gradient of a Longspan operator must not be differentiated again (create_graph=True, gradient"
            " penalties). Use first derivatives only."
        )


def check_derivatives(*tensors: Any) -> None:
    """Raise if a tensor has a derivative that an operator would silently drop."""
    if loses_derivative(*tensors):
        raise PlanError(
            "a tensor of a Longspan operator must have no forward-mode derivative (torch.func.jvp, dual numbers) and"
            " not be mapped by torch.vmap. Use torch.autograd.grad, and a batch dim."
        )
