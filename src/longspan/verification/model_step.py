"""The user's training step: how to run it whole on one device and local on every rank, and known loss mistakes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.verification.ranks import RankView
from longspan.verification.reference import Budget, Places
from longspan.verification.report import Finding

TOKENS = 1
"""The dim of logits that counts tokens."""
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
                f"gradients = {self.gradients!r} was asked for. Say what happens to gradients after backward: 'sum'"
                f" (added up over the group), 'average' (as DDP does), 'done' (reduced already, as by FSDP)."
            )
        if self.loss not in ("same", "share"):
            raise PlanError(
                f"loss = {self.loss!r} was asked for. Every rank reports the 'same' loss of the whole batch, or its"
                f" 'share' of it."
            )

    @property
    def one_device(self) -> nn.Module:
        """The model for the run on one device."""
        return self.model if self.reference is None else self.reference


@dataclass(frozen=True, eq=False)
class Truth:
    """The one-device run, its budgets, and the model it ran on (float64 where that worked)."""

    model: nn.Module
    batch: dict[str, Any]
    result: Result
    budgets: dict[str, Budget]
    note: str


def copy_in_float64(
    model: nn.Module, batch: dict[str, Any], run: Callable[[nn.Module, dict[str, Any]], Any]
) -> tuple[nn.Module, dict[str, Any], str]:
    """A float64 copy of the model and of the batch's numbers, if that can be made and run; else both as they are, and a
    note."""
    try:
        copied = copy.deepcopy(model).double()
        doubled = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in batch.items()
        }
        run(copied, doubled)
    except Exception as error:  # whatever the model's own code raises
        text = str(error).splitlines()[0][:120] if str(error) else ""
        return model, batch, f"no float64 run ({type(error).__name__}: {text}); the truth is in the model's dtype"
    return copied, doubled, ""


def run_whole(
    call: Callable[..., Any], model: nn.Module, batch: dict[str, Any], mask: Any, *, graph: bool = False
) -> Result:
    """Loss, logits and gradients of one device; with `graph`, logits keep theirs."""
    loss, logits = split_result(call(model, batch, mask))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=graph)
    result: Result = {"loss": loss.detach().double().cpu()}
    if logits is not None:
        result["logits"] = logits if graph else logits.detach().double().cpu()
    for (name, parameter), grad in zip(named.items(), grads, strict=True):
        result[f"gradient of {name}"] = (torch.zeros_like(parameter) if grad is None else grad).detach().double().cpu()
    return result


def split_result(result: Any) -> tuple[Tensor, Tensor | None]:
    """The loss and the logits, if there are any, of what a step returned."""
    loss, logits = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if logits is not None and not isinstance(logits, Tensor):
        raise PlanError(
            f"a step returns the loss, or (loss, logits), but {type(logits).__name__} was returned in place of logits."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise PlanError(
            f"a step returns the loss, or (loss, logits), but {type(loss).__name__} was returned in place of the loss."
        )
    return loss.reshape(()), logits


@dataclass(frozen=True, eq=False)
class Each:
    """What differs between ranks: their losses, and their gradients before verify reduced them."""

    losses: list[float]
    total: Result
    """Gradients, added up over the ranks."""
    errors: dict[str, list[float]]
    """How far each rank's own gradients are off, where they should be reduced already."""
    missing: dict[str, tuple[int, ...]]


def run_local(
    step: ModelStep, ranks: RankView, batch: dict[str, Any], truth: Truth, *, backward: bool = True
) -> tuple[Any, Each]:
    """What the ranks gave together, reduced as the step says; a Finding in place of results that have another shape.

    Gradients that are reduced already are those of the rank that is farthest off.
    """
    for p in step.model.parameters():
        p.grad = None
    loss, logits = split_result(step.local(step.model, batch))
    if backward:
        loss.backward()
    losses = [float(part) for part in ranks.each(loss.detach().double().reshape(1))]
    result: Result = {}
    _check_logits(ranks, logits, truth)
    if logits is not None:
        problem = _logits_problem(ranks, logits, truth.result["logits"])
        if problem is not None:
            return problem, Each(losses, {}, {}, {})
        result["logits"] = ranks.gathered(logits, TOKENS).double().cpu()
    if not backward:
        return result, Each(losses, {}, {}, {})
    mine, total, missing = _gradients(step, ranks)
    errors: dict[str, list[float]] = {}
    for name, grad in mine.items():
        if step.gradients == "done":
            parts = ranks.each(grad)
            errors[name] = [_far(part, truth.result.get(name, part)) for part in parts]
            result[name] = parts[max(range(len(parts)), key=errors[name].__getitem__)]
        else:
            size = ranks.size if step.gradients == "average" and ranks.group is not None else 1
            result[name] = total[name] / size
    for p in step.model.parameters():
        p.grad = None
    return result, Each(losses, total, errors, missing)


