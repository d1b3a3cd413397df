"""Print how much of a pass waits for messages: simulated, against links without limits.

    python -m benchmarks.overlap                   # exits with 1 if the bar is missed
    python -m benchmarks.overlap --scheme "hybrid(8,exchange)"

Exposed is the share of a pass by which it would be shorter if messages took no time. The bound is the least time with
the bytes that the scheme moves: that of the busiest port of a link level, and that of the pass without limits of links.
A scheme with more stages hides more, but has more launches; so compare times, not only shares.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

import numpy as np

import longspan as ls
from longspan.planning import Machine, Schedule, simulate

BAR = 0.15
"""Limit of the exposed share of the first workload, forward."""


@dataclass(frozen=True)
class Workload:
    """Packed documents with lengths of a log-normal distribution, causal, on 64 ranks."""

    name: str
    seq_len: int
    center: float
    spread: float
    machine: str
    layout: str = "balanced"
    seed: int = 0

    def plan(self, scheme: str) -> ls.Plan:
        rng, lengths = np.random.default_rng(self.seed), list[int]()
        while sum(lengths) < self.seq_len:
            length = max(16, int(rng.lognormal(self.center, self.spread)))
            lengths.append(min(length, self.seq_len - sum(lengths)))
        mask = ls.masks.documents(lengths) & ls.masks.causal()
        if self.layout == "balanced":
            layout = ls.layouts.balanced(mask, world_size=64, seq_len=self.seq_len)
        else:
            layout = ls.layouts.whole_documents(lengths, world_size=64)
        sizes = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
        return ls.plan(mask, layout, scheme=scheme, machine=self.machine, **sizes)


WORKLOADS = (
    Workload("256k, long documents", 1 << 18, 9.5, 1.2, "b200-fa4"),
    Workload("256k, long documents", 1 << 18, 9.5, 1.2, "b200-fa4", "whole_documents"),
    Workload("256k, one of 116k", 1 << 18, 9.5, 1.2, "b200-fa4", seed=2),
    Workload("1M", 1 << 20, 7.5, 1.3, "b200-fa4"),
    Workload("256k, long documents", 1 << 18, 9.5, 1.2, "h100-fa3"),
)


def without_limits(machine: Machine) -> Machine:
    """Return the machine with links that take no time."""
    return replace(
        machine, links=tuple(replace(link, bandwidth=link.bandwidth * 1e6, latency=0.0) for link in machine.links)
    )


def port_seconds(schedule: Schedule, machine: Machine) -> float:
    """Return how long the busiest port of any link level is busy."""
    ports = np.zeros((2, schedule.world_size, len(machine.links)))
    for _, t in schedule.transfers():
        level = machine.level(t.src, t.dst)
        seconds = t.piece.num_bytes(schedule.sizes) / machine.links[level].bandwidth
        ports[0, t.src, level] += seconds
        ports[1, t.dst, level] += seconds
    return float(ports.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--scheme", default="auto")
    args = parser.parse_args()
    shares: list[float] = []
    print("workload              machine   layout           scheme              pass      time ms  bound ms  exposed")
    for workload in WORKLOADS:
        plan = workload.plan(args.scheme)
        for direction in ("forward", "backward"):
            schedule = plan.schedule(direction)
            seconds = simulate(schedule, plan.machine).seconds
            free = simulate(schedule, without_limits(plan.machine)).seconds
            bound = max(free, port_seconds(schedule, plan.machine))
            shares.append(1 - free / seconds)
            print(
                f"{workload.name:21s} {workload.machine:9s} {workload.layout:16s} {plan.scheme.name:19s} {direction:8s}"
                f" {seconds * 1e3:8.2f} {bound * 1e3:9.2f} {shares[-1]:8.0%}"
            )
    if args.scheme == "auto" and shares[0] > BAR:
        sys.exit(f"{shares[0]:.0%} of the first pass waits for messages, more than {BAR:.0%}")


if __name__ == "__main__":
    main()
