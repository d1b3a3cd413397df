"""How far a command has come, on stderr, for a person who waits: a bar by rich if it is there, else a line of text.

Only where both stdout and stderr are a terminal, and never beside --json: what is piped or parsed has no bar in it.
Nothing is drawn in the first second, so quick answers do not flicker. Elsewhere a command that takes long may ask for
lines on stderr, one every few seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE, EVERY, LINES = 1.0, 0.25, 2.0
"""Seconds before anything is drawn, between drawings, and between lines where there is no terminal."""


@contextmanager
def progress(
    args: Any, title: str, total: int | None = None, *, speaks: bool = True, lines: bool = False
) -> Iterator[Callable[[str], None]]:
    """Shows that something is under way; gives a function to call as each of `total` parts begins, with its name.

    Without a total, only the title and the seconds are shown. `speaks`: whether this rank is the one that prints.
    `lines`: without a terminal, write lines, the first at once.
    """
    bar = ProgressBar(title, total)
    if not (speaks and is_watched(args)):
        yield bar.write_line if speaks and lines and not getattr(args, "json", False) else bar.advance
        return
    draw = _draw_plain if getattr(args, "plain", False) or not _has_rich() else _draw_rich
    drawing = threading.Thread(target=draw, args=(bar,), name="longspan progress", daemon=True)
    drawing.start()
    try:
        yield bar.advance
    finally:
        bar.over.set()
        drawing.join()


class ProgressBar:
    """What there is to draw."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total = title, total
        self.now, self.done, self.begin = "", 0, time.monotonic()
        self.over = threading.Event()
        self._next_line = self.begin

    def advance(self, now: str) -> None:
        """Another part begins, and this is its name."""
        self.now, self.done = now, self.done + 1

    def write_line(self, now: str) -> None:
        """The same, with a line on stderr unless the last one was a moment ago."""
        self.advance(now)
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINES
            print(self.line(), file=sys.stderr, flush=True)

    def line(self, width: int = 79) -> str:
        """The state in a line.

        >>> bar = ProgressBar("comparing", 12)
        >>> bar.advance("ring over zigzag")
        >>> bar.line()
        'comparing: 1 of 12, ring over zigzag, 0 s'
        """
        parts = [] if self.total is None else [f"{min(self.done, self.total)} of {self.total}"]
        parts += [self.now] if self.now else []
        text = ", ".join([*parts, f"{time.monotonic() - self.begin:.0f} s"])
        return f"{self.title}: {text}"[:width]


def is_watched(args: Any) -> bool:
    """Whether a person looks on: no --json, and neither stdout nor stderr goes elsewhere."""
    on_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return on_terminal and not getattr(args, "json", False)


def _has_rich() -> bool:
    from importlib.util import find_spec

    return find_spec("rich") is not None


def _draw_plain(bar: ProgressBar) -> None:
    """One line that is written over, and wiped out at the end."""
    shown = 0
    while not bar.over.wait(EVERY if shown else PATIENCE):
        line = bar.line()
        sys.stderr.write("\r" + line.ljust(shown))
        sys.stderr.flush()
        shown = len(line)
    if shown:
        sys.stderr.write("\r" + " " * shown + "\r")
        sys.stderr.flush()


def _draw_rich(bar: ProgressBar) -> None:
    if bar.over.wait(PATIENCE):
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    # Redirected, what is printed meanwhile would go to stderr.
    shown = Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False,
        redirect_stderr=False,
    )  # fmt: skip
    with shown:
        task = shown.add_task(bar.title, total=bar.total)
        while True:
            words = f"{bar.title}: {bar.now}" if bar.now else bar.title
            shown.update(task, completed=max(bar.done - 1, 0), description=words, refresh=True)
            if bar.over.wait(EVERY):
                return