def _far(found: Tensor, right: Tensor) -> float:
    error = float((found - right).norm()) if found.shape == right.shape else math.inf
    return error if math.isfinite(error) else math.inf


def _gradients(step: ModelStep, ranks: RankView) -> tuple[Result, Result, dict[str, tuple[int, ...]]]:
    """This rank's gradients, their sums over the group, and which ranks have none."""
    named = {n: p for n, p in step.model.named_parameters() if p.requires_grad}
    mine = {f"gradient of {n}": _plain(p.grad, p) for n, p in named.items()}
    rows = ranks.numbers([int(p.grad is None) for p in named.values()])
    missing = {
        name: tuple(r for r, row in enumerate(rows) if row[i])
        for i, name in enumerate(mine)
        if any(row[i] for row in rows)
    }
    return mine, {name: ranks.summed(grad) for name, grad in mine.items()}, missing


def _plain(grad: Tensor | None, parameter: Tensor) -> Tensor:
    if grad is None:
        grad = torch.zeros_like(parameter)
    if isinstance(grad, DTensor):
        grad = grad.full_tensor()
    return grad.detach().double().cpu()


def _check_logits(ranks: RankView, logits: Tensor | None, truth: Truth) -> None:
    """Refuses logits that only some of the steps return: they would be left out without a word."""
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


def _logits_problem(ranks: RankView, logits: Tensor, right: Tensor) -> Finding | None:
    wanted = right.shape[0], ranks.slots_of(ranks.rank), right.shape[2]
    wrong = ranks.any(tuple(logits.shape) != wanted)
    if not wrong:
        return None
    return Finding(
        "logits", f"do not have (batch {wanted[0]}, local tokens, vocabulary {wanted[2]}) on ranks {wrong}",
        math.inf, 0.0, tuple(wrong), (), None, "logits of another shape", "No number was compared.",
        "Return the logits of this rank's tokens.",
    )  # fmt: skip


# -- Mistakes of labels and means, applied to the logits of one device -------------------------------------------------


IGNORED = -100
LABEL_ADVICE = {
    "labels shifted late": "Shift labels while the sequence is whole, then shard: longspan.training.shard_batch does.",
    "labels not shifted": "Each token predicts the next one: shift labels by one before sharding.",
    "labels shifted twice": "Labels were shifted before, and the model shifts them again: pass shift_labels.",
    "labels cross documents": "The last token of a document predicts nothing: shard_batch(documents=...).",
    "mean of the ranks' means": "Divide by the labels of all ranks, not by each rank's own: token_loss does.",
    "sum of the ranks' means": "Divide by the labels of all ranks, not by each rank's own: token_loss does.",
}


@dataclass(frozen=True, eq=False)
class LossMistake:
    """A mistake, the losses ranks may report with it, and its gradients."""

    cause: str
    evidence: str
    losses: list[list[float]]
    gradients: dict[str, Tensor]


