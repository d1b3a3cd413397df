"""Run the tests on every version in `longspan.versions`, each in its own environment, and print a table of counts.

    python -m benchmarks.versions                             # everything: hours, and one environment at a time
    python -m benchmarks.versions --torch 2.11 --torch 2.15   # some of it
    python -m benchmarks.versions --transformers 5.9
    python -m benchmarks.versions --oldest                    # the oldest pair, a few tests: what .ci/run does

PyTorch: the quick tests, and those over Gloo ranks except for timings, with those of the flex kernel and of
`torch_api`, which depend on its version most. transformers: the tests of the Hugging Face integration, with the pinned
PyTorch; and both ends of the two tables together. Builds with CUDA run here, on CPUs, and take 5 GB, so an environment
is deleted before the next is created.

Exits with 1 if a test failed, with 3 if a version could not be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longspan.versions import PAIRS, TORCH, TRANSFORMERS, short

ROOT = Path(__file__).parents[1]
SLOW = ("test_restart", "test_gpu_suite")
BARS = ("test_plan_answers_in_time", "test_it_starts_in_half_a_second")
HOSTS = ("test_huggingface", "test_hf_training", "test_hf_structure", "test_hf_hybrids", "test_verify_documents")
TWO = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
SUITES = {
    "quick": ("-m", "quick"),
    "gloo": (
        *("tests/gloo", "tests/unit/test_flex_kernel.py", "tests/hosts/test_torch_api.py"),
        *(f"--ignore=tests/gloo/{name}.py" for name in SLOW),
        *(f"--deselect=tests/gloo/test_cli.py::{name}" for name in BARS),
    ),
    "hugging face": tuple(f"tests/hosts/{name}.py" for name in HOSTS),
    "hugging face, a few": (
        "tests/hosts/test_huggingface.py::test_ranks_equal_one_device",
        "tests/hosts/test_hf_training.py::test_trainer_with_windows_caps_and_sinks",
        "tests/hosts/test_hf_hybrids.py::test_all_are_refused_before_their_layers_can_be_routed",
        *("-k", "not 4] and not gpt_oss and not llama4"),
    ),
}
FAILED, NOT_HAD = 1, 3


@dataclass(frozen=True)
class Run:
    """A suite to run with a PyTorch and, for some, a transformers."""

    torch: str
    transformers: str | None
    suite: str


@dataclass(frozen=True)
class Result:
    """Result of a run. No counts: the versions could not be installed."""

    run: Run
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0
    had: bool = True

    def row(self) -> str:
        names = f"| {short(self.run.torch)} | {self.run.transformers or '-'} | {self.run.suite} "
        if not self.had:
            return f"{names}| could not be installed | | | |"
        return f"{names}| {self.passed} | {self.failed} | {self.skipped} | {self.minutes:.0f} |"


HEADER = "| torch | transformers | tests | passed | failed | skipped | minutes |\n|---|---|---|---|---|---|---|"


def runs_of(torch: Sequence[str], transformers: Sequence[str]) -> list[Run]:
    """Return the runs for these versions, in the order of environments.

    >>> [(run.torch, run.transformers) for run in runs_of(["2.11.0"], ["5.9.0"])]
    [('2.11.0', None), ('2.11.0', None), ('2.11.0', '5.9.0'), ('2.13.0', '5.9.0')]
    """
    runs = []
    for release in TORCH:
        if release in torch:
            runs += [Run(release, None, suite) for suite in ("quick", "gloo")]
        runs += [Run(a, b, "hugging face") for a, b in PAIRS if a == release and b in transformers]
    return runs


class Environment:
    """A virtual environment with one PyTorch; deleted at the end of `with`."""

    def __init__(self, torch: str, patience: float) -> None:
        self.torch, self.patience = torch, patience
        self.folder = Path(tempfile.mkdtemp(prefix="longspan-versions-"))
        self.python = str(self.folder / "bin" / "python")

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def make(self) -> bool:
        """Install Longspan and the requirements of its tests with this PyTorch; return whether it worked."""
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        needed = ("--upgrade", "pip>=25.1"), (f"torch=={self.torch}",), ("--group", "test", "-e", ".[viz]")
        return all(self.install(*words) for words in needed)

    def install(self, *words: str) -> bool:
        command = [self.python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-cache-dir"]
        try:
            return subprocess.run([*command, *words], cwd=ROOT, timeout=self.patience).returncode == 0
        except subprocess.TimeoutExpired:
            print(f"{' '.join(words)}: not installed within {self.patience:.0f} s", flush=True)
            return False

    def test(self, run: Run) -> Result:
        report, begin = self.folder / "report.xml", time.monotonic()
        report.unlink(missing_ok=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment.pop("PYTHONPATH", None)  # only the environment's own packages
        done = subprocess.run(
            [self.python, "-m", "pytest", *TWO, "-p", "no:cacheprovider", f"--junitxml={report}", *SUITES[run.suite]],
            cwd=ROOT, env=environment,
        )  # fmt: skip
        minutes = (time.monotonic() - begin) / 60
        passed, failed, skipped = counts(report.read_text()) if report.exists() else (0, 0, 0)
        return Result(run, passed, failed or int(done.returncode != 0), skipped, minutes)


def counts(report: str) -> tuple[int, int, int]:
    """Return the numbers of passed, failed and skipped tests in pytest's report.

    >>> counts('<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>')
    (3, 3, 3)
    """
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return tests - failures - errors - skipped, failures + errors, skipped


def hosts() -> list[str]:
    """Return accelerate and TRL as pinned by the tests of the Hugging Face integration."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        pinned = tomllib.load(file)["dependency-groups"]["hosts"]
    return [line for line in pinned if line.startswith(("accelerate", "trl"))]


