"""Routes: how calls of PyTorch's attention reach Longspan while a context or a wrapped module is active.

A route is a mesh, a layout and optionally a mask. A torch-function mode passes it the calls of PyTorch's attention.
Modes belong to threads, so two threads may use two meshes. PyTorch's `flex_attention` is a Python function, which modes
do not see: while a route is active in any thread, its code is replaced, and checks for a route of the calling thread.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.overrides import TorchFunctionMode

from longspan import _torch
from longspan._torch import cp_options, function_modes, run_without_compiling
from longspan.api import attention
from longspan.api import flex_attention as flex_of_shards
from longspan.api import plan as build_plan
from longspan.errors import KernelError, LayoutError, PlanError
from longspan.kernels import Features, choose_kernel
from longspan.layouts import Layout
from longspan.layouts.layout import other_tokens
from longspan.masks import Mask, causal, from_mask_mod, full
from longspan.masks.mask import MaskKey
from longspan.planning.plan import Plan
from longspan.run import ops
from longspan.run.flex import block_mask, check_lengths, mask_of_block_mask, match_memory_order
from longspan.spans import Ints
from longspan.torch_api.balancers import (
    Balancer,
    Inferred,
    balancer_of,
    carried_layout,
    known_length,
    layout_of_shards,
    layout_record,
    row_order,
    slots,
)
from longspan.validate import as_autocast

# -- BlockMasks of one rank, as PyTorch's context parallelism shards them ----------------------------------------------


def block_mask_length(whole: BlockMask) -> int:
    """Return the length of the sequence that a BlockMask is for."""
    queries, keys = whole.seq_lengths
    if queries != keys:
        raise PlanError(
            f"a BlockMask must be for one sequence, with as many queries as keys, but got {queries} queries and {keys}"
            f" keys. Create it for the whole sequence, before it is sharded."
        )
    return queries


def shard_block_mask(
    mask: Mask,
    layout: Layout,
    order: Ints | None,
    rank: int,
    device: torch.device | str,
    block_size: int | tuple[int, int],
) -> BlockMask:
    """Return the BlockMask of this rank's queries and of all ranks' keys, in the order in which shards are gathered.

    `longspan_shard` of the result holds what attention over ranks needs: the mask in global positions, the layout, and
    the order of each batch row, if rows differ.
    """
    if not isinstance(block_size, int):
        if len(set(block_size)) != 1:
            raise PlanError(
                f"a BlockMask must have blocks of as many queries as keys to be sharded, but got {tuple(block_size)}."
                f" Create it with BLOCK_SIZE={max(block_size)}."
            )
        block_size = block_size[0]
    places = mask if order is None else rearrange_mask(mask, order)
    local = block_mask(places, layout, rank, kv="gathered", block_size=block_size, device=device)
    local.longspan_shard = mask, layout, order  # type: ignore[attr-defined]
    return local


def rearrange_mask(mask: Mask, order: Ints) -> Mask:
    """Return the mask over places, where place p of batch row b holds token `order[b, p]`."""
    tokens, mask_mod = torch.as_tensor(order), mask.to_mask_mod(order.shape[1])

    def rearranged(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row = tokens.to(q_idx.device)[b]
        return mask_mod(b, h, row[q_idx], row[kv_idx])

    heads = None if mask.num_heads == 1 else mask.num_heads
    return from_mask_mod(rearranged, order.shape[1], rows=len(order), heads=heads, name=f"rearranged {mask.name}")


def rearrange_score(score_mod: Any, order: Ints) -> Any:
    """Return the score function over places, where place p of batch row b holds token `order[b, p]`."""
    tokens = torch.as_tensor(order)

    def rearranged(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row = tokens.to(q_idx.device)[b]
        return score_mod(score, b, h, row[q_idx], row[kv_idx])

    return rearranged


# -- Routes ------------------------------------------------------------------------------------------------------------

SEQ_DIM = 2
ROTATIONS = {"allgather": ("ALL_GATHER", "all_gather"), "alltoall": ("ALL_TO_ALL", "ring")}
"""By the argument of `set_rotate_method`: PyTorch's name of the method, and the scheme."""


