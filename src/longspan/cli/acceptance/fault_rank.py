"""A rank of a small job of its own, to which something happens: `python -m longspan.cli.acceptance.fault_rank ...`.

The acceptance command starts a few of these beside its own ranks. Each makes one right call; then the victim is killed,
stopped, raises, or is only late, and the others say what they were told, and when. They stay until their input ends,
so that nobody learns of a fault by a neighbour's exit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

KILL, STOP, RAISE, LATE = "kill", "stop", "raise", "late"
VICTIM = 1
LATE_SECONDS = 4.0
"""Longer than a rank may be stopped before it is named: one that is only busy must not be."""
MISTAKE = "this rank raises because it was asked to"


def say(word: str, text: str = "") -> None:
    """One line for who started this rank: what happened, when, and what was said."""
    print(f"{word}\t{time.monotonic()}\t{' '.join(text.split())}", flush=True)


def strike(what: str) -> None:
    """The fault itself."""
    say("struck")
    if what == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == RAISE:
        raise ValueError(MISTAKE)
    elif what == LATE:
        time.sleep(LATE_SECONDS)


def one_call(group: Any, device: str) -> None:
    """Attention around a ring, forward and backward."""
    import torch

    import longspan as ls

    size = group.size()
    layout = ls.layouts.contiguous(64 * size, size)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    made = ls.plan(ls.masks.causal(), layout, q_heads=2, kv_heads=2, head_dim=16, dtype=dtype, scheme="ring")
    q, k, v = (torch.randn(1, 2, 64, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    ls.attention(q, k, v, made, group=group).sum().backward()
    if device != "cpu":
        torch.cuda.synchronize(device)


def run(rank: int, size: int, port: int, what: str, backend: str) -> None:
    """Joins the others, makes a right call, and then what is asked."""
    import torch
    import torch.distributed as dist

    from longspan import training

    torch.set_num_threads(1)
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=dist.PrefixStore(what, store), rank=rank, world_size=size)  # type: ignore[attr-defined]
    group = dist.group.WORLD
    assert group is not None
    try:
        with training.watch(group):
            one_call(group, device)
            say("ready")
            if rank == VICTIM:
                strike(what)
            one_call(group, device)
            one_call(group, device)  # who needed nothing of the victim was right to finish; this one needs everybody
        say("fine")
    except Exception as error:
        say("named", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:4]]
    run(numbers[0], numbers[1], numbers[2], *sys.argv[4:6])
    sys.stdin.read()
    os._exit(0)
