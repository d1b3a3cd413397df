"""`python -O` leaves asserts out, `-OO` docstrings as well: nothing may need either."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

SRC = Path(longspan.__file__).parent
HERE = Path(__file__).parent
# Functions that only look. Whatever else an assert calls may do something that is missing under -O.
LOOKS = {"all", "any", "array_equal", "equal", "hasattr", "is_floating_point", "isinstance", "issubclass", "len"}
LOOKS |= {"max", "min", "numel", "set", "sorted", "sum", "tuple", "type"}


def called(test):
    """Names of what an assert's test calls, as far as calls have a name."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "something without a name"))
        elif isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            yield type(node).__name__


def asserts_that_work(text):
    """(line, what it does) for asserts of a source text that do more than look."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            yield from ((node.lineno, name) for name in called(node.test) if name not in LOOKS)


def test_asserts_only_look():
    wrong = [
        f"{path.relative_to(SRC.parent)}:{line}: {name} inside an assert is not run under python -O"
        for path in sorted(SRC.rglob("*.py"))
        for line, name in asserts_that_work(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "assert next(program) is None",
        "assert queue.pop() == 3",
        "assert (found := look()) is not None",
        "assert all(work.wait() for work in works)",
        "def f():\n    assert (yield 1) is None",
        "assert made[0]()",
    ],
)
def test_asserts_that_work_are_seen(text):
    assert list(asserts_that_work(text))


@pytest.mark.parametrize("text", ["assert x is not None", "assert len(x) == 3 and isinstance(x, list), describe(x)"])
def test_asserts_that_only_look_are_not(text):
    assert not list(asserts_that_work(text))


def run(command):
    env = {**os.environ, "PYTHONPATH": str(SRC.parent), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env.pop("PYTHONOPTIMIZE", None)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)


@pytest.mark.nightly
@pytest.mark.timeout(160)
@pytest.mark.parametrize("option", ["-O", "-OO"])
def test_one_device_without_asserts(option):
    done = run([sys.executable, option, str(HERE / "optimised_script.py")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("asserts off") == 5


@pytest.mark.share(2)
@pytest.mark.timeout(160)
@pytest.mark.parametrize("option", ["-O", "-OO"])
def test_two_ranks_without_asserts(option):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    script = [sys.executable, option, str(HERE / "optimised_script.py")]
    done = run([sys.executable, *torchrun, "--no-python", *script])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("asserts off") == 8


def test_commands_need_no_docstrings():
    done = run([sys.executable, "-OO", "-m", "longspan", "plan", "--seq", "64", "--ranks", "2", "--help"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--ranks" in done.stdout
