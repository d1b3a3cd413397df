"""All private torch names that Longspan uses, each behind a small typed function. No other file uses one.

Fused attention operators, process groups and stores, flex attention, and the state of compiler and dispatcher.

Shapes: B batch, H query heads, G key/value heads, Q query rows, K key rows, T rows of many slices packed one after
another, D head dim. Dropout is always off, so the random states that the GPU operators carry are placeholders.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # type: ignore[import-not-found]
from torch._functorch.predispatch import lazy_load_decompositions
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every operator
from torch.utils._pytree import tree_leaves as tree_leaves  # of nested arguments
from torch.utils._pytree import tree_map as tree_map  # a function applied to every leaf of nested arguments

from longspan._compile import assume_constant
from longspan.versions import minor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# -- Operators, versions, groups and stores ----------------------------------------------------------------------------


_aten = torch.ops.aten
num_users = torch._C._storage_Use_Count  # of a storage, which is named by its address
children_of = operator.attrgetter("_modules")  # of a module, a dict
hooks_of = operator.attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)  # of modules
global_hooks = operator.attrgetter(
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
)  # of `torch.nn.modules.module`, for all modules, in the order of `hooks_of`
destroy = operator.methodcaller("_destroy")  # of a library of operators, with all that it has registered
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")


@contextmanager
def recording() -> Iterator[None]:
    """Enable autograd inside an operator, where PyTorch disables it. The recorded graph must be used inside, too."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which operators run without autograd."""
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def version(tensor: Tensor) -> int:
    """Return the version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def loses_derivative(*tensors: Any) -> bool:
    """Return whether a tensor has a derivative that only PyTorch's own operators carry on: one in forward mode, or the
    gradient of a tensor that `torch.vmap` maps, which inside of it does not require one."""
    forward_mode = torch.autograd.forward_ad
    if forward_mode._current_level < 0 and not torch._C._are_functorch_transforms_active():  # type: ignore[attr-defined]
        return False
    given = [t for t in tensors if isinstance(t, Tensor)]
    is_mapped = torch._C._functorch.is_batchedtensor  # type: ignore[attr-defined]
    return any(forward_mode.unpack_dual(t).tangent is not None or is_mapped(t) for t in given)


def rocm() -> str | None:
    """Return the ROCm version that PyTorch is built for, or None."""
    return torch.version.hip


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None without a GPU, as with fake tensors."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


CUDAGRAPH_UNSAFE = (torch.Tag.cudagraph_unsafe,)  # operators with this tag are excluded from CUDA graphs


cpu_flash = _aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, dropout, causal, *, attn_mask, scale) -> (out, lse); causal is top-left aligned.

Traps, all silent: an empty input kills the process; a last dim that is not contiguous, or a bias of another dtype with
float64, gives wrong numbers; a row that sees nothing gets lse 0.0.
"""


