"""Watch messages of a device after the host has left their call: poll their works, check ranks, interrupt the host.

NCCL's works are not waited for: `wait` only orders streams. They are polled, the oldest first; on one communicator they
finish in the order in which they started. Three steps, of which the device has finished the first:

    call 4, step 1 with rank 1   finished, dropped
    call 4, step 2 with rank 2   the oldest: the oldest pending call is 4
    call 5, step 1 with rank 1   `pending()` is {2: call 4, 1: call 5}: what each rank must still do, at most
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from longspan.errors import RankError
from longspan.watch.detector import BEAT, LOOK, Detector, Status, Verdict
from longspan.watch.processes import is_asleep

ASLEEP = 2.0
"""Seconds of sleep after which a thread whose connections were closed will not wake."""
RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""
_log = logging.getLogger("longspan")


# -- Works in flight ---------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class WorkBatch:
    """Messages with some ranks that were started together."""

    status: Status
    """This rank's status when it started them."""
    peers: tuple[int, ...]
    timeout: float
    """Seconds to wait for a rank that is alive but does not enter the call."""
    works: Sequence[Any] | None = None
    """None until the host has started them all: a group's first operation waits for all ranks."""
    is_done: bool = False

    def poll(self) -> bool:
        """Whether all works are done."""
        if self.is_done:
            return True
        if self.works is None:
            return False
        try:
            return all(work.is_completed() for work in self.works)
        except RuntimeError:  # this rank's own device is broken, which its next operation raises
            return True


class WorkQueue:
    """Works in flight over one group, in order."""

    def __init__(self) -> None:
        self.num_done = 0
        self._queue: deque[WorkBatch] = deque()
        self._last: dict[int, WorkBatch] = {}
        self._lock, self._poll_lock = threading.Lock(), threading.Lock()

    def add(self, status: Status, peers: Sequence[int], timeout: float) -> WorkBatch:
        """Add a batch of messages with these ranks; the caller sets its works once they are started.

        Works may hold the memory of their messages, so finished ones are dropped first.
        """
        self.poll()
        batch = WorkBatch(status, tuple(peers), timeout)
        with self._lock:
            self._queue.append(batch)
            self._last.update(dict.fromkeys(batch.peers, batch))
        return batch

    def poll(self) -> None:
        """Drop finished batches; one thread at a time."""
        if not self._poll_lock.acquire(blocking=False):
            return
        try:
            while (batch := self.oldest) is not None and batch.poll():
                batch.is_done, batch.works = True, ()
                self.num_done += 1
                with suppress(IndexError):  # all were dropped meanwhile
                    self._queue.popleft()
        finally:
            self._poll_lock.release()

    @property
    def oldest(self) -> WorkBatch | None:
        try:
            return self._queue[0]
        except IndexError:
            return None

    def pending(self) -> dict[int, Status]:
        """Return, by rank, this rank's status when it started the last unfinished messages with it."""
        with self._lock:
            return {peer: batch.status for peer, batch in self._last.items() if not batch.is_done}

    def clear(self) -> None:
        with self._lock:
            for batch in self._queue:
                batch.is_done, batch.works = True, ()
            self._queue.clear()
            self._last.clear()


# -- A thread that polls works and checks the other ranks --------------------------------------------------------------
# The host has left the call: it prepares the next ones, or waits for the device in PyTorch, where it can check nothing.
# While works finish one after another, no rank is checked; if none finished for `BEAT` seconds, ranks with pending
# works are. A device that is slow, or waits for a slow one, causes no error as long as all ranks are alive.


