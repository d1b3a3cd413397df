"""Walks through a page as a reader does: saves its files, types its commands, looks whether the same is printed.

`python file=NAME` blocks are saved, `bash` blocks are typed line by line, and a `text` block behind one is what it
prints, or some lines of that in their order. `python -m tests.jobs.walk docs/tutorial.md` walks in a folder of its own.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from .runner import ROOT

FENCE = re.compile(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
NOT_TYPED = ("pip ",)  # installing is the business of whoever walks
ROUNDING = 1e-4  # numbers below are rounding, which is another on every machine
CLOSE = 0.01


@dataclass(frozen=True)
class Typed:
    """A command of a page, and the lines that the page says it prints."""

    line: int
    command: str
    shown: tuple[str, ...] = ()


def stops(text: str) -> list[tuple[str, str] | Typed]:
    """(name, content) of files, and commands, in the order of the page."""
    found: list[tuple[str, str] | Typed] = []
    for block in FENCE.finditer(text):
        kind, about, body = block.groups()
        line = text[: block.start()].count("\n") + 1
        if about.startswith("file="):
            found.append((about.removeprefix("file="), body))
        elif kind == "bash":
            commands = re.sub(r"\\\n\s*", "", body).splitlines()
            found += [Typed(line, each) for each in commands if each and not each.startswith(NOT_TYPED)]
        elif kind == "text" and found and isinstance(found[-1], Typed) and not found[-1].shown:
            last = found.pop()
            found.append(Typed(last.line, last.command, tuple(body.splitlines())))
    return found


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


def walk(page: Path, folder: Path, patience: float = 240.0) -> list[tuple[Typed, float]]:
    """Every command with the seconds it took; raises where one fails or prints something else."""
    took = []
    source = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    quiet = {"PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for stop in stops(page.read_text()):
        if not isinstance(stop, Typed):
            (folder / stop[0]).write_text(stop[1])
            continue
        begin = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", stop.command], cwd=folder, capture_output=True, text=True, timeout=patience,
            env={**os.environ, **quiet, "PATH": path, "PYTHONPATH": source, "COLUMNS": "100"},
        )  # fmt: skip
        said = f"{page.name}:{stop.line}: {stop.command}"
        if done.returncode:
            raise AssertionError(f"{said}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        gone = missing(stop.shown, done.stdout.splitlines())
        if gone:
            raise AssertionError("\n".join([said, "did not print:", *gone, "but:", done.stdout]))
        took.append((stop, time.monotonic() - begin))
    return took


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        for typed, seconds in walk(Path(sys.argv[1]), Path(place)):
            print(f"{seconds:6.1f} s  {typed.command}")
