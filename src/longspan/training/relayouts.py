"""Rows from one layout to another, and back to whole sequences.

Attention likes its tokens dealt out evenly by work; a layer that scans the sequence needs them contiguous. Only rows
whose owner changes travel, one message per pair of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.execution.inputs import check_no_tangent
from longspan.execution.relayouts import Relayout
from longspan.execution.simulated import SimulatedRank
from longspan.layouts import Layout
from longspan.training.groups import BatchError, check_layout, process_group


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
    if isinstance(members, SimulatedRank):
        return members.meet("relayout", x_local, lambda parts: _shards(source.unshard(parts, dim), target, dim))
    return Relayout.apply(x_local, source, target, members, dim % x_local.ndim)  # type: ignore[return-value]


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
    if isinstance(members, SimulatedRank):
        mine = x_local.detach()
        whole = members.meet("gather_outputs", mine, lambda parts: [layout.unshard(parts, dim).contiguous()] * size)
        return whole.clone() if to in (None, rank) else None
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


def _shards(whole: Tensor, layout: Layout, dim: int) -> list[Tensor]:
    return [layout.shard(whole, rank, dim) for rank in range(layout.world_size)]


def _check_group(layout: Layout, group: dist.ProcessGroup, what: str) -> None:
    if group.size() != layout.world_size:
        raise BatchError(
            f"{what} got {layout} and a group of {group.size()} ranks. Make the layout for the group that holds the"
            f" sequence, or pass that group."
        )
