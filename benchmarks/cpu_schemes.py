"""Compare the scheme that "auto" chooses on CPUs with every other one: processor time on two Gloo ranks.

    python -m benchmarks.cpu_schemes           # exits with 1 if "auto" is above the limit

Windows, documents and a causal mask of 1k to 16k tokens, forward and backward, all schemes in turns. The time of a
round is that of both ranks' processors; medians count.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

import longspan as ls
from benchmarks.ranks import Ranks
from longspan.masks import Mask

LIMIT = 1.05
SCHEMES = ("exchange", "ring", "all_gather", "all_to_all")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SIZES = {"q_heads": 8, "kv_heads": 8, "head_dim": 64}
ROUNDS = 5


def masks_of(tokens: int) -> dict[str, Mask]:
    """Return the masks of a length."""
    causal = ls.masks.causal(tokens)
    parts = [tokens // 4, tokens // 8, tokens // 2, tokens // 16, tokens // 16]
    return {
        "window": causal & ls.masks.sliding_window(256),
        "documents": ls.masks.documents(parts) & causal,
        "causal": causal,
    }


def seconds(tokens: int, kind: str, dtype: str) -> tuple[str, dict[str, list[float]], dict[str, int]]:
    """Return the choice of "auto", this rank's processor seconds of each round, and the busiest rank's bytes."""
    mask, rank = masks_of(tokens)[kind], dist.get_rank()
    layout = ls.layouts.balanced(mask, world_size=2)
    group = dist.group.WORLD
    plans = {s: ls.plan(mask, layout, dtype=dtype, scheme=s, machine="cpu", **SIZES) for s in SCHEMES}
    choice = ls.plan(mask, layout, dtype=dtype, group=group, **SIZES).scheme.name
    torch.manual_seed(rank)
    shape = 1, 8, int(layout.num_tokens[rank]), 64
    q, k, v, dout = (torch.randn(shape, dtype=getattr(torch, dtype)) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    taken: dict[str, list[float]] = {s: [] for s in SCHEMES}
    for number in range(ROUNDS + 1):  # the first one is not counted
        for s in SCHEMES[number % 4 :] + SCHEMES[: number % 4]:
            dist.barrier()
            start = time.process_time()
            out = ls.attention(*inputs, plans[s], group=group)
            torch.autograd.grad(out, inputs, dout)
            if number:
                taken[s].append(time.process_time() - start)
    return choice, taken, {s: plan.chosen.bytes_received for s, plan in plans.items()}


def main() -> int:
    """Print a row for each mask and return the exit code."""
    failed = False
    with Ranks(2) as ranks:
        for dtype in ("float32", "bfloat16"):
            for tokens in LENGTHS:
                for kind in masks_of(tokens):
                    (choice, a, num_bytes), (_, b, _) = ranks.run(seconds, tokens, kind, dtype)
                    times = {s: statistics.median(x + y for x, y in zip(a[s], b[s], strict=True)) for s in SCHEMES}
                    ratio = times[choice] / min(times.values())
                    failed |= ratio > LIMIT and kind != "causal"
                    row = "  ".join(f"{s} {t * 1e3:.1f} ms {num_bytes[s] / 2**20:.1f} MiB" for s, t in times.items())
                    print(f"{dtype} {tokens} {kind}: auto is {choice}, {ratio:.2f} of the best; {row}", flush=True)
    print(f"limit for windows and documents: {LIMIT}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