def loss_mistakes(step: ModelStep, truth: Truth, places: Places) -> Iterator[LossMistake]:
    """Mistakes of the loss, the likeliest first; none if labels or logits are not at hand."""
    labels = step.batch.get("labels", step.batch.get("shift_labels"))
    if not isinstance(labels, Tensor) or "logits" not in truth.result or labels.ndim != 2:
        return
    model = truth.model
    result = step.whole(model, truth.batch, step.mask)
    logits, right = result[1], float(truth.result["loss"])
    if logits.shape[:2] != labels.shape:
        return
    targets = _targets(step, labels.cpu(), places)
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    usual = next((n for n in ("shifted", "within documents", "as given") if _is(right, logits, targets[n])), None)
    if usual is None:
        return
    for cause, evidence, target in _candidates(usual, targets):
        nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")
        nll = nll.view(target.shape)
        for mean, weights in _weights(target, places):
            if cause == "" and mean == "":
                continue
            total = (nll * weights).sum()
            grads = torch.autograd.grad(total, list(names.values()), retain_graph=True, allow_unused=True)
            filled = {
                f"gradient of {n}": (torch.zeros_like(p) if g is None else g).double().cpu()
                for (n, p), g in zip(names.items(), grads, strict=True)
            }
            text = " ".join(part for part in (evidence, _SAID.get(mean, "")) if part)
            yield LossMistake(cause or mean, text, _reported(nll.detach(), weights, target, places), filled)


_SAID = {
    "mean of the ranks' means": "The loss is the mean of each rank's own mean, whatever its number of labels.",
    "sum of the ranks' means": "The loss is the sum of each rank's own mean.",
}


def _is(right: float, logits: Tensor, target: Tensor) -> bool:
    loss = F.cross_entropy(logits.detach().flatten(0, 1), target.flatten(), ignore_index=IGNORED)
    return abs(float(loss) - right) <= 1e-4 * abs(right)


def _shift(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _targets(step: ModelStep, labels: Tensor, places: Places) -> dict[str, Tensor]:
    """Labels as each convention and mistake has them, in global order."""
    shifted = _shift(labels)
    late = torch.full_like(labels, IGNORED)
    for rank in range(places.size):
        mine = (places.owner == rank).nonzero().flatten()
        mine = mine[places.slot[mine].argsort()]
        late[:, mine] = _shift(labels[:, mine])
    targets = {"shifted": shifted, "late": late, "as given": labels, "twice": _shift(shifted)}
    targets["within documents"] = shifted
    if step.mask is not None and labels.shape[1] > 1:
        at = torch.arange(labels.shape[1] - 1).numpy()
        apart = torch.as_tensor(~step.mask.resized(labels.shape[1]).allows(at + 1, at))
        targets["within documents"] = shifted.masked_fill(F.pad(apart, (0, 1)), IGNORED)
        targets["late within documents"] = late.masked_fill(F.pad(apart, (0, 1)), IGNORED)
    return targets


def _candidates(usual: str, targets: dict[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    yield "", "", targets[usual]
    options = [
        ("late", "labels shifted late", "Labels are those of a shift inside each shard: its last token has none."),
        ("late within documents", "labels shifted late", "Labels are those of a shift inside each shard."),
        ("as given", "labels not shifted", "Every token is asked for its own label."),
        ("twice", "labels shifted twice", "Every token is asked for the label two places later."),
        ("shifted", "labels cross documents", "The last token of a document is asked for the next document's first."),
    ]
    for name, cause, evidence in options:
        if name in targets and not torch.equal(targets[name], targets[usual]):
            yield cause, evidence, targets[name]


def _weights(target: Tensor, places: Places) -> Iterator[tuple[str, Tensor]]:
    """What every token's loss is multiplied by: one over all labels, or means by rank."""
    counted = (target != IGNORED).double()
    yield "", counted / counted.sum().clamp(min=1)
    if places.size < 2:
        return
    by_rank = torch.zeros(places.size, dtype=torch.float64).index_add(0, places.owner, counted.sum(0)).clamp(min=1)
    each = counted / by_rank[places.owner]
    yield "mean of the ranks' means", each / places.size
    yield "sum of the ranks' means", each


def _reported(nll: Tensor, weights: Tensor, target: Tensor, places: Places) -> list[list[float]]:
    """What ranks may show: the whole loss, their shares, or their own means."""
    size = places.size
    total = float((nll * weights).sum())
    shares = torch.zeros(size, dtype=torch.float64).index_add(0, places.owner, (nll * weights).sum(0).double())
    counted = (target != IGNORED).double()
    counts = torch.zeros(size, dtype=torch.float64).index_add(0, places.owner, counted.sum(0)).clamp(min=1)
    own = torch.zeros(size, dtype=torch.float64).index_add(0, places.owner, (nll * counted).sum(0).double()) / counts
    return [[total] * size, shares.tolist(), own.tolist(), [total]]
