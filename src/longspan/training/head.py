"""The head of a language model as a value, and log-probabilities without logits of all tokens at once.

    logits = cap(scale * (hidden W^T + b)) / temperature,  cap(x) = soft_cap * tanh(x / soft_cap)

With a group the rows of W and b, the vocabulary, are sharded over its ranks in rank order, in parts of any size, as in
tensor parallelism. All of its ranks hold the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan._torch import hooks_of, version
from longspan.layouts.layout import to_device
from longspan.run.simulated import SimulatedRank
from longspan.spans import shortened
from longspan.tile import wide
from longspan.training.groups import BatchError, all_summed, process_group
from longspan.validate import Group, as_autocast, check_no_tangent, is_number

# -- Labels on the host ------------------------------------------------------------------------------------------------
# The number of labels decides sizes, which the host must know before it can continue. Reading labels from a device when
# the loss is computed would wait for all queued work, including the model's forward. Code that has the labels earlier
# starts a copy then (`start_copy`), and the loss finds it done.


class _Copy(NamedTuple):
    labels: Tensor
    """Held, so that its memory is not that of other labels."""
    version: int
    host: Tensor
    event: Any

    def is_of(self, labels: Tensor) -> bool:
        """Whether these are the same numbers, unchanged, in any shape."""
        known = self.labels
        return (
            (labels.data_ptr(), labels.numel(), labels.dtype) == (known.data_ptr(), known.numel(), known.dtype)
            and labels.is_contiguous()
            and version(labels) == self.version
        )


_copies: deque[_Copy] = deque(maxlen=4)


def start_copy(labels: Tensor) -> None:
    """Begin to copy labels to the host, unless they are there or compiled code is traced."""
    if labels.device.type in ("cpu", "meta") or not labels.is_contiguous() or torch.compiler.is_compiling():
        return
    host = torch.empty(labels.numel(), dtype=labels.dtype, pin_memory=True)
    host.copy_(labels.detach().view(-1), non_blocking=True)
    event = torch.accelerator.current_stream(labels.device).record_event()
    _copies.append(_Copy(labels.detach(), version(labels), host, event))


def labels_on_host(labels: Tensor) -> Tensor:
    """Return flat labels as a CPU tensor. Waits for the device only if no copy of them was started before."""
    if labels.device.type == "cpu":
        return labels
    for copy in reversed(_copies):
        if copy.is_of(labels):
            if not copy.event.query():
                copy.event.synchronize()
            return copy.host
    return labels.cpu()


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
"""A slab is this part of all logits, but of no fewer and no more bytes. The gradient of a head is read and written once
for each slab, which for few tokens takes longer than the products: a slab wants hundreds of them."""
BLOCKS = 24
"""A slab's rows are worked on in so many blocks, and the head's words in so many strips."""


class Inputs(NamedTuple):
    """What gradients are taken of: hidden states (tokens, features) and a head's rows on this rank; or logits (tokens,
    words) and nothing."""

    values: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SlabWork:
    """What a call does to its inputs: tokens with a label, and how logits come from a product with the head's words."""

    labels: Tensor
    places: Tensor | None
    rows: int
    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0
    group: dist.ProcessGroup | None = None
    first: int = 0
    """The word that this rank's first row stands for."""

    def slabs(self) -> Iterator[slice]:
        """Tokens with a label, some at a time."""
        total = len(self.labels)
        return (slice(start, min(start + self.rows, total)) for start in range(0, total, self.rows))

    def rows_of(self, tensor: Tensor, span: slice) -> Tensor:
        """Rows of these tokens, of a tensor that has one for every token."""
        return tensor[span] if self.places is None else tensor.index_select(0, self.places[span])

    def put(self, target: Tensor, span: slice, rows: Tensor) -> None:
        """Rows of these tokens, into a tensor that has one for every token."""
        if self.places is None:
            target[span] = rows
        else:
            target.index_copy_(0, self.places[span], rows.to(target.dtype))


class Facts(NamedTuple):
    """Per token: logsumexp over all words, log-probability of the label, entropy, and the sum of all words' logits."""

    lse: Tensor
    logprobs: Tensor
    entropies: Tensor
    totals: Tensor


class Slopes(NamedTuple):
    """Per token, what the gradient of a word's logit is made of: p (plain + log_p log(p)) + every, and `label` on top
    for the label itself. `log_p` may be missing."""

    plain: Tensor
    label: Tensor
    every: float = 0.0
    log_p: Tensor | None = None

    def of(self, span: slice) -> Slopes:
        """Those of some tokens."""
        log_p = None if self.log_p is None else self.log_p[span]
        return Slopes(self.plain[span], self.label[span], self.every, log_p)


