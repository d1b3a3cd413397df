"""Rotary embeddings whose frequencies depend on the largest position ("dynamic", "longrope"): it is that of the
sequence, not of a rank's part.

Transformers looks for it among the positions that it is given. So one more is given, the sequence's largest, and what
comes out for it is dropped again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longspan.integrations.huggingface.hooks.current import current
from longspan.integrations.huggingface.hooks.placed import has_hook
from longspan.training import BatchError


def moving(model: nn.Module) -> list[nn.Module]:
    """The model's rotary embeddings that depend on the largest position."""
    return [module for module in model.modules() if _is_moving(getattr(module, "rope_type", None))]


def _is_moving(kind: Any) -> bool:
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in kinds)


def watch_rotary(model: nn.Module) -> bool:
    """Whether there are any; from now on they are told the largest position of the sequence."""
    found = moving(model)
    for module in found:
        if not has_hook(module, _add_largest):
            module.register_forward_pre_hook(_add_largest, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_drop_largest)  # type: ignore[arg-type]
    return bool(found)


@torch.compiler.disable
def _add_largest(module: nn.Module, args: Any, kwargs: Any) -> Any:
    sequence = current()
    if sequence is None:
        return None
    ids = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    if not isinstance(ids, Tensor) or sequence.largest is None:
        raise BatchError(
            f"{type(module).__name__} depends on the largest position, and it was called without position_ids. Use a"
            f" fixed rope_type (default, linear, yarn, llama3)."
        )
    column = torch.as_tensor(sequence.largest, device=ids.device, dtype=ids.dtype).expand(*ids.shape[:-1], 1)
    more = torch.cat((ids, column), dim=-1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": more}
    return (args[0], more, *args[2:]), kwargs


@torch.compiler.disable
def _drop_largest(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
    if current() is None:
        return None
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(part[..., :-1, :] for part in output)
