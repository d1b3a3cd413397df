"""Run attention of all ranks of a plan in one process, on the loopback transport.

Only the transport differs from a run over processes: kernels, programs and autograd are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.derivatives import FirstDerivative
from longspan.kernels import Features, choose_kernel, kernel_named
from longspan.planning.plan import Plan
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Loopback, Program
from longspan.run.walk import Job
from longspan.scoring.biases import Extras

SEQ_DIM = 2


class Transport(Protocol):
    """Runs all ranks' programs and returns their results, by rank."""

    def run(self, programs: Sequence[Program[Any]]) -> list[Any]: ...


@torch.no_grad()
def run_loopback(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    kernel: str = "auto",
    scale: float | None = None,
    sinks: Tensor | None = None,
    extras: Extras | None = None,
    transport: Transport | None = None,
) -> tuple[Tensor, ...]:
    """Return output, lse, dq, dk and dv of whole tensors, computed by all ranks of the plan together.

    The ranks take turns, unless `transport` runs them otherwise (see `tests.simulation.network`). Then follow, in the
    order of their first use, the gradients of tensors that score functions captured, and that of sinks: summed over the
    ranks.
    """
    plan.mask.check_unchanged()
    layout, carry = plan.layout, Loopback() if transport is None else transport
    scoring = None if extras is None else extras.scoring(q, plan)
    captured = () if scoring is None else scoring.captured
    has_dropout = scoring is not None and scoring.dropout is not None
    features = Features(not plan.mask.is_structured, scoring is not None, has_dropout)
    chosen = kernel_named(choose_kernel(kernel, q, k, v, features))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    ranks = range(layout.world_size)
    jobs = [Job(plan, rank, chosen, scale, q.dtype, scoring, sinks) for rank in ranks]
    own = [tuple(layout.shard(t, rank, SEQ_DIM) for t in (q, k, v)) for rank in ranks]
    upstream = [layout.shard(dout, rank, SEQ_DIM) for rank in ranks]
    forward = carry.run([Forward(jobs[r], *own[r], captured=captured).program(saves=True) for r in ranks])
    runs: list[Backward] = []
    for r in ranks:
        (q, k, v), (out, lse, kept) = own[r], forward[r]
        runs.append(Backward(jobs[r], Saved(q, k, v, out, lse, kept, captured), upstream[r]))
    gradients = carry.run([run.program() for run in runs])
    shared = [run.shared_gradients() for run in runs]
    parts = [(*forward[r][:2], *gradients[r]) for r in ranks]
    whole = [layout.unshard([part[i] for part in parts], SEQ_DIM) for i in range(5)]
    return *whole, *(torch.stack(by_rank).sum(0) for by_rank in zip(*shared, strict=True))


def loopback_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """See `longspan.verification.loopback_attention`."""
    extras = Extras(**options) if Extras(**options).any() else None
    scoring = None if extras is None else extras.scoring(q, plan)
    captured = [*(() if scoring is None else scoring.captured), *([] if sinks is None else [sinks])]
    settings = {"scale": scale, "kernel": kernel, "sinks": sinks, "extras": extras}
    return _Loopback.apply(plan, settings, q, k, v, *captured)  # type: ignore[return-value]


class _Loopback(FirstDerivative):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, settings: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> Tensor:
        ctx.plan, ctx.settings, ctx.num_rest = plan, settings, len(rest)
        ctx.save_for_backward(q, k, v)
        return run_loopback(plan, q, k, v, q.new_zeros((*q.shape[:3], v.shape[3])), **settings)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # A loopback runs both directions at once: forward again costs little at the sizes that are verified.
        q, k, v = ctx.saved_tensors
        results = run_loopback(ctx.plan, q, k, v, grads[0].contiguous(), **ctx.settings)
        return None, None, *results[2:5], *results[5 : 5 + ctx.num_rest]
