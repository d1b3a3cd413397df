"""Stand-in for longspan.training.gather_tokens until it is merged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Any, group: Any, dim: int, factor: int) -> Tensor:
        ctx.back = layout, group.rank(), dim, factor
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
        layout, rank, dim, factor = ctx.back
        return layout.shard(grads[0], rank, dim) * factor, None, None, None, None


def gather_tokens(values: Tensor, like: Any, group: Any, dim: int = -1, *, gradients: str | None = None) -> Tensor:
    factor = group.size() if gradients == "average" else 1
    return _Gathered.apply(values, like, group, dim, factor)  # type: ignore[return-value]
