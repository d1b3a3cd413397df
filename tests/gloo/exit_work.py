"""A rank of a short job that torchrun starts: `exit_work.py HOW DESTROY`. A right step first; then it ends as asked."""

import ctypes
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import longspan as ls

HOW, DESTROY = sys.argv[1], sys.argv[2] == "destroy"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, group, world = dist.get_rank(), dist.group.WORLD, dist.get_world_size()
layout = ls.layouts.zigzag(64, world)
plan = ls.plan(ls.masks.causal(), layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float32", scheme="ring")


def step(the_plan=plan, **options):
    tokens = int(the_plan.layout.num_tokens[rank])
    q, k, v = torch.randn(3, 1, the_plan.sizes.q_heads, tokens, the_plan.sizes.head_dim, requires_grad=True)
    ls.attention(q, k, v, the_plan, group=group, **options).sum().backward()


def boom(score, b, h, i, j):
    if rank == 0:
        raise ValueError("boom")
    return score + 0


def interrupted():
    """Rank 0 gets Ctrl-C while it waits for rank 1, which comes too late."""
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(3)
    step()


def killed():
    """The last rank dies in the middle of a big message, of which Gloo never tells the others."""
    big = ls.layouts.contiguous(1 << 14, world)
    documents = ls.masks.documents([64] * (big.seq_len // 64))
    heavy = ls.plan(documents, big, q_heads=8, kv_heads=8, head_dim=256, dtype="float32", scheme="ring")
    if rank == world - 1:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for _ in range(200):
        step(heavy)


for _ in range(2):
    step()
print(f"rank {rank} was right", flush=True)
try:
    if HOW == "raise":
        step(score_mod=boom)
    elif HOW == "interrupt":
        interrupted()
    elif HOW == "kill":
        killed()
    elif HOW == "swallow":
        try:
            step(score_mod=boom)
        except Exception as error:
            print(f"rank {rank} swallowed {type(error).__name__}", flush=True)
            held = error  # with its frames, and what they hold
    elif HOW == "one raises outside":
        if rank == 0:
            raise KeyError("outside")
        step()
    elif HOW == "lock":  # the interpreter's lock is held while the others wait
        if rank == 0:
            ctypes.PyDLL(None).sleep(1)
        step()
    elif HOW.startswith("exit"):
        sys.exit(int(HOW.split()[1]))
finally:
    if DESTROY:
        dist.destroy_process_group()
