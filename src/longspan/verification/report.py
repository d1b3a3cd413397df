"""The report of `verify`: a frozen value that prints as text, as JSON-ready values, or as an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import LongspanError
from longspan.formatting import format_count
from longspan.spans import run_table

UNKNOWN = "not recognised"
"""The cause of a finding that matches none of the known mistakes."""
SHOWN_SPANS = 4
SHOWN_FINDINGS = 8
SHOWN_CHECKS = 16


class VerifyError(LongspanError, AssertionError):
    """Results over the ranks are not those of one device."""


@dataclass(frozen=True)
class Check:
    """One comparison: how far a tensor is from one device's, and how far rounding may take it."""

    tensor: str
    error: float
    budget: float

    @property
    def ratio(self) -> float:
        """The error over its budget; infinite for values that are not finite."""
        if not math.isfinite(self.error):
            return math.inf
        return self.error / self.budget if self.budget > 0 else (math.inf if self.error > 0 else 0.0)

    @property
    def verdict(self) -> str:
        """What a finding says about a tensor beyond its budget."""
        return "is not finite" if math.isinf(self.error) else "differs"


@dataclass(frozen=True)
class Finding:
    """One error: which tensor, where, and the likely cause."""

    tensor: str
    what: str
    """differs, leaks, is missing, is not finite, has another shape, is other data."""
    error: float
    budget: float
    ranks: tuple[int, ...]
    """Ranks that hold the wrong rows."""
    spans: tuple[tuple[int, int], ...]
    """Wrong rows as (start, stop) in global positions; empty for tensors without positions."""
    worst: int | None
    """The global position that is farthest off."""
    cause: str
    """A short name of the likely mistake, or "not recognised"."""
    evidence: str
    """The observation that points to the cause."""
    advice: str = ""

    @property
    def num_positions(self) -> int:
        """The number of wrong positions."""
        return sum(stop - start for start, stop in self.spans)

    def where(self) -> str:
        """Return what is wrong, how large, and where, in one line."""
        parts: list[str] = []
        if self.ranks:
            listed = ", ".join(map(str, self.ranks[:8]))
            more = f", ... ({len(self.ranks)} in all)" if len(self.ranks) > 8 else ""
            parts.append(f"rank {listed}" if len(self.ranks) == 1 else f"ranks {listed}{more}")
        if self.spans:
            spans = ", ".join(f"{a}:{b}" for a, b in self.spans[:SHOWN_SPANS])
            more = f" and {len(self.spans) - SHOWN_SPANS} more" if len(self.spans) > SHOWN_SPANS else ""
            parts.append(f"{format_count(self.num_positions, 'position')} {spans}{more}, worst at {self.worst}")
        size = f": error {self.error:.2e}, budget {self.budget:.2e}" if self.budget > 0 else ""
        return f"{self.tensor} {self.what}{size}" + "".join(f"; {part}" for part in parts)

    def __str__(self) -> str:
        return "\n".join((self.where(), *_explain([self])))


@dataclass(frozen=True)
class Report:
    """All comparisons with their budgets, and all errors. The same on every rank."""

    subject: str
    world_size: int
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def causes(self) -> tuple[str, ...]:
        """The likely causes, each once."""
        return tuple(dict.fromkeys(finding.cause for finding in self.findings))

    def raise_if_wrong(self) -> Report:
        """Return the report, or raise `VerifyError` with the whole text if it has findings."""
        if not self.ok:
            raise VerifyError(str(self))
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become None."""
        entries = {"ok": self.ok, "causes": list(self.causes), **asdict(self)}
        for part in (*entries["checks"], *entries["findings"]):
            part.update({key: None for key in ("error", "budget") if not math.isfinite(part[key])})
        return entries

    def __str__(self) -> str:
        verdict = "RIGHT" if self.ok else "WRONG"
        lines = [f"{verdict}: {self.subject}, {format_count(self.world_size, 'rank')} against one device"]
        # Checks in their order; of very many, those nearest to their budgets.
        shown = set(sorted(range(len(self.checks)), key=lambda i: -self.checks[i].ratio)[:SHOWN_CHECKS])
        checks = [check for i, check in enumerate(self.checks) if i in shown]
        width = max((len(check.tensor) for check in checks), default=0)
        for c in checks:
            mark = "" if c.ratio <= 1 else "<--"
            lines.append(f"  {c.tensor:<{width}}  error {c.error:8.2e}  budget {c.budget:8.2e}  {mark}")
        if len(checks) < len(self.checks):
            lines.append(f"  and {len(self.checks) - len(checks)} nearer to one device")
        for cause in self.causes:  # tensors with the same cause are listed together
            findings = [finding for finding in self.findings if finding.cause == cause]
            lines += [f"  {line}" for line in _explain(findings)]
            lines += [f"    {finding.where()}" for finding in findings[:SHOWN_FINDINGS]]
            rest = [finding.tensor for finding in findings[SHOWN_FINDINGS:]]
            if rest:
                more = ", ..." if len(rest) > SHOWN_FINDINGS else ""
                lines.append(f"    and {len(rest)} more: {', '.join(rest[:SHOWN_FINDINGS])}{more}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(line.rstrip() for line in lines)


def _explain(findings: Sequence[Finding]) -> list[str]:
    """Return cause, evidence and advice of findings that share a cause."""
    evidence = list(dict.fromkeys(finding.evidence for finding in findings if finding.evidence))
    advice = next((finding.advice for finding in findings if finding.advice), "")
    return [
        f"likely cause: {findings[0].cause}",
        *(f"  {text}" for text in evidence[:3]),
        *([f"  What to do: {advice}"] if advice else []),
    ]


def spans_of(positions: ArrayLike) -> tuple[tuple[int, int], ...]:
    """Return positions as sorted (start, stop) spans.

    >>> spans_of([1, 2, 3, 7])
    ((1, 4), (7, 8))
    """
    at = np.unique(np.asarray(positions, dtype=np.int64))
    return tuple((int(at[start]), int(at[stop - 1]) + 1) for start, stop in run_table(np.diff(at) > 1, len(at)))
