"""`token_loss` and `token_logprobs` of tokens that are spread over ranks.

Losses are normalized by the labels of all ranks, not by ranks. Ranks hold different numbers of labels: a mean of the
ranks' means would weight tokens by the rank that holds them. With the model's head, logits of all tokens never exist at
once (`head.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.derivatives import FirstDerivative
from longspan.spans import truncated_repr
from longspan.tile import accumulation_dtype
from longspan.training.groups import BatchError, all_summed, check_gradients, process_group
from longspan.training.loss_without_logits import (
    Facts,
    Gradients,
    Head,
    Inputs,
    SlabWork,
    Slopes,
    call_of,
    check_range,
    facts_of,
    head_of,
    logits_of,
    memory_for,
)
from longspan.validate import Group, is_number


def token_loss(
    values: Tensor,
    labels: Tensor,
    *,
    group: Group,
    gradients: str,
    num_tokens: int | Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    head: Head | Tensor | torch.nn.Linear | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of this rank's tokens (labels already shifted), with the gradients of one device.

    `values` are logits; or hidden states, with the model's last layer as `head` (a `Head`, a weight, an nn.Linear):
    then loss and gradients are computed in one pass, some tokens at a time, without logits of all tokens.

    The *value* is the loss of the whole group, the same on every rank, for logging. *Backward* is that of the local
    share: the sum over local tokens, divided by the number of labels in the whole group, or by `num_tokens` (with
    gradient accumulation: labels of all micro-batches and ranks). `reduction="sum"` does not divide.

    `gradients` tells how gradients of parameters are reduced afterwards: summed over the group ("sum"), or averaged
    over it as FSDP and DDP do ("average"; the share is then multiplied by the group's size). `group` has all ranks over
    which the loss is one mean: `make_mesh(...).dp_cp`, the sequence's group alone, or None for one process. A rank
    without labels takes part with a share of zero; without any label the loss is zero.

    `label_smoothing` is that of torch.nn.functional.cross_entropy. `z_loss` times the square of each token's logsumexp
    is added to its loss.

    >>> logits = torch.zeros(4, 8, requires_grad=True)
    >>> labels = torch.tensor([1, 2, -100, -100])
    >>> round(token_loss(logits, labels, group=None, gradients="sum").item(), 4)  # log(8), a mean over two labels
    2.0794
    >>> hidden, weight = torch.ones(4, 3), torch.zeros(8, 3)
    >>> round(token_loss(hidden, labels, group=None, gradients="sum", head=weight).item(), 4)
    2.0794
    """
    _check(gradients, reduction, num_tokens)
    _check_tensors("token_loss", values, labels, head)
    terms = LossTerms(label_smoothing, z_loss)
    flat = labels.reshape(-1).long()
    if head is None:
        share = _share_of_logits(values, flat, ignore_index, terms)
    else:
        share = _share_of_hidden(values, labels, head_of(head), ignore_index, terms)
    sums = torch.stack((share.detach().double(), (flat != ignore_index).sum().double()))
    size = 1
    if group is not None:
        members = process_group(group, "token_loss")
        size = members.size()
        all_summed(sums, members)
    count = torch.ones_like(sums[1])
    if reduction == "mean":  # without labels, a sum of zero is divided by one
        # Without a dim, a count of float32 does not round losses of float64.
        count = sums[1] if num_tokens is None else torch.as_tensor(num_tokens).reshape(())
        count = count.masked_fill(count == 0, 1)
    value = (sums[0] / count).to(accumulation_dtype(values.dtype))
    factor = size if gradients == "average" else 1
    return ValueWithGradOf.apply(share * factor / count, value)  # type: ignore[return-value]


