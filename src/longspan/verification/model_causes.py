"""Find the likely cause of a wrong training step: known mistakes run on one device, until one has the observed result.

Wrong logits come from masks and positions, so the one-device step runs with wrong ones on purpose. A wrong loss or
wrong gradients with correct logits come from labels, means and sums, which are applied to the one-device logits.

Example: positions that start at 0 on every rank. Logits are wrong, so positions and masks are tried. The one-device
step with `position_ids` = [0, 1, 2, 0, 1, 2] has the logits of the ranks, and the cause is "positions local".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from longspan.masks import Mask, Plane
from longspan.masks.bands import rectangles
from longspan.spans import true_runs
from longspan.testing import allowed
from longspan.verification.diagnose import ADVICE, SLACK, describe_multiple, find_multiple
from longspan.verification.model_step import Cause, Comparison, ModelStep, StepResult
from longspan.verification.prover import gradients
from longspan.verification.reference import Places, comparable, distance, mask_mistakes
from longspan.verification.report import UNKNOWN

MEAN_ADVICE = "Divide by the labels of all ranks, not by each rank's own: token_loss does."
STEP_ADVICE = ADVICE | {
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
}


def find_causes(compared: Comparison, wrong: list[str]) -> dict[str, Cause]:
    """Return the likely cause of each of these tensors, which are beyond their budgets."""
    search = _CauseSearch(compared)
    has_logits = "logits" in compared.observed
    causes: dict[str, Cause] = {}
    if wrong and ("logits" in wrong or not has_logits):
        causes = search.explain_forward(wrong)
    rest = [name for name in wrong if name not in causes]
    if rest and "logits" not in wrong:
        causes.update(search.explain_backward(rest))
    elif rest:
        name = causes["logits"].name if "logits" in causes else UNKNOWN
        causes.update(dict.fromkeys(rest, Cause(name, "The logits are wrong already.", "")))
    unknown = Cause(UNKNOWN, "None of the known mistakes gives this result.", "")
    if not has_logits:
        advice = "Return (loss, logits) from both steps: more mistakes can then be distinguished."
        unknown = unknown._replace(advice=advice)
    return {name: causes.get(name, unknown) for name in wrong}


class _CauseSearch:
    """Compares results of known mistakes with the observed ones."""

    def __init__(self, compared: Comparison) -> None:
        self.step, self.reference, self.size = compared.step, compared.reference, compared.size
        self.observed, self.per_rank = compared.observed, compared.per_rank
        self.places = Places.of(compared.step.layout)

    def budget(self, name: str) -> float:
        return SLACK * self.reference.budgets[name].total

    def matches(self, name: str, result: StepResult) -> bool:
        """Whether the ranks have this result of a mistake, clearly more than the right one."""
        if name == "loss":
            return self.matches_losses([float(result["loss"])] * len(self.per_rank.losses))
        observed = self.observed[name]
        if name not in result or observed.shape != result[name].shape:
            return False
        error = distance(observed, result[name])
        return error <= self.budget(name) and error <= distance(observed, self.reference.result[name]) / 10

    def matches_losses(self, values: list[float]) -> bool:
        """Whether the ranks reported these losses."""
        losses, budget = self.per_rank.losses, self.budget("loss")
        return len(losses) == len(values) and all(abs(a - b) <= budget for a, b in zip(losses, values, strict=True))

    def explain_forward(self, wrong: list[str]) -> dict[str, Cause]:
        """Try mistakes of masks and positions; logits decide, or everything wrong where there are none."""
        decisive = ["logits"] if "logits" in wrong else [name for name in wrong if name != "loss"] or wrong
        for name, evidence, run in self._forward_mistakes():
            try:
                result = run()
            except Exception:  # noqa: S112  (a step that cannot take this mask or these positions did not use them)
                continue
            if all(self.matches(tensor, result) for tensor in decisive):
                cause = Cause(name, evidence, STEP_ADVICE.get(name, ""))
                explained = {"loss", *decisive}
                return {tensor: cause for tensor in wrong if tensor in explained or self.matches(tensor, result)}
        return {}

    def _forward_mistakes(self) -> Iterator[tuple[str, str, Callable[[], StepResult]]]:
        """Yield cause, evidence, and the one-device step with this mistake."""
        step, model, batch = self.step, self.reference.model, self.reference.batch
        result = "The result is that of"
        for name, call in step.causes.items():
            yield (
                name,
                f"{result} the step passed for this cause.",
                lambda call=call: step.run_whole(model, batch, call),
            )
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
        for name, evidence, other in mask_mistakes(seen, self.places):
            if not torch.equal(other, seen):
                mask = dense_mask(other, name)
                yield name, evidence, lambda mask=mask: step.run_whole(model, batch, mask=mask)

    def explain_backward(self, wrong: list[str]) -> dict[str, Cause]:
        """Try mistakes of labels, means and sums."""
        causes = self._explain_scales(wrong)
        rest = [name for name in wrong if name not in causes]
        if not rest:
            return causes
        grads = [name for name in wrong if name != "loss"]
        for name, evidence, possible_losses, result in self._loss_mistakes():
            # A gradient may also be a multiple of a mistake's: ranks may have added where they average.
            explained = [
                grad
                for grad in grads
                if self.matches(grad, result)
                or find_multiple(self.observed[grad], result[grad], self.reference.budgets[grad].total) is not None
            ]
            has_losses = "loss" not in wrong or any(map(self.matches_losses, possible_losses))
            if has_losses and 2 * len(explained) >= len(grads) and set(rest) & {"loss", *explained}:
                cause = Cause(name, evidence, STEP_ADVICE[name])
                causes.update(dict.fromkeys([*explained, *(["loss"] * ("loss" in wrong))], cause))
                break
        return causes

    def _explain_scales(self, wrong: list[str]) -> dict[str, Cause]:
        """Return causes that the numbers alone show: missing, unreduced and scaled values."""
        causes: dict[str, tuple[str, str]] = {}
        for name in wrong:
            if name == "loss":
                continue
            observed, expected = self.observed[name], self.reference.result[name]
            ratio = find_multiple(observed, expected, self.reference.budgets[name].total)
            if name in self.per_rank.missing and not observed.any():
                causes[name] = "no gradient", f"Nothing reached it on ranks {list(self.per_rank.missing[name])}."
            elif not observed.any() and expected.any():
                causes[name] = "no gradient", "It is 0 everywhere."
            elif (
                self.step.gradients == "done"
                and self.size > 1
                and distance(self.per_rank.gradient_sums[name], expected) <= self.budget(name)
            ):
                causes[name] = "gradients not reduced", "Gradients differ from rank to rank, and their sum is right."
            elif ratio is not None and abs(ratio - 1) > 1e-3:
                causes[name] = "gradients scaled", describe_multiple(ratio, self.size)
        if "loss" in wrong and self.size > 1:
            losses, expected = self.per_rank.losses, float(self.reference.result["loss"])
            for factor, text in ((self.size, "the number of ranks"), (1 / self.size, "one over the number of ranks")):
                if self.matches_losses([expected * factor] * len(losses)):
                    causes["loss"] = "loss scaled by ranks", f"Every rank's loss is one device's times {text}."
            is_sum_right = abs(sum(losses) - expected) <= self.budget("loss")
            if self.step.loss == "same" and is_sum_right and "loss" not in causes:
                causes["loss"] = "loss not reduced", "The ranks' losses add up to one device's."
            if self.step.loss == "share" and self.matches_losses([expected] * len(losses)):
                causes["loss"] = "loss scaled by ranks", "Every rank reports all of the loss, not its share."
        return {name: Cause(*cause, STEP_ADVICE.get(cause[0], "")) for name, cause in causes.items()}

    def _loss_mistakes(self) -> Iterator[tuple[str, str, list[list[float]], StepResult]]:
        """Yield mistakes of labels and means, the likeliest first, applied to the logits of one device.

        Each has a cause, evidence, the losses that ranks may report with it, and its gradients. There are none without
        labels, or without logits that have a graph.
        """
        step, reference, places = self.step, self.reference, self.places
        labels = step.batch.get("labels", step.batch.get("shift_labels"))
        if not isinstance(labels, Tensor) or "logits" not in reference.result or labels.ndim != 2:
            return
        logits = step.whole(reference.model, reference.batch, step.mask)[1]
        if logits.shape[:2] != labels.shape or not logits.requires_grad:
            return
        expected, targets = float(reference.result["loss"]), _targets(step, labels.cpu(), places)

        def is_convention(name: str) -> bool:
            loss = F.cross_entropy(logits.detach().flatten(0, 1), targets[name].flatten(), ignore_index=IGNORED)
            return abs(float(loss) - expected) <= 1e-4 * abs(expected)

        convention = next(filter(is_convention, ("shifted", "within documents", "in place")), None)
        if convention is None:
            return
        others = [row for row in LABEL_MISTAKES if row[0] in targets]
        others = [row for row in others if not torch.equal(targets[row[0]], targets[convention])]
        for target_name, label_cause, evidence in ((convention, "", ""), *others):
            target = targets[target_name]
            nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")
            nll, counted = nll.view(target.shape), (target != IGNORED).double()
            counts = _sum_by_rank(counted, places).clamp(min=1)
            rank_mean = counted / counts[places.owner]
            means = {"": counted / counted.sum().clamp(min=1)}
            if places.size > 1:
                means |= {"mean of the ranks' means": rank_mean / places.size, "sum of the ranks' means": rank_mean}
            for mean, weights in means.items():
                if label_cause == "" and mean == "":
                    continue
                total = (nll * weights).sum()
                grads, _ = gradients(reference.model, total, retain_graph=True)
                result = {f"gradient of {name}": comparable(grad) for name, grad in grads.items()}
                # Ranks may report the whole loss, their shares, or their own means.
                loss, size = float(total.detach()), places.size
                shares = _sum_by_rank(nll.detach() * weights, places).tolist()
                own_means = (_sum_by_rank(nll.detach() * counted, places) / counts).tolist()
                text = " ".join(filter(None, (evidence, MEAN_EVIDENCE.get(mean, ""))))
                yield label_cause or mean, text, [[loss] * size, shares, own_means, [loss]], result


IGNORED = -100
MEAN_EVIDENCE = {
    "mean of the ranks' means": "The loss is the mean of each rank's own mean, whatever its number of labels.",
    "sum of the ranks' means": "The loss is the sum of each rank's own mean.",
}
LABEL_MISTAKES = (
    ("late", "labels shifted late", "Labels are those of a shift inside each shard: its last token has none."),
    ("late within documents", "labels shifted late", "Labels are those of a shift inside each shard."),
    ("in place", "labels not shifted", "Every token predicts its own label."),
    ("twice", "labels shifted twice", "Every token predicts the label two places later."),
    ("shifted", "labels cross documents", "The last token of a document predicts the next document's first."),
)
"""Name in `_targets`, cause, evidence."""


def _targets(step: ModelStep, labels: Tensor, places: Places) -> dict[str, Tensor]:
    """Return labels as each convention and mistake has them, in global order."""
    shifted = _shift(labels)
    late = torch.full_like(labels, IGNORED)
    for rank in range(places.size):
        at = (places.owner == rank).nonzero().flatten()
        at = at[places.slot[at].argsort()]
        late[:, at] = _shift(labels[:, at])
    targets = {"shifted": shifted, "late": late, "in place": labels, "twice": _shift(shifted)}
    targets["within documents"] = shifted
    if step.mask is not None and labels.shape[1] > 1:
        at = torch.arange(labels.shape[1] - 1).numpy()
        ends = F.pad(torch.as_tensor(~step.mask.resized(labels.shape[1]).allows(at + 1, at)), (0, 1))
        targets["within documents"] = shifted.masked_fill(ends, IGNORED)
        targets["late within documents"] = late.masked_fill(ends, IGNORED)
    return targets


def _shift(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _sum_by_rank(values: Tensor, places: Places) -> Tensor:
    """Sum values (batch, tokens) over the tokens of each rank."""
    return torch.zeros(places.size, dtype=torch.float64).index_add(0, places.owner, values.sum(0).double())


def dense_mask(seen: Tensor, name: str) -> Mask:
    """Return the mask of these pairs (rows, heads, S, S), in closed form: one band for every run of keys of a row.

    >>> dense_mask(torch.tensor([[[[True, False], [True, True]]]]), "m").area()
    3
    """

    def plane(pairs: Any) -> Plane:
        row, start, stop = true_runs(pairs).T
        return Plane(rectangles(row, row + 1, start, stop))

    return Mask(tuple(tuple(map(plane, row)) for row in seen.numpy()), seen.shape[-1], name)
