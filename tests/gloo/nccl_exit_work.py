"""A rank of a short job over a group that behaves like NCCL: `nccl_exit_work.py RANK WORLD PORT HOW`. A right step
first; then it ends as asked, by itself: nothing here calls `os._exit`."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import longspan as ls
from tests.gloo import nccl_like

rank, world, port, how = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, world, False, wait_for_workers=False)
dist.init_process_group("gloo", store=dist.PrefixStore(how, store), rank=rank, world_size=world)
group = nccl_like.pretend("nccl")
plan = ls.plan(
    ls.masks.causal(), ls.layouts.zigzag(64, world), q_heads=2, kv_heads=2, head_dim=8, dtype="float32", scheme="ring"
)


def step():
    q, k, v = torch.randn(3, 1, 2, 64 // world, 8, requires_grad=True)
    ls.attention(q, k, v, plan, group=group).sum().backward()


step()
group.synchronize()
print(f"rank {rank} was right", flush=True)
if how == "in flight":  # the host ends while its device has still much to do
    for _ in range(5):
        group.kernel(0.5 * rank)
        step()
elif how == "raise":
    if rank == 0:
        raise KeyError("outside")
    step()
    group.synchronize()
elif how == "kill":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step()
    group.synchronize()
elif how == "exit 3":
    step()
    group.synchronize()
    sys.exit(3)
elif how == "destroy":
    step()
    group.synchronize()
    dist.destroy_process_group()
print(f"rank {rank} ended in good order", flush=True)
