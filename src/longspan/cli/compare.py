"""Every scheme over every layout, side by side, at several numbers of ranks.

PyTorch's context parallelism is among them, over its own load balancers: flex attention for every mask, and for one
causal or full sequence also the ring and the all-gather of scaled_dot_product_attention. Column `fewer`: how many times
the bytes of a row PyTorch's best row receives.

  longspan compare --seq 1M --ranks 8,64 --docs longtail --plot scaling.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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
from longspan.formatting import bytes_in_one_unit, seconds_in_one_unit
from longspan.planning.choose import TIE, Reason, candidates
from longspan.planning.plan import Plan, PlanRequest, build_plan
from longspan.planning.planners import PLANNERS
from longspan.planning.problem import Problem
from longspan.planning.steps import Role, Sizes

FLEX = "PyTorch flex"
FLEX_LAYOUTS = ("zigzag", "contiguous", "per_document", "round_robin_by_work")
"""PyTorch's balancers for flex attention: head-tail, none, per document (from 2.15 on), PTRR."""
PLOTS = (".svg", ".png")
CURVES = 3
"""Numbers of ranks from which curves are drawn instead of bars."""


class Case(NamedTuple):
    """What to price; `note` names PyTorch's variant, and is empty for Longspan's schemes."""

    ranks: int
    layout: str
    scheme: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """The figures of one scheme over one layout, as `longspan.plan` gives them."""

    ranks: int
    layout: str
    scheme: str
    note: str
    imbalance: float
    reason: Reason
    chosen: bool = False
    fewer: float = 1.0
    """Bytes that PyTorch's best row receives, over those of this entry."""

    @property
    def memory(self) -> int:
        """The peak without a rank's own tensors, with what kernels allocate inside, where that is known."""
        return self.reason.peak_bytes + (self.reason.workspace_bytes or 0)

    @property
    def name(self) -> str:
        return self.note or self.scheme


