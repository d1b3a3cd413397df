"""Move rows from one layout to another. Only rows that change their rank are sent, one message per pair of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.layouts import Layout
from longspan.layouts.layout import to_device
from longspan.spans import Ints


@dataclass(frozen=True)
class Moves:
    """One rank's part of a conversion: source and target slots of rows that stay, are sent and are received."""

    keep_from: Ints
    keep_to: Ints
    send_from: Ints
    receive_to: Ints
    num_sent: list[int]
    num_received: list[int]
    num_slots: int


@lru_cache(maxsize=256)
def moves(source: Layout, target: Layout, rank: int) -> Moves:
    """Return the rows that a rank keeps, sends and receives. Both ends order a message by position."""
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


class Relayout(torch.autograd.Function):
    """This rank's rows in another layout; backward moves gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, target: Layout, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.back = (target, source, group, dim)
        return _move_rows(x, moves(source, target, group.rank()), group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return Relayout.apply(grads[0], *ctx.back), None, None, None, None  # type: ignore[return-value]


def _move_rows(x: Tensor, plan: Moves, group: dist.ProcessGroup, dim: int) -> Tensor:
    rows = x.movedim(dim, 0)
    shape = rows.shape[1:]
    send = rows.index_select(0, _index_like(x, plan.send_from)).contiguous()
    received = x.new_empty((len(plan.receive_to), *shape))
    dist.all_to_all_single(received, send, plan.num_received, plan.num_sent, group=group)
    out = x.new_zeros((plan.num_slots, *shape))
    out.index_copy_(0, _index_like(x, plan.keep_to), rows.index_select(0, _index_like(x, plan.keep_from)))
    out.index_copy_(0, _index_like(x, plan.receive_to), received)
    return out.movedim(0, dim).contiguous()


def _index_like(x: Tensor, index: Ints) -> Tensor:
    return to_device(torch.from_numpy(index), x.device)
