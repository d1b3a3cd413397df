"""The end of a language model without its logits: the head receives no token, and the loss or the log-probabilities are
computed from the hidden states that reached it, some tokens at a time.

    hidden states -> [head: none of them] -> empty logits -> the model's own code, which caps or scales nothing
          |                                                           |
          +-> loss, log-probabilities ------------------------------> + -> the model's output

What the model does to logits afterwards follows from its configuration (`Rules.scale`, `Rules.soft_cap`), and was
compared when the model was checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan._torch import hooks_of
from longspan.huggingface.masks import current
from longspan.huggingface.rules import Rules
from longspan.huggingface.structure import has_hook, own_class
from longspan.training import BatchError, Head, token_logprobs, token_loss

OutputKind = Literal["loss", "logits", "scores"]
"""What the model must return: the loss alone, logits (and the loss), or log-probabilities of labels."""
_LOSS_WORDS = frozenset(("ignore_index", "label_smoothing", "reduction", "weight"))
_KNOWN_HOOKS = ("torch", "accelerate", "longspan")


class LogitsError(BatchError, AttributeError):
    """Raised by a use of logits that were not computed."""


class NoLogits:
    """Takes the place of logits that were not computed, and raises on every use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise LogitsError(
            f"{name} of logits is not available, because the loss was computed without them: for long sequences they"
            f" are the largest tensor of all. Pass shard_inputs(..., logits=True) to have this rank's logits as well."
        )

    def __getitem__(self, key: Any) -> NoReturn:
        self.__getattr__(f"[{key}]")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        NoLogits().__getattr__(getattr(func, "__name__", "a function"))

    def __repr__(self) -> str:
        return "<no logits: the loss was computed without them, shard_inputs(..., logits=True) has both>"


class HeadTask:
    """The computation at a model's head, and its result: log-probabilities if there is a temperature, else the loss.

    Not a dataclass, because wrappers of modules take those apart to find tensors.
    """

    def __init__(self, config: Any, rules: Rules, labels: Tensor, num_items: Any, temperature: Any) -> None:
        self.scale = scale_of(config, rules.scale) if rules.scale else 1.0
        self.soft_cap = float(getattr(config, rules.soft_cap)) if rules.soft_cap else None
        self.labels: Any = labels
        self.num_items: Any = num_items
        self.temperature = temperature
        self.is_on = True
        self.values: Any = None

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Take labels and their number from the call of a model with a loss of its own, since a loop may have changed
        or removed them. Without them, or with options of the loss, the model computes its logits."""
        if self.temperature is not None:
            return
        labels, count = arguments.get("shift_labels"), arguments.get("num_items_in_batch")
        self.is_on = arguments.get("labels") is not None and isinstance(labels, Tensor) and count is not None
        self.is_on = self.is_on and _LOSS_WORDS.isdisjoint(arguments)
        if self.is_on:
            self.labels, self.num_items = labels, torch.as_tensor(count)

    def compute(self, hidden: Tensor, module: nn.Linear) -> None:
        """Compute the result from hidden states of this rank's tokens."""
        temperature = 1.0 if self.temperature is None else self.temperature
        head = Head(module.weight, module.bias, self.scale, self.soft_cap, temperature)
        labels = self.labels.to(hidden.device)
        if self.temperature is not None:
            self.values = token_logprobs(hidden, labels, head=head)
            return
        count = self.num_items.to(hidden.device)
        self.values = token_loss(hidden, labels, group=None, gradients="sum", num_tokens=count, head=head)

    def result(self, logits: Tensor) -> Any:
        """Return the result, with gradients that pass by the logits, where FSDP waits for them."""
        if isinstance(self.values, Tensor):
            return _AfterLogits.apply(self.values, logits)
        return type(self.values)(*(_AfterLogits.apply(value, logits) for value in self.values))

    def finish(self, output: Any, is_own_loss: bool) -> Any:
        """Return the model's output with the result instead of logits, or None if the model computed its own."""
        scores = self.temperature is not None
        if self.values is None and not scores:
            return None
        if isinstance(output, tuple) and is_own_loss and not scores:  # return_dict=False, with the loss inside
            self.values = None
            return tuple(NoLogits() if _is_empty(item) else item for item in output)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise BatchError(
                f"the model's output must have logits, for its loss or log-probabilities of tokens, but got"
                f" {type(output).__name__}. Leave out return_dict=False, and use a model with a head for tokens."
            )
        if scores:  # the head may have received all tokens
            values = (
                token_logprobs(logits / self.temperature, self.labels.to(logits.device))
                if self.values is None
                else self.result(logits)
            )
            changes: dict[str, Any] = {"logits": values}
        else:
            changes = {"logits": NoLogits()} if is_own_loss else {"logits": NoLogits(), "loss": self.result(logits)}
        self.values = None
        return replace_values(output, **changes)


