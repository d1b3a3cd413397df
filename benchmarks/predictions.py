"""Compare predicted with measured times: measure this machine as `longspan doctor --out` does, predict, run.

    torchrun --nproc-per-node 4 -m benchmarks.predictions    # exits with 1 when a total is off by more than 25%

Rounds of measuring, prediction and run alternate, because machines are shared, and each workload is judged by the
median of its rounds.
"""

from __future__ import annotations

import os
import statistics
import sys

import torch

import longspan as ls
from longspan.cli.launch import join_ranks
from longspan.cli.measure import DIRECTIONS, MeasuredRun, measure, time_passes
from longspan.masks import Mask
from longspan.planning import Sizes, simulate

BAR, ROUNDS = 0.25, 3
HEADS = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}


def workloads() -> dict[str, Mask]:
    causal = ls.masks.causal
    return {
        "causal": causal(8192),
        "documents": ls.masks.documents([3000, 1000, 4192]) & causal(),
        "window": causal(16384) & ls.masks.sliding_window(2047),
    }


def main() -> int:
    torch.set_num_threads(1)
    errors: dict[str, list[float]] = {name: [] for name in workloads()}
    with join_ranks("gloo") as ranks:
        if ranks.is_main:
            print(f"{ranks.size} ranks on {os.cpu_count()} cores, Gloo, forward and backward together")
        for _ in range(ROUNDS):
            machine = measure(ranks, Sizes(8, 2, 64, 64, 2), "bfloat16", 9, "here", lambda _: None, whole=True)
            for name, mask in workloads().items():
                layout = ls.layouts.balanced(mask, world_size=ranks.size)
                plan = ls.plan(mask, layout, scheme="exchange", **HEADS)
                measured = sum(time_passes(MeasuredRun(plan, ranks), 5).values())
                if ranks.is_main:  # which has the fitted machine
                    predicted = sum(simulate(plan.schedule(way), machine).seconds for way in DIRECTIONS)
                    errors[name].append(predicted / measured - 1)
                    error = f"{errors[name][-1]:+7.0%}"
                    print(
                        f"{name:12s} {predicted * 1e3:7.0f} ms predicted {measured * 1e3:7.0f} measured {error}",
                        flush=True,
                    )
        if not ranks.is_main:
            return 0
    missed = 0
    for name, values in errors.items():
        middle = statistics.median(values)
        missed += abs(middle) > BAR
        print(f"{name:12s} median error {middle:+.0%}, to be within {BAR:.0%}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
