"""Floors, pins, pages and the matrix speak of the same versions."""

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import versions as matrix
from longspan.versions import PAIRS, PINNED, TORCH, TRANSFORMERS, minor, short

ROOT = Path(__file__).parents[2]
with (ROOT / "pyproject.toml").open("rb") as _file:
    PROJECT = tomllib.load(_file)


def test_floors_are_the_oldest_that_were_tested():
    assert f"torch>={short(TORCH[0])}" in PROJECT["project"]["dependencies"]
    assert f"transformers>={short(TRANSFORMERS[0])}" in PROJECT["project"]["optional-dependencies"]["hf"]


def test_pins_are_among_those_that_were_tested():
    assert f"transformers=={TRANSFORMERS[-1]}" in PROJECT["dependency-groups"]["hosts"]
    assert (PINNED, TRANSFORMERS[-1]) in PAIRS
    assert f"torch=={PINNED}" in (ROOT / ".ci" / "run").read_text()
    for name in ("README.md", "CONTRIBUTING.md"):
        assert f"torch=={PINNED}" in (ROOT / name).read_text()


def test_tables_are_in_order():
    for table in (TORCH, TRANSFORMERS):
        assert sorted(table, key=minor) == list(table)
        assert len({minor(release) for release in table}) == len(table)
    assert {release for pair in PAIRS for release in pair} <= {*TORCH, *TRANSFORMERS}
    assert (TORCH[0], TRANSFORMERS[0]) in PAIRS
    assert (TORCH[-1], TRANSFORMERS[-1]) in PAIRS or (TORCH[-1], TRANSFORMERS[-2]) in PAIRS


def test_the_page_states_the_supported_versions():
    """torch: the five newest minor releases, without gaps."""
    first, last = minor(TORCH[0]), minor(TORCH[-1])
    assert [minor(release) for release in TORCH] == [(first[0], n) for n in range(first[1], last[1] + 1)]
    assert len(TORCH) == 5
    page = (ROOT / "docs" / "versions.md").read_text().partition("## Which versions are supported")[2]
    rows = dict(re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]+) \|$", page.partition("*Supported*")[0], re.MULTILINE))
    assert rows["torch"] == f"{short(TORCH[0])} to {short(TORCH[-1])}"
    assert rows["transformers"] == f"{short(TRANSFORMERS[0])} to {short(TRANSFORMERS[-1])}"
    assert f">={rows['Python']}" == PROJECT["project"]["requires-python"]


def test_what_is_called_tested_has_a_row_on_the_page():
    """With its counts: none failed, or it is said what came of that."""
    page = (ROOT / "docs" / "versions.md").read_text()
    counts = r"(\d+) \| (\d+) \| (\d+) \| ([^|\n]*)\|"
    rows = re.findall(rf"^\| ([\d.]+) \| ([\d.-]+) \| ([^|]+?) \| {counts}", page, re.MULTILINE)
    assert all(int(failed) == 0 or said.strip() for *_, failed, _, said in rows)
    found = {(torch, transformers) for torch, transformers, _, passed, *_ in rows if int(passed)}
    by_ci = {(short(PINNED), "-"), (short(PINNED), TRANSFORMERS[-1])}
    assert {(short(release), "-") for release in TORCH} <= found | by_ci
    assert {(short(a), b) for a, b in PAIRS} <= found | by_ci


# -- the matrix --------------------------------------------------------------------------------------------------------

REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="1"/></testsuites>'


@pytest.mark.parametrize(
    ("failures", "had", "status", "said"),
    [
        (0, True, 0, "| 2.11 | - | quick | 6 | 0 | 1 |"),
        (2, True, 1, "| 2.11 | - | quick | 4 | 2 | 1 |"),
        (0, False, 3, "| 2.11 | - | quick | could not be installed |"),
    ],
)
def test_the_matrix_counts_and_ends_with_a_status(monkeypatch, capsys, tmp_path, failures, had, status, said):
    monkeypatch.setattr(matrix.Environment, "make", lambda self: had)
    monkeypatch.setattr(matrix.Environment, "install", lambda self, *words: had)
    monkeypatch.setattr(matrix.subprocess, "run", lambda command, **_: written(command, failures))
    monkeypatch.setattr("sys.argv", ["versions", "--oldest", "--out", str(tmp_path / "table.md")])
    assert matrix.main() == status
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "table.md").read_text()


def written(command, failures):
    """What pytest leaves behind."""
    (path,) = [Path(word.removeprefix("--junitxml=")) for word in command if word.startswith("--junitxml=")]
    path.write_text(REPORT.format(7, failures))
    return type("Done", (), {"returncode": int(failures > 0)})


def test_a_run_that_breaks_off_has_failed(monkeypatch):
    """No report, or none of it red, and yet an exit status: not a pass."""
    monkeypatch.setattr(matrix.subprocess, "run", lambda command, **_: type("Done", (), {"returncode": 3}))
    with matrix.Environment("2.11.0", 1.0) as environment:
        assert environment.test(matrix.Run("2.11.0", None, "quick")).failed == 1
    assert not environment.folder.exists()


def test_what_is_not_in_the_table_is_refused():
    assert matrix.named(["2.11", "2.15.0"], TORCH) == ["2.11.0", "2.15.0"]
    with pytest.raises(SystemExit, match=r"must be among 2\.11\.0, .* but got 9\.9"):
        matrix.named(["9.9"], TORCH)
