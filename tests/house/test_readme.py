"""README: what is on its first screen in a browser, and that its figures are those of the tests and of the commands."""

import os
import re

import pytest

from benchmarks import busiest_rank
from longspan.cli import main
from tests.exact_cases import DTYPES
from tests.gloo.test_gloo import NUM_CASES
from tests.house import readme_page
from tests.house.test_docs import ROOT
from tests.jobs.walk import Typed, Walker, stops
from tests.unit.test_exact import KERNELS, SEEDS

README = (ROOT / "README.md").read_text()
FIRST = ("Train transformers on sequences", "Nothing has run on a GPU", "pip install ", "-from torch.distributed")


def below(boxes, height):
    """What of the first screen is not on it: the sentence, the status, the picture, how to install, the first code."""
    seen = [box for box in boxes if box["bottom"] <= height and box["right"] <= readme_page.WIDTH and not box["cut"]]
    wanted = {words: [box for box in seen if words in box["text"]] for words in FIRST}
    wanted["picture"] = [box for box in seen if box["tag"] == "img" and box["shown"]]
    return [words for words, found in wanted.items() if not found]


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("readme_renderer")
    pytest.importorskip("comrak")
    if readme_page.find_browser() is None:
        if os.environ.get("LONGSPAN_CI"):
            pytest.fail("LONGSPAN_CI is set, and no chromium is installed: apt-get install -y chromium")
        pytest.skip("no chromium is installed (apt-get install -y chromium)")


@pytest.mark.usefixtures("browser")
def test_the_first_screen_has_what_a_reader_needs():
    boxes = readme_page.look(README)
    assert below(boxes, readme_page.HEIGHT) == []
    assert not [box["text"] for box in boxes if box["cut"]]  # no code that must be scrolled sideways
    assert below(boxes, 650) == ["-from torch.distributed"]  # a screen that is too low is found
    assert "picture" in below(readme_page.look(README.replace("readme.png", "gone.png")), readme_page.HEIGHT)


def test_readme_is_short_and_says_what_ran_where():
    lines = README.splitlines()
    assert len(lines) <= 60
    assert re.search(r"Alpha, tested on CPUs.*Nothing has run on a GPU or on NCCL yet", " ".join(lines[:7]))
    links = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", README)
    assert len(links) > 10
    for link in (a or b for a, b in links):
        assert (ROOT / link).exists(), link
    rows = re.findall(r"^\| (?!what|---)(.+) \| (.+) \| `(.+)` \|$", README, re.MULTILINE)
    assert len(rows) == 5
    for *_, command in rows:
        for path in re.findall(r"tests/\S+\.py", command):
            assert (ROOT / path).exists(), path
        for module in re.findall(r"-m (\S+)", command):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_counts_are_those_of_the_tests():
    assert f"{len(SEEDS) * len(DTYPES) * len(KERNELS):,} random calls in one process" in README
    assert f"{sum(NUM_CASES.values())} on 2 to {max(NUM_CASES)} ranks" in README
    counts = re.search(
        r"of (\d+) models: (\d+) exact, \d+ not built, (\d+) refused", (ROOT / "docs/models.md").read_text()
    )
    assert "{1} of {0} exact, {2} refused".format(*counts.groups()) in README


def test_bytes_of_the_busiest_rank_are_those_of_the_command():
    rows = {(row.name.partition(",")[0], row.ranks): f"{row.factor:.1f}" for row in busiest_rank.rows()}
    text = (
        f"{rows['140 documents', 8]} times as much on 8 ranks and {rows['140 documents', 64]} on 64 for 140 documents, "
    )
    assert f"{text}{rows['one document', 8]} and {rows['one document', 64]} for one" in README


def test_the_plan_prints_what_readme_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    ((command, *lines),) = (
        block.splitlines() for block in re.findall(r"```text\n\$ longspan (.*?)```", README, re.DOTALL)
    )
    assert main(command.split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    assert [line for line in lines if line not in printed] == []


def test_every_block_runs_or_is_put_into_a_program_that_does():
    found = stops(README)
    typed = [stop.command for stop in found if isinstance(stop, Typed)]
    assert len(typed) == len(set(typed)) == 7
    for stop in found:
        if not isinstance(stop, Typed):
            compile(stop[1], stop[0], "exec")
    assert README.count("```") == 2 * 5


@pytest.mark.nightly  # .ci/run walks through it in a clean place
@pytest.mark.timeout(900)
def test_readme_runs_as_it_is_printed(tmp_path):
    for name in ("transformers", "trl", "datasets"):
        pytest.importorskip(name)
    assert len(list(Walker(tmp_path).read(ROOT / "README.md"))) == 6  # without installing
