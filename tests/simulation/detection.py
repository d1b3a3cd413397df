"""The production failure detector (`watch.detector`) in a simulated world of hosts, processes and a store.

Ranks make calls of a few steps; each step sends, computes, and waits for messages. Every rank runs the very `Detector`
that a real one runs, with the same turns and looks, on a clock of its own. Things happen: a rank is killed or stopped,
holds the lock for minutes, everybody stands still, clocks jump, the store is slow or lost, a host goes. `World.run`
gives how every rank ended. Everything comes from the seed. What is not simulated: threads, sockets, Gloo itself.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from longspan.watch.detector import BEAT, DELIVERY, LOOK, Detector, Direction, Phase, Request, Verdict
from longspan.watch.processes import GONE, HEARTBEAT, HEARTBEAT_MAGIC, STOPPED, Process, ProcessState

HARMLESS = ("nothing", "lock", "all stand still", "short stop", "clock", "slow store", "late messages")
STRIKES = ("kill", "stop", "host", "raise")
KINDS = (*HARMLESS, *STRIKES, "two kills", "store killed", "store stopped")
LAUNCHER = -1
"""The number of the process that is no rank."""
TIMEOUT = 3600.0
FIRST = 100
"""The number of rank 0's process."""


@dataclass
class Virtual:
    """A process: it runs, stands still until some moment, or is gone."""

    process: Process
    state: str = "R"
    until: float = 0.0


