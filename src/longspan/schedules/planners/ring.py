"""Ring: K and V go round. In step i a rank works on the block of the rank i places behind and hands it on."""

from __future__ import annotations

import numpy as np

from longspan.schedules.problem import Problem
from longspan.schedules.steps import Recall, Step, Transfer


def ring(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The rank's steps. Every block visits every rank, whatever the mask."""
    size, rows = problem.layout.world_size, problem.layout.by_position
    arrived = np.column_stack((rows[:, :2], (rank - rows[:, 2]) % size))
    computes = problem.computes(rank, (arrived,) * len(problem.lanes), size)
    steps: list[Step] = []
    for i in range(size):
        transfers: list[Transfer] = []
        if i < size - 1:
            # The first hop leaves its owner, who needs nothing back; later hops return what they took along.
            recall = Recall.KEEP if i == 0 else Recall.RETURN
            for src in sorted({rank, (rank - 1) % size}):
                block = problem.blocks[(src - i) % size]
                transfers += [Transfer(src, (src + 1) % size, piece, i + 1, recall) for piece in block]
        steps.append(Step(tuple(transfers), tuple(computes[i])))
    return tuple(steps)
