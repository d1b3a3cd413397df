"""PyTorch's experimental module `_attention`, name by name: a program changes its import and nothing else.

    from longspan.torch_api._attention import _context_parallel_shard, _ContextParallel

Longspan's are `context_parallel`, `context_parallel_unshard`, `set_rotate_method`, `_ContextParallel`,
`_context_parallel_shard`, `_create_cp_block_mask` and the two functions that switch the dispatcher. The options, enums,
load balancers, `_templated_ring_attention` and `flex_cp_allgather` are PyTorch's own objects: the options are one state
for both, and the order of tokens is that of the installed version of PyTorch.

`longspan.torch_api` has the recommended names, without underscores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from longspan import _torch
from longspan.errors import PlanError
from longspan.masks import from_mask_mod
from longspan.torch_api.api import (
    ContextParallel,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    set_rotate_method,
)
from longspan.torch_api.balancers import Contiguous, Cut, balancer_of, default_balancer
from longspan.torch_api.routes import SEQ_DIM, Route, check_mesh, shard_block_mask

_names = _torch.context_parallel_names()
_CausalBehavior = _names["_CausalBehavior"]
_HeadTailLoadBalancer = _names["_HeadTailLoadBalancer"]
_LoadBalancer = _names["_LoadBalancer"]
_PerDocumentHeadTailLoadBalancer = _names["_PerDocumentHeadTailLoadBalancer"]
_PTRRLoadBalancer = _names["_PTRRLoadBalancer"]
_RotateMethod = _names["_RotateMethod"]
_cp_options = _names["_cp_options"]
_is_causal_behavior = _names["_is_causal_behavior"]
_templated_ring_attention = _names["_templated_ring_attention"]
flex_cp_allgather = _names["flex_cp_allgather"]

__all__ = [
    "_CausalBehavior",
    "_ContextParallel",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
    "_RotateMethod",
    "_context_parallel_shard",
    "_cp_options",
    "_create_cp_block_mask",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "_templated_ring_attention",
    "context_parallel",
    "context_parallel_unshard",
    "create_cp_block_mask",
    "flex_cp_allgather",
    "set_rotate_method",
]

CPBuffer = Tensor | BlockMask
CPBufferContainer = Sequence[CPBuffer] | Mapping[str, CPBuffer]
CPBufferSeqDims = Sequence[int] | Mapping[str, int]


def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: CPBufferContainer,
    seq_dims: CPBufferSeqDims,
    load_balancer: Any = None,
) -> Any:
    """Return this rank's shards, in a container like `buffers`; without a balancer, contiguous ones."""
    if isinstance(mesh.get_local_rank(), torch.SymInt):
        raise PlanError(
            "`mesh` must have one process per rank, but LocalTensorMode simulates its ranks in this one. Use"
            " longspan.testing.run_loopback to run all ranks in one process."
        )
    return context_parallel_shard(mesh, buffers, seq_dims, Contiguous() if load_balancer is None else load_balancer)


class _ContextParallel(_names["_ContextParallel"]):
    """PyTorch's module wrapper for `parallelize_module`. As there, outputs that are DTensors become local tensors.

    The layout is that of the context, or of a sharded BlockMask, or what `_cp_options.enable_load_balance` says.
    """

    def __init__(self, seq_dim: int, attention_type: Any) -> None:
        super().__init__(seq_dim, attention_type)
        if seq_dim != SEQ_DIM:
            raise PlanError(
                f"`seq_dim` must be {SEQ_DIM}, since attention takes (batch, heads, tokens, features), but got"
                f" {seq_dim!r}."
            )
        self._style = ContextParallel(seq_dim, attention_type)

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._style._apply(module, mesh)
        module.register_forward_hook(
            lambda _module, _inputs, outputs: _torch.tree_map(
                lambda x: x.to_local() if isinstance(x, DTensor) else x, outputs
            )
        )
        return module


def _create_cp_block_mask(
    mask_mod: Callable[..., Any],
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: Any,
    load_balancer: Any = None,
    _balancer_of_2_15: Any = None,
    *,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """Return the BlockMask of this rank's queries and all keys, in the order in which shards are gathered.

    `mask_mod` gets global positions. Without a balancer, `_cp_options.enable_load_balance` selects one, as in PyTorch.
    Any length is accepted. PyTorch 2.15 takes `BLOCK_SIZE` before `device_mesh`, 2.13 by name; both calls work.
    """
    if isinstance(device_mesh, int | tuple):
        BLOCK_SIZE, device_mesh, load_balancer = device_mesh, load_balancer, _balancer_of_2_15
    check_mesh(device_mesh)
    if Q_LEN != KV_LEN:
        raise PlanError(
            f"`Q_LEN` and `KV_LEN` must be equal, since both are shards of one sequence, but got {Q_LEN} and {KV_LEN}."
        )
    mask = from_mask_mod(mask_mod, Q_LEN, rows=None if B == 1 else B, heads=None if H == 1 else H)
    size, rank = device_mesh.size(), device_mesh.get_local_rank()
    balancer = default_balancer(Q_LEN, size) if load_balancer is None else balancer_of(load_balancer)
    return shard_block_mask(mask, Cut.by(balancer, Q_LEN, size), rank, device_mesh.device_type, BLOCK_SIZE)


create_cp_block_mask = _create_cp_block_mask


# -- The dispatcher ----------------------------------------------------------------------------------------------------


class _Dispatcher(TorchFunctionMode):
    """Runs attention of DTensors that are sharded along the sequence over all ranks of their mesh."""

    is_on = True

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_on and func is torch.nn.functional.scaled_dot_product_attention:
            query = args[0] if args else kwargs.get("query")
            if isinstance(query, DTensor) and tuple(query.placements) == (Shard(SEQ_DIM),):
                mesh, length = query.device_mesh, query.shape[SEQ_DIM]
                return Route(mesh, default_balancer(length, mesh.size()), None, None).sdpa(*args, **kwargs)
        return func(*args, **kwargs)


_dispatcher: _Dispatcher | None = None


def _enable_context_parallel_dispatcher() -> None:
    """Run attention of DTensors placed `[Shard(2)]` over their mesh, in this thread, until it is disabled."""
    global _dispatcher
    if _dispatcher is None:
        _dispatcher = _Dispatcher()
        _dispatcher.__enter__()
    _dispatcher.is_on = True


def _disable_context_parallel_dispatcher() -> None:
    """Undo `_enable_context_parallel_dispatcher`. Inside a context that was entered later, the mode stays, and does
    nothing."""
    global _dispatcher
    if _dispatcher is None:
        return
    _dispatcher.is_on = False
    if _torch.function_modes()[-1:] == [_dispatcher]:
        _dispatcher.__exit__(None, None, None)
        _dispatcher = None
