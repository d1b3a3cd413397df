"""Arguments and output of commands: files, numbers, tables, JSON, and progress on stderr.

With rich (the extra `cli`) and on a terminal, output has colours and progress is a bar; otherwise both are plain text
with the same content. Progress is shown only if both stdout and stderr are terminals, never with --json, and not within
the first second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longspan.errors import PlanError
from longspan.planning.planners import scheme_name

# -- Arguments ---------------------------------------------------------------------------------------------------------


_COUNT = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?([kKmMgG]?)")
_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MAX_COUNT = 1 << 40


def to_write(*endings: str) -> Callable[[str], Path]:
    """Return an argument type: the name of a file that can be written, with one of these endings.

    >>> to_write(".svg", ".png")("curves.pdf")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: the name must end in .svg or .png, but got 'curves.pdf'.
    """

    def parse(text: str) -> Path:
        path = Path(text)
        if endings and path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(f"the name must end in {' or '.join(endings)}, but got {text!r:.80}.")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r:.80} is a directory. Name a file in it.")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} cannot be written: there is no directory {str(path.parent)!r:.80}. Create it first."
            )
        return path

    return parse


def describe_missing(text: str) -> str:
    """Return a sentence about a name that looks like a file but is none; empty if it does not look like one.

    >>> describe_missing("runs/lengths.txt"), describe_missing("longtial")
    (" There is no file 'runs/lengths.txt' here.", '')
    """
    looks_like_file = "/" in text or "\\" in text or bool(Path(text).suffix)
    if not looks_like_file or Path(text).is_file():
        return ""
    return f" {text!r:.80} is a directory." if Path(text).is_dir() else f" There is no file {text!r:.80} here."


def count(text: str) -> int:
    """Parse a whole number; k, M and G stand for 2**10, 2**20 and 2**30.

    >>> count("1M"), count("1.5k"), count("1_000")
    (1048576, 1536, 1000)
    """
    match = _COUNT.fullmatch(text.replace("_", "").replace(",", ""))
    if not match:
        raise argparse.ArgumentTypeError(f"must be a number such as 65536, 64k or 1M, but got {text!r:.40}.")
    digits, decimals, factor = match[1], match[2] or "", _FACTOR[match[3].lower()]
    value, remainder = divmod(int(digits + decimals) * factor, 10 ** len(decimals))
    if remainder or not 0 < value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_COUNT}, but got {text!r:.40}.")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas.

    >>> counts("8,16,1k")
    (8, 16, 1024)
    """
    return tuple(count(part) for part in text.split(","))


def schemes(text: str) -> tuple[str, ...]:
    """Parse names of schemes, separated by commas or semicolons that are not inside parentheses.

    >>> schemes("ring, hybrid(4,exchange); ulysses")
    ('ring', 'hybrid(4,exchange)', 'all_to_all')
    """
    names, depth = [""], 0
    for letter in text.replace(" ", ""):
        depth += (letter == "(") - (letter == ")")
        if letter in ",;" and not depth:
            names.append("")
        else:
            names[-1] += letter
    if "" in names or depth:
        raise argparse.ArgumentTypeError(f"must be names such as ring,hybrid(4,exchange), but got {text!r:.60}.")
    try:
        return tuple(map(scheme_name, names))
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# -- Comparisons in words ----------------------------------------------------------------------------------------------


def times(value: float) -> str:
    """
    >>> times(15.18), times(0.5), times(1234.0)
    ('15.2x', '0.50x', '1,234x')
    """
    return f"{value:,.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"


def bytes_against(mine: float, other: float, name: str) -> str:
    """Compare bytes moved with those of another scheme of that name.

    >>> bytes_against(10, 139, "ring"), bytes_against(18, 10, "ring"), bytes_against(0, 10, "ring")
    ('13.9x fewer bytes than ring', '1.80x the bytes of ring', 'no bytes at all')
    >>> bytes_against(1000, 1001, "ring")
    'as many bytes as ring'
    """
    if not mine:
        return "no bytes at all"
    if _is_close(mine, other):
        return f"as many bytes as {name}"
    return f"{times(other / mine)} fewer bytes than {name}" if other > mine else _more(mine, other, f"bytes of {name}")


def memory_against(mine: float, other: float) -> str:
    """Compare memory with another's; empty if it is about the same.

    >>> memory_against(10, 25), memory_against(25, 10), memory_against(0, 10), memory_against(100, 101)
    ('2.5x less memory', '2.5x the memory', 'no memory', '')
    """
    if _is_close(mine, other):
        return ""
    if not mine:
        return "no memory"
    return f"{times(other / mine)} less memory" if other > mine else _more(mine, other, "memory")


def _is_close(mine: float, other: float) -> bool:
    """Return whether the factor between them would be printed as 1.00x or 1.01x."""
    return abs(mine - other) <= 0.015 * max(mine, other)


def _more(mine: float, other: float, noun: str) -> str:
    return f"{times(mine / other)} the {noun}" if other else f"more {noun}"


# -- Text and JSON -----------------------------------------------------------------------------------------------------


