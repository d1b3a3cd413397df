"""Compare a training step over ranks with one device: loss, logits, and the gradient of every parameter.

1. **One device** (`run_reference`). The step runs twice in the model's dtype and must repeat itself, then on a float64
   copy, the reference, and again with parameters and gradients moved by up to one rounding. The spread of these runs
   is the effect of rounding on this model, and sets the budget of every tensor.
2. **Ranks**. The step runs over a process group (`verify_step`), or over simulated ranks in this process
   (`prove_step`). Logits are gathered, and gradients reduced as in the user's training.
3. **Comparison** (`Comparison.checks`), tensor by tensor; logits also token by token.
4. **Causes** (`model_causes.py`). Known mistakes run on one device, and the one with the observed result is named.
5. **Leaks** (`probe_leaks`). A token's id changes, and logits that it cannot reach must not.

Example: a weight w, tokens x = [1, 2, 3, 6], loss = mean(w x). On one device the gradient is 3. Two ranks hold [1, 2]
and [3, 6]. If they divide by all 4 tokens, their gradients are 0.75 and 2.25, and the sum is 3. If each divides by its
own 2 tokens, the gradients are 1.5 and 4.5; their sum is 6, and the finding is "gradients scaled", by the number of
ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan import layouts
from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.run.simulated import SimulatedRank
from longspan.training.groups import DifferentBatchesError, check_same
from longspan.verification.documents import DOCUMENTS_LEAK, find_leak, other_ids, read_documents
from longspan.verification.model_causes import find_causes
from longspan.verification.model_step import (
    TOKEN_DIM,
    Cause,
    Comparison,
    ModelStep,
    PerRank,
    Reference,
    StepResult,
    logits_finding,
    run_reference,
    split_result,
)
from longspan.verification.prover import (
    TOLERANCE,
    copy_in_float64,
    error_line,
    find_first_different,
    gradients,
    isolate_torch_state,
    run_on_ranks,
    shared_copy,
)
from longspan.verification.ranks import RankView, find_different_data, with_failures_elsewhere
from longspan.verification.reference import (
    comparable,
    distance,
    squared_differences,
    unit,
)
from longspan.verification.report import UNKNOWN, Check, Finding, Report, spans_of

LAYOUT_NAMES = ("zigzag", "contiguous", "striped")


# -- Over a process group ----------------------------------------------------------------------------------------------


def verify_step(step: ModelStep, group: Any, probes: int, factor: float) -> Report:
    """See `longspan.verification.verify_model`."""
    ranks = RankView.of(step.layout, group)
    subject = f"{type(step.model).__name__} over {step.layout!r}"
    different = _find_different_inputs(step, ranks)
    if different is not None:
        return Report(subject, ranks.size, (), (different,))
    _check_parameter_shapes(step)
    reference = run_reference(step, factor)
    saved = [(p, p.grad) for p in step.model.parameters()]
    try:
        compared = _run_on_group(step, ranks, step.batch, reference)
        if isinstance(compared, Finding):
            return Report(subject, ranks.size, (), (compared,))
        checks = compared.checks()
        wrong = [check for check in checks if check.ratio > 1]
        check, leak = _check_documents(step, reference, factor) if probes else (None, None)
        if leak is None:
            causes = find_causes(compared, [check.tensor for check in wrong])
        else:
            causes = {check.tensor: Cause(DOCUMENTS_LEAK, "", "") for check in wrong}
        findings = [compared.finding(check, causes[check.tensor]) for check in wrong]
        leaking, notes = probe_leaks(compared, ranks, probes, findings)
    finally:
        for p, grad in saved:
            p.grad = grad
    checks += [] if check is None else [check]
    findings = with_failures_elsewhere([*([] if leak is None else [leak]), *findings, *leaking], ranks)
    return Report(subject, ranks.size, tuple(checks), findings, (*([reference.note] if reference.note else []), *notes))


def _find_different_inputs(step: ModelStep, ranks: RankView) -> Finding | None:
    """Return a finding if batch, layout or unsharded parameters differ between ranks."""
    plain = {name: value for name, value in step.batch.items() if isinstance(value, Tensor | int | float | str)}
    different = find_different_data({**plain, "layout": step.layout.fingerprint}, ranks)
    if different is not None or ranks.group is None:
        return different
    try:
        check_same({n: p.detach() for n, p in step.model.named_parameters() if not isinstance(p, DTensor)}, ranks.group)
    except DifferentBatchesError as error:
        return Finding(
            "parameters", "are not the same on all ranks", math.inf, 0.0, (), (), None,
            "parameters differ between ranks", f"Found: {error.differences}.",
            "Use the same seed on every rank when the model is built, or broadcast from rank 0.",
        )  # fmt: skip
    return None


def _check_parameter_shapes(step: ModelStep) -> None:
    """Refuse a reference whose parameters have other names or shapes: their gradients could not be compared."""
    shapes, expected = (
        {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        for model in (step.model, step.reference_model)
    )
    different = [name for name in {**shapes, **expected} if shapes.get(name) != expected.get(name)]
    if not different:
        return
    pairs = [
        f"{name} is {shapes.get(name, 'missing')} in the model and {expected.get(name, 'missing')} in reference="
        for name in different[:3]
    ]
    raise PlanError(
        f"parameters with requires_grad differ in {len(different)} names or shapes, so their gradients cannot be"
        f" compared: {'; '.join(pairs)}. Pass a reference= with equal names, shapes and requires_grad: unwrap the model"
        f" (as model.module of DDP, model._orig_mod of torch.compile), or wrap the reference in the same way."
    )


def _run_on_group(
    step: ModelStep, ranks: RankView, batch: dict[str, Any], reference: Reference, *, backward: bool = True
) -> Comparison | Finding:
    """Run the local step on this rank and return the result of all, or a finding if logits have another shape."""
    for p in step.model.parameters():
        p.grad = None
    loss, logits = split_result(step.local(step.model, batch))
    if backward and loss.requires_grad:
        loss.backward()
    per_rank = PerRank([float(part) for part in ranks.all_gather(loss.detach().double().reshape(1))])
    compared = Comparison(step, reference, {}, per_rank, ranks.size)
    _check_logits_everywhere(ranks, logits, reference)
    if logits is not None:
        num_rows, _, vocabulary = reference.result["logits"].shape
        wrong = ranks.where(tuple(logits.shape) != (num_rows, ranks.num_slots(ranks.rank), vocabulary))
        if wrong:
            expected = f"(batch {num_rows}, local tokens, vocabulary {vocabulary})"
            return logits_finding(f"do not have {expected} on ranks {wrong}", wrong)
        compared.observed["logits"] = comparable(ranks.unshard(logits, TOKEN_DIM))
    if backward:
        _reduce_gradients(compared, ranks)
    return compared


def _reduce_gradients(compared: Comparison, ranks: RankView) -> None:
    """Move gradients of all ranks from the parameters to the comparison."""
    step, per_rank, expected = compared.step, compared.per_rank, compared.reference.result
    grads = {f"gradient of {n}": (p, p.grad) for n, p in step.model.named_parameters() if p.requires_grad}
    per_rank.missing.update(ranks.missing({name: grad for name, (_, grad) in grads.items()}))
    for name, (parameter, grad) in grads.items():
        grad = torch.zeros_like(parameter) if grad is None else grad
        grad = comparable(grad.full_tensor() if isinstance(grad, DTensor) else grad)
        per_rank.gradient_sums[name] = ranks.all_reduce(grad)
        if step.gradients == "done":
            parts = ranks.all_gather(grad)
            errors = [distance(part, expected.get(name, part)) for part in parts]
            per_rank.gradient_errors[name] = errors
            compared.observed[name] = parts[errors.index(max(errors))]
        else:
            divisor = ranks.size if step.gradients == "average" and ranks.group is not None else 1
            compared.observed[name] = per_rank.gradient_sums[name] / divisor
    for p in step.model.parameters():
        p.grad = None


def _check_logits_everywhere(ranks: RankView, logits: Tensor | None, reference: Reference) -> None:
    """Refuse logits that only some of the steps return, instead of ignoring them silently."""
    present = ranks.where(logits is not None)
    expected = list(range(1 if ranks.group is None else ranks.size)) if "logits" in reference.result else []
    if present == expected:
        return
    sources = ["the one-device step"] * bool(expected)
    if present:
        sources.insert(0, "the local step" if ranks.group is None else f"ranks {present} of {ranks.size}")
    raise PlanError(
        f"logits were returned by {' and '.join(sources)} only, so they cannot be compared. Return (loss, logits) from"
        f" local and whole, on every rank, or the loss alone from both."
    )


# -- Over simulated ranks ----------------------------------------------------------------------------------------------


def resolve_layouts(names: Sequence[Any], batch: Mapping[str, Any], ranks: int) -> list[Layout]:
    """Return layouts of the batch's sequence, by name or unchanged."""
    if isinstance(names, str | Layout) or not names:
        raise PlanError(f"layouts must be a list of layouts, as {LAYOUT_NAMES}, but got {names!r}.")
    if not all(isinstance(one, Layout) or one in LAYOUT_NAMES for one in names):
        raise PlanError(
            f"layouts must each be one of {', '.join(LAYOUT_NAMES)}, or a layout, as longspan.layouts.balanced(mask,"
            f" world_size=2), but got {names!r}."
        )
    sizes = (("input_ids", -1), ("inputs_embeds", 1), ("labels", -1), ("shift_labels", -1))
    lengths = [int(batch[name].shape[dim]) for name, dim in sizes if isinstance(batch.get(name), Tensor)]
    if not lengths and not all(isinstance(one, Layout) for one in names):
        raise PlanError(
            f"the batch must have input_ids, inputs_embeds or labels to count its tokens, but it has"
            f" {', '.join(batch) or 'nothing'}. Pass layouts for it, as layouts=[longspan.layouts.zigzag(64, 2)]."
        )
    return [one if isinstance(one, Layout) else getattr(layouts, one)(lengths[0], ranks) for one in names]


