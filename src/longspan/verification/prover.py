"""Run a model on one device and over simulated ranks, and find the first module whose output differs.

`prove_model` and the proof of Hugging Face models are both built on it. Every simulated rank has a copy of
the model with the same parameters, and all ranks share one autograd graph: one backward pass of the sum of their losses
gives the sum of their gradients. Two ranks whose shares of a loss w * x are w * 2 and w * 3 give w the gradient 5, as
one device does for both tokens.

Modules end in order, inner ones first. The first module whose output differs is examined: if its inputs differ too, the
difference comes from the code of an enclosing module, and the innermost of those with equal inputs is named. Example: a
block of `norm`, attention by a function, and `out`. The output of `out` differs first, its input differs too, the
block's input does not; so the block is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longspan.layouts import Layout
from longspan.run.simulated import SimulatedRank, simulate

T = TypeVar("T")
TOLERANCE = 1e-5
"""Outputs of modules differ if they are farther apart than this, relative to the largest entry."""


@contextmanager
def isolate_torch_state(*devices: str) -> Iterator[None]:
    """Run with gradients, without autocast on these device types, and with random state that is restored."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def perturb_parameters(model: nn.Module, rounding: float, seed: int) -> Iterator[None]:
    """Move every parameter by up to one rounding inside, to measure the effect of rounding on this model."""
    draw = torch.Generator().manual_seed(seed)
    saved = [p.detach().clone() for p in model.parameters()]
    try:
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point() or p.is_complex():  # quantized numbers have no rounding
                    values = torch.view_as_real(p) if p.is_complex() else p
                    values.copy_(_with_noise(values, rounding, draw))
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(model.parameters(), saved, strict=True):
                p.copy_(value)


@contextmanager
def perturb_gradients(model: nn.Module, rounding: float, seed: int) -> Iterator[None]:
    """Move gradients of module outputs by up to one rounding inside.

    A gradient that is 0 by cancellation, as that of a key's bias, shows the effect of rounding then.
    """
    draw = torch.Generator().manual_seed(seed)

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in floating_tensors([output]):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: _with_noise(grad, rounding, draw).to(grad.dtype))

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(after).remove)
        yield


def _with_noise(x: Tensor, rounding: float, draw: torch.Generator) -> Tensor:
    """Return numbers in float64, each off by up to one rounding."""
    noise = torch.rand(x.shape, generator=draw, dtype=torch.float64) * 2 - 1
    return x.double() * (1 + rounding * noise.to(x.device))


def copy_in_float64(
    model: nn.Module, batch: dict[str, Any], run: Callable[[nn.Module, dict[str, Any]], Any]
) -> tuple[nn.Module, dict[str, Any], str]:
    """Return a float64 copy of model and batch if it can be created and run; else both unchanged, and a note."""
    try:
        copied = copy.deepcopy(model).double()
        doubled = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in batch.items()
        }
        run(copied, doubled)
    except Exception as error:  # the model's own code may raise anything
        return model, batch, f"no float64 run ({error_line(error)}); the truth is in the model's dtype"
    return copied, doubled, ""


def error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy with modules and buffers of its own, and the same parameters.

    >>> model = nn.BatchNorm1d(2)
    >>> other = shared_copy(model)
    >>> other.weight is model.weight, other.running_mean is model.running_mean
    (True, False)
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def run_on_ranks(
    template: nn.Module,
    layout: Layout,
    step: Callable[[Any, SimulatedRank], T],
    traces: Sequence[ModuleTrace] = (),
) -> list[T]:
    """Run `step(model, rank)` on every simulated rank of the layout and return the results by rank.

    `template` itself never runs, since state that modules keep from one run to the next must not be copied.
    """
    copies = [shared_copy(template) for _ in range(layout.world_size)]
    for trace, model in zip(traces, copies, strict=False):
        trace.attach(model)
    return simulate(layout.world_size, lambda rank: step(copies[rank.rank()], rank))


def gradients(
    model: nn.Module, total: Tensor | None, retain_graph: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the gradients of all parameters, 0 for those that `total` does not reach, and the names of these."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads: Sequence[Tensor | None] = [None] * len(named)
    if total is not None and named:
        grads = torch.autograd.grad(total, list(named.values()), retain_graph=retain_graph, allow_unused=True)
    filled: dict[str, Tensor] = {}
    for (name, p), grad in zip(named.items(), grads, strict=True):
        filled[name] = (torch.zeros_like(p) if grad is None else grad).detach()
    return filled, [name for name, grad in zip(named, grads, strict=True) if grad is None]


# -- The first module that differs -------------------------------------------------------------------------------------


class ModuleTrace:
    """Inputs and outputs of modules at their first call, by name, in the order in which modules ended."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}

    def attach(self, model: nn.Module) -> list[Any]:
        """Install hooks and return their handles."""
        handles: list[Any] = []
        for name, module in model.named_modules():

            def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                self.inputs.setdefault(name, _detached([*args, *(kwargs[key] for key in sorted(kwargs))]))

            def after(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
                self.outputs.setdefault(name, _detached([output]))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        return handles


def _detached(values: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in floating_tensors(values)]


def floating_tensors(values: Any) -> list[Tensor]:
    """Return the floating-point tensors among values and inside tuples, lists and dicts one level deep."""
    tensors: list[Tensor] = []
    for value in values:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else [value]
        tensors += [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
    return tensors


def find_first_different(
    model: nn.Module,
    template: nn.Module,
    layout: Layout,
    whole: Callable[[], Any],
    local: Callable[[Any, SimulatedRank], Any],
    tolerance: float = TOLERANCE,
) -> str | None:
    """Return name and class of the first module that computes something else over ranks; None if none can be named.

    `whole` runs `model` on one device, with the state of its earlier runs; `local` runs copies of `template`.
    """
    reference, parts = ModuleTrace(), [ModuleTrace() for _ in range(layout.world_size)]
    handles = reference.attach(model)
    try:
        whole()
    finally:
        for handle in handles:
            handle.remove()
    with suppress(Exception):  # modules that ended before an error are still compared
        run_on_ranks(template, layout, local, parts)

    def differs(expected: list[Tensor], by_rank: list[list[Tensor] | None]) -> bool:
        if any(tensors is None or len(tensors) != len(expected) for tensors in by_rank):
            return False
        for number, right in enumerate(expected):
            shards = [tensors[number] for tensors in by_rank if tensors is not None]
            dim = _token_dim(right, shards, layout)
            if dim is None:
                continue
            error = (layout.unshard(shards, dim).double() - right.double()).abs().max()
            if not error <= tolerance * max(float(right.abs().max()), 1e-30):
                return True
        return False

    for name, outputs in reference.outputs.items():
        if differs(outputs, [part.outputs.get(name) for part in parts]):
            while name and differs(reference.inputs.get(name, []), [part.inputs.get(name) for part in parts]):
                name = name.rpartition(".")[0]
            return describe_module(model, name)
    return None


def describe_module(model: nn.Module, name: str) -> str:
    """Return a module's name and class.

    >>> describe_module(nn.Sequential(nn.SiLU()), "0"), describe_module(nn.SiLU(), "")
    ('0 (SiLU)', 'the model (SiLU)')
    """
    return f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"


def _token_dim(right: Tensor, shards: list[Tensor], layout: Layout) -> int | None:
    for dim, size in enumerate(right.shape):
        if size == layout.seq_len and all(
            shard.ndim == right.ndim and shard.shape[dim] == layout.num_slots(rank) for rank, shard in enumerate(shards)
        ):
            return dim
    return None
