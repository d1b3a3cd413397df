"""The loss of tokens that are spread over ranks, normalised by labels of all ranks and not by ranks.

Ranks hold different numbers of labels: a mean of the ranks' means weighs tokens by where they happen to lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.execution.inputs import check_no_tangent, is_number
from longspan.execution.tile import wide
from longspan.span import shortened
from longspan.training.groups import BatchError, all_summed, process_group


def token_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any,
    gradients: str,
    num_tokens: int | Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Cross-entropy of this rank's tokens (labels already shifted) such that gradients are those of one device.

    The *value* is the loss of the whole group, the same on every rank, for logging. *Backward* is that of the local
    share: the sum over local tokens, divided by the number of labels in the whole group, or by `num_tokens` (with
    gradient accumulation: labels of all micro-batches and ranks). `reduction="sum"` does not divide.

    `gradients` says what happens to parameters' gradients afterwards: they are added up over the group ("sum"), or
    averaged over it as FSDP and DDP do ("average"; the share is then multiplied by the group's size). `group` is that
    of all ranks over which the loss is one mean: `make_mesh(...).dp_cp`, the sequence's group alone, or None for one
    process. A rank without labels takes part with a share of zero; no label anywhere is a loss of zero.

    >>> logits = torch.zeros(4, 8, requires_grad=True)
    >>> loss = token_loss(logits, torch.tensor([1, 2, -100, -100]), group=None, gradients="sum")
    >>> round(loss.item(), 4)  # log(8), a mean over two labels
    2.0794
    """
    _check(logits, labels, gradients, reduction, num_tokens)
    precise = logits.to(wide(logits.dtype))
    flat = labels.reshape(-1)
    try:
        share = torch.nn.functional.cross_entropy(
            precise.reshape(-1, logits.shape[-1]), flat, ignore_index=ignore_index, reduction="sum"
        )
    except IndexError as error:
        real = flat[flat != ignore_index]
        raise BatchError(
            f"labels run from {int(real.min())} to {int(real.max())}, but logits are for 0 to {logits.shape[-1] - 1}."
            f" Mark places without a label with ignore_index = {ignore_index}."
        ) from error
    sums = torch.stack((share.detach().double(), (flat != ignore_index).sum().double()))
    size = 1
    if group is not None:
        members = process_group(group, "token_loss")
        size = members.size()
        all_summed(sums, members)
    count = torch.ones_like(sums[1])
    if reduction == "mean":  # nothing to predict is a sum of zero, over one
        count = (sums[1] if num_tokens is None else torch.as_tensor(num_tokens)).clamp(min=1)
    value = (sums[0] / count).to(share.dtype)
    return Reported.apply(share * (size if gradients == "average" else 1) / count, value)  # type: ignore[return-value]


class Reported(torch.autograd.Function):
    """The value of one tensor with the gradient of another. Adding a detached difference would round differently on
    every rank."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = share.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _check(logits: Tensor, labels: Tensor, gradients: str, reduction: str, num_tokens: Any) -> None:
    check_no_tangent(logits=logits)
    if gradients not in ("sum", "average"):
        raise BatchError(
            f"gradients = {gradients!r} was asked for. Say what happens to gradients over the group after backward:"
            f" 'sum' if they are added up, 'average' if they are averaged (FSDP and DDP do that)."
        )
    if reduction not in ("mean", "sum"):
        raise BatchError(
            f"reduction = {reduction!r} was asked for. Choose 'mean' (over all labels of the group) or 'sum'."
            f" Single tokens' losses are torch.nn.functional.cross_entropy(..., reduction='none')."
        )
    if num_tokens is not None and reduction == "sum":
        raise BatchError("num_tokens was given with reduction='sum', which divides by nothing. Leave one of them out.")
    _check_tensors(logits, labels, num_tokens)
    if isinstance(logits, DTensor) or isinstance(labels, DTensor):
        raise BatchError("token_loss takes plain tensors, but a DTensor was given. Pass logits.full_tensor().")
    if logits.shape[:-1] != labels.shape:
        raise BatchError(
            f"logits of shape {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:-1])}, one per token and"
            f" already shifted, but labels have shape {tuple(labels.shape)}. shard_batch makes them."
        )


def _check_tensors(logits: Any, labels: Any, num_tokens: Any) -> None:
    for name, value in (("logits", logits), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise BatchError(f"{name} must be a tensor, but {type(value).__name__} was given. Convert it first.")
    if not logits.is_floating_point():
        raise BatchError(
            f"logits have dtype {logits.dtype}, but scores of tokens are floating-point numbers. Cast them."
        )
    if labels.dtype not in (torch.int64, torch.uint8):
        raise BatchError(f"labels have dtype {labels.dtype}, but they are whole numbers. Cast them to torch.int64.")
    if num_tokens is not None and (
        not is_number(num_tokens) or (not isinstance(num_tokens, Tensor) and num_tokens < 0)
    ):
        raise BatchError(f"num_tokens = {shortened(num_tokens)} was given. It counts labels: a number, 0 or more.")