class Rotation:
    """How keys and values travel. A choice of the main thread is kept in PyTorch's `_cp_options` and holds for all
    threads that did not choose; one of another thread holds in that thread, so that it cannot come between two calls of
    the main thread on one rank and after them on another."""

    def __init__(self) -> None:
        self.scheme: str | None = None
        self.of_thread = threading.local()

    def choose(self, method: str) -> Callable[[], None]:
        """Set the method, and return a function that restores the one before."""
        options, (name, scheme) = cp_options(), ROTATIONS[method]
        if threading.current_thread() is not threading.main_thread():
            restore = partial(setattr, self.of_thread, "scheme", getattr(self.of_thread, "scheme", None))
            self.of_thread.scheme = scheme
            return restore
        before = self.scheme, options.rotate_method
        self.scheme, options.rotate_method = scheme, getattr(type(options.rotate_method), name)

        def restore_all() -> None:
            self.scheme, options.rotate_method = before

        return restore_all

    def get(self) -> str:
        """Return the scheme. PyTorch's default, all-gather, counts as a choice only if `set_rotate_method` made it."""
        if of_thread := getattr(self.of_thread, "scheme", None):
            return of_thread
        name = cp_options().rotate_method.name
        chosen = next(scheme for method, scheme in ROTATIONS.values() if method == name)
        return chosen if self.scheme == chosen or chosen == "ring" else "auto"


rotation = Rotation()


