"""Measure the host time of a warm call, before any kernel: on a GPU nothing may be queued during that time.

    python -m benchmarks.host_time                 # all cases; exits with 1 if a bar is missed
    python -m benchmarks.host_time --only fixed    # a small call, and the first of a process
    python -m benchmarks.host_time --profile "64 longtail"

One rank's real forward and backward with a kernel that computes nothing and messages that are not sent, 1M tokens, 32
query heads, 8 key heads, 128 features, bfloat16. Time is this thread's processor time, the best of many, with 1/512 of
the tokens, 8 query heads and 8 features: the plan has the same scheme, and hardly a byte is moved. Launches are counted
on tensors without data at full size: everything that is neither a view nor an allocation, Triton's kernels included.
The worst of three ranks counts.
"""

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

import longspan as ls
from longspan.cli.measure import DIRECTIONS
from longspan.cli.workload import drawn_lengths
from longspan.planning.machine import H100
from longspan.run import fused, walk
from longspan.run.moves import Memory
from longspan.run.program import RankProgram
from longspan.run.tables import CACHE
from tests.gpu.programs import LaunchCounter, RankPrograms, drive, programs_without_kernel

SEQ, HEADS, KV_HEADS, DIM = 1 << 20, 32, 8, 128
SMALLER, FEW, ROUNDS = 512, 8, 15
LAUNCHER = 8_000
"""Assumed nanoseconds of Triton's launcher, without a GPU to measure it on."""
FIXED = (0.15, 0.4)
"""Milliseconds of `longspan.attention` beyond PyTorch's own call, 8 tokens and 2 heads on one device: forward without
gradients, and forward and backward."""
FIRST = 0.15
"""Seconds of the first attention of a process that has imported torch and longspan."""


@dataclass(frozen=True)
class Case:
    """Documents on some ranks, and the limits of a call over them: milliseconds and launches, forward and backward."""

    name: str
    ranks: int
    documents: bool
    window: int = 0
    milliseconds: tuple[float, float] | None = None
    launches: tuple[int, int] | None = None


CASES = (
    Case("8 causal", 8, documents=False),
    Case("8 longtail", 8, documents=True),
    Case("8 window", 8, documents=False, window=4096),
    Case("8 longtail + window", 8, documents=True, window=4096, milliseconds=(0.6, 1.2)),
    Case("64 causal", 64, documents=False),
    Case("64 longtail", 64, documents=True, milliseconds=(1.4, 3.9), launches=(60, 90)),
    Case("64 window", 64, documents=False, window=4096, milliseconds=(0.25, 0.6)),
    Case("64 longtail + window", 64, documents=True, window=4096),
)


class Launcher:
    """Replacement of a Triton kernel that counts its launches and takes the time of Triton's launcher."""

    launches = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_: Any, **__: Any) -> None:
        Launcher.launches += 1
        until = time.thread_time_ns() + LAUNCHER
        while time.thread_time_ns() < until:
            pass


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Move rows by tables and Triton's kernels, as on GPUs, for tensors on any device."""
    from longspan.run import triton_kernels

    kept = walk.memory_for, fused.is_fused
    kernels = {name: kernel for name, kernel in vars(triton_kernels).items() if name.endswith("_kernel")}
    walk.memory_for = memory_by_tables
    fused.is_fused = lambda _: True
    for name in kernels:
        setattr(triton_kernels, name, Launcher())
    try:
        yield
    finally:
        walk.memory_for, fused.is_fused = kept
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, kernel)


def memory_by_tables(program: RankProgram, device: torch.device) -> Memory:
    tables = CACHE.get(program, device)
    return Memory(program.buffers, device, tables.numbers, tables.index)


