"""What watching and agreement cost: a 2-rank step with and without them, interleaved, as a ratio.

    python -m benchmarks.watching

Fails when the median of paired ratios is above 1.01.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist

import longspan as ls
import longspan.training as training
from benchmarks.ranks import Ranks

BAR, ROUNDS, TOKENS = 1.01, 25, 4096


def seconds(enabled: bool) -> float:
    """One rank's step, from a barrier to a barrier."""
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(rank)
    layout = ls.layouts.zigzag(TOKENS, dist.get_world_size())
    plan = ls.plan(ls.masks.causal(), layout, q_heads=8, kv_heads=8, head_dim=64, dtype="float32", schedule="ring")
    shards = [torch.randn(1, 8, TOKENS // 2, 64, requires_grad=True) for _ in range(3)]
    with training.watch(group, enabled=enabled):
        dist.barrier()
        begin = time.perf_counter()
        ls.attention(*shards, plan, group=group).sum().backward()
        dist.barrier()
        return time.perf_counter() - begin


def main() -> int:
    with Ranks(2) as watched, Ranks(2) as plain:  # of their own, so that one has no threads of the other's
        ratios = []
        for number in range(ROUNDS + 2):
            order = [(watched, True), (plain, False)]
            found = {enabled: max(ranks.run(seconds, enabled)) for ranks, enabled in order[:: 1 if number % 2 else -1]}
            ratios.append(found[True] / found[False])
    median = statistics.median(ratios[2:])
    print(
        f"2 ranks, {TOKENS} tokens, forward + backward: watched / not watched {median:.4f} (median of {ROUNDS} pairs)"
    )
    print(f"bar {BAR}: {'met' if median <= BAR else 'MISSED'}")
    return int(median > BAR)


if __name__ == "__main__":
    sys.exit(main())
