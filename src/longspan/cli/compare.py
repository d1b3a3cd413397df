"""Every scheme over every layout, side by side, at several numbers of ranks.

PyTorch's context parallelism is among them: its all-gather is our all_gather, and its ring our ring, both over zigzag,
which PyTorch calls head-tail. Column `fewer`: how many times fewer bytes than with
PyTorch's all-gather a rank receives.

  longspan compare --seq 1M --ranks 8,64 --docs longtail --plot scaling.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.cli.output import (
    Column,
    Row,
    Screen,
    bytes_against,
    memory_against,
    print_json,
    progress,
    schemes,
    screen_of,
    times,
    to_write,
)
from longspan.cli.workload import LAYOUTS, Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import PlanError
from longspan.formatting import bytes_alike, seconds_alike
from longspan.planning.choose import Reason, candidates
from longspan.planning.plan import Plan
from longspan.planning.planners import PLANNERS
from longspan.planning.problem import Problem

TORCH = (("all_gather", "zigzag"), ("ring", "zigzag"))
PLOTS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Entry:
    """The figures of one scheme over one layout, as `longspan.plan` gives them."""

    ranks: int
    layout: str
    scheme: str
    imbalance: float
    reason: Reason
    chosen: bool = False
    fewer: float = 1.0
    """Bytes that PyTorch's all-gather receives, over those of this entry."""

    @property
    def memory(self) -> int:
        """The peak without a rank's own tensors, with what kernels allocate inside, where that is known."""
        return self.reason.peak_bytes + (self.reason.workspace_bytes or 0)

    @property
    def note(self) -> str:
        return "PyTorch" if (self.scheme, self.layout) in TORCH else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, ranks="many", layout=False)
    which = parser.add_argument_group("what to compare")
    text = "names such as ring,hybrid(4,exchange), or all (exchange, all_gather, ring, all_to_all, widest hybrids)"
    which.add_argument("--schemes", type=schemes, help=text)
    which.add_argument("--layouts", help=f"names separated by commas, of {', '.join(LAYOUTS)}")
    which.add_argument(
        "--plot", type=to_write(*PLOTS), metavar="FILE", help=f"draw scaling curves ({', '.join(PLOTS)})"
    )


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    screen = screen_of(args)
    cases = list(_cases(workload, args))
    with progress(args, "comparing", len(cases)) as advance:
        entries = compare(workload, cases, advance)
    if args.plot is not None:
        plot(entries, workload, args.plot)
    if args.json:
        print_json("compare", {"workload": workload.as_json(), "entries": [as_json(entry) for entry in entries]})
    else:
        show(workload, entries, screen, args.plot)
    return 0


