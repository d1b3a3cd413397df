"""Measure planning on one core, and check that it does not grow with the square of the sequence.

    python -m benchmarks.planning            # exits with 1 when a bar is missed

Timed is the work of one rank for one batch: the mask from document lengths, the balanced layout, and the rank's own
forward and backward steps of an exchange. Limits apply to the fastest of several runs, because machines are shared.
"""

from __future__ import annotations

import sys
import time
import tracemalloc

import numpy as np

import longspan as ls
from benchmarks.layouts import best_ms
from benchmarks.workloads import MI, document_lengths
from longspan.layouts.balance import solve_cached
from longspan.planning import Problem, Sizes, reverse, scheme

SIZES = Sizes(32, 8, 128, 128, 2)
CASES = [  # name, documents, tokens, ranks, most milliseconds
    ("1M tokens, 64 ranks", "mixed-1000", MI, 64, 30.0),
    ("10M tokens, 1,024 ranks", "longtail", 10 * MI, 1024, 500.0),
    ("10M tokens, 1,024 ranks, 5,900 documents", "short", 10 * MI, 1024, 500.0),
]
REPEATED_MS = 1.0
GROWTH = 2.0
"""Limit of the ratio for ten times the tokens in as many documents: quadratic growth would be a hundred."""


def lengths_of(kind: str, seq_len: int) -> np.ndarray:
    if kind != "mixed-1000":
        return document_lengths(kind, seq_len)
    drawn = np.random.default_rng(0).lognormal(6.5, 1.0, size=1000)
    lengths = np.maximum((drawn / drawn.sum() * seq_len).astype(np.int64), 16)
    lengths[lengths.argmax()] += seq_len - lengths.sum()
    return lengths


def rank_plan(lengths: np.ndarray, world_size: int, rank: int) -> int:
    """Plan one batch on one rank; return the number of its transfers."""
    solve_cached.cache_clear()
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=world_size)
    steps = scheme("exchange", Problem.make(mask, layout, SIZES, node=8)).steps(rank)
    backward, _ = reverse(steps, rank, keep=False)
    return sum(len(step.transfers) for step in (*steps, *backward))


def repeated(lengths: np.ndarray, layout: ls.layouts.Layout) -> ls.Plan:
    """Plan an equal mask again."""
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    return ls.plan(mask, layout, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", scheme="exchange")


def main() -> int:
    missed = 0
    print(f"{'case':44s} {'documents':>9s} {'plan ms':>9s} {'bar':>7s} {'again ms':>9s} {'bar':>6s}")
    for name, kind, seq_len, world_size, bar in CASES:
        lengths = lengths_of(kind, seq_len)
        took = best_ms(lambda a=lengths, w=world_size: rank_plan(a, w, w // 2))
        layout = ls.layouts.balanced(ls.masks.documents(lengths) & ls.masks.causal(), world_size=world_size)
        repeated(lengths, layout)
        again = best_ms(lambda a=lengths, b=layout: repeated(a, b), repeats=30)
        few = len(lengths) <= 2000  # the limit is for about a thousand documents; more are printed
        missed += (took > bar) + (few and again > REPEATED_MS)
        print(f"{name:44s} {len(lengths):9d} {took:9.1f} {bar:7.0f} {again:9.2f} {REPEATED_MS if few else '':>6}")
    print("\n1,000 documents on 64 ranks, longer and longer:")
    print(f"{'tokens':>12s} {'plan ms':>9s} {'peak MiB':>9s}")
    times: list[float] = []
    for seq_len in (MI, 10 * MI, 100 * MI):
        lengths = lengths_of("mixed-1000", seq_len)
        times.append(best_ms(lambda a=lengths: rank_plan(a, 64, 32)))
        tracemalloc.start()
        rank_plan(lengths, 64, 32)
        peak = tracemalloc.get_traced_memory()[1] / MI
        tracemalloc.stop()
        missed += peak > 64  # a dense mask of the shortest one would take a million MiB
        print(f"{seq_len:12,d} {times[-1]:9.1f} {peak:9.1f}")
    missed += max(times) > GROWTH * times[0]
    print("all bars met" if not missed else f"{missed} bars MISSED")
    return 1 if missed else 0


if __name__ == "__main__":
    begin = time.perf_counter()
    code = main()
    print(f"({time.perf_counter() - begin:.0f} s)")
    sys.exit(code)
