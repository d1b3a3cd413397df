"""Recurrences over all ranks in one process: a thread for every rank; threads meet to exchange messages."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from longspan.run.transports import Loopback, Program

StateProgram = Program[list[Tensor]]


class MeetingPoint:
    """Collects the programs of all ranks, and runs them together when all are there."""

    def __init__(self, world_size: int, transport: Any = None) -> None:
        self.transport = Loopback() if transport is None else transport
        self.programs: dict[int, StateProgram] = {}
        self.world_size = world_size
        self.results: list[list[Tensor]] = []
        self.barrier = threading.Barrier(world_size, action=self._run)

    def _run(self) -> None:
        self.results = self.transport.run([self.programs[rank] for rank in range(self.world_size)])

    def carrier(self, rank: int) -> Callable[[StateProgram, str, int], tuple[list[Tensor], int]]:
        """Return the function that carries the rank's messages."""

        def carry(program: StateProgram, direction: str, number: int) -> tuple[list[Tensor], int]:
            self.programs[rank] = program
            self.barrier.wait(timeout=120)
            return self.results[rank], 0

        return carry


def each_rank(work: Callable[[int], Any], world_size: int, meeting: MeetingPoint) -> list[Any]:
    """Return the results of `work` on every rank, or raise the first error."""
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
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
    return results
