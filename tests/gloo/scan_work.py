"""What ranks do in the tests of recurrences on Gloo; importable by name, as worker processes need it."""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan.run.transports import observe
from tests.spread_cases import asked, distances, leaves, one_device, problem

WAYS = ("plain", "checkpoint", "reentrant", "two in flight", "no_grad first", "backward twice")


def run_cases(seeds, world):
    """(problem, how it was run, distances from one device) of each seed on this rank; shares are summed over ranks."""
    found = []
    for seed in seeds:
        p, way = problem(seed, world=world), WAYS[seed % len(WAYS)]
        found.append((str(p), way, run_one(p, way, dist.get_rank())))
    return found


def run_one(p, way, rank):
    plan, layout = p.plan(), p.layout
    own = leaves({name: layout.shard(t, rank, 1) for name, t in p.tokens.items()} | p.shared)
    names, dout = list(own), layout.shard(p.dout, rank, 1)

    def call(*values):
        return asked(p, dict(zip(names, values, strict=True)), plan=plan, group=dist.group.WORLD)

    if way in ("checkpoint", "reentrant"):
        with observe() as traffic:
            out = checkpoint(call, *own.values(), use_reentrant=way == "reentrant")
            out.backward(dout)
        assert traffic.sent_bytes(rank) == 2 * _sent(plan, rank, "forward") + _sent(plan, rank, "backward"), (
            "not once more"
        )
    elif way == "two in flight":
        one, two = call(*own.values()), call(*own.values())
        (0.75 * one).backward(dout)
        (0.25 * two).backward(dout)
        out = two
    else:
        with torch.no_grad():
            before = call(*own.values()) if way == "no_grad first" else None
        with observe() as traffic:
            out = call(*own.values())
        assert traffic.sent_bytes(rank) == _sent(plan, rank, "forward")
        assert before is None or (torch.equal(before, out) and not before.requires_grad)
        if way == "backward twice":
            out.backward(0.5 * dout, retain_graph=True)
        out.backward(0.5 * dout if way == "backward twice" else dout)
    got = {"out": out.detach()} | {name: t.grad for name, t in own.items()}
    return _distances(got, one_device(p), p, rank)


def _sent(plan, rank, direction):
    sent = [t for step in plan.steps(rank, direction) for t in step.transfers if t.src == rank]
    return sum(t.piece.num_bytes(plan.sizes) for t in sent)


def _distances(got, expected, p, rank):
    tokens = int(p.layout.num_tokens[rank])
    mine = {}
    for name, whole in expected.items():
        if name in p.shared:
            share = torch.zeros_like(whole) if got[name] is None else got[name].double()
            dist.all_reduce(share)
            got[name], mine[name] = share, whole
        else:
            part = torch.zeros(0) if got[name] is None else got[name][:, tokens:]
            assert not part.any(), f"padding of {name} is not 0"
            got[name] = p.layout.shard(torch.zeros_like(whole), rank, 1) if got[name] is None else got[name]
            mine[name] = p.layout.shard(whole, rank, 1)
    return distances(got, mine)


def autocast(form):
    """Distances of ranks and of one device from float64, for projections under bf16 autocast."""
    world, rank = dist.get_world_size(), dist.get_rank()
    p = problem(7, form=form, world=world, layout="zigzag", total=40, batch=2, documents=[23, 17])
    expected = one_device(p)
    found = []
    for where in ({"plan": p.plan(dtype="float32"), "group": dist.group.WORLD}, {"documents": p.documents}):
        tokens = {n: p.layout.shard(t, rank, 1) for n, t in p.tokens.items()} if "plan" in where else p.tokens
        own = leaves({name: t.float() for name, t in (tokens | p.shared).items()})
        with torch.autocast("cpu", torch.bfloat16):
            half = {n: t @ torch.eye(t.shape[-1]) if t.ndim == 4 else t for n, t in own.items()}  # as projections do
            assert any(t.dtype == torch.bfloat16 for t in half.values())
            out = asked(p, half, **where)
        dout = p.layout.shard(p.dout, rank, 1) if "plan" in where else p.dout
        out.backward(dout.to(out.dtype))
        got = {"out": out.detach().double()} | {name: t.grad.double() for name, t in own.items()}
        found.append(_distances(got, expected, p, rank) if "plan" in where else distances(got, expected))
    return found


def layers(how):
    """Loss and gradients of a small model with three recurrences, with or without a checkpoint around each layer."""
    world, rank = dist.get_world_size(), dist.get_rank()
    layout, documents = ls.layouts.zigzag(64, world), [37, 27]
    plans = {
        maps: ls.scan_plan(documents, layout, heads=2, keys=4, values=4, maps=maps, batch=2, dtype="float64")
        for maps in ("matrix", "scalar")
    }
    torch.manual_seed(0)
    weights = torch.randn(3, 8, 34, dtype=torch.float64).mul_(0.3).requires_grad_()
    x = layout.shard(torch.randn(2, 64, 8, dtype=torch.float64), rank, 1)

    def layer(x, number):
        mixed = x @ weights[number]
        q, k, v = mixed[..., :24].unflatten(-1, (3, 2, 4)).unbind(2)
        gates = -torch.nn.functional.softplus(mixed[..., 24:28])
        if number % 2:
            y = ls.linear_attention(
                q, k, v, gates[..., :2], plan=plans["scalar"], group=dist.group.WORLD, name=str(number)
            )
        else:
            beta = mixed[..., 28:30].sigmoid()
            asked = {"plan": plans["matrix"], "group": dist.group.WORLD, "l2norm": True, "name": str(number)}
            y = ls.gated_delta_rule(q, k, v, gates[..., :2], beta, **asked)
        return x + y.flatten(2)

    for number in range(3):
        if how == "eager":
            x = layer(x, number)
        else:
            x = checkpoint(layer, x.requires_grad_(), number, use_reentrant=how == "reentrant")
    loss = x.square().sum()
    loss.backward()
    total, gradient = loss.detach().clone(), weights.grad.clone()
    dist.all_reduce(total)
    dist.all_reduce(gradient)
    return total.item(), gradient.numpy()
