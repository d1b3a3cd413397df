"""Losses that the Trainer computes from logits itself: smoothed labels, and a function of the user's.

A rank has the logits of its own tokens, and the token after its last one is on another rank. So labels are shifted
while the sequence is whole. A function that shifts labels by itself is handed rows in which its own shift is right:
logits with one more row, and labels that begin one place later. With tokens 3 to 5 of a sequence, whose next tokens are
d, e, f:

    logits  l3  l4  l5   0        what it compares: l3 with d, l4 with e, l5 with f
    labels -100  d   e   f
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.execution.tile import wide
from longspan.integrations.huggingface.batches import IGNORE, shifted_labels
from longspan.integrations.huggingface.hooks.head import replaced
from longspan.training import BatchError, gather_tokens
from longspan.training.groups import message_device
from longspan.training.loss import Reported

SHIFTS, IN_PLACE, WHOLE = range(3)
TRIED = ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8])
"""Two parts of the twelve tokens that a user's function is tried on."""


@dataclass(frozen=True)
class PartLabels:
    """Labels of the batch whose loss is being computed, and how many there are in all batches of the step."""

    batch: Mapping[str, Any]
    sequence: Any
    num_items: Any

    def of_part(self, shift: bool) -> Tensor:
        """This rank's labels: of the token after each one, or in place."""
        labels = shifted_labels(self.batch) if shift else self.batch.get("labels")
        if labels is None:
            raise BatchError(
                f"labels are needed in their places, but the batch has {', '.join(self.batch)}. Give 'labels', not"
                f" shifted."
            )
        return self.sequence.layout.shard(labels, self.sequence.rank, 1, IGNORE)


class PartSmoother:
    """The Trainer's label smoother, for a rank's part: shares add up to what it would say of whole sequences."""

    def __init__(self, smoother: Any, labels: Callable[[], PartLabels | None]) -> None:
        self.smoother, self.labels = smoother, labels

    def __call__(self, outputs: Any, labels: Any, shift_labels: bool = False, **given: Any) -> Tensor:
        now = self.labels()
        if now is None:  # whole sequences: the trainer was called with a batch that is no part
            return self.smoother(outputs, labels, shift_labels=shift_labels, **given)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        share = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).to(wide(logits.dtype)),
            now.of_part(shift_labels).reshape(-1).to(logits.device),
            ignore_index=self.smoother.ignore_index,
            label_smoothing=self.smoother.epsilon,
            reduction="sum",
        )
        return share / torch.as_tensor(now.num_items, device=share.device).clamp(min=1)


class PartLoss:
    """A user's `compute_loss_func`, for a rank's part.

    It is tried once, on random logits of twelve tokens: what it says of two parts must add up to what it says of the
    whole, with its own shift of labels or without one. A function that does not add up (or that fails there, because it
    reads more than logits) is given whole sequences, which every rank then has to hold.
    """

    def __init__(self, function: Callable[..., Any], labels: Callable[[], PartLabels | None]) -> None:
        self.function, self.labels = function, labels
        self.way: int | None = None

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        now = self.labels()
        if now is None:
            return self.function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if self.way is None:
            self.way = _agreed(_way(self.function, outputs, num_items_in_batch), now.sequence.group)
        if self.way == WHOLE:
            return self._of_whole(outputs, now, num_items_in_batch)
        logits, mine = outputs["logits"], now.of_part(self.way == SHIFTS)
        if self.way == SHIFTS:
            logits, mine = _one_later(logits, mine)
        return self.function(replaced(outputs, logits=logits), mine, num_items_in_batch=num_items_in_batch)

    def _of_whole(self, outputs: Any, now: PartLabels, num_items: Any) -> Tensor:
        """The loss of whole sequences as this rank's share: one part in as many of its value, and the gradient of this
        rank's tokens."""
        sequence = now.sequence
        slots = sequence.layout.num_slots(sequence.rank)
        whole = {name: _joined(value, slots, sequence) for name, value in outputs.items()}
        loss = self.function(type(outputs)(**whole), now.batch["labels"], num_items_in_batch=num_items)
        return Reported.apply(loss, loss.detach() / sequence.group.size())  # type: ignore[return-value]


def _joined(value: Any, slots: int, sequence: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_joined(item, slots, sequence) for item in value)
    if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == slots:
        return gather_tokens(value, sequence.layout, sequence.group, 1, gradients="sum")
    return value


def _one_later(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in which logits[:, :-1] against labels[:, 1:] is each token against its label.

    >>> logits, labels = _one_later(torch.zeros(1, 3, 5), torch.tensor([[7, 8, 9]]))
    >>> tuple(logits.shape), labels.tolist()
    ((1, 4, 5), [[-100, 7, 8, 9]])
    """
    row = torch.zeros_like(logits[:, :1])
    return torch.cat((logits, row), dim=1), torch.nn.functional.pad(labels, (1, 0), value=IGNORE)


@torch.no_grad()
def _way(function: Callable[..., Any], outputs: Any, num_items: Any) -> int:
    """How a function may be given parts: with rows for its own shift, in place, or not at all."""
    logits, labels = _drawn(outputs["logits"])
    count = torch.full_like(num_items, 17) if isinstance(num_items, Tensor) else 17
    later = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)

    def said(rows: Tensor, marks: Tensor) -> Tensor:
        return torch.as_tensor(function(type(outputs)(logits=rows), marks, num_items_in_batch=count)).double().cpu()

    try:
        whole = said(logits, labels)
        shifted = [said(*_one_later(logits[:, part], later[:, part])) for part in TRIED]
        in_place = [said(logits[:, part], labels[:, part]) for part in TRIED]
    except Exception:  # it reads what is not there: it may read it in whole sequences
        return WHOLE
    for way, (first, second) in ((SHIFTS, shifted), (IN_PLACE, in_place)):
        if whole.ndim == 0 and bool((first + second - whole).abs() <= 1e-5 * whole.abs() + 1e-7):
            return way
    return WHOLE


def _drawn(like: Tensor) -> tuple[Tensor, Tensor]:
    """Random logits of twelve tokens in two rows, and labels, of which a few are ignored."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 12, like.shape[-1], generator=draw)
    labels = torch.randint(0, like.shape[-1], (2, 12), generator=draw)
    labels[0, 4] = labels[1, 9] = IGNORE
    return logits.to(like.device), labels.to(like.device)


def _agreed(way: int, group: Any) -> int:
    """The way that all ranks found; whole sequences where they found different ones, since these need every rank."""
    ways = torch.tensor([way, -way], device=message_device(group))
    dist.all_reduce(ways, dist.ReduceOp.MAX, group=group)
    return way if int(ways[0]) == -int(ways[1]) else WHOLE
