"""Train a learned bias with a custom mask: torchrun --nproc-per-node 2 examples/learned_bias.py"""

import torch
import torch.distributed as dist

import longspan as ls

SEQ_LEN, HEADS, DIM, STEPS = 256, 4, 16, 20

tree = (torch.arange(SEQ_LEN) - 1) // 2  # the parent of every token in a binary tree
depth = torch.log2(torch.arange(SEQ_LEN) + 1.0).long()


def sees(b, h, i, j):
    """Allow a token to see itself, its parent, and every token of the three levels above it."""
    return (j == i) | (j == tree[i]) | ((depth[i] - depth[j] > 0) & (depth[i] - depth[j] <= 3))


def data(step):
    draw = torch.Generator().manual_seed(step)
    q, k, v = (torch.randn(1, HEADS, SEQ_LEN, DIM, generator=draw) for _ in range(3))
    return q, k, v, v[:, :, tree.clamp(min=0)]  # the target of a token is its parent's value


def train(attend, shard):
    """Train the bias to locate parents; return the losses of this rank's tokens."""
    bias = torch.zeros(16, HEADS, requires_grad=True)  # by level difference and head

    def biased(score, b, h, i, j):
        return score + bias[(depth[i] - depth[j]).abs(), h]

    losses = []
    for step in range(STEPS):
        q, k, v, target = map(shard, data(step % 2))
        loss = (attend(q, k, v, biased) - target).square().sum() / (SEQ_LEN * HEADS * DIM)
        loss.backward()  # gradients of the bias are summed over all ranks
        with torch.no_grad():
            bias -= 50.0 * bias.grad
        bias.grad = None
        losses.append(loss.item())
    return torch.tensor(losses), bias.detach()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mask = ls.masks.from_mask_mod(sees, SEQ_LEN, within=ls.masks.causal())
    layout = ls.layouts.zigzag(SEQ_LEN, size)
    plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM, dtype="float32")
    losses, bias = train(
        lambda q, k, v, biased: ls.flex_attention(q, k, v, biased, plan=plan, group=dist.group.WORLD),
        lambda x: layout.shard(x, rank, dim=2),
    )
    dist.all_reduce(losses)
    alone, alone_bias = train(lambda q, k, v, biased: ls.flex_attention(q, k, v, biased, mask), lambda x: x)
    error = max((losses - alone).abs().max(), (bias - alone_bias).abs().max())
    print(f"rank {rank}: loss {losses[0]:.4f} to {losses[-1]:.4f}, against one process {error.item():.1e}")
    dist.destroy_process_group()
