"""Compare attention forward and backward with PyTorch's own, as ratios within one run.

    python -m benchmarks.attention            # exits with 1 when a bar is missed; 15 minutes on two quiet cores
    python -m benchmarks.attention --quick    # what .ci/run runs: fewer rounds and cases, and 5% more room for noise

Every rank has one thread. "CPU" is processor time of all ranks together, Gloo's threads included. Contenders take turns
in one process per rank, so a round gives pairs that saw the same machine; printed are the medians of each side in
milliseconds, the median of the ratios of the pairs, and the ratio of both minima. Bars are judged on the better of
these two: on shared cores a pair is off by up to 30%, in either direction, and the two estimates fail differently.
`bare` is `F.scaled_dot_product_attention` in one process, called once per document.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks import contenders as c
from benchmarks.contenders import Entry, Timing, Work
from benchmarks.ranks import Ranks
from benchmarks.workloads import document_lengths
from longspan.run.transports import observe

SEQ_LEN = 8192
FLEX_SEQ_LEN = 4096
"""Eager flex attention materialises all scores: 2 GB per rank here, 7 GB at 8192."""
BYTES_SEQ_LEN = 32768
SCHEDULES = ("exchange", "ring", "all_gather", "all_to_all")
OURS = "exchange"
"""The scheme that the limits apply to. `plan` would choose by wall-clock time on its model of a machine; this benchmark
measures processor time, of which messages take a part on CPUs, and an exchange sends the least."""
BARE = Entry("bare", c.bare)


@dataclass
class Report:
    """Print comparisons and count missed limits."""

    noise: float
    missed: int = 0

    def head(self, title: str, left: str = "ours", right: str = "theirs") -> None:
        print(f"\n{title}")
        print(f"  {'':44s} {left:>9s} {right:>9s} {'pairs':>7s} {'minima':>7s}   bar", flush=True)

    def at_most(self, name: str, ours: list[float], theirs: list[float], bar: float | None) -> None:
        """Compare ours over theirs with `bar`, an upper limit; without a bar it is only shown."""
        pairs = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        minima = min(ours) / min(theirs)
        met = bar is None or min(pairs, minima) <= bar * self.noise
        self._line(name, ours, theirs, pairs, minima, "" if bar is None else f"<= {bar:.2f}", met)

    def at_least(self, name: str, ours: list[float], theirs: list[float], bar: float) -> None:
        """Compare theirs over ours with `bar`, a lower limit."""
        pairs = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        minima = min(theirs) / min(ours)
        self._line(name, ours, theirs, pairs, minima, f">= {bar:.2f}", max(pairs, minima) >= bar / self.noise)

    def _line(
        self, name: str, ours: list[float], theirs: list[float], pairs: float, minima: float, bar: str, met: bool
    ) -> None:
        left, right = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
        self.missed += not met
        verdict = "" if met else "  MISSED"
        print(f"  {name:44s} {left:9.0f} {right:9.0f} {pairs:7.3f} {minima:7.3f}   {bar}{verdict}", flush=True)


@dataclass(frozen=True)
class Times:
    """Return seconds by round for each entry: processor time of all ranks, and from the first start to the last end."""

    cpu: dict[str, list[float]]
    wall: dict[str, list[float]]

    @staticmethod
    def take(ranks: Ranks, work: Work, entries: tuple[Entry, ...], num_rounds: int) -> Times:
        by_rank: list[list[list[Timing | None]]] = ranks.run(c.timed_rounds, work, entries, num_rounds)
        cpu: dict[str, list[float]] = {entry.name: [] for entry in entries}
        wall: dict[str, list[float]] = {entry.name: [] for entry in entries}
        for number in range(num_rounds):
            for at, entry in enumerate(entries):
                times = [t for t in (rounds[number][at] for rounds in by_rank) if t is not None]
                cpu[entry.name].append(sum(t.cpu for t in times))
                wall[entry.name].append(max(t.stop for t in times) - min(t.start for t in times))
        return Times(cpu, wall)


def ours(scheme: str, layout: str) -> Entry:
    return Entry(f"{scheme}, {layout}", c.longspan, (layout, scheme), layout)


def auto(work: Work, layout: str, world_size: int) -> str:
    chosen = c.plan_of(work, c.layout_of(work, layout, world_size), "auto").scheme.name
    return f"plan(machine='cpu') would choose {chosen}"


def one_device(report: Report, num_rounds: int, dtypes: tuple[str, ...]) -> None:
    report.head("One device, CPU ms of forward and backward, S = 8,192", "longspan", "SDPA")
    with Ranks(1) as ranks:
        for dtype in dtypes:
            entries = (Entry("longspan", c.one_device), BARE)
            cpu = Times.take(ranks, Work(SEQ_LEN, dtype), entries, num_rounds).cpu
            report.at_most(f"causal, {dtype}", cpu["longspan"], cpu["bare"], 1.05)
        for dtype in dtypes:
            work = Work(SEQ_LEN, dtype, c.documents(SEQ_LEN, 1024))
            entries = (Entry("longspan", c.one_device), Entry("dense", c.dense), BARE)
            cpu = Times.take(ranks, work, entries, num_rounds).cpu
            report.at_least(f"documents, {dtype}, SDPA with a dense mask", cpu["longspan"], cpu["dense"], 4.0)
            report.at_most(f"documents, {dtype}, SDPA per document", cpu["longspan"], cpu["bare"], None)


def two_ranks_causal(report: Report, num_rounds: int, dtypes: tuple[str, ...]) -> None:
    with Ranks(2) as ranks:
        for dtype in dtypes:
            work = Work(SEQ_LEN, dtype)
            report.head(f"2 ranks, causal, {dtype}, S = 8,192; {auto(work, 'zigzag', 2)}", "longspan", "other")
            rings = tuple(
                Entry(f"PyTorch's ring, {way}", c.torch_ring, (way,), "zigzag") for way in ("alltoall", "allgather")
            )
            others = tuple(ours(name, "zigzag") for name in SCHEDULES if name != OURS)
            us = ours(OURS, "zigzag")
            times = Times.take(ranks, work, (us, BARE, *rings), num_rounds)
            cpu, wall = times.cpu, times.wall
            report.at_most(f"CPU: {us.name} / bare", cpu[us.name], cpu["bare"], 1.10)
            for ring in rings:
                report.at_most(f"CPU: {us.name} / {ring.name}", cpu[us.name], cpu[ring.name], 1.0)
            for ring in rings:
                report.at_most(f"CPU: {ring.name} / bare", cpu[ring.name], cpu["bare"], None)
            report.at_least(f"wall: bare / {us.name}", wall[us.name], wall["bare"], 1.8)
            shown = Times.take(ranks, work, (BARE, *others), max(num_rounds // 3, 2)).cpu
            for other in others:
                report.at_most(f"CPU: {other.name} / bare", shown[other.name], shown["bare"], None)


def ranks_documents(report: Report, num_rounds: int, dtypes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    for world_size in sizes:
        with Ranks(world_size) as ranks:
            for dtype in dtypes:
                work = Work(SEQ_LEN, dtype, c.documents(SEQ_LEN, 1024))
                title = f"{world_size} ranks, documents, {dtype}, S = 8,192; {auto(work, 'balanced', world_size)}"
                report.head(title, "longspan", "bare")
                us = ours(OURS, "balanced")
                cpu = Times.take(ranks, work, (us, BARE), num_rounds).cpu
                report.at_most(f"CPU: {us.name} / bare", cpu[us.name], cpu["bare"], 1.20)
                others = tuple(ours(name, "balanced") for name in SCHEDULES if name != OURS)
                shown = Times.take(ranks, work, (BARE, *others), max(num_rounds // 3, 2)).cpu
                for other in others:
                    report.at_most(f"CPU: {other.name} / bare", shown[other.name], shown["bare"], None)


def against_flex(report: Report, sizes: tuple[int, ...]) -> None:
    title = "Documents, bfloat16, S = 4,096, 2 rounds; PyTorch's flex context parallelism, its device check bypassed"
    report.head(title, "longspan", "flex")
    work = Work(FLEX_SEQ_LEN, "bfloat16", c.documents(FLEX_SEQ_LEN, 1024))
    for world_size in sizes:
        us = ours(OURS, "balanced")
        with Ranks(world_size) as ranks:
            cpu = Times.take(ranks, work, (us, Entry("flex", c.torch_flex, (), "zigzag")), 2).cpu
        report.at_least(f"CPU: flex / {us.name}, {world_size} ranks", cpu[us.name], cpu["flex"], 20.0)


def sent_forward(work: Work, layout: str, scheme: str) -> tuple[int, int, int]:
    """Return the bytes that this rank sends, and the plan's figures for sent and received bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plan = c.plan_of(work, c.layout_of(work, layout, size), scheme)
    q, k, v = (plan.layout.shard(t, rank, 2) for t in work.tensors()[:3])
    with observe() as traffic, torch.no_grad():
        c.ls.attention(q, k, v, plan, group=dist.group.WORLD)
    planned = sum(t.piece.num_bytes(plan.sizes) for step in plan.steps(rank) for t in step.transfers if t.src == rank)
    return traffic.sent_bytes(rank), planned, plan.bytes_received(rank)


