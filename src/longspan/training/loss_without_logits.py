"""The head of a language model as a value, and log-probabilities without logits of all tokens at once.

    logits = cap(scale * (hidden W^T + b)) / temperature,  cap(x) = soft_cap * tanh(x / soft_cap)

With a group the rows of W and b, the vocabulary, are sharded over its ranks in rank order, in parts of any size, as in
tensor parallelism. All of its ranks hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan._torch import hooks_of, version
from longspan.derivatives import FirstDerivative
from longspan.layouts.layout import to_device
from longspan.run.simulated import SimulatedRank
from longspan.spans import truncated_repr
from longspan.tile import accumulation_dtype
from longspan.training.groups import BatchError, all_summed, process_group
from longspan.validate import Group, as_autocast, is_number

# -- Labels on the host ------------------------------------------------------------------------------------------------
# The number of labels decides sizes, which the host must know before it can continue. Reading labels from a device when
# the loss is computed would wait for all queued work, including the model's forward. Code that has the labels earlier
# starts a copy then, which stays with the tensor.


def start_copy(labels: Tensor) -> None:
    """Begin to copy labels to the host, unless they are there or compiled code is traced."""
    if labels.device.type in ("cpu", "meta") or torch.compiler.is_compiling():
        return
    host = torch.empty(labels.shape, dtype=labels.dtype, pin_memory=True)
    host.copy_(labels.detach(), non_blocking=True)
    event = torch.accelerator.current_stream(labels.device).record_event()
    vars(labels)["_longspan_host"] = version(labels), host, event


def labels_on_host(labels: Tensor) -> Tensor:
    """Return labels as a flat CPU tensor. Waits for the device only if no copy of these values was started before."""
    copied, host, event = vars(labels).get("_longspan_host", (None, labels, None))
    if copied != version(labels):
        return labels.cpu().flatten()
    if not event.query():
        event.synchronize()
    return host.flatten()


# -- Log-probabilities of labels and their gradients, slab by slab -----------------------------------------------------
# Logits of some tokens at a time are computed, used and dropped: a slab, tokens x vocabulary of this rank, in float32
# (float64 for float64). Other memory never exceeds a fifth of its size: hidden states in bfloat16 are multiplied by
# part of the head at a time and the products widened into the slab, and gradients of logits overwrite the slab, in the
# hidden states' dtype, row by row.
#
# Per token the softmax needs five numbers, which add up over ranks that hold different parts of the vocabulary. With z
# of two entries (0, log 3) on one rank and (0,) on another, label 1:
#
#     rank 0: max log 3, sum 4/3, label's logit log 3     rank 1: max 0, sum 1, no label: 0
#     both:   max log 3, sum 4/3 + 1/3 = 5/3, so logsumexp = log 3 + log 5/3 = log 5 and p(label) = 3/5


PARTS, LEAST, MOST = 24, 1 << 24, 1 << 30
"""A slab is 1 / PARTS of all logits, within these limits in bytes. The gradient of a head is read and written once for
each slab, which for few tokens takes longer than the products: a slab should have hundreds."""
BLOCKS = 24
"""The number of blocks of a slab's rows, and of strips of the vocabulary."""


class Inputs(NamedTuple):
    """The differentiable inputs: hidden states (tokens, hidden_size) and a head's rows on this rank; or logits (tokens,
    vocab_size) alone."""

    values: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SlabWork:
    """Options of a call: tokens with a label, and how logits are computed from products with the head."""

    labels: Tensor
    places: Tensor | None
    rows: int
    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0
    group: dist.ProcessGroup | None = None
    first: int = 0
    """The vocabulary index of this rank's first row."""

    def slabs(self) -> Iterator[slice]:
        """Return ranges of tokens with a label."""
        total = len(self.labels)
        return (slice(start, min(start + self.rows, total)) for start in range(0, total, self.rows))

    def rows_of(self, tensor: Tensor, span: slice) -> Tensor:
        """Return the rows of these tokens from a tensor with one row per token."""
        return tensor[span] if self.places is None else tensor.index_select(0, self.places[span])

    def put(self, target: Tensor, span: slice, rows: Tensor) -> None:
        """Write the rows of these tokens to a tensor with one row per token."""
        if self.places is None:
            target[span] = rows
        else:
            target.index_copy_(0, self.places[span], rows.to(target.dtype))


class Facts(NamedTuple):
    """Per token: logsumexp over the vocabulary, log-probability of the label, entropy, and the sum of logits."""

    lse: Tensor
    logprobs: Tensor
    entropies: Tensor
    totals: Tensor


