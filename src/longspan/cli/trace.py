"""The planned timeline, message by message, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

  longspan trace --seq 64k --ranks 8 --docs longtail --out plan.json

`torchrun -m longspan bench` writes the measured one in the same form.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.cli.output import Column, Row, Screen, many, print_json, progress, screen_of, to_write
from longspan.cli.workload import Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import PlanError
from longspan.formatting import bytes_text, seconds_text
from longspan.planning.plan import Plan
from longspan.planning.simulator import simulate

# Traces that Perfetto (ui.perfetto.dev) and chrome://tracing open: a rank is a process, its computes are one track and
# the messages from each peer another. Planned and measured traces have the same form, so that both open side by side.


COMPUTE, WAIT = "compute", "wait"
MESSAGE = "message"


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took a rank from `start` to `stop`, in seconds; of a message, `rank` is its target."""

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
        """The rank's own work is track 0; messages from rank r are track r + 1."""
        return self.peer + 1 if self.kind == MESSAGE else 0


def planned(plan: Plan) -> tuple[list[Slice], dict[str, float]]:
    """What the simulator sees on the plan's machine, backward after forward, and the seconds of each pass."""
    slices: list[Slice] = []
    took: dict[str, float] = {}
    begin = 0.0
    for direction in ("forward", "backward"):
        timeline = simulate(plan.schedule(direction), plan.machine)
        for e in timeline.events:
            times = begin + e.start, begin + e.stop
            slices.append(Slice(e.rank, direction, e.step, e.kind, *times, e.peer, e.num_bytes))
        took[direction] = timeline.seconds
        begin += timeline.seconds
    return slices, took


def trace(slices: Iterable[Slice], num_ranks: int, about: dict[str, Any]) -> dict[str, Any]:
    """The trace as an object to be written as JSON."""
    slices = list(slices)
    events: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for rank, track in sorted({(s.rank, s.track) for s in slices} | {(rank, 0) for rank in range(num_ranks)}):
        events.append(_name("thread_name", rank, track, f"from rank {track - 1}" if track else "computes"))
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


def _name(kind: str, rank: int, track: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": text}}


def write(path: Path, trace: dict[str, Any]) -> None:
    """Writes a trace."""
    path.write_text(json.dumps(trace, separators=(",", ":")) + "\n")


def busy(slices: Sequence[Slice], rank: int, kind: str, direction: str) -> float:
    """Seconds that a rank spent on one kind of slice in one pass."""
    return sum(s.stop - s.start for s in slices if (s.rank, s.kind, s.direction) == (rank, kind, direction))


# -- The command -------------------------------------------------------------------------------------------------------


MAX_RANKS = 256
"""Every rank is simulated, and so is every message between them: 256 ranks take a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--out", type=to_write(), required=True, metavar="FILE", help="where the trace goes")


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    if args.ranks > MAX_RANKS:
        raise PlanError(
            f"a trace of {args.ranks} ranks was asked for. Every rank and message is simulated, so this command takes"
            f" {MAX_RANKS} at most; `longspan plan` answers for more."
        )
    with progress(args, "simulating every rank"):
        plan = workload.plan(args.ranks)
        slices, took = planned(plan)
        about = described(workload, plan, took, "simulated")
        write(args.out, trace(slices, args.ranks, about))
    if args.json:
        print_json("trace", {**about, "num_slices": len(slices), "file": str(args.out)})
    else:
        show(about, plan, slices, screen_of(args))
        screen_of(args).notes((f"Wrote {args.out}. Open it in ui.perfetto.dev or chrome://tracing.",))
    return 0


def described(workload: Workload, plan: Plan, took: dict[str, float], how: str) -> dict[str, Any]:
    """What a trace shows, as the file, the JSON and the screen say it."""
    return {
        "how": how,
        "workload": workload.as_json(),
        "ranks": plan.layout.world_size,
        "scheme": plan.scheme.name,
        "layout": plan.layout.name,
        "fingerprint": plan.fingerprint,
        "machine": plan.machine.name,
        "forward_seconds": took["forward"],
        "backward_seconds": took["backward"],
        "seconds": took["forward"] + took["backward"],
    }


def show(about: dict[str, Any], plan: Plan, slices: list[Slice], screen: Screen) -> None:
    """How long it takes, and what every rank does meanwhile."""
    workload, ranks = about["workload"], about["ranks"]
    screen.title(f"{workload['seq_len']:,} tokens on {many(ranks, 'rank')}: {about['scheme']} over {about['layout']}")
    total = f"{seconds_text(about['forward_seconds'])} forward, {seconds_text(about['backward_seconds'])} backward"
    where = f"on {about['machine']}" if about["how"] == "simulated" else "here"
    screen.facts(((about["how"], f"{total}, {seconds_text(about['seconds'])} together, {where}"),))
    screen.text()
    if not slices:  # measured on GPUs, where nothing is taken apart
        return
    rows = [_row(rank, plan, slices, about) for rank in shown(ranks)]
    heads = ("rank", "forward computes", "share", "backward computes", "share", "received")
    screen.table(tuple(map(Column, heads)), rows)
    if ranks > len(rows):
        screen.notes((f"(the first and last of {ranks} ranks)",))
    screen.text()


def shown(ranks: int) -> list[int]:
    """All ranks of a few, or the first and last of many."""
    return list(range(ranks)) if ranks <= 16 else [*range(8), *range(ranks - 8, ranks)]


def _row(rank: int, plan: Plan, slices: list[Slice], about: dict[str, Any]) -> Row:
    cells = [str(rank)]
    for direction in ("forward", "backward"):
        spent = busy(slices, rank, COMPUTE, direction)
        cells += [seconds_text(spent), f"{spent / max(about[f'{direction}_seconds'], 1e-12):.0%}"]
    received = sum(plan.bytes_received(rank, direction) for direction in ("forward", "backward"))
    return Row((*cells, bytes_text(received)))
