"""Is this checkout ready to be released? Builds wheel and sdist, looks inside, and runs both where nothing else is.

    python .ci/release_check.py                                  # torch 2.13.0
    python .ci/release_check.py --torch 2.11.0 --torch 2.15.0    # the oldest and the newest: 5 GB each, one at a time
    python .ci/release_check.py --out dist --files               # no environments; keeps what it built
    python .ci/release_check.py --built dist --torch 2.15.0      # what was built already; needs pip alone

Needs build, hatchling, hatch-fancy-pypi-readme and twine (the group `dev`). Exit status 1: something is wrong, and the
line says what.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = "2.13.0"
SECONDS = 1800
"""For one command; PyTorch with CUDA is 5 GB."""
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"")
WANTED = (
    "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "conftest.py", "docs/conf.py",
    "src/longspan/py.typed", "tests/pool.py", ".ci/run",
)  # fmt: skip
STRAY = re.compile(r"(^|/)(__pycache__|\.git|\.venv|dist|build|\.pytest_cache)(/|$)|\.(pyc|so|log|whl|orig|rej)$")


def version() -> str:
    """The version, from the one place where it stands."""
    (found,) = re.findall(r'^VERSION = "(.+)"$', (ROOT / "src/longspan/versions.py").read_text(), re.MULTILINE)
    return found


def wrong_words() -> Iterator[str]:
    """Whether the changelog begins with this version: `## Unreleased (0.3)` before 0.3.0, then `## 0.3.0 - day`."""
    now = version()
    number = now.rpartition(".dev")[0] or now
    wanted = (
        rf"{re.escape(now)} - \d{{4}}-\d\d-\d\d" if number == now else rf"Unreleased \({number.rpartition('.')[0]}\)"
    )
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not heads or not re.fullmatch(wanted, heads[0]):
        yield f"CHANGELOG.md does not begin with {wanted}"


def wrong_links(text: str) -> Iterator[str]:
    """Links and pictures that a package index could not follow.

    >>> list(wrong_links("[a](docs/start.md) [b](https://example.org)"))
    ['docs/start.md is no absolute address']
    """
    for link in (a or b for a, b in LINK.findall(text)):
        if not link.startswith("https://"):
            yield f"{link} is no absolute address"


def wrong_wheel(path: Path) -> Iterator[str]:
    """What should not be in the wheel, and what is missing in it or in what it says of itself."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        about = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = Parser().parsestr(archive.read(about[0]).decode()) if about else None
    inside = [name for name in names if name.startswith("longspan/")]
    source = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    source |= {"longspan/py.typed", "longspan/huggingface/rules.json"}
    yield from (f"the wheel has {name}" for name in sorted(set(inside) - source))
    yield from (f"the wheel lacks {name}" for name in sorted(source - set(inside)))
    info = f"longspan-{version()}.dist-info/"
    yield from (f"the wheel has {name}" for name in names if not name.startswith(("longspan/", info)))
    if said is None:
        yield "the wheel has no METADATA"
        return
    if (said["Name"], said["Version"], said["License-Expression"]) != ("longspan", version(), "Apache-2.0"):
        yield f"the wheel says {said['Name']} {said['Version']}, {said['License-Expression']}"
    yield from wrong_links(said.get_payload())
    needed = [text for text in said.get_all("Requires-Dist", []) if "extra ==" not in text]
    if sorted(re.findall(r"^\w+", text)[0] for text in needed) != ["numpy", "torch"]:
        yield f"the wheel needs {', '.join(needed)}: it must be numpy and torch alone"


