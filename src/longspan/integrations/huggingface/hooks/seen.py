"""Hooks on models that were given `longspan=`: they know which sequence is running, and every layer must have seen it.

A model that does not hand it down attends to each rank's own tokens, and nothing of ours is called. So the model is
asked itself, after every forward pass, in whatever loop it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.batches import LABELS, PACKED, check_arguments
from longspan.integrations.huggingface.hooks.current import LAST_FORWARD, current, enter, leave
from longspan.integrations.huggingface.hooks.losses import with_loss
from longspan.integrations.huggingface.hooks.placed import has_hook
from longspan.integrations.huggingface.rules import MASK, OWN
from longspan.integrations.huggingface.sequence import ShardedSequence
from longspan.training import BatchError


@lru_cache(maxsize=1024)
def takes(kind: type, name: str) -> bool:
    """Whether forward of these modules takes an argument of this name, among keywords at least."""
    return _accepts(kind.forward, name)


def _accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _accepts_sequence(module: nn.Module) -> bool:
    """Return whether the module's forward accepts `longspan=`.

    A module may have a forward of its own that is not its class's: `torch.compile(model)` is such a module, and the
    forward of its class, which is never called, takes no keywords.
    """
    own = vars(module).get("forward")
    return takes(type(module), NAME) if own is None else _accepts(own, NAME)


def listen_to_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Lets the sequence know which of these layers is running, so that what was not seen can be named."""
    for name in names:
        layer = model.get_submodule(name)
        if not has_hook(layer, _enter):
            layer.register_forward_pre_hook(partial(_enter, name), with_kwargs=True)  # type: ignore[arg-type]
            layer.register_forward_hook(_leave, with_kwargs=True, always_call=True)  # type: ignore[arg-type]


@torch.compiler.disable
def _enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME) or current()
    if isinstance(sequence, ShardedSequence):
        sequence.inside.append(name)


@torch.compiler.disable
def _leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME) or current()
    if isinstance(sequence, ShardedSequence) and sequence.inside:
        sequence.inside.pop()


def listen(*modules: Any) -> None:
    """Checks these modules' forward passes from now on. Several of one model: wrappers call one or another of them."""
    for module in modules:
        if isinstance(module, nn.Module) and not has_hook(module, _begin):
            module.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_check, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_end, always_call=True)  # type: ignore[arg-type]


@torch.compiler.disable
def _begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
    sequence = kwargs.get(NAME)
    running = sequence if sequence is not None else current()
    enter(running)
    LAST_FORWARD.checks_hooks = getattr(running, "checks_hooks", False)
    if getattr(running, "at_head", None) is not None and running.rules.loss == OWN and module is running.model():
        running.at_head.begin(kwargs)
    if not isinstance(sequence, ShardedSequence):
        return None
    if sequence.depth == 0:
        check_arguments(kwargs)
        _check_beside(kwargs, sequence)
        sequence.is_cut, sequence.is_joined = sequence.rules.body is None, False
        if sequence.at_head is not None:
            sequence.at_head.values = None  # of a forward pass that did not come to its end
    sequence.calls_before[id(module)] = sequence.calls
    sequence.depth += 1
    sequence.seen.clear()
    if sequence.rules.handed == MASK or not _accepts_sequence(module):
        return args, {name: value for name, value in kwargs.items() if name != NAME}
    return None


def _check_beside(given: Mapping[str, Any], sequence: ShardedSequence) -> None:
    """Refuses what `shard_inputs` reads out of whole sequences, if it was not given to it."""
    labels = LABELS if sequence.rules.joined is None else ()  # behind whole tokens they are of whole sequences, too
    for name in (*PACKED, *labels):
        if given.get(name) is not None and name not in sequence.arguments:
            raise BatchError(
                f"{name}= was given to the model beside the inputs that shard_inputs has made, and would be about this"
                f" rank's tokens alone. Put it, for whole sequences, into the batch that shard_inputs is given."
            )


@torch.compiler.disable
def _check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ARG001
    sequence = current()
    if not isinstance(sequence, ShardedSequence) or id(module) not in sequence.calls_before:
        return None
    sequence.check_seen(type(module).__name__, sequence.calls_before[id(module)])
    return with_loss(output, sequence) if sequence.depth == 1 else None


@torch.compiler.disable
def _end(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
    sequence = current()
    leave()
    if isinstance(sequence, ShardedSequence) and sequence.calls_before.pop(id(module), None) is not None:
        sequence.depth -= 1