class Rank:
    """One rank: where it is in its program, what has arrived, and its detector."""

    def __init__(self, number: int, world: World) -> None:
        self.number, self.world = number, world
        self.process = world.processes[number]
        store = world.processes[world.holder]
        near = store.process.host == self.process.process.host
        names = range(world.size)
        look_at = partial(world.look_from, self.process.process.host)
        self.detector = Detector(number, names, self.process.process, store.process if near else None, look_at)
        self.call = self.step = self.num_waits = 0
        self.wait = -1
        self.box: set[tuple[int, int, int]] = set()
        self.left: list[int] = []
        """Ranks whose messages are waited for, in order."""
        self.broken: int | None = None
        self.broken_looks = 0
        self.closed: set[int] = set()
        """Ranks whose connection is known to be closed: nothing can be begun with them."""
        self.unstarted: tuple[int, ...] = ()
        """The ranks of messages that could not be begun, because of one of them."""
        self.jump = 0.0
        self.waits_since = self.needs_since = 0.0
        """Since when it waits, and since when for the rank that it waits for now."""
        self.watched = False
        self.ended: float | None = None
        self.finding: Verdict | None = None

    def clock(self) -> float:
        return self.world.now + self.jump

    # -- its program ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The next step, or the next call, or the end."""
        world = self.world
        self.step += 1
        if self.call == 0 or self.step >= world.num_steps:
            self.call, self.step = self.call + 1, 0
        if self.call > world.num_calls:
            return self.finish()
        if self.step == 0:
            self.detector.status = self.detector.status.enter(self.call, 1, "")
        self.detector.status = replace(
            self.detector.status, direction=Direction.FORWARD, step=self.step, num_steps=world.num_steps,
            phase=Phase.RUNNING,
        )  # fmt: skip
        if world.kind == "raise" and self.number == world.victim and self.call == 2:
            world.strike_time = world.now
            return self.raises(Verdict(self.number, f"rank {self.number} raised ValueError"))
        if (self.number, self.call, self.step) == (max(world.victim, 0), world.strike_call, 0):
            world.at(world.now + world.draw.random() * 2 * world.work, world.strike)
        targets = world.targets(self.number, self.step)
        peers = (*world_sources(world, self.number, self.step), *targets)
        self.unstarted = peers if any(self.lacks(peer) for peer in peers) else ()
        for dst in () if self.unstarted else targets:
            world.send(dst, (self.call, self.step, self.number))
        return world.soon(self.number, world.drawn(world.work), self.waits)

    def waits(self) -> None:
        self.left = world_sources(self.world, self.number, self.step)
        self.num_waits += 1
        self.wait += 1
        self.waits_since = self.world.now
        self.detector.status = replace(self.detector.status, phase=Phase.WAITING)
        self.detector.begin_wait(self.clock(), self.unstarted or self.left, TIMEOUT)
        self.needs_since = self.world.now
        self.world.soon(self.number, BEAT / 4, self.look, self.wait)
        self.progress()

    def progress(self) -> None:
        """Takes what has arrived, in the order in which it is waited for."""
        if self.ended is not None or self.detector.wait is None or self.unstarted:
            return
        while self.left and (self.call, self.step, self.left[0]) in self.box:
            self.left.pop(0)
            self.num_waits += 1
            self.broken = None
            self.needs_since = self.world.now
        if not self.left:
            self.detector.wait = None
            self.wait += 1
            self.detector.status = replace(self.detector.status, phase=Phase.IDLE)
            self.begin()

    def lacks(self, peer: int) -> bool:
        """Whether messages with a rank cannot be begun; what it sent before has arrived."""
        return peer in self.closed and (self.call, self.step, peer) not in self.box

    def look(self, wait: int) -> None:
        if wait != self.wait or self.ended is not None:
            return None
        self.detector.warning()
        current = self.number if self.unstarted else self.left[0]
        broken = bool(self.unstarted) or self.broken == current
        found = self.detector.check(self.clock(), current, self.num_waits, broken=broken)
        self.broken_looks += broken
        if found is None and self.broken_looks > (self.detector.patience + DELIVERY) / (BEAT / 4):
            found = self.detector.explain_failure(current, "connection closed")
        if found is not None:
            return self.raises(found)
        return self.world.soon(self.number, BEAT / 4, self.look, wait)

    def raises(self, found: Verdict) -> None:
        """The first finding counts for all, as far as the store can still be asked."""
        world = self.world
        if found.rank >= 0 and world.store_answers(2 * BEAT):
            first = world.store.setdefault("fault", Verdict(found.rank, found.text).pack())
            found = replace(found, rank=Verdict.parse(first, world.size).rank)
        self.finding, self.ended = found, world.now
        self.detector.wait = None
        if world.draw.random() < 0.5:  # others learn of it by the store, and by connections that are closed
            world.soon(self.number, 0.75 if world.holder == self.number else 0.3, self.leave)

    def finish(self) -> None:
        self.ended = self.world.now
        if self.world.holder == self.number:
            self.world.store["closes"] = b"1"
            return self.world.soon(self.number, 5.0, self.leave)
        return self.leave()

    def leave(self) -> None:
        """The process ends in good order."""
        if self.world.store_answers(2 * BEAT):
            last = replace(self.detector.status, phase=Phase.ENDED, beat=self.detector.beat + 1)
            self.world.store[f"status/{self.number}"] = last.pack()
        self.process.state = GONE
        self.world.connections_close(self.number)

    # -- its thread and its watcher ---------------------------------------------------------------------------------

    def live(self) -> None:
        """A turn with the store, question by question."""
        self.converse(self.detector.exchange(self.clock), None)

    def converse(self, turn: Any, answer: bytes | None) -> None:
        try:
            question = turn.send(answer)
        except StopIteration:
            if not self.detector.is_single_host and not self.watched:
                self.watched = True
                self.world.at(self.world.now + self.world.draw.uniform(0.05, 1.0), self.watcher, 1)
            return self.world.soon(self.number, BEAT if self.detector.wait is None else LOOK, self.live)
        self.detector.mark_request_sent(self.clock())
        return self.world.asked(self, question, turn)

    def answered(self, turn: Any, answer: bytes | None) -> None:
        self.detector.mark_answered(self.clock())
        self.converse(turn, answer)

    def lost(self) -> None:
        self.detector.lost = "connection reset"

    def watcher(self, number: int) -> None:
        """The process beside it, which its own troubles do not touch, but those of its host do."""
        world = self.world
        if self.process.process.host in world.lost_hosts:
            return None
        if world.watchers_until > world.now:
            return world.at(world.watchers_until + world.draw.uniform(0, 0.2), self.watcher, number)
        if not world.store_answers(math.inf):
            return world.at(world.now + BEAT, self.watcher, number)
        sight = world.look_at(self.process.process)
        world.at(world.now + world.latency() / 2, self.written, number, sight)
        if sight.state != GONE:
            world.at(world.now + BEAT + world.latency(), self.watcher, number + 1)
        return None

    def written(self, number: int, sight: ProcessState) -> None:
        self.world.store[f"heartbeat/{self.number}"] = HEARTBEAT.pack(
            HEARTBEAT_MAGIC, number, sight.state.encode(), sight.seconds
        )


def world_sources(world: World, rank: int, step: int) -> list[int]:
    return [src for src in range(world.size) if rank in world.targets(src, step)]


