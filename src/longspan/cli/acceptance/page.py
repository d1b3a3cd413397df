"""The page: facts, one row for every line, and what to type to repeat it; as text, as Markdown and as JSON.

Nothing in it says whose machine it was: names of hosts and people, addresses and paths are taken out of every text.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longspan.cli.acceptance.lines import AcceptanceLine, Judgement, Outcome
from longspan.cli.output import Column, Row, Screen, times
from longspan.formatting import seconds_text

_PATH = re.compile(r"(?<![\w.:/])~?/(?:[\w.+@-]+/)*[\w.+@-]+")
_ADDRESS = re.compile(
    r"(?<![\w.])\[?(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,7})\]?(?::\d+)?(?![\w.])"
)
MOST_TEXT = 600


def private_words() -> set[str]:
    """Names of this host and of who runs this."""
    words = {platform.node(), platform.node().partition(".")[0], Path.home().name}
    with suppress(OSError, KeyError, ImportError):  # a user without a name
        words.add(getpass.getuser())
    return {word for word in words if len(word) > 1}


def cleaned(text: str, private: Iterable[str]) -> str:
    """The text without names of hosts and people, addresses and paths, and not too long.

    >>> cleaned("node7: cannot open /home/ann/data/x.bin, peer [10.0.0.7]:4242 of ann", ["node7", "ann"])
    'HOST: cannot open PATH, peer ADDRESS of HOST'
    """
    text = _ADDRESS.sub("ADDRESS", _PATH.sub("PATH", text))
    for word in sorted(private, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", "HOST", text)
    text = " ".join(text.split())
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."


@dataclass
class AcceptanceReport:
    """What was found so far."""

    facts: dict[str, Any]
    ranks: int
    quick: bool
    private: set[str]
    rows: list[tuple[AcceptanceLine, Outcome, float]] = field(default_factory=list)
    seconds: float = 0.0
    is_complete: bool = False

    def add(self, line: AcceptanceLine, outcome: Outcome, seconds: float) -> None:
        clean = replace(outcome, text=cleaned(outcome.text, self.private))
        self.rows.append((line, clean, seconds))

    @property
    def reds(self) -> list[tuple[AcceptanceLine, Outcome, float]]:
        return [row for row in self.rows if row[1].judgement.is_red]

    @property
    def ok(self) -> bool:
        return self.is_complete and not self.reds

    def repeat(self, line: AcceptanceLine) -> str:
        """What to type to run a line alone."""
        quick = " --quick" if self.quick else ""
        return f"torchrun --nproc-per-node {self.ranks} -m longspan acceptance{quick} --only {line.name}"

    def as_dict(self) -> dict[str, Any]:
        lines = [
            {"line": line.name, **outcome.as_dict(), "seconds": round(seconds, 3), "repeat": self.repeat(line)}
            for line, outcome, seconds in self.rows
        ]
        return {
            "ok": self.ok, "complete": self.is_complete, "quick": self.quick, "seconds": round(self.seconds, 1),
            "facts": self.facts, "lines": lines,
        }  # fmt: skip

    def summary(self) -> str:
        """The answer in one line."""
        counts = [(sum(o.judgement == kind for _, o, _ in self.rows), kind) for kind in Judgement]
        parts = ", ".join(f"{number} {kind}" for number, kind in counts if number)
        end = "" if self.is_complete else "; it did not come to the end"
        return f"{'accepted' if self.ok else 'NOT ACCEPTED'}: {parts}, in {self.seconds:.0f} s{end}"


def verdict_text(outcome: Outcome) -> str:
    """The verdict as people read it.

    >>> verdict_text(Outcome(Judgement.SLOWER, "", {}, 1.62))
    'slower than predicted by 1.62x'
    """
    word = str(outcome.judgement).upper() if outcome.judgement.is_red else str(outcome.judgement)
    if outcome.times is None or outcome.judgement not in (Judgement.SLOWER, Judgement.TOO_SLOW):
        return word
    by = f"than predicted by {times(outcome.times)}"
    return f"{word}: slower {by}" if outcome.judgement.is_red else f"{word} {by}"


def fact_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as labels with a text each."""
    return [(label, _said(value)) for label, value in facts.items() if value not in (None, "", [], {})]


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(inner)}" for name, inner in value.items() if inner is not None)
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def show(report: AcceptanceReport, screen: Screen) -> None:
    """The whole page on the screen."""
    screen.title(report.summary())
    screen.facts(fact_rows(report.facts))
    screen.text()
    columns = [Column("line", right=False), Column("took"), Column("verdict", right=False)]
    rows = [
        Row((line.name, seconds_text(seconds), verdict_text(outcome)), rest=outcome.text)
        for line, outcome, seconds in report.rows
    ]
    screen.table(columns, rows)
    for line, outcome, _ in report.reds:
        screen.text()
        screen.text(f"{line.name}: {verdict_text(outcome)}. {outcome.text}")
        screen.text(f"  repeat it: {report.repeat(line)}")


def markdown(report: AcceptanceReport) -> str:
    """The whole page, to be pasted into an issue."""
    lines = [f"# longspan acceptance: {report.summary()}", "", "| fact | |", "|---|---|"]
    lines += [f"| {label} | {_cell(text)} |" for label, text in fact_rows(report.facts)]
    lines += ["", "| line | verdict | found | took |", "|---|---|---|---|"]
    for line, outcome, seconds in report.rows:
        verdict = f"**{verdict_text(outcome)}**" if outcome.judgement.is_red else verdict_text(outcome)
        lines.append(f"| {line.name} | {verdict} | {_cell(outcome.text)} | {seconds_text(seconds)} |")
    lines += ["", "A line is repeated alone by its name:", "", "```", f"{report.repeat(_any(report))}", "```", ""]
    return "\n".join(lines)


def _any(report: AcceptanceReport) -> AcceptanceLine:
    """The line to show: the first that is red, or the first of all."""
    rows = report.reds or report.rows
    return rows[0][0] if rows else AcceptanceLine("LINE", lambda _: Outcome(Judgement.NOT_RUN, ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(report: AcceptanceReport, base: Path) -> tuple[Path, Path]:
    """Writes page and JSON, whole or not at all."""
    import json

    import longspan

    answer = {"command": "acceptance", "longspan": longspan.__version__, **report.as_dict()}
    paths = base.with_suffix(".md"), base.with_suffix(".json")
    for path, text in zip(paths, (markdown(report), json.dumps(answer, indent=2) + "\n"), strict=True):
        beside = path.with_name(f".{path.name}.part")
        beside.write_text(text)
        os.replace(beside, path)
    return paths
