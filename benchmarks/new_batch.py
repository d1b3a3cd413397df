"""Measure what a new batch costs before its first call, on one core.

    python -m benchmarks.new_batch                 # exits with 1 when a bar is missed

Training packs other documents every step, so every batch has a new mask, layout and plan. Timed is processor time over
batches that are all different, with long-tailed documents, 32 query and 8 key/value heads of 128, and a scheme chosen
by "auto". Plans of earlier batches do not help. Limits apply to medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

import longspan as ls
from benchmarks.workloads import MI

BATCHES = 100
SIZES = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """Batches of one size, and the most milliseconds of `plan` with the steps of one rank."""

    seq_len: int
    ranks: int
    bar: float


CASES = (Case(MI // 8, 8, 10.0), Case(MI, 8, 15.0), Case(MI, 64, 30.0))


@dataclass
class Times:
    """Milliseconds of each part, by batch."""

    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    schemes: Counter[str] = field(default_factory=Counter[str])

    def median(self, *names: str) -> float:
        return float(np.median(np.sum([self.parts[name] for name in names], axis=0)))


def packed_lengths(seq_len: int, count: int) -> Iterator[list[int]]:
    """Yield document lengths of `count` batches, from a long-tailed distribution."""
    rng = np.random.default_rng(5)
    for _ in range(count):
        lengths: list[int] = []
        left = seq_len
        while left > 0:
            lengths.append(min(left, max(16, int(rng.lognormal(7.5, 1.3)))))
            left -= lengths[-1]
        yield lengths


def timed(case: Case, count: int) -> Times:
    """Return the times of `count` batches, after a first that is not counted."""
    times = Times()
    for number, lengths in enumerate(packed_lengths(case.seq_len, count + 1)):
        clock = [time.process_time()]
        mask = ls.masks.documents(lengths) & ls.masks.causal()
        clock.append(time.process_time())
        layout = ls.layouts.balanced(mask, world_size=case.ranks)
        clock.append(time.process_time())
        plan = ls.plan(mask, layout, scheme="auto", **SIZES)
        clock.append(time.process_time())
        plan.steps(number % case.ranks)
        clock.append(time.process_time())
        if number:
            for name, took in zip(("mask", "layout", "plan", "steps"), np.diff(clock), strict=True):
                times.parts.setdefault(name, []).append(1e3 * float(took))
            times.schemes[plan.scheme.name] += 1
    return times


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=BATCHES)
    options = parser.parse_args(arguments)
    missed = 0
    heads = ("mask", "layout", "plan", "steps")
    print(f"median ms over {options.batches} batches")
    print(
        f"{'tokens':>9s} {'ranks':>5s}", *(f"{name:>8s}" for name in heads), f"{'plan+steps':>11s} {'bar':>5s}  schemes"
    )
    for case in CASES:
        times = timed(case, options.batches)
        both = times.median("plan", "steps")
        missed += both > case.bar
        schemes = ", ".join(f"{name} {count}" for name, count in times.schemes.most_common())
        each = (f"{times.median(name):8.2f}" for name in heads)
        print(f"{case.seq_len:9,d} {case.ranks:5d}", *each, f"{both:11.2f} {case.bar:5.0f}  {schemes}", flush=True)
    print("all bars met" if not missed else f"{missed} bars MISSED")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
