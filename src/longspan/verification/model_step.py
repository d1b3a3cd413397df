"""A user's training step: run it on one device with budgets for rounding, and on every rank of a group."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.verification.prover import gradients, jittered
from longspan.verification.ranks import RankView
from longspan.verification.reference import Budget, budgets, unit
from longspan.verification.report import Finding

TOKENS = 1
"""The token dimension of logits."""
SMALLEST = 2, 8
"""Budgets are at least this many roundings of parameters, and of float32, relative to the whole tensor's norm: a loss
is one number, and its samples may be lucky."""
Result = dict[str, Tensor]
"""loss, logits, and "gradient of NAME" for every parameter."""


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
    def one_device(self) -> nn.Module:
        """The model for the run on one device."""
        return self.model if self.reference is None else self.reference

    def run_whole(self, model: nn.Module, batch: dict[str, Any], call: Any = None, mask: Any = None) -> Result:
        """Return loss, logits and gradients of `whole`, or of another call or mask, on one device."""
        loss, logits = split_result((call or self.whole)(model, batch, self.mask if mask is None else mask))
        grads, _ = gradients(model, loss)
        result: Result = {"loss": loss.detach().double().cpu()}
        if logits is not None:
            result["logits"] = logits.detach().double().cpu()
        return result | {f"gradient of {name}": grad.double().cpu() for name, grad in grads.items()}


def split_result(result: Any) -> tuple[Tensor, Tensor | None]:
    """Return the loss and the logits, if there are any, of a step's result."""
    pair: tuple[Any, Any] = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    loss, logits = pair
    for name, value, is_right in (
        ("the logits", logits, logits is None or isinstance(logits, Tensor)),
        ("the loss", loss, isinstance(loss, Tensor) and loss.numel() == 1),
    ):
        if not is_right:
            raise PlanError(
                f"a step must return the loss, or (loss, logits), but got {type(value).__name__} as {name}."
            )
    return loss.reshape(()), logits


# -- On one device -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Truth:
    """The one-device run, its budgets, and the model it ran on (float64 where that worked)."""

    model: nn.Module
    batch: dict[str, Any]
    result: Result
    budgets: dict[str, Budget]
    note: str


def compute_truth(step: ModelStep, factor: float, rounding: float | None = None) -> Truth:
    """Run the step on one device and measure the effect of rounding: of the parameters' dtype unless passed."""
    own, again = (step.run_whole(step.one_device, step.batch) for _ in range(2))
    logits = own.get("logits")
    if logits is not None and (logits.ndim != 3 or logits.shape[TOKENS] != step.layout.seq_len):
        raise PlanError(
            f"the one-device step returned logits of shape {tuple(logits.shape)}, but they are compared token by token:"
            f" (batch, {step.layout.seq_len} tokens, vocabulary). Return them so, or the loss alone from both steps."
        )
    if rounding is None:
        floats = [p.dtype for p in step.one_device.parameters() if p.is_floating_point()]
        rounding = max((unit(dtype) for dtype in floats), default=unit(torch.float32))
    moved = [n for n in own if not (own[n] - again[n]).norm() <= 64 * rounding * own[n].norm() + 1e-30]
    if moved:
        raise PlanError(
            f"the one-device step gives other numbers when it runs again ({', '.join(moved[:3])}), so nothing can be"
            f" compared with it. Turn dropout off (model.eval(), or p = 0), or fix the seed inside the step."
        )
    model, batch, note = copy_in_float64(step.one_device, step.batch, step.run_whole)
    result = own if note else step.run_whole(model, batch)
    played = [own]
    for seed in range(2):
        with jittered(model, rounding, seed):
            played.append(step.run_whole(model, batch))
    floor = max(SMALLEST[0] * rounding, SMALLEST[1] * unit(torch.float64 if rounding < 1e-12 else torch.float32))
    limits = budgets(result, played, TOKENS, floor, factor)
    limits = {name: limit if name == "logits" else Budget(limit.total, None) for name, limit in limits.items()}
    return Truth(model, batch, result, limits, note)


