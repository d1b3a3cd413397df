"""Run a training step on one device, measure the effect of rounding on it, and compare the result of ranks with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.verification.prover import (
    copy_in_float64,
    gradients,
    perturb_gradients,
    perturb_parameters,
)
from longspan.verification.reference import (
    Budget,
    budgets,
    comparable,
    compare_tensor,
    distance,
    unit,
)
from longspan.verification.report import Check, Finding, spans_of

TOKEN_DIM = 1
"""The token dimension of logits."""
MIN_PARAMETER_ROUNDINGS, MIN_FLOAT32_ROUNDINGS = 2, 8
"""Budgets are at least this many roundings of parameters, and of float32, relative to the whole tensor's norm: a loss
is one number, and its samples may be lucky."""
CANCELLATION = 8.0
"""Factor on budgets of gradients that are 0 but for rounding, such as that of a key's bias."""
StepResult = dict[str, Tensor]
"""loss, logits, and "gradient of NAME" for every parameter, in float64 on the CPU."""


@dataclass(frozen=True, eq=False)
class ModelStep:
    """The user's step, on the ranks and on one device; see `longspan.verification.verify_model`."""

    model: nn.Module
    batch: dict[str, Any]
    local: Callable[..., Any]
    whole: Callable[..., Any]
    layout: Layout
    mask: Mask | None
    gradients: str
    loss: str
    reference: nn.Module | None
    causes: dict[str, Callable[..., Any]]

    def __post_init__(self) -> None:
        if self.gradients not in ("sum", "average", "done"):
            raise PlanError(
                f"gradients must be 'sum' (added up over the group after backward), 'average' (as DDP does) or 'done'"
                f" (reduced already, as by FSDP), but got {self.gradients!r}."
            )
        if self.loss not in ("same", "share"):
            raise PlanError(
                f"loss must be 'same' (every rank reports the loss of the whole batch) or 'share' (its share of it),"
                f" but got {self.loss!r}."
            )

    @property
    def reference_model(self) -> nn.Module:
        """The model for the run on one device."""
        return self.model if self.reference is None else self.reference

    def run_whole(self, model: nn.Module, batch: dict[str, Any], call: Any = None, mask: Any = None) -> StepResult:
        """Return the result of `whole`, or of another call or mask, on one device."""
        loss, logits = split_result((call or self.whole)(model, batch, self.mask if mask is None else mask))
        if not loss.requires_grad and any(p.requires_grad for p in model.parameters()):
            raise PlanError(
                "the loss of the one-device step must require gradients, but it has no graph. Leave no_grad() and"
                " detach() out of the step."
            )
        grads, _ = gradients(model, loss)
        result = {"loss": loss.detach().double().cpu()}
        if logits is not None:
            result["logits"] = comparable(logits)
        return result | {f"gradient of {name}": comparable(grad) for name, grad in grads.items()}


def split_result(result: Any) -> tuple[Tensor, Tensor | None]:
    """Return the loss and the logits, if there are any, of a step's result."""
    pair: tuple[Any, Any] = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    loss, logits = pair
    for name, value, is_valid in (
        ("the logits", logits, logits is None or isinstance(logits, Tensor)),
        ("the loss", loss, isinstance(loss, Tensor) and loss.numel() == 1),
    ):
        if not is_valid:
            raise PlanError(
                f"a step must return the loss, or (loss, logits), but got {type(value).__name__} as {name}."
            )
    return loss.reshape(()), logits


# -- The step on one device --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reference:
    """The step on one device, its budgets, and the model that ran (float64 where that works)."""

    model: nn.Module
    batch: dict[str, Any]
    result: StepResult
    budgets: dict[str, Budget]
    note: str