def cpu_flash_backward(
    dout_BHQD: Tensor, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, out_BHQD: Tensor, lse_BHQ: Tensor,
    bias: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of the CPU flash operator, dk and dv with the key/value heads.

    A bool bias is accepted and gives wrong gradients.
    """
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout_BHQD, q_BHQD, k_BGKD, v_BGKD, out_BHQD, lse_BHQ, 0.0, causal, attn_mask=bias, scale=scale
    )


def _no_random(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return seed and offset for operators that require them although dropout is off."""
    zero = torch.zeros((), dtype=torch.int64, device=like.device)
    return zero, zero


def efficient(
    q_BHQD: Tensor, k_BHKD: Tensor, v_BHKE: Tensor, bias_BHQK: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of memory-efficient attention; causal is top-left aligned, lse rows are rounded up to 32."""
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q_BHQD, k_BHKD, v_BHKE, bias_BHQK, True, 0.0, causal, scale=scale
    )
    return out, lse


def efficient_backward(
    dout_BHQE: Tensor, q_BHQD: Tensor, k_BHKD: Tensor, v_BHKE: Tensor, out_BHQE: Tensor, lse_BHR: Tensor,
    bias_BHQK: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of memory-efficient attention; R is Q rounded up to 32."""
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout_BHQE, q_BHQD, k_BHKD, v_BHKE, bias_BHQK, out_BHQE, lse_BHR, *_no_random(q_BHQD), 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def cudnn(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, bias_BHQK: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse_BHQ1) of cuDNN attention; causal is top-left aligned."""
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        q_BHQD, k_BGKD, v_BGKE, bias_BHQK, True, 0.0, causal, False, scale=scale
    )
    return out, lse


def cudnn_backward(
    dout_BHQE: Tensor, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, out_BHQE: Tensor, lse_BHQ1: Tensor,
    bias_BHQK: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of cuDNN attention."""
    return _aten._scaled_dot_product_cudnn_attention_backward(
        dout_BHQE, q_BHQD, k_BGKD, v_BGKE, out_BHQE, lse_BHQ1, *_no_random(q_BHQD), bias_BHQK, None, None,
        q_BHQD.shape[2], k_BGKD.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


SPLITS = (2, 12)
"""From this version on PyTorch passes `num_splits` to FA3 and FA4."""
_ONE_SPLIT = {"num_splits": 1} if minor(torch.__version__) >= SPLITS else {}
"""Left to themselves, FA3 and FA4 divide the keys of long tiles, and keep the parts in float32: many GB of them."""


def flash(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, longest: tuple[int, int],
    window: tuple[int, int], scale: float, run: Callable[..., Any] = _aten._flash_attention_forward,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of CUDA flash attention.

    Dense without `starts`: (B, Q, H, D) in, lse (B, H, Q). With `starts` (int32, one more than the number of slices):
    packed rows of many slices, (T, H, D) in, lse (H, T). `window` = (left, right) keys next to the diagonal, which ends
    in the bottom-right corner; -1 is unbounded. `run` is PyTorch's operator, or a package with its signature.
    """
    out, lse, *_ = run(
        q, k, v, starts_q, starts_k, *longest, 0.0, window == (-1, 0), False,
        scale=scale, window_size_left=window[0], window_size_right=window[1], **_ONE_SPLIT,
    )  # fmt: skip
    return out, lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts_q: Tensor | None,
    starts_k: Tensor | None, longest: tuple[int, int], window: tuple[int, int], scale: float,
    run: Callable[..., Any] = _aten._flash_attention_backward,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of CUDA flash attention, layouts as in `flash`."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    return run(
        dout, q, k, v, out, lse, starts_q, starts_k, *longest, 0.0, window == (-1, 0), state, unused,
        scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip


def cudnn_packed(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, starts_q: Tensor | None, starts_k: Tensor | None,
    longest: tuple[int, int], window: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out_THD, lse_HT) of cuDNN attention over packed slices: of all pairs, or causal from the top-left corner."""
    out, lse, *_ = _aten._cudnn_attention_forward(
        q_THD, k_THD, v_THD, None, starts_q, starts_k, *longest, True, 0.0, window == (-1, 0), False, scale=scale
    )
    return out, lse


def cudnn_packed_backward(
    dout_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, out_THD: Tensor, lse_HT: Tensor,
    starts_q: Tensor | None, starts_k: Tensor | None, longest: tuple[int, int], window: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of cuDNN attention over packed slices."""
    return _aten._cudnn_attention_backward(
        dout_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, *_no_random(q_THD), None, starts_q, starts_k, *longest, 0.0,
        window == (-1, 0), scale=scale,
    )  # fmt: skip


CUDNN = 91800  # from this version on PyTorch itself runs packed slices on cuDNN


@cache
def flash_package(name: str) -> tuple[Callable[..., Any], Callable[..., Any]] | str:
    """Return forward and backward of an installed FA3, FA4 or cuDNN, or why there are none. Those of FA3 and FA4 have
    the signatures of PyTorch's operators, those of cuDNN that of `flash`.

    PyTorch before 2.14 builds a graph of cuDNN in every packed call, which takes 40 ms (pytorch#191576). That of 2.11
    calls FA4 without windows, and FA3 without `num_splits`.
    `torch.nn.attention.activate_flash_attention_impl` would replace the operators of the whole process by these: calls
    of `scaled_dot_product_attention` with dropout, or on another kind of GPU, would raise then.
    """
    if name == "cuDNN":
        arguments = _aten._cudnn_attention_forward.default._schema.arguments
        installed = torch.backends.cudnn.version()
        if "seqused_k" not in (argument.name for argument in arguments):
            return f"it needs PyTorch 2.14 or newer, and this is {torch.__version__}"
        if installed is None or installed < CUDNN:
            return f"it needs cuDNN 9.18 or newer, and this PyTorch has {installed or 'none'}"
        return cudnn_packed, cudnn_packed_backward
    if minor(torch.__version__) < SPLITS:
        return f"{name} needs PyTorch 2.12 or newer, and this is {torch.__version__}"
    try:
        if name == "FA3":
            from torch.nn.attention import _fa3

            _fa3._fa3_import_module("flash_attn_interface")
            return _fa3._fa3_flash_attention_forward_impl_default, _fa3._fa3_flash_attention_backward_impl
        from torch.nn.attention import _fa4

        _fa4._fa4_import_module("flash_attn.cute.interface")
        if (why := _fa4_mismatch(metadata.version("flash-attn-4"))) is not None:
            return why
        _fa4._FA4_MODULE_PATH = "flash_attn.cute.interface"
        return _fa4._fa4_flash_attention_forward_impl, _fa4._fa4_flash_attention_backward_impl
    except Exception as error:  # packages of kernels fail in many ways: a missing library, another version of PyTorch
        return f"{name} cannot be loaded ({type(error).__name__}: {str(error)[:120]})"


def _fa4_mismatch(release: str) -> str | None:
    """Return why PyTorch's calls do not fit this release of flash-attn-4, or None. From 4.0.0b19 on its forward returns
    more than two values, which PyTorch takes from 2.14 on. The calls of PyTorch 2.12 to 2.15 were compared with the
    sources of 4.0.0b5 to b36."""
    beta = re.match(r"4\.0\.0b(\d+)", release)
    number = int(beta[1]) if beta else sys.maxsize
    if number >= 5 and (number < 19 or minor(torch.__version__) >= (2, 14)):
        return None
    pairs = "2.12 and 2.13 run 4.0.0b5 to b18, 2.14 and newer 4.0.0b5 and newer"
    return f"flash-attn-4 {release} does not fit PyTorch {torch.__version__}: {pairs}"


def group_named(name: str) -> ProcessGroup:
    """Return the process group with PyTorch's name: operators accept names, not groups."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def default_store() -> Any:
    """Return the store of the default process group."""
    return distributed_c10d._get_default_store()  # type: ignore[attr-defined]


def attempt_store_of(timeout: timedelta) -> Any:
    """Return a client of the launcher's store, or a new store, with a prefix for this restart."""
    env = os.environ
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    store = dist.TCPStore(host, port, size, not shared and rank == 0, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    return distributed_c10d.PrefixStore(f"attempt/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh's axes as one axis of this name. Looking it up in the mesh by name would warn."""
    return mesh._flatten(name)


# -- Flex attention ----------------------------------------------------------------------------------------------------
# Parts of the compiler are imported at first use, which takes two seconds.

_FLEX = {
    "BACKEND": "TRITON",  # others return lse in another base, or have no gradient of lse
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
FLEX_BLOCK = 128  # rows and columns of a block
FLEX_BLOCK_TENSORS = 8
"""Counts and indices of partial and full blocks, by rows and by columns, in the order of BlockMask.as_tuple()."""


def is_sliced(block_mask: Any) -> bool:
    """Return whether a BlockMask is a slice of another, which has a function that raises in place of its mask_mod."""
    return getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error"


def indexing() -> AbstractContextManager[object]:
    """Make `table[i]` with a zero-dim tensor `i` a late lookup, whose gradient is accumulated by index."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def trace_function(function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> GraphModule:
    """Trace a function of zero-dim tensors to a graph. Raise if it depends on a value."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return _remove_unused_nodes(make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments))


def _remove_unused_nodes(graph: GraphModule) -> GraphModule:
    """Remove unused nodes: each becomes code of a kernel."""
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def trace_gradient(function: Callable[..., Tensor], arguments: Sequence[Tensor], num_index: int) -> GraphModule:
    """(score, indices, gradient of the result, buffers) -> gradients of score, indices (None) and buffers."""
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph

    score, index, buffers = arguments[0], arguments[1 : 1 + num_index], arguments[1 + num_index :]
    with recording():
        example = (score.detach().requires_grad_(), *index)
        return _remove_unused_nodes(create_fw_bw_graph(function, example, tuple(buffers))[1])  # type: ignore[arg-type]


def adds_by_index(gradient: GraphModule) -> tuple[bool | None, ...]:
    """Return for each buffer whether its gradient is accumulated by index, which is all that flex attention supports;
    None if it has no gradient."""
    results: Any = gradient.graph.output_node().args[0]
    wanted = torch.ops.flex_lib.zeros_and_scatter.default
    return tuple(None if result is None else result.target is wanted for result in results[5:])


def flex_graph(score: GraphModule, mask: GraphModule, scale: float, num_score: int, num_mask: int) -> GraphModule:
    """(q, k, v, block tensors, buffers of score, buffers of mask) -> (out, lse to the base 2), as one operator."""
    graph = Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    blocks, score_buffers, mask_buffers = _buffers(graph, num_score, num_mask)
    functions = graph.get_attr("score"), (*blocks, graph.get_attr("mask"))
    arguments: Any = (q, k, v, *functions, scale, dict(_FLEX), score_buffers, mask_buffers)
    call = graph.call_function(torch.ops.higher_order.flex_attention, arguments)
    graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in range(2)))
    return GraphModule({"score": score, "mask": mask}, graph)


def flex_backward_graph(
    score: GraphModule, gradient: GraphModule, mask: GraphModule, scale: float, num_score: int, num_mask: int
) -> GraphModule:
    """(q, k, v, out, lse to the base 2, dout, dlse, ...) -> (dq, dk, dv, gradients of the buffers of score or None).

    The operator takes `rowsum(dout * out) - dlse / log(2)` as the row sums; lse is that of all keys, wherever they are.
    """
    graph = Graph()
    tensors = [graph.placeholder(name) for name in ("q", "k", "v", "out", "lse", "dout", "dlse")]
    blocks, score_buffers, mask_buffers = _buffers(graph, num_score, num_mask)
    functions = graph.get_attr("score"), graph.get_attr("gradient"), (*blocks, graph.get_attr("mask"))
    arguments: Any = (*tensors, *functions, scale, dict(_FLEX), score_buffers, mask_buffers)
    call = graph.call_function(torch.ops.higher_order.flex_attention_backward, arguments)
    dq, dk, dv, buffers = (graph.call_function(operator.getitem, (call, i)) for i in range(4))
    rest = [
        None if kind is None else graph.call_function(operator.getitem, (buffers, i))
        for i, kind in enumerate(adds_by_index(gradient))
    ]
    graph.output((dq, dk, dv, *rest))
    return GraphModule({"score": score, "gradient": gradient, "mask": mask}, graph)


def _buffers(graph: Graph, num_score: int, num_mask: int) -> tuple[tuple[Any, ...], ...]:
    blocks = [graph.placeholder(f"blocks{i}") for i in range(FLEX_BLOCK_TENSORS)]
    score = tuple(graph.placeholder(f"score{i}") for i in range(num_score))
    mask = tuple(graph.placeholder(f"mask{i}") for i in range(num_mask))
    # The two lengths are unused; the four that are None are for another backend, since 2.13.
    others = (None,) * (4 if minor(torch.__version__) >= (2, 13) else 0)
    return (0, 0, *blocks, *others, FLEX_BLOCK, FLEX_BLOCK), score, mask


def compile_graph(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile the graph for inputs of exactly these shapes."""
    import torch._inductor

    return torch._inductor.compile(graph, list(inputs))  # type: ignore[return-value]


def context_parallel_names() -> dict[str, Any]:
    """Return PyTorch's names for context parallelism, and its operator that gathers keys and values."""
    from torch.distributed.tensor.experimental import _attention
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    names = {name: getattr(_attention, name) for name in _attention.__all__}
    return {**names, "flex_cp_allgather": flex_cp_allgather}


def cp_options() -> Any:
    """Return PyTorch's options of context parallelism: `enable_load_balance` and `rotate_method`."""
    from torch.distributed.tensor.experimental._attention import _cp_options

    return _cp_options


def functions_named(names: Sequence[str]) -> dict[Any, str]:
    """Return the functions, methods and operators of PyTorch with these names, as torch-function modes see them."""
    import torch.nn.attention.varlen  # registers operators

    places: list[Any] = [torch, Tensor, torch.nn.functional, torch.autograd, torch.special]
    places += [torch._C._nn, torch._C._special, torch._C._VariableFunctions, torch.ops.higher_order]  # type: ignore[attr-defined]
    functions: dict[Any, str] = {}
    for name in names:
        functions |= {function: name for place in places if callable(function := getattr(place, name, None))}
        for packet in (getattr(space, name, None) for space in (_aten, torch.ops.torch_attn)):
            if packet is not None:
                functions |= dict.fromkeys(forms_of(packet), name)
    return functions


def forms_of(packet: Any) -> list[Any]:
    """Return an operator by its name, and all of its overloads."""
    return [packet, *(getattr(packet, which) for which in packet.overloads())]


def function_modes() -> list[Any]:
    """Return the active torch-function modes, innermost last. Threads of autograd have those of backward's caller.

    The compiler takes them off while it traces, and keeps its own list.
    """
    from torch.overrides import _get_current_function_mode_stack

    tracer = _tracer()
    if tracer is not None:
        return [mode.value for mode in tracer.symbolic_torch_function_state.mode_stack]
    return list(_get_current_function_mode_stack())


# -- Compiled code: state of the compiler and the dispatcher -----------------------------------------------------------


_OFF_IN_GRAPHS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in (
        *("FuncTorchDynamicLayerBackMode", "FuncTorchDynamicLayerFrontMode", "FuncTorchBatched", "FuncTorchVmapMode"),
        *("FuncTorchGradWrapper", "ADInplaceOrView", "Conjugate", "Negative", "ZeroTensor"),
    )
)


def as_in_eager() -> AbstractContextManager[Any]:
    """Enable `torch.vmap` and version counters, which compiled graphs disable around operators but functions of users
    need."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if not excluded.has(torch._C.DispatchKey.FuncTorchBatched):
        return nullcontext()
    for key in _OFF_IN_GRAPHS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


_PLAIN = {"ADInplaceOrView", *(kind + device for kind in ("", "Autograd", "Autocast") for device in ("CPU", "CUDA"))}
"""Dispatch keys of plain tensors."""
_known: dict[int, bool] = {}
"""Whether a set of keys, as a number, has only these."""


def is_unobserved(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether PyTorch's dispatcher would only differentiate and run an operator on these tensors: all are plain,
    and no mode, `torch.func` transform, profiler, compiler or compiled graph is active."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._are_functorch_transforms_active() or is_profiling():
        return False
    if get_eval_frame_callback() is not None:
        return False
    if torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.FuncTorchBatched):  # inside a graph
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        keys = torch._C._dispatch_keys(tensor)
        number = keys.raw_repr()
        if number not in _known:
            names = repr(keys).removeprefix("DispatchKeySet(").removesuffix(")").split(", ")
            _known[number] = _PLAIN.issuperset(names)
        if not _known[number]:
            return False
    return True


def map_pairs(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Call a function of tensors without dims on tensors that broadcast: `torch.vmap` over every dim.

    All have the same number of dims. `torch.vmap` itself takes 0.1 ms of host time for each.

    >>> q = torch.arange(4)
    >>> map_pairs(lambda q, kv: torch.stack((q >= kv, kv == 1)).any(0), q[:, None], q[None]).int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    functorch, shape = torch._C._functorch, torch.broadcast_shapes(*(x.shape for x in arguments))  # type: ignore[attr-defined]
    mapped = [[dim for dim, size in enumerate(shape) if x.shape[dim] == size] for x in arguments]
    tensors = [x.reshape([shape[dim] for dim in dims]) for x, dims in zip(arguments, mapped, strict=True)]
    levels: list[int] = []
    lazy_load_decompositions()
    try:
        for size in shape:
            levels.append(functorch._vmap_increment_nesting(size, "error"))
        for i, dims in enumerate(mapped):
            for dim in dims:
                tensors[i] = functorch._add_batch_dim(tensors[i], 0, levels[dim])
        result = function(*tensors)
        for size in reversed(shape):
            result = functorch._remove_batch_dim(result, levels[-1], size, 0)
            functorch._vmap_decrement_nesting()
            levels.pop()
        return result
    finally:
        for _ in levels:
            functorch._vmap_decrement_nesting()


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor. The module takes half a second to load, and without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


@cache
def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 by instructions of its own; read in torch 2.13."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def vmap_level(tensor: Tensor | None = None) -> int:
    """Return the level of the `torch.vmap` that maps a tensor, 0 if none does; without a tensor, the innermost one."""
    functorch = torch._C._functorch  # type: ignore[attr-defined]
    if tensor is None:
        return functorch.maybe_current_level() or 0
    return functorch.maybe_get_level(tensor) if functorch.is_batchedtensor(tensor) else 0


def unmapped(tensor: Tensor) -> Tensor:
    """Return the tensor that `torch.vmap` maps as this one."""
    return torch._C._functorch.get_unwrapped(tensor)  # type: ignore[attr-defined]


def fake_mode_of(tensor: Tensor) -> Any:
    """Return the mode of a fake tensor, if it does not mix with tensors that have contents; else None."""
    mode = getattr(tensor, "fake_mode", None)
    return None if mode is None or mode.allow_non_fake_inputs else mode


def run_without_compiling(function: Any) -> None:
    """Exclude a function from compilation on its own. Other compiled functions may still inline it."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def break_graph(why: str) -> None:
    """Break the graph that is being traced; raises with this message under fullgraph=True."""
    torch._dynamo.graph_break(msg=why)


def _tracer() -> Any:
    """Return the active Dynamo tracer, or None. Before 2.13 `torch.compiler.is_compiling()` is False in functions that
    run during tracing, as those below do."""
    compiler = sys.modules.get("torch._dynamo.symbolic_convert")  # loading it takes seconds
    try:
        return None if compiler is None else compiler.InstructionTranslator.current_tx()
    except AttributeError:
        return None


@assume_constant
def higher_order_calls() -> int:
    """Count higher-order calls (`autograd.Function`, `torch.cond`) of the graph that is being traced; 0 without one.
    Torch-function modes do not see them."""
    tracer = _tracer()
    nodes = () if tracer is None else tracer.output.graph.nodes
    return sum(isinstance(node.target, torch._ops.HigherOrderOperator) for node in nodes)


@assume_constant
def inside_of_call() -> bool:
    """Return whether a function argument of a higher-order call is being traced, as in checkpointing."""
    tracer = _tracer()
    return tracer is not None and tracer.output.current_tracer.parent is not None


def whole_graph() -> AbstractContextManager[Any]:
    """Make a graph break inside the context an error."""
    return torch._dynamo.error_on_graph_break(True)
