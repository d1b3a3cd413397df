"""What ranks of a pool do in tests/gloo/test_footprint.py."""

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import longspan as ls
from longspan.training import check_same, gather_outputs, prefetch, token_loss

SRC = str(Path(ls.__file__).parent)
TOKENS = 256


def _attention_plan(scheme="auto"):
    mask, layout = ls.masks.causal(TOKENS), ls.layouts.zigzag(TOKENS, dist.get_world_size())
    return ls.plan(mask, layout, q_heads=4, kv_heads=4, head_dim=32, dtype="float32", scheme=scheme)


def _calls():
    """One of each: attention, a recurrence, a convolution, a loss, a gather, a comparison of batches."""
    group, world = dist.group.WORLD, dist.get_world_size()
    for scheme in ("ring", "all_to_all", "exchange"):
        plan = _attention_plan(scheme)
        q, k, v = (torch.randn(1, 4, TOKENS // world, 32, requires_grad=True) for _ in range(3))
        ls.attention(q, k, v, plan, group=group, sinks=torch.zeros(4, requires_grad=True)).sum().backward()
    layout = ls.layouts.contiguous(TOKENS, world)
    scan = ls.scan_plan(None, layout, heads=2, keys=8, values=8, maps="matrix", dtype="float32")
    q, k, v = (torch.randn(1, TOKENS // world, 2, 8, requires_grad=True) for _ in range(3))
    g = torch.zeros(1, TOKENS // world, 2)
    ls.gated_delta_rule(q, k, v, g, g + 0.5, plan=scan, group=group).sum().backward()
    conv = ls.conv_plan(None, layout, channels=8, width=4, dtype="float32")
    x = torch.randn(1, TOKENS // world, 8, requires_grad=True)
    ls.causal_conv1d(x, torch.randn(8, 4), plan=conv, group=group).sum().backward()
    logits = torch.randn(1, TOKENS // world, 16, requires_grad=True)
    labels = torch.randint(16, (1, TOKENS // world))
    token_loss(logits, labels, group=group, gradients="sum").backward()
    gather_outputs(x.detach(), layout, group, 1)
    check_same({"x": torch.arange(4)}, group)


def _handles():
    """Open files and sockets, and native threads of this process."""
    handles = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            handles[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the folder itself
            continue
    return handles, set(os.listdir("/proc/self/task"))


def started(kind):
    """What calls of this kind start or open on a rank: events of the interpreter, handles, threads."""
    x = torch.randn(8, requires_grad=True)  # PyTorch's own: backward, a collective, and messages
    (x * 2).sum().backward()
    dist.all_reduce(torch.zeros(1))
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(op, torch.zeros(4), peer) for op in (dist.isend, dist.irecv)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    events, is_on = [], [True]
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(name, arguments):
        if not is_on[0]:
            return
        if name == "open" and isinstance(arguments[2], int) and arguments[2] & writes:
            if "__pycache__" not in str(arguments[0]):  # the interpreter's own
                events.append(f"open {arguments[0]}")
        elif name.startswith(("socket.", "subprocess.", "os.fork", "os.posix_spawn", "os.exec")):
            events.append(name)

    sys.addaudithook(hook)
    names = {thread.name for thread in threading.enumerate()}
    handles, tasks = _handles()
    during = []
    if kind == "prefetch":
        for _ in prefetch(range(2), lambda step: step):
            during += [thread.name for thread in threading.enumerate() if thread.name not in names]
    else:
        _calls()
    is_on[0] = False
    for _ in range(100):
        more_handles, more_tasks = _handles()
        if not more_tasks - tasks:
            break
        time.sleep(0.05)  # a thread that was joined is listed until the kernel has removed it
    opened = [path for name, path in more_handles.items() if handles.get(name) != path]
    left = sorted({thread.name for thread in threading.enumerate()} - names)
    return events, opened, len(more_tasks - tasks), left, sorted(set(during))


def python_calls():
    """Python calls inside of Longspan: of the first and of a warm call, forward and backward."""
    calls = Counter()

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SRC):
            calls[frame.f_code.co_qualname] += 1

    def counted(function):
        calls.clear()
        sys.setprofile(profile)
        try:
            result = function()
        finally:
            sys.setprofile(None)
        return result, sum(calls.values())

    plan = _attention_plan()
    q, k, v = (torch.randn(1, 4, TOKENS // 2, 32, requires_grad=True) for _ in range(3))
    call = lambda: ls.attention(q, k, v, plan, group=dist.group.WORLD)  # noqa: E731
    found = {}
    out, found["first forward"] = counted(call)
    _, found["first backward"] = counted(lambda: out.sum().backward())
    prepared = _attention_plan("ring")
    prepared.prepare(dist.get_rank(), group=dist.group.WORLD)
    out, found["prepared forward"] = counted(lambda: ls.attention(q, k, v, prepared, group=dist.group.WORLD))
    _, found["prepared backward"] = counted(lambda: out.sum().backward())
    for _ in range(3):
        call().sum().backward()
    out, found["warm forward"] = counted(call)
    _, found["warm backward"] = counted(lambda: out.sum().backward())
    return found
