"""PyTorch's API for context parallelism, implemented by Longspan: any length, masks, CPUs, with backward.

    with context_parallel(mesh["cp"], buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        loss(model(tokens), labels).backward()

Calls of `torch.nn.functional.scaled_dot_product_attention` are routed, however they are reached, and so are calls of
PyTorch's `flex_attention` and of this module's, compiled or not. Nothing else is: attention that is written out,
kernels called by name, TorchScript and other threads see the tokens of this rank alone. A context that ran backward and
routed no attention raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from longspan.errors import NotSupportedError, PlanError
from longspan.layouts import Layout
from longspan.layouts.layout import remember
from longspan.masks import Mask
from longspan.run.flex import mask_of_block_mask
from longspan.run.transports import observe as count_messages
from longspan.spans import check_int
from longspan.torch_api.balancers import (
    Balanced,
    Balancer,
    Contiguous,
    Cut,
    HeadTail,
    PerDocument,
    RoundRobin,
    balancer_of,
    check_no_padding,
    default_balancer,
    set_option,
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
from longspan.validate import check_sharding

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
    "backward ran in a context of Longspan that routed no attention: attention, if any, saw the tokens of this rank"
    " alone. Call torch.nn.functional.scaled_dot_product_attention from Python, in this thread."
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

    Without buffers, the inputs of attention are shards already, made by `load_balancer`, or as PyTorch's option says.
    Passing both `load_balancer` and `seq_len` saves a small message.

    Call backward inside: after exit buffers are whole again, so autograd raises if it saved one of them, and
    checkpoints cannot run forward again.
    """
    tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
    keep = {id(t) for t in no_restore_buffers or ()}
    length = _common_length(tensors, dims, seq_len)
    if not keep <= {id(t) for t in tensors}:
        raise PlanError("no_restore_buffers has tensors that are not among buffers. List the same tensor objects.")
    route = route_for(mesh, load_balancer, mask, length)
    with ExitStack() as stack:
        if tensors:
            assert length is not None
            options, rank, size = cp_options(), mesh.get_local_rank(), mesh.size()
            cut = route.cut or route.set_cut(Cut.by(default_balancer(length, size), length, size))
            check_no_padding(cut.layout)
            # As in PyTorch, programs can read inside whether shards are balanced. If a balancer was passed, the option
            # says so after the context, too: results are gathered there, often without naming it.
            if load_balancer is None:
                stack.callback(setattr, options, "enable_load_balance", options.enable_load_balance)
            else:
                stack.callback(set_option, cut)
            options.enable_load_balance = not cut.is_contiguous
            # Tensors get other storage instead of being written to: inputs and labels are often views of one batch. So
            # restoring is exact and copies nothing.
            with torch.no_grad():
                shards = [cut.shard(x, dim, rank) for x, dim in zip(tensors, dims, strict=True)]
            for tensor, dim, shard in zip(tensors, dims, shards, strict=True):
                if id(tensor) not in keep:
                    stack.callback(_set_storage, tensor, tensor.detach())
                _set_storage(tensor, shard)
                if id(tensor) in keep and cut.order is None:
                    remember(tensor, cut.layout, dim % tensor.ndim, version(tensor))
        stack.enter_context(active(route))
        yield
        if tensors and route.ran_backward and not route.calls and mesh.size() > 1:
            raise PlanError(UNSEEN)


def _common_length(tensors: list[Tensor], dims: list[int], seq_len: int | None) -> int | None:
    """Return the one length of all buffers along their sequence dims; raise if buffers cannot be sharded in place."""
    check_counts(tensors, dims)
    if len({id(t) for t in tensors}) != len(tensors):
        raise PlanError("a buffer is listed twice, and would be sharded twice. List it once.")
    if seq_len is not None:
        seq_len = check_int(seq_len, "seq_len", "context parallelism", PlanError, low=0)
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


def check_counts(buffers: Sequence[Any], dims: Sequence[int]) -> None:
    if len(buffers) != len(dims):
        raise PlanError(f"there are {len(buffers)} buffers, but {len(dims)} sequence dims. Pass one dim for each.")


@torch.no_grad()
def _set_storage(tensor: Tensor, like: Tensor) -> None:
    tensor.set_(like.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor | BlockMask] | Mapping[str, Tensor | BlockMask],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: Balancer | Layout | None = None,
) -> Any:
    """Return this rank's shards of whole tensors and BlockMasks: new objects, in a list, tuple or dict like `buffers`.

    Without a balancer, the layout is that of the active context over `mesh`, if its sequence has this length, or else
    `Contiguous()`. As in PyTorch, `_cp_options.enable_load_balance` is set to whether the shards are balanced: what is
    called without a balancer later follows it.

    The shard of a BlockMask has this rank's queries, and the keys of all ranks one after another. It is for
    `flex_attention` in a wrapped module or a context, with keys and values sharded like queries; PyTorch's
    `flex_attention` outside of both takes it with keys and values that were gathered.
    """
    check_mesh(mesh)
    if isinstance(buffers, Mapping):
        if not isinstance(seq_dims, Mapping) or set(seq_dims) != set(buffers):
            raise PlanError(
                f"`seq_dims` must be a dict with the keys of `buffers`, {sorted(buffers)}, but got {seq_dims!r:.120}."
            )
        dims = [seq_dims[name] for name in buffers]
        return dict(zip(buffers, context_parallel_shard(mesh, [*buffers.values()], dims, load_balancer), strict=True))
    if isinstance(seq_dims, Mapping):
        raise PlanError(f"`seq_dims` must be a list of dims, one for each of `buffers`, but got {seq_dims!r:.120}.")
    check_counts(buffers, seq_dims)
    balancer = None if load_balancer is None else balancer_of(load_balancer)
    shards, rank, size = [], mesh.get_local_rank(), mesh.size()
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        length = block_mask_length(buffer) if isinstance(buffer, BlockMask) else _length(buffer, dim)
        cut = None if balancer is not None else _cut_of_contexts(mesh, lambda cut, n=length: cut.layout.seq_len == n)
        if cut is None:
            cut = Cut.by(balancer or Contiguous(), length, size)
        set_option(cut)
        if isinstance(buffer, BlockMask):
            mask, device = mask_of_block_mask(buffer), buffer.kv_num_blocks.device
            shards.append(shard_block_mask(mask, cut, rank, device, buffer.BLOCK_SIZE))
        else:
            shards.append(cut.shard(buffer, dim, rank))
    return tuple(shards) if isinstance(buffers, tuple) else shards


