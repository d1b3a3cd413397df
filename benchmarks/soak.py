"""Soak test: four processes, new documents in every step, for a given time; results are right and memory does not grow.

    python -m benchmarks.soak --minutes 20

Every round starts a job of four ranks and runs steps that are compared with one device. Resident memory after `--steps`
steps must not be more than 1% above that after the first 700 steps, when caches are full.
"""

import argparse
import os
import random
import statistics
import sys
import time

import torch
import torch.distributed as dist

import longspan as ls
from benchmarks.ranks import Ranks

WORLD, WARM = 4, 700


def resident() -> int:
    """Return this process's resident bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def steps(number: int, seed: int) -> tuple[float, int]:
    """Run steps on new masks; return the worst error against one device, and resident bytes afterwards."""
    rank, worst = dist.get_rank(), 0.0
    draw = random.Random(seed)
    for step in range(number):
        lengths = [draw.randint(1, 120) for _ in range(8)]
        mask = ls.masks.documents(lengths) & ls.masks.causal()
        layout = ls.layouts.balanced(mask, world_size=WORLD)
        scheme = draw.choice(["ring", "exchange", "all_gather", "all_to_all"])
        plan = ls.plan(mask, layout, q_heads=4, kv_heads=4, head_dim=32, dtype="float32", scheme=scheme)
        torch.manual_seed(seed + step)
        whole = [torch.randn(1, 4, sum(lengths), 32) for _ in range(3)]
        shards = [layout.shard(x, rank, dim=2).requires_grad_() for x in whole]
        out = ls.attention(*shards, plan, group=dist.group.WORLD)
        out.sum().backward()
        truth = layout.shard(ls.attention(*whole, mask), rank, dim=2)
        worst = max(worst, float((out - truth).detach().abs().max()) if truth.numel() else 0.0)
    return worst, resident()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, end = random.Random(args.seed), time.time() + 60 * args.minutes
    rounds, total, growth, worst = 0, 0, list[float](), 0.0
    while time.time() < end:
        rounds += 1
        with Ranks(WORLD) as ranks:
            first = ranks.run(steps, WARM, draw.randrange(1 << 30))
            later = ranks.run(steps, args.steps, draw.randrange(1 << 30))
            total += WARM + args.steps
            worst = max(worst, *(error for error, _ in first + later))
            growth += [after / before - 1 for (_, before), (_, after) in zip(first, later, strict=True)]
        print(f"round {rounds}: {total} steps, worst error {worst:.1e}, growth {max(growth):+.2%}")
    typical = statistics.median(growth)
    print(f"{total} steps; median growth {typical:+.2%}, worst error {worst:.1e}")
    return int(typical >= 0.01 or worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