def rows_for(num_tokens: int, num_words: int, itemsize: int) -> int:
    """How many tokens a slab has.

    >>> rows_for(8192, 128256, 4), rows_for(32768, 128256, 4), rows_for(100, 11, 4)
    (341, 1365, 100)
    """
    row = max(num_words, 1) * itemsize
    size = min(max(num_tokens * row // PARTS, LEAST), MOST)
    return max(min(size // row, num_tokens), 1)


class SlabMemory(NamedTuple):
    """What slabs take turns in: rows of one of them, and two blocks beside it. Logits that can be read as they are need
    no slab, which has no rows then."""

    slab: Tensor
    scratch: Tensor
    other: Tensor


def memory_for(work: SlabWork, inputs: Inputs) -> SlabMemory:
    """Memory for the slabs of a call, allocated at once."""
    values, weight, _ = inputs
    dtype, rows = wide(values.dtype), min(work.rows, len(work.labels))
    block = -(-rows // BLOCKS)
    if weight is None and work.places is None and values.dtype == dtype:
        rows = 0
    whole = values.new_empty((rows + 2 * block, values.shape[1] if weight is None else len(weight)), dtype=dtype)
    return SlabMemory(whole[:rows], whole[rows : rows + block], whole[rows + block :])


def logits_of(work: SlabWork, inputs: Inputs, span: slice, memory: SlabMemory) -> Tensor:
    """Logits of these tokens for this rank's words, wide, in this memory."""
    if not len(memory.slab):
        return inputs.values[span]
    slab = memory.slab[: span.stop - span.start]
    if inputs.weight is None:
        for block in _blocks(slab):
            slab[block] = work.rows_of(inputs.values, _within(span, block))
        return slab
    rows = work.rows_of(inputs.values, span)
    for words in _strips(slab, rows.dtype):
        part, weight = slab[:, words], inputs.weight[words]
        bias = None if inputs.bias is None else inputs.bias[words]
        if rows.dtype == slab.dtype:
            _product(rows, weight, bias, part)
        else:
            part.copy_(_product(rows, weight, bias, None))
    for block in _blocks(slab):
        _shaped(work, slab[block])
    return slab


def facts_of(
    work: SlabWork, slab: Tensor, memory: SlabMemory, labels: Tensor, *, entropy: bool = False, total: bool = False
) -> Facts:
    """Facts of a slab's tokens, over the words of all ranks of the group."""
    local = slab.new_zeros((len(slab), 5))
    local[:, 0] = -torch.inf
    place, own = _found(work, slab, labels)
    if slab.shape[1]:
        local[:, 2] = torch.where(own, slab.gather(1, place).squeeze(1), 0)
        for block in _blocks(slab):
            z, into = slab[block], local[block]
            most = z.amax(1)
            into[:, 0] = most
            most = most.masked_fill(most.isneginf(), 0.0)  # -inf minus -inf is nan, not "nothing"
            shifted = torch.sub(z, most[:, None], out=memory.scratch[: len(z)])
            if entropy:
                powers = torch.exp(shifted, out=memory.other[: len(z)])
                into[:, 1] = powers.sum(1)
                into[:, 4] = powers.mul_(_finite(shifted)).sum(1)
            else:
                into[:, 1] = shifted.exp_().sum(1)
            if total:
                into[:, 3] = z.sum(1)
    return _together(_of_all(work, local))


def _of_all(work: SlabWork, local: Tensor) -> Tensor:
    """Numbers of every rank of the group, by one sum of which each rank fills its place."""
    if work.group is None:
        return local[None]
    found = local.new_zeros((work.group.size(), *local.shape))
    found[work.group.rank()] = local
    return all_summed(found, work.group)


def _together(found: Tensor) -> Facts:
    """Facts from every rank's largest logit, sum of exp(z - largest), label's logit, sum of z, and sum of
    exp(z - largest) (z - largest)."""
    most, powers, label, total, weighted = found.unbind(-1)
    top = most.amax(0)
    shift = _finite(most - top)  # of a rank without words, or whose words are all impossible: it adds nothing
    powers_all = (powers * shift.exp()).sum(0)
    weighted_all = ((weighted + shift * powers) * shift.exp()).sum(0)
    log = powers_all.log()
    return Facts(top + log, label.sum(0) - top - log, log - weighted_all / powers_all, total.sum(0))


def to_gradients(
    work: SlabWork, slab: Tensor, memory: SlabMemory, lse: Tensor, labels: Tensor, slopes: Slopes
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a slab and the gradients of the products that its logits came from, some rows at a time; they are gone
    with the next ones."""
    factor = work.scale / work.temperature
    place, own = _found(work, slab, labels)
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
    """Gradients of inputs, slab by slab; None for those that are not wanted. That of a head is summed in float32."""

    def __init__(self, inputs: Inputs, memory: SlabMemory, wanted: tuple[bool, bool, bool]) -> None:
        values, weight, bias = inputs
        self.inputs, self.memory = inputs, memory
        self.values = torch.zeros_like(values) if wanted[0] else None
        self.weight, self.bias = (
            torch.zeros_like(x, dtype=wide(x.dtype)) if x is not None and want else None
            for x, want in ((weight, wanted[1]), (bias, wanted[2]))
        )

    def add(self, work: SlabWork, span: slice, slab: Tensor, lse: Tensor, slopes: Slopes) -> None:
        """Those of one slab, whose memory is theirs from now on."""
        if self.inputs.weight is None:
            self._add_to_logits(work, span, slab, lse, slopes)
            return
        dtype = self.inputs.values.dtype
        narrow = slab.view(dtype)[:, : slab.shape[1]]  # a row's gradients lie where its logits lay
        for block, grad in to_gradients(work, slab, self.memory, lse, work.labels[span], slopes):
            if self.bias is not None:
                self.bias += grad.sum(0)
            narrow[block] = grad
        if self.values is not None:
            work.put(self.values, span, narrow @ self.inputs.weight)
        if self.weight is not None:
            self._add_to_weight(narrow, work.rows_of(self.inputs.values, span))

    def narrowed(self) -> tuple[Tensor | None, ...]:
        """Those of values, weight and bias in their dtypes; but sums over tokens may leave the range of float16."""
        del self.memory  # it is not needed while sums are copied
        found = [self.values]
        for x, like in zip((self.weight, self.bias), self.inputs[1:], strict=True):
            found.append(x if x is None or like is None or like.dtype == torch.float16 else x.to(like.dtype))
        return tuple(found)

    def _add_to_logits(self, work: SlabWork, span: slice, slab: Tensor, lse: Tensor, slopes: Slopes) -> None:
        assert self.values is not None
        for block, grad in to_gradients(work, slab, self.memory, lse, work.labels[span], slopes):
            work.put(self.values, _within(span, block), grad)

    def _add_to_weight(self, grads: Tensor, rows: Tensor) -> None:
        assert self.weight is not None
        if grads.dtype == self.weight.dtype:
            self.weight.addmm_(grads.t(), rows)
            return
        step = max(1, grads.shape[1] * len(grads) // (BLOCKS * max(rows.shape)))
        for start in range(0, grads.shape[1], step):
            words = slice(start, start + step)
            self.weight[words] += grads[:, words].t() @ rows


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def _shaped(work: SlabWork, z: Tensor) -> None:
    """Scale, soft cap and temperature, in place."""
    if work.soft_cap is not None:
        z.mul_(work.scale / work.soft_cap).tanh_().mul_(work.soft_cap / work.temperature)
    elif work.scale != work.temperature:
        z.mul_(work.scale / work.temperature)


def _found(work: SlabWork, slab: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where labels are among this rank's words, and whether they are there at all."""
    place = labels - work.first
    own = (place >= 0) & (place < slab.shape[1])
    return torch.where(own, place, 0)[:, None], own


def _finite(x: Tensor) -> Tensor:
    """What is impossible counts nothing: 0 * -inf would be nan. In place."""
    return x.clamp_(min=torch.finfo(x.dtype).min)


def _blocks(slab: Tensor) -> list[slice]:
    step = max(1, -(-len(slab) // BLOCKS))
    return [slice(start, min(start + step, len(slab))) for start in range(0, len(slab), step)]


def _within(span: slice, block: slice) -> slice:
    """Tokens of a block of a slab that has these tokens."""
    return slice(span.start + block.start, span.start + block.stop)


def _strips(slab: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Words whose logits are computed at once: all, where products need not be widened."""
    step = max(1, slab.shape[1] if slab.dtype == dtype else -(-slab.shape[1] // BLOCKS))
    return (slice(start, start + step) for start in range(0, slab.shape[1], step))


# -- Head --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The last layer of a language model: weight (words, features), bias (words), and what happens to their product.

    `scale` multiplies (Cohere's logit_scale, 1 / Granite's logits_scaling), `soft_cap` bounds (Gemma's
    final_logit_softcapping), `temperature` divides at the end. `group` is that of the ranks over which the words are
    cut, consecutive rows in rank order; None if every rank has all words.

    >>> Head(torch.zeros(11, 4), soft_cap=30.0)
    Head(11 words x 4 features, soft_cap=30.0)
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0
    group: Group = None

    def __post_init__(self) -> None:
        _check_weight(self.weight, self.bias)
        numbers = {"scale": self.scale, "soft_cap": self.soft_cap, "temperature": self.temperature}
        for name, value in numbers.items():
            if (name == "soft_cap") if value is None else (_is_plain(value) and (name == "scale" or value > 0)):
                continue
            other = ", or None for no cap" if name == "soft_cap" else ""
            kind = "a number" if name == "scale" else "a number above 0"
            raise BatchError(
                f"{name} = {shortened(value)} was given for a head. It is {kind}{other}, and no tensor: no gradient of"
                f" it is computed."
            )
        if self.group is not None:
            process_group(self.group, "Head")

    def __repr__(self) -> str:
        usual = {"scale": 1.0, "soft_cap": None, "temperature": 1.0}
        said = [f"{self.weight.shape[0]} words x {self.weight.shape[1]} features"]
        said += ["bias"] * (self.bias is not None)
        said += [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        if self.group is not None:
            said.append(f"cut over {process_group(self.group, 'Head').size()} ranks")
        return f"Head({', '.join(said)})"


def head_of(head: Any) -> Head:
    """A head as users give it: a `Head`, a weight, or an nn.Linear.

    >>> head_of(nn.Linear(4, 11))
    Head(11 words x 4 features, bias)
    """
    if isinstance(head, Head):
        return head
    if isinstance(head, Tensor):
        return Head(head)
    if not isinstance(head, nn.Linear):
        raise BatchError(
            f"head must be a Head, a weight of shape (words, features) or an nn.Linear, but {type(head).__name__} was"
            f" given. Head(weight, bias, scale=, soft_cap=) says what the last layer computes."
        )
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head) or any(hooks_of(head)):
        raise BatchError(
            f"head is {type(head).__name__} with a forward or with hooks of its own, which would not be called: only"
            f" its weight is used. Pass Head(weight, bias, ...) if that is all it computes (with adapters: of the"
            f" merged weight), else compute logits and leave head out."
        )
    return Head(head.weight, head.bias)


class HeadCall(NamedTuple):
    """A call made ready: inputs, what to do with them, and how many words there are."""

    inputs: Inputs
    work: SlabWork
    num_words: int


def call_of(values: Tensor, labels: Tensor, head: Head | None, ignore_index: int) -> HeadCall:
    """Hidden states (or logits, without a head) and flat labels as slabs want them; tokens without a label are left
    out."""
    weight, bias = (None, None) if head is None else (head.weight, head.bias)
    check_no_tangent(values=values, weight=weight, bias=bias)
    if head is not None:  # as nn.Linear under autocast
        values, weight = as_autocast(values), as_autocast(head.weight)
        bias = None if bias is None else as_autocast(bias)
        _check_fit(values, weight)
    known = labels_on_host(labels)
    kept = known != ignore_index
    places = None if bool(kept.all()) else to_device(kept.nonzero().squeeze(1), labels.device)
    real = labels.clone() if places is None else labels.index_select(0, places)
    local = values.shape[-1] if weight is None else len(weight)
    group = None if head is None or head.group is None else process_group(head.group, "Head")
    sizes = [local] if group is None else _sizes(local, labels, group)
    num_words, rank = sum(sizes), 0 if group is None else group.rank()
    check_range(known[kept], num_words, ignore_index)
    rows = rows_for(len(real), max(sizes), wide(values.dtype).itemsize)
    form = {} if head is None else {"scale": float(head.scale), "temperature": float(head.temperature)}
    form |= {} if head is None or head.soft_cap is None else {"soft_cap": float(head.soft_cap)}
    work = SlabWork(real, places, rows, group=group, first=sum(sizes[:rank]), **form)
    flat_values = values.reshape(labels.numel(), values.shape[-1])
    return HeadCall(Inputs(shared(flat_values, group), weight, bias), work, num_words)


def check_range(labels: Tensor, num_words: int, ignore_index: int) -> None:
    """Raises if a label is no word."""
    if labels.numel() and not bool(((labels >= 0) & (labels < num_words)).all()):
        raise BatchError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, but logits are for 0 to {num_words - 1}."
            f" Mark places without a label with ignore_index = {ignore_index}."
        )


def _sizes(local: int, labels: Tensor, group: dist.ProcessGroup) -> list[int]:
    """How many words every rank has; raises unless all ranks hold the same labels."""
    order = torch.arange(1, labels.numel() + 1, device=labels.device)
    mine = torch.stack((order.new_tensor(local), order.new_tensor(labels.numel()), ((labels + 211) * order).sum()))
    found = order.new_zeros((group.size(), 3))
    found[group.rank()] = mine
    sizes, tokens, sums = all_summed(found, group).t().tolist()
    if len(set(tokens)) > 1 or len(set(sums)) > 1:
        raise BatchError(
            f"the ranks of a head's group hold different words of the same tokens, but labels differ between them"
            f" (numbers of tokens: {tokens}). Head(group=) is for tensor parallelism; ranks that hold other parts of"
            f" the sequence go to group= of token_loss."
        )
    return sizes


# -- Gradients without double backward ---------------------------------------------------------------------------------


def differentiated_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward pass whose results raise when they are differentiated. PyTorch's once_differentiable asks only whether
    what came in has a graph, and lets go of that of the inputs: a penalty on gradients would be lost without a word."""

    @wraps(backward)
    def called(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        came_from = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
        return tuple(None if x is None else Once.apply(x, *came_from) for x in found)  # type: ignore[misc]

    return called


class Once(torch.autograd.Function):
    """A gradient with a graph that leads nowhere."""

    @staticmethod
    def forward(_ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        raise BatchError(
            "a gradient of token_logprobs, or of token_loss with head=, was differentiated again (create_graph=True)."
            " Second derivatives are not computed there. Compute logits, and leave head out of token_loss."
        )


# -- Hidden states that all ranks of a head's group hold ---------------------------------------------------------------


def shared(x: Tensor, group: Any) -> Tensor:
    """The same tensor, whose gradient is summed over the group: each rank has that of its own words."""
    if group is None or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if isinstance(group, SimulatedRank):
        return group.meet("a head", x, lambda parts: SharedHere.apply(*parts))  # type: ignore[arg-type]
    return Shared.apply(x, group)  # type: ignore[return-value]


class Shared(torch.autograd.Function):
    """Over a process group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].to(wide(grads[0].dtype), copy=True, memory_format=torch.contiguous_format)
        return all_summed(total, ctx.group).to(grads[0].dtype), None


class SharedHere(torch.autograd.Function):
    """Over simulated ranks, which have one graph: tensors of all of them in, tensors of all of them out."""

    @staticmethod
    def forward(_ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    @differentiated_once
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.stack(grads).sum(0, dtype=wide(grads[0].dtype))
        return tuple(total.to(grad.dtype) for grad in grads)


# -- Checks ------------------------------------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    return is_number(value) and not isinstance(value, Tensor)


def _check_weight(weight: Any, bias: Any) -> None:
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None and name == "bias":
            continue
        if not isinstance(value, Tensor):
            raise BatchError(f"a head's {name} must be a tensor, but {type(value).__name__} was given.")
        if isinstance(value, DTensor):
            raise BatchError(
                f"a head's {name} is a DTensor {value.placements}. Under FSDP2 take the loss within the forward of the"
                f" module that holds it, where parameters are whole, or pass {name}.full_tensor(). Under tensor"
                f" parallelism, cut along dim 0, pass {name}.to_local() and Head(..., group=mesh['tp'])."
            )
        if not value.is_floating_point():
            raise BatchError(
                f"a head's {name} has dtype {value.dtype}, but must be floating-point. Dequantize it first."
            )
    if weight.ndim != 2:
        raise BatchError(f"a head's weight has shape (words, features), but {tuple(weight.shape)} was given.")
    if bias is not None and (tuple(bias.shape), bias.dtype) != ((len(weight),), weight.dtype):
        raise BatchError(
            f"a head's bias has one number per word, here {len(weight)} of {weight.dtype} as its weight, but shape"
            f" {tuple(bias.shape)} of {bias.dtype} was given."
        )


def _check_fit(values: Tensor, weight: Tensor) -> None:
    if values.shape[-1] != weight.shape[1]:
        raise BatchError(
            f"hidden states of shape {tuple(values.shape)} do not fit a head of {weight.shape[0]} words x"
            f" {weight.shape[1]} features. With head= the first argument is what goes into the last layer, not logits."
        )
    if (values.dtype, values.device) != (weight.dtype, weight.device):
        raise BatchError(
            f"hidden states are {values.dtype} on {values.device}, and the head is {weight.dtype} on {weight.device}."
            f" Cast one of them, or call under torch.autocast, which casts both as it does for nn.Linear."
        )