class Route:
    """Attention over the shards of one sequence on one mesh axis."""

    def __init__(
        self,
        mesh: DeviceMesh,
        balancer: Balancer,
        mask: Mask | None = None,
        seq_len: int | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.mesh, self.balancer, self.mask = check_mesh(mesh), balancer, check_mask(mask)
        self.seq_len = known_length(balancer, mask, seq_len)
        self.layout = layout
        if layout is None and self.seq_len is not None and not isinstance(balancer, Inferred):
            self.layout = balancer.layout(self.seq_len, mesh.size())
        self.order = None if self.layout is None else row_order(balancer, self.layout.seq_len, mesh.size())
        """The order of tokens in each batch row, if rows differ; see `balancers.row_order`."""
        self._rearranged: dict[MaskKey, Mask] = {}
        self._rearranged_scores: dict[int, Any] = {}
        self.scheme = rotation.get()
        self.calls: Counter[str] = Counter()
        self.buffers: set[int] = set()
        """Tensors that the context sharded."""
        self.results = False
        """Whether anything but a buffer was differentiated or gathered inside."""
        self.planned = False
        """Whether attention was called with a plan, which needs no route."""

    @property
    def local_len(self) -> int:
        """The number of tokens of this rank; 0 if it is unknown or there is one rank."""
        layout = self.layout
        if layout is None and self.seq_len is not None:
            layout = self.balancer.layout(self.seq_len, self.mesh.size())
        if layout is None or layout.world_size == 1:
            return 0
        return layout.num_slots(self.mesh.get_local_rank())

    def layout_of(self, query: Tensor) -> Layout:
        """Return the layout. If length or balancer are unknown, the first call gathers lengths from all ranks."""
        local_len = _local(query).shape[SEQ_DIM]
        if self.layout is None:
            lengths = gather_ints(self.mesh, local_len, query.device)
            self.layout = self.layout_of_shard(query, SEQ_DIM, lengths)
        expected = self.layout.num_slots(self.mesh.get_local_rank())
        if local_len != expected:
            raise LayoutError(
                f"query must have {expected} tokens on rank {self.mesh.get_local_rank()} of {self.layout}, but got"
                f" {local_len}. Shard inputs as the context shards its buffers, or pass the load_balancer= and"
                f" seq_len= by which they were sharded."
            )
        if self.order is None:
            layout_record(self.mesh).add(self.layout)
        return self.layout

    def layout_of_shard(self, tensor: Tensor, dim: int, lengths: list[int]) -> Layout:
        """Return the layout of a tensor with these lengths over the ranks, as far as this route knows it."""
        if isinstance(self.balancer, Inferred):
            return self.balancer.of_shard(tensor, dim, lengths, self.seq_len)
        return layout_of_shards(self.balancer, lengths, self.seq_len)

    def plan(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Plan:
        """Build the plan for shards of these shapes, under `mask` and the mask of the route."""
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            if tensor.is_nested or tensor.ndim != 4:
                raise PlanError(
                    f"{name} must be (batch, heads, tokens, features), but it is"
                    f" {'nested' if tensor.is_nested else f'of shape {tuple(tensor.shape)}'}. Reshape it; packed"
                    f" documents are a mask: mask=longspan.masks.documents(lengths)."
                )
        if q.shape[2] != k.shape[2]:
            raise PlanError(
                f"there are {q.shape[2]} queries and {k.shape[2]} keys on this rank, but over ranks both are shards of"
                f" one sequence. Call cross attention outside the context."
            )
        layout = self.layout_of(q)
        both = [m for m in (self.mask, mask) if m is not None]
        combined = full() if not both else both[0] if len(both) == 1 else both[0] & both[1]
        if self.order is not None:
            key = MaskKey(combined)
            if key not in self._rearranged:
                self._rearranged[key] = rearrange_mask(combined, self.order)
            combined = self._rearranged[key]
        return build_plan(
            combined, layout, q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3], v_head_dim=v.shape[3],
            batch=q.shape[0], dtype=q.dtype, scheme=self.scheme if rotation.get() == "auto" else rotation.get(),
            group=self.mesh,
        )  # fmt: skip

    def count(self, kind: str) -> None:
        """Count a call in all active routes: wrapped modules check that there was one."""
        self.calls[kind] += 1
        for route in routes():
            if route is not self:
                route.calls[kind] += 1

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """`torch.nn.functional.scaled_dot_product_attention` of shards."""
        if attn_mask is not None:
            raise PlanError(
                f"attn_mask must be None, but got attn_mask of shape {tuple(attn_mask.shape)}: it is about the rows of"
                f" this rank, but keys of all ranks are seen. Say what may attend to what in global positions:"
                f" context_parallel(..., mask=) with a mask of longspan.masks, or longspan.attention with a plan."
            )
        if dropout_p:
            raise PlanError(
                f"dropout_p must be 0.0, but got dropout_p = {dropout_p}: the random state of each rank would decide,"
                f" and no other number of ranks could repeat it. Call longspan.attention(..., dropout={dropout_p},"
                f" seed=...), which drops by global positions, or pass 0.0."
            )
        query, key, value = (as_autocast(t) for t in (query, key, value))
        check_heads(query, key, enable_gqa)
        plan = self.plan(query, key, value, causal() if is_causal else None)
        self.count("sdpa")
        kernel = _kernel(query, key, value, not plan.mask.is_structured)
        out = attention(mark_query(query), key, value, plan, group=self.mesh, scale=scale, kernel=kernel)
        return match_memory_order(query, out)

    def flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
        captured_grads: str = "sum",
    ) -> Any:
        """`torch.nn.attention.flex_attention.flex_attention` of shards; None if `key` and `value` were gathered, so
        that attention of this rank alone is meant."""
        check_heads(query, key, enable_gqa)
        shard: tuple[Mask, Layout, Ints | None] | None = getattr(block_mask, "longspan_shard", None)
        if shard is not None:
            self._follow_block_mask(query, shard[1], shard[2])
        if isinstance(block_mask, BlockMask) and self._are_gathered(query, key, block_mask):
            if score_mod is not None or self.mask is not None:
                raise PlanError(
                    f"`key` must be a shard if there is a score_mod, which gets global positions, or a mask of the"
                    f" context, but got all {key.shape[SEQ_DIM]} tokens. Pass shards of key and value, and a block_mask"
                    f" of the whole sequence."
                )
            self.count("flex")
            return None
        plan = self.plan(query, key, value, self._mask_of(block_mask, query) if shard is None else shard[0])
        self.count("flex")
        if score_mod is not None and self.order is not None:
            number = id(score_mod)  # the rearranged function keeps it alive
            if number not in self._rearranged_scores:
                self._rearranged_scores[number] = rearrange_score(score_mod, self.order)
            score_mod = self._rearranged_scores[number]
        return flex_of_shards(
            mark_query(query), key, value, score_mod, None, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux, plan=plan, group=self.mesh, captured_grads=captured_grads,
        )  # fmt: skip

    def _follow_block_mask(self, query: Tensor, layout: Layout, order: Ints | None) -> None:
        """Check that a sharded BlockMask is for the layout of the queries. If that layout is to be inferred, it is the
        BlockMask's, unless the queries carry another."""
        known = carried_layout(query, SEQ_DIM, slots(layout))
        if self.layout is None and isinstance(self.balancer, Inferred) and known is None:
            self.layout, self.order = layout, order
            return
        expected = known or self.layout_of(query)
        expected_order = None if known is not None else self.order
        if (
            (expected.seq_len, expected.world_size) != (layout.seq_len, layout.world_size)
            or other_tokens(expected, layout)
            or (order is None) != (expected_order is None)
            or (order is not None and expected_order is not None and not np.array_equal(order, expected_order))
        ):
            raise LayoutError(
                f"`block_mask` must be sharded like query, by {expected}, but it was sharded by {layout}. Shard both by"
                f" one load_balancer."
            )

    def _are_gathered(self, query: Tensor, key: Tensor, block_mask: BlockMask) -> bool:
        """Return whether queries are a shard, and keys and the columns of `block_mask` the whole sequence."""
        rows, columns = query.shape[SEQ_DIM], key.shape[SEQ_DIM]
        if rows == columns or tuple(block_mask.seq_lengths) != (rows, columns):
            return False
        return self.layout_of(query).seq_len == columns

    def _mask_of(self, block_mask: Any, query: Tensor) -> Mask | None:
        """Return the mask that `block_mask` means, in global positions."""
        if block_mask is None or isinstance(block_mask, Mask):
            return block_mask
        if not isinstance(block_mask, BlockMask):
            raise PlanError(
                f"`block_mask` must be a BlockMask of PyTorch or a mask of longspan.masks, but got"
                f" {type(block_mask).__name__}."
            )
        layout = self.layout_of(query)
        check_lengths(block_mask, (layout.seq_len, layout.seq_len), "block_mask", PlanError)
        return mask_of_block_mask(block_mask, batch=query.shape[0], heads=query.shape[1])


