"""What ranks do in the Gloo tests; importable by name, as worker processes need it."""

import math
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import longspan as ls
from longspan.planning import Sizes
from longspan.run.transports import observe
from longspan.testing import dense_gradients
from tests.cases import LAYOUTS, random_layout, random_mask

MASKS = ("causal", "full", "documents", "window", "prefix", "chunked", "sinks", "per_head", "per_row", "empty")


def make_case(seed, world):
    """Plan and whole tensors of a seed, the same on every rank."""
    rng = np.random.default_rng(seed)
    total = int(rng.integers(1, 10 if rng.random() < 0.15 else 90))
    kv_heads, dim = int(rng.choice([1, 2, 3])), int(rng.choice([3, 8, 16]))
    dtype = ("float64", "float32", "bfloat16", "float16")[seed % 4]
    sizes = Sizes(
        kv_heads * int(rng.choice([1, 2])), kv_heads, dim, int(rng.choice([dim, 5])), 8, int(rng.integers(1, 3))
    )
    mask = random_mask(rng, MASKS[seed % len(MASKS)], total, sizes)
    layout = random_layout(rng, LAYOUTS[seed // 3 % len(LAYOUTS)], mask, total, world)
    heads = int(rng.choice([d for d in range(1, world + 1) if world % d == 0]))
    scheme = ["ring", "all_gather", "exchange", "all_to_all", f"hybrid({heads})", f"hybrid({heads},exchange)"][seed % 6]
    near = int(rng.choice([d for d in range(1, world + 1) if world % d == 0]))
    machine = replace(ls.planning.MACHINES["h100"], links=(ls.planning.Link(near, 1e9, 1e-6),) * 2)
    plan = ls.plan(
        mask,
        layout,
        q_heads=sizes.q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=sizes.v_head_dim,
        batch=sizes.batch,
        dtype=dtype,
        scheme=scheme,
        machine=machine,
        keep=bool(seed % 5 == 0),
    )
    draw = torch.Generator().manual_seed(seed)
    shapes = [
        (sizes.q_heads, dim),
        (kv_heads, dim),
        (kv_heads, sizes.v_head_dim),
        (sizes.q_heads, sizes.v_head_dim),
    ]
    kind = getattr(torch, dtype)
    tensors = [torch.randn(sizes.batch, h, total, d, generator=draw, dtype=torch.float64).to(kind) for h, d in shapes]
    return plan, tensors


def run_cases(seeds, world):
    """For each seed, (error, most that is allowed) of this rank's out, lse, dq, dk and dv.

    Allowed is twice the error of one device on the same inputs, and a rounding of numbers of size one: a gradient that
    is exactly zero on one device may be a rounding away from it where sums are taken in another order.
    """
    rank = dist.get_rank()
    found = []
    for seed in seeds:
        plan, (q, k, v, dout) = make_case(seed, world)
        layout = plan.layout
        own = [layout.shard(t, rank, 2).requires_grad_() for t in (q, k, v)]
        with observe() as traffic:
            out, lse = ls.attention(*own, plan, group=dist.group.WORLD, return_lse=True)
        assert traffic.sent_bytes(rank) == sum(
            t.piece.num_bytes(plan.sizes) for s in plan.steps(rank) for t in s.transfers if t.src == rank
        )
        out.backward(layout.shard(dout, rank, 2))
        wanted = dense_gradients(q, k, v, plan.mask, 1 / math.sqrt(q.shape[3]), dout)
        one = one_device(q, k, v, plan.mask, dout)
        tokens = int(layout.num_tokens[rank])
        errors = []
        for mine, single, whole in zip((out, lse, *(t.grad for t in own)), one, wanted, strict=True):
            truth = layout.shard(whole, rank, 2)[:, :, :tokens]
            allowed = 2 * _error(single, whole) + 2 * _eps(plan.dtype) * max(1.0, _size(whole))
            errors.append((_error(mine[:, :, :tokens], truth), allowed))
        found.append((seed, plan.dtype, repr(plan), errors))
    return found


def one_device(q, k, v, mask, dout):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = ls.attention(*leaves, mask, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def _eps(dtype):
    return 1e-15 if dtype == "float64" else torch.finfo(getattr(torch, dtype)).eps


def _size(x):
    finite = x[~x.isinf()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _error(mine, truth):
    """Root of the mean squared difference; rows that see nothing must agree."""
    mine = mine.detach().double()
    finite = ~truth.isinf()
    assert torch.equal(finite, ~mine.isinf()), "rows that see nothing differ"
    assert not mine.isnan().any()
    return _size(mine[finite] - truth[finite])


class Block(torch.nn.Module):
    """A transformer layer whose attention is Longspan's."""

    def __init__(self, dim, heads, plan):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.up, self.down = torch.nn.Linear(dim, 2 * dim), torch.nn.Linear(2 * dim, dim)
        self.heads, self.plan = heads, plan

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = ls.attention(q, k, v, self.plan, group=dist.group.WORLD)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def transformer(how, scheme):
    """Loss and gradients of two layers, run eagerly, compiled or checkpointed; all ranks have the same weights."""
    from torch.utils.checkpoint import checkpoint

    rank, world = dist.get_rank(), dist.get_world_size()
    mask = ls.masks.documents([70, 58]) & ls.masks.causal()
    layout = ls.layouts.zigzag(128, world, equal_tokens=True)
    plan = ls.plan(mask, layout, q_heads=2, kv_heads=2, head_dim=16, dtype="float32", scheme=scheme)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(32, 2, plan) for _ in range(2)))
    x = layout.shard(torch.randn(1, 128, 32), rank, 1).requires_grad_()
    run = {
        "eager": model,
        "compiled": torch.compile(model, fullgraph=True) if how == "compiled" else None,
        "checkpointed": lambda x: checkpoint(model, x, use_reentrant=False),
        "selective": lambda x: model[1](checkpoint(model[0], x, use_reentrant=False, context_fn=_selective)),
    }[how]
    loss = run(x).square().sum()
    loss.backward()
    return float(loss.detach()), [p.grad.numpy() for p in (x, *model.parameters())]


def _selective():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        keep = op == torch.ops.longspan.attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def dtensors():
    """DTensors sharded along tokens give what plain shards give."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    mask = ls.masks.causal(64)
    plan = ls.plan(
        mask, ls.layouts.contiguous(64, world), q_heads=2, kv_heads=2, head_dim=8, dtype="float32", scheme="exchange"
    )
    torch.manual_seed(1)
    whole = [torch.randn(1, 2, 64, 8) for _ in range(3)]
    own = [plan.layout.shard(t, rank, 2) for t in whole]
    placed = [DTensor.from_local(t, mesh, (Shard(2),)) for t in own]
    out = ls.attention(*placed, plan)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(2),)
    plain = ls.attention(*own, plan, group=mesh["cp"])
    assert torch.equal(out.to_local(), plain)
    assert torch.allclose(out.full_tensor(), ls.attention(*whole, mask), atol=1e-6)
    try:
        ls.attention(*[t.redistribute(mesh, (Shard(1),)) for t in placed], plan)
    except ls.PlanError as error:
        return str(error)
    return "not refused"


def refusals():
    """Messages of calls that do not fit their plan, as seen on this rank."""
    world = dist.get_world_size()
    plan = ls.plan(
        ls.masks.causal(32), ls.layouts.zigzag(32, world), q_heads=2, kv_heads=1, head_dim=8, dtype="float32",
        scheme="ring",
    )  # fmt: skip
    more = ls.plan(
        ls.masks.causal(32), ls.layouts.zigzag(32, world + 1), q_heads=2, kv_heads=1, head_dim=8, dtype="float32",
        scheme="ring",
    )  # fmt: skip
    q, k = torch.randn(1, 2, 32 // world, 8), torch.randn(1, 1, 32 // world, 8)
    bad = {
        "no group": lambda: ls.attention(q, k, k, plan),
        "tokens": lambda: ls.attention(q[:, :, 1:], k, k, plan, group=dist.group.WORLD),
        "dtype": lambda: ls.attention(q.double(), k.double(), k.double(), plan, group=dist.group.WORLD),
        "size": lambda: ls.attention(q, k, k, more, group=dist.group.WORLD),
    }
    messages = {}
    for name, call in bad.items():
        try:
            call()
        except ls.LongspanError as error:
            messages[name] = str(error)
    return messages
