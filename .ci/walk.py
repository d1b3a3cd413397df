"""A stranger's first hour: what pages print, copied from them, in their order, in an environment with nothing in it.

    python .ci/walk.py README.md docs/start.md docs/tutorial.md

Blocks headed bash are run line by line, as are lines of a text block that begin with "$ "; python blocks as files;
those headed "python torchrun" by the last `torchrun --nproc-per-node N name.py` that the page says before them, under
that name. Fragments and diffs are for reading. Every step must end with status 0, or the walk ends there with 1.

A clone of the project's address is one of this checkout, for there may be no network: git is told so, and the command
stays as it is printed.

>>> page = "`torchrun --nproc-per-node 2 two.py`\\n```python torchrun\\nprint(2)\\n```\\n```bash\\nls  # all\\n```\\n"
>>> [(step.shell, step.name) for step in steps_of(page)]
[('torchrun --nproc-per-node 2 two.py', 'two.py'), ('ls  # all', None)]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(bash|text|python torchrun|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LAUNCH = re.compile(r"torchrun --nproc-per-node \d+ (\S+\.py)\b")
SECONDS = 900  # for one step; installing on a busy machine takes the longest


@dataclass(frozen=True)
class Step:
    """A command of a page, and the file that it needs, if the page prints one."""

    shell: str
    name: str | None = None
    code: str = ""


def steps_of(page: str) -> list[Step]:
    """What a page tells its reader to run, in order."""
    steps, after = [], 0
    for match in BLOCK.finditer(page):
        kind, code = match.groups()
        if kind == "bash":
            steps += [Step(line) for line in _lines(code)]
        elif kind == "text":
            steps += [Step(line[2:]) for line in _lines(code) if line.startswith("$ ")]
        elif kind == "python":
            name = f"block-{len(steps)}.py"
            steps.append(Step(f"python {name}", name, code))
        else:
            said = list(LAUNCH.finditer(page, after, match.start()))
            if not said:
                raise SystemExit(
                    f"a block for torchrun without `torchrun --nproc-per-node N name.py` before it:\n{code}"
                )
            steps.append(Step(said[-1][0], said[-1][1], code))
        after = match.end()
    return steps


def _lines(code: str) -> list[str]:
    """Commands of a block; a backslash at the end goes on in the next line."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


class Walker:
    """A folder and an environment of one's own; where a command went by `cd`, the next one begins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at = folder, folder
        address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
        unset = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
        self.environment = {name: value for name, value in os.environ.items() if name not in unset} | {
            "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{ROOT}.insteadOf",
            "GIT_CONFIG_VALUE_0": address,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_QUIET": "1",
        }
        venv.create(folder / "venv", with_pip=True)

    def take(self, step: Step) -> bool:
        """Whether the command ended with status 0."""
        if step.name:
            (self.at / step.name).write_text(step.code)
        begin, where = time.monotonic(), self.folder / "where"
        script = f"set -eo pipefail\n{step.shell}\npwd > {where}"
        try:
            done = subprocess.run(
                ["bash", "-c", script], cwd=self.at, env=self.environment, timeout=SECONDS,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            status, said = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            status, said = -1, f"{error.stdout or ''}\nnot ended after {SECONDS} s"
        print(f"{'ok    ' if status == 0 else 'FAILED'} {time.monotonic() - begin:5.0f} s  {step.shell}", flush=True)
        if status != 0:
            print(said[-6000:], f"status {status}", sep="\n")
            return False
        self.at = Path(where.read_text().strip())
        return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run what pages print, in an environment with nothing in it.")
    parser.add_argument("pages", nargs="+", type=Path, help="in the order in which somebody reads them")
    pages = parser.parse_args(arguments).pages
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        walker = Walker(Path(folder))
        for page in pages:
            print(f"-- {page}", flush=True)
            steps = steps_of(page.read_text())
            if not steps or not all(walker.take(step) for step in steps):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
