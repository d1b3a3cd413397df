"""What ranks do in tests/gloo/test_prefetch.py; importable by name, as worker processes need it."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import longspan as ls
from longspan.run.walk import PlanWalk
from longspan.training import prefetch

TOKENS, HEADS, DIM = 96, 2, 8


def _lengths(step):
    """Documents of one step, other ones in every step."""
    rng = np.random.default_rng(step)
    edges = np.sort(rng.choice(np.arange(1, TOKENS), 5, replace=False))
    return np.diff([0, *edges, TOKENS]).tolist()


def _plan(lengths, scheme, world):
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=world, seq_len=TOKENS)
    return ls.plan(
        mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM, dtype="float64", scheme=scheme, keep=scheme == "ring"
    )


def _reference(lengths, q, k, v, dout):
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    number = torch.repeat_interleave(torch.tensor(lengths))
    allowed = (number[:, None] == number) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(*whole, attn_mask=allowed)
    return [out, *torch.autograd.grad(out, whole, dout)]


def train(steps, scheme):
    """Errors of every step with other documents, and programs recorded by the loop's own thread."""
    import threading

    rank, world = dist.get_rank(), dist.get_world_size()
    recorded: list[str] = []
    program = PlanWalk.program

    def noted(self):
        recorded.append(threading.current_thread().name)
        return program(self)

    def prepare(step):
        plan = _plan(_lengths(step), scheme, world)
        plan.prepare(rank)
        return step, plan

    errors = []
    PlanWalk.program = noted
    try:
        for step, plan in prefetch(range(steps), prepare):
            torch.manual_seed(step)
            whole = [torch.randn(1, HEADS, TOKENS, DIM, dtype=torch.float64) for _ in range(4)]
            q, k, v, dout = (plan.layout.shard(t, rank, dim=2) for t in whole)
            mine = [t.requires_grad_() for t in (q, k, v)]
            out = ls.attention(*mine, plan, group=dist.group.WORLD)
            found = [out, *torch.autograd.grad(out, mine, dout)]
            expected = [plan.layout.shard(t, rank, dim=2) for t in _reference(_lengths(step), *whole)]
            errors.append(max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)))
    finally:
        PlanWalk.program = program
    return max(errors), [name for name in recorded if "prefetch" not in name], len(recorded)
