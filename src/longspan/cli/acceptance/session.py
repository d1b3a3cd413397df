"""One run of `longspan acceptance` on this rank: every line in turn, and the page at the end, also of a run that is
ended by others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from longspan.cli.acceptance.exactness import exactness_lines
from longspan.cli.acceptance.facts import facts
from longspan.cli.acceptance.faults import fault_lines
from longspan.cli.acceptance.host import host_lines
from longspan.cli.acceptance.lines import AcceptanceLine, Outcome, Site, not_run, worst, wrong
from longspan.cli.acceptance.memory import memory_lines
from longspan.cli.acceptance.operators import operator_lines
from longspan.cli.acceptance.page import AcceptanceReport, private_words, write
from longspan.cli.acceptance.timing import timing_lines
from longspan.errors import LongspanError

GRACE = 8.0
"""Seconds that a run has left to say what happened, once its launcher has told it to end."""


def all_lines(*, is_gpu: bool) -> list[AcceptanceLine]:
    """Every line, in the order of the page."""
    sections = (operator_lines, exactness_lines, memory_lines, timing_lines, host_lines, fault_lines)
    return [line for section in sections for line in section(is_gpu=is_gpu)]


def chosen_lines(lines: Sequence[AcceptanceLine], only: str | None, *, quick: bool) -> list[AcceptanceLine]:
    """Those that were asked for, by name or by the beginning of it, which with `quick` stands for the quick ones.

    >>> lines = [AcceptanceLine(name, lambda _: not_run("")) for name in ("exact.ring", "exact.repeat", "host.waits")]
    >>> [line.name for line in chosen_lines(lines, "exact.ring,host", quick=False)]
    ['exact.ring', 'host.waits']
    """
    if only is None:
        return [line for line in lines if line.is_quick or not quick]
    wanted = [word.strip() for word in only.split(",")]
    for word in wanted:
        if not any(_is_named(line, word) for line in lines):
            raise LongspanError(
                f"--only {word!r:.60} was asked for, but no line of this machine has that name. They are:"
                f" {', '.join(line.name for line in lines)}; the beginning of a name, such as exact, stands for all"
                f" that have it."
            )
    return [
        line
        for line in lines
        if line.name in wanted or (any(_is_named(line, word) for word in wanted) and (line.is_quick or not quick))
    ]


def _is_named(line: AcceptanceLine, word: str) -> bool:
    return line.name == word or line.name.startswith(f"{word}.")


class LostRanksError(LongspanError):
    """Ranks cannot be reached any more."""


class Session:
    """The lines of one run, and what came out of them so far."""

    def __init__(self, site: Site, lines: Sequence[AcceptanceLine], out: Path | None) -> None:
        self.site, self.lines, self.out = site, lines, out
        private = {word for names in site.texts(" ".join(private_words()).encode()) for word in names.decode().split()}
        self.report = AcceptanceReport(facts(site), site.ranks.size, site.quick, private)
        self.begin = self._line_begin = time.monotonic()
        self._lock, self._is_over = threading.Lock(), False

    def run(self, tell: Callable[[str], None], finish: Callable[[AcceptanceReport], None]) -> AcceptanceReport:
        """Runs every line; `finish` shows the page, once, on the rank that speaks."""
        with self._last_words(finish):
            try:
                for line in self.lines:
                    tell(line.name)
                    self._run_line(line)
                self.report.is_complete = True
            except LostRanksError:
                self._leave("not run: ranks were lost before it")
            self._end(finish)
        return self.report

    def _run_line(self, line: AcceptanceLine) -> None:
        self._line_begin = begin = time.monotonic()
        site = self.site
        mine = self._tried(line)
        try:
            found = worst([Outcome.from_bytes(text) for text in site.texts(mine.to_bytes())])
            site.close_groups()
        except (RuntimeError, OSError, ValueError) as error:
            text = mine.text if mine.judgement.is_red else f"ranks were lost in this line: {error}"
            self._add(line, wrong(text), begin)
            raise LostRanksError(text) from error
        self._add(line, found, begin)

    def _tried(self, line: AcceptanceLine) -> Outcome:
        """What the line came to on this rank; whatever it raises is its outcome."""
        if self.site.ranks.size < line.least_ranks:
            return not_run(f"it needs {line.least_ranks} ranks, and there are {self.site.ranks.size}")
        try:
            return line.run(self.site)
        except Exception as error:
            return wrong(f"{type(error).__name__}: {error}")
        finally:
            if self.site.is_gpu:
                torch.cuda.empty_cache()

    def _add(self, line: AcceptanceLine, outcome: Outcome, begin: float) -> None:
        with self._lock:
            if self._is_over:
                return
            self.report.add(line, outcome, time.monotonic() - begin)
            self.report.seconds = time.monotonic() - self.begin
            self._write()

    def _write(self) -> None:
        if self.site.ranks.speaks and self.out is not None:
            write(self.report, self.out)

    def _leave(self, why: str) -> None:
        """Notes the lines that nobody runs any more."""
        for line in self.lines[len(self.report.rows) :]:
            self.report.add(line, not_run(why), 0.0)

    def _end(self, finish: Callable[[AcceptanceReport], None]) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self.report.seconds = time.monotonic() - self.begin
            self._write()
            if self.site.ranks.speaks:
                finish(self.report)

    @contextmanager
    def _last_words(self, finish: Callable[[AcceptanceReport], None]) -> Iterator[None]:
        """When a launcher ends the job because a rank has died, the rank that speaks still writes its page.

        It may be stuck in a wait that nothing ends, where Python runs no handler of signals, so a thread looks at what
        the interpreter's own handler writes into a pipe. The line under way has a few seconds to name who is gone.
        """
        if not self.site.ranks.speaks or threading.current_thread() is not threading.main_thread():
            yield
            return
        read, write_end = os.pipe()
        os.set_blocking(write_end, False)
        before = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(write_end)
        threading.Thread(target=self._speak_at_the_end, args=(read, finish), daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before[1])
            signal.signal(signal.SIGTERM, before[0])
            os.close(write_end)

    def _speak_at_the_end(self, read: int, finish: Callable[[AcceptanceReport], None]) -> None:
        while (signals := os.read(read, 1)) and signals[0] != signal.SIGTERM:
            pass
        os.close(read)
        if not signals:
            return
        end = time.monotonic() + GRACE
        while not self._is_over and time.monotonic() < end:
            time.sleep(0.05)
        if self._is_over:
            return
        under_way = self.lines[len(self.report.rows)]
        text = "the launcher ended the job in this line: see which rank it says has failed"
        self._add(under_way, wrong(text), self._line_begin)
        self._leave("not run: the job was ended before it")
        self._end(finish)
        os._exit(1)
