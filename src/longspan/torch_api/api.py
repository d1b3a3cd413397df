"""PyTorch's API for context parallelism, implemented by Longspan: any length, masks, CPUs, with backward.

    with context_parallel(mesh["cp"], buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        loss(model(tokens), labels).backward()

Calls of `torch.nn.functional.scaled_dot_product_attention` are routed, however they are reached, and so are calls of
PyTorch's `flex_attention` and of this module's, compiled or not. `torch.nn.MultiheadAttention`, PyTorch's fused
operators called by name and attention that is written out with a softmax are refused. Calls inside TorchScript, in
other threads and of other packages' kernels are not seen: a context that computed something and routed no attention
warns at exit.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.flex_attention import BlockMask

from longspan._torch import cp_options, version
from longspan.api import flex_attention as flex_of_shards
from longspan.errors import LayoutError, NotSupportedError, PlanError
from longspan.layouts import Layout
from longspan.layouts.layout import other_tokens, remember
from longspan.masks import Mask
from longspan.run.flex import mask_of_block_mask
from longspan.run.transports import observe as count_messages
from longspan.spans import Ints, check_int
from longspan.torch_api.balancers import (
    Balanced,
    Balancer,
    Contiguous,
    HeadTail,
    Inferred,
    PerDocument,
    RoundRobin,
    balancer_of,
    carried_layout,
    default_balancer,
    digest_of,
    known_length,
    layout_of_shards,
    layout_record,
    rearrange,
    row_order,
    slots,
)
from longspan.torch_api.routes import (
    ROTATIONS,
    Route,
    active,
    block_mask_length,
    check_mesh,
    current,
    gather_ints,
    rotation,
    route_for,
    routes,
    shard_block_mask,
)

__all__ = [
    "Balanced",
    "Balancer",
    "ContextParallel",
    "Contiguous",
    "HeadTail",
    "PerDocument",
    "RoundRobin",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "count_messages",
    "flex_attention",
    "set_rotate_method",
]

UNSEEN = (
    "buffers were sharded in a context of Longspan and results were computed in it, but no attention was routed. If"
    " there was any, it attended to the tokens of this rank alone: calls inside TorchScript, in other threads and of"
    " other packages' kernels are not seen. Call torch.nn.functional.scaled_dot_product_attention from Python, in this"
    " thread."
)
_PYTORCH_TYPES = {"scaled_dot_product_attention": "sdpa", "flex_attention": "flex"}
"""The values of `_ContextParallel.AttentionType`."""


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    load_balancer: Balancer | Layout | None = None,
    mask: Mask | None = None,
    seq_len: int | None = None,
) -> Iterator[None]:
    """Shard `buffers` in place, and run attention over the whole sequence, until the context exits.

    Buffers stay the same tensor objects, with other contents and another length; at exit, also by an exception, they
    get their storage back, except those in `no_restore_buffers`. Shards need not be equally long. The default balancer
    is `HeadTail()`, or `Contiguous()` if `_cp_options.enable_load_balance` of PyTorch is off. `mask` is in global
    positions; a call with `is_causal=True` combines it with causality. A nested context over the same mesh inherits
    balancer and mask.

    Without buffers, the inputs of attention are shards already. Without a balancer, `context_parallel_unshard`
    describes how their layout is inferred; if nothing was sharded over the ranks of the mesh before, it is the default.
    Passing both `load_balancer` and `seq_len` saves a small message.

    Call backward inside: after exit buffers are whole again, so autograd raises if it saved one of them, and
    checkpoints cannot run forward again.
    """
    tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
    keep = {id(t) for t in no_restore_buffers or ()}
    length = _common_length(tensors, dims, seq_len)
    if not keep <= {id(t) for t in tensors}:
        raise PlanError("no_restore_buffers has tensors that are not among buffers. List the same tensor objects.")
    default = default_balancer() if tensors else Inferred(check_mesh(mesh), default_balancer())
    if tensors and length is not None and length < 2 * mesh.size():
        default = Contiguous()  # as in PyTorch: there are no two chunks per rank
    route = route_for(mesh, load_balancer, default, mask, length)
    sharded = {number for outer in routes() if outer.mesh == mesh for number in outer.buffers}
    for tensor in tensors:
        if id(tensor) in sharded:
            raise PlanError(
                f"buffers must be whole tensors, but got one of shape {tuple(tensor.shape)} that a context around this"
                f" one has sharded already. List it in one of the two."
            )
    buffers_and_dims = list(zip(tensors, dims, strict=True))
    with ExitStack() as stack:
        if tensors:
            assert route.layout is not None
            _record(mesh, route.layout, route.order)
            # As in PyTorch, programs can read inside whether shards are balanced.
            options, is_balanced = cp_options(), other_tokens(route.layout, Contiguous.of_lengths(slots(route.layout)))
            stack.callback(setattr, options, "enable_load_balance", options.enable_load_balance)
            options.enable_load_balance = is_balanced or route.order is not None
            layout = route.layout
            _check_no_padding(layout)
            # Tensors get other storage instead of being written to: inputs and labels are often views of one batch. So
            # restoring is exact and copies nothing.
            with torch.no_grad():
                shards = [
                    _shard_tensor(x, dim, layout, route.order, mesh.get_local_rank()) for x, dim in buffers_and_dims
                ]
            for (tensor, dim), shard in zip(buffers_and_dims, shards, strict=True):
                if id(tensor) not in keep:
                    stack.callback(_set_storage, tensor, *_storage(tensor))
                _set_storage(tensor, *_storage(shard))
                if id(tensor) in keep and route.order is None:
                    remember(tensor, layout, dim % tensor.ndim, version(tensor))
        route.buffers = {id(t) for t in tensors}
        stack.enter_context(active(route))
        yield
        if tensors and route.results and not (route.calls or route.planned) and mesh.size() > 1:
            warnings.warn(UNSEEN, stacklevel=3)


def _common_length(tensors: list[Tensor], dims: list[int], seq_len: int | None) -> int | None:
    """Return the one length of all buffers along their sequence dims; raise if buffers cannot be sharded in place."""
    check_counts(tensors, dims)
    if len({id(t) for t in tensors}) != len(tensors):
        raise PlanError("a buffer is listed twice, and would be sharded twice. List it once.")
    lengths: set[int] = set() if seq_len is None else {seq_len}
    for tensor, dim in zip(tensors, dims, strict=True):
        lengths.add(_length(tensor, dim))
        if tensor.requires_grad:
            raise PlanError(
                f"a buffer of shape {tuple(tensor.shape)} requires grad: changing it in place would leave its gradient"
                f" in another shape. Shard it with context_parallel_shard, which autograd can follow, or detach it."
            )
    if len(lengths) > 1:
        raise PlanError(f"buffers have {sorted(lengths)} tokens along their sequence dims. Cut all to one length.")
    return next(iter(lengths), None)


def _length(tensor: Any, dim: Any) -> int:
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
        raise PlanError(f"a buffer must be a plain tensor, but got {type(tensor).__name__}. Convert it first.")
    dim = check_int(dim, "a sequence dim", "context parallelism", PlanError, low=-64, high=64)
    if not -tensor.ndim <= dim < tensor.ndim:
        raise PlanError(f"a buffer of shape {tuple(tensor.shape)} has no dim {dim} to hold the sequence.")
    return tensor.shape[dim]


def _check_no_padding(layout: Layout) -> None:
    if layout.has_padding:
        raise LayoutError(
            f"{layout} has padding, and the fill value for labels or masks is not known here. Use a layout without"
            f" equal_tokens (shards need not be equally long), or shard by layout.shard(x, rank, dim, fill=...)."
        )


def _record(mesh: DeviceMesh, layout: Layout, order: Ints | None) -> None:
    record = layout_record(mesh)
    record.add(layout) if order is None else record.add_row_order(slots(layout))


def check_counts(buffers: Sequence[Any], dims: Sequence[int]) -> None:
    if len(buffers) != len(dims):
        raise PlanError(f"there are {len(buffers)} buffers, but {len(dims)} sequence dims. Pass one dim for each.")


def _shard_tensor(tensor: Tensor, dim: int, layout: Layout, order: Ints | None, rank: int) -> Tensor:
    """Return the rank's shard. A shard in an order for each batch row does not carry a layout, since it has none."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        _check_no_padding(layout)  # 0 is a label
    if order is None:
        return layout.shard(tensor, rank, dim)
    start = sum(slots(layout)[:rank])
    return rearrange(tensor, order, dim).narrow(dim, start, layout.num_slots(rank)).contiguous()


