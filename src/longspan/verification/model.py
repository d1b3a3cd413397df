"""Compare a whole training step over ranks with one device: loss, logits, and the gradient of every parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.errors import PlanError
from longspan.masks import Mask, Plane
from longspan.masks.bands import rectangles
from longspan.spans import true_runs
from longspan.testing import allowed
from longspan.testing.modules import jittered
from longspan.training.groups import DifferentBatchesError, check_same
from longspan.verification.diagnose import ADVICE, SLACK, multiple, said_multiple
from longspan.verification.model_documents import CAUSE, leak_between, packed
from longspan.verification.model_step import (
    LABEL_ADVICE,
    TOKENS,
    Each,
    ModelStep,
    Result,
    Truth,
    copy_in_float64,
    loss_mistakes,
    run_local,
    run_whole,
)
from longspan.verification.ranks import RankView, elsewhere, same_data
from longspan.verification.reference import Budget, Places, budgets, compared, mask_mistakes, unit
from longspan.verification.report import UNKNOWN, Check, Finding, Report, spans_of

# -- The leak probe: change a token's id, and check that logits it cannot reach do not change --------------------------


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


# -- Explanation: the step on one device with known mistakes, compared with the result ---------------------------------
# Wrong logits come from masks and positions, which the one-device step is given on purpose. A wrong loss or wrong
# gradients with correct logits come from labels, means and sums, which are applied to the one-device logits.


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

    # -- Logits --------------------------------------------------------------------------------------------------------

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

    # -- Loss and gradients --------------------------------------------------------------------------------------------

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


# -- The comparison ----------------------------------------------------------------------------------------------------


SMALLEST = 2, 8
"""Budgets are at least this many roundings of parameters, and of float32, of the whole tensor's norm: a loss is one
number, and its samples may be lucky."""


def verify_step(step: ModelStep, group: Any, probes: int, factor: float) -> Report:
    """See `longspan.verification.verify_model`."""
    ranks = RankView.of(step.layout, group)
    subject = f"{type(step.model).__name__} over {step.layout!r}"
    different = _different(step, ranks)
    if different is not None:
        return Report(subject, ranks.size, (), (different,))
    _check_names(step)
    truth = truth_of(step, factor)
    saved = [(p, p.grad) for p in step.model.parameters()]
    try:
        return _judged(step, truth, ranks, subject, probes)
    finally:
        for p, grad in saved:
            p.grad = grad


def _judged(step: ModelStep, truth: Truth, ranks: RankView, subject: str, probes: int) -> Report:
    """The report on what the ranks gave."""
    found, each = run_local(step, ranks, step.batch, truth)
    if isinstance(found, Finding):
        return Report(subject, ranks.size, (), (found,))
    checks, wrong = compare(truth, found, each, step)
    check, mixed = _documents(step, truth) if probes else (None, None)
    findings: list[Finding] = []
    if wrong:
        names = [check.tensor for check in wrong]
        said = (CAUSE, "", "") if mixed is not None else None
        causes = explain(step, truth, ranks, found, each, names) if said is None else dict.fromkeys(names, said)
        findings = [finding_of(check, truth, found, each, step, causes[check.tensor]) for check in wrong]
    leaky, notes = probe(step, truth, ranks, found, probes, findings)
    findings = [*([mixed] if mixed is not None else []), *findings, *leaky]
    checks += [check] if check is not None else []
    others = ranks.any(bool(findings))
    if others and not findings:
        findings.append(elsewhere(others))
    return Report(subject, ranks.size, tuple(checks), tuple(findings), (*([truth.note] if truth.note else []), *notes))


def _documents(step: ModelStep, truth: Truth) -> tuple[Check | None, Finding | None]:
    """Whether one device keeps documents apart: if not, it is no truth. Nothing where there is one document."""
    numbers = None if step.mask is None else apart(step.mask, step.layout.seq_len)
    given = packed(truth.batch, numbers) if "logits" in truth.result else None
    if given is None or (step.mask is not None and numbers is None):
        return None, None
    return leak_between(truth.model, given, lambda m, b: step.whole(m, b, step.mask)[1])


def _different(step: ModelStep, ranks: RankView) -> Finding | None:
    """What all ranks must have alike: batch, layout, and whole parameters (sharded ones differ by design)."""
    plain = {name: value for name, value in step.batch.items() if isinstance(value, Tensor | int | float | str)}
    difference = same_data({**plain, "layout": step.layout.fingerprint}, ranks)
    if difference is not None:
        return difference
    if ranks.group is None:
        return None
    try:
        check_same({n: p.detach() for n, p in step.model.named_parameters() if not isinstance(p, DTensor)}, ranks.group)
    except DifferentBatchesError as error:
        return Finding(
            "parameters", "are not the same on all ranks", math.inf, 0.0, (), (), None,
            "parameters differ between ranks", f"Found: {error.differences}.",
            "Seed every rank alike before the model is made, or broadcast from rank 0.",
        )  # fmt: skip
    return None


def _check_names(step: ModelStep) -> None:
    """Refuses a reference whose parameters have other names or shapes: their gradients could not be compared."""
    mine, right = (
        {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
        for model in (step.model, step.one_device)
    )
    other = [name for name in (*mine, *(n for n in right if n not in mine)) if mine.get(name) != right.get(name)]
    if not other:
        return
    said = [
        f"{name} is {mine.get(name, 'missing')} in the model and {right.get(name, 'missing')} in reference="
        for name in other[:3]
    ]
    raise PlanError(
        f"parameters that want a gradient differ in {len(other)} names or shapes, so their gradients cannot be"
        f" compared: {'; '.join(said)}. Pass a reference= with equal names, shapes and requires_grad: unwrap the model"
        f" (as model.module of DDP, model._orig_mod of torch.compile), or wrap the reference alike."
    )


# -- The step on one device --------------------------------------------------------------------------------------------


def truth_of(step: ModelStep, factor: float, rounding: float | None = None) -> Truth:
    """The one-device run, and what rounding does to it: that of the model's parameters, unless another is given."""
    own = run_whole(step.whole, step.one_device, step.batch, step.mask)
    logits = own.get("logits")
    if logits is not None and (logits.ndim != 3 or logits.shape[TOKENS] != step.layout.seq_len):
        raise PlanError(
            f"the one-device step returned logits of shape {tuple(logits.shape)}, but they are compared token by token:"
            f" (batch, {step.layout.seq_len} tokens, vocabulary). Return them so, or the loss alone from both steps."
        )
    again = run_whole(step.whole, step.one_device, step.batch, step.mask)
    floats = [p.dtype for p in step.one_device.parameters() if p.is_floating_point()]
    narrow = max((unit(dtype) for dtype in floats), default=unit(torch.float32)) if rounding is None else rounding
    moved = [n for n in own if not _near(own[n], again[n], narrow)]
    if moved:
        raise PlanError(
            f"the one-device step gives other numbers when it runs again ({', '.join(moved[:3])}), so nothing can be"
            f" compared with it. Turn dropout off (model.eval(), or p = 0), or fix the seed inside the step."
        )
    model, batch, note = copy_in_float64(
        step.one_device, step.batch, lambda m, b: run_whole(step.whole, m, b, step.mask)
    )
    result = run_whole(step.whole, model, batch, step.mask) if not note else own
    played = [own] + [_played(step, model, batch, narrow, number) for number in range(2)]
    floor = max(SMALLEST[0] * narrow, SMALLEST[1] * (unit(torch.float64) if narrow < 1e-12 else unit(torch.float32)))
    limits = budgets(result, played, TOKENS, floor, factor)
    for name in limits:
        if name != "logits":
            limits[name] = Budget(limits[name].total, None)
    return Truth(model, batch, result, limits, note)


