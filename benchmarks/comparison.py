"""Run probes of other libraries on CPUs: refused, right, or wrong by how much.

    python -m benchmarks.comparison                 # installed libraries; others are listed as missing; minutes
    python -m benchmarks.comparison --only flex     # probes with this prefix

docs/comparison.md has the results of one run, and the commands to install the other libraries. Errors are the largest
difference from one device, of outputs (or of logits and gradients of tiny models), relative to the largest reference
value. "Right" is below 1e-4; rounding is 1e-6. Exits with 1 if the kind of a result differs from the page, which then
has to be updated.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass

from benchmarks.comparison_page import recorded
from benchmarks.comparison_probes import PROBES
from benchmarks.ranks import Ranks

LIMIT, TIMEOUT = 1e-4, 300.0
PACKAGES = {"deepspeed": "deepspeed", "fla": "fla-core", "diffusers": "diffusers"}
"""Package names on PyPI that differ from the import names or whose versions are printed."""


@dataclass(frozen=True)
class Answer:
    """`kind` is "right", "wrong", "says", "refused" or "missing"."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def run_probe(name: str) -> Answer:
    """Run a probe on this rank and return its result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = PROBES[name].function()
        except Exception as error:
            words = (str(error).splitlines() or [""])[0]
            return Answer("refused", f"{type(error).__name__}: {words if len(words) <= 200 else words[:197] + '...'}")
    if isinstance(result, str):
        return Answer("says", result)
    return Answer("right", f"{result:.0e}") if result <= LIMIT else Answer("wrong", f"off by {result:.2f}")


def worst(answers: list[Answer]) -> Answer:
    """Return the worst result of all ranks: a refusal before an error, the largest error before a smaller one.

    >>> str(worst([Answer("right", "3e-07"), Answer("wrong", "off by 0.20")]))
    'wrong: off by 0.20'
    """
    order = ("right", "says", "wrong", "refused")
    return max(answers, key=lambda answer: (order.index(answer.kind), answer.text))


def answered(name: str) -> Answer:
    """Run a probe on new ranks, because libraries leave state behind in a process."""
    probe = PROBES[name]
    missing = [package for package in probe.needs if importlib.util.find_spec(package) is None]
    if missing:
        return Answer("missing", f"{', '.join(missing)} not installed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    ranks = Ranks(probe.ranks, timeout=TIMEOUT)
    try:
        with ranks:
            return worst(ranks.run(run_probe, name))
    except TimeoutError:
        ranks.end()
        return Answer("refused", f"no answer within {TIMEOUT:.0f} s")


def versions() -> str:
    names = ["torch", "transformers", "accelerate", "torchtitan", *PACKAGES.values()]
    installed = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names if name in installed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison")
    parser.add_argument("--only", default="", help="run only probes with this prefix")
    only = parser.parse_args(arguments).only
    page, changed = recorded(), 0
    print(versions() + "\n\n| probe | system | request | result |\n|---|---|---|---|")
    for name, probe in PROBES.items():
        if not name.startswith(only):
            continue
        answer = answered(name)
        new = answer.kind not in ("missing", page.get(name, (None, ""))[0])
        changed += new
        note = " (differs from docs/comparison.md)" if new else ""
        print(f"| {name} | {probe.system} | {probe.asks} | {answer}{note} |", flush=True)
    print(f"\n{changed} results differ from docs/comparison.md" if changed else "\nas in docs/comparison.md")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
