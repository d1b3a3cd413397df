"""Forward and backward against PyTorch's own, run by tests/house/test_optimised.py under `python -O` and `-OO`: on one
device, over ranks in one process, or over the ranks of torchrun. No assert: they would not run."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import longspan as ls
from longspan.verification import loopback_attention

torch.manual_seed(0)
MASK = ls.masks.documents([21, 43]) & ls.masks.causal()
Q, K, V = (torch.randn(1, heads, 64, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
DOUT = torch.randn(1, 4, 64, 8, dtype=torch.float64)
DENSE = torch.as_tensor(MASK.allows(torch.arange(64).numpy()[:, None], torch.arange(64).numpy()))
TRUTH = F.scaled_dot_product_attention(Q, K, V, attn_mask=DENSE, enable_gqa=True)
GRADS = torch.autograd.grad(TRUTH, (Q, K, V), DOUT)


def check(what, found, expected):
    worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    print(f"{what}: {worst:.1e}, asserts {'on' if __debug__ else 'off'}", flush=True)
    if not worst < 1e-12:
        sys.exit(f"{what} is off by {worst}")


def over_ranks(scheme):
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = ls.layouts.zigzag(64, world)
    plan = ls.plan(MASK, layout, q_heads=4, kv_heads=2, head_dim=8, dtype="float64", scheme=scheme)
    mine = [layout.shard(x.detach(), rank, dim=2).requires_grad_() for x in (Q, K, V)]
    out = ls.attention(*mine, plan, group=dist.group.WORLD)
    grads = torch.autograd.grad(out, mine, layout.shard(DOUT, rank, dim=2))
    expected = [layout.shard(x, rank, dim=2) for x in (TRUTH, *GRADS)]
    check(f"rank {rank} of {world}, {scheme}", (out, *grads), expected)


if "RANK" in os.environ:
    dist.init_process_group("gloo")
    for scheme in ("exchange", "ring", "all_gather", "all_to_all"):
        over_ranks(scheme)
    dist.destroy_process_group()
else:
    out = ls.attention(Q, K, V, MASK)
    check("one device", (out, *torch.autograd.grad(out, (Q, K, V), DOUT)), (TRUTH, *GRADS))
    for scheme in ("exchange", "ring", "all_gather", "all_to_all"):
        layout = ls.layouts.zigzag(64, 2)
        plan = ls.plan(MASK, layout, q_heads=4, kv_heads=2, head_dim=8, dtype="float64", scheme=scheme)
        check(f"two ranks in one process, {scheme}", (loopback_attention(Q, K, V, plan),), (TRUTH,))
