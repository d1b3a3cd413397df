"""Measure the first call of new plans: recording, copies to the device, tables that stay there, Triton variants.

    python -m benchmarks.cold_call                # exits with 1 if a figure is above its limit
    python -m benchmarks.cold_call --only "1M, 8 ranks" --batches 5
    python -m benchmarks.cold_call --profile "1M, 8 ranks"

Every batch packs other documents, long-tailed; 32 query heads, 8 key heads, 128 features, bfloat16. One rank's real
forward and backward run on tensors without data, with a kernel that computes nothing, messages that are not sent and
Triton kernels that are not launched. Times are this thread's processor time: the first call of a plan minus a warm one,
forward and backward, the median over batches; then the same for plans that a thread has prepared, and for plans of
convolutions (4,096 channels, width 4) and recurrences (32 heads of 128 x 128), prepared in every other batch. Ranks
rotate. A
variant is what Triton compiles separately: a kernel with the types of its arguments, the properties that Triton
specializes on, and its constants.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

import longspan as ls
from benchmarks.host_time import DIM, HEADS, KV_HEADS, as_on_a_gpu
from longspan.kernels.cuda_flash import Flash
from longspan.mixers import convolution, scans
from longspan.mixers.convolution import OwnRows
from longspan.mixers.scan_kernels import scan_kernel_named
from longspan.mixers.scan_run import LocalSegments, RankScan, indices_of
from longspan.planning.conv_plan import ConvPlan
from longspan.planning.machine import H100
from longspan.run import tables, triton_kernels
from longspan.run.halo import HaloBackward, HaloForward, HaloTask
from longspan.run.ops import prepare_job
from longspan.run.walk import Job
from longspan.training import prefetch
from tests.gpu.programs import LaunchCounter, RankPrograms, drive, no_backward, no_forward

COPIES = 2
"""Limit of copies to the device in a first call, forward and backward together."""
VARIANTS = 12
AHEAD = 2.0
"""Limit in ms of what a first call takes beyond a warm one if its plan was prepared in a thread."""
MEGABYTES = 100.0


@dataclass(frozen=True)
class Case:
    """Packed batches of some tokens on some ranks, and the limit of a first call beyond a warm one."""

    name: str
    tokens: int
    ranks: int
    scheme: str
    milliseconds: float


CASES = (
    Case("1M, 8 ranks", 1 << 20, 8, "all_to_all", 30.0),
    Case("1M, 64 ranks", 1 << 20, 64, "hybrid(8,exchange)", 60.0),
    Case("128k, 8 ranks", 1 << 17, 8, "exchange", 30.0),
)


def lengths_of(tokens: int, draw: np.random.Generator) -> list[int]:
    """Return document lengths that add up to the tokens."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(int(min(left, max(16, draw.lognormal(7.5, 1.3)))))
    return lengths


def plan_of(case: Case, draw: np.random.Generator) -> ls.Plan:
    lengths = lengths_of(case.tokens, draw)
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=case.ranks, seq_len=case.tokens)
    sizes = {"q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"}
    return ls.plan(mask, layout, scheme=case.scheme, machine=H100, **sizes)


class Variants:
    """Replacement of a Triton kernel that notes what Triton would compile."""

    seen: ClassVar[set[Any]] = set()

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **constants: Any) -> None:
        key = tuple(specialization(p, x) for p, x in zip(self.kernel.params, args, strict=False))
        Variants.seen.add((self.kernel.__name__, key, tuple(sorted(constants.items()))))


def specialization(param: Any, value: Any) -> Any:
    """Return the type of an argument and the property of its value that Triton compiles for."""
    if hasattr(value, "data_ptr"):  # a tensor, or one that is read as another dtype
        tensor = getattr(value, "base", value)
        aligned = tensor.storage_offset() * tensor.element_size() % 16 == 0
        return str(value.dtype), aligned or param.do_not_specialize or param.do_not_specialize_on_alignment
    kind = param.annotation_type or ("i32" if -(2**31) <= value < 2**31 else "i64")
    if param.do_not_specialize:
        return kind
    return "1" if value == 1 else (kind, value % 16 == 0)


@contextmanager
def counted_variants() -> Iterator[None]:
    names = [name for name in dir(triton_kernels) if name.endswith("_kernel")]
    kernels = {name: getattr(triton_kernels, name) for name in names}
    with as_on_a_gpu():
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, Variants(kernel))
        yield


