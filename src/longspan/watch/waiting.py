"""Waits that can be abandoned: Gloo in a thread, NCCL by polling, and raising an error in the main thread.

A wait for Gloo can be neither polled nor ended, only abandoned: its thread then stays until the group's connections are
closed, which `end` does. The thread must end before the interpreter: a thread that returns from C++ while the
interpreter shuts down aborts the process (`terminate called without an active exception`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from longspan.errors import RankError
from longspan.watch.detector import BEAT, LOOK, Detector, Verdict
from longspan.watch.processes import is_asleep
from longspan.watch.records import Status

# -- Calls into the interpreter and CUDA's runtime, by ctypes ----------------------------------------------------------
# The first raises an error in the main thread, which may be waiting for a device in PyTorch. When a communicator is
# aborted, that wait ends as if it had succeeded, with whatever the device had in its memory by then. A program that
# continues would train on it, and save it. So the error is raised as soon as the main thread is back in Python. The
# second lets a thread poll works while another one captures a CUDA graph. Both calls have fixed names and take no user
# data.


RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


class Interrupt:
    """One error for the main thread, raised once: by the call that it is in, or else between two of its lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_raised = self._is_sent = False

    @property
    def is_told(self) -> bool:
        """Whether the program has heard of it, one way or the other."""
        return self._is_raised or self._is_sent

    def send(self, text: str) -> None:
        """Has the error raised, unless a call has raised it already."""

        class FoundError(RankError):
            def __init__(self, *args: object) -> None:  # it is made without arguments
                super().__init__(*(args or (text,)))

        FoundError.__name__ = FoundError.__qualname__ = RankError.__name__
        FoundError.__module__ = RankError.__module__
        with self._lock:
            if not self._is_raised and not self._is_sent:
                self._is_sent = True
                _set_async(ctypes.py_object(FoundError))

    def take(self) -> None:
        """To be called before an error is raised here: the other one is not needed any more."""
        with self._lock:
            if self._is_sent and not self._is_raised:
                _set_async(None)
            self._is_raised = True


def _set_async(error: ctypes.py_object[type[RankError]] | None) -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)


def poll_beside_captures() -> None:
    """Lets this thread poll works while another one captures a CUDA graph, which CUDA otherwise takes for a mistake in
    the capture. The runtime that PyTorch has loaded is asked; where there is none, there is nothing to let."""
    if torch.version.cuda is None:
        return
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
    except (OSError, AttributeError):
        return


# -- Messages in flight on a device, after the host has left their call ------------------------------------------------
# NCCL's works are not waited for: `wait` only orders streams. They are polled, the oldest first; on one communicator
# they finish in the order in which they started. Three steps, of which the device has done the first:
#
#     call 4, step 1 with rank 1   done, forgotten
#     call 4, step 2 with rank 2   the oldest: `flying` is 4
#     call 5, step 1 with rank 1   `owed` is {2: call 4, 1: call 5}: what each rank must still do, at most


class Polled(Protocol):
    """What is asked of a work that is polled."""

    def is_completed(self) -> bool: ...


@dataclass(eq=False)
class Flight:
    """Messages with some ranks that were begun together."""

    status: Status
    """Where this rank was."""
    peers: tuple[int, ...]
    timeout: float
    """Seconds to wait for a rank that is alive but does not come."""
    works: Sequence[Polled] | None = None
    """None as long as the host has not begun them all: a group's first operation waits for all ranks."""
    is_over: bool = False


class Flights:
    """What is under way over one group, in order."""

    def __init__(self) -> None:
        self.num_over = 0
        """How many are over, so far."""
        self._queue: deque[Flight] = deque()
        self._last: dict[int, Flight] = {}
        self._lock, self._polls = threading.Lock(), threading.Lock()

    def begin(self, status: Status, peers: Sequence[int], timeout: float) -> Flight:
        """Messages with these ranks are about to be begun; their works are filled in when there are any.

        Works may hold the memory of their messages, so what is over by now is let go first.
        """
        self.poll()
        flight = Flight(status, tuple(peers), timeout)
        with self._lock:
            self._queue.append(flight)
            self._last.update(dict.fromkeys(flight.peers, flight))
        return flight

    def poll(self) -> None:
        """Lets go of what is over; one thread at a time."""
        if not self._polls.acquire(blocking=False):
            return
        try:
            while (flight := self.oldest) is not None and _is_over(flight):
                flight.is_over, flight.works = True, ()
                self.num_over += 1
                with suppress(IndexError):  # all were dropped meanwhile
                    self._queue.popleft()
        finally:
            self._polls.release()

    @property
    def oldest(self) -> Flight | None:
        try:
            return self._queue[0]
        except IndexError:
            return None

    @property
    def flying(self) -> int:
        """The oldest call that is not done; 0 if all are."""
        oldest = self.oldest
        return 0 if oldest is None else oldest.status.call

    def owed(self) -> dict[int, Status]:
        """By rank, where this rank was when it began the last messages with it that are not done."""
        with self._lock:
            return {peer: flight.status for peer, flight in self._last.items() if not flight.is_over}

    def drop(self) -> None:
        """Forgets all."""
        with self._lock:
            for flight in self._queue:
                flight.is_over, flight.works = True, ()
            self._queue.clear()
            self._last.clear()


def _is_over(flight: Flight) -> bool:
    if flight.is_over:
        return True
    if flight.works is None:
        return False
    try:
        return all(work.is_completed() for work in flight.works)
    except RuntimeError:  # the device itself is broken, as whoever waits for it will hear; nobody else is to blame
        return True


# -- A thread that waits for Gloo --------------------------------------------------------------------------------------


CLOSING_TAG = 0x7FFFFFF0
"""A tag that no message has."""
ASLEEP = 2.0
"""Seconds of sleep after which a thread whose connections were closed will not wake."""


