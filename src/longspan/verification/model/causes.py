"""Why a training step differs: the step with known mistakes, on one device, compared with what was found.

Wrong logits come from masks and positions, which the one-device step is given on purpose; a wrong loss or wrong
gradients over right logits come from labels, means and sums, which are played through the one-device logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from longspan.masks import Mask, Plane
from longspan.masks.bands import rectangles
from longspan.span import true_runs
from longspan.testing import allowed
from longspan.verification.attention.diagnose import SLACK, multiple, said_multiple
from longspan.verification.attention.mistakes import ADVICE
from longspan.verification.model.labels import LABEL_ADVICE, loss_mistakes
from longspan.verification.model.step import Each, ModelStep, Result, Truth, run_whole
from longspan.verification.places import Places, mask_mistakes
from longspan.verification.ranks import RankView
from longspan.verification.report import UNKNOWN

Said = tuple[str, str, str]
"""Cause, evidence, advice."""
NO_FIT = (UNKNOWN, "None of the known mistakes gives this result.", "")
NO_LOGITS = (*NO_FIT[:2], "Return (loss, logits) from both steps: more mistakes can then be told apart.")
MODEL_ADVICE = {
    **LABEL_ADVICE,
    "positions local": "Give every rank its global positions: layout.positions(rank), or shard_batch(positions=...).",
    "loss scaled by ranks": "Divide by the labels of all ranks, once: longspan.training.token_loss does.",
    "loss not reduced": "Add the shares up over the group before reporting, or say loss='share'.",
    "gradients not reduced": "Add gradients up over the group after backward, or say gradients='sum'.",
    "gradients scaled": "Say gradients='sum' or 'average' as it is done, and normalise the loss to match (token_loss).",
    "no gradient": ADVICE["no gradient"],
}


def explain(
    step: ModelStep, truth: Truth, ranks: RankView, found: Result, each: Each, wrong: list[str]
) -> dict[str, Said]:
    """The likely cause of everything that is wrong."""
    look = _Look(step, truth, ranks, found, each)
    said: dict[str, Said] = {}
    if "logits" in wrong or "logits" not in found:
        said = look.forward(wrong)
    rest = [name for name in wrong if name not in said]
    if rest and "logits" not in wrong:
        said.update(look.backward(rest))
    elif rest:
        cause = said.get("logits", NO_FIT)
        said.update(dict.fromkeys(rest, (cause[0], "The logits are wrong already.", "")))
    unknown = NO_FIT if "logits" in found else NO_LOGITS
    return {name: said.get(name, unknown) for name in wrong}


class _Look:
    """What is compared with what."""

    def __init__(self, step: ModelStep, truth: Truth, ranks: RankView, found: Result, each: Each) -> None:
        self.step, self.truth, self.ranks, self.found, self.each = step, truth, ranks, found, each
        self.places = Places.of(step.layout)

    def fits(self, name: str, right: Tensor, found: Tensor | None = None) -> bool:
        """Whether a tensor that was found is this one, clearly more than the truth."""
        found = self.found[name] if found is None else found
        if found.shape != right.shape:
            return False
        error, wrong = (float((found - other).norm()) for other in (right, self.truth.result[name]))
        return error <= SLACK * self.truth.budgets[name].total and not error > wrong / 10

    def fits_loss(self, values: list[float]) -> bool:
        """Whether the ranks reported these losses."""
        budget = SLACK * self.truth.budgets["loss"].total
        losses = self.each.losses
        return len(losses) == len(values) and all(abs(a - b) <= budget for a, b in zip(losses, values, strict=True))

    # -- logits ------------------------------------------------------------------------------------------------------

    def forward(self, wrong: list[str]) -> dict[str, Said]:
        """Mistakes of masks and positions, judged by the logits, or by everything wrong where there are none."""
        judges = ["logits"] if "logits" in wrong else [name for name in wrong if name != "loss"] or wrong
        for cause, evidence, run in self._runs():
            try:
                given = run()
            except Exception:  # noqa: S112  (a step that cannot take this mask or these positions did not make it)
                continue
            if all(self._same(name, given) for name in judges):
                advice = MODEL_ADVICE.get(cause) or ADVICE.get(cause, "")
                same = [name for name in wrong if self._same(name, given) or name in judges or name == "loss"]
                return dict.fromkeys(same, (cause, evidence, advice))
        return {}

    def _same(self, name: str, given: Result) -> bool:
        if name == "loss":
            return self.fits_loss([float(given["loss"])] * len(self.each.losses))
        return name in given and self.fits(name, given[name])

    def _runs(self) -> Iterator[tuple[str, str, Callable[[], Result]]]:
        step, model, batch = self.step, self.truth.model, self.truth.batch
        for name, call in step.causes.items():
            yield (
                name,
                "The result is that of the step given for this cause.",
                lambda c=call: run_whole(c, model, batch, step.mask),
            )
        for evidence, ids in self._positions():
            changed = {**batch, "position_ids": ids}
            yield "positions local", evidence, lambda b=changed: run_whole(step.whole, model, b, step.mask)
        if step.mask is None:
            return
        seen = allowed(step.mask, step.mask.num_rows, step.mask.num_heads, step.layout.seq_len)
        for cause, evidence, other in mask_mistakes(seen, self.places):
            if not torch.equal(other, seen):
                mask = dense_mask(other, cause)
                yield cause, evidence, lambda m=mask: run_whole(step.whole, model, batch, m)

    def _positions(self) -> Iterator[tuple[str, Tensor]]:
        ids = self.step.batch.get("position_ids")
        like = ids if isinstance(ids, Tensor) else self.step.batch.get("input_ids")
        if not isinstance(like, Tensor) or self.places.size < 2:
            return
        for evidence, at in (
            ("The result is that of positions that start at 0 on every rank.", self.places.slot),
            ("The result is that of positions in rank order.", self.places.joined),
            ("The result is that of positions that count through all documents.", torch.arange(like.shape[-1])),
        ):
            yield evidence, at.to(like.device).expand(like.shape)

    # -- loss and gradients ------------------------------------------------------------------------------------------

    def backward(self, wrong: list[str]) -> dict[str, Said]:
        """Mistakes of labels, means and sums."""
        causes = self._plain(wrong)
        rest = [name for name in wrong if name not in causes]
        if not rest:
            return causes
        for mistake in loss_mistakes(self.step, self.truth, self.places):
            said = (mistake.cause, mistake.evidence, MODEL_ADVICE.get(mistake.cause, ""))
            grads = [name for name in wrong if name != "loss"]
            values = any(self.fits_loss(losses) for losses in mistake.losses) if "loss" in wrong else True
            same = [name for name in grads if self._fits_scaled(name, mistake.gradients[name])]
            if values and 2 * len(same) >= len(grads) and ("loss" in rest or any(n in rest for n in same)):
                causes.update(dict.fromkeys((*same, *(["loss"] * ("loss" in wrong))), said))
                break
        return causes

    def _fits_scaled(self, name: str, right: Tensor) -> bool:
        """Whether a gradient is a mistake's, or a multiple of it: ranks may also have added where they average."""
        return self.fits(name, right) or multiple(self.found[name], right, self.truth.budgets[name].total) is not None

    def _plain(self, wrong: list[str]) -> dict[str, Said]:
        """What the form of the numbers tells."""
        causes: dict[str, tuple[str, str]] = {}
        right, size = float(self.truth.result["loss"]), self.ranks.size
        for name in wrong:
            if name == "loss":
                continue
            ratio = multiple(self.found[name], self.truth.result[name], self.truth.budgets[name].total)
            if name in self.each.missing and not self.found[name].any():
                causes[name] = "no gradient", f"Nothing reached it on ranks {list(self.each.missing[name])}."
            elif not self.found[name].any() and self.truth.result[name].any():
                causes[name] = "no gradient", "It is 0 everywhere."
            elif self.step.gradients == "done" and self.fits_total(name):
                causes[name] = "gradients not reduced", "Gradients differ from rank to rank, and their sum is right."
            elif ratio is not None and abs(ratio - 1) > 1e-3:
                causes[name] = "gradients scaled", said_multiple(ratio, size)
        if "loss" in wrong and size > 1:
            losses, budget = self.each.losses, SLACK * self.truth.budgets["loss"].total
            for factor, text in ((size, "the number of ranks"), (1 / size, "one over the number of ranks")):
                if self.fits_loss([right * factor] * len(losses)):
                    causes["loss"] = "loss scaled by ranks", f"Every rank's loss is one device's times {text}."
            if self.step.loss == "same" and abs(sum(losses) - right) <= budget and "loss" not in causes:
                causes["loss"] = "loss not reduced", "The ranks' losses add up to one device's."
            if self.step.loss == "share" and self.fits_loss([right] * len(losses)):
                causes["loss"] = "loss scaled by ranks", "Every rank reports all of the loss, not its share."
        return {name: (*said, MODEL_ADVICE.get(said[0], "")) for name, said in causes.items()}

    def fits_total(self, name: str) -> bool:
        """Whether the sum over ranks of unreduced gradients is right, while this rank's is not."""
        error = float((self.each.total[name] - self.truth.result[name]).norm())
        return self.ranks.size > 1 and error <= SLACK * self.truth.budgets[name].total


def dense_mask(seen: Tensor, name: str) -> Mask:
    """The mask of these pairs (rows, heads, S, S), in closed form: one band for every run of keys of a row.

    >>> dense_mask(torch.tensor([[[[True, False], [True, True]]]]), "m").area()
    3
    """
    grid = tuple(tuple(Plane(_bands(plane)) for plane in row) for row in seen.numpy())
    return Mask(grid, seen.shape[-1], name)


def _bands(plane: Any) -> Any:
    row, start, stop = true_runs(plane).T
    return rectangles(row, row + 1, start, stop)