def wrong_sdist(path: Path) -> Iterator[str]:
    """What should not be in the sdist, and what is missing: it can be tested as it is."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    yield from (f"the sdist lacks {name}" for name in WANTED if name not in names)
    yield from (f"the sdist has {name}" for name in sorted(names) if STRAY.search(name))


class Steps:
    """Commands one after another, each with a line of its own; whether all were right."""

    def __init__(self) -> None:
        self.ok = True

    def note(self, what: str, wrong: list[str], begin: float) -> bool:
        print(f"{'FAILED' if wrong else 'ok    '} {time.monotonic() - begin:5.0f} s  {what}", flush=True)
        for line in wrong:
            print(f"       {line}")
        self.ok = self.ok and not wrong
        return not wrong

    def run(self, what: str, command: list[str | Path], expect: str = "", cwd: Path | None = None) -> bool:
        """Whether the command ends with status 0 and prints what is expected; PYTHONPATH is not handed on."""
        unset = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        begin = time.monotonic()
        try:
            done = subprocess.run(  # noqa: S603 - commands of this file
                [*map(str, command)], cwd=cwd, env=environment | {"OMP_NUM_THREADS": "1"}, timeout=SECONDS,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return self.note(what, [f"not ended after {SECONDS} s"], begin)
        wrong = [f"status {done.returncode}"] if done.returncode else []
        wrong += [f"{expect!r} is not in what it printed"] if expect not in done.stdout else []
        return self.note(what, [*wrong, *(done.stdout[-3000:].splitlines() if wrong else [])], begin)


def build(steps: Steps, out: Path) -> None:
    """Puts a wheel and an sdist into the folder, and has their metadata looked at."""
    steps.run("python -m build", [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT])
    files = sorted(out.glob("longspan-*"))
    steps.run("twine check --strict", [sys.executable, "-m", "twine", "check", "--strict", *files], "PASSED")


def built(steps: Steps, folder: Path) -> tuple[Path, Path] | None:
    """The wheel and the sdist in a folder, which has these two files of this version and no others."""
    begin, names = time.monotonic(), {f"longspan-{version()}-py3-none-any.whl", f"longspan-{version()}.tar.gz"}
    there = {path.name for path in folder.glob("*")} - {".gitignore"}
    if not steps.note("one wheel, one sdist", sorted(f"{name}?" for name in there ^ names), begin):
        return None
    wheel, sdist = (folder / name for name in sorted(names))
    steps.note(f"what is in {wheel.name}", list(wrong_wheel(wheel)), begin)
    steps.note(f"what is in {sdist.name}", list(wrong_sdist(sdist)), begin)
    return wheel, sdist


def try_out(steps: Steps, torch: str, files: tuple[Path, Path], folder: Path) -> None:
    """Installs either file into an environment with that torch alone, and runs what a new user runs."""
    venv.create(folder / "venv", with_pip=True)
    bins, here = folder / "venv" / "bin", folder / "here"
    here.mkdir()
    pip = [bins / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    if not steps.run(f"pip install torch=={torch}", [*pip, "install", f"torch=={torch}"]):
        return
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/index.md").read_text(), re.DOTALL | re.MULTILINE)[0]
    for file in files:
        if not steps.run(f"pip install {file.name}", [*pip, "install", file]):
            continue
        steps.run("pip check", [*pip, "check"], cwd=here)
        steps.run("longspan --version", [bins / "longspan", "--version"], f"longspan {version()}\n", here)
        steps.run("longspan doctor", [bins / "longspan", "doctor"], "torch " + torch.partition("+")[0], here)
        steps.run("longspan verify --ranks 2", [bins / "longspan", "verify", "--ranks", "2"], "4 of 4 right", here)
        steps.run("docs/index.md", [bins / "python", "-c", f"{example}\nprint(out.shape)"], "[1, 8, 2048, 64]", here)
        steps.run("pip uninstall", [*pip, "uninstall", "--yes", "longspan"])
        left = [str(path) for path in (folder / "venv" / "lib").glob("python*/site-packages/longspan*")]
        steps.note("nothing is left", left, time.monotonic())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build wheel and sdist, look inside, and run both in a clean place.")
    parser.add_argument("--torch", action="append", metavar="VERSION", help=f"install with it; repeatable ({PINNED})")
    parser.add_argument("--out", type=Path, help="keep wheel and sdist in this folder")
    parser.add_argument("--built", type=Path, help="take wheel and sdist from this folder, and build none")
    parser.add_argument("--files", action="store_true", help="look at the files only: no environments")
    args = parser.parse_args(arguments)
    steps = Steps()
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        steps.note("version and changelog", list(wrong_words()), time.monotonic())
        out = (args.built or args.out or Path(folder) / "dist").resolve()
        if args.built is None:
            build(steps, out)
        files = built(steps, out)
        for torch in () if args.files or files is None else args.torch or (PINNED,):
            with tempfile.TemporaryDirectory(prefix="release-") as clean:
                try_out(steps, torch, files, Path(clean))
    print("ready" if steps.ok else "NOT ready")
    return 0 if steps.ok else 1


if __name__ == "__main__":
    sys.exit(main())
