"""Output of commands: files, quantities in arguments, tables, and progress on stderr.

Progress is a bar of rich if it is installed, else a line of text. It is shown only if both stdout and stderr are
terminals, never with --json, and not within the first second.
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
from pathlib import Path
from typing import Any

# -- Files that commands are told to read or to write, looked at before anything is computed ---------------------------


def to_write(*endings: str) -> Callable[[str], Path]:
    """A type of argument: the name of a file that can be written, with one of these endings, if any are given.

    >>> to_write(".svg", ".png")("curves.pdf")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'curves.pdf' was given. Its name must end in .svg or .png, which say what is written.
    """

    def path_of(text: str) -> Path:
        path = Path(text)
        if endings and path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} was given. Its name must end in {' or '.join(endings)}, which"
                f" {'says' if len(endings) == 1 else 'say'} what is written."
            )
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r:.80} is a folder. Name a file in it.")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} cannot be written: there is no folder {str(path.parent)!r:.80}. Make it first."
            )
        return path

    return path_of


def missing(text: str) -> str:
    """What to say of a name that may have been meant as a file; nothing where it does not look like one.

    >>> missing("runs/lengths.txt"), missing("longtial")
    (" There is no file 'runs/lengths.txt' here.", '')
    """
    looks_like_one = "/" in text or "\\" in text or bool(Path(text).suffix)
    if not looks_like_one or Path(text).is_file():
        return ""
    return f" {text!r:.80} is a folder." if Path(text).is_dir() else f" There is no file {text!r:.80} here."


# Numbers and names as people write them on the command line, 64k or ring,exchange, and how one figure compares with
# another.


_COUNT = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?([kKmMgG]?)")
_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LARGEST = 1 << 40


def count(text: str) -> int:
    """A whole number; k, M and G stand for 1,024, 1,024 x 1,024 and so on, as lengths of sequences are named.

    >>> count("1M"), count("1.5k"), count("1_000")
    (1048576, 1536, 1000)
    """
    match = _COUNT.fullmatch(text.replace("_", "").replace(",", ""))
    if not match:
        raise argparse.ArgumentTypeError(f"a number such as 65536, 64k or 1M is expected, but {text!r:.40} was given.")
    whole, part, letter = match[1], match[2] or "", _FACTOR[match[3].lower()]
    scaled, left = divmod(int(whole + part) * letter, 10 ** len(part))
    if left or not 0 < scaled <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number from 1 to {LARGEST}.")
    return scaled


def counts(text: str) -> tuple[int, ...]:
    """Several numbers, separated by commas.

    >>> counts("8,16,1k")
    (8, 16, 1024)
    """
    return tuple(count(part) for part in text.split(","))


def schemes(text: str) -> tuple[str, ...]:
    """Names of schemes, separated by commas or semicolons; those inside parentheses separate nothing.

    >>> schemes("ring, hybrid(4,exchange); exchange")
    ('ring', 'hybrid(4,exchange)', 'exchange')
    """
    names, depth = [""], 0
    for letter in text.replace(" ", ""):
        depth += (letter == "(") - (letter == ")")
        if letter in ",;" and not depth:
            names.append("")
        else:
            names[-1] += letter
    if "" in names or depth:
        raise argparse.ArgumentTypeError(
            f"names such as ring,hybrid(4,exchange) are expected, but {text!r:.60} was given."
        )
    return tuple(names)


def times(value: float) -> str:
    """A factor.

    >>> times(15.18), times(0.5), times(1234.0)
    ('15.2x', '0.50x', '1,234x')
    """
    return f"{value:,.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"


def bytes_against(mine: float, other: float, name: str) -> str:
    """The bytes that one moves, compared with another of that name.

    >>> bytes_against(10, 139, "ring"), bytes_against(18, 10, "ring"), bytes_against(0, 10, "ring")
    ('13.9x fewer bytes than ring', '1.80x the bytes of ring', 'no bytes at all')
    >>> bytes_against(1000, 1001, "ring")
    'as many bytes as ring'
    """
    if not mine:
        return "no bytes at all"
    if _about(mine, other):
        return f"as many bytes as {name}"
    return f"{times(other / mine)} fewer bytes than {name}" if other > mine else _more(mine, other, f"bytes of {name}")


def memory_against(mine: float, other: float) -> str:
    """The memory that one takes, compared with another; empty if it is about the same.

    >>> memory_against(10, 25), memory_against(25, 10), memory_against(0, 10), memory_against(100, 101)
    ('2.5x less memory', '2.5x the memory', 'no memory', '')
    """
    if _about(mine, other):
        return ""
    if not mine:
        return "no memory"
    return f"{times(other / mine)} less memory" if other > mine else _more(mine, other, "memory")


def _about(mine: float, other: float) -> bool:
    """Whether the factor between them would be printed as 1.00x or 1.01x."""
    return abs(mine - other) <= 0.015 * max(mine, other)


def _more(mine: float, other: float, noun: str) -> str:
    return f"{times(mine / other)} the {noun}" if other else f"more {noun}"


def many(number: int, noun: str) -> str:
    """A number and its noun, in the plural where it needs one.

    >>> many(1, "rank"), many(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


# What a person sees: facts, tables and notes. With rich when it is there, else aligned plain text.


WIDEST = 100


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading; numbers are aligned to the right."""

    head: str
    right: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """A row's cells, and whether it is the one to look at. `rest` runs on after the cells, in the columns left over."""

    cells: tuple[str, ...]
    chosen: bool = False
    rest: str = ""


class Screen:
    """Prints to stdout. `fancy` uses rich; None asks whether it is installed and stdout is a terminal."""

    def __init__(self, *, fancy: bool | None = None, width: int | None = None) -> None:
        self.width = min(width or shutil.get_terminal_size((WIDEST, 24)).columns, 200)
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
        if self.console is None:
            print(text)
        else:
            self.console.print(text, style="bold", markup=False)

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Labels with a text each; long texts continue below their beginning."""
        indent = max(len(label) for label, _ in facts) + 4
        for label, text in facts:
            lines = _wrapped(text, max(min(self.width, WIDEST) - indent, 30))
            for number, line in enumerate(lines):
                head = f"  {label if number == 0 else '':{indent - 2}}"
                if self.console is None:
                    print(head + line)
                else:
                    self.console.print(f"[cyan]{head}[/cyan]", end="")
                    self.console.print(line, markup=False)

    def table(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Rows under headings; the chosen ones are marked."""
        widths = [
            max([len(c.head), *(len(row.cells[i]) for row in rows if i < len(row.cells))])
            for i, c in enumerate(columns)
        ]
        self._line("  " + "  ".join(_put(c.head, w, c.right) for c, w in zip(columns, widths, strict=True)), "bold")
        self._line("  " + "  ".join(("─" if self.console else "-") * w for w in widths), "dim")
        for row in rows:
            used = zip(row.cells, widths, columns, strict=False)
            text = "  ".join(_put(cell, w, c.right) for cell, w, c in used)
            line = f"{'* ' if row.chosen else '  '}{text}{'  ' + row.rest if row.rest else ''}"
            self._line(line, "bold green" if row.chosen else "dim" if row.rest else "")

    def notes(self, notes: Sequence[str]) -> None:
        """Sentences below."""
        for note in notes:
            for line in _wrapped(note, min(self.width, WIDEST)):
                self._line(line, "dim")

    def text(self, text: str = "") -> None:
        for line in _wrapped(text, min(self.width, WIDEST)):
            self._line(line)

    def _line(self, line: str, style: str = "") -> None:
        if self.console is None:
            print(line.rstrip())
        else:
            self.console.print(line.rstrip(), style=style, markup=False, soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of a text; names of files and schemes stay whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _put(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def print_json(command: str, answer: dict[str, Any]) -> None:
    """The answer of a command as one JSON object."""
    import longspan

    print(json.dumps({"command": command, "longspan": longspan.__version__, **answer}, indent=2))


def screen_of(args: Any) -> Screen:
    """The screen that --plain and the terminal allow."""
    return Screen(fancy=False if getattr(args, "plain", False) else None)


# -- Progress ----------------------------------------------------------------------------------------------------------


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
