"""A whole training step over the ranks against one device: loss, logits, and the gradient of every parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.errors import PlanError
from longspan.testing.modules import jittered
from longspan.training.agree import DifferentBatchesError, check_same
from longspan.verification.budgets import Budget, budgets, compared, unit
from longspan.verification.model.causes import explain
from longspan.verification.model.documents import CAUSE, leak_between, packed
from longspan.verification.model.leaks import apart, probe
from longspan.verification.model.step import (
    TOKENS,
    Each,
    ModelStep,
    Result,
    Truth,
    copy_in_float64,
    run_local,
    run_whole,
)  # fmt: skip
from longspan.verification.ranks import RankView, elsewhere, same_data
from longspan.verification.report import Check, Finding, Report, spans_of

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


# -- one device --------------------------------------------------------------------------------------------------------


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


# -- comparison --------------------------------------------------------------------------------------------------------


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
