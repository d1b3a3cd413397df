"""A thread that polls what a device has under way, and looks at the other ranks while the oldest of it is not done.

The host is not in the call any more: it prepares the next ones, or waits for the device in PyTorch, where nothing can
be asked. So somebody else looks. As long as works are done one after the other nobody is looked at; where nothing was
done for `BEAT` seconds, the ranks that the works are with are. A device that is slow, or waits for a slow one, is left
in peace for as long as everybody lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from longspan.execution.liveness.detector import BEAT, LOOK, Detector
from longspan.execution.liveness.flights import Flights
from longspan.execution.liveness.native import poll_beside_captures
from longspan.execution.liveness.peers import Verdict
from longspan.execution.liveness.waiter import join_unless_asleep

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
