"""The ranks that torchrun started, seen from a command: joining them, asking all of them for numbers, their clocks.

Numbers travel as tensors of a fixed layout; nothing is pickled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.errors import LongspanError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class JobRanks:
    """This process's place among the ranks."""

    rank: int
    size: int
    local_size: int
    """Ranks on this host."""

    @property
    def speaks(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    def gathered(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank; they share dtype and all sizes but the first."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return [mine]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        most = max(int(length) for length in lengths)
        padded = mine.new_zeros((most, *mine.shape[1:]))
        padded[: len(mine)] = mine
        found = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [rows[: int(length)] for rows, length in zip(found, lengths, strict=True)]

    def most(self, value: float) -> float:
        """The largest of every rank's number."""
        import torch

        return max(float(found) for found in self.gathered(torch.tensor([value], dtype=torch.float64)))

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier()


def is_launched() -> bool:
    """Whether torchrun, or something that speaks like it, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@contextmanager
def joined(command: str, *, alone: bool = False) -> Iterator[JobRanks]:
    """The ranks of a Gloo group for as long as it is needed; `alone` also goes without a launcher, as one rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks on stderr
    import torch.distributed as dist

    if dist.is_initialized():  # somebody else's group, which outlives the command
        yield JobRanks(
            dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        )
        return
    if not is_launched() and not alone:
        raise LongspanError(
            f"{command} runs on all ranks at once. Start it as: torchrun --nproc-per-node 4 -m longspan {command} ..."
        )
    if not is_launched():
        yield JobRanks(0, 1, 1)
        return
    dist.init_process_group("gloo")
    try:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield JobRanks(dist.get_rank(), dist.get_world_size(), local)
        dist.barrier()  # nobody tears connections down that another still uses
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Clock:
    """What a rank's clock shows beyond that of rank 0, and how long a message takes there and back, in seconds."""

    ahead: float
    round_trip: float


def clocks(ranks: JobRanks, rounds: int = 20) -> list[Clock]:
    """Every rank's clock against that of rank 0: of many questions, the answer that came back soonest is believed."""
    import torch
    import torch.distributed as dist

    if ranks.size == 1:
        return [Clock(0.0, 0.0)]
    found = torch.zeros(ranks.size, 2, dtype=torch.float64)
    told = torch.zeros(1, dtype=torch.float64)
    for peer in range(1, ranks.size):
        best = (float("inf"), 0.0)
        for _ in range(rounds):
            if ranks.rank == 0:
                asked = time.perf_counter()
                dist.send(told, peer)
                dist.recv(told, peer)
                answered = time.perf_counter()
                best = min(best, (answered - asked, float(told) - (asked + answered) / 2))
            elif ranks.rank == peer:
                dist.recv(told, 0)
                told[0] = time.perf_counter()
                dist.send(told, 0)
        if ranks.rank == 0:
            found[peer, 0], found[peer, 1] = best[1], best[0]
    dist.broadcast(found, 0)
    return [Clock(ahead, back) for ahead, back in found.tolist()]