class Waited(Protocol):
    """What can be waited for."""

    def wait(self) -> object: ...


Works = Sequence[tuple[int, Waited]]


class Waiter:
    """Waits for works, one list after the other, until it is left with one that does not end."""

    def __init__(self) -> None:
        self.current = -1
        """The rank whose message is waited for."""
        self.num_waits = 0
        """How many messages were waited for so far, with that one."""
        self._asked: queue.SimpleQueue[Works | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="longspan waits")
        self._thread.start()
        self._left: dist.ProcessGroup | None = None

    def wait(self, works: Works, group: dist.ProcessGroup, watch: Callable[[], None], pause: float) -> str | None:
        """None when all is done, or why a message (of `current`) failed. `watch` is called again and again meanwhile,
        and may raise; the works are left then, and the group is kept until its connections are closed."""
        self._left = group
        self._asked.put(works)
        while True:
            try:
                answer = self._answers.get(timeout=pause)
                break
            except queue.Empty:
                watch()
        self._left = None
        return None if answer is None else answer[1]

    def end(self) -> None:
        """Ends the thread, by closing the group's connections if it waits for one."""
        self._asked.put(None)
        if threading.current_thread() is self._thread:
            return
        if self._left is not None:
            _close(self._left)
        # A thread that is asleep now is deaf: Gloo never ends a message whose peer died in the middle of it. It sleeps
        # until the group's timeout, long after this process has ended.
        join_unless_asleep(self._thread)
        self._left = None

    def _serve(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Waits for one list; nothing of it is held when this returns."""
        works = self._asked.get()
        if works is None:
            return False
        answer = self._wait_for_all(works)
        del works
        self._answers.put(answer)
        return True

    def _wait_for_all(self, works: Works) -> tuple[int, str] | None:
        for peer, work in works:
            self.current = peer
            self.num_waits += 1
            try:
                work.wait()
            except Exception as error:
                return peer, first_line(error)
        return None


def join_unless_asleep(thread: threading.Thread) -> None:
    """Waits until the thread has ended, or has slept for `ASLEEP` seconds on end.

    On a crowded machine a thread that was woken may get no processor for seconds. It is not asleep then.
    """
    slept, pause = 0.0, ASLEEP / 40
    while thread.is_alive() and slept < ASLEEP:
        thread.join(pause)
        slept = slept + pause if is_asleep(thread.native_id) else 0.0


def _close(group: dist.ProcessGroup) -> None:
    """Closes all connections of a group: what Gloo does when somebody gives up waiting for a message.

    Every rank is tried, since nothing can be waited for from one whose own connection is closed already; after the
    first that is, the others answer at once.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    for tag in range(CLOSING_TAG, CLOSING_TAG + 8):  # with several interfaces, each has connections of its own
        for other in others:
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], other, tag).wait(
                    timedelta(milliseconds=1)
                )


def first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:200]


# -- A thread that polls a device's works and checks the other ranks ---------------------------------------------------
# The host has left the call: it prepares the next ones, or waits for the device in PyTorch, where nothing can be
# checked. While works finish one after another, no rank is checked; if none finished for `BEAT` seconds, the ranks of
# the pending works are. A device that is slow, or waits for a slow one, causes no error as long as all ranks are alive.


_log = logging.getLogger("longspan")


class Lookout:
    """Looks while nobody waits. `found` is told, once, why what is under way cannot end well; None if somebody else
    has found it."""

    def __init__(self, detector: Detector, flights: Flights, found: Callable[[Verdict | None], None]) -> None:
        self.detector, self.flights, self._found = detector, flights, found
        self.host_waits = threading.Lock()
        """Held by a host that waits, and looks itself meanwhile: one wait at a time."""
        self.has_failed = threading.Event()
        """Whether somebody else has found why the group cannot be used any more."""
        self._since: float | None = None
        """Since when nothing was done; None: nothing is under way."""
        self._num_over = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True, name="longspan looks")
        self._thread.start()

    def tick(self, now: float) -> Verdict | None:
        """One look, if it is time for one: why what is under way cannot end well, if it cannot."""
        self.flights.poll()
        is_over = self.flights.num_over != self._num_over or self.flights.oldest is None
        if is_over or self._since is None:
            self._num_over = self.flights.num_over
            self._since = None if self.flights.oldest is None else now
            if self.detector.owed:
                self.detector.end()
            return self.detector.overheard()
        if now - self._since < BEAT:
            return None
        return self._look(now)

    def _look(self, now: float) -> Verdict | None:
        oldest = self.flights.oldest
        if oldest is None:
            return None
        self.detector.begin_device(now, oldest.status, self.flights.owed(), oldest.timeout)
        verdict = self.detector.look(now, self.detector.rank, self._num_over)
        warning = self.detector.warning()
        if warning is not None:
            _log.warning(warning)
        return verdict

    def _live(self) -> None:
        poll_beside_captures()
        while not self._stop.wait(BEAT if self._since is None else LOOK):
            if self.has_failed.is_set():
                return self._found(None)
            if not self.host_waits.acquire(blocking=False):
                self._since = None  # the host looks
                continue
            try:
                verdict = self.tick(time.monotonic())
            finally:
                self.host_waits.release()
            if verdict is not None and not self._stop.is_set():
                return self._found(verdict)
        return None

    def land(self, seconds: float) -> None:
        """Returns when all is done, or after this number of seconds."""
        end = time.monotonic() + seconds
        while self.flights.oldest is not None:
            self.flights.poll()
            if time.monotonic() > end or not self._thread.is_alive():
                return
            time.sleep(LOOK / 10)

    def end(self) -> None:
        """Ends the thread, and forgets what is under way."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            join_unless_asleep(self._thread)
        self.flights.drop()
