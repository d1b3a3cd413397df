"""The walk through the pages: it runs what they print, in their order, and it can fail."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def walk():
    spec = importlib.util.spec_from_file_location("walk", ROOT / ".ci" / "walk.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["walk"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["walk"]


PAGE = """
```bash
mkdir inside && cd inside  # the next command begins here
test "$(basename "$PWD")" = inside
```
```diff
-exit 3
```
```python fragment
raise SystemExit(4)
```
```text
$ touch seen
seen
```
```python
import sys
from pathlib import Path

assert Path("seen").exists()
assert sys.prefix != sys.base_prefix  # an environment of its own
try:
    import numpy
except ImportError:
    raise SystemExit({status}) from None
```
```bash
touch {late}
```
"""


@pytest.mark.parametrize("status", [0, 5])
def test_a_walk_ends_where_a_command_fails(walk, status, tmp_path, capsys):
    late = tmp_path / "late"
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("{status}", str(status)).replace("{late}", str(late)))
    assert walk.main([str(page)]) == (status != 0)
    assert late.exists() == (status == 0)
    said = capsys.readouterr().out
    assert ("FAILED" in said) == (status != 0)
    assert ("status 5" in said) == (status != 0)


def test_a_page_without_commands_is_no_walk(walk, tmp_path, capsys):
    (tmp_path / "page.md").write_text("```python fragment\n1\n```\n")
    assert walk.main([str(tmp_path / "page.md")]) == 1


def test_a_block_for_torchrun_needs_its_command(walk):
    with pytest.raises(SystemExit, match="without `torchrun"):
        walk.steps_of("```python torchrun\npass\n```\n")


def test_every_command_of_readme_is_a_step(walk):
    readme = (ROOT / "README.md").read_text()
    steps = [step.shell for step in walk.steps_of(readme)]
    assert len(steps) == len(set(steps)) >= 8
    for block in re.findall(r"```bash\n(.*?)```", readme, re.DOTALL):
        assert set(block.splitlines()) <= set(steps)
    assert "torchrun --nproc-per-node 4 train.py" in steps
    assert [step.name for step in walk.steps_of((ROOT / "docs" / "start.md").read_text()) if step.name]