def prove_step(step: ModelStep, layouts: Sequence[Layout], factor: float) -> Report:
    """See `longspan.verification.prove_model`; `step.local` takes layout and group, too."""
    if step.gradients == "done":
        raise PlanError(
            "gradients must be 'sum' or 'average' here, but got 'done': simulated ranks are one process, and nothing"
            " reduces gradients there."
        )
    if isinstance(step.model, DistributedDataParallel) or any(isinstance(p, DTensor) for p in step.model.parameters()):
        raise PlanError(
            f"prove_model takes a plain module, but {type(step.model).__name__} is wrapped by DDP or sharded. Check the"
            f" model before it is wrapped; verify_model takes it as it is, over its group."
        )
    devices = {p.device.type for p in step.model.parameters()} | {"cpu"}
    has_other_dtypes = any(p.dtype != torch.float64 for p in step.model.parameters())
    # Compiled code runs eagerly: a compiler does not follow ranks in threads.
    with isolate_torch_state(*devices), torch.compiler.set_stance("force_eager"):
        float64_error: Exception | None = None
        for simulated in _simulated_steps(step):
            try:
                results = [(layout, simulated.run(layout)) for layout in layouts]
            except Exception as error:  # the user's code may raise anything
                if not simulated.is_float64 or not has_other_dtypes:
                    raise error from float64_error
                float64_error = error
                continue
            if float64_error is not None:
                line = error_line(float64_error)
                simulated.notes.append(f"local does not run in float64 ({line}); it ran in the model's dtype")
            return simulated.report(results, factor)
    raise AssertionError("the last of the steps returns or raises")