MAX_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading; numbers are aligned to the right."""

    head: str
    right: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """A row's cells, and whether it is highlighted. `rest` follows the cells, across the remaining columns."""

    cells: tuple[str, ...]
    chosen: bool = False
    rest: str = ""


class Screen:
    """Print to stdout. `fancy` uses rich; None uses it if it is installed and stdout is a terminal."""

    def __init__(self, *, fancy: bool | None = None, width: int | None = None) -> None:
        self.width = min(width or shutil.get_terminal_size((MAX_WIDTH, 24)).columns, 200)
        self.fancy = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" if fancy is None else fancy
        self.console: Any = None
        if self.fancy:
            try:
                from rich.console import Console
            except ModuleNotFoundError:
                self.fancy = False
            else:
                self.console = Console(width=self.width, highlight=False, force_terminal=fancy)

    def title(self, text: str) -> None:
        self._line(text, "bold")

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Print labels with a text each, wrapped next to its label."""
        indent = max(len(label) for label, _ in facts) + 4
        for label, text in facts:
            for number, line in enumerate(_wrap(text, max(min(self.width, MAX_WIDTH) - indent, 30))):
                self._line(line, label=f"  {'' if number else label:{indent - 2}}")

    def table(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Print rows under headings; chosen ones are marked with a star."""
        widths = [
            max([len(c.head), *(len(row.cells[i]) for row in rows if i < len(row.cells))])
            for i, c in enumerate(columns)
        ]

        def align(cells: Sequence[str]) -> str:
            used = zip(cells, widths, columns, strict=False)
            return "  ".join(cell.rjust(width) if c.right else cell.ljust(width) for cell, width, c in used)

        self._line("  " + align([c.head for c in columns]), "bold")
        self._line("  " + align([("─" if self.console else "-") * width for width in widths]), "dim")
        for row in rows:
            line = f"{'* ' if row.chosen else '  '}{align(row.cells)}{'  ' + row.rest if row.rest else ''}"
            self._line(line, "bold green" if row.chosen else "dim" if row.rest else "")

    def code(self, lines: Sequence[str]) -> None:
        """Print lines to copy: not wrapped, and not indented."""
        for line in lines:
            self._line(line)

    def notes(self, notes: Sequence[str]) -> None:
        for note in notes:
            self.text(note, "dim")

    def text(self, text: str = "", style: str = "") -> None:
        for line in _wrap(text, min(self.width, MAX_WIDTH)):
            self._line(line, style)

    def _line(self, line: str, style: str = "", label: str = "") -> None:
        if self.console is None:
            print((label + line).rstrip())
        else:
            from rich.text import Text

            self.console.print(Text.assemble((label, "cyan"), (line.rstrip(), style)), soft_wrap=True)


def _wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text, without breaking names of files and schemes."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def screen_of(args: Any) -> Screen:
    return Screen(fancy=False if getattr(args, "plain", False) else None)


def print_json(command: str, answer: dict[str, Any]) -> None:
    """Print the answer of a command as one JSON object."""
    import longspan

    print(json.dumps({"command": command, "longspan": longspan.__version__, **answer}, indent=2))


# -- Progress ----------------------------------------------------------------------------------------------------------


DELAY, INTERVAL = 1.0, 2.0
"""Seconds before anything is shown, and between lines of text."""


def is_watched(args: Any) -> bool:
    """Return whether stdout and stderr are terminals, without --json."""
    on_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return on_terminal and not getattr(args, "json", False)


def _has_rich() -> bool:
    return find_spec("rich") is not None


@contextmanager
def progress(
    args: Any, title: str, total: int | None = None, *, is_main: bool = True, lines: bool = False
) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the name of each of `total` parts as it begins, and show them on stderr.

    Only the main rank shows anything. With `lines`, it writes lines of text also without a terminal, the first at once.
    """
    on_terminal = is_watched(args)
    if not is_main or getattr(args, "json", False) or not (on_terminal or lines):
        yield lambda _: None
    elif on_terminal and not getattr(args, "plain", False) and _has_rich():
        with _progress_bar(title, total) as advance:
            yield advance
    else:
        yield _progress_lines(title, total, delay=DELAY if on_terminal else 0.0)


@contextmanager
def _progress_bar(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    # With redirection, rich would print to stderr what commands print to stdout meanwhile.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
    task, done = bar.add_task(title, total=total), -1

    def advance(name: str) -> None:
        nonlocal done
        done += 1
        bar.update(task, completed=done, description=f"{title}: {name}")

    start = threading.Timer(DELAY, bar.start)
    start.daemon = True
    start.start()
    try:
        yield advance
    finally:
        start.cancel()
        start.join()
        bar.stop()


def _progress_lines(title: str, total: int | None, delay: float) -> Callable[[str], None]:
    begin, done = time.monotonic(), 0
    next_line = begin + delay

    def advance(name: str) -> None:
        nonlocal done, next_line
        done += 1
        now = time.monotonic()
        if now >= next_line:
            next_line = now + INTERVAL
            number = "" if total is None else f"{min(done, total)} of {total}, "
            print(f"{title}: {number}{name}, {now - begin:.0f} s"[:79], file=sys.stderr, flush=True)

    return advance
