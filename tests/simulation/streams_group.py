"""The shipped transport, `transports.ProcessGroup`, on simulated GPUs: in the place of `torch.distributed` it finds a
`SimulatedNccl`, whose operations are queued as ProcessGroupNCCL queues them.

A batch of messages waits for what is on the current stream, runs on the stream for messages, and records that stream
on its tensors; `Work.wait` puts the current stream behind it and returns at once.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from longspan.run import transports
from longspan.run.group import Call
from tests.simulation.streams import Batch


class Work:
    def __init__(self, simulation, event):
        self.simulation, self.event = simulation, event

    def wait(self):
        self.simulation.gpu.current.wait(self.event)
        return True

    def is_completed(self):
        return self.event.is_done


class Group:
    """What the transport asks of a group."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


class SimulatedNccl:
    """Stands for the module `torch.distributed` inside of `transports`."""

    Work = Work

    def __init__(self, simulation):
        self.simulation = simulation

    @staticmethod
    def isend():
        """Only its name is used."""

    @staticmethod
    def irecv():
        """Only its name is used."""

    def P2POp(self, kind, tensor, *, group, group_peer, tag):  # noqa: N802
        return SimpleNamespace(is_send=kind is self.isend, tensor=tensor, group_peer=group_peer, tag=tag)

    def before(self, gpu):
        """What a batch of messages waits for: all that is on the current stream by now."""
        return gpu.current.event()

    def after(self, gpu, event):
        """What its work waits for."""
        return event

    def batch_isend_irecv(self, ops):
        gpu = self.simulation.gpu
        places = [(op.is_send, op.group_peer, gpu.memory.place(op.tensor)) for op in ops]
        for op in ops:
            gpu.memory.record(op.tensor, gpu.comm)
        sends = [(peer, place) for is_send, peer, place in places if is_send]
        receives = [(peer, place) for is_send, peer, place in places if not is_send]
        event = gpu.comm.add(Batch(gpu, sends, receives), (self.before(gpu),))
        self.simulation.advance()
        return [Work(self.simulation, self.after(gpu, event))]


@contextmanager
def simulated(nccl):
    """Inside, transports find this in the place of torch.distributed."""
    real, transports.dist = transports.dist, nccl
    try:
        yield
    finally:
        transports.dist = real


def run(simulation, rank, program, plan, direction, number=1):
    """What the program returns, over the shipped transport."""
    group = Group(rank, plan.layout.world_size)
    call = Call(plan.fingerprint, direction, torch.device("meta"))
    return transports.ProcessGroup(group, call, number).run(program)
