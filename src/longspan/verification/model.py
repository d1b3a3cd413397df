"""Compare a training step over ranks with one device: loss, logits, and the gradient of every parameter.

`verify_step` runs it over the ranks of a process group; `prove_step` over simulated ranks in this process, with
`longspan.verification.prover`, and names the first module that differs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan import layouts
from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.run.simulated import SimulatedRank
from longspan.training.groups import DifferentBatchesError, check_same
from longspan.verification.documents import CAUSE, find_leak, read_documents
from longspan.verification.model_causes import explain, find_connected, probe_leaks
from longspan.verification.model_step import (
    TOKENS,
    Each,
    ModelStep,
    Result,
    Truth,
    compute_truth,
    copy_in_float64,
    error_line,
    run_local,
    split_result,
    wrong_logits,
)
from longspan.verification.prover import TOLERANCE, find_first_different, gradients, isolated, run_on_ranks, shared_copy
from longspan.verification.ranks import RankView, find_different_data, with_failures_elsewhere
from longspan.verification.reference import compare_tensor, unit
from longspan.verification.report import UNKNOWN, Check, Finding, Report, spans_of

# -- Over a process group ----------------------------------------------------------------------------------------------


def verify_step(step: ModelStep, group: Any, probes: int, factor: float) -> Report:
    """See `longspan.verification.verify_model`."""
    ranks = RankView.of(step.layout, group)
    subject = f"{type(step.model).__name__} over {step.layout!r}"
    different = _find_different(step, ranks)
    if different is not None:
        return Report(subject, ranks.size, (), (different,))
    _check_names(step)
    truth = compute_truth(step, factor)
    saved = [(p, p.grad) for p in step.model.parameters()]
    try:
        observed, each = run_local(step, ranks, step.batch, truth)
        if isinstance(observed, Finding):
            return Report(subject, ranks.size, (), (observed,))
        checks, wrong = compare(truth, observed, each, step)
        check, leak = _check_documents(step, truth) if probes else (None, None)
        causes = dict.fromkeys([c.tensor for c in wrong], (CAUSE, "", ""))
        if wrong and leak is None:
            causes = explain(step, truth, ranks.size, observed, each, list(causes))
        findings = [make_finding(c, truth, observed, each, step, causes[c.tensor]) for c in wrong]
        leaking, notes = probe_leaks(step, truth, ranks, observed, probes, findings)
    finally:
        for p, grad in saved:
            p.grad = grad
    checks += [] if check is None else [check]
    findings = with_failures_elsewhere([*([] if leak is None else [leak]), *findings, *leaking], ranks)
    return Report(subject, ranks.size, tuple(checks), findings, (*([truth.note] if truth.note else []), *notes))


def _check_documents(step: ModelStep, truth: Truth) -> tuple[Check | None, Finding | None]:
    """Check that one device keeps documents apart, else it is no reference. (None, None) for a single document."""
    numbers = None if step.mask is None else find_connected(step.mask, step.layout.seq_len)
    packed = read_documents(truth.batch, numbers) if "logits" in truth.result else None
    if packed is None or (step.mask is not None and numbers is None):
        return None, None
    return find_leak(truth.model, packed, lambda m, b: step.whole(m, b, step.mask)[1])


def _find_different(step: ModelStep, ranks: RankView) -> Finding | None:
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


def _check_names(step: ModelStep) -> None:
    """Refuse a reference whose parameters have other names or shapes: their gradients could not be compared."""
    mine, right = (
        {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
        for model in (step.model, step.one_device)
    )
    other = [name for name in (*mine, *(n for n in right if n not in mine)) if mine.get(name) != right.get(name)]
    if not other:
        return
    pairs = [
        f"{name} is {mine.get(name, 'missing')} in the model and {right.get(name, 'missing')} in reference="
        for name in other[:3]
    ]
    raise PlanError(
        f"parameters with requires_grad differ in {len(other)} names or shapes, so their gradients cannot be"
        f" compared: {'; '.join(pairs)}. Pass a reference= with equal names, shapes and requires_grad: unwrap the model"
        f" (as model.module of DDP, model._orig_mod of torch.compile), or wrap the reference in the same way."
    )


# -- Comparing tensors -------------------------------------------------------------------------------------------------


def compare(truth: Truth, observed: Result, each: Each, step: ModelStep) -> tuple[list[Check], list[Check]]:
    """Return all comparisons, and those beyond their budgets."""
    right = float(truth.result["loss"])
    values = each.losses if step.loss == "same" else [math.fsum(each.losses)]
    error = max((abs(value - right) if math.isfinite(value) else math.inf for value in values), default=0.0)
    checks = [Check("loss", error, truth.budgets["loss"].total)]
    for name, tensor in observed.items():
        if name in truth.result:
            checks.append(compare_tensor(tensor, truth.result[name], truth.budgets[name], name, TOKENS)[0])
    return checks, [check for check in checks if check.ratio > 1]


def make_finding(
    check: Check, truth: Truth, observed: Result, each: Each, step: ModelStep, cause: tuple[str, str, str]
) -> Finding:
    """Return the finding for a comparison beyond its budget, with ranks and positions."""
    finding = Finding(check.tensor, check.verdict, check.error, check.budget, (), (), None, *cause)
    if check.tensor == "logits":
        ratio = compare_tensor(observed["logits"], truth.result["logits"], truth.budgets["logits"], "logits", TOKENS)[1]
        assert ratio is not None
        at = (ratio > min(1.0, float(ratio.max()) / 2)).nonzero().flatten().numpy()
        ranks = tuple(sorted(set(step.layout.owner(at).tolist())))
        return replace(finding, ranks=ranks, spans=spans_of(at), worst=int(ratio.argmax()))
    errors = each.errors.get(check.tensor, [])
    if check.tensor == "loss" and step.loss == "same":
        errors = [abs(loss - float(truth.result["loss"])) for loss in each.losses]
    return replace(finding, ranks=tuple(r for r, error in enumerate(errors) if not error <= check.budget))


# -- Over simulated ranks ----------------------------------------------------------------------------------------------


NAMES = ("zigzag", "contiguous", "striped")
MODULE = "a module computes something else over ranks"
MODULE_ADVICE = (
    "It misses tokens of other ranks, or counts from 0 on each. Give it global positions (layout.positions(rank)), and"
    " a plan and the group to what looks at several tokens: longspan.attention, causal_conv1d, the recurrences. A mean"
    " over tokens is a sum over all ranks, divided once."
)
MASK_ADVICE = "Pass mask=, too: more mistakes of labels and masks are recognised with it."
AFTERWARDS = "Every module's output is one device's: the loss makes the difference, or the backward pass."
RankResult = tuple[Tensor, Tensor | None]


def resolve_layouts(names: Sequence[Any], batch: Mapping[str, Any], ranks: int) -> list[Layout]:
    """Return layouts of the batch's sequence, by name or unchanged."""
    if isinstance(names, str | Layout) or not names:
        raise PlanError(f"layouts must be a list of layouts, as {NAMES}, but got {names!r}.")
    if not all(isinstance(one, Layout) or one in NAMES for one in names):
        raise PlanError(
            f"layouts must each be one of {', '.join(NAMES)}, or a layout, as longspan.layouts.balanced(mask,"
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


def prove_step(step: ModelStep, wanted: Sequence[Layout], factor: float) -> Report:
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
    is_float64 = all(p.dtype == torch.float64 for p in step.model.parameters())
    # Compiled code runs eagerly: a compiler does not follow ranks in threads.
    with isolated(*devices), torch.compiler.set_stance("force_eager"):
        before: Exception | None = None
        for attempt in _attempts(step):
            try:
                results = [(layout, attempt.run(layout)) for layout in wanted]
            except Exception as error:  # the user's code may raise anything
                if not attempt.is_wide or is_float64:
                    raise error from before
                before = error
                continue
            if before is not None:
                attempt.notes.append(
                    f"local does not run in float64 ({error_line(before)}); it ran in the model's dtype"
                )
            return attempt.judge(results, factor)
    raise AssertionError("the last attempt returns or raises")


def _attempts(step: ModelStep) -> Iterator[_Attempt]:
    """Yield the step in float64, if one device can run that, and in the model's own precision."""
    _, doubled, note = copy_in_float64(step.model, step.batch, step.run_whole)
    try:
        if not note:
            yield _Attempt(step, copy.deepcopy(step.model).double(), doubled, is_wide=True)
        template = copy.deepcopy(step.model)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise PlanError(
            f"every simulated rank needs a copy of the model, and {type(step.model).__name__} cannot be copied"
            f" ({error_line(error)}). Fix that, or use verify_model over a group."
        ) from error
    yield _Attempt(step, template, step.batch, is_wide=False)


class _Attempt:
    """The step in one precision, float64 if `is_wide`. `template` never runs; see `run_on_ranks`."""

    def __init__(self, step: ModelStep, template: nn.Module, batch: dict[str, Any], *, is_wide: bool) -> None:
        self.step, self.template, self.batch, self.is_wide = step, template, batch, is_wide
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

    def join(self, results: list[RankResult], layout: Layout) -> tuple[Any, Each]:
        """Return the ranks' results together, or a Finding if logits have another shape."""
        each = Each([float(loss.detach()) for loss, _ in results])
        logits = {rank: part for rank, (_, part) in enumerate(results) if part is not None}
        if logits and len(logits) < len(results):
            raise PlanError(
                f"logits were returned by ranks {list(logits)} of {len(results)} only, so they cannot be compared."
                f" Return (loss, logits) on every rank, or the loss alone on all."
            )
        wrong = [r for r, part in logits.items() if part.ndim != 3 or part.shape[TOKENS] != layout.num_slots(r)]
        if wrong:
            shape, slots = tuple(logits[wrong[0]].shape), layout.num_slots(wrong[0])
            return wrong_logits(f"have shape {shape} on rank {wrong[0]}, which holds {slots} tokens", wrong), each
        observed: Result = {}
        if logits:
            observed["logits"] = layout.unshard([part.detach().double().cpu() for part in logits.values()], TOKENS)
        total: Any = sum(loss for loss, _ in results)
        grads, missing = gradients(self.template, total if total.requires_grad else None)
        parts = layout.world_size if self.step.gradients == "average" else 1
        each.total.update({f"gradient of {name}": grad.double().cpu() / parts for name, grad in grads.items()})
        each.missing.update({f"gradient of {name}": tuple(range(layout.world_size)) for name in missing})
        return {**observed, **each.total}, each

    def judge(self, results: Sequence[tuple[Layout, list[RankResult]]], factor: float) -> Report:
        """Return the worst checks of all layouts, or the findings in the first layout that has any."""
        names = ", ".join(layout.name for layout, _ in results)
        subject = f"{type(self.template).__name__} over {names}"
        size = max(layout.world_size for layout, _ in results)
        worst: dict[str, Check] = {}
        truth: Truth | None = None
        for layout, returned in results:
            observed, each = self.join(returned, layout)
            if isinstance(observed, Finding):
                return Report(subject, size, (), (observed,), tuple(self.notes))
            step = replace(self.step, model=shared_copy(self.template), batch=self.batch, layout=layout)
            if truth is None:
                truth = compute_truth(step, factor, unit(torch.float32) if self.is_wide else None)
                if ("logits" in observed) != ("logits" in truth.result):
                    raise PlanError(
                        f"logits were returned by {'local' if 'logits' in observed else 'whole'} only, so they cannot"
                        f" be compared. Return (loss, logits) from local and whole, or the loss alone from both."
                    )
                self.notes += [truth.note] if truth.note else []
            checks, wrong = compare(truth, observed, each, step)
            if wrong:
                findings = self.explain(step, truth, observed, each, wrong)
                return Report(subject, size, tuple(checks), findings, (*self.notes, f"detected with {layout}"))
            for check in checks:
                worst[check.tensor] = max(check, worst.get(check.tensor, check), key=lambda c: c.ratio)
        return Report(subject, size, tuple(worst.values()), (), tuple(self.notes))

    def explain(
        self, step: ModelStep, truth: Truth, observed: Result, each: Each, wrong: list[Check]
    ) -> tuple[Finding, ...]:
        """Return findings with their likely causes and the first module that differs."""
        layout = step.layout
        causes = explain(step, truth, layout.world_size, observed, each, [check.tensor for check in wrong])
        fresh = shared_copy(self.template)
        narrow = max((unit(p.dtype) for p in self.template.parameters() if p.is_floating_point()), default=0.0)
        module = find_first_different(
            fresh, self.template, layout, lambda: step.whole(fresh, self.batch, step.mask),
            lambda model, rank: self.local(layout, model, rank), max(TOLERANCE, 64 * narrow),
        )  # fmt: skip
        text = AFTERWARDS if module is None else f"The first module whose output differs is {module}."
        findings: list[Finding] = []
        for check in wrong:
            cause, evidence, advice = causes[check.tensor]
            if cause == UNKNOWN and module is not None:
                cause, evidence, advice = MODULE, "", MODULE_ADVICE
            elif cause == UNKNOWN and step.mask is None:
                advice = f"{advice} {MASK_ADVICE}".strip()
            finding = make_finding(check, truth, observed, each, step, (cause, f"{evidence} {text}".strip(), advice))
            findings.append(finding if module is None else replace(finding, what=f"{finding.what}, first in {module}"))
        return tuple(findings)
