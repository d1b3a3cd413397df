"""The leak probe of a whole model: a token's id changes, and logits of tokens that it cannot reach must not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.masks import Mask
from longspan.verification.model.step import TOKENS, ModelStep, Result, Truth, run_local
from longspan.verification.ranks import RankView
from longspan.verification.report import Finding, spans_of


def probe(
    step: ModelStep, truth: Truth, ranks: RankView, found: Result, count: int, known: list[Finding]
) -> tuple[list[Finding], list[str]]:
    """Findings and notes. Layers pass on what they saw: what counts is whether any number of them can reach."""
    ids = step.batch.get("input_ids")
    if not count or step.mask is None or not isinstance(ids, Tensor) or "logits" not in found:
        return [], ["no leak probe: it needs mask=, input_ids in the batch, and logits from both steps"] * bool(count)
    reach = _reach(step.mask, step.layout.seq_len)
    positions = _hidden_most(reach, count)
    if not positions:
        return [], ["no leak probe: every token reaches every other"]
    findings: list[Finding] = []
    rows = truth.budgets["logits"].rows
    assert rows is not None
    for position in positions:
        batch = dict(step.batch)
        batch["input_ids"] = _changed(ids, position)
        after = run_local(step, ranks, batch, truth, backward=False)[0]
        still = torch.as_tensor(~reach[:, position])
        difference = (after["logits"] - found["logits"]).movedim(TOKENS, 0).flatten(1).norm(dim=1)
        at = (still & ~(difference <= rows / 2)).nonzero().flatten()
        if len(at):
            finding = _finding(step, position, at, difference, rows / 2)
            same = next((other for other in known if other.tensor == "logits"), None)
            findings.append(finding if same is None else replace(finding, cause=same.cause, advice=same.advice))
            break
    return findings, [f"leak probe: ids of tokens {', '.join(map(str, positions))} changed"]


def _finding(step: ModelStep, position: int, at: Tensor, difference: Tensor, budget: Tensor) -> Finding:
    worst = int(at[difference[at].argmax()])
    evidence = (
        f"The id of token {position} was changed (rank {int(step.layout.owner([position])[0])}), which under the mask"
        f" reaches none of these tokens through any number of layers."
    )
    advice = "Compare the mask that the layers use on the ranks with the one given here."
    if _leaks_on_one_device(step, position, worst):
        evidence += " The one-device run leaks as well."
        advice = "The one-device step does not use the mask given here: mend it first."
    error = float(difference[worst])
    ranks = tuple(sorted(set(step.layout.owner(at.numpy()).tolist())))
    return Finding(
        "logits", "leak", error if math.isfinite(error) else math.inf, float(budget[worst]), ranks,
        spans_of(at.numpy()), worst, "hidden tokens leak", evidence, advice,
    )  # fmt: skip


@torch.no_grad()
def _leaks_on_one_device(step: ModelStep, position: int, row: int) -> bool:
    logits: list[Tensor] = []
    for ids in (step.batch["input_ids"], _changed(step.batch["input_ids"], position)):
        logits.append(step.whole(step.one_device, {**step.batch, "input_ids": ids}, step.mask)[1][:, row].double())
    return bool((logits[0] - logits[1]).norm() > 1e-3 * logits[0].norm())


def _changed(ids: Tensor, position: int) -> Tensor:
    """The batch's ids with another of its own ids at one position."""
    ids = ids.clone()
    old = ids[..., position].clone()
    for other in ids.unique().tolist():
        ids[..., position] = torch.where(ids[..., position] == old, torch.full_like(old, other), ids[..., position])
    return ids


def _reach(mask: Mask, seq_len: int) -> Any:
    """(S, S): whether a token's value can get to a row through any number of layers."""
    at = np.arange(seq_len)
    whole = mask.resized(seq_len)
    planes = [(row, head) for row in range(whole.num_rows) for head in range(whole.num_heads)]
    seen = np.any([whole.allows(at[:, None], at[None, :], row=r, head=h) for r, h in planes], axis=0) | np.eye(
        seq_len, dtype=bool
    )
    while True:
        wider = (seen.astype(np.float32) @ seen.astype(np.float32)) > 0
        if np.array_equal(wider, seen):
            return seen
        seen = wider


def apart(mask: Mask, seq_len: int) -> Any:
    """(1, S): numbers of groups of tokens that do not reach each other, or None where there is one.

    >>> from longspan.masks import causal, documents
    >>> apart(causal() & documents([2, 1]), 3)
    array([[0, 0, 1]])
    >>> apart(causal(), 3) is None
    True
    """
    reach = _reach(mask, seq_len)
    joined = reach | reach.T
    first = np.arange(seq_len)
    while True:
        lower = np.where(joined, first, seq_len).min(1)
        if np.array_equal(lower, first):
            break
        first = lower
    numbers = np.unique(first, return_inverse=True)[1].reshape(1, seq_len)
    return numbers if numbers.any() else None


def _hidden_most(reach: Any, count: int) -> list[int]:
    """Tokens that reach the fewest rows after them, and before them."""
    size = len(reach)
    at = np.arange(size)
    after = (~reach & (at[:, None] > at)).sum(0)
    before = (~reach & (at[:, None] < at)).sum(0)
    return list(dict.fromkeys(int(hidden.argmax()) for hidden in (after, before) if hidden.any()))[:count]