class _FlexSizes(Sizes):
    """Sizes for PyTorch's flex attention, which sums gradients of K and V over ranks in the dtype of the tensors."""

    __slots__ = ()

    def row_bytes(self, role: Role) -> int:
        return super().row_bytes(Role.KV if role is Role.DKV else role)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, ranks="many", layout=False)
    which = parser.add_argument_group("what to compare")
    text = "names such as ring,hybrid(4,exchange), or all (exchange, all_gather, ring, all_to_all, widest hybrids)"
    which.add_argument("--schemes", type=schemes, help=text)
    which.add_argument("--layouts", help=f"names separated by commas, of {', '.join(LAYOUTS)}")
    which.add_argument(
        "--plot",
        type=to_write(*PLOTS),
        metavar="FILE",
        help=f"draw bars, or curves over {CURVES} or more numbers of ranks ({', '.join(PLOTS)})",
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


def _cases(workload: Workload, args: argparse.Namespace) -> Iterator[Case]:
    """Yield everything to compare; PyTorch's are always included."""
    for name in () if args.layouts is None else args.layouts.split(","):
        if name not in LAYOUTS:
            raise PlanError(f"--layouts must be of {', '.join(LAYOUTS)}, but got {name!r:.40}.")
    default = ("balanced", "zigzag", "contiguous") + (("per_document",) if len(workload.lengths) > 1 else ())
    layouts = default if args.layouts is None else tuple(args.layouts.split(","))
    for ranks in dict.fromkeys(args.ranks):
        names = list(_schemes(workload, ranks, args.schemes))
        yield from dict.fromkeys(
            [*_torch_cases(workload, ranks, layouts)]
            + [Case(ranks, layout, scheme) for layout in layouts for scheme in names]
        )


def _torch_cases(workload: Workload, ranks: int, layouts: tuple[str, ...]) -> Iterator[Case]:
    """Yield what PyTorch's context parallelism can do with the mask.

    Its round-robin balancer is included on request only: planning a layout of blocks takes long, and head-tail, or
    per document, already gives all ranks the same work.
    """
    usual = ("zigzag", "contiguous") + (("per_document",) if len(workload.lengths) > 1 else ())
    for layout in FLEX_LAYOUTS:
        if layout in (*usual, *layouts):
            yield Case(ranks, layout, "all_gather", FLEX)
    if _is_plain(workload):
        layout = "contiguous" if workload.docs == "full" else "zigzag"
        for scheme in ("all_gather", "ring"):
            yield Case(ranks, layout, scheme, f"PyTorch {scheme}")


def _is_plain(workload: Workload) -> bool:
    """Return whether scaled_dot_product_attention can express the mask: one sequence, causal or full."""
    return len(workload.lengths) == 1 and workload.window is None


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


def compare(workload: Workload, cases: list[Case], advance: Callable[[str], None]) -> list[Entry]:
    """Return the entries of all cases, by number of ranks, then as `by_preference` sorts them."""
    entries: list[Entry] = []
    for ranks in dict.fromkeys(case.ranks for case in cases):
        mine: list[Entry] = []
        for case in cases:
            if case.ranks == ranks:
                advance(f"{ranks} ranks, {case.note or case.scheme} over {case.layout}")
                plan = _plan(workload, case)
                mine.append(Entry(*case, plan.imbalance, plan.reasons[0]))
        mine = by_preference(mine)
        base = best_of_torch(mine).reason.bytes_received
        for number, entry in enumerate(mine):
            received = entry.reason.bytes_received
            fewer = base / received if received else float("inf") if base else 1.0
            entries.append(replace(entry, chosen=number == 0, fewer=fewer))
    return entries


def _plan(workload: Workload, case: Case) -> Plan:
    """Return the plan whose predictions are those of the case.

    PyTorch's SDPA fetches K and V again in backward, and sends their gradients in float32, as our schemes do. Its flex
    attention gathers K and V once and keeps them for backward.
    """
    plan = workload.plan(case.ranks, case.scheme, case.layout)
    if not case.note:
        return plan
    is_flex = case.note == FLEX
    sizes = _FlexSizes(*astuple(plan.sizes)) if is_flex else plan.sizes
    request = PlanRequest(plan.layout, sizes, plan.dtype, case.scheme, plan.machine, plan.machine_assumed, keep=is_flex)
    return build_plan(workload.mask, request)


def by_preference(entries: list[Entry]) -> list[Entry]:
    """Sort by time; of entries within 1% of each other, which the model cannot distinguish, by bytes, then memory."""
    left, ordered = sorted(entries, key=lambda entry: entry.reason.seconds), list[Entry]()
    while left:
        limit = left[0].reason.seconds * (1 + TIE)
        tied = [entry for entry in left if entry.reason.seconds <= limit]
        ordered += sorted(tied, key=lambda entry: (entry.reason.bytes_received, entry.memory))
        left = left[len(tied) :]
    return ordered


def best_of_torch(entries: list[Entry]) -> Entry:
    """Return PyTorch's best entry of those that `by_preference` sorted."""
    return next(entry for entry in entries if entry.note)


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
        "fewer_bytes_than_torch": entry.fewer if entry.fewer != float("inf") else None,
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
        columns = (Column("scheme", False), Column("layout", False), *map(Column, HEADS))
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
        f"Simulated on {workload.machine.name}, quickest first; of rows within 1%, those with fewest bytes, then least"
        " memory. Received: the most bytes of any rank, both passes. Fewer: PyTorch's best row receives this many times"
        f" as much. Memory: in addition to the rank's own tensors, {kernels}; of ranks likely to be busiest, at most"
        " five: another may need somewhat more.",
        *torch_notes(workload, {entry.ranks for entry in entries}),
    ]
    if plot is not None:
        notes.append(f"Picture: {plot}")
    screen.notes(notes)


def _rows(entries: list[Entry]) -> Iterator[Row]:
    reasons = [entry.reason for entry in entries]
    columns = (
        bytes_in_one_unit([reason.bytes_received for reason in reasons]),
        [times(entry.fewer) if entry.fewer != float("inf") else "no bytes" for entry in entries],
        bytes_in_one_unit([entry.memory for entry in entries]),
        seconds_in_one_unit([reason.forward_seconds for reason in reasons]),
        seconds_in_one_unit([reason.backward_seconds for reason in reasons]),
    )
    for entry, *cells in zip(entries, *columns, strict=True):
        yield Row((entry.name, entry.layout, f"{entry.imbalance:.3f}", *cells), entry.chosen)


