"""A recurrence over all ranks of a plan in one process: a thread for each, and they meet where messages are exchanged.

Everything but the transport is what runs over processes: kernels, programs, autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from longspan.execution.engine.transports import Loopback, Program

StateProgram = Program[list[Tensor]]


class MeetingPoint:
    """Where ranks bring their programs; when all are there, they are run together."""

    def __init__(self, world_size: int, transport: Any = None) -> None:
        self.transport = Loopback() if transport is None else transport
        self.programs: dict[int, StateProgram] = {}
        self.world_size = world_size
        self.results: list[list[Tensor]] = []
        self.barrier = threading.Barrier(world_size, action=self._run)

    def _run(self) -> None:
        self.results = self.transport.run([self.programs[rank] for rank in range(self.world_size)])

    def carrier(self, rank: int) -> Callable[[StateProgram, str, int], tuple[list[Tensor], int]]:
        """What carries the rank's messages."""

        def carry(program: StateProgram, direction: str, number: int) -> tuple[list[Tensor], int]:  # noqa: ARG001
            self.programs[rank] = program
            self.barrier.wait(timeout=120)
            return self.results[rank], 0

        return carry


def each_rank(work: Callable[[int], Any], world_size: int, meeting: MeetingPoint) -> list[Any]:
    """What `work` gives on every rank; the first error, if any raises."""
    found: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in real or errors:
        raise error
    return found


def shards(tensors: Sequence[Tensor], layout: Any, rank: int, dim: int = 1) -> list[Tensor]:
    """The rank's parts, as leaves that want gradients where the whole does."""
    parts = [layout.shard(t.detach(), rank, dim) for t in tensors]
    return [part.requires_grad_(t.requires_grad) for part, t in zip(parts, tensors, strict=True)]
