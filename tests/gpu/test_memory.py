"""The memory that a call takes, compared with its plan.

On a GPU that is the allocator's peak. On CPUs it is the tensors that operators made, inside our own operators as well,
but not what a fused kernel allocates inside itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longspan.api import attention
from longspan.cli.measure import DIRECTIONS, MeasuredRun
from longspan.formatting import bytes_text
from longspan.planning.plan import Plan
from tests.gpu.programs import MemoryLedger
from tests.gpu.site import Site

LIMIT = 1.5
"""Memory taken, as a multiple of plan and kernel workspace together; allocators round up."""


def kernel_workspace(plan: Plan, rank: int) -> int:
    """Return the bytes that a fused kernel may need in one launch: float32 sums of dq, and copies of its operands with
    as many key heads as query heads."""
    sizes, most = plan.sizes, 0
    for direction in DIRECTIONS:
        for step in plan.steps(rank, direction):
            for compute in step.computes:
                rows, keys = (sum(span.stop - span.start for span in piece.spans) for piece in (compute.q, compute.kv))
                dims = sizes.head_dim + sizes.v_head_dim
                most = max(most, sizes.batch * sizes.q_heads * dims * (rows * (4 + 2 * sizes.itemsize) + 4 * keys))
    return most


def peak_bytes(site: Site, call: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], int]:
    """Return the results of a call, and its peak of memory without them."""
    device = site.ranks.device
    if site.is_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with MemoryLedger() as ledger:
            results = call()
        peak = ledger.peak
    return results, peak - sum(t.untyped_storage().nbytes() for t in results)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("scheme", "mask"),
    [
        pytest.param(*pair, id=".".join(pair))
        for pair in (("exchange", "causal"), ("exchange", "window"), ("ring", "causal"))
    ],
)
def test_peak(site: Site, scheme: str, mask: str) -> None:
    plan = site.plan(mask, "256k" if site.is_gpu else "2k", scheme)
    run, group = MeasuredRun(plan, site.ranks), site.group()
    q, k, v = run.inputs
    taken = 0
    for _ in range(2):  # a plan's tables are built once, and stay: the second call counts
        out, forward = peak_bytes(site, lambda: (attention(q, k, v, plan, group=group),))
        _, backward = peak_bytes(site, lambda out=out: torch.autograd.grad(out, run.inputs, run.upstream))
        taken = max(forward, backward)
        del out
        gc.collect()
    planned, workspace = plan.peak_bytes(site.ranks.rank), kernel_workspace(plan, site.ranks.rank)
    used = taken / (planned + workspace)
    text = (
        f"{bytes_text(taken)} beside inputs and results; the plan says {bytes_text(planned)}, and a kernel may take"
        f" {bytes_text(workspace)}"
    )
    site.record(text, used=used, taken_bytes=taken, planned_bytes=planned, kernel_bytes=workspace)
    if used > LIMIT:
        pytest.fail(text)
