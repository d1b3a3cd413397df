"""Log-probabilities of labels, and their gradients, without logits of all tokens at once.

Logits of some tokens at a time are computed, used and forgotten: a slab, tokens x words of this rank, in float32
(float64 for float64). Beside it there is never more than a fifth of its size: hidden states in bfloat16 are multiplied
by some words of the head at a time and the products widened into the slab, and gradients of logits take the slab's own
place, in the hidden states' dtype, row by row.

Of a token the softmax needs five numbers, and they add up over ranks that hold different words. With z of two words
(0, log 3) on one rank and (0,) on another, label 1:

    rank 0: max log 3, sum 4/3, label's logit log 3     rank 1: max 0, sum 1, no label: 0
    both:   max log 3, sum 4/3 + 1/3 = 5/3, so logsumexp = log 3 + log 5/3 = log 5 and p(label) = 3/5
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.execution.tile import wide
from longspan.training.groups import all_summed

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


def _blocks(slab: Tensor) -> Iterator[slice]:
    step = max(1, -(-len(slab) // BLOCKS))
    return (slice(start, min(start + step, len(slab))) for start in range(0, len(slab), step))


def _within(span: slice, block: slice) -> slice:
    """Tokens of a block of a slab that has these tokens."""
    return slice(span.start + block.start, span.start + block.stop)


def _strips(slab: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Words whose logits are computed at once: all, where products need not be widened."""
    step = max(1, slab.shape[1] if slab.dtype == dtype else -(-slab.shape[1] // BLOCKS))
    return (slice(start, start + step) for start in range(0, slab.shape[1], step))
