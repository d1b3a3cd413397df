"""Train a draft model as DFlash does: torchrun --nproc-per-node 2 examples/draft_model.py

A draft layer predicts the block of tokens behind an anchor at once: from features of the target model up to the anchor,
and the block itself. Both are one joint sequence, in which features are keys only: their rows see nothing, and have no
loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import longspan as ls

CONTEXT, ANCHORS, BLOCK, VOCAB, HEADS, DIM = 1100, 24, 16, 50, 4, 32
SEQ_LEN, MASKED, IGNORED = CONTEXT + ANCHORS * BLOCK, VOCAB, -100
torch.manual_seed(0)
tokens, context = torch.randint(VOCAB, (CONTEXT,)), torch.arange(CONTEXT)
anchors = torch.randperm(CONTEXT - BLOCK)[:ANCHORS].sort().values


def sees(b, h, i, j):
    block, other = ((x - CONTEXT).clamp(min=0) // BLOCK for x in (i, j))
    return (i >= CONTEXT) & torch.where(j < CONTEXT, j <= anchors[block], block == other)


class Draft(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fuse = nn.Embedding(VOCAB + 1, DIM), nn.Linear(3 * DIM, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCAB)

    def forward(self, batch, what, **options):
        features, ids, positions, targets = batch
        angles = positions[..., None] / 100 ** torch.linspace(0, 1, DIM)
        x = torch.where(ids[..., None] == IGNORED, self.fuse(features), self.embed(ids.clamp(min=0))) + angles.sin()
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        logits = self.head(x + ls.attention(q, k, v, what, **options).transpose(1, 2).flatten(2))
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (ANCHORS * (BLOCK - 1))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    features = torch.randn(SEQ_LEN, 3 * DIM)  # of three layers of the target model; blocks do not use theirs
    places, ahead = anchors[:, None] + torch.arange(BLOCK), torch.arange(BLOCK) > 0  # a block begins with its anchor
    ids, targets = torch.where(ahead, MASKED, tokens[places]), torch.where(ahead, tokens[places], IGNORED)
    parts = (context * 0 + IGNORED, ids), (context, places), (context * 0 + IGNORED, targets)
    batch = [features[None], *(torch.cat((a, b.flatten()))[None] for a, b in parts)]

    mask = ls.masks.from_mask_mod(sees, SEQ_LEN)
    layout = ls.layouts.balanced(mask, world_size=size)
    plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM // HEADS, dtype="float64")
    model = Draft()
    loss = model([layout.shard(x, rank, dim=1) for x in batch], plan, group=dist.group.WORLD)
    results = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for result in results:  # gradients as DDP or FSDP would
        dist.all_reduce(result)
    alone = model(batch, mask)
    expected = alone.detach(), *torch.autograd.grad(alone, list(model.parameters()))
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True))
    print(f"rank {rank}: loss {alone:.6f}, imbalance {plan.imbalance:.3f}, against one process {error:.1e}")
    dist.destroy_process_group()
