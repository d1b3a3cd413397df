"""From a wrong tensor to its likely cause: answers of known mistakes, compared with what was found.

A cause is named when its answer fits within `SLACK` budgets. What fits no mistake is told by its form (rows in another
order, a constant factor, no gradient at all, an error as small as rounding), or is said to be not recognised.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longspan.verification.attention.mistakes import (
    Alternative,
    Situation,
    call_mistakes,
    gradient_mistakes,
    stale_gradients,
)
from longspan.verification.budgets import Budget
from longspan.verification.reference import Answer, Inputs, Meaning, answer
from longspan.verification.report import UNKNOWN

SLACK = 3.0
"""A mistake's answer may be a little harder to compute than the truth."""
SMALL = 2.0**-6
"""An error below this part of the tensor may be rounding; known mistakes are larger."""
MANY_PAIRS = 1 << 22
"""Beyond this, the first mistake that fits is enough."""
Cause = tuple[str, str]
"""Name and evidence."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a diagnosis looks at."""

    situation: Situation
    inputs: Inputs
    """Whole q, k, v and dout."""
    truth: Answer
    budgets: dict[str, Budget]
    found: dict[str, Tensor]
    wrong: tuple[str, ...]
    """Tensors that are wrong, in order."""
    bad_ranks: tuple[int, ...]
    """Ranks with wrong rows of the output."""
    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def fits(self, name: str, right: Tensor, rows: Tensor | None = None) -> bool:
        """Whether a tensor that was found is this one, on these rows, and clearly more so than the truth."""
        error, wrong = (_distance(self.found[name], other, rows) for other in (right, self.truth[name]))
        return error <= SLACK * self.budgets[name].total and not error > wrong / 10


def _distance(found: Tensor, right: Tensor, rows: Tensor | None) -> float:
    found, right = found.double(), right.double()
    if rows is not None:
        found, right = found[:, :, rows], right[:, :, rows]
    return float(torch.where(found == right, torch.zeros_like(right), found - right).norm())


def diagnose(evidence: Evidence) -> dict[str, Cause]:
    """The likely cause of every wrong tensor."""
    causes: dict[str, Cause] = {}
    base, meaning = evidence.truth, evidence.situation.right
    forward = [name for name in ("out", "lse") if name in evidence.wrong]
    if forward:
        match = _matching(evidence, call_mistakes(evidence.situation), "out" if "out" in forward else "lse")
        if match is not None:
            cause, (alternative, base) = match
            meaning = alternative.meaning
        else:
            cause = _unmatched(evidence, "out" if "out" in forward else "lse")
        causes.update(dict.fromkeys(forward, cause))
        for name in evidence.wrong:
            if name not in causes and (match is None or evidence.fits(name, base[name])):
                causes[name] = cause
    rest = [name for name in evidence.wrong if name not in causes]
    if rest:
        causes.update(_of_gradients(evidence, rest, base, meaning))
    return causes


def _matching(
    evidence: Evidence, alternatives: Iterable[Alternative], name: str
) -> tuple[Cause, tuple[Alternative, Answer]] | None:
    """The first mistake that gives what was found on the wrong ranks' rows, and the names of others that do, too."""
    owner = evidence.situation.places.owner
    rows = torch.isin(owner, torch.tensor(evidence.bad_ranks)) if evidence.bad_ranks else None
    first: tuple[Alternative, Answer] | None = None
    others: list[str] = []
    for alternative in alternatives:
        given = answer(alternative.meaning, *evidence.inputs)
        if not evidence.fits(name, given[name], rows):
            continue
        if first is None:
            first = alternative, given
        elif alternative.cause != first[0].cause and alternative.cause not in others:
            others.append(alternative.cause)
        if alternative.meaning.seen.numel() > MANY_PAIRS:
            break
    if first is None:
        return None
    first = first[0], _on_these_ranks(evidence, first, rows)
    also = f" (The same here: {', '.join(others[:3])}.)" if others else ""
    if rows is not None and not bool(rows.all()):
        also += f" Only ranks {list(evidence.bad_ranks)} make the mistake."
    return (first[0].cause, first[0].evidence + also), first


def _on_these_ranks(evidence: Evidence, match: tuple[Alternative, Answer], rows: Tensor | None) -> Answer:
    """The mistake's answer, where only some ranks make it: their rows have its mask, all others the right one."""
    right, meaning = evidence.situation.right, match[0].meaning
    if rows is None or bool(rows.all()) or meaning.seen is right.seen:
        return match[1]
    seen = torch.where(rows.view(-1, 1), meaning.seen, right.seen)
    return answer(replace(meaning, seen=seen), *evidence.inputs)