class World:
    """Hosts with processes, a store, and one thing that happens."""

    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)  # nosec B311  # delays, not secrets
        draw = self.draw
        self.kind = KINDS[seed % len(KINDS)]
        self.size = draw.choice((2, 3, 4, 6))
        self.num_calls, self.num_steps = draw.randint(3, 6), draw.randint(1, 3)
        self.to_all, self.work = draw.random() < 0.4, draw.choice((0.01, 0.2, 1.5))
        if self.kind == "host":  # its watchers have begun when it goes
            self.num_calls, self.work = 9, 1.2
        self.strike_call = draw.randint(1, self.num_calls) if self.kind != "host" else 7
        hosts = draw.randint(2, 3) if self.kind == "host" else draw.choice((1, 1, 2, 3))
        self.victim = draw.randrange(self.size)
        # A rank that holds the store closes it at its end: others cannot tell any more then that they have finished.
        steady = self.kind not in (*HARMLESS[1:], "host")
        self.holder = 0 if steady and draw.random() < 0.3 else LAUNCHER
        places = {rank: rank * hosts // self.size for rank in range(self.size)} | {LAUNCHER: 0}
        self.processes = {
            number: Virtual(Process(bytes([place + 1]) * 16, FIRST + number, 7)) for number, place in places.items()
        }
        if self.kind == "host" and places[self.victim] == 0:
            self.victim = self.size - 1
        self.is_slow = self.kind == "slow store"
        far = any(p.process.host != self.processes[self.holder].process.host for p in self.processes.values())
        self.slowness = draw.uniform(0.1, 0.4) if far else draw.uniform(0.1, 20.0)
        self.now, self.strike_time, self.watchers_until = 0.0, math.inf, 0.0
        self.store: dict[str, bytes] = {}
        self.flying: Counter[tuple[int, int]] = Counter()
        """Messages on their way, by source and target."""
        self.store_end = math.inf
        self.lost_hosts: set[bytes] = set()
        self.was_watched = True
        """Whether a watcher had begun to look at the victim when it was struck."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self.ranks = [Rank(number, self) for number in range(self.size)]

    def run(self) -> list[Rank]:
        """All ranks, when each has ended or nothing happens any more."""
        for rank in self.ranks:
            self.at(self.draw.random() * 0.5, rank.live)
            self.at(0.5 + self.draw.random() * 0.5, rank.begin)
        while self._heap and self.now < 4000 and not self._is_over():
            for _ in range(min(16, len(self._heap))):
                self.now, _, act, arguments = heapq.heappop(self._heap)
                act(*arguments)
        return self.ranks

    def _is_over(self) -> bool:
        still = (GONE, STOPPED)
        return all(r.ended is not None or (r.process.state in still and not r.process.until) for r in self.ranks)

    # -- what happens -----------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """The one thing of this seed."""
        draw, victim, kind = self.draw, self.processes[self.victim], self.kind
        if kind.startswith("store") and self.holder >= 0 and self.ranks[self.holder].ended is not None:
            return  # it has said goodbye
        if kind != "raise":
            self.strike_time = self.now
        self.was_watched = f"heartbeat/{self.victim}" in self.store
        long = draw.choice((0.5, 3.0, 10.0, 10.0, draw.uniform(30, 200) if self.seed % 16 == 0 else 5.0))
        if kind == "lock":
            victim.until = self.now + long
        elif kind == "short stop":
            self.stop(self.victim, draw.uniform(0.1, 1.0))
        elif kind == "all stand still":
            seconds = long
            for rank in self.ranks:
                self.at(self.now + draw.uniform(0, 0.2), self.stop, rank.number, seconds + draw.uniform(-0.2, 0.2))
            self.watchers_until = self.now + seconds
        elif kind == "clock":
            self.ranks[self.victim].jump += draw.uniform(0.1, 300)
        elif kind in ("kill", "two kills"):
            self.kill(self.victim)
            if kind == "two kills":
                self.kill((self.victim + 1) % self.size)
        elif kind == "stop":
            self.stop(self.victim, None)
        elif kind == "host":
            host = victim.process.host
            self.lost_hosts.add(host)
            for number, process in self.processes.items():
                if process.process.host == host:
                    self.kill(number, told=False)
        elif kind.startswith("store"):
            if self.holder == LAUNCHER or kind == "store stopped":
                self.stop(self.holder, None)
            if kind == "store killed":
                self.kill(self.holder)
            self.victim = self.holder

    def stop(self, number: int, seconds: float | None) -> None:
        process = self.processes[number]
        if process.state == GONE:
            return
        process.state, process.until = STOPPED, 0.0 if seconds is None else self.now + seconds
        if seconds is not None:
            self.at(process.until, self.go_on, number)
        elif number == self.holder:
            self.store_end = self.now

    def go_on(self, number: int) -> None:
        if self.processes[number].state == STOPPED:
            self.processes[number].state = "R"

    def kill(self, number: int, *, told: bool = True) -> None:
        """Ends a process; the others' connections break, unless its host went with it, or a message was half sent."""
        self.processes[number].state, self.processes[number].until = GONE, 0.0
        if number == self.holder:
            self.store_end = self.now
        if told and number >= 0:
            self.connections_close(number)

    def connections_close(self, number: int) -> None:
        for rank in self.ranks:
            if self.draw.random() < 0.8:
                self.at(self.now + self.drawn(0.05) + 0.01, self.breaks, rank, number)

    def breaks(self, rank: Rank, number: int) -> None:
        """A connection is found closed; what had been sent before has arrived."""
        if self.flying[number, rank.number]:
            return self.at(self.now + 0.01, self.breaks, rank, number)
        rank.closed.add(number)
        if (rank.call, rank.step, number) not in rank.box:
            rank.broken, rank.broken_looks = number, 0
        return None

    # -- messages and time ------------------------------------------------------------------------------------------

    def targets(self, rank: int, step: int) -> list[int]:
        if self.to_all:
            return [dst for dst in range(self.size) if dst != rank]
        return [(rank + step % (self.size - 1) + 1) % self.size]

    def send(self, dst: int, message: tuple[int, int, int]) -> None:
        late = self.kind == "late messages" and self.draw.random() < 0.3  # a crowded machine: nobody reads them yet
        delay = self.draw.uniform(0, 20) if late else self.drawn(0.005)
        self.flying[message[2], dst] += 1
        self.at(self.now + delay, self.arrives, self.ranks[dst], message)

    def arrives(self, rank: Rank, message: tuple[int, int, int]) -> None:
        rank.box.add(message)
        self.flying[message[2], rank.number] -= 1
        self.soon(rank.number, self.draw.random() * 0.01, rank.progress)

    def soon(self, number: int, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Something that a rank does itself: it needs its process for it."""
        self.at(self.now + seconds, self._done_by, number, act, *arguments)

    def _done_by(self, number: int, act: Callable[..., None], *arguments: Any) -> None:
        process = self.processes[number]
        if process.state == GONE or (process.state == STOPPED and not process.until):
            return
        if process.until > self.now:
            self.at(process.until + self.draw.random() * 0.05, self._done_by, number, act, *arguments)
            return
        act(*arguments)

    def at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._numbers), act, arguments))

    def drawn(self, mean: float) -> float:
        return mean * self.draw.random() * (5 if self.draw.random() < 0.05 else 1)

    # -- the store and processes ------------------------------------------------------------------------------------

    def latency(self) -> float:
        slow = self.is_slow and self.now > self.strike_time
        return self.draw.random() * (self.slowness if slow else 0.002)

    def store_answers(self, within: float) -> bool:
        return self.now < self.store_end and not (
            within < self.slowness and self.is_slow and self.now > self.strike_time
        ) and self.processes[self.holder].state == "R"  # fmt: skip

    def asked(self, rank: Rank, question: Request, turn: Any) -> None:
        self.at(self.now + self.latency() / 2, self._served, rank, question, turn)

    def _served(self, rank: Rank, question: Request, turn: Any) -> None:
        holder = self.processes[self.holder]
        if holder.state == GONE:
            return self.soon(rank.number, 0.001, rank.lost)
        if holder.state == STOPPED or self.now >= self.store_end:
            return None  # no answer, ever
        what, key, value = question
        if what == "claim":
            answer = self.store.setdefault(key, value)
        elif what == "set":
            self.store[key], answer = value, None
        else:
            answer = self.store.get(key)
        return self.soon(rank.number, self.latency() / 2, rank.answered, turn, answer)

    def look_from(self, host: bytes, process: Process) -> ProcessState:
        """A look at a process of one's own host; what has its number elsewhere is another one."""
        return self.look_at(process) if process.host == host else ProcessState("R")

    def look_at(self, process: Process) -> ProcessState:
        return ProcessState(self.processes[process.pid - FIRST].state, self.now / 2)
