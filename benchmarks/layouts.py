"""Measure the balance of layouts and their remote keys: balanced() compared with three simple ones.

    python -m benchmarks.layouts                  # counted by the library in closed form
    python -m benchmarks.layouts --judge PATH     # counted by another file's score()

Exits with 1 if balanced() misses a target of `benchmarks.workloads`.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from benchmarks.workloads import WORKLOADS, Workload
from longspan.layouts import Layout, contiguous, zigzag
from longspan.layouts.balance import balanced, remote_rows, solve_cached
from longspan.layouts.profile import View
from longspan.masks import Mask

MOST_TOKENS = 1.01


@dataclass(frozen=True, slots=True)
class Score:
    """Largest rank / mean of work and of tokens; remote rows of a rank as a fraction of the sequence."""

    imbalance: float
    tokens: float
    rows_mean: float
    rows_max: float

    def meets(self, workload: Workload) -> bool:
        return self.imbalance <= workload.imbalance and self.rows_mean <= workload.rows and self.tokens <= MOST_TOKENS


def count(layout: Layout, mask: Mask) -> Score:
    """Return the score of a layout under a mask, in closed form."""
    seq_len, world_size = layout.seq_len, layout.world_size
    view = View.of(mask, seq_len)
    pairs = view.profile(seq_len).of_spans(layout.table[:, :2])
    work = np.bincount(layout.table[:, 2], weights=pairs, minlength=world_size)
    remote = remote_rows(view.bands, layout.by_position, world_size, seq_len)
    return Score(
        float(work.max() / work.mean()),
        float(layout.num_tokens.max() * world_size / seq_len),
        float(remote.mean() / seq_len),
        float(remote.max() / seq_len),
    )


def judged(judge: ModuleType, layout: Layout, workload: Workload) -> Score:
    """Return the same, counted by the judge."""
    spans = [[(span.start, span.stop) for span in layout.spans(rank)] for rank in range(layout.world_size)]
    result = judge.score(spans, judge.document_lengths(workload.kind, workload.seq_len), workload.window)
    return Score(result["imbalance"], result["tokens"], result["rows_mean"], result["rows_max"])


def load_judge(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--judge {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heaviest_first(mask: Mask, world_size: int, block: int = 512) -> Layout:
    """Assign blocks from heaviest to lightest, each to the least loaded rank that has a free slot."""
    seq_len = mask.length()
    view = View.of(mask, seq_len)
    starts = np.arange(0, seq_len, block, dtype=np.int64)
    blocks = np.stack((starts, np.minimum(starts + block, seq_len)), axis=1)
    work = view.profile(seq_len).of_spans(blocks)
    room = -(-len(blocks) // world_size)
    heap = [(0, rank, 0) for rank in range(world_size)]
    rows: list[tuple[int, int, int]] = []
    for index in np.argsort(-work, kind="stable").tolist():
        load, rank, held = heapq.heappop(heap)
        rows.append((int(blocks[index, 0]), int(blocks[index, 1]), rank))
        if held + 1 < room:
            heapq.heappush(heap, (load + int(work[index]), rank, held + 1))
    return Layout.from_table(seq_len, world_size, np.array(sorted(rows), dtype=np.int64), "heaviest first")


def fresh(mask: Mask, world_size: int) -> Layout:
    """Build balanced() without cached results."""
    solve_cached.cache_clear()
    return balanced(mask, world_size=world_size)


def best_ms(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the fastest of several runs, in milliseconds of processor time, since other programs may use the cores."""
    times: list[float] = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return 1e3 * min(times)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts", description=__doc__.splitlines()[0])
    parser.add_argument("--judge", metavar="PATH", help="count with this file's score() and document_lengths()")
    judge_path: str | None = parser.parse_args().judge
    judge = load_judge(judge_path) if judge_path else None
    missed: list[str] = []
    print(f"{'workload':16} {'layout':15} {'imbalance':>9} {'tokens':>7} {'rows mean':>9} {'rows max':>8} {'spans':>6}")
    for workload in WORKLOADS:
        mask, seq_len, world_size = workload.mask(), workload.seq_len, workload.world_size
        if judge and not np.array_equal(judge.document_lengths(workload.kind, seq_len), workload.lengths()):
            raise SystemExit(f"the judge has other documents than benchmarks.workloads for {workload.name}.")
        others = contiguous(seq_len, world_size), zigzag(seq_len, world_size), heaviest_first(mask, world_size)
        solver_ms = best_ms(lambda mask=mask, size=world_size: fresh(mask, size))
        for layout in (balanced(mask, world_size=world_size), *others):
            score = judged(judge, layout, workload) if judge else count(layout, mask)
            spans = np.bincount(layout.table[:, 2], minlength=world_size).mean()
            line = (
                f"{workload.name:16} {layout.name:15} {score.imbalance:9.4f} {score.tokens:7.4f}"
                f" {score.rows_mean:9.5f} {score.rows_max:8.5f} {spans:6.1f}"
            )
            if layout.name == "balanced":
                verdict = "met" if score.meets(workload) else "MISSED"
                missed += [workload.name] if verdict == "MISSED" else []
                line += f"   {solver_ms:6.1f} ms   bar {workload.imbalance} / {workload.rows}: {verdict}"
            print(line)
    print(
        f"{len(WORKLOADS) - len(missed)} of {len(WORKLOADS)} met" + (f"; missed: {', '.join(missed)}" if missed else "")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
