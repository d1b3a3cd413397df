"""What ranks do in tests/gloo/test_sealed.py; importable by name, as worker processes need it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import longspan as ls
from longspan.training import make_mesh, shard_batch, token_loss

VOCAB, DIM, HEADS, WINDOW, LENGTHS = 19, 32, 4, 24, [23, 57, 16]

BF16 = torch.bfloat16
POLICIES = {
    "cast": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "no cast": {"param_dtype": BF16, "reduce_dtype": torch.float32, "cast_forward_inputs": False},
    "output": {"param_dtype": BF16, "reduce_dtype": torch.float32, "output_dtype": torch.float32},
    "param only": {"param_dtype": BF16},
}
WRAPPERS = [*(f"fsdp2 {name}" for name in POLICIES), "fsdp2 checkpointed", "fsdp1", "ddp", "ddp autocast"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.sinks = nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Parameter(torch.randn(HEADS))
        self.got = []

    def forward(self, x, what, **options):
        self.got.append(what)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = ls.attention(q, k, v, what, sinks=self.sinks.to(q.dtype), captured_grads="share", **options)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two kinds of layers, which are handed their plans or masks in a list, as in docs/training.md."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(VOCAB, DIM), nn.Embedding(96, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids, positions, whats, **options):
        x = self.tokens(ids) + self.places(positions)
        for block, what in zip(self.blocks, whats, strict=True):
            x = block(x, what, **options)
        return self.head(x)


def made(seed):
    torch.manual_seed(seed)
    model = Model()
    ids = torch.randint(0, VOCAB, (1, sum(LENGTHS)))
    documents = ls.masks.documents(LENGTHS)
    return model, ids, [documents & ls.masks.sliding_window(WINDOW - 1), documents & ls.masks.causal()]


def wrapped(model, how, mesh):
    if how == "fsdp1":
        policy = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
        return FullyShardedDataParallel(
            model, mesh.dp_cp.get_group(), mixed_precision=policy, device_id=torch.device("cpu")
        )
    if how.startswith("ddp"):
        return DistributedDataParallel(model, process_group=mesh.dp_cp.get_group())
    name = how.removeprefix("fsdp2 ")
    if name == "checkpointed":
        name, model.blocks = "cast", nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    for block in model.blocks:  # what they give stays in bfloat16
        fully_shard(block, mesh=mesh.dp_cp, mp_policy=MixedPrecisionPolicy(**{**POLICIES[name], "output_dtype": None}))
    return fully_shard(model, mesh=mesh.dp_cp, mp_policy=MixedPrecisionPolicy(**POLICIES[name]))


def losses(how, seed, steps):
    """The losses of some steps, the first step's gradients, and whether every layer got the very plans it was given."""
    mesh = make_mesh(cp=dist.get_world_size(), device_type="cpu")
    model, ids, masks = made(seed)
    blocks = list(model.blocks)
    dtype = "float32" if how == "ddp" else "bfloat16"
    layout = ls.layouts.balanced(*masks, world_size=mesh.cp.size())
    sizes = {"q_heads": HEADS, "kv_heads": HEADS, "head_dim": DIM // HEADS, "dtype": dtype}
    plans = [ls.plan(mask, layout, **sizes) for mask in masks]
    batch = {"input_ids": ids, "labels": ids}
    mine = shard_batch(batch, layout, mesh.cp.get_local_rank(), documents=LENGTHS, positions="document")
    model = wrapped(model, how, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found, first = [], None
    for _ in range(steps):
        with torch.autocast("cpu", BF16, enabled="autocast" in how):
            logits = model(mine["input_ids"], mine["position_ids"], plans, group=mesh.cp)
        loss = token_loss(logits.float(), mine["shift_labels"], group=mesh.dp_cp, gradients="average")
        loss.backward()
        if first is None and how != "fsdp1":  # which keeps them flat, a part on each rank
            first = [whole(p.grad).clone().numpy() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    same = [
        bool(block.got) and all(got is plan for got in block.got) for block, plan in zip(blocks, plans, strict=True)
    ]
    return found, first, same, str(logits.dtype)


def whole(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad
