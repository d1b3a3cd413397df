"""Rows from one layout to another, and back to whole sequences.

Attention likes its tokens dealt out evenly by work; a layer that scans the sequence needs them contiguous. Only rows
whose owner changes travel, one message per pair of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.execution.inputs import check_no_tangent
from longspan.layouts import Layout
from longspan.span import Ints
from longspan.training.groups import BatchError, check_layout, process_group


@dataclass(frozen=True)
class Moves:
    """One rank's part of a conversion: slots to take rows from and to put rows into, staying rows first."""

    keep_from: Ints
    keep_to: Ints
    send_from: Ints
    receive_to: Ints
    num_sent: list[int]
    num_received: list[int]
    num_slots: int


@lru_cache(maxsize=256)
def moves(source: Layout, target: Layout, rank: int) -> Moves:
    """What the rank keeps, sends and receives. Both ends order a message by position, so it needs no header."""
    mine = source.positions(rank)[: int(source.num_tokens[rank])]
    wanted = target.positions(rank)[: int(target.num_tokens[rank])]
    to, from_ = target.owner(mine), source.owner(wanted)
    sent, received = np.lexsort((mine, to)), np.lexsort((wanted, from_))
    stays, stayed = to[sent] == rank, from_[received] == rank
    return Moves(
        sent[stays],
        received[stayed],
        sent[~stays],
        received[~stayed],
        np.bincount(to[to != rank], minlength=target.world_size).tolist(),
        np.bincount(from_[from_ != rank], minlength=source.world_size).tolist(),
        target.num_slots(rank),
    )


@torch.compiler.disable()
def relayout(x_local: Tensor, source: Layout, target: Layout, group: Any, dim: int) -> Tensor:
    """This rank's rows in `target`, from its rows in `source`, along `dim`. Gradients take the way back.

    Shards may differ in length. Padding of `target` holds zeros; padding of `source` is dropped and gets no gradient.
    Compiled code stops before and goes on after.
    """
    for layout in (source, target):
        check_layout(layout, "relayout")
    check_no_tangent(x_local=x_local)
    members = process_group(group, "relayout")
    if (source.seq_len, source.world_size) != (target.seq_len, target.world_size):
        raise BatchError(f"relayout from {source} to {target}: both must be of one sequence on the same ranks.")
    _check_group(source, members, "relayout")
    source._check_size(x_local, dim, source.num_slots(members.rank()), f"the shard of rank {members.rank()}")
    if source == target:
        return x_local
    return _Relayout.apply(x_local, source, target, members, dim % x_local.ndim)  # type: ignore[return-value]


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, target: Layout, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.back = (target, source, group, dim)
        return _moved(x, moves(source, target, group.rank()), group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Relayout.apply(grads[0], *ctx.back), None, None, None, None  # type: ignore[return-value]


def _moved(x: Tensor, plan: Moves, group: dist.ProcessGroup, dim: int) -> Tensor:
    rows = x.movedim(dim, 0)
    shape = rows.shape[1:]
    send = rows.index_select(0, _on(x, plan.send_from)).contiguous()
    received = x.new_empty((len(plan.receive_to), *shape))
    dist.all_to_all_single(received, send, plan.num_received, plan.num_sent, group=group)
    out = x.new_zeros((plan.num_slots, *shape))
    out.index_copy_(0, _on(x, plan.keep_to), rows.index_select(0, _on(x, plan.keep_from)))
    out.index_copy_(0, _on(x, plan.receive_to), received)
    return out.movedim(0, dim).contiguous()


def _on(x: Tensor, index: Ints) -> Tensor:
    return torch.as_tensor(index, device=x.device)


@torch.compiler.disable()
def gather_outputs(x_local: Tensor, layout: Layout, group: Any, dim: int, *, to: int | None = None) -> Tensor | None:
    """Logits, hidden states or losses of the whole sequence in global order, without padding: on every rank, or on
    group rank `to` alone (None on the others). For evaluation: no gradients.
    """
    check_layout(layout, "gather_outputs")
    check_no_tangent(x_local=x_local)
    members = process_group(group, "gather_outputs")
    _check_group(layout, members, "gather_outputs")
    rank, size = members.rank(), members.size()
    layout._check_size(x_local, dim, layout.num_slots(rank), f"the shard of rank {rank}")
    if x_local.requires_grad and torch.is_grad_enabled():
        raise BatchError(
            "gather_outputs is for evaluation, but this tensor wants gradients, which would be dropped. Call it under"
            " torch.no_grad(); to train on other rows, use relayout."
        )
    if to is not None and not 0 <= to < size:
        raise BatchError(f"gather_outputs was asked to gather to rank {to}, but the group has ranks 0 to {size - 1}.")
    rows = x_local.detach().movedim(dim, 0)
    most = max(
        layout.num_slots(r) for r in range(size)
    )  # collectives want one size; what is beyond a shard is not read
    message = rows.new_zeros((most, *rows.shape[1:]))
    message[: len(rows)] = rows
    parts = [torch.empty_like(message) for _ in range(size)] if to in (None, rank) else None
    if to is None:
        dist.all_gather(parts, message, group=members)  # type: ignore[arg-type]
    else:
        dist.gather(message, parts, group=members, group_dst=to)
    if parts is None:
        return None
    whole = layout.unshard([part[: layout.num_slots(r)] for r, part in enumerate(parts)])
    return whole.movedim(0, dim).contiguous()


def _check_group(layout: Layout, group: dist.ProcessGroup, what: str) -> None:
    if group.size() != layout.world_size:
        raise BatchError(
            f"{what} got {layout} and a group of {group.size()} ranks. Make the layout for the group that holds the"
            f" sequence, or pass that group."
        )
