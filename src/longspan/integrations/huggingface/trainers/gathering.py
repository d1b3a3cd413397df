"""Stand-in for longspan.training.gather_tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Any, group: Any, dim: int) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, group.rank(), dim
        rows = x.movedim(dim, 0)
        most = max(layout.num_slots(r) for r in range(group.size()))
        message = rows.new_zeros((most, *rows.shape[1:]))
        message[: len(rows)] = rows
        parts = [torch.empty_like(message) for _ in range(group.size())]
        dist.all_gather(parts, message, group=group)
        whole = layout.unshard([part[: layout.num_slots(r)] for r, part in enumerate(parts)])
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.layout.shard(grads[0], ctx.rank, ctx.dim), None, None, None


def joined(x: Tensor, layout: Any, group: Any, dim: int) -> Tensor:
    return _Joined.apply(x, layout, group, dim)  # type: ignore[return-value]
