"""What the tests of the device's process groups run, on ranks that have it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.device import forms


def _here():
    return forms.device(dist.get_rank())


def collectives_are_right(schedule):
    rank, world, device = dist.get_rank(), dist.get_world_size(), _here()
    with forms.schedule(schedule):
        x = torch.full((4,), rank + 1.0, device=device)
        dist.all_reduce(x)
        total = world * (world + 1) / 2
        assert x.tolist() == [total] * 4
        x = torch.full((4,), rank + 1.0, device=device)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert x.tolist() == [total / world] * 4
        x = torch.full((3,), float(rank), device=device)
        dist.broadcast(x, 1)
        assert x.tolist() == [1.0] * 3
        parts = [torch.empty(2, device=device) for _ in range(world)]
        dist.all_gather(parts, torch.full((2,), float(rank), device=device))
        assert [part[0].item() for part in parts] == list(range(world))
        out = torch.empty(world, 2, device=device)
        dist.all_gather_into_tensor(out, torch.full((2,), float(rank), device=device))
        assert out[:, 1].tolist() == list(range(world))
        for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / world)):
            out = torch.empty(2, device=device)
            dist.reduce_scatter_tensor(out, torch.full((2 * world,), rank + 1.0, device=device), op=op)
            assert out.tolist() == [expected] * 2
        out = torch.empty(world, device=device)
        dist.all_to_all_single(out, torch.arange(world, dtype=torch.float32, device=device) + 10 * rank)
        assert out.tolist() == [10.0 * other + rank for other in range(world)]
        outs = [torch.empty(1, device=device) for _ in range(world)]
        dist.all_to_all(outs, [torch.full((1,), 10.0 * rank + other, device=device) for other in range(world)])
        assert [x.item() for x in outs] == [10.0 * other + rank for other in range(world)]
        dist.barrier()


def batches_are_right_and_wait_orders_streams(schedule):
    """A batch to both neighbours; wait() does not block the host, and reading without it reads too early."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), _here()
    dist.all_reduce(torch.zeros(1, device=device))  # connects the group
    torch.accelerator.synchronize()
    with forms.schedule(schedule):
        found = []
        for waits in (True, False):
            sent, got = torch.full((1000,), rank + 1.0, device=device), torch.empty(1000, device=device)
            ops = [dist.P2POp(dist.isend, sent, (rank + 1) % world), dist.P2POp(dist.irecv, got, (rank - 1) % world)]
            works = dist.batch_isend_irecv(ops)
            with forms.HostWaits() as counted:
                for work in works if waits else ():
                    work.wait()
            assert counted.all == []
            found.append(got.sum().item())
        torch.accelerator.synchronize()
    expected = 1000.0 * ((rank - 1) % world + 1)
    return found[0] == expected, found[1] == expected


def first_operation_waits_for_all():
    """As NCCL, which connects a group when it is first used: messages alone, between two of three ranks, hang."""
    rank, device = dist.get_rank(), _here()
    group = dist.new_group(list(range(dist.get_world_size())))
    x, work = torch.zeros(1, device=device), None
    if rank < 2:
        kind = dist.isend if rank == 0 else dist.irecv
        (work,) = dist.batch_isend_irecv([dist.P2POp(kind, x, 1 - rank, group=group)])
        torch.accelerator.current_stream().query()
        for _ in range(50):
            assert not work.is_completed()
            torch.empty(1).uniform_()
    dist.barrier()  # of the other group
    if work is not None:
        work.wait()
    dist.all_reduce(x, group=group)
    torch.accelerator.synchronize()


def groups_of_one_backend():
    device = _here()
    group = dist.new_group(backend=forms.backend(alone=True))
    x = torch.ones(2, device=device)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [float(dist.get_world_size())] * 2
    with pytest.raises(RuntimeError, match="cpu"):
        dist.all_reduce(torch.ones(2), group=group)
    x = torch.ones(2)
    dist.all_reduce(x)  # the mixed group's Gloo
    assert x.tolist() == [float(dist.get_world_size())] * 2


def abort_ends_what_is_under_way():
    """A message that never comes ends as if it was there, and what is started later raises."""
    device = _here()
    group = dist.new_group(backend=forms.backend(alone=True))
    x = torch.ones(2, device=device)
    dist.all_reduce(x, group=group)
    if dist.get_rank() == 0:
        work = dist.irecv(x, group=group, group_src=1)
        work.wait()
    group._get_backend(device).abort()
    torch.accelerator.synchronize(device)
    with pytest.raises(RuntimeError, match="aborted"):
        dist.all_reduce(x, group=group)
    assert torch.ones(2, device=device).sum().item() == 2  # the device goes on


def default_backends():
    """What `init_process_group()` without a backend makes on this device."""
    return str(distributed_c10d.BackendConfig(distributed_c10d.Backend(distributed_c10d.Backend.UNDEFINED)))
