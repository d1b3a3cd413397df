"""Measure the cost of failure detection and agreement on two ranks, as a fraction of a step.

    python -m benchmarks.watching

Fails above 1%. Steps of 4,096 tokens vary by 10% on shared cores, so the cost is measured in steps of the same schedule
with hardly any tokens, with and without failure detection, in pairs in the same processes. The added time does not
depend on the tokens; heartbeats are added per second.
"""

import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist

import longspan as ls
import longspan.training as training
from benchmarks.ranks import Ranks

BAR, ROUNDS, FEW, TOKENS = 0.01, 40, 128, 4096


def seconds(enabled: bool, tokens: int, steps: int) -> float:
    """Return the median of one rank's steps, without the first. The group ends here, and with it its watch."""
    world_size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    layout = ls.layouts.zigzag(tokens, world_size)
    plan = ls.plan(ls.masks.causal(), layout, q_heads=8, kv_heads=8, head_dim=64, dtype="float32", scheme="ring")
    shards = [torch.randn(1, 8, tokens // world_size, 64, requires_grad=True) for _ in range(3)]
    group = dist.new_group()
    times = []
    with training.watch(group, enabled=enabled):
        for _ in range(steps + 1):
            begin = time.perf_counter()
            ls.attention(*shards, plan, group=group).sum().backward()
            times.append(time.perf_counter() - begin)
    dist.destroy_process_group(group)
    return statistics.median(times[1:])


def idle(enabled: bool, wait: float) -> float:
    """Return the processor time of an idle second."""
    group = dist.new_group()
    with training.watch(group, enabled=enabled):
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(wait)
        after = resource.getrusage(resource.RUSAGE_SELF)
    dist.destroy_process_group(group)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / wait


def main() -> int:
    added = []
    with Ranks(2) as ranks:
        step = max(ranks.run(seconds, False, TOKENS, 5))
        for number in range(ROUNDS + 1):
            order = (True, False) if number % 2 else (False, True)
            result = {watched: max(ranks.run(seconds, watched, FEW, 20)) for watched in order}
            added.append(result[True] - result[False])
        life = max(ranks.run(idle, True, 5.0)) - min(ranks.run(idle, False, 5.0))  # Gloo's own threads are active, too
    a_step = statistics.median(added[1:])
    low, high = statistics.quantiles(added[1:], n=4)[::2]
    share = a_step / step + life
    print(f"2 ranks, forward + backward: {1e3 * a_step:.2f} ms a step (median of {ROUNDS} pairs, half of them from")
    print(f"{1e3 * low:.2f} to {1e3 * high:.2f}) of {1e3 * step:.0f} ms with {TOKENS} tokens; signs of life {life:.3%}")
    print(f"watching takes {share:.2%}, bar {BAR:.0%}: {'met' if share <= BAR else 'MISSED'}")
    return int(share > BAR)


if __name__ == "__main__":
    sys.exit(main())