class DevicePoller:
    """A thread that polls works while the host does not wait. It calls `on_failure` once: with the verdict, or with
    None if the host failed first."""

    def __init__(
        self, detector: Detector, host_waits: threading.Lock, on_failure: Callable[[Verdict | None], None]
    ) -> None:
        """`host_waits` is held by a host that waits, and checks ranks itself: one wait at a time."""
        self.detector, self.queue, self._host_waits, self._on_failure = detector, WorkQueue(), host_waits, on_failure
        self.has_failed = threading.Event()
        """Set when the host knows why the group cannot be used any more."""
        self._since: float | None = None
        """Since when no work has finished; None: none is in flight."""
        self._num_done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="longspan-device")
        self._thread.start()

    def tick(self, now: float) -> Verdict | None:
        """Poll once and check ranks if it is time; return why works in flight cannot finish, or None."""
        self.queue.poll()
        oldest = self.queue.oldest
        if self.queue.num_done != self._num_done or oldest is None or self._since is None:
            self._num_done = self.queue.num_done
            self._since = None if oldest is None else now
            if self.detector.wait is not None and self.detector.wait.pending:
                self.detector.wait = None
            return self.detector.detect_divergence()
        if now - self._since < BEAT:
            return None
        self.detector.begin_device_wait(now, oldest.status, self.queue.pending(), oldest.timeout)
        verdict = self.detector.check(now, self.detector.rank, self._num_done)
        warning = self.detector.warning()
        if warning is not None:
            _log.warning(warning)
        return verdict

    def _run(self) -> None:
        allow_polling_during_capture()
        while not self._stop.wait(BEAT if self._since is None else LOOK):
            if self.has_failed.is_set():
                return self._on_failure(None)
            if not self._host_waits.acquire(blocking=False):
                self._since = None  # the host checks
                continue
            try:
                verdict = self.tick(time.monotonic())
            finally:
                self._host_waits.release()
            if verdict is not None and not self._stop.is_set():
                return self._on_failure(verdict)
        return None

    def wait_all(self, seconds: float) -> None:
        """Return when all works are done, or after this number of seconds."""
        deadline = time.monotonic() + seconds
        while self.queue.oldest is not None:
            self.queue.poll()
            if time.monotonic() > deadline or not self._thread.is_alive():
                return
            time.sleep(LOOK / 10)

    def stop(self) -> None:
        """End the thread, and drop what is in flight."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            join_unless_asleep(self._thread)
        self.queue.clear()


def join_unless_asleep(thread: threading.Thread) -> None:
    """Wait until the thread has ended, or has slept for `ASLEEP` seconds without a break.

    On a busy machine a thread that was woken may get no processor for seconds. It is not asleep then.
    """
    slept, pause = 0.0, ASLEEP / 40
    while thread.is_alive() and slept < ASLEEP:
        thread.join(pause)
        slept = slept + pause if is_asleep(thread.native_id) else 0.0


# -- Calls into the interpreter and CUDA's runtime, by ctypes ----------------------------------------------------------
# The first raises an error in the main thread, which may be waiting for a device in PyTorch. When a communicator is
# aborted, that wait ends as if it had succeeded, with whatever the device had in its memory by then. A program that
# continues would train on it, and save it. So the error is raised as soon as the main thread is back in Python. The
# second lets a thread poll works while another one captures a CUDA graph. Both calls have fixed names and take no user
# data.


class Interrupt:
    """One error for the main thread, raised once: by the call that it is in, or else between two of its lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_raised = self._is_sent = False

    @property
    def is_delivered(self) -> bool:
        """Whether the error was raised in the main thread, either way."""
        return self._is_raised or self._is_sent

    def send(self, text: str) -> None:
        """Raise the error in the main thread, unless a call has raised it already."""

        class InterruptError(RankError):
            def __init__(self, *args: object) -> None:  # the interpreter passes no arguments
                super().__init__(*(args or (text,)))

        InterruptError.__name__ = InterruptError.__qualname__ = RankError.__name__
        InterruptError.__module__ = RankError.__module__
        with self._lock:
            if not self._is_raised and not self._is_sent:
                self._is_sent = True
                _set_async_error(ctypes.py_object(InterruptError))

    def cancel(self) -> None:
        """Withdraw the error, since the caller is about to raise one."""
        with self._lock:
            if self._is_sent and not self._is_raised:
                _set_async_error(None)
            self._is_raised = True


def _set_async_error(error: ctypes.py_object[type[RankError]] | None) -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)


def allow_polling_during_capture() -> None:
    """Let this thread poll works while another one captures a CUDA graph, which would otherwise invalidate the capture.
    Uses the CUDA runtime that PyTorch has loaded, if there is one."""
    if torch.version.cuda is None:
        return
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
    except (OSError, AttributeError):
        return
