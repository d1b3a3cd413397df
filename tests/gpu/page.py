"""The page of a run: facts, a row for every section, and the lines that are red or were not run; then all lines.

It is printed, and written as Markdown and as JSON.

Names of hosts and people, addresses and paths are removed from every text, so that the page can be published.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import longspan
from longspan.cli.output import Column, Row, Screen, times
from longspan.formatting import seconds_text
from tests.gpu.site import VERDICTS, Outcome

_PATH = re.compile(r"(?<![\w.:/])~?/(?:[\w.+@-]+/)*[\w.+@-]+")
_ADDRESS = re.compile(
    r"(?<![\w.])\[?(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,7})\]?(?::\d+)?(?![\w.])"
)
MAX_TEXT = 600
ROUNDING = ("used", "of what rounding explains")
WORST = {
    "operators": ROUNDING, "exact": ROUNDING, "long": ROUNDING, "training": ROUNDING,
    "memory": ("used", "of the memory that was allowed"),
    "time": ("times", "the predicted time"),
    "host": ("times", "of the device's time"),
}  # fmt: skip
"""By section: the figure in which lines are compared with each other, and what it is a multiple of."""


def private_words() -> set[str]:
    """Return the names of this host and of its user."""
    words = {platform.node(), platform.node().partition(".")[0], Path.home().name}
    with suppress(OSError, KeyError, ImportError):  # a user without a name
        words.add(getpass.getuser())
    return {word for word in words if len(word) > 1}


def anonymize(text: str, private: Iterable[str]) -> str:
    """Return the text without names of hosts and people, addresses and paths, truncated to MAX_TEXT.

    >>> anonymize("node7: cannot open /home/ann/data/x.bin, peer [10.0.0.7]:4242 of ann", ["node7", "ann"])
    'HOST: cannot open PATH, peer ADDRESS of HOST'
    """
    text = _ADDRESS.sub("ADDRESS", _PATH.sub("PATH", text))
    for word in sorted(private, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", "HOST", text)
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


@dataclass
class Report:
    """The outcomes so far: (name, outcome, seconds) of each test."""

    facts: dict[str, Any]
    ranks: int
    quick: bool
    private: set[str]
    rows: list[tuple[str, Outcome, float]] = field(default_factory=list)
    seconds: float = 0.0
    is_complete: bool = False

    def add(self, name: str, outcome: Outcome, seconds: float) -> None:
        self.rows.append((name, replace(outcome, text=anonymize(outcome.text, self.private)), seconds))

    @property
    def reds(self) -> list[tuple[str, Outcome, float]]:
        return [row for row in self.rows if row[1].is_red]

    @property
    def ok(self) -> bool:
        return self.is_complete and not self.reds

    def repeat(self, name: str) -> str:
        """Return the command that runs one test alone."""
        quick = " --quick" if self.quick else ""
        return f"torchrun --nproc-per-node {self.ranks} -m longspan acceptance{quick} --only {name}"

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return for each section how many lines have which verdict, and the line with the least margin."""
        table: dict[str, dict[str, Any]] = {}
        for name, outcome, _ in self.rows:
            section = name.partition(".")[0]
            row = table.setdefault(section, {**dict.fromkeys(VERDICTS, 0), "worst": None, "worst_line": None})
            row[outcome.verdict] += 1
            key, _ = WORST.get(section, ROUNDING)
            value = outcome.times if key == "times" else outcome.figures.get(key)
            if value is not None and (row["worst"] is None or value > row["worst"]):
                row["worst"], row["worst_line"] = value, name
        return table

    def skipped(self) -> dict[str, list[str]]:
        """Return the names of lines that were not run, by reason."""
        reasons: dict[str, list[str]] = {}
        for name, outcome, _ in self.rows:
            if outcome.verdict == "not run":
                reasons.setdefault(outcome.text, []).append(name)
        return reasons

    def as_dict(self) -> dict[str, Any]:
        lines = []
        for name, outcome, seconds in self.rows:
            values = asdict(outcome)
            start = {"line": name, "verdict": values.pop("verdict"), "red": outcome.is_red}
            lines.append({**start, **values, "seconds": round(seconds, 3), "repeat": self.repeat(name)})
        return {
            "ok": self.ok, "complete": self.is_complete, "quick": self.quick, "seconds": round(self.seconds, 1),
            "facts": self.facts, "sections": self.sections(), "lines": lines,
        }  # fmt: skip

    def summary(self) -> str:
        counts = [(sum(outcome.verdict == verdict for _, outcome, _ in self.rows), verdict) for verdict in VERDICTS]
        parts = ", ".join(f"{number} {verdict}" for number, verdict in counts if number)
        end = "" if self.is_complete else "; it did not come to the end"
        return f"{'accepted' if self.ok else 'NOT ACCEPTED'}: {parts}, in {self.seconds:.0f} s{end}"


