"""Public functions have types that a user's editor can use, and types refuse what the functions refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("user_program.py")


def test_a_users_program_is_typed():
    pytest.importorskip("pyright")
    words = ["pyright", "--pythonpath", sys.executable, "--outputjson", str(PROGRAM)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT, timeout=800)
    found = json.loads(done.stdout)["generalDiagnostics"]
    said = {one["range"]["start"]["line"] + 1: one["message"] for one in found if one["severity"] == "error"}
    lines = PROGRAM.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) == 8
    surprises = {number: said[number] for number in said.keys() - wrong}
    assert not surprises, surprises
    assert not wrong - said.keys(), [lines[number - 1] for number in wrong - said.keys()]