def _storage(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()


@torch.no_grad()
def _set_storage(tensor: Tensor, *storage: Any) -> None:
    tensor.set_(*storage)


def context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor | BlockMask] | Mapping[str, Tensor | BlockMask],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: Balancer | Layout | None = None,
) -> Any:
    """Return this rank's shards of whole tensors and BlockMasks: new objects, in a list, tuple or dict like `buffers`.

    Without a balancer, the layout is that of the active context over `mesh`, if its sequence has this length, or else
    `Contiguous()`. The layout is recorded for the mesh: see `context_parallel_unshard`.

    The shard of a BlockMask has this rank's queries, and the keys of all ranks one after another. It is for
    `flex_attention` in a wrapped module or a context, with keys and values sharded like queries; PyTorch's
    `flex_attention` outside of both takes it with keys and values that were gathered.
    """
    route = current(check_mesh(mesh))
    if isinstance(buffers, Mapping):
        if not isinstance(seq_dims, Mapping) or set(seq_dims) != set(buffers):
            raise PlanError(
                f"`seq_dims` must be a dict with the keys of `buffers`, {sorted(buffers)}, but got {seq_dims!r:.120}."
            )
        names = list(buffers)
        shards = context_parallel_shard(
            mesh, [buffers[name] for name in names], [seq_dims[name] for name in names], load_balancer
        )
        return dict(zip(names, shards, strict=True))
    if isinstance(seq_dims, Mapping):
        raise PlanError(f"`seq_dims` must be a list of dims, one for each of `buffers`, but got {seq_dims!r:.120}.")
    check_counts(buffers, seq_dims)
    balancer = None if load_balancer is None else balancer_of(load_balancer)
    known = None if route is None or isinstance(route.balancer, Inferred) else route
    shards, rank = [], mesh.get_local_rank()
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        length = block_mask_length(buffer) if isinstance(buffer, BlockMask) else _length(buffer, dim)
        if balancer is None and known is not None and known.layout is not None and known.layout.seq_len == length:
            layout, order = known.layout, known.order
        else:
            chosen = balancer or (known.balancer if known is not None and known.layout is None else Contiguous())
            layout, order = chosen.layout(length, mesh.size()), row_order(chosen, length, mesh.size())
        _record(mesh, layout, order)
        if isinstance(buffer, BlockMask):
            mask, device = mask_of_block_mask(buffer), buffer.kv_num_blocks.device
            shards.append(shard_block_mask(mask, layout, order, rank, device, buffer.BLOCK_SIZE))
        else:
            shards.append(_shard_tensor(buffer, dim, layout, order, rank))
    return tuple(shards) if isinstance(buffers, tuple) else shards


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: Balancer | Layout | None = None,
) -> list[Tensor]:
    """Return whole tensors, in order and without padding, on every rank; not differentiable, as in PyTorch.

    Without a balancer, the layout is the first of these that is known: the one that cut the buffer itself, if it came
    straight from a shard; that of the active context over `mesh`; the one by which `context_parallel_shard`, a context
    or attention cut sequences with as many tokens per rank over the ranks of `mesh` before. If there are two such
    layouts, or none, the call raises `LayoutError`. A balancer that is passed must be the one that cut the buffer.
    """
    check_counts(buffers, seq_dims)
    check_mesh(mesh)
    return unshard(mesh, buffers, seq_dims, load_balancer, Inferred(mesh, None))


def unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: Balancer | Layout | None,
    inferred: Inferred,
) -> list[Tensor]:
    """Gather shards and put their tokens in order; `inferred` finds the layout of those that no other rule covers.

    If ranks have different layouts, or one of them has none, all raise.
    """
    route = current(mesh)
    if route is not None and any(id(t) not in route.buffers for t in buffers):
        route.results = True
    whole = []
    for tensor, dim in zip(buffers, seq_dims, strict=True):
        lengths = gather_ints(mesh, _length(tensor, dim), tensor.device)
        result: tuple[Layout, Ints | None] | Exception
        try:
            result = _layout_to_unshard(mesh, load_balancer, tensor, dim, lengths, inferred)
            digest = digest_of(*result)
        except Exception as error:  # the other ranks wait for the message below
            result, digest = error, 0
        digests = gather_ints(mesh, digest, tensor.device)
        if isinstance(result, Exception):
            raise result
        layout, order = result
        if len(set(digests)) > 1:
            raise LayoutError(
                f"all ranks must unshard by one layout, but rank {mesh.get_local_rank()} has {layout}, and others have"
                f" another or none. Pass the same load_balancer on all ranks."
            )
        # As bytes, because backends differ in the dtypes they support, and padded to equal lengths.
        shape = list(tensor.shape)
        shape[dim] = max(lengths)
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        messages = [padded.new_empty(padded.numel() * padded.itemsize, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(messages, padded.flatten().view(torch.uint8), group=mesh.get_group())
        parts = [part.view(tensor.dtype).view(shape) for part in messages]
        ordered = layout.unshard([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)
        whole.append(ordered if order is None else rearrange(ordered, order, dim, restore=True))
    return whole


def _layout_to_unshard(
    mesh: DeviceMesh,
    load_balancer: Balancer | Layout | None,
    tensor: Tensor,
    dim: int,
    lengths: list[int],
    inferred: Inferred,
) -> tuple[Layout, Ints | None]:
    route, known = current(mesh), carried_layout(tensor, dim, lengths)
    if load_balancer is not None:
        balancer = balancer_of(load_balancer)
        layout = layout_of_shards(balancer, lengths, known_length(balancer, None))
        order = row_order(balancer, layout.seq_len, len(lengths))
        if known is not None and other_tokens(known, layout):
            raise LayoutError(
                f"`load_balancer` must be the one that cut the buffer, which was {known}, but got {layout}. Leave it"
                f" out: the buffer carries its layout."
            )
        return layout, order
    if known is not None:
        return known, None
    if route is not None and route.layout is None:
        layout = route.layout_of_shard(tensor, dim, lengths)
        return layout_of_shards(balancer_of(layout), lengths, layout.seq_len), None
    if route is not None and route.layout is not None and slots(route.layout) == lengths:
        return route.layout, route.order
    return inferred.of_shard(tensor, dim, lengths), None


def set_rotate_method(rotate_method: str) -> AbstractContextManager[object]:
    """Choose how keys and values travel from here on: "allgather" at once, "alltoall" around a ring.

    Until it is called, the plan chooses ("auto"). `with set_rotate_method("alltoall"):` ends the choice at exit. As in
    PyTorch, the choice is `_cp_options.rotate_method`, and holds for all threads; made in another thread than the main
    one, it holds in that thread.

    >>> with set_rotate_method("alltoall"):
    ...     pass
    """
    if rotate_method not in ROTATIONS:
        raise NotSupportedError(
            f"`rotate_method` must be {' or '.join(map(repr, ROTATIONS))}, but got {rotate_method!r}. Other schemes are"
            f" named in longspan.plan(..., scheme=)."
        )
    stack = ExitStack()
    stack.callback(rotation.choose(rotate_method))
    return stack


@torch.compiler.disable(reason="functions of scores are called tile by tile, outside compiled graphs")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    captured_grads: str = "sum",
) -> Any:
    """PyTorch's `flex_attention`: over the whole sequence inside a context or a wrapped module, on one device outside.

    Inside, PyTorch's own function is the same; outside, this one has a backward on every device. `block_mask` is for
    the whole sequence, a BlockMask of PyTorch or a mask of longspan.masks, and is combined with the mask of the
    context. Functions get global positions. `kernel_options` must be empty, as in `longspan.flex_attention`. If FSDP or
    DDP reduces gradients over the mesh, pass `captured_grads="share"`, or those of captured tensors are summed twice.
    """
    args = query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options
    route, result = current(), None
    if route is not None:
        result = route.flex(*args, return_aux=return_aux, captured_grads=captured_grads)
    if result is None:
        result = flex_of_shards(*args, return_aux=return_aux, captured_grads=captured_grads)
    return result


class ContextParallel(ParallelStyle):
    """For `parallelize_module`: run attention in the module's forward over the whole sequence.

    Inputs are shards along `seq_dim` already (see `context_parallel_shard`), plain or DTensors. Without a balancer
    their layout is inferred in each forward, as in `context_parallel_unshard`; if nothing was sharded over the ranks of
    the mesh before, it is `Contiguous()`. A balancer together with a length (`seq_len`, or a mask or balancer for one)
    saves a small message per forward. `attention_type` is the attention that the module must call: "sdpa", or "flex"
    for `flex_attention`; forward raises if it does not, since attention would have been local.
    """

    follow_options = False
    """Whether PyTorch's `_cp_options.enable_load_balance` decides where the layout is ambiguous."""

    def __init__(
        self,
        seq_dim: int = 2,
        attention_type: Any = "sdpa",
        *,
        mask: Mask | None = None,
        load_balancer: Balancer | Layout | None = None,
        seq_len: int | None = None,
    ) -> None:
        super().__init__()
        attention_type = _PYTORCH_TYPES.get(getattr(attention_type, "value", ""), attention_type)
        if attention_type not in ("sdpa", "flex"):
            raise PlanError(f"`attention_type` must be 'sdpa' or 'flex', but got {attention_type!r}.")
        self.seq_dim, self.attention_type = seq_dim, attention_type
        self.mask, self.seq_len = mask, seq_len
        self.load_balancer = None if load_balancer is None else balancer_of(load_balancer)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks = _Hooks(self, device_mesh)
        module.register_forward_pre_hook(hooks.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.check)
        module.register_forward_hook(hooks.leave, always_call=True)
        return module


class _Hooks:
    """Hooks that run a module's forward inside a route. Each thread has a stack, for modules that call themselves."""

    def __init__(self, style: ContextParallel, mesh: DeviceMesh) -> None:
        self.style, self.mesh, self.open = style, mesh, threading.local()
        self.default = Inferred(check_mesh(mesh), Contiguous(), style.follow_options)
        balancer = self.default if style.load_balancer is None else style.load_balancer
        route = Route(mesh, balancer, style.mask, style.seq_len)
        self.layout = route.layout  # built once, if balancer and length are known

    def __deepcopy__(self, memo: Any) -> _Hooks:
        return _Hooks(self.style, self.mesh)  # copies of a module run on the same ranks

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not hasattr(self.open, "stack"):
            self.open.stack = []
        scope = ExitStack()
        self.open.stack.append((None, scope))  # `leave` also runs after an error below
        style = self.style
        for value in (*args, *kwargs.values()):
            if isinstance(value, DTensor) and tuple(value.placements) != (Shard(style.seq_dim),):
                raise PlanError(
                    f"an input of {type(module).__name__} is placed {tuple(value.placements)}, but ContextParallel"
                    f" takes DTensors placed (Shard({style.seq_dim}),). Redistribute it, or pass its local part."
                )
        route = route_for(self.mesh, style.load_balancer, self.default, style.mask, style.seq_len, self.layout)
        scope.enter_context(active(route))
        self.open.stack[-1] = route, scope

    def check(self, module: nn.Module, *_: Any) -> None:
        route, _ = self.open.stack[-1]
        if not route.calls[self.style.attention_type]:
            name = {"sdpa": "torch.nn.functional.scaled_dot_product_attention", "flex": "flex_attention"}
            raise PlanError(
                f"{type(module).__name__} has ContextParallel(attention_type={self.style.attention_type!r}), but its"
                f" forward never called {name[self.style.attention_type]}, so its attention, if any, saw the tokens of"
                f" this rank alone. Apply it to the module that calls attention, or pass the other type."
            )

    def leave(self, *_: Any) -> None:
        self.open.stack.pop()[1].close()