def _cut_of_contexts(mesh: DeviceMesh, fits: Callable[[Cut], bool]) -> Cut | None:
    """Return the cut of the innermost context over this mesh that has one that fits."""
    cuts = (route.cut for route in reversed(routes()) if route.mesh == mesh)
    return next((cut for cut in cuts if cut is not None and fits(cut)), None)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: Balancer | Layout | None = None,
) -> list[Tensor]:
    """Return whole tensors, in order and without padding, on every rank; not differentiable, as in PyTorch.

    Without a balancer, the layout is that of the active context over `mesh`, if its shards are as long, or else that of
    `_cp_options.enable_load_balance`: pass the balancer that was passed to the shard or the context. A tensor that came
    straight from `context_parallel_shard` is compared: by another layout the call raises.
    """
    check_counts(buffers, seq_dims)
    route = current(check_mesh(mesh))
    balancer = None if load_balancer is None else balancer_of(load_balancer)
    whole = []
    for tensor, dim in zip(buffers, seq_dims, strict=True):
        lengths = gather_ints(mesh, _length(tensor, dim), tensor.device)
        cut = None
        if balancer is None:
            cut = _cut_of_contexts(mesh, lambda cut, sizes=lengths: slots(cut.layout) == sizes)
        if cut is None:
            told = balancer or (None if route is None else route.balancer)
            cut = Cut.of_shards(told, lengths, getattr(told, "seq_len", None))
        if cut.order is None:
            check_sharding(cut.layout, dim % tensor.ndim, buffer=tensor)
        # As bytes, because backends differ in the dtypes they support, and padded to equal lengths.
        shape = list(tensor.shape)
        shape[dim] = max(lengths)
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        messages = [padded.new_empty(padded.numel() * padded.itemsize, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(messages, padded.flatten().view(torch.uint8), group=mesh.get_group())
        parts = [part.view(tensor.dtype).view(shape) for part in messages]
        whole.append(cut.unshard([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim))
    return whole


def set_rotate_method(rotate_method: str) -> AbstractContextManager[object]:
    """Choose how keys and values travel from here on: "allgather" at once, "alltoall" around a ring.

    Until it is called, the plan chooses ("auto"). `with set_rotate_method("alltoall"):` ends the choice at exit. As in
    PyTorch, the choice is `_cp_options.rotate_method`, and holds for all threads.

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
    their layout is that of the context, that of a sharded BlockMask, or what `_cp_options.enable_load_balance` says, as
    in PyTorch. A balancer together with a length (`seq_len`, or a mask or balancer for one) saves a small message per
    forward. `attention_type` is the attention that the module must call: "sdpa", or "flex" for `flex_attention`;
    forward raises if it does not, since attention would have been local.
    """

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
    """Hooks that run a module's forward inside a route. They have a stack, for modules that call themselves."""

    def __init__(self, style: ContextParallel, mesh: DeviceMesh) -> None:
        self.style, self.mesh = style, mesh
        self.open: list[tuple[Route | None, ExitStack]] = []
        self.cut = Route(mesh, style.load_balancer, style.mask, style.seq_len).cut
        """Built once, if balancer and length are known."""

    def __deepcopy__(self, memo: Any) -> _Hooks:
        return _Hooks(self.style, self.mesh)  # copies of a module run on the same ranks

    @torch.compiler.disable(reason="routes are entered outside compiled graphs")
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        style, scope = self.style, ExitStack()
        self.open.append((None, scope))  # `leave` also runs after an error below
        for value in (*args, *kwargs.values()):
            if isinstance(value, DTensor) and tuple(value.placements) != (Shard(style.seq_dim),):
                raise PlanError(
                    f"an input of {type(module).__name__} is placed {tuple(value.placements)}, but ContextParallel"
                    f" takes DTensors placed (Shard({style.seq_dim}),). Redistribute it, or pass its local part."
                )
        route = route_for(self.mesh, style.load_balancer, style.mask, style.seq_len, self.cut)
        scope.enter_context(active(route))
        self.open[-1] = route, scope

    @torch.compiler.disable(reason="calls are counted outside compiled graphs")
    def check(self, module: nn.Module, *_: Any) -> None:
        route, kind = self.open[-1][0], self.style.attention_type
        if route is not None and not route.calls[kind]:
            name = {"sdpa": "torch.nn.functional.scaled_dot_product_attention", "flex": "flex_attention"}[kind]
            raise PlanError(
                f"{type(module).__name__} has ContextParallel(attention_type={kind!r}), but its forward never called"
                f" {name}: its attention, if any, saw the tokens of this rank alone. Apply it to the module that calls"
                f" attention."
            )

    @torch.compiler.disable(reason="routes are left outside compiled graphs")
    def leave(self, *_: Any) -> None:
        self.open.pop()[1].close()