def _cases(workload: Workload, args: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Yield (ranks, layout, scheme) of everything to compare; PyTorch's two are always included."""
    for name in () if args.layouts is None else args.layouts.split(","):
        if name not in LAYOUTS:
            raise PlanError(f"--layouts must be of {', '.join(LAYOUTS)}, but got {name!r:.40}.")
    default = ("balanced", "zigzag", "contiguous") + (("per_document",) if len(workload.lengths) > 1 else ())
    layouts = default if args.layouts is None else tuple(args.layouts.split(","))
    for ranks in dict.fromkeys(args.ranks):
        names = list(_schemes(workload, ranks, args.schemes))
        yield from dict.fromkeys(
            [(ranks, layout, scheme) for scheme, layout in TORCH]
            + [(ranks, layout, scheme) for layout in layouts for scheme in names]
        )


def _schemes(workload: Workload, ranks: int, names: tuple[str, ...] | None) -> Iterator[str]:
    if names is not None and names != ("all",):
        if "auto" in names or "all" in names:
            raise PlanError(
                f"--schemes must be names such as ring,hybrid(4,exchange), or all alone, but got"
                f" {','.join(names):.60}. Leave it out to compare the usual ones."
            )
        yield from names
        return
    sizes = workload.plan(ranks, "all_gather", "contiguous").sizes
    layout = workload.layout(ranks, "contiguous")
    every = list(candidates(Problem.make(workload.mask, layout, sizes, node=workload.machine.node)))
    if names is not None:
        yield from every
        return
    yield from (name for name in ("exchange", *PLANNERS, "all_to_all") if name in every)
    hybrids = [name for name in every if name.startswith("hybrid")]
    yield from [name for name in hybrids if name.endswith("exchange)")][:1]
    yield from [name for name in hybrids if name.endswith("ring)")][:1]


def compare(workload: Workload, cases: list[tuple[int, str, str]], advance: Callable[[str], None]) -> list[Entry]:
    """Return the entries of all cases, by number of ranks and predicted time."""
    by_case: dict[tuple[int, str, str], tuple[Plan, Reason]] = {}
    for ranks, layout, scheme in cases:
        advance(f"{ranks} ranks, {scheme} over {layout}")
        plan = workload.plan(ranks, scheme, layout)
        by_case[ranks, layout, scheme] = plan, plan.reasons[0]
    entries: list[Entry] = []
    for ranks in dict.fromkeys(case[0] for case in cases):
        mine = [(case, *figures) for case, figures in by_case.items() if case[0] == ranks]
        mine.sort(key=lambda one: (one[2].seconds, one[2].bytes_received))
        base = by_case[ranks, "zigzag", "all_gather"][1].bytes_received
        for number, ((_, layout, scheme), plan, reason) in enumerate(mine):
            fewer = base / reason.bytes_received if reason.bytes_received else float("inf") if base else 1.0
            entries.append(Entry(ranks, layout, scheme, plan.imbalance, reason, number == 0, fewer))
    return entries


def as_json(entry: Entry) -> dict[str, Any]:
    names = ("forward_seconds", "backward_seconds", "bytes_received", "peak_bytes", "workspace_bytes", "host_seconds")
    return {
        "ranks": entry.ranks,
        "layout": entry.layout,
        "scheme": entry.scheme,
        "note": entry.note,
        "chosen": entry.chosen,
        "imbalance": entry.imbalance,
        **{name: getattr(entry.reason, name) for name in names},
        "figures_of_ranks": list(entry.reason.ranks),
        "fewer_bytes_than_torch_all_gather": entry.fewer if entry.fewer != float("inf") else None,
    }


HEADS = ("imbalance", "received", "fewer", "memory", "forward", "backward")


def show(workload: Workload, entries: list[Entry], screen: Screen, plot: Path | None) -> None:
    """Print one table for each number of ranks."""
    screen.title(f"{workload.seq_len:,} tokens: {workload.about_docs()}")
    kernel = workload.plan(entries[0].ranks, entries[0].scheme, entries[0].layout).kernel_assumed
    screen.facts((("tensors", workload.about_tensors()), ("machine", workload.about_machine()), ("kernel", kernel)))
    for ranks in dict.fromkeys(entry.ranks for entry in entries):
        screen.text()
        screen.title(f"{ranks:,} ranks")
        columns = (Column("scheme", False), Column("layout", False), *map(Column, HEADS), Column("", False))
        mine = [entry for entry in entries if entry.ranks == ranks]
        screen.table(columns, list(_rows(mine)))
        screen.text()
        screen.text(verdict(mine))
    screen.text()
    known = entries[0].reason.workspace_bytes is not None
    kernels = (
        "with what kernels allocate inside" if known else "without what kernels allocate inside, which is not known"
    )
    notes = [
        f"Simulated on {workload.machine.name}, quickest first. Received: the most bytes of any rank, both passes."
        " Fewer: PyTorch's all-gather receives this many times as much. Memory: beside the rank's own tensors,"
        f" {kernels}; of ranks likely to be busiest, at most five: another may need somewhat more.",
        "PyTorch's are priced as our own schedules of that name over zigzag (its head-tail): the same bytes, and our"
        " kernels, copies and overlap.",
    ]
    if plot is not None:
        notes.append(f"Curves: {plot}")
    screen.notes(notes)


def _rows(entries: list[Entry]) -> Iterator[Row]:
    reasons = [entry.reason for entry in entries]
    columns = (
        bytes_alike([reason.bytes_received for reason in reasons]),
        [times(entry.fewer) if entry.fewer != float("inf") else "no bytes" for entry in entries],
        bytes_alike([entry.memory for entry in entries]),
        seconds_alike([reason.forward_seconds for reason in reasons]),
        seconds_alike([reason.backward_seconds for reason in reasons]),
    )
    for entry, *cells in zip(entries, *columns, strict=True):
        yield Row((entry.scheme, entry.layout, f"{entry.imbalance:.3f}", *cells, entry.note), entry.chosen)


def plot(entries: list[Entry], workload: Workload, path: Path) -> None:
    """Draw curves over the numbers of ranks: the quickest, PyTorch's, and each scheme over its quickest layout."""
    from longspan.cli.show import write as write_scene
    from longspan.viz.scaling import ScalingPoint, scaling_picture

    points: list[ScalingPoint] = []
    for ranks in dict.fromkeys(entry.ranks for entry in entries):
        mine = [entry for entry in entries if entry.ranks == ranks]  # quickest first
        named = {"quickest": mine[0]}
        named |= {f"PyTorch {entry.scheme}": entry for entry in mine if entry.note}
        for entry in mine:
            named.setdefault(entry.scheme.partition("(")[0], entry)
        for name, entry in named.items():
            reason = entry.reason
            points.append(ScalingPoint(name, ranks, reason.seconds, reason.bytes_received, reason.peak_bytes))
    points.sort(key=lambda point: (point.scheme != "quickest", not point.scheme.startswith("PyTorch")))
    remark = f"{workload.about_docs()}; {workload.about_tensors()}; simulated on {workload.machine.name}"
    remark += f" ({workload.machine.kernel or 'kernel not named'}), not run."
    scene = scaling_picture(points, title=f"{workload.seq_len:,} tokens on more and more ranks", remark=remark)
    write_scene(scene, path.suffix.lower()[1:], path)


def verdict(entries: list[Entry]) -> str:
    """Compare the quickest with PyTorch's all-gather in a sentence."""
    best = entries[0]
    theirs = next(entry for entry in entries if (entry.scheme, entry.layout) == TORCH[0])
    if best is theirs:
        return "Nothing is quicker than PyTorch's all-gather here."
    moved = bytes_against(best.reason.bytes_received, theirs.reason.bytes_received, "PyTorch's all-gather")
    memory = memory_against(best.memory, theirs.memory)
    text = f"{best.scheme} over {best.layout}: {moved}, predicted"
    text += f" {times(theirs.reason.seconds / best.reason.seconds)} as fast"
    return text + (f", with {memory}." if memory else ".")
