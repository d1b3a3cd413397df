"""Pages that are walked through: every file is saved, every command typed, and what they show is what is printed."""

import pytest

from tests.house.test_docs import ROOT
from tests.jobs.walk import Typed, missing, stops, walk

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


@pytest.mark.timeout(600)
def test_the_tutorial_runs_as_it_is_printed(tmp_path):
    took = walk(TUTORIAL, tmp_path)
    commands = [typed.command for typed, _ in took]
    assert [c for c in commands if c.startswith("torchrun")] == [
        "torchrun --nproc-per-node 2 two.py",
        "torchrun --nproc-per-node 8 eight.py",
        "torchrun --nproc-per-node 4 fsdp.py",
    ]
    assert sum(bool(typed.shown) for typed, _ in took) >= 6


def test_a_walk_sees_files_commands_and_what_they_print(tmp_path):
    file, typed = stops(PAGE)
    assert file[0] == "one.py"
    assert typed == Typed(5, "python one.py", ("loss 2.5001, off by 3.0e-07",))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert len(walk(page, tmp_path)) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
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
        walk(page, tmp_path)


def test_lines_are_looked_for_in_their_order():
    assert missing(("a", "c"), ["a", "b", "c"]) == []
    assert missing(("c", "a"), ["a", "b", "c"]) == ["a"]