def copy_in_float64(
    model: nn.Module, batch: dict[str, Any], run: Callable[[nn.Module, dict[str, Any]], Any]
) -> tuple[nn.Module, dict[str, Any], str]:
    """Return a float64 copy of model and batch if it can be created and run; else both unchanged, and a note."""
    try:
        copied = copy.deepcopy(model).double()
        doubled = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in batch.items()
        }
        run(copied, doubled)
    except Exception as error:  # the model's own code may raise anything
        return model, batch, f"no float64 run ({error_line(error)}); the truth is in the model's dtype"
    return copied, doubled, ""


def error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


# -- On the ranks of a group -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Each:
    """Values that differ between ranks: their losses, and their gradients before verify reduced them."""

    losses: list[float]
    total: Result = field(default_factory=dict)
    """Gradients, added up over the ranks."""
    errors: dict[str, list[float]] = field(default_factory=dict)
    """How far each rank's own gradients are off, where they should be reduced already."""
    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)


def run_local(
    step: ModelStep, ranks: RankView, batch: dict[str, Any], truth: Truth, *, backward: bool = True
) -> tuple[Any, Each]:
    """Return the result of all ranks, reduced as the step says, or a Finding if logits have another shape.

    Gradients that are reduced already are those of the rank that is farthest off.
    """
    for p in step.model.parameters():
        p.grad = None
    loss, logits = split_result(step.local(step.model, batch))
    if backward:
        loss.backward()
    each = Each([float(part) for part in ranks.each(loss.detach().double().reshape(1))])
    result: Result = {}
    _check_logits(ranks, logits, truth)
    if logits is not None:
        right = truth.result["logits"]
        wrong = ranks.any(tuple(logits.shape) != (right.shape[0], ranks.num_slots(ranks.rank), right.shape[2]))
        if wrong:
            expected = f"(batch {right.shape[0]}, local tokens, vocabulary {right.shape[2]})"
            return wrong_logits(f"do not have {expected} on ranks {wrong}", wrong), each
        result["logits"] = ranks.gather(logits, TOKENS).double().cpu()
    if not backward:
        return result, each
    grads = {f"gradient of {n}": (p, p.grad) for n, p in step.model.named_parameters() if p.requires_grad}
    each.missing.update(ranks.missing({name: grad for name, (_, grad) in grads.items()}))
    for name, (parameter, grad) in grads.items():
        grad = torch.zeros_like(parameter) if grad is None else grad
        grad = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().double().cpu()
        each.total[name] = ranks.sum(grad)
        if step.gradients == "done":
            parts = ranks.each(grad)
            each.errors[name] = [_distance(part, truth.result.get(name, part)) for part in parts]
            result[name] = parts[max(range(len(parts)), key=each.errors[name].__getitem__)]
        else:
            size = ranks.size if step.gradients == "average" and ranks.group is not None else 1
            result[name] = each.total[name] / size
    for p in step.model.parameters():
        p.grad = None
    return result, each


def _distance(observed: Tensor, right: Tensor) -> float:
    error = float((observed - right).norm()) if observed.shape == right.shape else math.inf
    return error if math.isfinite(error) else math.inf


def _check_logits(ranks: RankView, logits: Tensor | None, truth: Truth) -> None:
    """Refuse logits that only some of the steps return, instead of ignoring them silently."""
    have = ranks.any(logits is not None)
    wanted = list(range(1 if ranks.group is None else ranks.size)) if "logits" in truth.result else []
    if have == wanted:
        return
    local = f"ranks {have} of {ranks.size}" if have and ranks.group is not None else "the local step" if have else ""
    one = "the one-device step" if wanted else ""
    raise PlanError(
        f"logits were returned by {' and '.join(filter(None, (local, one)))} only, so they cannot be compared. Return"
        f" (loss, logits) from local and whole, on every rank, or the loss alone from both."
    )


def wrong_logits(text: str, ranks: list[int]) -> Finding:
    return Finding(
        "logits", text, math.inf, 0.0, tuple(ranks), (), None, "logits of another shape", "No number was compared.",
        "Return the logits of this rank's tokens, (batch, local tokens, vocabulary).",
    )  # fmt: skip