def _simulated_steps(step: ModelStep) -> Iterator[_SimulatedStep]:
    """Yield the step in float64, if one device can run that, and in the model's own precision."""
    _, doubled, note = copy_in_float64(step.model, step.batch, step.run_whole)
    try:
        if not note:
            yield _SimulatedStep(step, copy.deepcopy(step.model).double(), doubled, is_float64=True)
        template = copy.deepcopy(step.model)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise PlanError(
            f"every simulated rank needs a copy of the model, and {type(step.model).__name__} cannot be copied"
            f" ({error_line(error)}). Fix that, or use verify_model over a group."
        ) from error
    yield _SimulatedStep(step, template, step.batch, is_float64=False)


RankResult = tuple[Tensor, Tensor | None]
"""Loss and logits of one rank."""


class _SimulatedStep:
    """The step over simulated ranks in one precision. `template` never runs; see `run_on_ranks`."""

    def __init__(self, step: ModelStep, template: nn.Module, batch: dict[str, Any], *, is_float64: bool) -> None:
        self.step, self.template, self.batch, self.is_float64 = step, template, batch, is_float64
        self.notes: list[str] = []

    def local(self, layout: Layout, model: nn.Module, rank: SimulatedRank) -> RankResult:
        batch = {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.batch.items()}
        return split_result(self.step.local(model, batch, layout, rank))

    def run(self, layout: Layout) -> list[RankResult]:
        """Return every rank's result."""
        try:
            return run_on_ranks(self.template, layout, lambda model, rank: self.local(layout, model, rank))
        except Exception as error:
            error.add_note(f"raised in local(model, batch, layout, group), with {layout} on simulated ranks")
            raise

    def report(self, results: Sequence[tuple[Layout, list[RankResult]]], factor: float) -> Report:
        """Return the worst checks of all layouts, or the findings in the first layout that has any."""
        names = ", ".join(layout.name for layout, _ in results)
        subject = f"{type(self.template).__name__} over {names}"
        size = max(layout.world_size for layout, _ in results)
        worst: dict[str, Check] = {}
        reference: Reference | None = None
        for layout, by_rank in results:
            step = replace(self.step, model=shared_copy(self.template), batch=self.batch, layout=layout)
            if reference is None:
                reference = run_reference(step, factor, unit(torch.float32) if self.is_float64 else None)
                self.notes += [reference.note] if reference.note else []
            compared = self.compare(step, by_rank, reference)
            if isinstance(compared, Finding):
                return Report(subject, size, (), (compared,), tuple(self.notes))
            checks = compared.checks()
            wrong = [check for check in checks if check.ratio > 1]
            if wrong:
                findings = self.explain(compared, wrong)
                return Report(subject, size, tuple(checks), findings, (*self.notes, f"detected with {layout}"))
            for check in checks:
                worst[check.tensor] = max(check, worst.get(check.tensor, check), key=lambda c: c.ratio)
        return Report(subject, size, tuple(worst.values()), (), tuple(self.notes))

    def compare(self, step: ModelStep, by_rank: list[RankResult], reference: Reference) -> Comparison | Finding:
        """Return the ranks' results together, or a finding if logits have another shape."""
        layout, size = step.layout, step.layout.world_size
        logits = {rank: part for rank, (_, part) in enumerate(by_rank) if part is not None}
        if logits and len(logits) < size:
            raise PlanError(
                f"logits were returned by ranks {list(logits)} of {size} only, so they cannot be compared."
                f" Return (loss, logits) on every rank, or the loss alone on all."
            )
        if bool(logits) != ("logits" in reference.result):
            raise PlanError(
                f"logits were returned by {'local' if logits else 'whole'} only, so they cannot be compared. Return"
                f" (loss, logits) from local and whole, or the loss alone from both."
            )
        observed: StepResult = {}
        if logits:
            num_rows, _, vocabulary = reference.result["logits"].shape
            expected = [(num_rows, layout.num_slots(rank), vocabulary) for rank in range(size)]
            wrong = [rank for rank, part in logits.items() if tuple(part.shape) != expected[rank]]
            if wrong:
                text = f"have shape {tuple(logits[wrong[0]].shape)} on rank {wrong[0]}, not {expected[wrong[0]]}"
                return logits_finding(text, wrong)
            observed["logits"] = layout.unshard([comparable(part) for part in logits.values()], TOKEN_DIM)
        total: Any = sum(loss for loss, _ in by_rank)
        grads, missing = gradients(self.template, total if total.requires_grad else None)
        divisor = size if step.gradients == "average" else 1
        sums = {f"gradient of {name}": comparable(grad) / divisor for name, grad in grads.items()}
        nowhere = {f"gradient of {name}": tuple(range(size)) for name in missing}
        per_rank = PerRank([float(loss.detach()) for loss, _ in by_rank], sums, {}, nowhere)
        return Comparison(step, reference, {**observed, **sums}, per_rank, size)

    def explain(self, compared: Comparison, wrong: list[Check]) -> tuple[Finding, ...]:
        """Return findings with their likely causes and the first module that differs."""
        step, layout = compared.step, compared.step.layout
        causes = find_causes(compared, [check.tensor for check in wrong])
        model = shared_copy(self.template)
        rounding = max((unit(p.dtype) for p in self.template.parameters() if p.is_floating_point()), default=0.0)
        module = find_first_different(
            model, self.template, layout, lambda: step.whole(model, self.batch, step.mask),
            lambda model, rank: self.local(layout, model, rank), max(TOLERANCE, 64 * rounding),
        )  # fmt: skip
        text = f"The first module whose output differs is {module}."
        if module is None:
            text = "Every module's output is one device's: the loss makes the difference, or the backward pass."
        findings: list[Finding] = []
        for check in wrong:
            cause = causes[check.tensor]
            if cause.name == UNKNOWN and module is not None:
                cause = Cause(
                    "a module computes something else over ranks", "",
                    "It misses tokens of other ranks, or counts from 0 on each. Give it global positions"
                    " (layout.positions(rank)), and a plan and the group to what looks at several tokens:"
                    " longspan.attention, causal_conv1d, the recurrences. A mean over tokens is a sum over all ranks,"
                    " divided once.",
                )  # fmt: skip
            elif cause.name == UNKNOWN and step.mask is None:
                advice = f"{cause.advice} Pass mask=, too: more mistakes of labels and masks are recognised with it."
                cause = cause._replace(advice=advice.strip())
            finding = compared.finding(check, cause._replace(evidence=f"{cause.evidence} {text}".strip()))
            findings.append(finding if module is None else replace(finding, what=f"{finding.what}, first in {module}"))
        return tuple(findings)


