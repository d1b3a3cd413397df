"""The end of a language model without its logits: the head is given no token, and what logits are wanted for, the loss
or log-probabilities, is computed from the hidden states that reached it, some tokens at a time.

    hidden states -> [head: none of them] -> empty logits -> the model's own code, which caps or scales nothing
          |                                                           |
          +-> loss, log-probabilities ------------------------------> + -> the model's output

What the model does to logits afterwards is known by its configuration (`Rules.scale`, `Rules.soft_cap`), and was tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan._torch import hooks_of
from longspan.huggingface.masks import current
from longspan.huggingface.structure import OWN, Rules, has_hook, own_class
from longspan.training import BatchError, Head, token_logprobs, token_loss

LOSS, LOGITS, SCORES = "loss", "logits", "scores"
"""What is wanted of the model's end: the loss alone, logits (and the loss), or log-probabilities of labels."""
_LOSS_WORDS = ("ignore_index", "label_smoothing", "reduction", "weight")
_KNOWN_HOOKS = ("torch", "accelerate", "longspan")


class LogitsError(BatchError, AttributeError):
    """Logits were asked for that nobody has computed."""


class NoLogits:
    """Stands where logits would, and says why there are none."""

    def __getattr__(self, name: str) -> NoReturn:
        raise LogitsError(
            f"{name} of logits was asked for, but the loss was computed without them: for long sequences they are the"
            f" largest tensor of all. Pass shard_inputs(..., logits=True) to have this rank's logits as well."
        )

    def __getitem__(self, key: Any) -> NoReturn:
        self.__getattr__(f"[{key}]")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        NoLogits().__getattr__(getattr(func, "__name__", "a function"))

    def __repr__(self) -> str:
        return "<no logits: the loss was computed without them, shard_inputs(..., logits=True) has both>"


class AtHead:
    """What is to be computed where a model's head is, and what came of it. No dataclass: wrappers take those apart."""

    def __init__(self, scale: float, soft_cap: float | None, labels: Tensor, num_items: Any, temperature: Any) -> None:
        self.scale, self.soft_cap = scale, soft_cap
        self.labels: Any = labels
        self.num_items: Any = num_items
        self.temperature = temperature
        """Of log-probabilities, which are wanted where it is given; else the loss is."""
        self.is_on = True
        self.values: Any = None

    def begin(self, given: Mapping[str, Any]) -> None:
        """A model with a loss of its own is called: with labels and their number as they are now, which a loop may
        have changed or taken out. Without them, or with words that its loss may know, it is left to itself."""
        if self.temperature is not None:
            return
        shifted, count = given.get("shift_labels"), given.get("num_items_in_batch")
        self.is_on = given.get("labels") is not None and isinstance(shifted, Tensor) and count is not None
        self.is_on = self.is_on and not any(name in given for name in _LOSS_WORDS)
        if self.is_on:
            self.labels, self.num_items = shifted, torch.as_tensor(count)

    def compute(self, hidden: Tensor, module: nn.Linear) -> None:
        """From hidden states of this rank's tokens."""
        temperature = 1.0 if self.temperature is None else self.temperature
        head = Head(module.weight, module.bias, self.scale, self.soft_cap, temperature)
        labels = self.labels.to(hidden.device)
        if self.temperature is not None:
            self.values = token_logprobs(hidden, labels, head=head)
            return
        count = self.num_items.to(hidden.device)
        self.values = token_loss(hidden, labels, group=None, gradients="sum", num_tokens=count, head=head)

    def taken(self, logits: Tensor) -> Any:
        """What was computed; gradients pass by the logits, where FSDP waits for them."""
        if isinstance(self.values, Tensor):
            return _Taken.apply(self.values, logits)
        return type(self.values)(*(_Taken.apply(value, logits) for value in self.values))


def at_head(config: Any, rules: Rules, labels: Tensor, num_items: Any, temperature: Any) -> AtHead:
    """What is to be computed at the head of a model with this configuration."""
    cap = float(getattr(config, rules.soft_cap)) if rules.soft_cap else None
    return AtHead(scale_of(config, rules.scale), cap, labels, num_items, temperature)