def results_of(runs: Sequence[Run], patience: float) -> Iterator[Result]:
    """Run one environment for each PyTorch, with versions of transformers in turn."""
    for torch in dict.fromkeys(run.torch for run in runs):
        with Environment(torch, patience) as environment:
            built = environment.make()
            for run in (run for run in runs if run.torch == torch):
                wanted = [f"transformers=={run.transformers}", *hosts()] if run.transformers else []
                if built and (not wanted or environment.install(*wanted)):
                    yield environment.test(run)
                else:
                    yield Result(run, had=False)


def named(words: list[str] | None, known: Sequence[str]) -> list[str]:
    """Return the requested releases, by their number or its first two parts."""
    matches = [release for release in known for word in words or () if word in (release, short(release))]
    if len(matches) < len(words or ()):
        raise SystemExit(f"versions must be among {', '.join(known)}, but got {', '.join(words or ())}.")
    return matches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", metavar="VERSION", help="of the table; may be repeated")
    parser.add_argument("--transformers", action="append", metavar="VERSION", help="of the table; may be repeated")
    parser.add_argument("--oldest", action="store_true", help="the oldest pair, a few tests")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds that an installation may take")
    parser.add_argument("--out", type=Path, help="a file for the table")
    args = parser.parse_args()
    if args.oldest:
        pair = TORCH[0], TRANSFORMERS[0]
        runs = [Run(TORCH[0], None, "quick"), Run(*pair, "hugging face, a few")]
    else:
        all_of_it = not args.torch and not args.transformers
        runs = runs_of(
            TORCH if all_of_it else named(args.torch, TORCH),
            TRANSFORMERS if all_of_it else named(args.transformers, TRANSFORMERS),
        )
    rows, status = [HEADER], 0
    for result in results_of(runs, args.patience):
        rows.append(result.row())
        print(result.row(), flush=True)
        status = FAILED if result.failed or status == FAILED else status if result.had else NOT_HAD
        if args.out:
            args.out.write_text("\n".join(rows) + "\n")
    print("\n".join(rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
