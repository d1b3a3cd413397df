"""Hooks on models that were given `longspan=`: every attention layer must have seen it.

A model that does not hand it down attends to each rank's own tokens, and nothing of ours is called. So the model is
asked itself, after every forward pass, in whatever loop it runs.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.sequence import ShardedSequence

_LISTENING: WeakSet[nn.Module] = WeakSet()


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


@torch.compiler.disable
def _check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME)
    if isinstance(sequence, ShardedSequence):
        sequence.check_seen(type(module).__name__, sequence.calls_before.pop(id(module), 0))
