"""Soak test: four processes, random kills, stops and errors, restarts, for a given time; memory must not grow.

    python -m benchmarks.soak --minutes 20

Every round starts a job of four ranks, runs steps that are compared with one device, and then injects a fault into one
rank at random. Every survivor must name it within three seconds. Before the fault a job runs `--steps` steps, and its
resident memory after them must not be more than 1% above that after its first 700 steps, when caches are full.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import time

import torch
import torch.distributed as dist

import longspan as ls
import longspan.training as training
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
    with training.watch(dist.group.WORLD) as watching:
        for step in range(number):
            watching.step(step)
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


def struck(victim: int, how: str, seed: int) -> tuple[str, float]:
    """Run steps until the fault; return a survivor's error, and when it was raised."""
    begin = time.time()
    try:
        with training.watch(dist.group.WORLD):
            step = 0
            while True:
                if dist.get_rank() == victim and time.time() - begin > 1 + (seed % 100) / 100:
                    if how == "raise":
                        raise ValueError("struck")
                    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
                layout = ls.layouts.zigzag(512, WORLD)
                plan = ls.plan(ls.masks.causal(), layout, q_heads=4, kv_heads=4, head_dim=32, dtype="float32")
                shards = [torch.randn(1, 4, 128, 32, requires_grad=True) for _ in range(3)]
                ls.attention(*shards, plan, group=dist.group.WORLD).sum().backward()
                step += 1
    except ls.LongspanError as error:
        return str(error), time.time() - begin


def strike(ranks: Ranks, draw: random.Random) -> list[str]:
    """Inject a fault into one rank; return what the others reported wrongly."""
    victim, how = draw.randrange(WORLD), draw.choice(["kill", "stop", "raise"])
    seed = draw.randrange(100)
    wrong = []
    for rank, answer in enumerate(ranks.run_some(struck, victim, how, seed, without=victim)):
        if rank == victim:
            continue
        if answer is None or f"rank {victim}" not in answer[0]:
            wrong.append(f"{how} rank {victim}: rank {rank} reported {answer}")
        elif answer[1] > 1 + seed / 100 + 3.0 + 0.5:  # half a second for the step in progress
            wrong.append(f"{how} rank {victim}: rank {rank} took {answer[1] - 1 - seed / 100:.1f} s")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, end = random.Random(args.seed), time.time() + 60 * args.minutes
    rounds, total, wrong, growth, worst = 0, 0, [], [], 0.0
    while time.time() < end:
        rounds += 1
        with Ranks(WORLD) as ranks:
            first = ranks.run(steps, WARM, draw.randrange(1 << 30))
            later = ranks.run(steps, args.steps, draw.randrange(1 << 30))
            total += WARM + args.steps
            worst = max(worst, *(error for error, _ in first + later))
            growth += [after / before - 1 for (_, before), (_, after) in zip(first, later, strict=True)]
            wrong += strike(ranks, draw)
            ranks.end()
        print(f"round {rounds}: {total} steps, worst error {worst:.1e}, growth {max(growth):+.2%}, wrong {len(wrong)}")
    print("\n".join(wrong))
    typical = statistics.median(growth)
    print(f"{rounds} strikes, {total} steps; median growth {typical:+.2%}, worst error {worst:.1e}, {len(wrong)} wrong")
    return int(bool(wrong) or typical >= 0.01 or worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
