"""Pages that are walked through: every file is saved, every command typed, and what they show is what is printed."""

import pytest

from tests.house.test_docs import ROOT
from tests.jobs.walk import Typed, Walker, main, missing, stops

TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGE = """
```python file=one.py
print("loss 2.5000, off by 1.0e-07")
```
```bash
pip install something
python one.py
```
```text
loss 2.5001, off by 3.0e-07
```
"""
CLEAN = """
```bash
test -f pyproject.toml  # a walk begins in a copy of the checkout
mkdir -p build/inside && cd build/inside  # and the next command here
```
```diff
-exit 3
```
```python fragment
raise SystemExit(4)
```
```text
$ echo seen | tee seen
seen
```
```python
import sys
from pathlib import Path

assert Path("seen").exists()
assert sys.prefix != sys.base_prefix
try:
    import numpy  # there is nothing yet
except ImportError:
    raise SystemExit({status}) from None
```
```bash
touch {late}
```
"""


@pytest.mark.nightly  # .ci/run walks through it in a clean place
@pytest.mark.timeout(600)
def test_the_tutorial_runs_as_it_is_printed(tmp_path):
    took = list(Walker(tmp_path).read(TUTORIAL))
    commands = [typed.command for typed, _ in took]
    assert [c for c in commands if c.startswith("torchrun")] == [
        "torchrun --nproc-per-node 2 two.py",
        "torchrun --nproc-per-node 8 eight.py",
        "torchrun --nproc-per-node 4 fsdp.py",
    ]
    assert sum(bool(typed.shown) for typed, _ in took) >= 6


@pytest.mark.nightly  # house/test_docs_build.py runs the scripts without looking at what they print
@pytest.mark.parametrize(
    "name",
    ["pytorch_score_mod", "pytorch_efficient_backward", "transformers_gpt_oss", "transformers_hybrids"],
)
def test_upstream_reports_print_what_they_show(tmp_path, name):
    took = list(Walker(tmp_path).read(ROOT / "docs" / "upstream" / f"{name}.md"))
    assert [bool(typed.shown) for typed, _ in took] == [True]


def test_a_walk_sees_files_commands_and_what_they_print(tmp_path):
    file, installing, typed = stops(PAGE)
    assert file[0] == "one.py"
    assert installing == Typed(5, "pip install something")
    assert typed == Typed(5, "python one.py", ("loss 2.5001, off by 3.0e-07",))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    took = list(Walker(tmp_path).read(page))
    assert [each.command for each, _ in took] == ["python one.py"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("print(", "import warnings; warnings.warn('late', FutureWarning); print(", "warned"),
        ("loss 2.5001", "loss 2.6001", "did not print"),
        ("off by 3.0e-07", "off by 3.0e-02", "did not print"),
        ("print(", "raise SystemExit(", "ended with 1"),
        ("```text\nloss", "```text\nmean loss", "did not print"),
    ],
)
def test_a_page_that_says_something_else_is_found(tmp_path, old, new, said):
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(old, new))
    with pytest.raises(AssertionError, match=said):
        list(Walker(tmp_path).read(page))


def test_lines_are_looked_for_in_their_order():
    assert missing(("a", "c"), ["a", "b", "c"]) == []
    assert missing(("c", "a"), ["a", "b", "c"]) == ["a"]


@pytest.mark.share(2)
@pytest.mark.parametrize("status", [0, 5])
def test_a_clean_walk_has_nothing_and_ends_where_a_command_fails(status, tmp_path, capsys):
    late = tmp_path / "late"
    page = tmp_path / "page.md"
    page.write_text(CLEAN.replace("{status}", str(status)).replace("{late}", str(late)))
    ended = main(["--clean", str(page)])
    assert ended == (status != 0)
    assert late.exists() == (status == 0)
    assert ("ended with 5" in capsys.readouterr().out) == (status != 0)


def test_a_page_without_commands_is_no_walk(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("```python fragment\n1\n```\n")
    ended = main([str(page)])
    assert ended == 1
    assert "nothing to do" in capsys.readouterr().out


def test_a_block_for_torchrun_needs_its_command():
    with pytest.raises(AssertionError, match="before a block for torchrun"):
        stops("```python torchrun\npass\n```\n")


def test_lines_of_a_longer_program_are_put_into_it(tmp_path):
    program = tmp_path / "longer.py"
    program.write_text("a = 1\n# README's block\nprint(a)\n")
    found = stops(f"```diff with={program}\n-a = 2\n+a = 3\n a += 1\n```\n")
    assert found == [
        ("old_longer.py", "a = 2\n"),
        Typed(1, "python old_longer.py"),
        ("longer.py", "a = 1\na = 3\na += 1\nprint(a)\n"),
        Typed(1, "torchrun --nproc-per-node 2 longer.py"),
    ]
    program.write_text("print(1)\n")
    with pytest.raises(AssertionError, match="README's block"):
        stops(f"```python with={program}\na = 3\n```\n")
