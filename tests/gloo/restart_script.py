"""Run by torchrun: a small training loop that survives the death of a rank. argv: folder, rank that dies or -1."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import longspan as ls
from longspan.training import attempt_store

STEPS, FATAL = 6, 3


def main(folder, victim):
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=attempt_store(), rank=rank, world_size=world)
    mask = ls.masks.documents([30, 66]) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=world)
    plan = ls.plan(mask, layout, q_heads=2, kv_heads=2, head_dim=16, dtype="float32", scheme="exchange")
    saved = folder / "weights.npy"
    step, weight = 0, torch.ones(16)
    if saved.exists():
        found = np.load(saved)
        step, weight = int(found[0]), torch.from_numpy(found[1:]).float()
        if rank == 0:
            (folder / "resumed").write_text(str(step))
    weight.requires_grad_()
    while step < STEPS:
        torch.manual_seed(step)
        whole = [torch.randn(1, 2, 96, 16) for _ in range(3)]
        q, k, v = (layout.shard(x, rank, dim=2) for x in whole)
        if step == FATAL and rank == victim and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        out = ls.attention(q * weight, k, v, plan, group=dist.group.WORLD)
        (gradient,) = torch.autograd.grad(out.square().sum(), weight)
        dist.all_reduce(gradient)
        weight = (weight.detach() - 0.01 * gradient).requires_grad_()
        step += 1
        if rank == 0:
            np.save(folder / "next.npy", np.concatenate(([step], weight.detach().double().numpy())))
            os.replace(folder / "next.npy", saved)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
