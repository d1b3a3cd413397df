"""The planned timeline, message by message, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

  longspan trace --seq 64k --ranks 8 --docs longtail --out plan.json

`torchrun -m longspan bench` writes the measured one in the same form, so that both open side by side. A rank is a
process; its computes, with the packing and unpacking of messages, are one track, and the messages from each peer
another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.cli.output import Column, Row, Screen, print_json, progress, screen_of, to_write
from longspan.cli.workload import Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import PlanError
from longspan.formatting import bytes_text, format_count, seconds_text
from longspan.planning.plan import Plan
from longspan.planning.simulator import simulate

COMPUTE, MESSAGE, WAIT = "compute", "message", "wait"
DIRECTIONS = ("forward", "backward")
MAX_RANKS = 256
"""Every rank and message is simulated: 256 ranks take a minute."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What a rank did from `start` to `stop`, in seconds; of a message, `rank` is the receiver."""

    rank: int
    direction: str
    step: int
    kind: str
    start: float
    stop: float
    peer: int = -1
    num_bytes: int = 0

    @property
    def track(self) -> int:
        """0 for the rank's own work, r + 1 for messages from rank r."""
        return self.peer + 1 if self.kind == MESSAGE else 0


def trace(slices: Iterable[Slice], num_ranks: int, about: dict[str, Any]) -> dict[str, Any]:
    """Return the trace as a JSON object."""
    slices = list(slices)
    events: list[dict[str, Any]] = []

    def add_name(kind: str, rank: int, track: int, text: str) -> None:
        events.append({"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": text}})

    for rank in range(num_ranks):
        add_name("process_name", rank, 0, f"rank {rank}")
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for rank, track in sorted({(s.rank, s.track) for s in slices} | {(rank, 0) for rank in range(num_ranks)}):
        add_name("thread_name", rank, track, f"from rank {track - 1}" if track else "computes")
    for s in sorted(slices, key=lambda s: (s.start, s.rank, s.track)):
        events.append(
            {
                "ph": "X",
                "name": f"{s.direction} {s.step}" if s.kind in (COMPUTE, MESSAGE) else s.kind,
                "cat": s.kind,
                "pid": s.rank,
                "tid": s.track,
                "ts": round(s.start * 1e6, 3),
                "dur": round(max(s.stop - s.start, 0.0) * 1e6, 3),
                "args": {"step": s.step} | ({"bytes": s.num_bytes, "from": s.peer} if s.kind == MESSAGE else {}),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write(path: Path, trace: dict[str, Any]) -> None:
    path.write_text(json.dumps(trace, separators=(",", ":")) + "\n")


def busy(slices: Sequence[Slice], rank: int, kind: str, direction: str) -> float:
    """Return the seconds that a rank spent on one kind of slice in one pass."""
    return sum(s.stop - s.start for s in slices if (s.rank, s.kind, s.direction) == (rank, kind, direction))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--out", type=to_write(), required=True, metavar="FILE", help="where the trace goes")


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    if args.ranks > MAX_RANKS:
        raise PlanError(
            f"--ranks of a trace must be at most {MAX_RANKS}, since every rank and message is simulated, but got"
            f" {args.ranks}. Use `longspan plan` for more."
        )
    with progress(args, "simulating every rank"):
        plan = workload.plan(args.ranks)
        slices: list[Slice] = []
        seconds: dict[str, float] = {}
        begin = 0.0
        for direction in DIRECTIONS:
            timeline = simulate(plan.schedule(direction), plan.machine)
            for e in timeline.events:
                span = begin + e.start, begin + e.stop
                slices.append(Slice(e.rank, direction, e.step, e.kind, *span, e.peer, e.num_bytes))
            seconds[direction] = timeline.seconds
            begin += timeline.seconds
        about = describe(workload, plan, seconds, "simulated")
        write(args.out, trace(slices, args.ranks, about))
    if args.json:
        print_json("trace", {**about, "num_slices": len(slices), "file": str(args.out)})
    else:
        show(about, plan, slices, screen_of(args))
        screen_of(args).notes((f"Wrote {args.out}. Open it in ui.perfetto.dev or chrome://tracing.",))
    return 0


def describe(workload: Workload, plan: Plan, seconds: dict[str, float], how: str) -> dict[str, Any]:
    """Return what a trace shows, for its file, for JSON and for the screen."""
    return {
        "how": how,
        "workload": workload.as_json(),
        "ranks": plan.layout.world_size,
        "scheme": plan.scheme.name,
        "layout": plan.layout.name,
        "fingerprint": plan.fingerprint,
        "machine": plan.machine.name,
        "forward_seconds": seconds["forward"],
        "backward_seconds": seconds["backward"],
        "seconds": seconds["forward"] + seconds["backward"],
    }


def show(about: dict[str, Any], plan: Plan, slices: list[Slice], screen: Screen) -> None:
    """Print how long it takes, and what the first and last ranks do meanwhile."""
    workload, ranks = about["workload"], about["ranks"]
    screen.title(
        f"{workload['seq_len']:,} tokens on {format_count(ranks, 'rank')}: {about['scheme']} over {about['layout']}"
    )
    total = f"{seconds_text(about['forward_seconds'])} forward, {seconds_text(about['backward_seconds'])} backward"
    where = f"on {about['machine']}" if about["how"] == "simulated" else "here"
    screen.facts(((about["how"], f"{total}, {seconds_text(about['seconds'])} together, {where}"),))
    screen.text()
    if not slices:  # on GPUs only whole passes are measured
        return
    listed = list(range(ranks)) if ranks <= 16 else [*range(8), *range(ranks - 8, ranks)]
    rows: list[Row] = []
    for rank in listed:
        cells = [str(rank)]
        for direction in DIRECTIONS:
            spent = busy(slices, rank, COMPUTE, direction)
            cells += [seconds_text(spent), f"{spent / max(about[f'{direction}_seconds'], 1e-12):.0%}"]
        rows.append(Row((*cells, bytes_text(sum(plan.bytes_received(rank, direction) for direction in DIRECTIONS)))))
    heads = ("rank", "forward computes", "share", "backward computes", "share", "received")
    screen.table(tuple(map(Column, heads)), rows)
    if ranks > len(rows):
        screen.notes((f"(the first and last of {ranks} ranks)",))
    screen.text()
