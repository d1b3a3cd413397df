"""Routes: how calls of PyTorch's attention reach Longspan while a context or a wrapped module is active.

A route is a mesh, a layout and optionally a mask. A torch-function mode passes it the calls of PyTorch's attention.
Modes belong to threads, so two threads may use two meshes. PyTorch's `flex_attention` is a Python function, which modes
do not see: while a route is active in any thread, its code is replaced, and checks for a route of the calling thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

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
from longspan.masks import Mask, causal, from_mask_mod, full
from longspan.masks.mask import MaskKey
from longspan.planning.plan import Plan
from longspan.run import ops
from longspan.run.flex import block_mask, check_lengths, mask_of_block_mask, match_memory_order
from longspan.spans import Ints
from longspan.torch_api.balancers import Balancer, Contiguous, Cut, balancer_in_use, balancer_of, known_length
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
    mask: Mask, cut: Cut, rank: int, device: torch.device | str, block_size: int | tuple[int, int]
) -> BlockMask:
    """Return the BlockMask of this rank's queries and of all ranks' keys, in the order in which shards are gathered.

    `longspan_shard` of the result holds what attention over ranks needs: the mask in global positions, and the cut.
    """
    if not isinstance(block_size, int):
        if len(set(block_size)) != 1:
            raise PlanError(
                f"a BlockMask must have blocks of as many queries as keys to be sharded, but got {tuple(block_size)}."
                f" Create it with BLOCK_SIZE={max(block_size)}."
            )
        block_size = block_size[0]
    places = mask if cut.order is None else rearrange_mask(mask, cut.order)
    local = block_mask(places, cut.layout, rank, kv="gathered", block_size=block_size, device=device)
    local.longspan_shard = mask, cut  # type: ignore[attr-defined]
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
    """How keys and values travel. The choice is kept in PyTorch's `_cp_options`, too, and holds for all threads."""

    scheme: str | None = None

    def choose(self, method: str) -> Callable[[], None]:
        """Set the method, and return a function that restores the one before."""
        options, (name, scheme) = cp_options(), ROTATIONS[method]
        before = self.scheme, options.rotate_method
        self.scheme, options.rotate_method = scheme, getattr(type(options.rotate_method), name)

        def restore() -> None:
            self.scheme, options.rotate_method = before

        return restore

    def get(self) -> str:
        """Return the scheme. PyTorch's default, all-gather, counts as a choice only if `set_rotate_method` made it."""
        if cp_options().rotate_method.name == "ALL_TO_ALL":
            return "ring"
        return "all_gather" if self.scheme == "all_gather" else "auto"


rotation = Rotation()


