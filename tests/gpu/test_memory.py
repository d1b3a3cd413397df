"""The memory that a call takes, compared with its plan, and what many different batches leave.

On a GPU that is the allocator's peak. On CPUs it is the tensors that operators made, inside our own operators as well,
but not what a fused kernel allocates inside itself.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.measure import DIRECTIONS, MeasuredRun
from longspan.cli.workload import drawn_lengths
from longspan.formatting import bytes_text, seconds_text
from longspan.planning.plan import Plan
from longspan.run.tables import CACHE
from tests.gpu.programs import MemoryLedger, programs_without_kernel
from tests.gpu.site import Site

LIMIT = 1.5
"""Memory taken, as a multiple of plan and kernel workspace together; allocators round up."""

MAX_GROWTH = 100 << 20
"""Bytes that all batches together may leave, whatever their size."""
SETTLE_SECONDS = 5.0
"""Autograd's thread of a device frees what a backward pass held shortly after the pass has returned."""
BATCHES = {"cuda": (10, 100), "cpu": (2, 12)}
"""Number of batches with --quick and without."""
DRAWN_TOKENS = 1 << 16
"""For which document lengths are drawn: a few hundred tokens would mostly be one document."""


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
    work = site.plan(mask, ("32k" if site.on_one_card else "256k") if site.is_gpu else "1k", scheme)
    run, group = MeasuredRun(work, site.ranks), site.group()
    q, k, v = run.inputs
    taken = 0
    for _ in range(2):  # a plan's tables are built once, and stay: the second call counts
        out, forward = peak_bytes(site, lambda: (attention(q, k, v, work, group=group),))
        _, backward = peak_bytes(site, lambda out=out: torch.autograd.grad(out, run.inputs, run.upstream))
        taken = max(forward, backward)
        del out
        gc.collect()
    planned, workspace = work.peak_bytes(site.ranks.rank), kernel_workspace(work, site.ranks.rank)
    used = taken / (LIMIT * (planned + workspace))
    text = (
        f"{bytes_text(taken)} beside inputs and results; the plan says {bytes_text(planned)}, and a kernel may take"
        f" {bytes_text(workspace)}"
    )
    site.record(text, used=used, taken_bytes=taken, planned_bytes=planned, kernel_bytes=workspace)
    if used > 1:
        pytest.fail(text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param("all_to_all", id="batches.all_to_all"),
        pytest.param("exchange", id="batches.exchange", marks=pytest.mark.slow),
        pytest.param("hybrid(2)", id="batches.hybrid", marks=[pytest.mark.slow, pytest.mark.ranks(4)]),
    ],
)
def test_batches(site: Site, scheme: str) -> None:
    """Packed batches that all differ: what stays in memory when all are over, and a new batch's time beside a warm one.

    Tables of plans stay, up to a limit. All other tensors that stay must be smaller than the queries of one batch.
    On CPUs plans have no tables, so their programs also run on meta tensors, which stand for those of a GPU."""
    num = BATCHES["cuda" if site.is_gpu else "cpu"][not site.quick]
    size = "16k" if site.on_one_card else "64k"
    tokens, group, s = site.tokens(size) if site.is_gpu else 512, site.group(), site.sizes
    seconds: dict[str, list[float]] = {"new": [], "warm": []}
    slots = 0
    before = held_bytes(site)
    for number in range(num):
        begin = time.perf_counter()
        mask = masks.documents(packed_lengths(tokens, number)) & masks.causal()
        layout = layouts.balanced(mask, world_size=site.ranks.size, seq_len=tokens)
        work = plan(
            mask, layout, q_heads=s.q_heads, kv_heads=s.kv_heads, head_dim=s.head_dim, dtype=site.half,
            scheme=scheme,
        )  # fmt: skip
        planned = time.perf_counter() - begin
        run = MeasuredRun(work, site.ranks, number)
        q, k, v = run.inputs
        slots = max(slots, q.shape[2])
        for kind in seconds:
            site.ranks.barrier()
            begin = time.perf_counter()
            out = attention(q, k, v, work, group=group)
            torch.autograd.grad(out, run.inputs, run.upstream)
            site.ranks.finish()
            seconds[kind].append(time.perf_counter() - begin + (planned if kind == "new" else 0.0))
            del out
        if not site.is_gpu:
            programs_without_kernel(work, site.ranks.rank, "meta")
        del run, q, k, v, work, mask, layout
    one_batch = s.batch * s.q_heads * slots * s.head_dim * s.itemsize
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        tables, others = (now - then for now, then in zip(held_bytes(site), before, strict=True))
        used = max(others / one_batch, (tables + others) / MAX_GROWTH)
        if used <= 1 or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    new, warm = (median(values) for values in seconds.values())
    text = (
        f"{num} batches of {tokens:,} tokens left {bytes_text(max(tables, 0))} in tables of plans and"
        f" {bytes_text(max(others, 0))} in other tensors; a new batch took {seconds_text(new)} with its plan, the same"
        f" again {seconds_text(warm)}"
    )
    site.record(text, used=used, table_bytes=tables, other_bytes=others, new_seconds=new, warm_seconds=warm)
    if used > 1:
        pytest.fail(f"{text}; allowed: {bytes_text(one_batch)} in other tensors, {bytes_text(MAX_GROWTH)} in all")


def packed_lengths(tokens: int, number: int) -> list[int]:
    """Return the document lengths of a batch, long-tailed as in a long sequence, however few tokens there are.

    >>> packed_lengths(64, 2)
    [1, 3, 2, 1, 1, 5, 1, 11, 2, 1, 1, 1, 2, 2, 5, 25]
    """
    ends = drawn_lengths("longtail", DRAWN_TOKENS, number).cumsum() * tokens // DRAWN_TOKENS
    return np.diff(np.unique(np.append(0, ends))).tolist()


def held_bytes(site: Site) -> tuple[int, int]:
    """Return the bytes of plans' tables, and of all else on this rank's GPU; on CPUs of all tensors, meta ones too."""
    gc.collect()
    if site.is_gpu:
        device = torch.device(site.ranks.device)
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
    else:
        device = torch.device("meta")
        storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor]
        held = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    tables = CACHE.num_bytes(device)
    return tables, held - tables
