"""The last layer of a language model as a value, so that losses can be taken without logits of all tokens.

    logits = cap(scale * (hidden W^T + b)) / temperature,  cap(x) = soft_cap * tanh(x / soft_cap)

With a group the rows of W and b, the words, are cut over its ranks in rank order, in pieces of any size, as tensor
parallelism does. All of its ranks hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.execution._torch import hooks_of
from longspan.execution.handed import Group
from longspan.execution.inputs import as_autocast, check_no_tangent, is_number
from longspan.execution.simulated import SimulatedRank
from longspan.execution.tile import wide
from longspan.span import shortened
from longspan.training.groups import BatchError, all_summed, process_group
from longspan.training.host_labels import labels_on_host, to_device
from longspan.training.slabs import Inputs, SlabWork, rows_for


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


# -- gradients that are not differentiated again -----------------------------------------------------------------------


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


# -- hidden states that all ranks of a head's group hold ---------------------------------------------------------------


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


# -- checks ------------------------------------------------------------------------------------------------------------


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
