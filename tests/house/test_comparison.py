"""docs/comparison.md: written from its data, every cell with a source, and no source that is not there."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import comparison, comparison_page
from benchmarks.comparison_probes import PROBES

ROOT = Path(__file__).parents[2]
FACTS = comparison_page.facts()
CELLS = {(row, column): system.get(column) for row, system in FACTS["systems"].items() for column in FACTS["columns"]}
SOURCED = {**CELLS, **{(row["what"], key): ["Y", *row[key]] for row in FACTS["theirs"] for key in ("who", "longspan")}}


def exists(command):
    """Whether what a command names is in this repository."""
    words = shlex.split(command)
    if words[0] == "pytest":
        return all((ROOT / word).exists() for word in words[1:] if not word.startswith("-"))
    path = ROOT / words[2].replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def faults(cell):
    """What is wrong with a cell: nothing at all, an unknown mark, or sources that are not there."""
    if not cell or len(cell) < 3:
        return ["no source"]
    mark, _, *sources = cell
    found = [] if mark in comparison_page.MARKS else [f"mark {mark}"]
    for source in sources:
        kind, _, rest = source.partition(":")
        if comparison_page.command(source):
            fine = exists(source)
        elif kind == "page":
            fine = (ROOT / "docs" / rest).exists()
        elif kind == "run":
            fine = rest in PROBES and rest in comparison_page.recorded()
        elif kind == "wheel":
            fine = bool(re.fullmatch(r"[\w.-]+/[\d.]+\d", rest))
        elif kind == "https":
            fine = bool(re.fullmatch(r"//[\w.-]+\.\w+/\S*", rest))
        else:
            name, _, number = source.partition("#")
            fine = name in FACTS["repositories"] and number.isdigit()
        found += [] if fine else [source]
    return found


def test_every_cell_has_a_source_that_is_there():
    assert not {where: faults(cell) for where, cell in SOURCED.items() if faults(cell)}


def test_words_that_claim_a_wrong_answer_or_nothing_at_all_are_explained():
    assert not [where for where, cell in CELLS.items() if cell[0] in "!?~-" and not cell[1]]


@pytest.mark.parametrize(
    "cell",
    [
        None,
        ["Y", "words"],
        ["maybe", "", "page:rival.md"],
        ["Y", "", "page:nowhere.md"],
        ["Y", "", "python -m benchmarks.nowhere"],
        ["Y", "", "pytest tests/nowhere.py"],
        ["Y", "", "run:nobody"],
        ["Y", "", "nobody#3"],
        ["Y", "", "te#"],
        ["Y", "", "https://"],
        ["Y", "", "wheel:torch"],
    ],
)
def test_the_test_notices(cell):
    assert faults(cell)


def test_the_page_is_what_the_data_says():
    assert (ROOT / "docs" / "comparison.md").read_text() == comparison_page.page()


def test_every_mark_of_the_tables_is_a_link():
    text = (ROOT / "docs" / "comparison.md").read_text().partition("## Not implemented")[0]
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert len(rows) == len(FACTS["short"]["rows"]) + len(FACTS["tables"]) * len(FACTS["systems"])
    for row in rows:
        for cell in row.strip("| ").split(" | "):
            assert re.fullmatch(r"\[[^\]]+\]\(\S+( \"[^\"]*\")?\)", cell), cell


def test_the_short_table_is_short():
    assert len(FACTS["short"]["rows"]) <= 8
    assert len(FACTS["short"]["columns"]) <= 8


def test_the_short_table_has_the_marks_of_the_page():
    page = (ROOT / "docs" / "comparison.md").read_text()
    bare = re.sub(r"\[(?:\*\*)?([^\]*]+)(?:\*\*)?\]\(\S+(?: \"[^\"]*\")?\)", r"\1", page)
    assert comparison_page.short_table() in bare


def test_bold_marks_were_run():
    """Bold, and "run" in its title: a cell with a probe or a command. Others are neither."""
    names = {source: comparison_page.how([source]) for cell in SOURCED.values() for source in cell[2:]}
    assert {kind for source, kind in names.items() if source.startswith(("run:", "python ", "pytest "))} == {"run"}
    assert {kind for source, kind in names.items() if not source.startswith(("run:", "python ", "pytest "))} == {"read"}
    for cell in CELLS.values():
        shown = comparison_page.linked(cell, FACTS["repositories"])
        mark, title = re.fullmatch(r"\[(.+)\]\(\S+ \"(.+)\"\)", shown).groups()
        was_run = any(comparison_page.how([source]) == "run" for source in cell[2:])
        assert (mark == f"**{cell[0]}**") == was_run == (" (run" in title)
        assert title.startswith(comparison_page.MARKS[cell[0]])


def test_every_mark_has_a_colour():
    """The style sheet knows cells by the first word of their titles."""
    css = (ROOT / "docs" / "_static" / "site.css").read_text()
    coloured = re.findall(r"td a\[title\^=\"([^\"]+)\"\]", css)
    assert set(coloured) == {re.split(r"[ ,]", word)[0] for word in comparison_page.MARKS.values()}


def test_what_2_15_changed_has_sources():
    assert not {
        row["what"]: faults(["Y", *row["before"]]) for row in FACTS["releases"] if faults(["Y", *row["before"]])
    }
    assert all(row["after"] for row in FACTS["releases"])


def test_every_probe_is_recorded_and_used():
    used = {source.removeprefix("run:") for cell in CELLS.values() for source in cell if source.startswith("run:")}
    assert set(PROBES) == set(comparison_page.recorded())
    assert used == set(PROBES)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (comparison.Answer("wrong", "off by 0.50"), 0),  # as the page has it
        (comparison.Answer("missing", "nothing here"), 0),
        (comparison.Answer("right", "1e-07"), 1),
        (comparison.Answer("refused", "ValueError: no"), 1),
    ],
)
def test_the_exit_status(answer, status, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "answered", lambda name: answer)
    assert comparison.main(["--only", "flex-score"]) == status
    out = capsys.readouterr().out
    assert out.count("\n| flex-score") == 1
    assert ("(differs from docs/comparison.md)" in out) == bool(status)


def test_answers_say_what_happened(monkeypatch):
    monkeypatch.setitem(PROBES, "right", comparison.PROBES["flex-score"].__class__("us", "", lambda: 1e-7))
    monkeypatch.setitem(PROBES, "wrong", comparison.PROBES["flex-score"].__class__("us", "", lambda: 0.5))
    monkeypatch.setitem(PROBES, "nan", comparison.PROBES["flex-score"].__class__("us", "", lambda: float("nan")))
    monkeypatch.setitem(PROBES, "refused", comparison.PROBES["flex-score"].__class__("us", "", lambda: 1 / 0))
    assert str(comparison.run_probe("right")) == "right: 1e-07"
    assert str(comparison.run_probe("wrong")) == "wrong: off by 0.50"
    assert comparison.run_probe("nan").kind == "wrong"
    assert str(comparison.run_probe("refused")) == "refused: ZeroDivisionError: division by zero"


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: None)
    assert str(comparison.answered("fla-cpu")) == "missing: fla not installed"