# -- Leaks: tokens that the mask hides ---------------------------------------------------------------------------------


def _check_documents(step: ModelStep, reference: Reference, factor: float) -> tuple[Check | None, Finding | None]:
    """Check that one device keeps documents apart, else it is no reference. (None, None) for a single document."""
    numbers = None if step.mask is None else find_connected(step.mask, step.layout.seq_len)
    packed = read_documents(reference.batch, numbers) if "logits" in reference.result else None
    if packed is None or (step.mask is not None and numbers is None):
        return None, None
    return find_leak(reference.model, packed, lambda m, b: step.whole(m, b, step.mask)[1], factor)


def probe_leaks(
    compared: Comparison, ranks: RankView, count: int, known: list[Finding]
) -> tuple[list[Finding], list[str]]:
    """Change the ids of `count` tokens, one by one, and return a finding if logits change that it cannot reach, and
    notes. A token may reach logits through any number of layers."""
    step, observed = compared.step, compared.observed
    ids = step.batch.get("input_ids")
    if not count or step.mask is None or not isinstance(ids, Tensor) or "logits" not in observed:
        return [], ["no leak probe: it needs mask=, input_ids in the batch, and logits from both steps"] * bool(count)
    reach = _reach(step.mask, step.layout.seq_len)
    # Tokens that reach the fewest rows after them, and before them.
    at = np.arange(len(reach))
    num_hidden = [(~reach & side).sum(0) for side in (at[:, None] > at, at[:, None] < at)]
    positions = list(dict.fromkeys(int(counts.argmax()) for counts in num_hidden if counts.any()))[:count]
    if not positions:
        return [], ["no leak probe: every token reaches every other"]
    notes = [f"leak probe: ids of tokens {', '.join(map(str, positions))} changed"]
    rows = compared.reference.budgets["logits"].rows
    assert rows is not None
    for position in positions:
        batch = {**step.batch, "input_ids": _change_id(ids, position)}
        after = _run_on_group(step, ranks, batch, compared.reference, backward=False)
        if isinstance(after, Finding):
            return [after], notes
        difference = squared_differences(after.observed["logits"], observed["logits"]).sum((0, 2)).sqrt()
        moved = (torch.as_tensor(~reach[:, position]) & ~(difference <= rows / 2)).nonzero().flatten()
        if len(moved):
            finding = _leak_finding(step, position, moved, difference, rows / 2)
            same = next((other for other in known if other.tensor == "logits"), None)
            return [finding if same is None else replace(finding, cause=same.cause, advice=same.advice)], notes
    return [], notes


