"""Explain a wrong training step: known mistakes run on one device, and a leak probe over the ranks.

Wrong logits come from masks and positions, so the one-device step runs with wrong ones on purpose. A wrong loss or
wrong gradients with correct logits come from labels, means and sums, which are applied to the one-device logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from longspan.masks import Mask, Plane
from longspan.masks.bands import rectangles
from longspan.spans import true_runs
from longspan.testing import allowed
from longspan.verification.diagnose import ADVICE, SLACK, describe_multiple, find_multiple
from longspan.verification.model_step import TOKENS, Each, ModelStep, Result, Truth, run_local
from longspan.verification.ranks import RankView
from longspan.verification.reference import Places, mask_mistakes
from longspan.verification.report import UNKNOWN, Finding, spans_of

Cause = tuple[str, str, str]
"""Name, evidence, advice."""
NO_FIT: Cause = (UNKNOWN, "None of the known mistakes gives this result.", "")
NO_LOGITS: Cause = (*NO_FIT[:2], "Return (loss, logits) from both steps: more mistakes can then be distinguished.")
MEAN_ADVICE = "Divide by the labels of all ranks, not by each rank's own: token_loss does."
MODEL_ADVICE = {
    "labels shifted late": "Shift labels while the sequence is whole, then shard: longspan.training.shard_batch does.",
    "labels not shifted": "Each token predicts the next one: shift labels by one before sharding.",
    "labels shifted twice": "Labels were shifted before, and the model shifts them again: pass shift_labels.",
    "labels cross documents": "The last token of a document predicts nothing: shard_batch(documents=...).",
    "mean of the ranks' means": MEAN_ADVICE,
    "sum of the ranks' means": MEAN_ADVICE,
    "positions local": "Give every rank its global positions: layout.positions(rank), or shard_batch(positions=...).",
    "loss scaled by ranks": "Divide by the labels of all ranks, once: longspan.training.token_loss does.",
    "loss not reduced": "Add the shares up over the group before reporting, or pass loss='share'.",
    "gradients not reduced": "Add gradients up over the group after backward, or pass gradients='sum'.",
    "gradients scaled": "Pass gradients='sum' or 'average', as in training, and normalise the loss to match"
    " (token_loss).",
    "no gradient": ADVICE["no gradient"],
}


def explain(
    step: ModelStep, truth: Truth, size: int, observed: Result, each: Each, wrong: list[str]
) -> dict[str, Cause]:
    """Return the likely cause of everything that is wrong over `size` ranks."""
    search = _Search(step, truth, size, observed, each)
    causes: dict[str, Cause] = {}
    if "logits" in wrong or "logits" not in observed:
        causes = search.explain_forward(wrong)
    rest = [name for name in wrong if name not in causes]
    if rest and "logits" not in wrong:
        causes.update(search.explain_backward(rest))
    elif rest:
        cause = causes.get("logits", NO_FIT)[0]
        causes.update(dict.fromkeys(rest, (cause, "The logits are wrong already.", "")))
    unknown = NO_FIT if "logits" in observed else NO_LOGITS
    return {name: causes.get(name, unknown) for name in wrong}


class _Search:
    """Compares results of known mistakes with the observed ones."""

    def __init__(self, step: ModelStep, truth: Truth, size: int, observed: Result, each: Each) -> None:
        self.step, self.truth, self.size, self.observed, self.each = step, truth, size, observed, each
        self.places = Places.of(step.layout)

    def budget(self, name: str) -> float:
        return SLACK * self.truth.budgets[name].total

    def fits(self, name: str, right: Tensor) -> bool:
        """Whether the observed tensor is this one, clearly more than the truth."""
        observed = self.observed[name]
        if observed.shape != right.shape:
            return False
        error, wrong = (float((observed - other).norm()) for other in (right, self.truth.result[name]))
        return error <= self.budget(name) and not error > wrong / 10

    def fits_losses(self, values: list[float]) -> bool:
        """Whether the ranks reported these losses."""
        losses, budget = self.each.losses, self.budget("loss")
        return len(losses) == len(values) and all(abs(a - b) <= budget for a, b in zip(losses, values, strict=True))

    def explain_forward(self, wrong: list[str]) -> dict[str, Cause]:
        """Try mistakes of masks and positions; logits decide, or everything wrong where there are none."""
        judges = ["logits"] if "logits" in wrong else [name for name in wrong if name != "loss"] or wrong

        def is_same(name: str, result: Result) -> bool:
            if name == "loss":
                return self.fits_losses([float(result["loss"])] * len(self.each.losses))
            return name in result and self.fits(name, result[name])

        for cause, evidence, run in self._wrong_runs():
            try:
                result = run()
            except Exception:  # noqa: S112  (a step that cannot take this mask or these positions did not make it)
                continue
            if all(is_same(name, result) for name in judges):
                advice = MODEL_ADVICE.get(cause) or ADVICE.get(cause, "")
                same = [name for name in wrong if is_same(name, result) or name in judges or name == "loss"]
                return dict.fromkeys(same, (cause, evidence, advice))
        return {}

    def _wrong_runs(self) -> Iterator[tuple[str, str, Callable[[], Result]]]:
        """Yield cause, evidence, and the one-device step with this mistake."""
        step, model, batch, result = self.step, self.truth.model, self.truth.batch, "The result is that of"
        for name, call in step.causes.items():
            evidence = f"{result} the step passed for this cause."
            yield name, evidence, lambda call=call: step.run_whole(model, batch, call)
        ids = step.batch.get("position_ids")
        like = ids if isinstance(ids, Tensor) else step.batch.get("input_ids")
        if isinstance(like, Tensor) and self.places.size > 1:
            for text, at in (
                ("start at 0 on every rank.", self.places.slot),
                ("count tokens in rank order.", self.places.joined),
                ("count through all documents.", torch.arange(like.shape[-1])),
            ):
                changed = {**batch, "position_ids": at.to(like.device).expand(like.shape)}
                evidence = f"{result} positions that {text}"
                yield "positions local", evidence, lambda changed=changed: step.run_whole(model, changed)
        if step.mask is None:
            return
        seen = allowed(step.mask, step.mask.num_rows, step.mask.num_heads, step.layout.seq_len)
        for cause, evidence, other in mask_mistakes(seen, self.places):
            if not torch.equal(other, seen):
                mask = dense_mask(other, cause)
                yield cause, evidence, lambda mask=mask: step.run_whole(model, batch, mask=mask)

    def explain_backward(self, wrong: list[str]) -> dict[str, Cause]:
        """Try mistakes of labels, means and sums."""
        causes = self._explain_scales(wrong)
        rest = [name for name in wrong if name not in causes]
        if not rest:
            return causes
        grads = [name for name in wrong if name != "loss"]
        for mistake in loss_mistakes(self.step, self.truth, self.places):
            # A gradient may also be a multiple of a mistake's: ranks may have added where they average.
            same = [
                name
                for name in grads
                if self.fits(name, mistake.gradients[name])
                or find_multiple(self.observed[name], mistake.gradients[name], self.truth.budgets[name].total)
                is not None
            ]
            is_reported = any(map(self.fits_losses, mistake.losses)) if "loss" in wrong else True
            if is_reported and 2 * len(same) >= len(grads) and ("loss" in rest or any(n in rest for n in same)):
                cause = mistake.cause, mistake.evidence, MODEL_ADVICE.get(mistake.cause, "")
                causes.update(dict.fromkeys((*same, *(["loss"] * ("loss" in wrong))), cause))
                break
        return causes

    def _explain_scales(self, wrong: list[str]) -> dict[str, Cause]:
        """Return causes that the numbers alone show: missing, unreduced and scaled values."""
        causes: dict[str, tuple[str, str]] = {}
        right, size = float(self.truth.result["loss"]), self.size
        for name in wrong:
            if name == "loss":
                continue
            observed, expected = self.observed[name], self.truth.result[name]
            ratio = find_multiple(observed, expected, self.truth.budgets[name].total)
            if name in self.each.missing and not observed.any():
                causes[name] = "no gradient", f"Nothing reached it on ranks {list(self.each.missing[name])}."
            elif not observed.any() and expected.any():
                causes[name] = "no gradient", "It is 0 everywhere."
            elif (
                self.step.gradients == "done"
                and size > 1
                and float((self.each.total[name] - expected).norm()) <= self.budget(name)
            ):
                causes[name] = "gradients not reduced", "Gradients differ from rank to rank, and their sum is right."
            elif ratio is not None and abs(ratio - 1) > 1e-3:
                causes[name] = "gradients scaled", describe_multiple(ratio, size)
        if "loss" in wrong and size > 1:
            losses = self.each.losses
            for factor, text in ((size, "the number of ranks"), (1 / size, "one over the number of ranks")):
                if self.fits_losses([right * factor] * len(losses)):
                    causes["loss"] = "loss scaled by ranks", f"Every rank's loss is one device's times {text}."
            if self.step.loss == "same" and abs(sum(losses) - right) <= self.budget("loss") and "loss" not in causes:
                causes["loss"] = "loss not reduced", "The ranks' losses add up to one device's."
            if self.step.loss == "share" and self.fits_losses([right] * len(losses)):
                causes["loss"] = "loss scaled by ranks", "Every rank reports all of the loss, not its share."
        return {name: (*cause, MODEL_ADVICE.get(cause[0], "")) for name, cause in causes.items()}


def dense_mask(seen: Tensor, name: str) -> Mask:
    """Return the mask of these pairs (rows, heads, S, S), in closed form: one band for every run of keys of a row.

    >>> dense_mask(torch.tensor([[[[True, False], [True, True]]]]), "m").area()
    3
    """

    def plane(pairs: Any) -> Plane:
        row, start, stop = true_runs(pairs).T
        return Plane(rectangles(row, row + 1, start, stop))

    return Mask(tuple(tuple(map(plane, row)) for row in seen.numpy()), seen.shape[-1], name)


# -- Mistakes of labels and means, applied to the logits of one device -------------------------------------------------


IGNORED = -100
MEANS = {
    "mean of the ranks' means": "The loss is the mean of each rank's own mean, whatever its number of labels.",
    "sum of the ranks' means": "The loss is the sum of each rank's own mean.",
}
LABELS = (
    ("late", "labels shifted late", "Labels are those of a shift inside each shard: its last token has none."),
    ("late within documents", "labels shifted late", "Labels are those of a shift inside each shard."),
    ("in place", "labels not shifted", "Every token predicts its own label."),
    ("twice", "labels shifted twice", "Every token predicts the label two places later."),
    ("shifted", "labels cross documents", "The last token of a document predicts the next document's first."),
)


@dataclass(frozen=True, eq=False)
class LossMistake:
    """A mistake, the losses ranks may report with it, and its gradients."""

    cause: str
    evidence: str
    losses: list[list[float]]
    gradients: dict[str, Tensor]


def loss_mistakes(step: ModelStep, truth: Truth, places: Places) -> Iterator[LossMistake]:
    """Yield mistakes of the loss, the likeliest first; none without labels or logits."""
    labels = step.batch.get("labels", step.batch.get("shift_labels"))
    if not isinstance(labels, Tensor) or "logits" not in truth.result or labels.ndim != 2:
        return
    logits = step.whole(truth.model, truth.batch, step.mask)[1]
    if logits.shape[:2] != labels.shape:
        return
    right, targets = float(truth.result["loss"]), _targets(step, labels.cpu(), places)

    def is_usual(name: str) -> bool:
        loss = F.cross_entropy(logits.detach().flatten(0, 1), targets[name].flatten(), ignore_index=IGNORED)
        return abs(float(loss) - right) <= 1e-4 * abs(right)

    usual = next(filter(is_usual, ("shifted", "within documents", "in place")), None)
    if usual is None:
        return
    named = {n: p for n, p in truth.model.named_parameters() if p.requires_grad}
    others = [(n, c, e) for n, c, e in LABELS if n in targets and not torch.equal(targets[n], targets[usual])]
    for name, cause, evidence in ((usual, "", ""), *others):
        target = targets[name]
        nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")
        nll, counted = nll.view(target.shape), (target != IGNORED).double()
        counts = _by_rank(counted, places).clamp(min=1)
        own = counted / counts[places.owner]
        means = {"": counted / counted.sum().clamp(min=1)}
        if places.size > 1:
            means |= {"mean of the ranks' means": own / places.size, "sum of the ranks' means": own}
        for mean, weights in means.items():
            if cause == "" and mean == "":
                continue
            total = (nll * weights).sum()
            grads = torch.autograd.grad(total, list(named.values()), retain_graph=True, allow_unused=True)
            filled = {
                f"gradient of {n}": (torch.zeros_like(p) if g is None else g).double().cpu()
                for (n, p), g in zip(named.items(), grads, strict=True)
            }
            # Ranks may report the whole loss, their shares, or their own means.
            value, size = float(total.detach()), places.size
            shares = _by_rank(nll.detach() * weights, places).tolist()
            by_rank = (_by_rank(nll.detach() * counted, places) / counts).tolist()
            text = " ".join(filter(None, (evidence, MEANS.get(mean, ""))))
            yield LossMistake(cause or mean, text, [[value] * size, shares, by_rank, [value]], filled)


def _by_rank(values: Tensor, places: Places) -> Tensor:
    """Sum values (batch, tokens) over the tokens of each rank."""
    return torch.zeros(places.size, dtype=torch.float64).index_add(0, places.owner, values.sum(0).double())


def _shift(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _targets(step: ModelStep, labels: Tensor, places: Places) -> dict[str, Tensor]:
    """Return labels as each convention and mistake has them, in global order."""
    shifted = _shift(labels)
    late = torch.full_like(labels, IGNORED)
    for rank in range(places.size):
        mine = (places.owner == rank).nonzero().flatten()
        mine = mine[places.slot[mine].argsort()]
        late[:, mine] = _shift(labels[:, mine])
    targets = {"shifted": shifted, "late": late, "in place": labels, "twice": _shift(shifted)}
    targets["within documents"] = shifted
    if step.mask is not None and labels.shape[1] > 1:
        at = torch.arange(labels.shape[1] - 1).numpy()
        ends = F.pad(torch.as_tensor(~step.mask.resized(labels.shape[1]).allows(at + 1, at)), (0, 1))
        targets["within documents"] = shifted.masked_fill(ends, IGNORED)
        targets["late within documents"] = late.masked_fill(ends, IGNORED)
    return targets


# -- The leak probe: change a token's id, and check that logits it cannot reach do not change --------------------------


def probe_leaks(
    step: ModelStep, truth: Truth, ranks: RankView, observed: Result, count: int, known: list[Finding]
) -> tuple[list[Finding], list[str]]:
    """Return findings and notes. A token may reach logits through any number of layers."""
    ids = step.batch.get("input_ids")
    if not count or step.mask is None or not isinstance(ids, Tensor) or "logits" not in observed:
        return [], ["no leak probe: it needs mask=, input_ids in the batch, and logits from both steps"] * bool(count)
    reach = _reach(step.mask, step.layout.seq_len)
    # Tokens that reach the fewest rows after them, and before them.
    at = np.arange(len(reach))
    hidden = [(~reach & side).sum(0) for side in (at[:, None] > at, at[:, None] < at)]
    positions = list(dict.fromkeys(int(counts.argmax()) for counts in hidden if counts.any()))[:count]
    if not positions:
        return [], ["no leak probe: every token reaches every other"]
    notes = [f"leak probe: ids of tokens {', '.join(map(str, positions))} changed"]
    rows = truth.budgets["logits"].rows
    assert rows is not None
    for position in positions:
        batch = {**step.batch, "input_ids": _change_id(ids, position)}
        after = run_local(step, ranks, batch, truth, backward=False)[0]
        difference = (after["logits"] - observed["logits"]).movedim(TOKENS, 0).flatten(1).norm(dim=1)
        moved = (torch.as_tensor(~reach[:, position]) & ~(difference <= rows / 2)).nonzero().flatten()
        if len(moved):
            finding = _leak(step, position, moved, difference, rows / 2)
            same = next((other for other in known if other.tensor == "logits"), None)
            return [finding if same is None else replace(finding, cause=same.cause, advice=same.advice)], notes
    return [], notes


def _leak(step: ModelStep, position: int, at: Tensor, difference: Tensor, budget: Tensor) -> Finding:
    worst = int(at[difference[at].argmax()])
    evidence = (
        f"The id of token {position} was changed (rank {int(step.layout.owner([position])[0])}), which under the mask"
        f" reaches none of these tokens through any number of layers."
    )
    advice = "Compare the mask that the layers use on the ranks with mask=."
    ids = step.batch["input_ids"]
    with torch.no_grad():
        before, after = (
            step.whole(step.one_device, {**step.batch, "input_ids": x}, step.mask)[1][:, worst].double()
            for x in (ids, _change_id(ids, position))
        )
    if (before - after).norm() > 1e-3 * before.norm():
        evidence += " The one-device run leaks as well."
        advice = "The one-device step does not use mask=: fix it first."
    error = float(difference[worst])
    ranks = tuple(sorted(set(step.layout.owner(at.numpy()).tolist())))
    return Finding(
        "logits", "leak", error if math.isfinite(error) else math.inf, float(budget[worst]), ranks,
        spans_of(at.numpy()), worst, "hidden tokens leak", evidence, advice,
    )  # fmt: skip


def _change_id(ids: Tensor, position: int) -> Tensor:
    """Return the batch's ids with another of its own ids at one position."""
    ids = ids.clone()
    old = ids[..., position].clone()
    for other in ids.unique().tolist():
        ids[..., position] = torch.where(ids[..., position] == old, torch.full_like(old, other), ids[..., position])
    return ids


def _reach(mask: Mask, seq_len: int) -> Any:
    """Return (S, S): whether a token's value can reach a row through any number of layers."""
    at = np.arange(seq_len)
    whole = mask.resized(seq_len)
    planes = [(row, head) for row in range(whole.num_rows) for head in range(whole.num_heads)]
    seen = np.any([whole.allows(at[:, None], at[None, :], row=r, head=h) for r, h in planes], axis=0)
    seen = seen | np.eye(seq_len, dtype=bool)
    while True:
        wider = (seen.astype(np.float32) @ seen.astype(np.float32)) > 0
        if np.array_equal(wider, seen):
            return seen
        seen = wider


def find_connected(mask: Mask, seq_len: int) -> Any:
    """Return (1, S): numbers of groups of tokens that do not reach each other, or None if there is one group.

    >>> from longspan.masks import causal, documents
    >>> find_connected(causal() & documents([2, 1]), 3)
    array([[0, 0, 1]])
    >>> find_connected(causal(), 3) is None
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
