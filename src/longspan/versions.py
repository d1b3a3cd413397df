"""Longspan's own version, and the versions of PyTorch and transformers that it accepts and was tested with.

The tables list real runs: `python -m benchmarks.versions` repeats them, docs/versions.md has the counts. Releases of
one minor version count as one: results of 2.14.1 are taken to hold for 2.14.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# -- The version, which the build reads here ---------------------------------------------------------------------------


VERSION = "0.2.0"


# -- Tested versions of PyTorch and transformers -----------------------------------------------------------------------


PINNED = "2.13.0"
"""The PyTorch that everything is run with; the others get the quick tests and those over Gloo ranks."""
TORCH = ("2.11.0", "2.12.1", PINNED, "2.14.1", "2.15.0")
TRANSFORMERS = ("5.9.0", "5.12.1", "5.15.1", "5.18.0", "5.22.2")
PAIRS = (
    (TORCH[0], TRANSFORMERS[0]),
    *((PINNED, release) for release in TRANSFORMERS),
    (TORCH[-1], TRANSFORMERS[-1]),
)
"""(PyTorch, transformers) that the tests of the Hugging Face integration were run with."""
_NUMBERS = re.compile(r"(\d+)\.(\d+)")
TESTED, BETWEEN, NEWER, OLDER = "tested", "between tested versions", "newer than tested", "older than the floor"
UNKNOWN = "its version is not known"


def minor(release: str) -> tuple[int, int]:
    """The first two numbers of a version, which is as far as versions are told apart here.

    >>> minor("2.13.0+cpu"), minor("5.23.0.dev0"), minor("3.0rc1")
    ((2, 13), (5, 23), (3, 0))
    """
    numbers = _NUMBERS.match(release)
    if numbers is None:
        raise ValueError(f"{release!r} is no version: it does not begin with two numbers, as 2.13.0 does.")
    return int(numbers[1]), int(numbers[2])


def short(release: str) -> str:
    """A version as people say it.

    >>> short("5.22.2"), short("from source")
    ('5.22', 'from source')
    """
    return "{}.{}".format(*minor(release)) if _NUMBERS.match(release) else release


def standing(found: str, tested: tuple[str, ...]) -> str:
    """How a version stands to those that were tested, oldest first.

    >>> [standing(release, ("2.11.0", "2.13.0")) for release in ("2.13.1", "2.12.0", "2.14.0", "2.10.0")]
    ['tested', 'between tested versions', 'newer than tested', 'older than the floor']
    """
    if not _NUMBERS.match(found):
        return UNKNOWN
    numbers = [minor(release) for release in tested]
    number = minor(found)
    if number in numbers:
        return TESTED
    if number < numbers[0]:
        return OLDER
    return NEWER if number > numbers[-1] else BETWEEN


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """Whether what is installed was tested, and what to say of it."""

    tested: bool
    text: str
    advice: str | None = None
    """What to do where it was not."""


def check_versions(torch: str, transformers: str | None) -> VersionCheck:
    """What is known of a PyTorch and, where it is installed, a transformers.

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
    given: list[tuple[str, str, tuple[str, ...]]] = [("torch", torch, TORCH)]
    if transformers is not None:
        given.append(("transformers", transformers, TRANSFORMERS))
    strange = [
        f"{name} {short(found)} was NOT tested: {how} ({short(tested[0])} to {short(tested[-1])})"
        for name, found, tested in given
        if (how := standing(found, tested)) != TESTED
    ]
    if strange:
        return VersionCheck(False, "; ".join(strange), _advice(given))
    if transformers is None:
        return VersionCheck(True, f"torch {short(torch)} was tested")
    both = f"torch {short(torch)} and transformers {short(transformers)} were"
    if (minor(torch), minor(transformers)) in {(minor(a), minor(b)) for a, b in PAIRS}:
        return VersionCheck(True, f"{both} tested together")
    return VersionCheck(False, f"{both} each tested, but not together", _advice(given))


def _advice(given: list[tuple[str, str, tuple[str, ...]]]) -> str:
    """What to do with versions that were not tested."""
    old = [f"{name} {short(tested[0])}" for name, found, tested in given if standing(found, tested) == OLDER]
    if old:
        return f"Longspan needs {' and '.join(old)} or newer: update before you use it."
    pairs = ", ".join(f"{short(a)} with {short(b)}" for a, b in PAIRS)
    what = f"torch with transformers: {pairs}" if len(given) > 1 else f"torch {', '.join(map(short, TORCH))}"
    return f"Longspan was tested on {what}. Here only the self-check speaks for it: see `longspan verify`."