def _leak_finding(step: ModelStep, position: int, at: Tensor, difference: Tensor, budget: Tensor) -> Finding:
    worst = int(at[difference[at].argmax()])
    evidence = (
        f"The id of token {position} was changed (rank {int(step.layout.owner([position])[0])}), which under the mask"
        f" reaches none of these tokens through any number of layers."
    )
    advice = "Compare the mask that the layers use on the ranks with mask=."
    ids = step.batch["input_ids"]
    with torch.no_grad():
        before, after = (
            comparable(step.whole(step.reference_model, {**step.batch, "input_ids": x}, step.mask)[1][:, worst])
            for x in (ids, _change_id(ids, position))
        )
    if distance(after, before) > 1e-3 * before[before.isfinite()].norm():
        evidence += " The one-device run leaks as well."
        advice = "The one-device step does not use mask=: fix it first."
    ranks = tuple(sorted(set(step.layout.owner(at.numpy()).tolist())))
    return Finding(
        "logits", "leak", float(difference[worst]), float(budget[worst]), ranks, spans_of(at.numpy()), worst,
        "hidden tokens leak", evidence, advice,
    )  # fmt: skip


def _change_id(ids: Tensor, position: int) -> Tensor:
    ids = ids.clone()
    ids[..., position] = other_ids(ids)[..., position]
    return ids