class TokenLogprobs(NamedTuple):
    """Per token: the log-probability of its label, and the entropy of the predicted distribution; in nats."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


@torch.compiler.disable()
def token_logprobs(
    values: Tensor, labels: Tensor, *, head: Head | Tensor | torch.nn.Linear | None = None, ignore_index: int = -100
) -> TokenLogprobs:
    """Return log-probabilities of labels (already shifted) and entropies of this rank's tokens, in float32 (float64 for
    float64) and in the shape of labels; 0 where the label is ignored. Both are differentiable.

    `values` are logits; or hidden states, with the model's last layer as `head`: then logits of all tokens never exist
    at once, neither in forward nor in backward. Nothing is sent, except over the head's own group. This is a graph
    break under torch.compile.

    >>> weight = torch.tensor([[1.0], [0.0]])
    >>> outputs = token_logprobs(torch.tensor([[1.0986], [5.0]]), torch.tensor([0, -100]), head=weight)
    >>> [[round(x, 3) for x in one.tolist()] for one in outputs]  # 3 to 1: log(3 / 4), and its entropy
    [[-0.288, 0.0], [0.562, 0.0]]
    """
    _check_tensors("token_logprobs", values, labels, head)
    call = call_of(values, labels, None if head is None else head_of(head), ignore_index)
    logprobs, entropies = PerToken.apply(*call.inputs, call.work)  # type: ignore[misc]
    return TokenLogprobs(logprobs.view(labels.shape), entropies.view(labels.shape))


# -- The share of this rank's tokens, as a sum -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The terms of a token's loss."""

    smoothing: float
    z_loss: float

    def __post_init__(self) -> None:
        if not is_number(self.smoothing) or not 0 <= self.smoothing <= 1:
            raise BatchError(f"label_smoothing must be a number from 0 to 1, but got {truncated_repr(self.smoothing)}.")
        if not is_number(self.z_loss) or self.z_loss < 0:
            raise BatchError(f"z_loss must be a number >= 0, but got {truncated_repr(self.z_loss)}.")

    def losses(self, facts: Facts, num_words: int) -> Tensor:
        """Return each token's loss."""
        losses = facts.logprobs * (self.smoothing - 1)
        if self.smoothing:
            losses = losses + self.smoothing * (facts.lse - facts.totals / num_words)
        return losses + self.z_loss * facts.lse.square() if self.z_loss else losses

    def slopes(self, lse: Tensor, num_words: int) -> Slopes:
        """Return the gradient of the losses: p minus the smoothed label, and 2 z lse p of the z-loss."""
        label = torch.full_like(lse, self.smoothing - 1)
        return Slopes(1 + 2 * self.z_loss * lse, label, -self.smoothing / max(num_words, 1))


def _share_of_logits(logits: Tensor, labels: Tensor, ignore_index: int, terms: LossTerms) -> Tensor:
    """Compute the sum of losses in plain PyTorch, which compilers fuse and which supports double backward."""
    precise = logits.to(accumulation_dtype(logits.dtype)).reshape(-1, logits.shape[-1])
    try:
        share = torch.nn.functional.cross_entropy(
            precise, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=terms.smoothing
        )
    except IndexError:
        check_range(labels[labels != ignore_index], logits.shape[-1], ignore_index)
        raise
    if terms.z_loss:
        kept = labels != ignore_index  # values of other rows, such as infinity, must not reach a gradient
        lse = precise.masked_fill(~kept[:, None], 0).logsumexp(-1)
        share = share + terms.z_loss * lse.square().masked_fill(~kept, 0).sum()
    return share


@torch.compiler.disable()
def _share_of_hidden(values: Tensor, labels: Tensor, head: Head, ignore_index: int, terms: LossTerms) -> Tensor:
    call = call_of(values, labels, head, ignore_index)
    wanted = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in call.inputs)
    return SlabLoss.apply(*call.inputs, call, terms, wanted)  # type: ignore[return-value]