def check_mesh(mesh: Any) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        kind = f"a mesh of axes {mesh.mesh_dim_names}" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise PlanError(f"`mesh` must be a mesh of one axis, but got {kind}. Pass one, as in mesh['cp'].")
    return mesh


def check_mask(mask: Any) -> Mask | None:
    if mask is not None and not isinstance(mask, Mask):
        raise PlanError(
            f"`mask` must be a mask of longspan.masks, in global positions, but got {type(mask).__name__}. Pass a"
            f" BlockMask to torch_api.flex_attention(..., block_mask=)."
        )
    return mask


def check_heads(q: Tensor, k: Tensor, enable_gqa: bool) -> None:
    if not enable_gqa and q.ndim == k.ndim == 4 and q.shape[1] != k.shape[1]:
        raise PlanError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}. Pass enable_gqa=True if query heads share key/value"
            f" heads."
        )


def gather_ints(mesh: DeviceMesh, value: int, device: torch.device) -> list[int]:
    """Return the value of every rank of the mesh."""
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    values = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(values, mine, group=mesh.get_group())
    return [int(value) for value in values]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _kernel(q: Tensor, k: Tensor, v: Tensor, opaque: bool) -> str:
    """Return "auto", or the first suitable kernel of those that `torch.nn.attention.sdpa_kernel` has enabled."""
    enabled = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "reference": torch.backends.cuda.math_sdp_enabled(),
    }
    if all(enabled.values()):
        return "auto"
    names = [name for name, on in enabled.items() if on]
    if torch.backends.cuda.cudnn_sdp_enabled():
        names.insert(0, "cudnn")
    why = "none is enabled"
    for name in names:
        try:
            named = "cpu_flash" if name == "flash" and q.device.type == "cpu" else name
            return choose_kernel(named, _local(q), _local(k), _local(v), Features(opaque, False, False))
        except KernelError as error:
            why = str(error)
    raise KernelError(f"sdpa_kernel allows {', '.join(names) or 'nothing'}, but none of these can run: {why}")


