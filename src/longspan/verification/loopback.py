"""All ranks of a plan in one process, as one differentiable function of whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.execution.scoring.biases import Extras
from longspan.schedules.plan import Plan
from longspan.testing import run_loopback


def loopback_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    **extras: Any,
) -> Tensor:
    """See `longspan.verification.loopback_attention`."""
    asked = Extras(**extras)
    scoring = asked.scoring(q, plan) if asked.any() else None
    captured = [*(() if scoring is None else scoring.captured), *([] if sinks is None else [sinks])]
    options = {"scale": scale, "kernel": kernel, "sinks": sinks, "extras": asked if asked.any() else None}
    return _Loopback.apply(plan, options, q, k, v, *captured)  # type: ignore[return-value]


class _Loopback(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> Tensor:
        ctx.plan, ctx.options, ctx.num_rest = plan, options, len(rest)
        ctx.save_for_backward(q, k, v)
        nothing = q.new_zeros((*q.shape[:3], v.shape[3]))
        return run_loopback(plan, q, k, v, nothing, **options)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # A loopback runs both directions at once: forward again costs little at the sizes that are verified.
        q, k, v = ctx.saved_tensors
        results = run_loopback(ctx.plan, q, k, v, grads[0].contiguous(), **ctx.options)
        return None, None, *results[2:5], *results[5 : 5 + ctx.num_rest]