class Route:
    """Attention over the shards of one sequence on one mesh axis."""

    def __init__(
        self,
        mesh: DeviceMesh,
        balancer: Balancer | None,
        mask: Mask | None,
        seq_len: int | None,
        cut: Cut | None = None,
    ) -> None:
        self.mesh, self.balancer, self.mask, self.cut = check_mesh(mesh), balancer, check_mask(mask), cut
        """The cut is None until it is known: at the first call at the latest."""
        self.seq_len = known_length(balancer, mask, seq_len if cut is None else cut.layout.seq_len)
        if cut is None and balancer is not None and self.seq_len is not None:
            self.cut = Cut.by(balancer, self.seq_len, mesh.size())
        self.calls: Counter[str] = Counter()
        """Attention that was computed inside, by its kind."""
        self.ran_backward = False
        self.outer: Route | None = None
        self._rearranged: dict[Any, Any] = {}
        """Masks and score functions over the places of a cut with an order for each batch row."""

    def set_cut(self, cut: Cut) -> Cut:
        self.cut, self.seq_len = cut, cut.layout.seq_len
        return cut

    def cut_of(self, query: Tensor) -> Cut:
        """Return the cut. If length or balancer are unknown, the first call gathers lengths from all ranks."""
        local_len, rank, cut = _local(query).shape[SEQ_DIM], self.mesh.get_local_rank(), self.cut
        if cut is None:
            lengths = gather_ints(self.mesh, local_len, query.device)
            if self.balancer is None and isinstance(query, DTensor):
                _check_placement(sum(lengths), len(lengths))
            cut = self.set_cut(Cut.of_shards(self.balancer, lengths, self.seq_len))
        expected = cut.layout.num_slots(rank)
        if local_len != expected:
            raise LayoutError(
                f"query must have {expected} tokens on rank {rank} of {cut.layout}, but got {local_len}. Shard inputs"
                " as the context shards its buffers, or pass the load_balancer= and seq_len= that sharded them."
            )
        return cut

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
        cut = self.cut_of(q)
        if self.mask is not None:
            mask = self.mask if mask is None else self.mask & mask
        mask = full() if mask is None else mask
        if cut.order is not None:
            key = MaskKey(mask)
            if key not in self._rearranged:
                self._rearranged[key] = rearrange_mask(mask, cut.order)
            mask = self._rearranged[key]
        assert mask is not None
        return build_plan(
            mask, cut.layout, q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3], v_head_dim=v.shape[3],
            batch=q.shape[0], dtype=q.dtype, scheme=rotation.get(), group=self.mesh,
        )  # fmt: skip

    def count(self, kind: str) -> None:
        """Count a call here and in the routes around: wrapped modules check that there was one."""
        route: Route | None = self
        while route is not None:
            route.calls[kind] += 1
            route = route.outer

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
        query, key, value = as_autocast(query), as_autocast(key), as_autocast(value)
        check_heads(query, key, enable_gqa)
        plan = self.plan(query, key, value, causal() if is_causal else None)
        self.count("sdpa")
        kernel = _kernel(query, key, value, plan.mask)
        out = attention(query, key, value, plan, group=self.mesh, scale=scale, kernel=kernel)
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
        shard: tuple[Mask, Cut] | None = getattr(block_mask, "longspan_shard", None)
        if shard is not None:
            self._follow_block_mask(query, shard[1])
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
        if score_mod is not None and self.cut is not None and self.cut.order is not None:
            if score_mod not in self._rearranged:
                self._rearranged[score_mod] = rearrange_score(score_mod, self.cut.order)
            score_mod = self._rearranged[score_mod]
        return flex_of_shards(
            query, key, value, score_mod, None, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux, plan=plan, group=self.mesh, captured_grads=captured_grads,
        )  # fmt: skip

    def _follow_block_mask(self, query: Tensor, cut: Cut) -> None:
        """Take the cut of a sharded BlockMask if no other is known; else check that it is the same."""
        if self.cut is None and self.balancer is None:
            self.set_cut(cut)
        elif self.cut_of(query).differs(cut):
            raise LayoutError(
                f"`block_mask` must be sharded like query, by {self.cut_of(query).layout}, but it was sharded by"
                f" {cut.layout}. Shard both by one load_balancer."
            )

    def _are_gathered(self, query: Tensor, key: Tensor, block_mask: BlockMask) -> bool:
        """Return whether queries are a shard, and keys and the columns of `block_mask` the whole sequence."""
        rows, columns = query.shape[SEQ_DIM], key.shape[SEQ_DIM]
        if rows == columns or tuple(block_mask.seq_lengths) != (rows, columns):
            return False
        return self.cut_of(query).layout.seq_len == columns

    def _mask_of(self, block_mask: Any, query: Tensor) -> Mask | None:
        """Return the mask that `block_mask` means, in global positions."""
        if block_mask is None or isinstance(block_mask, Mask):
            return block_mask
        if not isinstance(block_mask, BlockMask):
            raise PlanError(
                f"`block_mask` must be a BlockMask of PyTorch or a mask of longspan.masks, but got"
                f" {type(block_mask).__name__}."
            )
        seq_len = self.cut_of(query).layout.seq_len
        check_lengths(block_mask, (seq_len, seq_len), "block_mask", PlanError)
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


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str:
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
            return choose_kernel(named, _local(q), _local(k), _local(v), Features(not mask.is_structured, False, False))
        except KernelError as error:
            why = str(error)
    raise KernelError(f"sdpa_kernel allows {', '.join(names) or 'nothing'}, but none of these can run: {why}")


def _check_placement(seq_len: int, world_size: int) -> None:
    if world_size > 1 and not isinstance(balancer_in_use(seq_len, world_size), Contiguous):
        raise LayoutError(
            "`load_balancer` must be passed for DTensors: their placement is that of Contiguous(), but"
            " _cp_options.enable_load_balance says HeadTail(). Pass one of the two, or switch the option off."
        )


# -- The torch-function mode -------------------------------------------------------------------------------------------

