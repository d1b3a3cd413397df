"""A whole plan in one process: every rank's run, forward and backward, on the loopback transport."""

from __future__ import annotations

import math

from torch import Tensor

from longspan.execution.backward import Backward
from longspan.execution.forward import Forward
from longspan.execution.kernels import choose_kernel, kernel_named
from longspan.execution.runner import Job
from longspan.execution.transports import Loopback, Program
from longspan.schedules.plan import Plan

SEQ_DIM = 2


def run_loopback(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, kernel: str = "auto", scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, dq, dk and dv of whole tensors, computed by all ranks of the plan together."""
    layout = plan.layout
    chosen = kernel_named(choose_kernel(kernel, q, k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    jobs = [Job(plan, rank, chosen, scale, q.dtype) for rank in range(layout.world_size)]
    ranks = range(layout.world_size)
    own = [[layout.shard(t, rank, SEQ_DIM) for t in (q, k, v, dout)] for rank in ranks]
    forward = Loopback().run([Forward(jobs[r], *own[r][:3]).program(saves=True) for r in ranks])
    programs: list[Program[tuple[Tensor, Tensor, Tensor]]] = []
    for r in ranks:
        (q, k, v, dout), (out, lse, kept) = own[r], forward[r]
        programs.append(Backward(jobs[r], q, k, v, out, lse, dout, None, kept).program())
    gradients = Loopback().run(programs)
    parts = [(*forward[r][:2], *gradients[r]) for r in ranks]
    return tuple(layout.unshard([part[i] for part in parts], SEQ_DIM) for i in range(5))  # type: ignore[return-value]