def replace_values(output: Any, **changes: Any) -> Any:
    """Return the model's output with other values in it."""
    return type(output)(**{**output, **changes})


def _is_empty(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim == 3 and item.shape[1] == 0


def scale_of(config: Any, rule: str) -> float:
    """Return the factor of logits: a value of the configuration, or one over it.

    >>> from types import SimpleNamespace
    >>> scale_of(SimpleNamespace(logits_scaling=8.0), "1 / logits_scaling"), scale_of(None, "")
    (0.125, 1.0)
    """
    if not rule:
        return 1.0
    value = float(getattr(config, rule.removeprefix("1 / ")))
    return 1.0 / value if rule.startswith("1 / ") else value


def why_logits(model: Any, rules: Rules) -> str:
    """Return why this model needs its logits, or "" if it does not: its head or loss may differ from the copy that was
    checked."""
    if rules.head is None:
        return rules.head_reason or "it was not tried without them"
    head = model.get_submodule(rules.head)
    if own_class(head) is not nn.Linear or "forward" in vars(head):
        return f"{rules.head} is {own_class(head).__name__}, or has another forward"
    for kind in hooks_of(head):
        for hook in kind.values():
            hook = getattr(hook, "func", hook)
            package = (getattr(hook, "__module__", None) or type(hook).__module__).split(".")[0]
            if package not in _KNOWN_HOOKS:
                return f"{rules.head} has a hook of {package}"
    if rules.loss == "own" and not isinstance(vars(model).get("_loss_function", None), HeadLoss | None):
        return "the model has another loss_function"
    return ""


def watch_head(model: Any, rules: Rules) -> None:
    """Register the hooks that compute a `HeadTask` instead of logits."""
    assert rules.head is not None
    head = model.get_submodule(rules.head)
    if has_hook(head, _before):
        return
    head.register_forward_pre_hook(_before, with_kwargs=True)  # after FSDP's, which gathers the weight
    head.register_forward_hook(_after, prepend=True)  # before FSDP's, which frees it
    if rules.loss == "own" and not isinstance(model.loss_function, HeadLoss):
        model.loss_function = HeadLoss(model.loss_function)


class HeadLoss:
    """The loss function of a model; for empty logits, it returns the result of the `HeadTask`."""

    def __init__(self, original: Any) -> None:
        self.original = original

    @torch.compiler.disable
    def __call__(self, logits: Any = None, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        task = getattr(current(), "at_head", None)
        if task is None or task.values is None or not _is_empty(logits):
            return self.original(logits, labels, *args, **kwargs)
        return task.result(logits)


@torch.compiler.disable
def _before(module: Any, args: Any, kwargs: Any) -> Any:
    task = getattr(current(), "at_head", None)
    if task is None or not task.is_on or len(args) != 1 or kwargs or args[0].shape[:2] != task.labels.shape:
        return None
    if isinstance(module.weight, DTensor):  # a tensor-parallel head computes its own logits
        return None
    task.compute(args[0], module)
    return (args[0][:, :0],), kwargs


@torch.compiler.disable
def _after(module: Any, args: Any, output: Any) -> Any:  # noqa: ARG001
    task = getattr(current(), "at_head", None)
    if task is None or task.values is None or output.shape[1] != 0:
        return None
    values = task.values if isinstance(task.values, tuple) else (task.values,)
    return _EmptyLogits.apply(output.detach(), *values)


class _EmptyLogits(torch.autograd.Function):
    """Empty logits that depend on the values: backward of the empty logits runs before that of the values."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *values: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        return None, *map(torch.zeros_like, ctx.saved_tensors)


class _AfterLogits(torch.autograd.Function):
    """The values, whose backward waits for that of the empty logits."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])
