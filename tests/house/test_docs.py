"""What the documents say, run: README's example, and CONTRIBUTING's new mask, layout and planner on a copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.runner import torchrun

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python ?([^\n]*)\n(.*?)```", re.DOTALL)


def blocks(name):
    return BLOCK.findall((ROOT / name).read_text())


def run(code, source, cwd):
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_example_runs_as_printed(tmp_path):
    (code,) = [code for kind, code in blocks("README.md") if not kind]
    printed = run(code, ROOT / "src", tmp_path)
    assert printed == "10920 of 16384 entries get a gradient\n"  # of 8 heads, 1365 distances that the mask allows
    assert f"```text\n{printed}```" in (ROOT / "README.md").read_text()


@pytest.mark.nightly  # CI walks there
def test_readme_program_prints_one_loss_on_any_number_of_ranks(tmp_path):
    (code,) = [code for kind, code in blocks("README.md") if kind == "torchrun"]
    (tmp_path / "train.py").write_text(code)
    losses = {}
    for ranks in (1, 4):
        done = torchrun(["--nproc-per-node", str(ranks), "train.py"], tmp_path)
        assert done.status == 0, done.report()
        losses[ranks] = [float(found) for found in re.findall(r"tokens, loss (\d+\.\d{6})", done.out)]
        assert len(losses[ranks]) == ranks
    assert max(losses[4]) - min(losses[4]) == 0.0
    assert abs(losses[4][0] - losses[1][0]) < 1e-5


def test_readme_is_a_first_screen():
    """Status, install and the words of the field come first, and prose before the results is not made of figures."""
    readme = (ROOT / "README.md").read_text()
    lines = readme.splitlines()
    assert len(lines) <= 110
    status = " ".join(lines[:5])
    for words in ("alpha", "CPUs with Gloo", "not yet run on a GPU", "-m longspan acceptance", "send us the page"):
        assert words in status, words
    first = " ".join(lines[:12])
    for word in (
        "context parallelism",
        "ring attention",
        "Ulysses",
        "FlashAttention",
        "flex attention",
        "packed",
        "hybrid",
    ):
        assert word in first, word
    assert lines.index("## Install") < 22
    prose, _, results = readme.partition("## Results")
    assert re.findall(r"^- .*\d.*: `(pytest|python) .*`$", results, re.MULTILINE) == [
        "pytest",
        "python",
        *["pytest"] * 3,
    ]
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", prose, flags=re.DOTALL)
    assert len(re.findall(r"\b\d[\d.,]*", prose)) <= 20


def test_a_new_mask_layout_and_planner_are_one_file_and_one_line(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src")
    added = 0
    for kind, code in blocks("CONTRIBUTING.md"):
        word, _, path = kind.partition("=")
        if word == "file":
            (tmp_path / path).write_text(code)
        elif word == "append":
            lines = [line for line in code.splitlines() if line]
            assert len([line for line in lines if not line.startswith("from")] or lines) == 1
            with (tmp_path / path).open("a") as file:
                file.write(code)
            added += 1
        else:
            assert kind == "run"
            run(code, tmp_path / "src", tmp_path)
    assert added == 3
