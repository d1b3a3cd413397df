"""What ranks of a pool do for tests of the order of calls. Each has a group of its own: a failed one stays failed."""

from datetime import timedelta

import torch
import torch.distributed as dist

import longspan as ls
from longspan.testing.oracle import dense_gradients

S, D, SCALE = 64, 8, 0.4
LIMIT = 1e-12
"""float64 over 64 keys: sums of some hundred terms of size 1."""
TIMEOUT = 2.0
"""Seconds of a group whose ranks wait for messages that do not come."""
DOCS = {"A": None, "B": [30, 34], "C": [13, 40, 11]}


def _plan(which, scheme, world, **options):
    mask = ls.masks.causal() if DOCS[which] is None else ls.masks.documents(DOCS[which]) & ls.masks.causal()
    asked = {"q_heads": 4, "kv_heads": 4, "head_dim": D, "dtype": "float64", "scheme": scheme}
    return ls.plan(mask, ls.layouts.zigzag(S, world), **{**asked, **options})


class Shot:
    """One call: its inputs, its output gradient, and the truth."""

    def __init__(self, plan, group, seed, **options):
        draw = torch.Generator().manual_seed(seed)
        self.plan, self.rank = plan, dist.get_rank()
        whole = [torch.randn(1, 4, S, D, generator=draw, dtype=torch.float64) for _ in range(4)]
        self.truth = dense_gradients(*whole[:3], plan.mask, SCALE, whole[3])
        self.qkv = [self.cut(x).clone().requires_grad_() for x in whole[:3]]
        self.dout = self.cut(whole[3])
        self.out = ls.attention(*self.qkv, plan, group=group, scale=SCALE, **options)

    def cut(self, x):
        return self.plan.layout.shard(x, self.rank, dim=2)

    def backward(self, **options):
        """The worst error of the output and of the gradients."""
        found = self.out.detach(), *torch.autograd.grad(self.out, self.qkv, self.dout, **options)
        truth = self.truth[0], *self.truth[2:]
        return max(float((a - self.cut(b)).abs().max()) for a, b in zip(found, truth, strict=True))


def right_orders(scheme, seed):
    """Errors of many calls in flight, whose backward passes come in any order that all ranks share, some twice."""
    group, world = dist.new_group(), dist.get_world_size()
    plans = [_plan(which, scheme, world, keep=keep) for which, keep in (("A", False), ("B", True), ("C", False))]
    draw = torch.Generator().manual_seed(seed)
    errors, flying = [], []
    for turn in range(14):
        if turn < 8 or not flying:
            plan = plans[int(torch.randint(3, (), generator=draw))]
            name = ["", "text", "image"][int(torch.randint(3, (), generator=draw))]
            flying.append(Shot(plan, group, 100 * seed + turn, name=name))
        if int(torch.randint(2, (), generator=draw)) or turn >= 8:
            shot = flying.pop(int(torch.randint(len(flying), (), generator=draw)))
            if turn % 3 == 0:
                errors.append(shot.backward(retain_graph=True))
            errors.append(shot.backward())
    return max(errors) < LIMIT, len(errors)


def swapped(how, scheme):
    """The errors of results, or the exception that ends the wait, when rank 1 does two things in another order."""
    group, world = dist.new_group(timeout=timedelta(seconds=TIMEOUT)), dist.get_world_size()
    first, second = _pair(how, scheme, group, world)
    for seed in range(2):  # both are agreed on, and right
        assert first(seed) < LIMIT
        assert second(seed) < LIMIT
    if how == "backward":
        shots = [Shot(_plan("A", scheme, world), group, seed) for seed in (7, 8)]
        first, second = (lambda _, shot=shot: shot.backward() for shot in shots)
    order = (second, first) if dist.get_rank() == 1 else (first, second)
    errors = []
    try:
        for act in order:
            errors.append(act(9))
    except RuntimeError as error:
        return errors, str(error)
    return errors, ""


def _pair(how, scheme, group, world):
    """Two calls, each forward and backward, that are taken for each other in the way that is asked for."""
    if how == "plans":
        plans = [_plan(which, scheme, world) for which in "AB"]
        return [lambda seed, plan=plan: Shot(plan, group, seed).backward() for plan in plans]
    plan = _plan("A", scheme, world)
    names = ("text", "image") if how == "names" else ("", "")
    return [
        lambda seed, name=name, n=n: Shot(plan, group, seed + 50 * n, name=name).backward()
        for n, name in enumerate(names)
    ]


def summed_twice():
    """Whether sums over ranks in one order are right: the gradient of sinks, in two calls in flight."""
    group, world = dist.new_group(), dist.get_world_size()
    plan = _plan("A", "ring", world)
    tables = [torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    tables = [t.requires_grad_() for t in tables]
    shots = [Shot(plan, group, n, sinks=table) for n, table in enumerate(tables)]
    backwards = [torch.autograd.grad(shots[n].out, tables[n], shots[n].dout)[0] for n in (1, 0)][::-1]
    alone = ls.plan(plan.mask, ls.layouts.contiguous(S, 1), q_heads=4, kv_heads=4, head_dim=D, dtype="float64")
    for n, found in enumerate(backwards):
        draw = torch.Generator().manual_seed(n)
        q, k, v, dout = (torch.randn(1, 4, S, D, generator=draw, dtype=torch.float64) for _ in range(4))
        out = ls.attention(q, k, v, alone, sinks=tables[n], scale=SCALE)
        if float((torch.autograd.grad(out, tables[n], dout)[0] - found).abs().max()) > LIMIT:
            return False
    return True
