"""Traces that Perfetto (ui.perfetto.dev) and chrome://tracing open: a rank is a process, its computes are one track and
the messages from each peer another. Planned and measured traces have the same form, so that both open side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.schedules.cost.simulator import simulate
from longspan.schedules.plan import Plan

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
