"""What a person sees: facts, tables and notes. With rich when it is there, else aligned plain text."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
