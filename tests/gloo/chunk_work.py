"""What ranks do in the test of chunks on Gloo; importable by name, as worker processes need it."""

import torch
import torch.distributed as dist

import longspan as ls
from longspan.errors import AgreementError

TOKENS, CHUNKS = 192, 8
MASK = ls.masks.documents([100, 70, 22]) & ls.masks.causal()


def plan_of(layout, world, dtype, chunks=CHUNKS):
    made = getattr(ls.layouts, layout)(TOKENS, world)
    return ls.plan(MASK, made, q_heads=4, kv_heads=2, head_dim=16, dtype=dtype, chunks=chunks)


def shards(layout, world, dtype):
    """This rank's out, lse, dq, dk and dv, as autograd gives them; without ranks those of world size one."""
    plan, group = plan_of(layout, world, dtype), dist.group.WORLD if world > 1 else None
    rank = dist.get_rank() if world > 1 else 0
    draw = torch.Generator().manual_seed(11)
    q, k, v, dout = (torch.randn(1, h, TOKENS, 16, generator=draw).to(dtype) for h in (4, 2, 2, 4))
    own = [plan.layout.shard(t, rank, 2).requires_grad_() for t in (q, k, v)]
    out, lse = ls.attention(*own, plan, group=group, return_lse=True)
    out.backward(plan.layout.shard(dout, rank, 2))
    # Numbers of bits: a worker process hands over plain values, and zeros of either sign are told apart.
    found = (out.detach(), lse.detach(), *(t.grad for t in own))
    return [t.contiguous().view(torch.int16 if t.itemsize == 2 else torch.int32).numpy() for t in found]


def disagreement():
    """What is said where one rank plans in other chunks than the others."""
    plan = plan_of("contiguous", 2, torch.float32, chunks=8 if dist.get_rank() else 4)
    own = [torch.zeros(1, h, TOKENS // 2, 16) for h in (4, 2, 2)]
    try:
        ls.attention(*own, plan, group=dist.group.WORLD)
    except AgreementError as error:
        return str(error)
    return "no refusal"
