"""A rank of a small job with a fault: `python -m tests.gpu.fault_rank RANK SIZE PORT FAULT BACKEND [HOST]`.

Each rank makes one correct call and is ready; when its stdin has a line, the victim is killed, is stopped, raises or is
late, and the others print which error they got, and when. They stay until their stdin closes, so that no rank learns of
a fault by another's exit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

KILL, STOP, RAISE, LATE = "kill", "stop", "raise", "late"
VICTIM = 1
LOOPBACK = "127.0.0.1"
LATE_SECONDS = 4.0
"""Longer than a rank may be stopped before it is named: one that is only busy must not be."""
MISTAKE = "this rank raises on purpose"


def report(word: str, text: str = "") -> None:
    """Print a message for the process that started this rank: word, time, text."""
    print(f"{word}\t{time.monotonic()}\t{' '.join(text.split())}", flush=True)


def strike(fault: str) -> None:
    sys.stdin.readline()  # when every rank is ready
    report("struck")
    if fault == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == RAISE:
        raise ValueError(MISTAKE)
    elif fault == LATE:
        time.sleep(LATE_SECONDS)


def one_call(group: Any, device: str) -> None:
    """Run attention around a ring, forward and backward."""
    import torch

    import longspan as ls

    size = group.size()
    layout = ls.layouts.contiguous(64 * size, size)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    plan = ls.plan(ls.masks.causal(), layout, q_heads=2, kv_heads=2, head_dim=16, dtype=dtype, scheme="ring")
    q, k, v = (torch.randn(1, 2, 64, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    ls.attention(q, k, v, plan, group=group).sum().backward()
    if device != "cpu":
        torch.cuda.synchronize(device)


def exactness(group: Any) -> str:
    """Return the largest share of the rounding budget that was used, or the first difference from one device."""
    import longspan as ls
    from longspan.verification import verify

    mask, size = ls.masks.documents([70, 9, 49]) & ls.masks.causal(), group.size()
    layout = ls.layouts.balanced(mask, world_size=size)
    plan = ls.plan(mask, layout, q_heads=4, kv_heads=2, head_dim=16, dtype="float32", scheme="hybrid(2)")
    found = verify(lambda q, k, v: ls.attention(q, k, v, plan, group=group), None, plan, group=group, probes=1)
    return f"{max(check.ratio for check in found.checks):.2f}" if found.ok else found.findings[0].where()


def run(rank: int, size: int, port: int, fault: str, backend: str, host: str = LOOPBACK) -> None:
    """Take part in the job. Its store is on loopback, or, on another host, in the process of rank 0."""
    import torch
    import torch.distributed as dist

    from longspan import training

    torch.set_num_threads(1)
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    has_store = host != LOOPBACK and rank == 0
    store = dist.TCPStore(host, port, size, is_master=has_store, wait_for_workers=False)
    dist.init_process_group(backend, store=dist.PrefixStore(fault, store), rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    try:
        with training.watch(group):
            one_call(group, device)
            report("ready", "" if host == LOOPBACK else exactness(group))
            if rank == VICTIM:
                strike(fault)
            one_call(group, device)
            one_call(group, device)  # a rank may finish the first without the victim; this one needs every rank
        report("fine")
    except Exception as error:
        report("named", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:4]]
    run(numbers[0], numbers[1], numbers[2], *sys.argv[4:])
    sys.stdin.read()
    os._exit(0)
