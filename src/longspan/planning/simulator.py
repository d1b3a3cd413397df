"""Discrete-event simulator of whole schedules: time, bytes, memory, and whether the schedule can finish.

A rank enters a step, packs and offers its messages, computes, and unpacks and leaves when its computes are done and the
messages that are due have arrived. A message starts when both ends offer it, and waits for both ports of its link
level; anything may delay it. Messages that a rank starts in one step and that are due in one step are a batch; it
offers a batch when all messages of its batch before are done, as NCCL runs batches. If a host queues work for its
device, no step is left before all of it was queued (see `machine`). There is no other coupling between ranks, so a
schedule that finishes here under every delay cannot deadlock.

In a scan the messages of a step carry the results of its folds, so they are offered when these are done.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from longspan.errors import ScheduleError
from longspan.planning.cost import peak_bytes
from longspan.planning.machine import Count, Machine, queue_times, steps_work
from longspan.planning.scan_plan import held_bytes, step_seconds, step_work
from longspan.planning.scan_steps import ScanSchedule
from longspan.planning.steps import Schedule, table

Delay = Callable[[int, int, int], float]
"""Extra seconds of the message of a step from a source to a target."""


@dataclass(frozen=True, slots=True)
class Event:
    """A period in which a rank was busy: `compute`, `pack`, `unpack`, or a message seen from its target."""

    rank: int
    step: int
    kind: str
    start: float
    stop: float
    peer: int = -1
    num_bytes: int = 0


@dataclass
class Batch:
    """Messages that a rank starts in one step and that are due in one step: bytes by (source, target). All pieces
    between two ranks are one message."""

    step: int
    due: int
    messages: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    left: int = 0
    """Messages that are not done."""
    is_packed: bool = False


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation."""

    seconds: float
    finished: tuple[float, ...]
    bytes_received: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    events: tuple[Event, ...] = field(repr=False)


def simulate(
    schedule: Schedule | ScanSchedule, machine: Machine, delay: Delay | None = None, pairs_of: Count | None = None
) -> Timeline:
    """Simulate the schedule on the machine; raise ScheduleError, with the first stuck message, if it cannot finish.

    `pairs_of` is that of the problem: without it, all pairs on which a function decides are computed.
    """
    return _Simulation(schedule, machine, delay, pairs_of).run()


