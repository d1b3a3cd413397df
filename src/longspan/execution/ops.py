"""The attention of one rank as `torch.library` operators: compiled graphs, checkpointing and autograd see plain ops.

An operator takes strings and numbers beside tensors, so plans and groups go by name: a plan by its fingerprint, which
every call makes known here before it runs, a group by the name PyTorch gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.execution import _torch
from longspan.execution.backward import Backward
from longspan.execution.forward import Forward
from longspan.execution.kernels import kernel_named
from longspan.execution.runner import Job
from longspan.execution.transports import Loopback, ProcessGroup, Program
from longspan.schedules.plan import Plan

MAX_PLANS = 4096
_plans: dict[str, Plan] = {}
"""A lookup from names to values: it changes no result. The oldest of very many are forgotten."""


def known(plan: Plan) -> str:
    """The name under which operators find the plan."""
    _plans[plan.fingerprint] = _plans.pop(plan.fingerprint, plan)
    if len(_plans) > MAX_PLANS:
        del _plans[next(iter(_plans))]
    return plan.fingerprint


def _plan(name: str) -> Plan:
    if name not in _plans:
        raise PlanError(
            f"plan {name[:12]} is not known in this process, or {MAX_PLANS} others were used since. Call"
            f" longspan.attention with the plan again before running a graph that was compiled with it."
        )
    return _plans[name]


def _run(program: Program[Any], group: str) -> Any:
    if not group:
        return Loopback().run([program])[0]
    return ProcessGroup(_torch.group_named(group)).run(program)


def _apart(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, none of them in memory of another or of an input: dk and dv may come from one message."""
    taken = {t.untyped_storage().data_ptr() for t in inputs}
    made: list[Tensor] = []
    for result in results:
        result = result.clone() if result.untyped_storage().data_ptr() in taken else result
        taken.add(result.untyped_storage().data_ptr())
        made.append(result)
    return made


@torch.library.custom_op("longspan::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: str, group: str, rank: int, kernel: str, scale: float, saves: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output and lse of the rank's rows, and what its backward needs of other ranks' rows."""
    job = Job(_plan(plan), rank, kernel_named(kernel), scale, q.dtype)
    out, lse, kept = _run(Forward(job, q, k, v).program(saves=saves), group)
    out, lse = _apart((out.contiguous(), lse.contiguous()), (q, k, v))
    return out, lse, kept


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, plan: str, group: str, rank: int, kernel: str, scale: float, saves: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    made = _plan(plan)
    kept = made.kept(rank) if saves else ()
    return (
        q.new_empty((*q.shape[:3], v.shape[3])),
        q.new_empty(q.shape[:3], dtype=wide),
        [q.new_empty(piece.num_bytes(made.sizes), dtype=torch.uint8) for piece in kept],
    )


@torch.library.custom_op("longspan::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: list[Tensor],
    plan: str,
    group: str,
    rank: int,
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rank's rows."""
    # Fused kernels take the output and work out delta themselves; a gradient of lse changes delta alone.
    chosen = kernel_named(kernel if dlse is None else "reference")
    job = Job(_plan(plan), rank, chosen, scale, q.dtype)
    gradients = _run(Backward(job, q, k, v, out, lse, dout, dlse, kept).program(), group)
    dq, dk, dv = _apart(gradients, (dout, q, k, v, out, lse, *kept))
    return dq, dk, dv


@attention_backward.register_fake
def _(dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, *ctx.names, _ = inputs
    out, lse, kept = output
    ctx.save_for_backward(q, k, v, out, lse, *kept)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _kept: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *kept = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = attention_backward(dout, dlse, q, k, v, out, lse, kept, *ctx.names)
    return (*gradients, *[None] * 6)


attention.register_autograd(_backward, setup_context=_setup)