def bytes_sent(report: Report) -> None:
    print("\n4 ranks, longtail documents, bfloat16, S = 32,768, forward over Gloo, MiB sent by all ranks")
    work = Work(BYTES_SEQ_LEN, "bfloat16", tuple(document_lengths("longtail", BYTES_SEQ_LEN).tolist()))
    totals: dict[str, int] = {}
    with Ranks(4) as ranks:
        for scheme in ("exchange", "all_gather"):
            counts = ranks.run(sent_forward, work, "balanced", scheme)
            sent, planned, received = (sum(figures) for figures in zip(*counts, strict=True))
            exact = all(really == wanted for really, wanted, _ in counts) and sent == planned == received
            report.missed += not exact
            totals[scheme] = sent
            verdict = "exactly as planned" if exact else f"planned {received / 2**20:.2f}  MISSED"
            print(f"  {scheme:44s} {sent / 2**20:9.2f}   {verdict}")
    ratio = totals["all_gather"] / totals["exchange"]
    report.missed += ratio < 5.0
    print(f"  {'all_gather / exchange':44s} {ratio:9.2f}   >= 5.00{'' if ratio >= 5.0 else '  MISSED'}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help="one part: device, causal, documents, flex or bytes")
    options = parser.parse_args(arguments)
    num_rounds = 5 if options.quick else 15
    both = ("bfloat16", "float32")
    report = Report(noise=1.05 if options.quick else 1.0)
    print(f"torch {torch.__version__}, {num_rounds} rounds, H = {c.HEADS}, D = {c.DIM}, one thread per rank")
    parts = {
        "device": lambda: one_device(report, num_rounds, both[:1] if options.quick else both),
        "causal": lambda: two_ranks_causal(report, num_rounds, both),
        "documents": lambda: ranks_documents(report, num_rounds, both, (2,) if options.quick else (2, 4)),
        "flex": lambda: None if options.quick else against_flex(report, (2, 4)),
        "bytes": lambda: bytes_sent(report),
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()
    print("\nall bars met" if not report.missed else f"\n{report.missed} bars MISSED")
    return 1 if report.missed else 0


if __name__ == "__main__":
    begin = time.perf_counter()
    code = main(sys.argv[1:])
    print(f"({time.perf_counter() - begin:.0f} s)")
    sys.exit(code)
