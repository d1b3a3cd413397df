"""Longspan's own version, and the versions of PyTorch and transformers that it supports and was tested with.

The tables list real runs: `python -m benchmarks.versions` repeats them, docs/versions.md has the counts. Releases of
one minor version count as one: results of 2.14.1 are taken to hold for 2.14.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VERSION = "0.3.0.dev0"
"""The build reads it here."""
PINNED = "2.13.0"
"""The PyTorch release of the full test suite; the others run the quick tests and those over Gloo ranks."""
TORCH = ("2.11.0", "2.12.1", PINNED, "2.14.1", "2.15.0")
TRANSFORMERS = ("5.9.0", "5.12.1", "5.15.1", "5.18.0", "5.22.2", "5.23.0")
PAIRS = (
    (TORCH[0], TRANSFORMERS[0]),
    *((PINNED, release) for release in TRANSFORMERS),
    (TORCH[-1], "5.22.2"),
)
"""(PyTorch, transformers) that the Hugging Face integration was tested with."""
_NUMBERS = re.compile(r"(\d+)\.(\d+)")
TESTED, BETWEEN, NEWER, OLDER = "tested", "between tested versions", "newer than tested", "older than the floor"
UNKNOWN = "its version is not known"


def minor(release: str) -> tuple[int, int]:
    """Return the first two numbers of a version; further digits are ignored.

    >>> minor("2.13.0+cpu"), minor("5.23.0.dev0"), minor("3.0rc1")
    ((2, 13), (5, 23), (3, 0))
    """
    numbers = _NUMBERS.match(release)
    if numbers is None:
        raise ValueError(f"a version must begin with two numbers, as in 2.13.0, but got {release!r}.")
    return int(numbers[1]), int(numbers[2])


def short(release: str) -> str:
    """Return MAJOR.MINOR of a version.

    >>> short("5.22.2"), short("from source")
    ('5.22', 'from source')
    """
    return "{}.{}".format(*minor(release)) if _NUMBERS.match(release) else release


def standing(release: str, tested: tuple[str, ...]) -> str:
    """Return how a version relates to the tested ones, which are sorted from oldest to newest.

    >>> [standing(release, ("2.11.0", "2.13.0")) for release in ("2.13.1", "2.12.0", "2.14.0", "2.10.0")]
    ['tested', 'between tested versions', 'newer than tested', 'older than the floor']
    """
    if not _NUMBERS.match(release):
        return UNKNOWN
    known, version = [minor(other) for other in tested], minor(release)
    if version in known:
        return TESTED
    if version < known[0]:
        return OLDER
    return NEWER if version > known[-1] else BETWEEN


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """Whether the installed versions were tested, with a message."""

    tested: bool
    text: str
    advice: str | None = None
    """The fix, if they were not tested."""


def check_versions(torch: str, transformers: str | None) -> VersionCheck:
    """Compare the installed PyTorch and, if installed, transformers with the tested versions.

    >>> check_versions("2.13.0+cpu", None).text
    'torch 2.13 was tested'
    >>> check_versions("2.13.0", "5.22.0").text
    'torch 2.13 and transformers 5.22 were tested together'
    >>> check_versions("2.12.1", "5.9.0").text
    'torch 2.12 and transformers 5.9 were each tested, but not together'
    >>> check_versions("2.99.0", "5.9.0").text
    'torch 2.99 was NOT tested: newer than tested (2.11 to 2.15)'
    >>> check_versions("2.10.0", "5.22.0").advice
    'Longspan needs torch 2.11 or newer: update before you use it.'
    """
    installed: list[tuple[str, str, tuple[str, ...]]] = [("torch", torch, TORCH)]
    if transformers is not None:
        installed.append(("transformers", transformers, TRANSFORMERS))
    states = [(name, release, tested, standing(release, tested)) for name, release, tested in installed]
    untested = [
        f"{name} {short(release)} was NOT tested: {state} ({short(tested[0])} to {short(tested[-1])})"
        for name, release, tested, state in states
        if state != TESTED
    ]
    old = [f"{name} {short(tested[0])}" for name, _, tested, state in states if state == OLDER]
    if old:
        advice = f"Longspan needs {' and '.join(old)} or newer: update before you use it."
    else:
        pairs = ", ".join(f"{short(a)} with {short(b)}" for a, b in PAIRS)
        known = f"torch with transformers: {pairs}" if transformers else f"torch {', '.join(map(short, TORCH))}"
        advice = f"Longspan was tested on {known}. Run `longspan verify` to check these versions."
    if untested:
        return VersionCheck(False, "; ".join(untested), advice)
    if transformers is None:
        return VersionCheck(True, f"torch {short(torch)} was tested")
    both = f"torch {short(torch)} and transformers {short(transformers)} were"
    if (minor(torch), minor(transformers)) in {(minor(a), minor(b)) for a, b in PAIRS}:
        return VersionCheck(True, f"{both} tested together")
    return VersionCheck(False, f"{both} each tested, but not together", advice)
