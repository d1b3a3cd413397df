"""Gradients that every rank has a copy of: sinks, biases, tables that a score function captured."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from longspan.verification.attention.diagnose import Cause, Evidence, multiple, plain_cause, said_multiple
from longspan.verification.attention.mistakes import ADVICE
from longspan.verification.budgets import compared
from longspan.verification.ranks import Found
from longspan.verification.reference import Answer
from longspan.verification.report import UNKNOWN, Check, Finding


def shared_findings(
    evidence: Evidence, found: Found, base: Answer, forward: Cause | None, mode: str
) -> tuple[list[Check], list[Finding]]:
    """Checks and findings of shared gradients; `mode` says whether each rank has the sum or its share of it."""
    checks: list[Check] = []
    findings: list[Finding] = []
    for name, parts in found.shared.items():
        each = [part.cpu() for part in parts]
        judged = [torch.stack([part.double() for part in each]).sum(0)] if mode == "share" else each
        by_part = [compared(part, base[name], evidence.budgets[name], name)[0] for part in judged]
        worst = max(by_part, key=lambda check: check.ratio)
        checks.append(worst)
        if worst.ratio <= 1:
            continue
        ranks = tuple(range(len(each))) if mode == "share" else tuple(r for r, c in enumerate(by_part) if c.ratio > 1)
        cause = forward or _cause(evidence, name, each, judged[by_part.index(worst)], base[name], mode)
        what = "is not finite" if math.isinf(worst.error) else "differs"
        findings.append(
            Finding(name, what, worst.error, worst.budget, ranks, (), None, *cause, ADVICE.get(cause[0], ""))
        )
    return checks, findings


def _cause(evidence: Evidence, name: str, each: list[Tensor], judged: Tensor, right: Tensor, mode: str) -> Cause:
    size, budget = len(each), evidence.budgets[name].total
    here = replace(evidence, found={**evidence.found, name: judged})
    plain = plain_cause(here, name, right)
    if plain is not None and plain[0] == "no gradient":
        return "captured gradient missing", plain[1]
    total = torch.stack([part.double() for part in each]).sum(0)
    if mode == "sum" and size > 1 and float((total - right).norm()) <= 3 * budget:
        return "captured gradient not reduced", f"{name} differs from rank to rank, and the sum over ranks is right."
    ratio = multiple(judged, right, budget)
    if ratio is not None and size > 1 and abs(ratio / size - 1) < 1e-2:
        return "captured gradient reduced twice", said_multiple(ratio, size)
    if ratio is not None:
        return "gradients scaled", said_multiple(ratio, size)
    return UNKNOWN, "None of the known mistakes gives this gradient."
