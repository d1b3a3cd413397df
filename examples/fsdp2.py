"""Train with FSDP2 and sharded, packed sequences in plain PyTorch: torchrun --nproc-per-node 2 examples/fsdp2.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import longspan as ls
from longspan.training import check_same, make_mesh, shard_batch, token_loss

SEQ_LEN, VOCAB, DIM, HEADS, LAYERS, STEPS = 192, 32, 64, 4, 2, 20


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.head = attend, nn.Linear(DIM, VOCAB)
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ_LEN, DIM)
        self.qkv = nn.ModuleList(nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM)) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in self.qkv)

    def forward(self, ids, positions, what, **options):
        x = self.tokens(ids) + self.places(positions)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + mlp(self.attend(q, k, v, what, **options).transpose(1, 2).flatten(2))
        return self.head(x) / DIM**0.5


def packed_batch(step):
    """Return the document lengths of a step, and their tokens: each document counts up from a random start."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.tensor([0, *torch.randint(1, SEQ_LEN, (3,), generator=draw).unique(), SEQ_LEN]).diff()
    offsets = torch.randint(0, VOCAB, lengths.shape, generator=draw).repeat_interleave(lengths)
    ids = (torch.arange(SEQ_LEN) + offsets)[None] % VOCAB
    return lengths.tolist(), {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = make_mesh(cp=dist.get_world_size(), device_type="cpu")
    torch.manual_seed(0)
    model = Model(ls.attention)  # the same weights on every rank before sharding
    fully_shard(model, mesh=mesh.dp_cp)  # for a large model: every layer first
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        lengths, batch = packed_batch(step)
        check_same(batch, mesh.cp)
        mask = ls.masks.documents(lengths) & ls.masks.causal()
        layout = ls.layouts.balanced(mask, world_size=mesh.cp.size())
        plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM // HEADS, dtype="float32")
        mine = shard_batch(batch, layout, mesh.cp.get_local_rank(), documents=lengths, positions="document")
        logits = model(mine["input_ids"], mine["position_ids"], plan, group=mesh.cp)
        loss = token_loss(logits, mine["shift_labels"], group=mesh.dp_cp, gradients="average")  # FSDP averages
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()
