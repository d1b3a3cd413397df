"""A thread that waits for messages, on behalf of one that watches meanwhile.

A wait for Gloo can be neither polled nor ended. What it can be is left: the thread then stays behind until the group's
connections are closed, which `end` does. It must be gone before the interpreter is: a thread that comes back from C++
while the interpreter ends brings the process down (`terminate called without an active exception`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from longspan.execution.liveness.processes import is_asleep

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