class _Mark(torch.autograd.Function):
    """Saves one empty tensor more than PyTorch's attention would. A checkpoint that is recomputed after the context has
    ended would compute attention of this rank alone; it counts saved tensors, so it raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _ = ctx.saved_tensors  # makes a checkpoint check
        return gradients[0]


def mark_query(query: Tensor) -> Tensor:
    plain = isinstance(query, DTensor) or not torch.is_grad_enabled()
    return query if plain else _Mark.apply(query)  # type: ignore[return-value]


# -- The torch-function mode -------------------------------------------------------------------------------------------

_UNROUTED = {
    "_varlen_attn": "torch.nn.attention.varlen.varlen_attn cannot be routed: call"
    " torch.nn.functional.scaled_dot_product_attention with mask=longspan.masks.documents(lengths) in the context",
    "multi_head_attention_forward": "torch.nn.MultiheadAttention cannot be routed: call"
    " torch.nn.functional.scaled_dot_product_attention in a module of your own",
    "_native_multi_head_attention": "the fused path of torch.nn.MultiheadAttention cannot be routed: call"
    " torch.nn.functional.scaled_dot_product_attention in a module of your own",
    "_transformer_encoder_layer_fwd": "the fused path of torch.nn.TransformerEncoderLayer cannot be routed: call"
    " torch.nn.functional.scaled_dot_product_attention in a module of your own",
}
_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
"""The operators below `scaled_dot_product_attention`; overloads such as `_for_cpu.default` have the same name."""
_SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax", "special_softmax"))
_OPERATORS = ("attention", "routed_attention")  # of Longspan


class Router(TorchFunctionMode):
    """Passes attention to a route, and runs everything else unchanged."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route = route
        self.local_len = route.local_len

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():
            return self._trace(func, args, kwargs or {})
        name = _special_functions.get(func)
        if name is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if name == "routed_attention":
            _running.route = self.route
            try:
                return func(*args, **(kwargs or {}))
            finally:
                _running.route = None
        if name == "attention":  # with a plan of the caller
            self.route.planned = True
            return func(*args, **(kwargs or {}))
        if name not in _SOFTMAX:
            return self._special(func, name, args, kwargs or {})
        if self._is_over_local_scores(args):
            _refuse_written_out(self.local_len)
        return func(*args, **(kwargs or {}))

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same while the compiler traces: it knows functions by their names."""
        name = _special_names.get(getattr(func, "__name__", ""))
        if name == "scaled_dot_product_attention":
            out = _sdpa_in_graph(*args, **kwargs)
            if out is not None:
                return out
        elif name == "attention":
            self.route.planned = True
            name = None
        elif name in _SOFTMAX:
            if self._is_over_local_scores(args):
                _refuse_written_out(self.local_len)
            name = None
        return func(*args, **kwargs) if name is None else self._special(func, name, args, kwargs)

    def _is_over_local_scores(self, args: tuple[Any, ...]) -> bool:
        """Return whether a softmax is over scores of this rank's tokens with each other: attention written out."""
        x, size = args[0] if args else None, self.local_len
        return size > 1 and isinstance(x, Tensor) and x.ndim >= 3 and x.shape[-1] == size and x.shape[-2] == size

    @torch.compiler.disable(reason="inside a context of Longspan, attention runs outside compiled graphs")
    def _special(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "scaled_dot_product_attention":
            return self.route.sdpa(*args, **kwargs)
        if name in _FUSED:
            if not _is_called_by_longspan():
                raise PlanError(
                    f"torch.ops.aten.{name} was called inside a context of Longspan, where it would attend to the"
                    f" tokens of this rank alone. Call torch.nn.functional.scaled_dot_product_attention, which is"
                    f" routed, or longspan.attention with a plan."
                )
            return func(*args, **kwargs)
        if name in _UNROUTED and not any(isinstance(arg, GraphModule) for arg in args):  # those are our own kernel's
            raise PlanError(
                f"inside a context of Longspan it would attend to the tokens of this rank alone: {_UNROUTED[name]}."
            )
        return self._differentiate(func, args, kwargs)

    def _differentiate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run backward with this mode on, in which checkpoints run forward again: PyTorch disables a mode inside its
        handler. Pass edges instead of tensors, because functions of tensors would come back here."""
        self.route.results = True
        if func is Tensor.backward:
            tensor, *rest = args
            kwargs = {"grad_tensors" if name == "gradient" else name: value for name, value in kwargs.items()}
            with self:
                return torch.autograd.backward(tensor, *rest, **kwargs)
        inputs = args[1] if func is torch.autograd.grad else kwargs.get("inputs")
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs  # before 2.13, backward passes it unchanged
        known = func in (torch.autograd.backward, torch.autograd.grad)
        if not known or any(isinstance(t, Tensor) and not t.requires_grad for t in (*args[0], *(inputs or ()))):
            return func(*args, **kwargs)  # which raises
        roots, edges = _edges(args[0]), None if inputs is None else _edges(inputs)
        name = "grad_outputs" if func is torch.autograd.grad else "grad_tensors"
        kwargs = kwargs | {name: _root_gradients(args[0], kwargs.get(name))}
        if func is torch.autograd.grad:
            zeros = kwargs.pop("materialize_grads", False)
            with self:
                gradients = func(roots, edges, **kwargs)
            if not zeros:
                return gradients
            options = {"requires_grad": kwargs.get("create_graph", False)}
            pairs = zip(gradients, args[1], strict=True)
            return tuple(torch.zeros_like(x, **options) if gradient is None else gradient for gradient, x in pairs)
        for tensor in inputs or ():
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                tensor.retain_grad()  # as backward does for tensors
        with self:
            return func(roots, **(kwargs | {"inputs": edges}))


run_without_compiling(Router.__torch_function__)  # as a frame; inside other frames it is traced


def _run_in_graph(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, needs_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, lse and ticket of attention by the route that is active when the operator runs, so that one graph
    serves all contexts."""
    route = current() or getattr(_running, "route", None)
    if route is None:
        raise PlanError("this code was compiled inside a context of Longspan, and none is active. Run it inside one.")
    plan = route.plan(q, k, v, causal() if is_causal else None)
    route.count("sdpa")
    kernel, group = _kernel(q, k, v, not plan.mask.is_structured), route.mesh.get_group().group_name
    others = plan.handle, group, kernel, scale, 0, True, needs_backward, False, "", ops.FORM
    return ops.run_forward(q, k, v, [], None, *others)


_running = threading.local()
"""`route`: that of the operator which a mode calls, since PyTorch disables a mode inside its handler."""
_routed_attention = ops.define_operator(
    "longspan::routed_attention", _run_in_graph, lambda q, _, v, *__: ops.results_like(q, v)
)
ops.differentiate(
    _routed_attention,
    lambda q, k, v, *others: ops.attend(
        q, k, v, [], None, *others, run=lambda q, k, v, _, __, *rest: _routed_attention(q, k, v, *rest)
    ),
)


def _sdpa_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return attention as an operator of the graph that is traced; None if it has to run outside, or be refused."""
    if isinstance(query, DTensor) or attn_mask is not None or dropout_p or query.ndim != 4 or key.ndim != 4:
        return None
    if query.shape[2] != key.shape[2] or not (enable_gqa or query.shape[1] == key.shape[1]):
        return None
    q, k, v = as_autocast(query), as_autocast(key), as_autocast(value)
    needs_backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out = _routed_attention(q, k, v, is_causal, None if scale is None else float(scale), needs_backward)[0]
    return match_memory_order(q, out)


@torch.compiler.disable(reason="it refuses the call")
def _refuse_written_out(size: int) -> None:
    raise PlanError(
        f"attention was written out inside a context of Longspan: a softmax over scores of {size} x {size} tokens"
        f" of this rank alone. Call torch.nn.functional.scaled_dot_product_attention, which is routed (in"
        f" Hugging Face models, attn_implementation='sdpa'), or longspan.attention with a plan."
    )


def _is_called_by_longspan() -> bool:
    """Return whether a kernel of Longspan is calling."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == _torch.__name__:
            return True
        frame = frame.f_back
    return False


def _edges(tensors: Any) -> tuple[GradientEdge, ...]:
    return tuple(t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in tensors)


def _root_gradients(roots: Any, gradients: Any) -> tuple[Any, ...]:
    """Fill in the gradients that autograd would create for scalar roots. For an edge it would create a plain tensor,
    even if the root is a DTensor."""
    gradients = (None,) * len(roots) if gradients is None else gradients
    gradients = (gradients,) if isinstance(gradients, Tensor) else tuple(gradients)
    if len(gradients) != len(roots):
        return gradients  # autograd raises
    return tuple(
        torch.ones_like(root, memory_format=torch.preserve_format)
        if gradient is None and isinstance(root, Tensor) and root.numel() == 1 and root.dtype.is_floating_point
        else gradient
        for root, gradient in zip(roots, gradients, strict=True)
    )


# -- PyTorch's flex attention ------------------------------------------------------------------------------------------
# The function gets other code instead of another function its name, because modules import it by name. The compiler
# caches by code: what it compiled outside of contexts is not run inside, and is run again after them.

torch_flex = FunctionType(flex_attention.__code__, flex_attention.__globals__, flex_attention.__name__)
"""PyTorch's `flex_attention`, whatever code the function of that name runs."""
torch_flex.__defaults__, torch_flex.__kwdefaults__ = flex_attention.__defaults__, flex_attention.__kwdefaults__
_flex_lock = threading.Lock()
_num_active = 0
"""Active routes of all threads."""


def _flex_attention(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    from longspan.torch_api import routes  # the code runs with the globals of PyTorch's module

    args = query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options
    result = routes.run_flex(*args, return_aux=return_aux) if routes.is_routed() else None
    return routes.torch_flex(*args, return_aux=return_aux) if result is None else result


def _parameters(function: FunctionType) -> tuple[object, ...]:
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    return code.co_argcount, code.co_varnames[:count], function.__defaults__, function.__kwdefaults__


if _parameters(_flex_attention) != _parameters(flex_attention):  # in a version of PyTorch that is not known
    _flex_attention = torch_flex
    _UNROUTED["flex_attention"] = (
        "torch.nn.attention.flex_attention.flex_attention of this version of PyTorch cannot be routed: call"
        " longspan.torch_api.flex_attention, or longspan.flex_attention with a plan"
    )


@torch.compiler.assume_constant_result
def is_routed() -> bool:
    """Return whether this thread has a route. Compiled code has guards on the types of modes, so it is a constant."""
    return current() is not None


@torch.compiler.disable(reason="inside a context of Longspan, attention runs outside compiled graphs")
def run_flex(*args: Any, **kwargs: Any) -> Any:
    route = current()
    assert route is not None
    return route.flex(*args, **kwargs)


_special_functions = _torch.functions_named(
    ("scaled_dot_product_attention", *_UNROUTED, *_FUSED, *_SOFTMAX, "backward", "grad")
) | {operator: name for name in _OPERATORS for operator in _torch.forms_of(getattr(torch.ops.longspan, name))}
"""Functions that are not run unchanged, and their names."""
_special_names = {getattr(function, "__name__", name): name for function, name in _special_functions.items()}


@contextmanager
def active(route: Route) -> Iterator[None]:
    """Route the calls of this thread."""
    _count_active(1)
    try:
        with Router(route):
            yield
    finally:
        _count_active(-1)


def _count_active(change: int) -> None:
    global _num_active
    with _flex_lock:
        _num_active += change
        if _num_active == max(change, 0):  # the first route, or none
            flex_attention.__code__ = _flex_attention.__code__ if _num_active else torch_flex.__code__


def routes() -> list[Route]:
    """Return the routes of active contexts and wrapped modules, innermost last."""
    return [mode.route for mode in function_modes() if isinstance(mode, Router)]


def current(mesh: DeviceMesh | None = None) -> Route | None:
    """Return the innermost route, or the innermost over this mesh."""
    return next((route for route in reversed(routes()) if mesh is None or route.mesh == mesh), None)


def route_for(
    mesh: DeviceMesh,
    load_balancer: Any,
    default: Balancer,
    mask: Mask | None,
    seq_len: int | None,
    layout: Layout | None = None,
) -> Route:
    """Build a route. Arguments that are None are taken from the active route over the same mesh and sequence, so that
    a wrapped module or an inner context does not misread the shards of an outer one."""
    outer = current(check_mesh(mesh))
    if outer is not None:
        length = outer.seq_len if outer.layout is None else outer.layout.seq_len
        if seq_len is None or length in (None, seq_len):
            mask = outer.mask if mask is None else mask
            shards = not isinstance(default, Inferred)  # then a layout that is not known yet is of no use
            if load_balancer is None and not (shards and outer.layout is None and isinstance(outer.balancer, Inferred)):
                load_balancer, layout = outer.balancer if outer.layout is None else outer.layout, None
    return Route(mesh, default if load_balancer is None else balancer_of(load_balancer), mask, seq_len, layout)