def _near(a: Tensor, b: Tensor, narrow: float) -> bool:
    return bool((a - b).norm() <= 64 * narrow * a.norm() + 1e-30)


def _played(step: ModelStep, model: nn.Module, batch: dict[str, Any], narrow: float, number: int) -> Result:
    """The truth with rounding."""
    with jittered(model, narrow, number):
        return run_whole(step.whole, model, batch, step.mask)


# -- Comparing tensors -------------------------------------------------------------------------------------------------


def compare(truth: Truth, found: Result, each: Each, step: ModelStep) -> tuple[list[Check], list[Check]]:
    """All comparisons, and those beyond their budgets."""
    right = float(truth.result["loss"])
    values = each.losses if step.loss == "same" else [math.fsum(each.losses)]
    error = max((abs(value - right) if math.isfinite(value) else math.inf for value in values), default=0.0)
    checks = [Check("loss", error, truth.budgets["loss"].total)]
    for name, tensor in found.items():
        if name in truth.result:
            checks.append(compared(tensor, truth.result[name], truth.budgets[name], name, TOKENS)[0])
    return checks, [check for check in checks if check.ratio > 1]


def finding_of(
    check: Check, truth: Truth, found: Result, each: Each, step: ModelStep, cause: tuple[str, str, str]
) -> Finding:
    """What a comparison beyond its budget says, with ranks and positions."""
    what = "is not finite" if math.isinf(check.error) else "differs"
    finding = Finding(check.tensor, what, check.error, check.budget, (), (), None, *cause)
    if check.tensor == "loss" and step.loss == "same":
        right, budget = float(truth.result["loss"]), check.budget
        return replace(finding, ranks=tuple(r for r, loss in enumerate(each.losses) if not abs(loss - right) <= budget))
    if check.tensor == "logits":
        ratio = compared(found["logits"], truth.result["logits"], truth.budgets["logits"], "logits", TOKENS)[1]
        assert ratio is not None
        at = (ratio > min(1.0, float(ratio.max()) / 2)).nonzero().flatten().numpy()
        ranks = tuple(sorted(set(step.layout.owner(at).tolist())))
        return replace(finding, ranks=ranks, spans=spans_of(at), worst=int(ratio.argmax()))
    apart = each.errors.get(check.tensor, [])
    return replace(finding, ranks=tuple(r for r, error in enumerate(apart) if not error <= check.budget))
