"""What CONTRIBUTING says, run: a new mask, layout, planner and kernel on a copy. README: test_readme.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python ?([^\n]*)\n(.*?)```", re.DOTALL)


def blocks(name):
    return BLOCK.findall((ROOT / name).read_text())


def run(code, source, cwd):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), str(ROOT)))}  # `tests` is in the root
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_mask_layout_planner_and_kernel_are_one_file_and_one_line(tmp_path):
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
    assert added == 4