def _reach(mask: Mask, seq_len: int) -> Any:
    """Return (S, S): whether a token's value can reach a row through any number of layers."""
    at = np.arange(seq_len)
    resized = mask.resized(seq_len)
    planes = [(row, head) for row in range(resized.num_rows) for head in range(resized.num_heads)]
    reach = np.any([resized.allows(at[:, None], at[None, :], row=r, head=h) for r, h in planes], axis=0)
    reach = reach | np.eye(seq_len, dtype=bool)
    while True:
        through_two = (reach.astype(np.float32) @ reach.astype(np.float32)) > 0
        if np.array_equal(through_two, reach):
            return reach
        reach = through_two


def find_connected(mask: Mask, seq_len: int) -> Any:
    """Return (1, S): numbers of groups of tokens that do not reach each other, or None if there is one group.

    >>> from longspan.masks import causal, documents
    >>> find_connected(causal() & documents([2, 1]), 3)
    array([[0, 0, 1]])
    >>> find_connected(causal(), 3) is None
    True
    """
    reach = _reach(mask, seq_len)
    connected = reach | reach.T
    first = np.arange(seq_len)
    while True:
        lower = np.where(connected, first, seq_len).min(1)
        if np.array_equal(lower, first):
            break
        first = lower
    numbers = np.unique(first, return_inverse=True)[1].reshape(1, seq_len)
    return numbers if numbers.any() else None
