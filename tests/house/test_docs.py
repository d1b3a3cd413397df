"""What the documents say, run: README's example, and CONTRIBUTING's new mask, layout and planner on a copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
    assert "tensor(True)" in run(code, ROOT / "src", tmp_path)


def test_readme_torchrun_example_runs_as_printed(tmp_path):
    (code,) = [code for kind, code in blocks("README.md") if kind == "torchrun"]
    (tmp_path / "example.py").write_text(code)
    done = torchrun(["--nproc-per-node", "4", "example.py"], tmp_path)
    assert done.status == 0, done.report()
    errors = [float(found) for found in re.findall(r"error (\d\.\de[+-]\d+)", done.out)]
    assert len(errors) == 4
    assert max(errors) < 1e-5


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


def test_one_screen_documents_fit():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 90
