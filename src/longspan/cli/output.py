"""Types of arguments, tables and JSON on stdout, and progress on stderr."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

# -- Arguments ---------------------------------------------------------------------------------------------------------


_COUNT = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?([kKmMgG]?)")
_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MAX_COUNT = 1 << 40


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return a question about the nearest name, or nothing if none is near.

    >>> did_you_mean("longtial", ["causal", "longtail"]), did_you_mean("xyzzy", ["causal"])
    (' Did you mean longtail?', '')
    """
    near = get_close_matches(text.lower(), list(known), 1, 0.7)
    return f" Did you mean {near[0]}?" if near else ""


def to_write(*endings: str) -> Callable[[str], Path]:
    """Return an argument type: the name of a file that can be written, with one of these endings.

    >>> to_write(".html", ".png")("curves.pdf")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: the name must end in .html or .png, but got 'curves.pdf'.
    """

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(f"the name must end in {' or '.join(endings)}, but got {text!r:.80}.")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r:.80}. Create it first.")
        return path

    return parse


def describe_missing(text: str) -> str:
    """Return a sentence about a name that looks like a file but is none; empty if it does not look like one.

    >>> describe_missing("runs/lengths.txt"), describe_missing("longtial")
    (" There is no file 'runs/lengths.txt' here.", '')
    """
    looks_like_file = "/" in text or bool(Path(text).suffix)
    return f" There is no file {text!r:.80} here." if looks_like_file and not os.path.isfile(text) else ""


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
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, but got {text!r:.40}.")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas.

    >>> counts("8,16,1k")
    (8, 16, 1024)
    """
    return tuple(count(part) for part in text.split(","))


# -- Text and JSON -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A row's cells, and whether it is marked. `rest` follows the cells, across the remaining columns."""

    cells: tuple[str, ...]
    chosen: bool = False
    rest: str = ""


def print_text(text: str = "") -> None:
    print("\n".join(_wrap(text, _width())))


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print labels with a text each, wrapped next to its label."""
    facts = list(facts)
    indent = max(len(label) for label, _ in facts) + 4
    for label, text in facts:
        first, *more = _wrap(text, max(_width() - indent, 30))
        print(f"  {label:{indent - 2}}{first}", *(" " * indent + line for line in more), sep="\n")


def print_table(heads: Sequence[str], rows: Sequence[Row], left: Sequence[int] = (0,)) -> None:
    """Print rows under headings, and mark chosen ones with a star. All but the columns in `left` are numbers."""
    widths = [
        max([len(head), *(len(row.cells[i]) for row in rows if i < len(row.cells))]) for i, head in enumerate(heads)
    ]

    def align(cells: Sequence[str]) -> str:
        used = enumerate(zip(cells, widths, strict=False))
        return "  ".join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in used)

    print(f"  {align(heads)}".rstrip(), f"  {align(['-' * width for width in widths])}", sep="\n")
    for row in rows:
        print(f"{'* ' if row.chosen else '  '}{align(row.cells)}{'  ' + row.rest if row.rest else ''}".rstrip())
    print()


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def _wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text, without breaking names of files and schemes."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def print_json(command: str, answer: dict[str, Any]) -> None:
    """Print the answer of a command as one JSON object."""
    import longspan

    print(json.dumps({"command": command, "longspan": longspan.__version__, **answer}, indent=2))


INTERVAL = 2.0
"""Seconds between lines of progress."""


def progress(args: argparse.Namespace, title: str, *, is_main: bool = True) -> Callable[[str], None]:
    """Return a function to call with the name of each part as it begins: rank 0 prints some of them to stderr."""
    begin = time.monotonic()
    last = begin - INTERVAL

    def advance(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        if is_main and not args.json and now >= last + INTERVAL:
            last = now
            print(f"{title}: {name}, {now - begin:.0f} s", file=sys.stderr, flush=True)

    return advance
