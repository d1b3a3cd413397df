"""Private torch names, continued: what code asks that is traced by PyTorch's compiler, or called by its graphs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # type: ignore[import-not-found]

_OFF_IN_GRAPHS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in (
        *("FuncTorchDynamicLayerBackMode", "FuncTorchDynamicLayerFrontMode", "FuncTorchBatched", "FuncTorchVmapMode"),
        *("FuncTorchGradWrapper", "ADInplaceOrView", "Conjugate", "Negative", "ZeroTensor"),
    )
)


def _is_in_graph() -> bool:
    return torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.FuncTorchBatched)


def as_in_eager() -> AbstractContextManager[Any]:
    """Compiled graphs call operators with `torch.vmap` and PyTorch's count of changes in place switched off. Functions
    of users need both, so here they are as outside of graphs."""
    if not _is_in_graph():
        return nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _OFF_IN_GRAPHS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


_PLAIN = {"ADInplaceOrView", *(kind + device for kind in ("", "Autograd", "Autocast") for device in ("CPU", "CUDA"))}
"""Dispatch keys of tensors with data and no behaviour of their own."""
_known: dict[int, bool] = {}
"""Whether sets of keys, as numbers, have no others."""


def is_unobserved(tensors: Sequence[Tensor | None]) -> bool:
    """Whether PyTorch's dispatcher would do nothing with these tensors but differentiate and run: there is no mode, no
    `torch.func`, no profiler, no compiler and no graph of it, and every tensor has data and no behaviour of its own."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._are_functorch_transforms_active() or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return False
    if get_eval_frame_callback() is not None or _is_in_graph():
        return False
    return all(tensor is None or _is_plain(torch._C._dispatch_keys(tensor)) for tensor in tensors)


def _is_plain(keys: torch._C.DispatchKeySet) -> bool:
    number = keys.raw_repr()
    if number not in _known:
        names = repr(keys).removeprefix("DispatchKeySet(").removesuffix(")").split(", ")
        _known[number] = _PLAIN.issuperset(names)
    return _known[number]


def run_without_compiling(function: Any) -> None:
    """Keep a function that PyTorch calls for every operator from being compiled by itself; other functions that are
    compiled may still inline it."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def break_graph(why: str) -> None:
    """Ends the graph that is being traced; refused, with these words, where it must be whole."""
    torch._dynamo.graph_break(msg=why)


def _tracer() -> Any:
    """What traces the code that called; None where nothing does. `torch.compiler.is_compiling()` says no before 2.13 to
    functions that run while others are traced, as those below do."""
    compiler = sys.modules.get("torch._dynamo.symbolic_convert")  # loading it takes seconds
    try:
        return None if compiler is None else compiler.InstructionTranslator.current_tx()
    except AttributeError:
        return None


@torch.compiler.assume_constant_result
def higher_order_calls() -> int:
    """How many calls of the graph that is being traced take functions (an `autograd.Function`, `torch.cond`); 0 where
    none is traced. Torch-function modes do not see them."""
    tracer = _tracer()
    nodes = () if tracer is None else tracer.output.graph.nodes
    return sum(isinstance(node.target, torch._ops.HigherOrderOperator) for node in nodes)


@torch.compiler.assume_constant_result
def inside_of_call() -> bool:
    """Whether what is traced is a part that another call takes as its function, as checkpointing does."""
    tracer = _tracer()
    return tracer is not None and tracer.output.current_tracer.parent is not None


def whole_graph() -> AbstractContextManager[Any]:
    """What is traced inside must be one graph; what is not is refused by PyTorch, which says why."""
    return torch._dynamo.error_on_graph_break(True)
