"""Train a block diffusion model: torchrun --nproc-per-node 2 examples/block_diffusion.py

The sequence is a noisy copy of the tokens and then the clean tokens. A noisy block is denoised all at once: it sees
itself and the clean blocks before it. Clean blocks see the clean ones up to themselves.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import longspan as ls

TOKENS, BLOCK, VOCAB, HEADS, DIM, LAYERS = 900, 12, 50, 4, 32, 2


def sees(b, h, i, j):
    noisy_i, noisy_j = i < TOKENS, j < TOKENS
    block_i, block_j = i % TOKENS // BLOCK, j % TOKENS // BLOCK
    own = (block_i == block_j) & (noisy_i == noisy_j)
    return own | (~noisy_j & (block_i > block_j))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB + 1, DIM), nn.Linear(DIM, VOCAB)
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(LAYERS))

    def forward(self, batch, what, **options):
        ids, positions, targets, weights = batch
        angles = positions[..., None] / 100 ** torch.linspace(0, 1, DIM)
        x = self.embed(ids) + angles.sin()
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + ls.attention(q, k, v, what, **options).transpose(1, 2).flatten(2)
        losses = cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / TOKENS


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    tokens, positions = torch.randint(VOCAB, (1, TOKENS)), torch.arange(TOKENS)[None]
    level = 0.1 + 0.9 * torch.rand(1, TOKENS // BLOCK).repeat_interleave(BLOCK, dim=1)
    hidden = torch.rand(1, TOKENS) < level  # each block has a level of noise
    pairs = (tokens.masked_fill(hidden, VOCAB), tokens), (positions,) * 2, (tokens,) * 2, (hidden / level, 0 * level)
    batch = [torch.cat(pair, dim=1) for pair in pairs]

    mask = ls.masks.from_mask_mod(sees, 2 * TOKENS)
    layout = ls.layouts.balanced(mask, world_size=size)
    plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM // HEADS, dtype="float64")
    model = Model()
    loss = model([layout.shard(x, rank, dim=1) for x in batch], plan, group=dist.group.WORLD)
    results = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for result in results:  # gradients as DDP or FSDP would
        dist.all_reduce(result)
    alone = model(batch, mask)
    expected = alone.detach(), *torch.autograd.grad(alone, list(model.parameters()))
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True))
    print(f"rank {rank}: loss {alone:.6f}, imbalance {plan.imbalance:.3f}, against one process {error:.1e}")
    dist.destroy_process_group()
