"""Watch: publish where this rank is, and find out why another rank does not arrive.

Ranks of one host are examined directly, those of other hosts through a watcher process next to each rank. A rank
publishes its state and its errors in the job's store, in records of fixed layout. The first rank that detects a fault
writes it there, so that all ranks raise the same message. The `Detector` decides; this file has the threads, the clock
and the store.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from longspan.errors import RankError
from longspan.watch.companion import companion_of
from longspan.watch.detector import BEAT, DELIVERY, LOOK, Detector, Question, Verdict, answered_by
from longspan.watch.processes import GONE, Process, listener, seen, this_process
from longspan.watch.records import Direction, Fault, Phase, Status
from longspan.watch.store import Store
from longspan.watch.store_client import StoreClient
from longspan.watch.waiting import Flight, Flights, Interrupt, Lookout, Waiter, Works, first_line, join_unless_asleep

MANY = 2048
"""With this many ranks or more, signs of life become rarer: one store serves them all."""
GRACE = 0.75
"""Seconds for which a process that holds the store stays after a failure, so that all can read of it."""
LAST = 5.0
"""Seconds for which it stays, if all went well, until the others have ended as well."""
ADVICE = "End this process, so that the launcher can start all ranks again (torchrun --max-restarts)."
_holders: dict[tuple[str, int], Process | None] = {}
_log = logging.getLogger("longspan")


class Watch:
    """This rank in one group, and its eye on the others."""

    def __init__(
        self, store: Store, rank: int, names: Sequence[int], *, world_size: int, me: Process | None = None
    ) -> None:
        self.store, self.rank = store, rank
        self.failed: str | None = None
        """Why this group cannot be used any more."""
        me = this_process() if me is None else me
        host = _holder(store) if isinstance(store, StoreClient) and store.is_local else None
        self.detector = Detector(rank, names, me, host, seen)
        self._hosts_store = host is not None and host.pid == os.getpid()
        self.flights = Flights()
        self.detector.flying = lambda: self.flights.flying
        self.abort: Callable[[], None] = lambda: None
        """Ends what is under way on a device, so that nobody waits for it for ever."""
        self._lookout: Lookout | None = None
        self._interrupt = Interrupt()
        self._is_main = False
        """Whether calls came from the main thread."""
        self._interval = BEAT * max(1.0, world_size / MANY)  # all groups share one store
        self._spoke = time.monotonic()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._converse()  # others see this rank from here on
        self._waiter = Waiter()
        self._thread = threading.Thread(target=self._live, daemon=True, name="longspan lives")
        self._thread.start()
        self._pid = os.getpid()
        atexit.register(self._exit)

    # -- What a call publishes -----------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        return self.detector.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self.detector.patience = seconds

    @property
    def status(self) -> Status:
        return self.detector.status

    def publish(self, **changes: Any) -> None:
        """Updates the status that the next sign of life publishes."""
        self.detector.status = replace(self.detector.status, **changes)

    def enter(self, **changes: Any) -> None:
        """A call begins: the others may know at once."""
        self._is_main = self._is_main or threading.current_thread() is threading.main_thread()
        entered = self.status.entered(changes.pop("call"), changes.pop("identity"), changes.pop("name"))
        self.detector.status = entered
        self.publish(**changes)
        if time.monotonic() - self._spoke > BEAT / 4:
            self._wake.set()

    def check(self) -> None:
        """Refuses once the group has failed: its messages may be half sent."""
        if self.failed is not None:
            self._interrupt.take()
            raise RankError(f"this group failed before, and cannot be used any more: {self.failed}")

    def check_told(self) -> None:
        """Refuses to go on without a word where the group has failed and no call has said so."""
        if not self._interrupt.is_told:
            self.check()

    def check_device(self) -> None:
        """Refuses as well what another rank has written down: nobody waits in a call of a device, and would see it."""
        self.check()
        if self.detector.fault is not None:
            self._raise(Verdict(self.detector.fault.rank, self.detector.fault.text))

    def tell(self, error: BaseException) -> None:
        """Writes down for all ranks that this one raised; the group has failed."""
        self._interrupt.take()
        self._fail(Fault(self.rank, f"{self._name} raised {self.status}: {_error_text(error)}"))

    def refuse(self, call: int, error: BaseException) -> None:
        """Writes down for those who entered a call that this rank refused it; nothing was sent."""
        text = f"{self._name} refused call {call}: {_error_text(error)}"
        self._say(("set", f"refused/{call}", Fault(self.rank, text).packed()))

    # -- Waiting -------------------------------------------------------------------------------------------------------

    def wait(
        self,
        works: Works,
        group: dist.ProcessGroup,
        timeout: float,
        peers: Sequence[int] | None = None,
    ) -> None:
        """Returns when all work, each with a peer, is done, or raises a `RankError` that names the rank to blame.

        A wait for Gloo can be neither polled nor ended, so another thread waits and this one watches.
        """
        with self._waiting([peer for peer, _ in works] if peers is None else peers, timeout):
            broken = self._waiter.wait(works, group, self._look, BEAT / 4)
            if broken is not None:
                self._raise_broken(self._waiter.current, broken)

    def broken(self, error: Exception, peers: Sequence[int]) -> None:
        """Raises a `RankError` for messages with these ranks that could not even be started."""
        self.check()  # those of a communicator that was aborted cannot
        with self._waiting(peers, math.inf):
            self._raise_broken(self.rank, first_line(error))

    @contextmanager
    def _waiting(self, peers: Sequence[int], timeout: float) -> Iterator[None]:
        """The host waits for these ranks, and looks at them itself."""
        lock = threading.Lock() if self._lookout is None else self._lookout.host_waits
        with lock:
            phase = self.status.phase
            self._begin(peers, timeout)
            try:
                yield
            finally:
                self.detector.end()
                self.publish(phase=phase)

    def _begin(self, peers: Sequence[int], timeout: float) -> None:
        self.publish(phase=self.status.phase if self.status.phase is Phase.AGREEING else Phase.WAITING)
        self.detector.begin(time.monotonic(), peers, timeout)

    def _look(self) -> None:
        verdict = self.detector.look(time.monotonic(), self._waiter.current, self._waiter.num_waits)
        if verdict is not None:
            self._raise(verdict)
        warning = self.detector.warning()
        if warning is not None:
            _log.warning(warning)

    def _raise_broken(self, peer: int, error: str) -> None:
        """A message failed, of this peer or (if it is this rank) of anyone waited for. Who is to blame? The peer may
        be dead, or have left because of somebody else."""
        for _ in range(int((self.patience + DELIVERY) / (BEAT / 4))):  # looks, not seconds: all may have stood still
            self._wake.set()
            time.sleep(BEAT / 4)
            verdict = self.detector.look(time.monotonic(), peer, -2, broken=True)
            if verdict is not None:
                self._raise(verdict)
        self._raise(self.detector.unexplained(peer, error))

    def _raise(self, verdict: Verdict) -> None:
        """The first finding of all ranks counts: everybody names the same one."""
        self._interrupt.take()
        raise RankError(self._failure(verdict, self.status))

    def _failure(self, verdict: Verdict, where: Status) -> str:
        """What to say of it; the group has failed."""
        if verdict.rank >= 0:
            self._fail(Fault(verdict.rank, verdict.text, verdict.spoils))
        else:
            self.failed = verdict.text
            self._give_up()
        text = str(self.failed).rstrip(".")
        return f"{text}. Meanwhile {self._name} was waiting {where}. {ADVICE}"

    # -- Devices -------------------------------------------------------------------------------------------------------

    def fly(self, peers: Sequence[int], timeout: float) -> Flight:
        """Messages of a device with these ranks are about to be begun. From here on they are polled."""
        if self._lookout is None:
            self._lookout = Lookout(self.detector, self.flights, self._found)
        return self.flights.begin(self.status, peers, timeout)

    def _found(self, verdict: Verdict | None) -> None:
        """Called by the lookout: the group has failed, and the host may be waiting for its device."""
        oldest = self.flights.oldest
        text = None
        if verdict is not None:
            text = self._failure(verdict, self.status if oldest is None else oldest.status)
            _log.error(text)
        try:
            self.abort()
        except RuntimeError as error:
            _log.error(f"{self._name} could not abort what is under way: {first_line(error)}")
        if text is not None and self._is_main and not self._stop.is_set():
            self._interrupt.send(text)

    @cached_property
    def connection(self) -> Store:
        """Another connection to the store, for what the waiter asks; it ends with the watch."""
        return self.store.again(None)

    # -- The store -----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        """Speaks and listens, until the store is lost or this rank ends."""
        while not self._stop.is_set():
            try:
                self._converse()
            except RankError as error:
                self.detector.strange = str(error)
                return
            except Exception as error:
                if not self._stop.is_set():
                    self.detector.lost = first_line(error)
                return
            self._wake.wait(min(LOOK, self._interval) if self.detector.waiting else self._interval)
            self._wake.clear()

    def _converse(self) -> None:
        self._spoke = time.monotonic()
        answered_by(self.detector.turn(time.monotonic), self._asked)
        if not self.detector.is_alone and not self.detector.must_beat:
            self.detector.must_beat = not companion_of(self.store, self.detector.me, f"life/{self.rank}")

    def _asked(self, question: Question) -> bytes | None:
        self.detector.asks(time.monotonic())
        answer = _ask(self.store, question)
        self.detector.answered(time.monotonic())
        return answer

    def _fail(self, fault: Fault) -> None:
        self.failed = fault.text
        raw = self._say(("claim", "fault", fault.packed()))
        with suppress(RankError):  # the first record counts; anything else does not
            self.failed = Fault.parsed(raw, self.detector.size).text if raw else fault.text
        self._give_up()

    def _give_up(self) -> None:
        if self._lookout is not None:
            self._lookout.has_failed.set()

    def _say(self, question: Question) -> bytes | None:
        """Over a connection of its own. Telling others must not hide what happened here: a lost store is no new
        error, and PyTorch's own clients, which may wait for ever, are asked by a thread that is left then."""
        if isinstance(self.store, StoreClient):
            return self._said_at_once(question)
        answers: list[bytes | None] = []
        asks = threading.Thread(target=lambda: answers.append(self._said_at_once(question)), daemon=True)
        asks.start()
        asks.join(2 * BEAT)
        return answers[0] if answers else None

    def _said_at_once(self, question: Question) -> bytes | None:
        with suppress(Exception):
            store = self.store.again(2 * BEAT)
            try:
                return _ask(store, question)
            finally:
                store.close()
        return None

    @property
    def _name(self) -> str:
        return self.detector.name(self.rank)

    def _exit(self) -> None:
        """The interpreter ends. A process that holds the store stays until all could read what it said last."""
        if os.getpid() != self._pid:  # a child that was forked is not this rank
            return
        if self._hosts_store and self.failed is None and getattr(sys, "last_value", None) is None:
            self._say(("set", "closes", b"1"))
        self.end(lingers=self._hosts_store)

    def _linger(self) -> None:
        end = time.monotonic() + (LAST if self.failed is None else GRACE)
        others = set(range(self.detector.size)) - {self.rank}
        while others and time.monotonic() < end:
            time.sleep(BEAT / 4)
            raws = {n: self._say(("get", f"status/{n}", b"")) for n in others}
            with suppress(RankError):
                others = {n for n, raw in raws.items() if raw and Status.parsed(raw).phase is not Phase.ENDED}

    def end(self, *, lingers: bool = False) -> None:
        """Says goodbye and ends the threads; with the text of the error that ends the process, if one does."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        atexit.unregister(self._exit)
        error = getattr(sys, "last_value", None)
        if error is not None and self.failed is None:
            self.tell(error)
        if self._lookout is not None and self.failed is None:
            self._lookout.land(LAST)
        self._stop.set()
        self._wake.set()
        self.publish(phase=Phase.ENDED)
        last = replace(self.status, beat=self.detector.num_beats + 1, flying=self.flights.flying)
        self._say(("set", f"status/{self.rank}", last.packed()))
        if lingers:
            self._linger()
        self.store.close()
        if "connection" in self.__dict__:
            self.connection.close()
        self._waiter.end()
        if self._lookout is not None:
            self._lookout.end()
        if self._thread is not threading.current_thread():
            join_unless_asleep(self._thread)


def _holder(store: StoreClient) -> Process | None:
    """The process that holds the store; looked for once, as long as it lives."""
    holder = _holders.get(store.address)
    if holder is None or seen(holder).state == GONE:
        holder = _holders[store.address] = listener(store.address[1])
    return holder


def _ask(store: Store, question: Question) -> bytes | None:
    kind, key, value = question
    if kind == "get":
        return store.get(key)
    return store.set(key, value) if kind == "set" else store.claim(key, value)


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def direction_named(name: str) -> Direction:
    return Direction[name.upper()]