def run_reference(step: ModelStep, factor: float, rounding: float | None = None) -> Reference:
    """Run the step on one device and measure the effect of rounding: of the parameters' dtype unless passed."""
    first, second = (step.run_whole(step.reference_model, step.batch) for _ in range(2))
    logits = first.get("logits")
    if logits is not None and (logits.ndim != 3 or logits.shape[TOKEN_DIM] != step.layout.seq_len):
        raise PlanError(
            f"the one-device step returned logits of shape {tuple(logits.shape)}, but they are compared token by token:"
            f" (batch, {step.layout.seq_len} tokens, vocabulary). Return them so, or the loss alone from both steps."
        )
    if rounding is None:
        dtypes = [p.dtype for p in step.reference_model.parameters() if p.is_floating_point() or p.is_complex()]
        rounding = max(map(unit, dtypes), default=unit(torch.float32))
    changed = [
        name
        for name, value in first.items()
        if not distance(second[name], value) <= 64 * rounding * value[value.isfinite()].norm() + 1e-30
    ]
    if changed:
        raise PlanError(
            f"the one-device step gives other numbers when it runs again ({', '.join(changed[:3])}), so nothing can be"
            f" compared with it. Turn dropout off (model.eval(), or p = 0), or fix the seed inside the step."
        )
    model, batch, note = copy_in_float64(step.reference_model, step.batch, step.run_whole)
    result = first if note else step.run_whole(model, batch)
    samples = [first]
    with torch.compiler.set_stance("force_eager"):  # compiled code does not run hooks
        for seed in range(2):
            with perturb_parameters(model, rounding, seed), perturb_gradients(model, rounding, seed):
                samples.append(step.run_whole(model, batch))
    narrow = torch.float64 if rounding < 1e-12 else torch.float32
    floor = max(MIN_PARAMETER_ROUNDINGS * rounding, MIN_FLOAT32_ROUNDINGS * unit(narrow))
    limits = budgets(result, samples, TOKEN_DIM, floor, factor)
    infinite = [name for name, limit in limits.items() if not math.isfinite(limit.total)]
    if infinite:
        raise PlanError(
            f"rounding alone turns numbers of the one-device step into infinite ones, or into nan"
            f" ({', '.join(infinite[:3])}), so nothing can be compared. Use a dtype with a larger range, or scale the"
            f" loss down."
        )
    for name, limit in limits.items():
        if name != "logits":
            # A gradient within its own budget is 0 by cancellation, which attention, too, rounds inside.
            is_cancelled = float(result[name].norm()) < limit.total
            limits[name] = Budget(limit.total * (CANCELLATION if is_cancelled else 1.0), None)
    return Reference(model, batch, result, limits, note)


# -- Comparing ---------------------------------------------------------------------------------------------------------


class Cause(NamedTuple):
    """A likely cause, as a `Finding` has it."""

    name: str
    evidence: str
    advice: str


@dataclass(frozen=True, eq=False)
class PerRank:
    """Values that differ between ranks: their losses, and their gradients before verify reduced them."""

    losses: list[float]
    gradient_sums: StepResult = field(default_factory=dict)
    """Gradients, added up over the ranks."""
    gradient_errors: dict[str, list[float]] = field(default_factory=dict)
    """How far each rank's own gradients are off, where they should be reduced already."""
    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Gradients that are None, and on which ranks."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The step over ranks against one device."""

    step: ModelStep
    reference: Reference
    observed: StepResult
    """Reduced as the step says; gradients that are reduced already are those of the rank that is farthest off."""
    per_rank: PerRank
    size: int
    """The number of ranks."""

    def checks(self) -> list[Check]:
        """Return all comparisons."""
        expected = float(self.reference.result["loss"])
        losses = self.per_rank.losses if self.step.loss == "same" else [math.fsum(self.per_rank.losses)]
        error = max(abs(loss - expected) if math.isfinite(loss) else math.inf for loss in losses)
        checks = [Check("loss", error, self.reference.budgets["loss"].total)]
        return checks + [self.compare(name)[0] for name in self.observed if name in self.reference.result]

    def compare(self, name: str) -> tuple[Check, Tensor | None]:
        """Compare one tensor; see `compare_tensor`."""
        reference = self.reference
        return compare_tensor(self.observed[name], reference.result[name], reference.budgets[name], name, TOKEN_DIM)

    def finding(self, check: Check, cause: Cause) -> Finding:
        """Return the finding for a comparison beyond its budget, with ranks and positions."""
        finding = Finding(check.tensor, check.verdict, check.error, check.budget, (), (), None, *cause)
        if check.tensor == "logits":
            ratio = self.compare("logits")[1]
            assert ratio is not None
            at = (ratio > min(1.0, float(ratio.max()) / 2)).nonzero().flatten().numpy()
            return replace(finding, ranks=self._owners(at), spans=spans_of(at), worst=int(ratio.argmax()))
        errors = self.per_rank.gradient_errors.get(check.tensor, [])
        if check.tensor == "loss" and self.step.loss == "same":
            errors = [abs(loss - float(self.reference.result["loss"])) for loss in self.per_rank.losses]
        return replace(finding, ranks=tuple(rank for rank, error in enumerate(errors) if not error <= check.budget))

    def _owners(self, positions: Any) -> tuple[int, ...]:
        return tuple(sorted(set(self.step.layout.owner(positions).tolist())))


def logits_finding(text: str, ranks: list[int]) -> Finding:
    """Return the finding for logits of another shape on these ranks."""
    return Finding(
        "logits", text, math.inf, 0.0, tuple(ranks), (), None, "logits of another shape", "No number was compared.",
        "Return the logits of this rank's tokens, (batch, local tokens, vocabulary).",
    )  # fmt: skip
