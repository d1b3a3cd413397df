"""Mistakes of labels and means, played through the logits of one device: what loss and gradients they would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from longspan.verification.model.step import ModelStep, Truth
from longspan.verification.places import Places

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