class Slopes(NamedTuple):
    """Per token, the terms of the gradient of a logit: p (plain + log_p log(p)) + every, plus `label` for the label
    itself. `log_p` may be None."""

    plain: Tensor
    label: Tensor
    every: float = 0.0
    log_p: Tensor | None = None

    def of(self, span: slice) -> Slopes:
        """Return those of some tokens."""
        log_p = None if self.log_p is None else self.log_p[span]
        return Slopes(self.plain[span], self.label[span], self.every, log_p)


def rows_for(num_tokens: int, num_words: int, itemsize: int) -> int:
    """Return the number of tokens of a slab.

    >>> rows_for(8192, 128256, 4), rows_for(32768, 128256, 4), rows_for(100, 11, 4)
    (341, 1365, 100)
    """
    row = max(num_words, 1) * itemsize
    size = min(max(num_tokens * row // PARTS, LEAST), MOST)
    return max(min(size // row, num_tokens), 1)


class SlabMemory(NamedTuple):
    """Memory that all slabs of a call share: rows of one slab, and two blocks. The slab has no rows if logits can be
    read in place."""

    slab: Tensor
    scratch: Tensor
    other: Tensor


def memory_for(work: SlabWork, inputs: Inputs) -> SlabMemory:
    """Allocate memory for the slabs of a call."""
    values, weight, _ = inputs
    dtype, rows = accumulation_dtype(values.dtype), min(work.rows, len(work.labels))
    block = -(-rows // BLOCKS)
    if weight is None and work.places is None and values.dtype == dtype:
        rows = 0
    whole = values.new_empty((rows + 2 * block, values.shape[1] if weight is None else len(weight)), dtype=dtype)
    return SlabMemory(whole[:rows], whole[rows : rows + block], whole[rows + block :])


def logits_of(work: SlabWork, inputs: Inputs, span: slice, memory: SlabMemory) -> Tensor:
    """Compute logits of these tokens for this rank's part of the vocabulary, in this memory."""
    if not len(memory.slab):
        return inputs.values[span]
    slab = memory.slab[: span.stop - span.start]
    if inputs.weight is None:
        for block in _blocks(slab):
            slab[block] = work.rows_of(inputs.values, _within(span, block))
        return slab
    rows = work.rows_of(inputs.values, span)
    is_cast = rows.dtype != slab.dtype  # then products of part of the vocabulary are computed at once, and cast
    step = max(1, -(-slab.shape[1] // BLOCKS) if is_cast else slab.shape[1])
    for start in range(0, slab.shape[1], step):
        part, weight = slab[:, start : start + step], inputs.weight[start : start + step].t()
        out = None if is_cast else part
        if inputs.bias is None:
            products = torch.mm(rows, weight, out=out)
        else:
            products = torch.addmm(inputs.bias[start : start + step], rows, weight, out=out)
        if is_cast:
            part.copy_(products)
    for block in _blocks(slab):
        if work.soft_cap is not None:
            slab[block].mul_(work.scale / work.soft_cap).tanh_().mul_(work.soft_cap / work.temperature)
        elif work.scale != work.temperature:
            slab[block].mul_(work.scale / work.temperature)
    return slab


def facts_of(
    work: SlabWork, slab: Tensor, memory: SlabMemory, labels: Tensor, *, entropy: bool = False, total: bool = False
) -> Facts:
    """Return facts of a slab's tokens, over the vocabulary of all ranks of the group."""
    local = slab.new_zeros((len(slab), 5))
    local[:, 0] = -torch.inf
    place, own = _locate_labels(work, slab, labels)
    if slab.shape[1]:
        local[:, 2] = torch.where(own, slab.gather(1, place).squeeze(1), 0)
        for block in _blocks(slab):
            z, into = slab[block], local[block]
            most = z.amax(1)
            into[:, 0] = most
            most = most.masked_fill(most.isneginf(), 0.0)  # -inf minus -inf is nan, not 0
            shifted = torch.sub(z, most[:, None], out=memory.scratch[: len(z)])
            if entropy:
                powers = torch.exp(shifted, out=memory.other[: len(z)])
                into[:, 1] = powers.sum(1)
                into[:, 4] = powers.mul_(_finite(shifted)).sum(1)
            else:
                into[:, 1] = shifted.exp_().sum(1)
            if total:
                into[:, 3] = z.sum(1)
    return _merge_ranks(local[None] if work.group is None else _gather_rows(local, work.group))


def _gather_rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather a tensor of every rank, by one all-reduce."""
    parts = mine.new_zeros((group.size(), *mine.shape))
    parts[group.rank()] = mine
    return all_summed(parts, group)


def _merge_ranks(parts: Tensor) -> Facts:
    """Return facts from every rank's largest logit, sum of exp(z - largest), label's logit, sum of z, and sum of
    exp(z - largest) (z - largest)."""
    most, powers, label, total, weighted = parts.unbind(-1)
    top = most.amax(0)
    shift = _finite(most - top)  # a rank without vocabulary, or whose logits are all -inf, adds nothing
    powers_all = (powers * shift.exp()).sum(0)
    weighted_all = ((weighted + shift * powers) * shift.exp()).sum(0)
    log = powers_all.log()
    return Facts(top + log, label.sum(0) - top - log, log - weighted_all / powers_all, total.sum(0))


def to_gradients(
    work: SlabWork, slab: Tensor, memory: SlabMemory, lse: Tensor, labels: Tensor, slopes: Slopes
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of a slab and the gradients of their products with the head; the next ones overwrite them."""
    factor = work.scale / work.temperature
    place, own = _locate_labels(work, slab, labels)
    on_label = torch.where(own, slopes.label, 0)[:, None]
    for block in _blocks(slab):
        z = slab[block]
        grad, slope = torch.sub(z, lse[block, None], out=memory.scratch[: len(z)]), memory.other[: len(z)]
        if slopes.log_p is None:
            grad.exp_().mul_(slopes.plain[block, None])
        else:
            torch.mul(_finite(grad), slopes.log_p[block, None], out=slope)
            grad.exp_().mul_(slope.add_(slopes.plain[block, None]))
        if slopes.every:
            grad.add_(slopes.every)
        if slab.shape[1]:
            grad.scatter_add_(1, place[block], on_label[block])
        if work.soft_cap is not None:  # the slope of c tanh(x / c) is 1 - tanh(x / c) ** 2
            torch.mul(z, work.temperature / work.soft_cap, out=slope)
            grad.addcmul_(grad, slope.square_(), value=-1)
        yield block, grad if factor == 1 else grad.mul_(factor)


class Gradients:
    """Gradients of inputs, slab by slab; None for those not required. That of a head is accumulated in float32."""

    def __init__(self, inputs: Inputs, memory: SlabMemory, wanted: tuple[bool, bool, bool]) -> None:
        values, weight, bias = inputs
        self.inputs, self.memory = inputs, memory
        self.values = torch.zeros_like(values) if wanted[0] else None
        self.weight, self.bias = (
            torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) if x is not None and want else None
            for x, want in ((weight, wanted[1]), (bias, wanted[2]))
        )

    def add(self, work: SlabWork, span: slice, slab: Tensor, lse: Tensor, slopes: Slopes) -> None:
        """Add those of one slab, whose memory they overwrite."""
        blocks = to_gradients(work, slab, self.memory, lse, work.labels[span], slopes)
        if self.inputs.weight is None:
            assert self.values is not None
            for block, grad in blocks:
                work.put(self.values, _within(span, block), grad)
            return
        grads = slab.view(self.inputs.values.dtype)[:, : slab.shape[1]]  # a row's gradients overwrite its logits
        for block, grad in blocks:
            if self.bias is not None:
                self.bias += grad.sum(0)
            grads[block] = grad
        if self.values is not None:
            work.put(self.values, span, grads @ self.inputs.weight)
        if self.weight is None:
            return
        rows = work.rows_of(self.inputs.values, span)
        if grads.dtype == self.weight.dtype:
            self.weight.addmm_(grads.t(), rows)
            return
        step = max(1, grads.shape[1] * len(grads) // (BLOCKS * max(rows.shape)))
        for start in range(0, grads.shape[1], step):
            self.weight[start : start + step] += grads[:, start : start + step].t() @ rows

    def cast(self) -> tuple[Tensor | None, ...]:
        """Return gradients of values, weight and bias in their dtypes, but not in float16, whose range is small."""
        del self.memory  # it is not needed while sums are copied
        gradients = [self.values]
        for x, like in zip((self.weight, self.bias), self.inputs[1:], strict=True):
            gradients.append(x if x is None or like is None or like.dtype == torch.float16 else x.to(like.dtype))
        return tuple(gradients)


def _locate_labels(work: SlabWork, slab: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of labels in this rank's part of the vocabulary, and whether they are in it."""
    place = labels - work.first
    own = (place >= 0) & (place < slab.shape[1])
    return torch.where(own, place, 0)[:, None], own


def _finite(x: Tensor) -> Tensor:
    """Replace -inf by a finite number, in place: 0 * -inf would be nan."""
    return x.clamp_(min=torch.finfo(x.dtype).min)


def _blocks(slab: Tensor) -> list[slice]:
    step = max(1, -(-len(slab) // BLOCKS))
    return [slice(start, min(start + step, len(slab))) for start in range(0, len(slab), step)]


def _within(span: slice, block: slice) -> slice:
    """Return the tokens of a block of a slab with these tokens."""
    return slice(span.start + block.start, span.start + block.stop)


# -- Head --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The last layer of a language model: weight (vocab_size, hidden_size), bias (vocab_size,), and how logits follow.

    `scale` multiplies (Cohere's logit_scale, 1 / Granite's logits_scaling), `soft_cap` bounds (Gemma's
    final_logit_softcapping), `temperature` divides at the end. `group` has the ranks over which the vocabulary is
    sharded, consecutive rows in rank order; None if every rank has the whole vocabulary.

    >>> Head(torch.zeros(11, 4), soft_cap=30.0)
    Head(vocab_size=11, hidden_size=4, soft_cap=30.0)
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0
    group: Group = None

    def __post_init__(self) -> None:
        weight, bias = self.weight, self.bias
        for name, value in (("weight", weight), ("bias", bias)):
            if value is None and name == "bias":
                continue
            if not isinstance(value, Tensor):
                raise BatchError(f"{name} of a head must be a tensor, but got {type(value).__name__}.")
            if isinstance(value, DTensor):
                raise BatchError(
                    f"{name} of a head is a DTensor {value.placements}. Under FSDP2 compute the loss in the forward of"
                    f" the module that holds it, where parameters are whole, or pass {name}.full_tensor(). Under tensor"
                    f" parallelism, sharded along dim 0, pass {name}.to_local() and Head(..., group=mesh['tp'])."
                )
            if not value.is_floating_point():
                raise BatchError(
                    f"{name} of a head must be floating-point, but has dtype {value.dtype}. Dequantize it first."
                )
        if weight.ndim != 2:
            raise BatchError(
                f"weight of a head must be (vocab_size, hidden_size), but has shape {tuple(weight.shape)}."
            )
        if bias is not None and (tuple(bias.shape), bias.dtype) != ((len(weight),), weight.dtype):
            raise BatchError(
                f"bias of a head must have shape ({len(weight)},) and dtype {weight.dtype} as its weight, but got"
                f" {tuple(bias.shape)} and {bias.dtype}."
            )
        numbers = {"scale": self.scale, "soft_cap": self.soft_cap, "temperature": self.temperature}
        for name, value in numbers.items():
            if (
                (name == "soft_cap")
                if value is None
                else (is_number(value) and not isinstance(value, Tensor) and (name == "scale" or value > 0))
            ):
                continue
            other = ", or None for no cap" if name == "soft_cap" else ""
            kind = "a number" if name == "scale" else "a number > 0"
            raise BatchError(
                f"{name} of a head must be {kind}{other}, and no tensor, since it gets no gradient, but got"
                f" {truncated_repr(value)}."
            )
        if self.group is not None:
            process_group(self.group, "Head")

    def __repr__(self) -> str:
        defaults = {"scale": 1.0, "soft_cap": None, "temperature": 1.0}
        parts = [f"vocab_size={self.weight.shape[0]}, hidden_size={self.weight.shape[1]}"]
        parts += ["bias"] * (self.bias is not None)
        parts += [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        if self.group is not None:
            parts.append(f"sharded over {process_group(self.group, 'Head').size()} ranks")
        return f"Head({', '.join(parts)})"


def head_of(head: Any) -> Head:
    """Return the `Head` of a `Head`, a weight, or an nn.Linear.

    >>> head_of(nn.Linear(4, 11))
    Head(vocab_size=11, hidden_size=4, bias)
    """
    if isinstance(head, Head):
        return head
    if isinstance(head, Tensor):
        return Head(head)
    if not isinstance(head, nn.Linear):
        raise BatchError(
            f"head must be a Head(weight, bias, scale=, soft_cap=), a weight of shape (vocab_size, hidden_size) or an"
            f" nn.Linear, but got {type(head).__name__}."
        )
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head) or any(hooks_of(head)):
        raise BatchError(
            f"head is {type(head).__name__} with a forward or with hooks of its own, which would not be called: only"
            f" its weight is used. Pass Head(weight, bias, ...) if that is all it computes (with adapters: of the"
            f" merged weight), else compute logits and leave head out."
        )
    return Head(head.weight, head.bias)


class HeadCall(NamedTuple):
    """A prepared call: inputs, options, and the size of the vocabulary."""

    inputs: Inputs
    work: SlabWork
    num_words: int


def call_of(values: Tensor, labels: Tensor, head: Head | None, ignore_index: int) -> HeadCall:
    """Prepare hidden states (or logits, without a head) and labels for slabs; tokens without a label are left out."""
    weight, bias = (None, None) if head is None else (head.weight, head.bias)
    if head is not None:  # as nn.Linear under autocast
        values, weight = as_autocast(values), as_autocast(head.weight)
        bias = None if bias is None else as_autocast(bias)
        if values.shape[-1] != weight.shape[1]:
            raise BatchError(
                f"hidden states of shape {tuple(values.shape)} do not fit a head of vocab_size={weight.shape[0]} and"
                f" hidden_size={weight.shape[1]}. With head= the first argument is the input of the last layer, not"
                f" logits."
            )
        if (values.dtype, values.device) != (weight.dtype, weight.device):
            raise BatchError(
                f"hidden states are {values.dtype} on {values.device}, and the head is {weight.dtype} on"
                f" {weight.device}. Cast one of them, or call under torch.autocast, which casts both as it does"
                f" for nn.Linear."
            )
    known, labels = labels_on_host(labels).long(), labels.reshape(-1).long()
    kept = known != ignore_index
    places = None if bool(kept.all()) else to_device(kept.nonzero().squeeze(1), labels.device)
    real = labels.clone() if places is None else labels.index_select(0, places)
    local = values.shape[-1] if weight is None else len(weight)
    group = None if head is None or head.group is None else process_group(head.group, "Head")
    sizes = [local] if group is None else _sizes(local, labels, group)
    num_words, rank = sum(sizes), 0 if group is None else group.rank()
    check_range(known[kept], num_words, ignore_index)
    rows = rows_for(len(real), max(sizes), accumulation_dtype(values.dtype).itemsize)
    form = {} if head is None else {"scale": float(head.scale), "temperature": float(head.temperature)}
    form |= {} if head is None or head.soft_cap is None else {"soft_cap": float(head.soft_cap)}
    work = SlabWork(real, places, rows, group=group, first=sum(sizes[:rank]), **form)
    flat_values = values.reshape(labels.numel(), values.shape[-1])
    return HeadCall(Inputs(sum_gradients(flat_values, group, "a head"), weight, bias), work, num_words)


def check_range(labels: Tensor, num_words: int, ignore_index: int) -> None:
    """Check that labels are in the vocabulary."""
    if labels.numel() and not bool(((labels >= 0) & (labels < num_words)).all()):
        raise BatchError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, but logits are for 0 to {num_words - 1}."
            f" Mark tokens without a label with ignore_index = {ignore_index}."
        )


def _sizes(local: int, labels: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the size of every rank's part of the vocabulary, after checking that all ranks have the same labels."""
    order = torch.arange(1, labels.numel() + 1, device=labels.device)
    mine = torch.stack((order.new_tensor(local), order.new_tensor(labels.numel()), ((labels + 211) * order).sum()))
    sizes, tokens, sums = _gather_rows(mine, group).t().tolist()
    if len(set(tokens)) > 1 or len(set(sums)) > 1:
        raise BatchError(
            f"the ranks of a head's group must hold the same tokens, but labels differ between them (numbers of tokens:"
            f" {tokens}). Head(group=) is for tensor parallelism; pass the ranks that hold other parts of the sequence"
            f" as group= of token_loss."
        )
    return sizes


# -- Tensors that all ranks hold, and of which each computes its share of the gradient ---------------------------------


def sum_gradients(x: Tensor, group: Any, caller: str, factor: int = 1) -> Tensor:
    """Return the same tensor, whose gradient is the sum over the group, divided by `factor`; without a group, x."""
    if group is None or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if isinstance(group, SimulatedRank):  # all ranks have one graph
        return group.meet(caller, x, lambda parts: SumHere.apply(factor, *parts))  # type: ignore[arg-type]
    return SumGradients.apply(x, group, factor)  # type: ignore[return-value]


class SumGradients(FirstDerivative):
    """`sum_gradients` over a process group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, factor: int) -> Tensor:
        ctx.group, ctx.factor = group, factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].to(accumulation_dtype(grads[0].dtype), copy=True, memory_format=torch.contiguous_format)
        return all_summed(total, ctx.group).div_(ctx.factor).to(grads[0].dtype), None, None


class SumHere(FirstDerivative):
    """`sum_gradients` over simulated ranks: takes and returns the tensors of all ranks."""

    @staticmethod
    def forward(ctx: Any, factor: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.factor = factor
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.stack(grads).sum(0, dtype=accumulation_dtype(grads[0].dtype)).div_(ctx.factor)
        return None, *(total.to(grad.dtype) for grad in grads)
