"""Train layers with and without a sliding window over one layout: torchrun --nproc-per-node 2 examples/windows.py"""

import torch
import torch.distributed as dist
from torch import nn

import longspan as ls

LENGTHS, HEADS, DIM, WINDOW = [400, 60, 90], 4, 32, 24
documents = ls.masks.documents(LENGTHS)
full = documents & ls.masks.causal()
window = documents & ls.masks.sliding_window(WINDOW)
KINDS = [window, window, full, window]  # one per layer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in KINDS)
        self.sinks = nn.ParameterList(torch.zeros(HEADS) for _ in KINDS)

    def forward(self, x, whats, **options):
        for qkv, sinks, what in zip(self.qkv, self.sinks, whats, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            out = ls.attention(q, k, v, what, softcap=20.0, sinks=sinks, captured_grads="share", **options)
            x = x + out.transpose(1, 2).flatten(2)
        return x


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = ls.layouts.balanced(full, window, world_size=size)  # balanced for both kinds of layers
    sizes = {"q_heads": HEADS, "kv_heads": HEADS, "head_dim": DIM // HEADS, "dtype": "float32", "scheme": "exchange"}
    plans = {mask: ls.plan(mask, layout, **sizes) for mask in (full, window)}
    torch.manual_seed(0)
    model, x = Model(), torch.randn(1, sum(LENGTHS), DIM)

    model(
        layout.shard(x, rank, dim=1), [plans[kind] for kind in KINDS], group=dist.group.WORLD
    ).square().sum().backward()
    for parameter in model.parameters():  # as DDP or FSDP do
        dist.all_reduce(parameter.grad)
    result = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    model(x, KINDS).square().sum().backward()
    error = max(((a - p.grad).norm() / p.grad.norm()).item() for a, p in zip(result, model.parameters(), strict=True))
    received = {name: plans[mask].bytes_received(rank) for name, mask in (("full", full), ("window", window))}
    print(f"rank {rank}: bytes received {received}, gradients against one process {error:.1e}")
    dist.destroy_process_group()
