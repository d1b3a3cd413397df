"""Compare two runs of a model, whole and over ranks: copies, rounding, and the first module that differs.

Modules end in order, inner ones first. The first module whose output differs is examined: if its inputs differ too, the
difference was made by the code of a module around it, and the innermost of those with equal inputs is named. Example: a
block of `norm`, attention by a function, and `out`. The output of `out` differs first, its input differs too, the
block's input does not; so the block is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longspan.layouts import Layout

FAR = 1e-5
"""Outputs differ where they are farther apart than this, of the largest entry."""


@contextmanager
def jittered(model: nn.Module, narrow: float, number: int) -> Iterator[None]:
    """Every parameter is off by up to one rounding inside, so that it shows what rounding does to this model."""
    draw = torch.Generator().manual_seed(number)
    saved = [p.detach().clone() for p in model.parameters()]
    try:
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.rand(p.shape, generator=draw, dtype=torch.float64) * 2 - 1
                p.copy_(p.double() * (1 + narrow * noise.to(p.device)))
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(model.parameters(), saved, strict=True):
                p.copy_(value)


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy with modules and buffers of its own, and the same parameters.

    >>> model = nn.BatchNorm1d(2)
    >>> other = shared_copy(model)
    >>> other.weight is model.weight, other.running_mean is model.running_mean
    (True, False)
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


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


def first_different(whole: SeenModules, parts: Sequence[SeenModules], layout: Layout, far: float = FAR) -> str | None:
    """The name of the first module that computes something else over ranks, "" for the model itself; None where all
    that can be compared is the same."""
    for module in whole.outputs:
        if _differs(whole.outputs[module], [part.outputs.get(module) for part in parts], layout, far):
            while module and _differs(
                whole.inputs.get(module, []), [part.inputs.get(module) for part in parts], layout, far
            ):
                module = module.rpartition(".")[0]
            return module
    return None


def titled(model: nn.Module, module: str) -> str:
    """A module's name and class.

    >>> titled(nn.Sequential(nn.SiLU()), "0"), titled(nn.SiLU(), "")
    ('0 (SiLU)', 'the model (SiLU)')
    """
    return f"{module or 'the model'} ({type(model.get_submodule(module)).__name__})"


def _differs(whole: list[Tensor], parts: list[list[Tensor] | None], layout: Layout, far: float) -> bool:
    if any(part is None or len(part) != len(whole) for part in parts):
        return False
    for number, truth in enumerate(whole):
        shards = [part[number] for part in parts if part is not None]
        dim = _token_dim(truth, shards, layout)
        if dim is None:
            continue
        error = (layout.unshard(shards, dim).double() - truth.double()).abs().max()
        if not error <= far * max(float(truth.abs().max()), 1e-30):
            return True
    return False


def _token_dim(truth: Tensor, shards: list[Tensor], layout: Layout) -> int | None:
    for dim, size in enumerate(truth.shape):
        if size == layout.seq_len and all(
            shard.ndim == truth.ndim and shard.shape[dim] == layout.num_slots(rank) for rank, shard in enumerate(shards)
        ):
            return dim
    return None
