"""Compare the scheme that `auto` chooses with the best of all schemes by full simulation.

    python -m benchmarks.auto_choice               # 300 workloads; exits with 1 if a choice costs too much
    python -m benchmarks.auto_choice --first 40 --count 10

Workloads are drawn at random: masks, document lengths, ranks, heads, layouts, machines and ranks per node. Every
candidate's schedule is written out for all ranks and simulated, forward and backward. The choice is compared with the
least of these times; and one whose busiest rank receives more than in an all-gather has to be predicted 5% faster than
every other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

import longspan as ls
from longspan.planning import MACHINES, Link, Machine, Problem, Sizes, backward, scheme, simulate
from longspan.planning.choose import candidates, estimate_scheme, most_received

COUNT = 300
BAR = 1.05
"""Limit of the chosen scheme's time over the best, both by full simulation."""
HEADS = ((32, 8), (32, 32), (64, 8), (40, 8), (28, 4), (16, 2), (8, 8), (12, 4), (8, 1), (4, 4))
RANKS = (2, 3, 4, 6, 8, 8, 12, 16, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Workload:
    """The arguments of one plan."""

    name: str
    mask: ls.masks.Mask
    layout: ls.layouts.Layout
    sizes: Sizes
    machine: Machine
    keep: bool

    def problem(self) -> Problem:
        return Problem.make(self.mask, self.layout, self.sizes, node=self.machine.node)

    def plan(self) -> ls.Plan:
        sizes = self.sizes
        return ls.plan(
            self.mask, self.layout, q_heads=sizes.q_heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim,
            dtype="bfloat16", batch=sizes.batch, machine=self.machine, keep=self.keep,
        )  # fmt: skip


def on_nodes(machine: Machine, node: int) -> Machine:
    """Return the machine with this many ranks on a node."""
    inner, outer = machine.links
    links = (Link(node, inner.bandwidth, inner.latency), outer) if node > 1 else (outer,)
    return replace(machine, name=f"{machine.name}, {node} a node", links=links)


def drawn_mask(rng: np.random.Generator, seq_len: int, heads: int) -> tuple[str, ls.masks.Mask]:
    """Return a mask of this many tokens, and its kind."""
    window = int(seq_len * 2.0 ** -rng.uniform(1, 7))
    lengths: list[int] = []
    scale = rng.uniform(np.log(seq_len) - 7, np.log(seq_len))
    while sum(lengths) < seq_len:
        lengths.append(min(max(int(rng.lognormal(scale, 1.2)), 16), seq_len - sum(lengths)))
    packed, causal = ls.masks.documents(lengths), ls.masks.causal(seq_len)
    masks = {
        "causal": causal,
        "packed": packed & causal,
        "packed, window": packed & ls.masks.sliding_window(window),
        "packed, both ways": packed,
        "window": ls.masks.sliding_window(window, seq_len=seq_len),
        "full": ls.masks.full(seq_len),
        "prefix": ls.masks.prefix_lm(window, seq_len=seq_len),
        "per head": ls.masks.per_head(*[causal] * (heads // 2), *[packed & causal] * (heads - heads // 2)),
    }
    kind = str(rng.choice(list(masks), p=(0.18, 0.4, 0.1, 0.1, 0.1, 0.05, 0.04, 0.03)))
    return kind, masks[kind]


def drawn_ranks(number: int) -> tuple[int, np.random.Generator]:
    """Return the ranks of a workload, and the generator that draws the rest of it."""
    rng = np.random.default_rng((27, number))
    return int(rng.choice(RANKS)), rng


def drawn_workload(number: int) -> Workload:
    """Return a workload; the same for the same number."""
    ranks, rng = drawn_ranks(number)
    seq_len = 2 * ranks * max(int(2.0 ** rng.uniform(12, 20)) // (2 * ranks), 8)
    q_heads, kv_heads = HEADS[int(rng.integers(len(HEADS)))]
    kind, mask = drawn_mask(rng, seq_len, q_heads)
    layout_kind = str(rng.choice(("balanced", "balanced", "zigzag", "contiguous")))
    layout = {
        "balanced": lambda: ls.layouts.balanced(mask, world_size=ranks),
        "zigzag": lambda: ls.layouts.zigzag(seq_len, ranks),
        "contiguous": lambda: ls.layouts.contiguous(seq_len, ranks),
    }[layout_kind]()
    dim, batch = int(rng.choice((64, 128))), int(rng.choice((1, 1, 2)))
    machine = MACHINES[str(rng.choice(("h100", "h100", "h100-fa3", "b200-fa4", "a100", "cpu")))]
    node = int(rng.choice((8, 8, 4, 2, 1)))
    machine = machine if machine.name == "cpu" or node == 8 else on_nodes(machine, node)
    sizes = Sizes(q_heads, kv_heads, dim, dim, 2, batch)
    name = f"{kind}, {seq_len} tokens, {layout_kind}, {ranks} ranks, {q_heads}/{kv_heads} heads, {machine.name}"
    return Workload(name, mask, layout, sizes, machine, keep=bool(rng.random() < 0.2))


def simulated(workload: Workload) -> dict[str, float]:
    """Return the seconds of both passes of every candidate."""
    seconds: dict[str, float] = {}
    for name in candidates(workload.problem()):
        forward = scheme(name, workload.problem()).schedule()
        schedules = forward, backward(forward, keep=workload.keep)
        seconds[name] = sum(simulate(schedule, workload.machine).seconds for schedule in schedules)
    return seconds


def is_greedy(plan: ls.Plan) -> bool:
    """Return whether the busiest rank receives more than in an all-gather, for less than 5% of the time."""
    problem, keep = plan.scheme.problem, plan.keep
    gathered = most_received(scheme("all_gather", problem), keep=keep)
    if most_received(plan.scheme, keep=keep) <= gathered:
        return False
    others = [scheme(name, problem) for name in {*candidates(problem), "all_gather"}]
    frugal = [other for other in others if most_received(other, keep=keep) <= gathered]
    least = min(estimate_scheme(other, plan.machine, keep=keep).seconds for other in frugal)
    return estimate_scheme(plan.scheme, plan.machine, keep=keep).seconds > 0.95 * least


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=COUNT)
    options = parser.parse_args(arguments)
    ratios: list[float] = []
    chosen: Counter[str] = Counter()
    greedy = 0
    for number in range(options.first, options.first + options.count):
        workload = drawn_workload(number)
        seconds = simulated(workload)
        plan = workload.plan()
        name = plan.scheme.name
        greedy += is_greedy(plan)
        best = min(seconds, key=lambda name: seconds[name])
        ratios.append(seconds[name] / seconds[best])
        chosen[name.split("(")[0]] += 1
        if ratios[-1] > BAR:
            print(f"{number:4d} {ratios[-1]:.3f} {name}, best {best}: {workload.name}", flush=True)
    missed = sum(ratio > BAR for ratio in ratios)
    spread = np.percentile(ratios, (50, 90, 99, 100))
    print(f"chosen time over the best: {', '.join(f'{x:.4f}' for x in spread)} (median, 90%, 99%, most; bar {BAR})")
    print("chosen:", ", ".join(f"{name} {count}" for name, count in chosen.most_common()))
    print(f"{len(ratios)} workloads, {missed} beyond the bar, {greedy} receive more than they may")
    return 1 if missed or greedy else 0


if __name__ == "__main__":
    begin = time.perf_counter()
    code = main()
    print(f"({time.perf_counter() - begin:.0f} s)")
    sys.exit(code)
