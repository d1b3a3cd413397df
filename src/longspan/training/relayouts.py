"""Rows from one layout to another, and back to whole sequences.

Attention likes its tokens dealt out evenly by work; a layer that scans the sequence needs them contiguous. Only rows
whose owner changes travel, one message per pair of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.execution.handed import Group
from longspan.execution.inputs import check_carried, check_no_tangent
from longspan.execution.relayouts import Relayout
from longspan.execution.simulated import SimulatedRank
from longspan.layouts import Layout
from longspan.training.groups import BatchError, check_layout, process_group
from longspan.training.tokens import check_size, group_and_layout, whole_rows


@torch.compiler.disable()
def relayout(x_local: Tensor, source: Layout, target: Layout, group: Group, dim: int) -> Tensor:
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
    check_size(source, members, "relayout")
    source._check_size(x_local, dim, source.num_slots(members.rank()), f"the shard of rank {members.rank()}")
    check_carried(source, dim % x_local.ndim, x_local=x_local)
    if source == target:
        return x_local
    if isinstance(members, SimulatedRank):
        return members.meet("relayout", x_local, lambda parts: _shards(source.unshard(parts, dim), target, dim))
    return Relayout.apply(x_local, source, target, members, dim % x_local.ndim)  # type: ignore[return-value]


@torch.compiler.disable()
def gather_outputs(x_local: Tensor, layout: Layout, group: Group, dim: int, *, to: int | None = None) -> Tensor | None:
    """Logits, hidden states or losses of the whole sequence in global order, without padding: on every rank, or on
    group rank `to` alone (None on the others). For evaluation: no gradients; `gather_tokens` has them.
    """
    members, layout = group_and_layout(x_local, layout, group, dim, "gather_outputs")
    if x_local.requires_grad and torch.is_grad_enabled():
        raise BatchError(
            "gather_outputs is for evaluation, but this tensor wants gradients, which would be dropped. Call it under"
            " torch.no_grad(); for a loss of whole sequences use gather_tokens, to train on other rows relayout."
        )
    size = members.size()
    if to is not None and not 0 <= to < size:
        raise BatchError(f"gather_outputs was asked to gather to rank {to}, but the group has ranks 0 to {size - 1}.")
    return whole_rows(x_local, layout, members, dim, to)


def _shards(whole: Tensor, layout: Layout, dim: int) -> list[Tensor]:
    return [layout.shard(whole, rank, dim) for rank in range(layout.world_size)]
