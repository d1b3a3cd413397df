"""One run of the tests on this rank: the ranks agree on every outcome, and rank 0 writes the page after every test.

The page is written also if the job ends early. Whatever a test raises is its outcome, and collectives of its groups
time out, so a rank that fails in a test holds up the others for two minutes at most. A rank that is still in a test
after TEST_SECONDS exits; the launcher then ends the job with SIGTERM, as it does when a rank dies.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.errors import LongspanError
from tests.gpu.facts import facts
from tests.gpu.page import Report, private_words, write
from tests.gpu.site import Outcome, Site, worst

GRACE_SECONDS = 8.0
"""Between SIGTERM and the end: time for the running test to find out which rank is gone."""
TEST_SECONDS = 900.0


def select(is_slow: Mapping[str, bool], only: str | None, *, quick: bool) -> list[str]:
    """Return the names to run: those in `only`, or that start with one in it; with `quick`, not the slow ones.

    >>> names = {"exact.ring": False, "exact.repeat": False, "host.waits": False, "host.time": True}
    >>> select(names, "exact.ring,host", quick=True)
    ['exact.ring', 'host.waits']
    """
    if only is None:
        return [name for name in is_slow if not (quick and is_slow[name])]
    words = [word.strip() for word in only.split(",")]
    for word in words:
        if not any(f"{name}.".startswith(f"{word}.") for name in is_slow):
            raise LongspanError(
                f"--only must name lines of this machine, but got {word!r:.60}. They are: {', '.join(is_slow)}; the"
                f" start of a name, such as exact, selects all that have it."
            )
    return [
        name
        for name in is_slow
        if name in words or (not (quick and is_slow[name]) and any(f"{name}.".startswith(f"{word}.") for word in words))
    ]


class LostRanksError(LongspanError):
    """Ranks cannot be reached any more."""


class Session:
    """The tests of one run, and the report about those that are over."""

    def __init__(
        self,
        site: Site,
        names: Sequence[str],
        out: Path | None,
        advance: Callable[[str], None],
        finish: Callable[[Report], None],
    ) -> None:
        """`advance` is called with the name of each test, `finish` with the report, once, on rank 0."""
        self.site, self.names, self.out, self.advance, self.finish = site, names, out, advance, finish
        private = site.gather_bytes(" ".join(["", *private_words()]).encode() + b" ")
        words = {word for names in private for word in names.decode().split()}
        self.report = Report(facts(site), site.ranks.size, site.quick, words)
        self.start = self.test_start = time.monotonic()
        self._lock, self._is_over, self._lost = threading.RLock(), False, False
        self._raised: float | None = None
        """Seconds after which the test raised an exception on this rank."""

    def run(self, name: str, least_ranks: int, test: Callable[..., None], arguments: dict[str, Any]) -> Outcome:
        """Run a test on this rank, and return the outcome that all ranks agree on."""
        self.advance(name)
        self.test_start = time.monotonic()
        limit = threading.Timer(TEST_SECONDS, self._abort, (f"not finished within {TEST_SECONDS:.0f} s",))
        limit.daemon = True
        limit.start()
        self._raised = None
        mine = self._try(name, least_ranks, test, arguments)
        try:
            row = [asdict(mine), self._raised, self.site.num_groups]
            rows = [json.loads(text) for text in self.site.gather_bytes(json.dumps(row).encode())]
            self.site.close_groups(max(num_groups for _, _, num_groups in rows))
        except (RuntimeError, OSError, ValueError) as error:
            text = mine.text if mine.is_red else f"ranks were lost in this line: {error}"
            self._add(name, Outcome("wrong", text))
            self._lost = True
            raise LostRanksError(text) from error
        finally:
            limit.cancel()
        outcomes = [Outcome(**found) for found, _, _ in rows]
        outcome = worst(outcomes)
        raised = [(seconds, rank) for rank, (_, seconds, _) in enumerate(rows) if seconds is not None]
        if raised and len({each.text for each in outcomes}) > 1:  # the others may have waited for the first that raised
            _, rank = min(raised)
            outcome = replace(outcomes[rank], text=f"rank {rank}: {outcomes[rank].text}")
        self._add(name, outcome)
        return outcome

    def _try(self, name: str, least_ranks: int, test: Callable[..., None], arguments: dict[str, Any]) -> Outcome:
        """Return the outcome of a test on this rank."""
        site = self.site
        if site.ranks.size < least_ranks:
            return Outcome("not run", f"it needs {least_ranks} ranks, and there are {site.ranks.size}")
        site.outcome = Outcome("right")
        try:
            test(**arguments)
            return site.outcome
        except pytest.skip.Exception as skipped:
            return Outcome("not run", str(skipped.msg))
        except pytest.fail.Exception as failed:
            return Outcome("wrong", str(failed.msg), site.outcome.figures)
        except Exception as error:
            self._raised = time.monotonic() - self.test_start
            return Outcome("wrong", f"{type(error).__name__}: {error}")
        finally:
            if site.is_gpu:
                torch.cuda.empty_cache()

    def _add(self, name: str, outcome: Outcome) -> None:
        with self._lock:
            if self._is_over:
                return
            now = time.monotonic()
            self.report.add(name, outcome, now - self.test_start)
            self.report.seconds = now - self.start
            if self.site.ranks.is_main and self.out is not None:
                write(self.report, self.out)

    def end(self, why: str = "ranks were lost before it") -> None:
        """Complete the report, with tests that did not run as "not run", and print it on rank 0; once."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self.report.is_complete = len(self.report.rows) == len(self.names) and not self._lost
            for name in self.names[len(self.report.rows) :]:
                self.report.add(name, Outcome("not run", f"not run: {why}"), 0.0)
            self.report.seconds = time.monotonic() - self.start
            if self.site.ranks.is_main:
                if self.out is not None:
                    write(self.report, self.out)
                self.finish(self.report)

    def _abort(self, text: str) -> None:
        """End this rank, which may be stuck in a test for ever; rank 0 first completes the report."""
        with self._lock:
            if self._is_over:
                return
            self._add(self.names[len(self.report.rows)], Outcome("wrong", text))
            self._lost = True
            self.end("the job was ended before it")
            os._exit(1)

    @contextmanager
    def until_sigterm(self) -> Iterator[None]:
        """Have rank 0 complete the report when the launcher ends the job because another rank has died.

        The main thread may be stuck in a collective, where Python runs no signal handlers. So a thread reads the pipe
        that the interpreter's own C handler writes the number of a signal to.
        """
        if not self.site.ranks.is_main or threading.current_thread() is not threading.main_thread():
            yield
            return
        read, write_end = os.pipe()
        os.set_blocking(write_end, False)
        before = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(write_end)
        threading.Thread(target=self._wait_for_sigterm, args=(read,), daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before[1])
            signal.signal(signal.SIGTERM, before[0])
            os.close(write_end)

    def _wait_for_sigterm(self, read: int) -> None:
        while (number := os.read(read, 1)) and number[0] != signal.SIGTERM:
            pass
        os.close(read)
        if not number:
            return
        deadline = time.monotonic() + GRACE_SECONDS
        while not self._is_over and time.monotonic() < deadline:
            time.sleep(0.05)
        self._abort("the launcher ended the job in this line: see which rank it says has failed")