def ended(output: Any, work: AtHead, is_own_loss: bool) -> Any:
    """The model's output with what was computed at its head instead of logits; None where that is still to be done."""
    if work.values is None and work.temperature is None:
        return None
    if (
        isinstance(output, tuple) and is_own_loss and work.temperature is None
    ):  # return_dict=False, with its loss inside
        work.values = None
        return tuple(NoLogits() if _is_empty(item) else item for item in output)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise BatchError(
            f"the loss or log-probabilities of tokens were asked for, but the model's {type(output).__name__} has no"
            f" logits. Leave out return_dict=False, and use a model with a head for tokens."
        )
    if work.values is None:  # the head was given all tokens
        found: Any = token_logprobs(logits / work.temperature, work.labels.to(logits.device))
    else:
        found = None if is_own_loss and work.temperature is None else work.taken(logits)
    work.values = None
    if work.temperature is not None:
        return replaced(output, logits=found)
    return replaced(output, logits=NoLogits(), **({} if is_own_loss else {"loss": found}))


def replaced(output: Any, **changes: Any) -> Any:
    """The model's output, with something else in it."""
    return type(output)(**{**output, **changes})


def _is_empty(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim == 3 and item.shape[1] == 0


def scale_of(config: Any, rule: str) -> float:
    """The number that logits are multiplied by: a value of the configuration, or one over it.

    >>> from types import SimpleNamespace
    >>> scale_of(SimpleNamespace(logits_scaling=8.0), "1 / logits_scaling"), scale_of(None, "")
    (0.125, 1.0)
    """
    if not rule:
        return 1.0
    value = float(getattr(config, rule.removeprefix("1 / ")))
    return 1.0 / value if rule.startswith("1 / ") else value


def why_logits(model: Any, rules: Rules) -> str:
    """Why this very model needs its logits, or "" where it does not. Its copy was tried; somebody may have changed the
    model's head or loss since."""
    if rules.head is None:
        return rules.head_reason or "that was not tried"
    head = model.get_submodule(rules.head)
    if own_class(head) is not nn.Linear or "forward" in vars(head):
        return f"{rules.head} is {own_class(head).__name__}, or has another forward"
    strange = [hook for kind in hooks_of(head) for hook in kind.values() if _package(hook) not in _KNOWN_HOOKS]
    if strange:
        return f"{rules.head} has a hook of {_package(strange[0])}"
    if rules.loss == OWN and not isinstance(vars(model).get("_loss_function", None), HeadLoss | None):
        return "the model was given another loss_function"
    return ""


def _package(hook: Any) -> str:
    hook = getattr(hook, "func", hook)
    return (getattr(hook, "__module__", None) or type(hook).__module__).split(".")[0]


def watch_head(model: Any, rules: Rules) -> None:
    """From now on the model's head may be given no tokens."""
    assert rules.head is not None
    head = model.get_submodule(rules.head)
    if has_hook(head, _before):
        return
    head.register_forward_pre_hook(_before, with_kwargs=True)  # behind FSDP's, which gathers the weight
    head.register_forward_hook(_after, prepend=True)  # before FSDP's, which lets it go
    if rules.loss == OWN and not isinstance(model.loss_function, HeadLoss):
        model.loss_function = HeadLoss(model.loss_function)


class HeadLoss:
    """The loss function of a model; of empty logits, it is what was computed where the head is."""

    def __init__(self, original: Any) -> None:
        self.original = original

    @torch.compiler.disable
    def __call__(self, logits: Any = None, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        work = _work()
        if work is None or work.values is None or not _is_empty(logits):
            return self.original(logits, labels, *args, **kwargs)
        return work.taken(logits)


def _work() -> AtHead | None:
    return getattr(current(), "at_head", None)


@torch.compiler.disable
def _before(module: Any, args: Any, kwargs: Any) -> Any:
    work = _work()
    if work is None or not work.is_on or len(args) != 1 or kwargs or args[0].shape[:2] != work.labels.shape:
        return None
    if isinstance(module.weight, DTensor):  # cut over tensor-parallel ranks: the head knows how, and is left to it
        return None
    work.compute(args[0], module)
    return (args[0][:, :0],), kwargs


@torch.compiler.disable
def _after(module: Any, args: Any, output: Any) -> Any:  # noqa: ARG001
    work = _work()
    if work is None or work.values is None or output.shape[1] != 0:
        return None
    values = work.values if isinstance(work.values, tuple) else (work.values,)
    return _Empty.apply(output.detach(), *values)


class _Empty(torch.autograd.Function):
    """Empty logits that came from the values: a gradient of theirs, of no number, comes by here before the values'."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *values: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        return None, *(torch.zeros_like(value) for value in ctx.saved_tensors)


class _Taken(torch.autograd.Function):
    """The values, whose gradient does not go on before one of the empty logits has."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])