def verdict_text(outcome: Outcome) -> str:
    """
    >>> verdict_text(Outcome("slower", "", {}, 1.62))
    'slower than predicted by 1.62x'
    """
    word = outcome.verdict.upper() if outcome.is_red else outcome.verdict
    if outcome.times is None or outcome.verdict not in ("slower", "too slow"):
        return word
    factor = f"than predicted by {times(outcome.times)}"
    return f"{word}: slower {factor}" if outcome.is_red else f"{word} {factor}"


def fact_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [(label, _fact_text(value)) for label, value in facts.items() if value not in (None, "", [], {})]


def _fact_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_fact_text(inner)}" for name, inner in value.items() if inner is not None)
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


SECTION_HEADS = ("section", "right", "slower", "wrong", "not run", "worst")


def section_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the cells of the table of sections, under SECTION_HEADS."""
    rows: list[tuple[str, ...]] = []
    for section, row in report.sections().items():
        numbers = row["right"], row["slower"], row["too slow"] + row["wrong"], row["not run"]
        worst = ""
        if row["worst"] is not None:
            worst = f"{row['worst']:.2f} {WORST.get(section, ROUNDING)[1]} ({row['worst_line']})"
        rows.append((section, *(str(number or "") for number in numbers), worst))
    return rows


def figure_rows(report: Report) -> list[tuple[str, str]]:
    """Return the measured figures that no verdict shows."""
    names = {"time.links": "links, measured", "time.calibration": "calibrated", "time.overlap": "overlap"}
    rows = [(names[name], outcome.text) for name, outcome, _ in report.rows if name in names and not outcome.is_red]
    for name, outcome, _ in report.rows:
        new, warm = (outcome.figures.get(key) for key in ("new_seconds", "warm_seconds"))
        if new and warm:
            rows.append(("a new batch", f"{times(new / warm)} the time of the same again ({name})"))
    return rows


def show(report: Report, screen: Screen) -> None:
    """Print all lines, then the page."""
    columns = [Column("line", right=False), Column("took"), Column("verdict", right=False)]
    rows = [
        Row((name, seconds_text(seconds), verdict_text(outcome)), rest=outcome.text)
        for name, outcome, seconds in report.rows
    ]
    screen.table(columns, rows)
    screen.text()
    screen.title(report.summary())
    screen.facts([*fact_rows(report.facts), *figure_rows(report)])
    screen.text()
    heads = [Column(head, right=0 < number < 5) for number, head in enumerate(SECTION_HEADS)]
    screen.table(heads, [Row(cells) for cells in section_rows(report)])
    for reason, names in report.skipped().items():
        screen.text()
        screen.text(f"not run: {', '.join(names)}: {reason}")
    for name, outcome, _ in report.reds:
        screen.text()
        screen.text(f"{name}: {verdict_text(outcome)}. {outcome.text}")
        screen.text(f"  repeat it: {report.repeat(name)}")


def markdown(report: Report) -> str:
    """Return the page as Markdown, and all lines below it."""
    lines = [f"# longspan acceptance: {report.summary()}", "", "| fact | |", "|---|---|"]
    lines += [f"| {label} | {_cell(text)} |" for label, text in [*fact_rows(report.facts), *figure_rows(report)]]
    lines += ["", f"| {' | '.join(SECTION_HEADS)} |", "|---|---:|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(map(_cell, cells))} |" for cells in section_rows(report)]
    for name, outcome, _ in report.reds:
        lines += ["", f"- **{name}: {verdict_text(outcome)}.** {outcome.text}", f"  `{report.repeat(name)}`"]
    for reason, names in report.skipped().items():
        lines += ["", f"- not run: {', '.join(names)}: {reason}"]
    lines += ["", "<details><summary>all lines</summary>", ""]
    lines += ["| line | verdict | found | took |", "|---|---|---|---|"]
    for name, outcome, seconds in report.rows:
        verdict = f"**{verdict_text(outcome)}**" if outcome.is_red else verdict_text(outcome)
        lines.append(f"| {name} | {verdict} | {_cell(outcome.text)} | {seconds_text(seconds)} |")
    example = next((name for name, _, _ in [*report.reds, *report.rows]), "LINE")
    lines += ["", "</details>", "", "Repeat one line by its name:", "", "```", report.repeat(example), "```", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(report: Report, base: Path) -> None:
    """Write the Markdown page and the JSON file; a reader never sees half of one."""
    answer = {"command": "acceptance", "longspan": longspan.__version__, **report.as_dict()}
    for suffix, text in ((".md", markdown(report)), (".json", json.dumps(answer, indent=2) + "\n")):
        path = base.with_suffix(suffix)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text)
        os.replace(part, path)