_OUTSIDE = (
    "it would attend to the tokens of this rank alone inside a context of Longspan. Call"
    " torch.nn.functional.scaled_dot_product_attention in a module of your own, with mask=longspan.masks.documents(...)"
    " in the context for packed sequences"
)
_UNROUTED: dict[str, str] = dict.fromkeys(
    ("_varlen_attn", "multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    _OUTSIDE,
)
"""PyTorch's other functions of attention, and what to do instead. They call kernels where a mode does not see them."""
_OPERATORS = ("attention", "routed_attention")  # of Longspan


class Router(TorchFunctionMode):
    """Passes attention to a route, and runs everything else unchanged."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route = route

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():
            return self._trace(func, args, kwargs or {})
        name = _special_functions.get(func)
        if name is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if name == "routed_attention" and _running.route is None:  # the innermost mode comes first
            _running.route = self.route
            try:
                return func(*args, **(kwargs or {}))
            finally:
                _running.route = None
        if name in _OPERATORS:
            self.route.count(name)
            return func(*args, **(kwargs or {}))
        return self._special(func, name, args, kwargs or {})

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same while the compiler traces: it knows functions by their names."""
        name = _special_names.get(getattr(func, "__name__", ""))
        if name == "scaled_dot_product_attention":
            out = _sdpa_in_graph(*args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs) if name in (None, *_OPERATORS) else self._special(func, name, args, kwargs)

    @torch.compiler.disable(reason="inside a context of Longspan, attention runs outside compiled graphs")
    def _special(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "scaled_dot_product_attention":
            return self.route.sdpa(*args, **kwargs)
        if name in _UNROUTED and not any(isinstance(arg, GraphModule) for arg in args):  # those are our own kernel's
            raise PlanError(f"{name} cannot be routed: {_UNROUTED[name]}.")
        return self._differentiate(func, args, kwargs)

    def _differentiate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run backward with this mode on, in which checkpoints run forward again: PyTorch disables a mode inside its
        handler. Pass edges instead of tensors, because functions of tensors would come back here."""
        self.route.ran_backward = True
        if func is Tensor.backward:
            kwargs = {"grad_tensors" if name == "gradient" else name: value for name, value in kwargs.items()}
            with self:
                return torch.autograd.backward(*args, **kwargs)
        is_grad, roots = func is torch.autograd.grad, args[0]
        inputs = args[1] if is_grad else kwargs.get("inputs")
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs  # before 2.13, backward passes it unchanged
        if any(isinstance(t, Tensor) and not t.requires_grad for t in (*roots, *(inputs or ()))):
            return func(*args, **kwargs)  # which raises
        name = "grad_outputs" if is_grad else "grad_tensors"
        kwargs[name] = _root_gradients(roots, kwargs.get(name))
        zeros = kwargs.pop("materialize_grads", False)
        for tensor in () if is_grad else inputs or ():
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                tensor.retain_grad()  # as backward does for tensors
        with self:
            gradients = func(_edges(roots), **(kwargs | {"inputs": None if inputs is None else _edges(inputs)}))
        if not zeros:
            return gradients
        options = {"requires_grad": kwargs.get("create_graph", False)}
        return tuple(
            torch.zeros_like(x, **options) if y is None else y for x, y in zip(args[1], gradients, strict=True)
        )


run_without_compiling(Router.__torch_function__)  # as a frame; inside other frames it is traced


def _run_in_graph(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, needs_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, lse and ticket of attention by the route that is active when the operator runs, so that one graph
    serves all contexts."""
    route = _running.route or current()
    if route is None:
        raise PlanError("this code was compiled inside a context of Longspan, and none is active. Run it inside one.")
    plan = route.plan(q, k, v, causal() if is_causal else None)
    route.count("sdpa")
    kernel, group = _kernel(q, k, v, plan.mask), route.mesh.get_group().group_name
    others = plan.handle, group, kernel, scale, 0, True, needs_backward, False, "", ops.FORM
    return ops.run_forward(q, k, v, [], None, *others)


class _Running(threading.local):
    """The route of the operator that a mode calls, since PyTorch disables a mode inside its handler."""

    route: Route | None = None


_running = _Running()
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


_special_functions = _torch.functions_named(("scaled_dot_product_attention", *_UNROUTED, "backward", "grad")) | {
    operator: name for name in _OPERATORS for operator in _torch.forms_of(getattr(torch.ops.longspan, name))
}
"""Functions that are not run unchanged, and their names."""
_special_names = {getattr(function, "__name__", name): name for function, name in _special_functions.items()}


@contextmanager
def active(route: Route) -> Iterator[None]:
    """Route the calls of this thread."""
    route.outer = current()
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
    mesh: DeviceMesh, load_balancer: Any, mask: Mask | None, seq_len: int | None, cut: Cut | None = None
) -> Route:
    """Build a route. Arguments that are None are taken from the active route over the same mesh and sequence, so that
    a wrapped module or an inner context does not misread the shards of an outer one."""
    balancer = None if load_balancer is None else balancer_of(load_balancer)
    outer = current(check_mesh(mesh))
    if outer is not None and (seq_len is None or outer.seq_len in (None, seq_len)):
        mask = outer.mask if mask is None else mask
        if balancer is None:
            balancer, cut, seq_len = outer.balancer, outer.cut, outer.seq_len if seq_len is None else seq_len
    return Route(mesh, balancer, mask, seq_len, cut)
