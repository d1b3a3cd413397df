"""Messages that a device sends and receives when it gets there, long after the host has left the call they belong to.

NCCL's works are not waited for: `wait` only puts streams in order. They are polled, the oldest first; on one
communicator they are done in the order in which they were begun. Three steps, of which the device has done the first:

    call 4, step 1 with rank 1   done, forgotten
    call 4, step 2 with rank 2   the oldest: `flying` is 4
    call 5, step 1 with rank 1   `owed` is {2: call 4, 1: call 5}: what each rank must still do, at most
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from longspan.execution.liveness.records import Status


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
