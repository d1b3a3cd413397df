"""Compare forward with document masks as PyTorch spells them, `ids[b][q]`, with PyTorch's eager flex attention.

    python -m benchmarks.document_spelling      # exits with 1 when a bar is missed; about a minute, 4 GB

4 rows of 2,048 tokens, 8 heads of 32, 28 random documents in every row, one thread. Each run makes a new mask function
and times all calls in turn; a cold call is the first with the new function. The two ranks take turns in this process,
and their calls include backward, so they meet the bar of a forward with more work.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as eager_flex_attention

import longspan as ls
from longspan.run.flex import mask_of_block_mask
from longspan.testing import run_loopback

BATCH, SEQ_LEN, HEADS, HEAD_DIM, DOCUMENTS = 4, 2048, 8, 32, 28
RUNS, BAR = 3, 2.0
EAGER = "PyTorch's eager"
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def document_mods(seed: int, batch: int, seq_len: int, documents: int) -> tuple[MaskMod, MaskMod]:
    """Return causal attention within random documents in the spelling of PyTorch's tests, and with one index."""
    random = np.random.default_rng(seed)
    cuts = [np.sort(random.choice(np.arange(1, seq_len), documents - 1, replace=False)) for _ in range(batch)]
    starts = torch.tensor(np.array([np.concatenate(([0], cut)) for cut in cuts]))
    ids = torch.searchsorted(starts, torch.arange(seq_len).expand(batch, -1).contiguous(), right=True) - 1

    def chained(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        same_document = ids[b][q_idx] == ids[b][kv_idx]
        q_logical = q_idx - starts[b, ids[b, q_idx]]
        kv_logical = kv_idx - starts[b, ids[b, kv_idx]]
        return torch.where(same_document, q_logical >= kv_logical, False)

    def single(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        same_document = ids[b, q_idx] == ids[b, kv_idx]
        q_logical = q_idx - starts[b, ids[b, q_idx]]
        kv_logical = kv_idx - starts[b, ids[b, kv_idx]]
        return torch.where(same_document, q_logical >= kv_logical, False)

    return chained, single


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def two_ranks(block_mask: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask, layout = mask_of_block_mask(block_mask, batch=BATCH, heads=HEADS), ls.layouts.zigzag(SEQ_LEN, 2)
    plan = ls.plan(mask, layout, batch=BATCH, q_heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
    return run_loopback(plan, q, k, v, torch.ones_like(q))[0]


def one_run(seed: int) -> dict[str, float]:
    """Return seconds by call, after a check of every output."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, BATCH, HEADS, SEQ_LEN, HEAD_DIM, generator=generator)
    chained, single = document_mods(seed, BATCH, SEQ_LEN, DOCUMENTS)
    create = partial(create_block_mask, B=BATCH, H=1, Q_LEN=SEQ_LEN, KV_LEN=SEQ_LEN, device="cpu")
    here, single_here, on_ranks = create(chained), create(single), create(chained)
    one, other = (partial(ls.flex_attention, q, k, v, block_mask=block_mask) for block_mask in (here, single_here))
    ranks = partial(two_ranks, on_ranks, q, k, v)
    calls: dict[str, Callable[[], Tensor]] = {
        EAGER: partial(eager_flex_attention, q, k, v, block_mask=here),
        "one device, cold": one,
        "one device, ids[b, q], cold": other,
        "one device": one,
        "one device, ids[b, q]": other,
        "two ranks, cold": ranks,
        "two ranks": ranks,
    }
    results = {name: timed(call) for name, call in calls.items()}
    for _, out in results.values():
        torch.testing.assert_close(out, results[EAGER][1], atol=5e-6, rtol=1e-5)
    return {name: seconds for name, (seconds, _) in results.items()}


def main() -> int:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    runs, missed = [one_run(seed) for seed in range(RUNS)], 0
    print(f"{'medians of ' + str(RUNS) + ' runs':28s} {'seconds':>8s} {'of eager':>9s} {'bar':>5s}")
    for call in runs[0]:
        ratio = median(run[call] / run[EAGER] for run in runs)
        missed += ratio > BAR
        print(f"{call:28s} {median(run[call] for run in runs):8.3f} {ratio:9.2f} {BAR:5.1f}")
    print("all bars met" if not missed else f"{missed} bars MISSED")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