def torch_notes(workload: Workload, ranks: set[int]) -> list[str]:
    """Return what PyTorch's rows assume, and what PyTorch refuses of this workload."""
    notes = [
        "PyTorch's rows have its bytes, and our kernels, copies and overlap. Its flex attention gathers K and V once"
        " and keeps them; its load balancers are zigzag (head-tail), contiguous (none), per_document (from 2.15 on;"
        " that of 2.13 does not balance) and round_robin_by_work (only with --layouts)."
    ]
    if not _is_plain(workload):
        masks = "documents" if len(workload.lengths) > 1 else "windows"
        notes.append(f"PyTorch's ring and all-gather of scaled_dot_product_attention cannot express {masks}.")
    elif workload.docs == "full":
        notes.append("PyTorch's ring and all-gather of scaled_dot_product_attention balance causal masks only.")
    odd = sorted(size for size in ranks if workload.seq_len % (128 * size))
    if odd:
        notes.append(
            f"PyTorch's flex attention refuses {workload.seq_len:,} tokens on {', '.join(map(str, odd))} ranks: the"
            " length must be a multiple of 128 x ranks. Its rows are priced without the padding."
        )
    uneven = sorted(size for size in ranks if (workload.lengths % (2 * size)).any())
    if len(workload.lengths) > 1 and uneven:
        notes.append(
            "PyTorch's per-document balancer refuses these documents: their lengths must be multiples of 2 x ranks."
            " Its rows are priced without the padding."
        )
    return notes


def plot(entries: list[Entry], workload: Workload, path: Path) -> None:
    """Draw bars, or curves over the numbers of ranks: PyTorch's, and each scheme over its best layout."""
    from longspan.cli.show import write as write_scene
    from longspan.viz.scaling import ScalingPoint, bars_picture, scaling_picture

    numbers = list(dict.fromkeys(entry.ranks for entry in entries))
    are_curves = len(numbers) >= CURVES
    points: list[ScalingPoint] = []
    for ranks in numbers:
        named: dict[str, Entry] = {}
        for entry in entries:  # the best one first
            if entry.ranks == ranks:
                named.setdefault(entry.note or entry.scheme.partition("(")[0], entry)
        for name, entry in named.items():
            reason, label = entry.reason, name if are_curves else f"{entry.name}, {entry.layout}"
            points.append(ScalingPoint(label, ranks, reason.seconds, reason.bytes_received, entry.memory))
    remark = f"{workload.about_docs()}; {workload.about_tensors()}; simulated on {workload.machine.name}"
    remark += f" ({workload.machine.kernel or 'kernel not named'}), not run."
    title = f"{workload.seq_len:,} tokens on {' and '.join(map(str, numbers))} ranks"
    if are_curves:
        points.sort(key=lambda point: not point.scheme.startswith("PyTorch"))
        scene = scaling_picture(points, title=f"{workload.seq_len:,} tokens on more and more ranks", remark=remark)
    else:
        scene = bars_picture(points, title=title, remark=remark)
    write_scene(scene, path)


def verdict(entries: list[Entry]) -> str:
    """Compare the best entry with PyTorch's best in a sentence."""
    best, theirs = entries[0], best_of_torch(entries)
    variant = f"{theirs.note.removeprefix('PyTorch ')} over {theirs.layout}"
    if best is theirs:
        return f"Nothing is quicker than PyTorch's {variant} here."
    name = f"PyTorch's best row ({variant})"
    moved = bytes_against(best.reason.bytes_received, theirs.reason.bytes_received, name)
    memory = memory_against(best.memory, theirs.memory)
    factor = theirs.reason.seconds / best.reason.seconds
    text = f"{best.scheme} over {best.layout}: {moved}, predicted"
    text += " as fast" if abs(factor - 1) <= TIE else f" {times(factor)} as fast"
    return text + (f", with {memory}." if memory else ".")
