"""The oracle: dense attention in float64, with every pair written out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longspan.masks import Mask


def allowed(mask: Mask, batch: int, heads: int, seq_len: int) -> Tensor:
    """Return the mask as a dense boolean tensor (batch, heads, queries, keys)."""
    position, mask = np.arange(seq_len), mask.resized(seq_len)
    rows, columns = (x.astype(np.int64) for x in np.broadcast_arrays(position[:, None], position[None, :]))
    planes = {id(plane): plane.allows(rows, columns) for plane in mask.distinct_planes()}  # heads share most of them
    table = [[planes[id(mask.plane(b, h))] for h in range(heads)] for b in range(batch)]
    return torch.as_tensor(np.array(table)).view(batch, heads, seq_len, seq_len)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and lse in float64, differentiable; rows that see nothing are (0, -inf)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = scale * (q @ k.transpose(2, 3))
    scores = scores.masked_fill(~allowed(mask, q.shape[0], q.shape[1], q.shape[2]), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    return torch.exp(scores - finite.unsqueeze(-1)) @ v, lse


def dense_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output, lse, dq, dk and dv in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    out, lse = dense_attention(q, k, v, mask, scale)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    return out.detach(), lse.detach(), dq, dk, dv
