"""Claims of the documentation, and the tests that each stands on: what the end of pytest's report lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CLAIMS = {
    "a kernel alone equals dense float64": ("operators.kernel",),
    "Triton's merges and row moves equal plain operators": ("operators.fused",),
    "attention over ranks equals one device": ("exact.scheme", "exact.part", "exact.scores"),
    "the same call twice gives the same bits": ("exact.repeat",),
    "long sequences and long windows are exact": ("long",),
    "training steps equal one device": ("training.step", "training.huggingface"),
    "recurrences and convolutions equal one device": ("training.mixer",),
    "groups of Gloo": ("exact.first_call[first_call.gloo]", "exact.group[group.gloo]"),
    "groups of NCCL": (
        *(f"exact.first_call[first_call.{name}]" for name in ("nccl", "mixed")),
        *(f"exact.group[group.{name}]" for name in ("nccl", "mixed")),
    ),
    "memory is as planned": ("memory",),
    "a warm call does not make the host wait": ("host.waits",),
    "times are as predicted": ("time", "host.time"),
}  # fmt: skip
"""Claim: beginnings of the names of its tests."""


def name_of(nodeid: str) -> str:
    """
    >>> name_of("tests/gpu/test_exact.py::test_scheme[ring]")
    'exact.scheme[ring]'
    """
    return nodeid.partition("test_")[2].replace(".py::test_", ".")


def claim_of(name: str) -> str:
    """
    >>> claim_of("long.sampled[ring]")
    'long sequences and long windows are exact'
    """
    (claim,) = (claim for claim, starts in CLAIMS.items() if name.startswith(starts))
    return claim


@dataclass
class Verdict:
    """What became of a claim's tests."""

    claim: str
    passed: list[str]
    failed: list[str]
    others: dict[str, list[str]]
    """Names of tests that did not run, by the reason."""

    @property
    def word(self) -> str:
        return "wrong" if self.failed else "right" if self.passed else "not run"

    def line(self) -> str:
        """
        >>> verdict = Verdict("a claim", ["a", "b"], [], {"no such kernel": ["c"]})
        >>> verdict.line()
        'right    a claim: 2 tests; not run: c (no such kernel)'
        """
        parts = [f"{len(self.passed)} test{'s' * (len(self.passed) != 1)}"] if self.passed else []
        parts += [f"wrong in {', '.join(self.failed)}"] if self.failed else []
        if self.others and (self.passed or self.failed):
            parts.append("not run: " + ", ".join(f"{_few(names)} ({why})" for why, names in self.others.items()))
        elif self.others:
            parts.append("; ".join(self.others))
        return f"{self.word:8} {self.claim}: {'; '.join(parts) or 'no test was selected'}"


def _few(names: list[str]) -> str:
    """
    >>> _few(["a", "b"]), _few(["a", "b", "c", "d"])
    ('a b', 'a and 3 others')
    """
    return " ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def verdicts(found: Mapping[str, tuple[str, str]]) -> list[Verdict]:
    """Return the verdict of every claim from (outcome, text) of every test; the text of one that did not run is why.

    >>> [each.word for each in verdicts({"exact.repeat": ("passed", ""), "time.links": ("skipped", "no")})][3::8]
    ['right', 'not run']
    """
    every = {claim: Verdict(claim, [], [], {}) for claim in CLAIMS}
    for name, (outcome, text) in found.items():
        verdict = every[claim_of(name)]
        short = name.partition(".")[2]
        if outcome in ("passed", "failed"):
            getattr(verdict, outcome).append(short)
        else:
            verdict.others.setdefault(" ".join(text.removeprefix("Skipped: ").split())[:160], []).append(short)
    return list(every.values())