def _unmatched(evidence: Evidence, name: str) -> Cause:
    found, truth = evidence.found[name], evidence.truth[name]
    nothing = ~evidence.situation.right.seen.any(-1)
    bad = ~found.isfinite() & truth.isfinite()
    bad = bad.any(-1) if bad.ndim == 4 else bad
    if bad.any():
        if torch.equal(bad, nothing & bad) and nothing.any():
            return "rows that see nothing are not 0", "All rows that are not finite see nothing: 0 / 0."
        return "not finite", f"{int(bad.sum())} rows are not finite, and they see something."
    if name == "out":
        ordered = out_of_order(evidence, name)
        if ordered is not None:
            return ordered
    scoring = evidence.situation.right.scoring
    good = sorted(set(range(evidence.situation.places.size)) - set(evidence.bad_ranks))
    if scoring is not None and scoring.dropout is not None and good:
        return (
            "dropout seed differs between ranks",
            f"Rows of ranks {good} are right, and those of the others match no other mistake.",
        )
    return _small(evidence, name)


def _small(evidence: Evidence, name: str) -> Cause:
    truth = evidence.truth[name]
    truth = truth[truth.isfinite()]
    error = float((evidence.found[name].double() - evidence.truth[name]).nan_to_num(0.0, posinf=0.0, neginf=0.0).norm())
    size = float(truth.norm())
    if size and error <= SMALL * size:
        return (
            "rounding",
            f"No known mistake fits, and the error is {error / size:.1e} of the tensor: as much as rounding too early"
            f" (lse or sums in a narrow dtype) would give.",
        )
    return UNKNOWN, "None of the known mistakes gives this result."


def out_of_order(evidence: Evidence, name: str) -> Cause | None:
    """Whether wrong rows are right rows of other positions."""
    found = evidence.found[name].double().movedim(2, 0).flatten(1)
    truth = evidence.truth[name].movedim(2, 0).flatten(1)
    distance = torch.cdist(found, truth)
    nearest = distance.argmin(1)
    own = distance.diagonal()
    rows = evidence.budgets[name].rows
    assert rows is not None
    wrong = own > rows
    moved = wrong & (distance.amin(1) <= SLACK * rows[nearest]) & (nearest != torch.arange(len(own)))
    if (
        not wrong.any()
        or int(moved.sum()) < 0.8 * int(wrong.sum())
        or len(nearest[moved].unique()) < 0.8 * int(moved.sum())
    ):
        return None
    first = int(moved.nonzero()[0])
    return (
        "output not in layout order" if name == "out" else "gradient not in layout order",
        f"{int(moved.sum())} of {int(wrong.sum())} wrong rows are right rows of other positions: the one at {first}"
        f" belongs to {int(nearest[first])}.",
    )


def _of_gradients(evidence: Evidence, names: list[str], base: Answer, meaning: Meaning) -> dict[str, Cause]:
    """Causes for gradients whose output is explained."""
    causes: dict[str, Cause] = {}
    for name in names:
        plain = plain_cause(evidence, name, base[name])
        if plain is not None:
            causes[name] = plain
    places = evidence.situation.places
    rest = [name for name in names if name not in causes]
    for alternative in gradient_mistakes(meaning, places) if rest else ():
        given = answer(alternative.meaning, *evidence.inputs)
        for name in rest:
            if name not in causes and evidence.fits(name, given[name]):
                causes[name] = alternative.cause, alternative.evidence
    rest = [name for name in names if name not in causes]
    stale = stale_gradients(meaning, places, *evidence.inputs) if rest else None
    for name in rest:
        if stale is not None and evidence.fits(name, stale[name]):
            causes[name] = (
                "stale K/V in backward",
                "The gradients are those of a backward in which every rank uses its own K/V for each block.",
            )
        else:
            causes[name] = out_of_order(evidence, name) or _small(evidence, name)
    return causes


def plain_cause(evidence: Evidence, name: str, right: Tensor) -> Cause | None:
    """No gradient at all, or a multiple of the right one."""
    found = evidence.found[name].double()
    if name in evidence.missing:
        return "no gradient", f"Nothing reached it on ranks {list(evidence.missing[name])}: it is not in the graph."
    if not found.any() and right.any():
        return "no gradient", "It is 0 everywhere."
    ratio = multiple(found, right, evidence.budgets[name].total)
    if ratio is None or abs(ratio - 1) < 1e-3:
        return None
    return "gradients scaled", said_multiple(ratio, evidence.situation.places.size)


def multiple(found: Tensor, right: Tensor, budget: float) -> float | None:
    """The number by which the right tensor was multiplied; None if it was not."""
    found, right = found.double(), right.double()
    size = float((right * right).sum())
    if size <= budget**2 or not found.isfinite().all():
        return None
    ratio = float((found * right).sum()) / size
    rest = float((found - ratio * right).norm())
    return ratio if abs(ratio) > 1e-2 and rest <= SLACK * max(1.0, abs(ratio)) * budget else None


def said_multiple(ratio: float, size: int) -> str:
    """The factor, and what it is in ranks."""
    for text, value in (
        ("the number of ranks", size), ("one over the number of ranks", 1 / size),
        ("the number of ranks squared", size**2), ("one over the number of ranks squared", 1 / size**2),
    ):  # fmt: skip
        if size > 1 and abs(ratio / value - 1) < 1e-2:
            return f"It is {ratio:.4g} times one device's everywhere: {text}."
    return f"It is {ratio:.4g} times one device's everywhere."
