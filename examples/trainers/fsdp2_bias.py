"""Train a bias by distance and head with FSDP2, sharded sequences and packed documents, in your own loop.

On two CPU processes:  torchrun --nproc-per-node 2 examples/trainers/fsdp2_bias.py
On 8 GPUs:             torchrun --nproc-per-node 8 examples/trainers/fsdp2_bias.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import longspan as ls
from longspan.training import make_mesh, shard_batch, token_loss

LENGTHS, VOCAB, DIM, HEADS, STEPS = [70, 9, 113], 32, 64, 4, 10
MASK = ls.masks.documents(LENGTHS) & ls.masks.causal()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB)
        self.qkv, self.bias = nn.Linear(DIM, 3 * DIM), nn.Parameter(torch.zeros(sum(LENGTHS), HEADS))

    def forward(self, ids, mask, **options):
        x, table = self.tokens(ids), self.bias  # read inside of forward, where FSDP2 has gathered it
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # Each rank keeps its partial gradient of the bias: FSDP2 reduces it, as for all parameters.
        seen = ls.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + table[i - j, h], mask, captured_grads="share", **options
        )
        return self.head(x + seen.transpose(1, 2).flatten(2))


def train(device, mesh=None):
    """Return the losses of all steps: over the ranks of a mesh, or of whole sequences on one device."""
    torch.manual_seed(0)
    model, group, size, rank, mask, options = Model().to(device), None, 1, 0, MASK, {}
    if mesh is not None:
        group, size, rank, mask = mesh.dp_cp, mesh.cp.size(), mesh.cp.get_local_rank(), None
        fully_shard(model, mesh=group)  # for a large model: every layer first
    layout = ls.layouts.balanced(MASK, world_size=size)
    if mesh is not None:
        plan = ls.plan(MASK, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM // HEADS, dtype="float32")
        options = {"plan": plan, "group": mesh.cp}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for step in range(STEPS):
        ids = (torch.arange(sum(LENGTHS), device=device) * (1 + step % 3) % VOCAB)[None]
        mine = shard_batch({"input_ids": ids, "labels": ids}, layout, rank, documents=LENGTHS, positions="document")
        logits = model(mine["input_ids"], mask, **options)
        loss = token_loss(logits, mine["shift_labels"], group=group, gradients="average")  # FSDP2 averages
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


if __name__ == "__main__":
    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpus else torch.device("cpu")
    result = train(device, make_mesh(cp=dist.get_world_size(), device_type=device.type))
    error = (result - train(device)).abs().max()
    print(f"rank {dist.get_rank()}: loss {result[0]:.4f} to {result[-1]:.4f}, off one process {error:.1e}")
    dist.destroy_process_group()