class SlabLoss(FirstDerivative):
    """The sum of tokens' losses. Gradients are computed in forward, while a slab's logits exist, and multiplied by the
    incoming gradient in backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        inputs, (call, terms, wanted) = Inputs(*args[:3]), args[3:]
        work: SlabWork = call.work
        memory = memory_for(work, inputs)
        gradients = Gradients(inputs, memory, wanted) if any(wanted) else None
        losses = work.labels.new_empty(len(work.labels), dtype=accumulation_dtype(inputs.values.dtype))
        lses = torch.empty_like(losses)
        with _no_autocast(inputs.values):
            for span in work.slabs():
                slab = logits_of(work, inputs, span, memory)
                facts = facts_of(work, slab, memory, work.labels[span], total=terms.smoothing > 0)
                losses[span], lses[span] = terms.losses(facts, call.num_words), facts.lse
                if gradients is not None:
                    gradients.add(work, span, slab, facts.lse, terms.slopes(facts.lse, call.num_words))
        ctx.call, ctx.terms, ctx.wanted = call._replace(inputs=None), terms, wanted
        ctx.save_for_backward(*inputs, lses)
        ctx.ready = None if gradients is None else gradients.cast()
        return losses.sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ready, ctx.ready = ctx.ready, None
        if ready is None:  # a second time, under retain_graph
            *inputs, lses = ctx.saved_tensors
            slopes = ctx.terms.slopes(lses, ctx.call.num_words)
            ready = _gradients(ctx.call.work, Inputs(*inputs), lses, slopes, ctx.wanted).cast()
        return *(None if x is None else x.mul_(grads[0]) for x in ready), None, None, None


class PerToken(FirstDerivative):
    """Log-probabilities and entropies, one for every token; logits are recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        inputs, work = Inputs(*args[:3]), args[3]
        lses = work.labels.new_empty(len(work.labels), dtype=accumulation_dtype(inputs.values.dtype))
        logprobs, entropies = (lses.new_zeros(len(inputs.values)) for _ in range(2))
        memory = memory_for(work, inputs)
        with _no_autocast(inputs.values):
            for span in work.slabs():
                slab = logits_of(work, inputs, span, memory)
                facts = facts_of(work, slab, memory, work.labels[span], entropy=True)
                lses[span] = facts.lse
                work.put(logprobs, span, facts.logprobs)
                work.put(entropies, span, facts.entropies)
        ctx.work = work
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, lses, entropies.clone())
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, lses, entropies = ctx.saved_tensors
        work: SlabWork = ctx.work
        everything = slice(0, len(work.labels))
        of_logprob, of_entropy = (None if g is None else work.rows_of(g, everything) for g in grads)
        plain = label = torch.zeros_like(lses)
        if of_logprob is not None:  # log p of the label: 1 on the label, -p on all
            plain, label = -of_logprob, of_logprob
        if of_entropy is not None:  # -p (log p + entropy)
            plain = plain - of_entropy * work.rows_of(entropies, everything)
        slopes = Slopes(plain, label, log_p=None if of_entropy is None else -of_entropy)
        return *_gradients(work, Inputs(*inputs), lses, slopes, ctx.needs_input_grad[:3]).cast(), None


def _gradients(
    work: SlabWork, inputs: Inputs, lses: Tensor, slopes: Slopes, wanted: tuple[bool, bool, bool]
) -> Gradients:
    """Return gradients of all tokens with a label, from logits that are recomputed."""
    memory = memory_for(work, inputs)
    gradients = Gradients(inputs, memory, wanted)
    with _no_autocast(inputs.values):
        for span in work.slabs():
            slab = logits_of(work, inputs, span, memory)
            gradients.add(work, span, slab, lses[span], slopes.of(span))
    return gradients


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast: dtypes are chosen before, and sums stay in float32."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class ValueWithGradOf(torch.autograd.Function):
    """Return the value of one tensor with the gradient of another. Adding a detached difference would round differently
    on every rank."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = share.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


# -- Checks ------------------------------------------------------------------------------------------------------------


def _check(gradients: str, reduction: str, num_tokens: Any) -> None:
    check_gradients(gradients)
    if reduction not in ("mean", "sum"):
        raise BatchError(
            f"reduction must be 'mean' (over all labels of the group) or 'sum', but got {reduction!r}. For losses of"
            f" single tokens use torch.nn.functional.cross_entropy(..., reduction='none'), or -token_logprobs."
        )
    if num_tokens is not None and reduction == "sum":
        raise BatchError(
            "num_tokens cannot be combined with reduction='sum', which does not divide. Leave one of them out."
        )
    if isinstance(num_tokens, Tensor) and not (num_tokens.device.type == "cpu" and type(num_tokens) is Tensor):
        # Not read: the host would wait, or there are no contents.
        is_count = num_tokens.numel() == 1 and not num_tokens.is_complex() and num_tokens.dtype != torch.bool
    else:
        is_count = num_tokens is None or (is_number(num_tokens) and bool(num_tokens >= 0))
    if not is_count:
        raise BatchError(f"num_tokens must be a number >= 0, but got {truncated_repr(num_tokens)}.")


def _check_tensors(caller: str, values: Any, labels: Any, head: Any) -> None:
    name = "logits" if head is None else "hidden states"
    for word, value in ((name, values), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise BatchError(f"{word} must be a tensor, but got {type(value).__name__}. Convert it first.")
        if isinstance(value, DTensor):
            raise BatchError(f"{caller} takes plain tensors, but {word} are a DTensor. Pass their full_tensor().")
    if not values.is_floating_point():
        raise BatchError(f"{name} must be floating-point, but have dtype {values.dtype}. Cast them.")
    if labels.dtype not in (torch.int64, torch.uint8):
        raise BatchError(f"labels must be integers, but have dtype {labels.dtype}. Cast them to torch.int64.")
    if values.shape[:-1] != labels.shape or not values.ndim:
        raise BatchError(
            f"{name} of shape {tuple(values.shape)} need labels of shape {tuple(values.shape[:-1])}, one per token and"
            f" already shifted, but labels have shape {tuple(labels.shape)}. shard_batch returns them."
        )
