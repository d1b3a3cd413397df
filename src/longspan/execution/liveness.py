"""Liveness: a thread that shows the others that this rank lives, and finds out why one of them does not come.

It speaks through the job's own store, in records of fixed layout. A rank that waits looks at the ranks it waits for;
who finds a fault writes it down for all, so that everybody raises the same message. Nothing is read while nobody waits.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from longspan.errors import RankError
from longspan.execution._torch import JobStore
from longspan.execution.records import Direction, Fault, Phase, Status

BEAT = 0.25
"""Seconds between signs of life."""
MANY = 2048
"""Ranks from which on signs of life become rarer: one store serves them all."""
LOOK = 0.1
"""Seconds between looks at others while waiting."""
LAGS = 4.0
"""How many times its own lateness a rank grants to others."""
LOOKS = 64
"""Ranks that are looked at in one go."""
GRACE = 0.5
"""Seconds for which a store host stays after a failure, so that all can read what happened."""
ADVICE = "End this process, so that the launcher can start all ranks again (torchrun --max-restarts)."


class Watch:
    """This rank's signs of life in one group, and its eye on the others."""

    def __init__(self, store: JobStore, rank: int, names: Sequence[int], *, world_size: int, hosts_store: bool) -> None:
        self.store, self.rank, self.names, self.size = store, rank, tuple(names), len(names)
        self.patience, self._lag = 2.0, 0.0
        self.status = Status()
        self.failed: str | None = None
        """Why this group cannot be used any more."""
        self._hosts_store = hosts_store
        self._interval = BEAT * max(1.0, world_size / MANY)  # all groups share one store
        self._waiting: tuple[int, ...] = ()
        self._wait_began = self._wait_until = self._current_since = 0.0
        self._current = -1
        self._found: str | None = None
        self._seen: dict[int, tuple[Status | None, float]] = {}
        self._turn = self._beats = 0
        self._due = self._hurries = False
        self._last_beat = time.monotonic()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._asked: queue.SimpleQueue[Sequence[tuple[int, dist.Work]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._beat()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._live, self._serve)]
        for thread in self._threads:
            thread.start()
        self._pid = os.getpid()
        atexit.register(self.end)

    # -- what a call says -------------------------------------------------------------------------------------------

    def at(self, **changes: Any) -> None:
        """Where this rank is from now on; the others read it with the next sign of life."""
        self.status = replace(self.status, **changes)

    def enter(self, **changes: Any) -> None:
        """A call begins: the others may know at once, not only with the next sign of life."""
        self.status = self.status.entered(changes.pop("call"), changes.pop("identity"), changes.pop("name"))
        self.at(**changes)
        if time.monotonic() - self._last_beat > BEAT / 4:
            self._due = True
            self._wake.set()

    def check(self) -> None:
        """Refuses once the group has failed: its messages may be half sent."""
        if self.failed is not None:
            raise RankError(f"this group failed before, and cannot be used any more: {self.failed}")

    def tell(self, error: BaseException) -> None:
        """Writes down for all ranks that this one raised; the group has failed."""
        self._fail(Fault(self.rank, f"{self._name(self.rank)} raised {self.status}: {_said(error)}"))

    def refuse(self, call: int, error: BaseException) -> None:
        """Writes down for those who entered a call that this rank refused it; nothing was sent."""
        text = f"{self._name(self.rank)} refused call {call}: {_said(error)}"
        self._try(lambda: self.store.set(f"refused/{call}", Fault(self.rank, text).packed()))

    # -- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, works: Sequence[tuple[int, dist.Work]], timeout: float, peers: Sequence[int] | None = None) -> None:
        """Returns when all work, each with a peer, is done, or raises a `RankError` that names the rank to blame.

        A wait for Gloo can be neither polled nor ended, so another thread waits and this one watches.
        """
        phase = self.status.phase
        self._begin_waiting([peer for peer, _ in works] if peers is None else peers, timeout)
        try:
            self._asked.put(works)
            began = self._wait_began
            while True:
                try:
                    broken = self._answers.get(timeout=BEAT / 4)
                    break
                except queue.Empty:
                    # If all of this process stood still, the thread that asks the store has not asked yet.
                    now = time.monotonic()
                    self._lag, began = max(self._lag, now - began - BEAT / 4), now
                    self._raise_what_is_known(now)
            if broken is not None:
                self._raise_broken(*broken)
        finally:
            self._waiting = ()
            self.at(phase=phase)

    def broken(self, error: Exception, peers: Sequence[int]) -> None:
        """Raises a `RankError` for messages that could not even be started."""
        self._begin_waiting(peers, math.inf)
        try:
            self._raise_broken(peers[0], _first_line(error))
        finally:
            self._waiting = ()

    def _begin_waiting(self, peers: Sequence[int], timeout: float) -> None:
        self._found, self._wait_began = None, time.monotonic()
        self._wait_until = self._wait_began + timeout
        self._current, self._current_since = -1, self._wait_began
        self.at(phase=self.status.phase if self.status.phase is Phase.AGREEING else Phase.WAITING)
        self._waiting = tuple(dict.fromkeys(peers))

    def _raise_what_is_known(self, now: float) -> None:
        if self._found is not None:
            self._raise(self._found)
        silence = now - self._last_beat
        if silence > max(self.patience, 4 * self._interval) + LAGS * self._lag:
            self._raise(
                f"the job's store has not answered for {silence:.1f} s: its host (the launcher, or global rank 0) is"
                f" dead or stopped."
            )
        if now > self._wait_until:
            late = "; ".join(f"{self._name(p)} was last seen {self._last(p)}" for p in self._waiting[:4])
            waited = f"no answer for {now - self._wait_began:.0f} s"
            self._fail(Fault(self._waiting[0], f"{waited}, though all are alive: {late}"))
            self._raise(str(self.failed))

    def _raise_broken(self, peer: int, error: str) -> None:
        """A message failed. Who is to blame? The peer may be dead, or have left because of somebody else."""
        self._hurries = True
        end = time.monotonic() + self._grants + 3 * self._interval
        while self._found is None and time.monotonic() < end:
            time.sleep(BEAT / 4)
        self._hurries = False
        if self._found is None:
            self._fail(Fault(peer, f"messages with {self._name(peer)} failed, last seen {self._last(peer)}: {error}"))
        self._raise(self._found or str(self.failed))

    @property
    def _grants(self) -> float:
        """Seconds of silence that others are granted: less of it when messages with them have failed."""
        return max(self.patience / 2, 2 * self._interval) if self._hurries else self.patience

    def _raise(self, text: str) -> None:
        self.failed = text
        raise RankError(f"{text.rstrip('.')}. Meanwhile {self._name(self.rank)} was waiting {self.status}. {ADVICE}")

    # -- threads ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Waits for work, on behalf of the thread that watches meanwhile."""
        while (works := self._asked.get()) is not None:
            answer = None
            for peer, work in works:
                self._current, self._current_since = peer, time.monotonic()
                try:
                    work.wait()
                except Exception as error:
                    answer = (peer, _first_line(error))
                    break
            self._answers.put(answer)

    def _live(self) -> None:
        began = time.monotonic()
        while not self._stop.is_set():
            pause = min(LOOK, self._interval) if self._waiting else self._interval
            self._wake.wait(pause)
            self._wake.clear()
            # Where threads wake late or the store is slow, others are late for the same reason.
            now = time.monotonic()
            self._lag, began = max(0.8 * self._lag, now - began - pause), now
            try:
                if self._due or time.monotonic() - self._last_beat >= 0.9 * self._interval:
                    self._due = False
                    self._beat()
                if self._waiting:
                    self._look(self._waiting)
            except Exception as error:
                if not self._stop.is_set():
                    self._found = (
                        f"the job's store is gone ({_first_line(error)}): its host (the launcher, or"
                        f" global rank 0) has ended."
                        if not isinstance(error, RankError)
                        else str(error)
                    )
                return

    def _beat(self) -> None:
        self._beats += 1  # the status itself is written by the calling thread alone
        self.store.set(f"status/{self.rank}", replace(self.status, beat=self._beats).packed())
        self._last_beat = time.monotonic()

    def _look(self, waiting: tuple[int, ...]) -> None:
        """Reads what was written down, and how the ranks that are waited for do."""
        mine = self.status  # before the others': what they are in then cannot be behind it
        for key in ("fault", f"refused/{mine.call}"):
            raw = self.store.get(key)
            if self._found is None and raw is not None:
                fault = Fault.parsed(raw, self.size)
                self._fail(fault)  # a refusal ends the group for those who entered the call
                self._found = fault.text
        self._turn += LOOKS
        first = self._turn % len(waiting) if len(waiting) > LOOKS else 0
        for peer in (waiting[first:] + waiting[:first])[:LOOKS]:
            raw = self.store.get(f"status/{peer}")
            found = None if raw is None else Status.parsed(raw)
            now = time.monotonic()
            known, since = self._seen.get(peer, (None, now))
            self._seen[peer] = (found, since if found == known and peer in self._seen else now)
            wrong = None if found is None else self._judged(peer, mine, found, now - self._seen[peer][1], now)
            if self._waiting is not waiting:
                return  # the wait is over, and with it the question
            if wrong is not None and self._found is None:
                self._fail(Fault(peer, wrong))
                self._found = wrong

    def _judged(self, peer: int, mine: Status, found: Status, silence: float, now: float) -> str | None:
        """What is wrong with a rank that is waited for, if anything is."""
        who = self._name(peer)
        if silence >= self._grants + LAGS * self._lag:
            return f"{who} is dead or stopped: no sign of life for {silence:.1f} s; last seen {found}."
        # Other peers may have delivered already and rightly gone on: which messages are done cannot be asked.
        current = self._current in (peer, self.rank) and now - self._current_since > 2 * self._interval
        if found.phase is Phase.ENDED:
            return f"{who} has ended; last seen {found}." if current else None
        if found.call == mine.call:
            return self._differs(who, mine, found)
        then = found.was_in(mine.call)
        if then and then != mine.was_in(mine.call):
            return (
                f"{who} did something else in call {mine.call}: it is {found}, while {self._name(self.rank)} is {mine}."
            )
        if found.call > mine.call and peer == self._current and now - self._current_since > 5 * self.patience:
            return f"{who} went on alone: it is {found}, while {self._name(self.rank)} is {mine}."
        return None

    def _differs(self, who: str, mine: Status, found: Status) -> str | None:
        """How a rank in this very call is in another one than this rank, if it is."""
        # All ranks remember the same agreements, so a call is new to all of them or to none.
        if found.compares != mine.compares and (found.training_step, found.direction) == (
            mine.training_step,
            mine.direction,
        ):
            compares = who if found.compares else self._name(self.rank)
            return (
                f"{who} was asked for something else: it is {found}, while {self._name(self.rank)} is {mine}, and"
                f" only {compares} was asked for something new."
            )
        if found.phase is Phase.IDLE:
            return None
        both = found.phase is Phase.AGREEING and mine.phase is Phase.AGREEING  # they will see it for themselves
        for name in (
            ("training_step", "direction") if both else ("training_step", "direction", "plan", "forward", "name")
        ):
            if getattr(found, name) != getattr(mine, name):
                return f"{who} does something else: it is {found}, while {self._name(self.rank)} is {mine}."
        return None

    # -- telling ----------------------------------------------------------------------------------------------------

    def _fail(self, fault: Fault) -> None:
        self.failed = fault.text
        self._try(
            lambda: self.store.add("faults", 1) > 1 or self.store.set("fault", fault.packed())
        )  # the first counts

    def _try(self, act: Callable[[], object]) -> None:
        """Telling others must not hide what happened here: a lost store is no new error."""
        done = threading.Thread(target=_quietly, args=(act,), daemon=True)
        done.start()
        done.join(2 * BEAT)

    def _name(self, rank: int) -> str:
        return f"rank {rank}" if self.names[rank] == rank else f"rank {rank} (global rank {self.names[rank]})"

    def _last(self, peer: int) -> str:
        found = self._seen.get(peer, (None, 0.0))[0]
        return "in no call over this group" if found is None else str(found)

    def end(self) -> None:
        """Says goodbye and ends the threads; with the text of the error that ends the process, if one does."""
        if self._stop.is_set() or os.getpid() != self._pid:  # a child that was forked is not this rank
            return
        atexit.unregister(self.end)
        error = getattr(sys, "last_value", None)
        if error is not None and self.failed is None:
            self.tell(error)
        self._stop.set()
        self._wake.set()
        self._asked.put(None)
        if self.failed is not None and self._hosts_store:
            time.sleep(GRACE + self._interval)
        self._threads[0].join(2 * BEAT)
        self.at(phase=Phase.ENDED)
        self._try(self._beat)


def _quietly(act: Callable[[], object]) -> None:
    with suppress(Exception):
        act()


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def direction_named(name: str) -> Direction:
    return Direction[name.upper()]
