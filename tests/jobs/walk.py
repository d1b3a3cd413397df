"""Walks through pages as a reader does: saves their files, types their commands, looks whether the same is printed.

    python -m tests.jobs.walk docs/tutorial.md                                  # with what is installed
    python -m tests.jobs.walk --clean README.md docs/start.md docs/tutorial.md  # in an environment with nothing in it

`python file=NAME` blocks are saved; other python blocks are saved and run, those for torchrun by the last `torchrun
--nproc-per-node N name.py` before them, under that name. Blocks that begin with `with=PROGRAM` are lines of a longer
program: they replace its line "# README's block", and it is run on two ranks; of a diff, the new lines, and what is
removed must run, too. `bash` blocks are typed line by line, and so is what follows "$ " in a `text` block; a `text`
block behind a command is what it prints, or some lines of that in their order. Fragments and other diffs are for
reading. A command that warns has failed. A clean walk begins in a copy of this checkout, and installs what pages say.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from .runner import ROOT

FENCE = re.compile(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLACE = "# README's block\n"
WARNING = re.compile(r"^.*(?:\bWarning\b|WARNING|[a-z]Warning:).*$", re.MULTILINE)
LAUNCH = re.compile(r"torchrun --nproc-per-node \d+ (\S+\.py)\b")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
INSTALLING = ("pip ",)  # for clean walks only
ROUNDING = 1e-4  # numbers below are rounding, which is another on every machine
CLOSE = 0.01
QUIET = {"PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@dataclass(frozen=True)
class Typed:
    """A command of a page, and the lines that the page says it prints."""

    line: int
    command: str
    shown: tuple[str, ...] = ()


Saved = tuple[str, str]
"""The name and the content of a file."""


def stops(text: str) -> list[Saved | Typed]:
    """Files and commands, in the order of the page.

    >>> stops("`torchrun --nproc-per-node 2 two.py`:\\n```python torchrun\\n2\\n```\\n")
    [('two.py', '2\\n'), Typed(line=2, command='torchrun --nproc-per-node 2 two.py', shown=())]
    """
    found: list[Saved | Typed] = []
    for block in FENCE.finditer(text):
        kind, about, body = block.groups()
        line = text[: block.start()].count("\n") + 1
        if about.startswith("with="):
            found += _of_program(ROOT / about.removeprefix("with="), body, kind == "diff", line)
        elif kind == "python":
            found += _of_python(about, body, text[: block.start()], line)
        elif kind == "bash":
            found += [Typed(line, each) for each in _joined(body).splitlines() if each]
        elif kind == "text" and re.search(r"^\$ ", body, re.MULTILINE):
            for part in re.split(r"^\$ ", _joined(body), flags=re.MULTILINE)[1:]:
                command, *shown = part.splitlines()
                found.append(Typed(line, command, tuple(shown)))
        elif kind == "text" and found and isinstance(last := found[-1], Typed) and not last.shown:
            found[-1] = replace(last, shown=tuple(body.splitlines()))
    return found


def _joined(body: str) -> str:
    """Lines that end with a backslash go on in the next one."""
    return re.sub(r"\\\n\s*", "", body)


def _of_python(about: str, body: str, before: str, line: int) -> Iterator[Saved | Typed]:
    if about.startswith("file="):
        yield about.removeprefix("file="), body
    elif about == "torchrun":
        said = list(LAUNCH.finditer(before))
        if not said:
            raise AssertionError(f"line {line}: no `torchrun --nproc-per-node N name.py` before a block for torchrun")
        yield said[-1][1], body
        yield Typed(line, said[-1][0])
    elif not about:
        yield f"line_{line}.py", body
        yield Typed(line, f"python line_{line}.py")


def _of_program(path: Path, body: str, is_diff: bool, line: int) -> Iterator[Saved | Typed]:
    program = path.read_text()
    assert program.count(PLACE) == 1, f"line {line}: {path.name} must have one line {PLACE!r}"
    if is_diff:
        lines = body.splitlines(keepends=True)
        yield f"old_{path.name}", "".join(each[1:] for each in lines if each[0] == "-")
        yield Typed(line, f"python old_{path.name}")
        body = "".join(each[1:] for each in lines if each[0] != "-")
    yield path.name, program.replace(PLACE, body)
    yield Typed(line, f"torchrun --nproc-per-node 2 {path.name}")


def alike(shown: str, printed: str) -> bool:
    """Whether two lines say the same: the same words, and numbers that are close.

    >>> alike("loss 1.8834, off by 4.8e-07", "loss 1.8835, off by 9.5e-07")
    True
    >>> alike("loss 1.8834, off by 4.8e-07", "loss 1.8834, off by 2.1e-02")
    False
    """
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(*([float(n.replace(",", "")) for n in NUMBER.findall(x)] for x in (shown, printed)), strict=True)
    return all(max(a, b) < ROUNDING or abs(a - b) <= CLOSE * max(a, b) for a, b in pairs)


def missing(shown: tuple[str, ...], printed: list[str]) -> list[str]:
    """Lines of a page that were not printed, or not in this order."""
    rest = iter(printed)
    return [line for line in shown if line.strip() and not any(alike(line, each) for each in rest)]


class Walker:
    """Somebody in a folder with an environment, who reads pages. A `cd` is still in force at the next command."""

    def __init__(self, folder: Path, clean: bool = False) -> None:
        self.folder, self.at, self.clean = folder, folder, clean
        self.patience = 900.0 if clean else 240.0  # installing on a busy machine takes the longest
        self.environment = {**os.environ, **QUIET}
        if clean:
            self._make_clean()
        else:
            source = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            self.environment |= {"PYTHONPATH": source, "PATH": path}
            (folder / "examples").symlink_to(ROOT / "examples")  # as after a clone

    def _make_clean(self) -> None:
        venv.create(self.folder / "venv", with_pip=True)
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            self.environment.pop(name, None)
        self.environment |= {
            "PATH": f"{self.folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_QUIET": "1",
        }
        self.at = self.folder / "checkout"
        kept_out = shutil.ignore_patterns(".git", "build", "dist", "__pycache__", ".*cache")
        shutil.copytree(ROOT, self.at, ignore=kept_out)

    def read(self, page: Path) -> Iterator[tuple[Typed, float]]:
        """Every command with the seconds it took; raises where one fails or prints something else."""
        for stop in stops(page.read_text()):
            if not isinstance(stop, Typed):
                (self.at / stop[0]).write_text(stop[1])
            elif self.clean or not stop.command.startswith(INSTALLING):
                begin = time.monotonic()
                self._type(stop, page.name)
                yield stop, time.monotonic() - begin

    def _type(self, stop: Typed, page: str) -> None:
        where = self.folder / "where"
        done = subprocess.run(
            ["bash", "-c", f"set -eo pipefail\n{stop.command}\npwd > '{where}'"], cwd=self.at, env=self.environment,
            capture_output=True, text=True, timeout=self.patience,
        )  # fmt: skip
        said = f"{page}:{stop.line}: {stop.command}"
        if done.returncode:
            raise AssertionError(f"{said}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        warned = [] if stop.command.startswith(INSTALLING) else WARNING.findall(done.stderr + done.stdout)
        if warned:
            raise AssertionError("\n".join([said, "warned:", *warned]))
        # Ranks write at the same time, so that two of their lines may come as one.
        gone = missing(stop.shown, re.split(r"\n|(?=rank \d+:)", done.stdout))
        if gone:
            raise AssertionError("\n".join([said, "did not print:", *gone, "but:", done.stdout]))
        self.at = Path(where.read_text().strip())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Do what pages say, in their order.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--clean", action="store_true", help="in an environment with nothing in it")
    args = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="walk-") as place:
        walker = Walker(Path(place), args.clean)
        for page in args.pages:
            print(f"-- {page}", flush=True)
            typed = None
            try:
                for typed, seconds in walker.read(page):
                    print(f"{seconds:6.1f} s  {typed.command}", flush=True)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(error)
                return 1
            if typed is None:
                print("nothing to do on this page")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
