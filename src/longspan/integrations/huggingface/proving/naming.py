"""Which module is the first that computes something else over ranks: every module's outputs and inputs, both ways.

Modules end in order, inner ones first. The first whose output differs is looked at: if what it was given differs too,
the difference was made by the code of a module around it, and the innermost of those that were given the same is named.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from longspan import layouts
from longspan.integrations.huggingface.proving.trial import Trial
from longspan.integrations.huggingface.rules import Rules

FAR = 1e-5


@dataclass(eq=False)
class SeenModules:
    """What went into modules and came out, by name, at the first call; names in the order in which modules ended."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)

    def attach(self, model: nn.Module) -> list[Any]:
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._given(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._left(name)))
        return handles

    def _given(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.inputs.setdefault(name, _tensors([*args, *(kwargs[key] for key in sorted(kwargs))]))

        return hook

    def _left(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            self.outputs.setdefault(name, _tensors([output]))

        return hook


def _tensors(values: Any) -> list[Tensor]:
    """Floating-point tensors among values, one level deep."""
    found: list[Tensor] = []
    for value in values:
        parts = (
            value if isinstance(value, tuple | list) else list(value.values()) if isinstance(value, dict) else [value]
        )
        found += [part.detach() for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
    return found


def first_module(trial: Trial, rules: Rules, name: str, world_size: int) -> str | None:
    """The name and class of the module, or None where all that can be compared is the same."""
    whole, parts = SeenModules(), [SeenModules() for _ in range(world_size)]
    handles = whole.attach(trial.model)
    try:
        trial.forward()
    finally:
        for handle in handles:
            handle.remove()
    with suppress(Exception):  # it may be the reason for asking: what was seen until then is compared
        trial.split(rules, name, world_size, lambda model, rank: parts[rank].attach(model))
    layout = getattr(layouts, name)(trial.length, world_size)
    modules = dict(trial.model.named_modules())
    for module in whole.outputs:
        if _differs(whole.outputs[module], [part.outputs.get(module) for part in parts], layout):
            while module and _differs(
                whole.inputs.get(module, []), [part.inputs.get(module) for part in parts], layout
            ):
                module = module.rpartition(".")[0]
            return f"{module or 'the model'} ({type(modules[module]).__name__})"
    return None


def _differs(whole: list[Tensor], parts: list[list[Tensor] | None], layout: Any) -> bool:
    if any(part is None or len(part) != len(whole) for part in parts):
        return False
    for number, truth in enumerate(whole):
        shards = [part[number] for part in parts if part is not None]
        dim = _token_dim(truth, shards, layout)
        if dim is None:
            continue
        error = (layout.unshard(shards, dim).double() - truth.double()).abs().max()
        if not error <= FAR * max(float(truth.abs().max()), 1e-30):
            return True
    return False


def _token_dim(truth: Tensor, shards: list[Tensor], layout: Any) -> int | None:
    for dim, size in enumerate(truth.shape):
        if size == layout.seq_len and all(
            shard.ndim == truth.ndim and shard.shape[dim] == layout.num_slots(rank) for rank, shard in enumerate(shards)
        ):
            return dim
    return None
