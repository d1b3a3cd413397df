"""Ring: K and V go round. In step i a rank works on the block of the rank i places behind and hands it on."""

from __future__ import annotations

from longspan.schedules.problem import Problem
from longspan.schedules.steps import Recall, Step, Transfer


def ring(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The rank's steps. Every block visits every rank, whatever the mask; `passes.prune` drops what nobody uses."""
    size = problem.layout.world_size
    steps: list[Step] = []
    for i in range(size):
        here = problem.held((rank - i) % size)
        computes = [compute for lane in problem.lanes for compute in problem.computes(rank, here, lane)]
        transfers: list[Transfer] = []
        if i < size - 1:
            # The first hop leaves its owner, who needs nothing back; later hops return what they took along.
            recall = Recall.KEEP if i == 0 else Recall.RETURN
            for src in sorted({rank, (rank - 1) % size}):
                block = problem.held((src - i) % size)
                if len(block):
                    transfers += [
                        Transfer(src, (src + 1) % size, lane.kv(block), i + 1, recall) for lane in problem.lanes
                    ]
        steps.append(Step(tuple(transfers), tuple(computes)))
    return tuple(steps)