class _Simulation:
    def __init__(
        self, schedule: Schedule | ScanSchedule, machine: Machine, delay: Delay | None, pairs_of: Count | None
    ) -> None:
        self.schedule, self.machine, self.delay, self.pairs_of = schedule, machine, delay, pairs_of
        size = schedule.world_size
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        """Time, order of entry, and what happens then."""
        self.order = 0
        self.step = [-1] * size
        self.offered: dict[tuple[int, int, int, int], tuple[int, Batch]] = {}
        """Messages that one end has offered, by step, source, target and the step in which they are due."""
        self.ports: dict[tuple[int, int, str], float] = {}
        self.finished = [0.0] * size
        self.received = [0] * size
        self.events: list[Event] = []
        self.waiting: list[list[int]] = []
        """For each rank and step, how many messages, and its computes, keep the rank in it."""
        self.batches: list[list[Batch]] = []
        """For each rank, its batches in the order in which they are offered; those that are done are dropped."""
        self.busy: list[list[tuple[float, float, float]]] = []
        """For each rank, how long each step keeps its device busy: packing, computing, unpacking."""
        self.queued: list[list[float]] = []
        sizes: Any = schedule.sizes  # of the schedule's own kind, as its pieces are
        for rank, steps in enumerate(schedule.ranks):
            batches: dict[tuple[int, int], Batch] = {}
            for number, step in enumerate(steps):
                for t in step.transfers:
                    batch = batches.setdefault((number, t.early), Batch(number, number + t.early))
                    size = batch.messages.get((t.src, t.dst), 0) + t.piece.num_bytes(sizes)
                    batch.messages[t.src, t.dst] = size
            self.batches.append([batches[key] for key in sorted(batches)])
            self.waiting.append([1] * len(steps))
            for batch in self.batches[-1]:
                if batch.due >= len(steps):
                    raise ScheduleError(
                        f"{schedule.scheme} {schedule.direction}: rank {rank} has {len(steps)} steps, but messages of"
                        f" step {batch.step} are due in step {batch.due}, counted from 0."
                    )
                batch.left = len(batch.messages)
                self.waiting[-1][batch.due] += batch.left
            if isinstance(schedule, ScanSchedule):
                works = [step_work(step, rank) for step in schedule.ranks[rank]]
                busy = [
                    (step_seconds(step, schedule.sizes, machine, schedule.direction), 0.0, 0.0)
                    for step in schedule.ranks[rank]
                ]
            else:
                steps = schedule.ranks[rank]
                works = steps_work(steps, rank, schedule.sizes, machine, schedule.direction, pairs_of=self.pairs_of)
                busy = [work.parts(machine, schedule.direction) for work in works]
            self.busy.append(busy)
            self.queued.append(queue_times(works, machine))

    def _peak_bytes(self, rank: int) -> int:
        schedule = self.schedule
        if isinstance(schedule, ScanSchedule):
            return held_bytes(schedule.ranks[rank], rank, schedule.sizes, schedule.direction)
        kept = schedule.kept[rank] if schedule.kept else ()
        return peak_bytes(schedule.ranks[rank], rank, schedule.layout, schedule.sizes, schedule.direction, kept)

    def run(self) -> Timeline:
        for rank in range(self.schedule.world_size):
            self._enter(rank, 0, 0.0)
        while self.queue:
            now, _, event, data = heapq.heappop(self.queue)
            event(*data, now)
        self._check_done()
        peaks = tuple(self._peak_bytes(rank) for rank in range(self.schedule.world_size))
        return Timeline(max(self.finished), tuple(self.finished), tuple(self.received), peaks, tuple(self.events))

    def _enter(self, rank: int, number: int, now: float) -> None:
        self.step[rank] = number
        steps = self.schedule.ranks[rank]
        if number >= len(steps):
            self.finished[rank] = max(now, self.machine.call_seconds)
            return
        # The folds of a scan come before its messages, as packing does.
        pack, compute, _ = self.busy[rank][number]
        ready = now + pack
        if steps[number].transfers:
            self._at(ready, self._pack, rank, number)
        self._at(ready + compute, self._end_one, rank, number)
        if isinstance(self.schedule, ScanSchedule):
            self._add_event(rank, number, "compute", now, ready)
        else:
            self._add_event(rank, number, "pack", now, ready)
            if steps[number].computes:
                self._add_event(rank, number, "compute", ready, ready + compute)

    def _end_one(self, rank: int, number: int, now: float) -> None:
        """Count the computes of a step, or a message that is due in it, as done; leave the step with the last."""
        self.waiting[rank][number] -= 1
        if not self.waiting[rank][number]:
            done = now + self.busy[rank][number][2]
            self._add_event(rank, number, "unpack", now, done)
            self._enter(rank, number + 1, max(done, self.queued[rank][number]))

    def _pack(self, rank: int, number: int, now: float) -> None:
        for batch in self.batches[rank]:
            batch.is_packed |= batch.step == number
        if self.batches[rank][0].step == number:  # else earlier messages are still travelling
            self._offer(rank, now)

    def _offer(self, rank: int, now: float) -> None:
        """Offer the rank's first batch, if it is packed."""
        if not self.batches[rank] or not self.batches[rank][0].is_packed:
            return
        batch = self.batches[rank][0]
        for (src, dst), size in batch.messages.items():
            key = (batch.step, src, dst, batch.due)
            if key in self.offered:
                self._send(key, size, ((rank, batch), self.offered.pop(key)), now)
            else:
                self.offered[key] = rank, batch

    def _end_message(self, rank: int, batch: Batch, now: float) -> None:
        batch.left -= 1
        if not batch.left:
            del self.batches[rank][0]  # no other was offered
            self._offer(rank, now)
        self._end_one(rank, batch.due, now)

    def _add_event(self, rank: int, step: int, kind: str, start: float, stop: float) -> None:
        if stop > start:
            self.events.append(Event(rank, step, kind, start, stop))

    def _at(self, time: float, event: Callable[..., None], *data: Any) -> None:
        self.order += 1
        heapq.heappush(self.queue, (time, self.order, event, data))

    def _send(self, key: tuple[int, int, int, int], size: int, ends: Iterable[tuple[int, Batch]], now: float) -> None:
        number, src, dst, _ = key
        level = self.machine.level(src, dst)
        link = self.machine.links[level]
        out, into = (src, level, "out"), (dst, level, "in")
        # Messages travel in small packets, so each port works through its own queue and none blocks the other end.
        start = max(now, self.ports.get(out, 0.0))
        self.ports[out] = start + size / link.bandwidth
        self.ports[into] = max(now, self.ports.get(into, 0.0)) + size / link.bandwidth
        stop = max(self.ports[out], self.ports[into]) + link.latency
        stop += 0.0 if self.delay is None else self.delay(number, src, dst)
        self.received[dst] += size
        self.events.append(Event(dst, number, "message", start, stop, src, size))
        for end in ends:
            self._at(stop, self._end_message, *end)

    def _check_done(self) -> None:
        stuck = [rank for rank, steps in enumerate(self.schedule.ranks) if self.step[rank] < len(steps)]
        if not stuck:
            return
        rank = min(stuck, key=lambda r: self.step[r])
        waits = [key for key in sorted(self.offered) if rank in key[1:3] and key[3] >= self.step[rank]]
        step, src, dst, _ = waits[0] if waits else (self.step[rank], rank, rank, 0)
        raise ScheduleError(
            f"{self.schedule.scheme} {self.schedule.direction} cannot finish: {len(stuck)} of"
            f" {self.schedule.world_size} ranks wait forever; the first is rank {rank} in step {step}, for the message"
            f" from rank {src} to rank {dst}, which the other end never offers.\n"
            + table(self.schedule, mark=(rank, min(step, self.schedule.num_steps - 1)))
        )