def plan_of(case: Case, smaller: int = 1, scheme: str = "auto") -> ls.Plan:
    lengths = np.maximum(1, drawn_lengths("longtail", SEQ) // smaller) if case.documents else np.array([SEQ // smaller])
    mask = ls.masks.documents(lengths.tolist()) & ls.masks.causal()
    if case.window:
        mask = mask & ls.masks.sliding_window(case.window // smaller - 1)
    layout = ls.layouts.balanced(mask, world_size=case.ranks, seq_len=int(lengths.sum()))
    sizes = {"q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"}
    if smaller > 1:
        sizes |= {"q_heads": KV_HEADS, "head_dim": FEW}
    return ls.plan(mask, layout, scheme=scheme, machine=H100, **sizes)


def both_plans(case: Case) -> tuple[ls.Plan, ls.Plan]:
    """Return the plan, and one of the same scheme for fewer tokens and features."""
    whole = plan_of(case)
    return whole, plan_of(case, SMALLER, whole.scheme.name)


def passes(plan: ls.Plan, rank: int, device: str) -> tuple[Callable[[], Any], ...]:
    """Run one rank's forward and backward, warm, with messages left in memory."""
    programs = programs_without_kernel(plan, rank, device)
    return tuple(partial(_run, programs, way) for way in DIRECTIONS)


def _run(programs: RankPrograms, way: str) -> Any:
    return drive(programs.program(way), zeros=False)


def best(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Return milliseconds of this thread."""
    times: list[float] = []
    for _ in range(rounds):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return min(times) * 1e3


def counted(run: Callable[[], Any], device: str) -> LaunchCounter:
    before = Launcher.launches
    with LaunchCounter(device) as counts:
        run()
    counts.launches += Launcher.launches - before
    return counts


def measured(case: Case) -> bool:
    """Print the cost of the case; return whether it is within its limits."""
    ranks = sorted({0, case.ranks // 2, case.ranks - 1})
    whole, small = both_plans(case)
    figures: list[tuple[float, int, int]] = []
    for way in (0, 1):
        cost = max(best(passes(small, rank, "cpu")[way]) for rank in ranks)
        counts = [counted(passes(whole, rank, "meta")[way], "meta") for rank in ranks]
        figures.append((cost, max(c.launches for c in counts), max(c.copies + c.waits for c in counts)))
    (forward, *_), (backward, *_) = figures
    launches = figures[0][1], figures[1][1]
    waits = figures[0][2] + figures[1][2]
    right = waits == 0 or case.milliseconds is None
    if case.milliseconds is not None:
        right = right and forward <= case.milliseconds[0] and backward <= case.milliseconds[1]
    if case.launches is not None:
        right = right and launches[0] <= case.launches[0] and launches[1] <= case.launches[1]
    bars = "" if case.milliseconds is None else f"  bar {case.milliseconds[0]} / {case.milliseconds[1]} ms"
    bars += "" if case.launches is None else f", {case.launches[0]} / {case.launches[1]} launches"
    print(
        f"{case.name:22} {small.scheme.name:20} {forward:6.2f} / {backward:6.2f} ms"
        f" {launches[0]:5} / {launches[1]:4} launches {waits:3} waits{bars}{'' if right else '  MISSED'}",
        flush=True,
    )
    return right


def fixed() -> bool:
    """Measure the time of `longspan.attention` beyond PyTorch's own call: medians of paired runs."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    mask, gradient = ls.masks.causal(8), torch.ones(1, 2, 8, 16)

    def ours() -> torch.Tensor:
        return ls.attention(q, k, v, mask)

    def plain() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both(run: Callable[[], torch.Tensor]) -> None:
        torch.autograd.grad(run(), (q, k, v), gradient)

    with torch.no_grad():
        forward, bare = paired(ours, plain)
    whole, bare_whole = paired(partial(both, ours), partial(both, plain))
    right = forward - bare <= FIXED[0] and whole - bare_whole <= FIXED[1]
    print(
        f"fixed cost, forward / forward and backward {forward - bare:7.3f} / {whole - bare_whole:5.3f} ms beyond"
        f" PyTorch's {bare:.3f} / {bare_whole:.3f}  bar {FIXED[0]} / {FIXED[1]} ms{'' if right else '  MISSED'}",
        flush=True,
    )
    return right


def paired(one: Callable[[], Any], other: Callable[[], Any], rounds: int = 1000) -> tuple[float, float]:
    """Return median milliseconds of this thread of two functions that take turns."""
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for run, found in zip((one, other), times, strict=True):
            begin = time.thread_time()
            run()
            found.append(time.thread_time() - begin)
    first, second = (median(found[rounds // 10 :]) * 1e3 for found in times)
    return first, second


def first_call() -> bool:
    """Measure the first attention of a process whose code was compiled before, the median of five."""
    code = (
        "import time, torch, longspan as ls; q = torch.randn(1, 2, 64, 16, requires_grad=True);"
        "begin = time.process_time(); ls.attention(q, q, q, ls.masks.causal()); print(time.process_time() - begin)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", code]
        _, *times = (float(subprocess.check_output(command, env=environment)) for _ in range(6))
    seconds = median(times)
    right = seconds <= FIRST
    print(f"first attention of a process {seconds:.3f} s  bar {FIRST} s{'' if right else '  MISSED'}", flush=True)
    return right


def profiled(case: Case) -> None:
    for name, run in zip(("forward", "backward"), passes(both_plans(case)[1], case.ranks // 2, "cpu"), strict=True):
        print(name)
        profile = cProfile.Profile()
        profile.enable()
        run()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", metavar="CASE")
    parser.add_argument("--only", metavar="CASE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.profile:
        with as_on_a_gpu():
            profiled(next(case for case in CASES if case.name == args.profile))
        return 0
    results = [fixed(), first_call()] if args.only in (None, "fixed") else []
    with as_on_a_gpu():
        results += [measured(case) for case in CASES if args.only in (None, case.name)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
