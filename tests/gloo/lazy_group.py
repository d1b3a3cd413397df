"""A process group that, like NCCL, makes its communicator in its first operation, and waits there for all ranks.

It stands for a group "cpu:gloo,cuda:nccl" whose calls have tensors on the GPU: what ranks compare before data moves
goes over the Gloo half, which waits for nobody; everything else over the half that behaves like NCCL. What carries the
bytes is Gloo. A rank that waits for others that never come says so after PATIENCE seconds, where NCCL would hang.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

import longspan as ls
from longspan.run import group as groups
from longspan.testing.oracle import dense_attention

PATIENCE = 3.0


class LazyGroup(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.joined = store, False
        self.inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout)
        self.done = []

    def join(self, what):
        """The first operation makes the communicator: all ranks must come."""
        self.done.append(what)
        if self.joined:
            return
        self.store.add("joined", 1)
        end = time.monotonic() + PATIENCE
        while (found := self.store.add("joined", 0)) < self.size():
            if time.monotonic() > end:
                raise RuntimeError(f"{found} of {self.size()} ranks came to the first operation: NCCL would hang")
            time.sleep(0.01)
        self.joined = True

    def send(self, tensors, dst, tag=0):
        self.join("send")
        return self.inner.send(tensors, dst, tag)

    def recv(self, tensors, src, tag=0):
        self.join("recv")
        return self.inner.recv(tensors, src, tag)

    def allreduce(self, tensors, opts=None):
        self.join("sum")
        return self.inner.allreduce(tensors, opts or dist.AllreduceOptions())

    def allgather(self, *args):
        """Of rows that ranks compare."""
        return self.inner.allgather(*args)

    def _get_backend(self, device):
        """From torch 2.15 on, batches of messages ask it whether several go as one."""
        return self.inner

    def getBackendName(self):  # noqa: N802
        return "lazy"

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]


def _made(backend):
    if backend == "lazy" and "lazy" not in dist.Backend.backend_list:
        dist.Backend.register_backend("lazy", LazyGroup, devices=["cpu"])
    return dist.new_group(list(range(dist.get_world_size())), backend=backend, timeout=timedelta(seconds=60))


def _quiet_plan(world):
    """One document on ranks 0 and 1, one on each of the others: these neither send nor receive."""
    mask = ls.masks.documents([32, *[16] * (world - 2)]) & ls.masks.causal()
    layout = ls.layouts.contiguous(16 * world, world)
    return ls.plan(mask, layout, q_heads=4, kv_heads=2, head_dim=8, dtype="float64", scheme="exchange")


def _pass(plan, group):
    """Whether out and gradients of this rank are those of one device."""
    torch.manual_seed(3)
    rank, heads = dist.get_rank(), (plan.sizes.q_heads, plan.sizes.kv_heads, plan.sizes.kv_heads, plan.sizes.q_heads)
    *whole, dout = (torch.randn(1, h, plan.layout.seq_len, 8, dtype=torch.float64) for h in heads)
    whole = [x.requires_grad_() for x in whole]
    parts = [plan.layout.shard(x.detach(), rank, dim=2).requires_grad_() for x in whole]
    out = ls.attention(*parts, plan, group=group, scale=0.3)
    found = [out, *torch.autograd.grad(out, parts, plan.layout.shard(dout, rank, dim=2))]
    true, _ = dense_attention(*whole, plan.mask, 0.3)
    expected = [plan.layout.shard(x, rank, dim=2) for x in (true, *torch.autograd.grad(true, whole, dout))]
    return all(torch.allclose(x, y, atol=1e-12, rtol=0) for x, y in zip(found, expected, strict=True))


def first_call(backend, meets=True):
    """For two passes over a new group: what they gave, or what was said, and what the group was asked to do."""
    group, meet = _made(backend), groups.Members._meet
    if not meets:  # as it was once
        groups.Members._meet = lambda self, device: None
    said = ""
    right = []
    try:
        plan = _quiet_plan(dist.get_world_size())
        right = [_pass(plan, group) for _ in range(2)]
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        groups.Members._meet = meet
    dist.barrier()  # over the pool's own group: nobody leaves while others still wait
    return right, said, group.done if backend == "lazy" else []


def sums_over_gloo():
    """`first_call` over Gloo, and how many collectives were made."""
    calls, all_reduce = [], dist.all_reduce

    def counted(*args, **more):
        calls.append(1)
        return all_reduce(*args, **more)

    dist.all_reduce = counted
    try:
        right, said, _ = first_call("gloo")
    finally:
        dist.all_reduce = all_reduce
    return right, said, len(calls)