KEPT: WeakSet[Tensor] = WeakSet()
"""Tables on the device that are alive."""


def kept_bytes() -> int:
    gc.collect()
    return sum(tensor.nbytes for tensor in KEPT)


@contextmanager
def counted_tables() -> Iterator[None]:
    """Note every table that is copied to the device."""
    copy = tables.copy_to_device

    def noted(numbers: Any, device: torch.device) -> Tensor:
        tensor = copy(numbers, device)
        KEPT.add(tensor)
        return tensor

    tables.copy_to_device = noted
    try:
        yield
    finally:
        tables.copy_to_device = copy


def both_passes(plan: ls.Plan, rank: int, kernel: Flash) -> Callable[[], RankPrograms]:
    """Return a function that runs the rank's forward and backward."""

    def run() -> RankPrograms:
        programs = RankPrograms.of(plan, rank, "meta", kernel)
        drive(programs.program("backward"), zeros=False)
        return programs

    return run


def milliseconds(run: Callable[[], Any]) -> float:
    begin = time.thread_time()
    run()
    return (time.thread_time() - begin) * 1e3


def measured(case: Case, batches: int) -> bool:
    """Print the figures of a case; return whether they are within their limits."""
    draw, kernel = np.random.default_rng(0), Flash(op=no_forward, backward_op=no_backward)
    added: list[float] = []
    copies: list[int] = []
    Variants.seen.clear()
    KEPT.clear()
    both_passes(plan_of(case, draw), 0, kernel)()  # imports
    for batch in range(batches):
        plan, rank = plan_of(case, draw), (0, case.ranks // 2, case.ranks - 1)[batch % 3]
        plan.steps(rank, "backward")
        run = both_passes(plan, rank, kernel)
        if batch % 4 == 3:
            with LaunchCounter("meta") as counter:
                run()
            copies.append(counter.copies)
        else:
            first = milliseconds(run)
            added.append(first - min(milliseconds(run) for _ in range(2)))
    figures = (
        ("ms first call", median(added), case.milliseconds),
        ("copies", max(copies, default=0), COPIES),
        ("MB of tables", kept_bytes() / 1e6, MEGABYTES),
        ("variants", len(Variants.seen), VARIANTS),
    )
    for name, value, limit in figures:
        missed = "" if value <= limit else "  MISSED"
        print(f"{case.name:14} {case.scheme:20} {name:14} {value:9,.1f}  limit {limit:g}{missed}", flush=True)
    print(f"{'':14} first calls from {min(added):.1f} to {max(added):.1f} ms", flush=True)
    return all(value <= limit for _, value, limit in figures)


def measured_ahead(case: Case, batches: int) -> bool:
    """Print what a plan adds to its first call if `prefetch` has prepared it; return whether this is in its limit."""
    draw, kernel = np.random.default_rng(1), Flash(op=no_forward, backward_op=no_backward)

    def prepare(batch: int) -> tuple[ls.Plan, int]:
        plan, rank = plan_of(case, draw), (0, case.ranks // 2, case.ranks - 1)[batch % 3]
        prepare_job(Job(plan, rank, kernel, 1.0, torch.bfloat16), torch.device("meta"), backward=True)
        return plan, rank

    added: list[float] = []
    for plan, rank in prefetch(range(batches), prepare):
        run = both_passes(plan, rank, kernel)
        times: list[float] = []
        for _ in range(2):  # a first call and a warm one, each after a wait: processor caches are as cold for both
            times.append(milliseconds(run))
            time.sleep(0.2)  # the host waits for its device, and the thread prepares the next batch
        added.append(times[0] - times[1])
    value = median(added[1:])  # the first one imports
    missed = "" if value <= AHEAD else "  MISSED"
    print(f"{case.name:14} {case.scheme:20} {'ms prepared':14} {value:9,.1f}  limit {AHEAD:g}{missed}", flush=True)
    return value <= AHEAD


def convolution_of(lengths: list[int], layout: ls.layouts.Layout, rank: int) -> tuple[Any, Callable[[], Any]]:
    """Return the plan of a convolution, and a function that does what a call does on the host."""
    plan = ls.conv_plan(lengths, layout, channels=HEADS * DIM, width=4, dtype="bfloat16")
    task = HaloTask(plan, rank, torch.bfloat16)

    def run() -> None:
        x = torch.empty(1, int(layout.num_slots(rank)), HEADS * DIM, dtype=torch.bfloat16, device="meta")
        rows = drive(HaloForward(task, x).program())
        OwnRows.of(plan, rank, x.device)
        drive(HaloBackward(task, rows).program())

    return plan, run


def recurrence_of(lengths: list[int], layout: ls.layouts.Layout, rank: int) -> tuple[Any, Callable[[], Any]]:
    """Return the plan of a recurrence, and a function that does what a call does on the host, without the kernel."""
    plan = ls.scan_plan(lengths, layout, heads=HEADS, keys=DIM, values=DIM, maps="matrix", machine=H100)

    def run() -> None:
        local, meta = LocalSegments.of(plan, rank), torch.device("meta")
        indices_of(plan, rank, meta)
        for segments in (local.segments, local.segments.select(local.left)):
            scan_kernel_named("reference").prepare(segments, (1, int(layout.num_slots(rank))), meta)
        ranks = RankScan(plan, rank, local, lambda program, *_: (drive(program), 0))
        maps, states = torch.empty(2, len(local.left), HEADS, DIM, DIM, device=meta)
        entering, kept, _ = ranks.forward(maps, states)
        ranks.backward(entering, kept, 0)

    return plan, run


def prepare_plan(plan: Any, rank: int) -> None:
    """Do what `plan.prepare` does, on a device that has no autocast."""
    if isinstance(plan, ConvPlan):
        convolution.prepare(plan, rank, torch.device("meta"), backward=True)
    else:
        scans.prepare(plan, rank, torch.device("meta"), "reference", backward=True)


def measured_mixers(case: Case, batches: int) -> bool:
    """Print what a plan adds to its first call, alone and prepared; return whether the latter is in its limit."""
    is_fine = True
    for name, build in (("convolution", convolution_of), ("recurrence", recurrence_of)):
        draw = np.random.default_rng(2)

        def prepare(batch: int, build: Any = build, draw: Any = draw) -> tuple[bool, Any, Callable[[], Any]]:
            lengths, rank = lengths_of(case.tokens, draw), (0, case.ranks // 2, case.ranks - 1)[batch % 3]
            mask = ls.masks.documents(lengths) & ls.masks.causal()
            layout = ls.layouts.balanced(mask, world_size=case.ranks, seq_len=case.tokens)
            plan, run = build(lengths, layout, rank)
            if batch % 2:
                prepare_plan(plan, rank)
            return batch % 2 == 1, plan, run

        added: dict[bool, list[float]] = {False: [], True: []}
        for is_prepared, _, run in prefetch(range(batches), prepare):
            times: list[float] = []
            for _ in range(2):
                times.append(milliseconds(run))
                time.sleep(0.2)  # the thread prepares the next batch
            added[is_prepared].append(times[0] - times[1])
        alone, value = (median(added[is_prepared][1:]) for is_prepared in (False, True))
        missed = "" if value <= AHEAD else "  MISSED"
        print(f"{case.name:14} {name:20} {'ms first call':14} {alone:9,.1f}", flush=True)
        print(f"{case.name:14} {name:20} {'ms prepared':14} {value:9,.1f}  limit {AHEAD:g}{missed}", flush=True)
        is_fine &= value <= AHEAD
    return is_fine


def profiled(case: Case) -> None:
    draw, kernel = np.random.default_rng(0), Flash(op=no_forward, backward_op=no_backward)
    both_passes(plan_of(case, draw), 0, kernel)()
    plan = plan_of(case, draw)
    plan.steps(0, "backward")
    profile = cProfile.Profile()
    profile.runcall(both_passes(plan, 0, kernel))
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    pstats.Stats(profile).sort_stats("cumtime").print_stats(45)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="CASE")
    parser.add_argument("--profile", metavar="CASE")
    parser.add_argument("--batches", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [case for case in CASES if (args.profile or args.only) in (None, case.name)]
    with counted_variants(), counted_tables():
        if args.profile:
            profiled(*chosen)
            return 0
        results = [measured(case, args.batches) for case in chosen]
        results += [measured_ahead(case, min(args.batches, 25)) for case in chosen]
        results += [measured_mixers(case, min(args.batches, 50)) for case in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
