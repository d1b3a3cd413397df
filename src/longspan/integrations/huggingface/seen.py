"""Hooks on models that were given `longspan=`: every attention layer must have seen it.

A model that does not hand it down attends to each rank's own tokens, and nothing of ours is called. So the model is
asked itself, after every forward pass, in whatever loop it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.sequence import ShardedSequence

_LISTENING: WeakSet[nn.Module] = WeakSet()


def listen_to_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Lets the sequence know which of these layers is running, so that what was not seen can be named."""
    for name in names:
        layer = model.get_submodule(name)
        if layer not in _LISTENING:
            layer.register_forward_pre_hook(partial(_enter, name), with_kwargs=True)  # type: ignore[arg-type]
            layer.register_forward_hook(_leave, with_kwargs=True, always_call=True)  # type: ignore[arg-type]
            _LISTENING.add(layer)


@torch.compiler.disable
def _enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME)
    if isinstance(sequence, ShardedSequence):
        sequence.inside.append(name)


@torch.compiler.disable
def _leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME)
    if isinstance(sequence, ShardedSequence) and sequence.inside:
        sequence.inside.pop()


def listen(*modules: Any) -> None:
    """Checks these modules' forward passes from now on. Several of one model: wrappers call one or another of them."""
    for module in modules:
        if isinstance(module, nn.Module) and module not in _LISTENING:
            module.register_forward_pre_hook(_begin, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_check, with_kwargs=True)  # type: ignore[arg-type]
            _LISTENING.add(module)


@torch.compiler.disable
def _begin(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME)
    if isinstance(sequence, ShardedSequence):
        sequence.calls_before[id(module)] = sequence.calls
        sequence.seen.clear()


@torch.compiler.disable
def _check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME)
    if isinstance(sequence, ShardedSequence):
        sequence.check_seen(type(module).__name__, sequence.calls_before.pop(id(module), 0))
