"""Measure the host time that a context of Longspan adds to an operation of PyTorch that it does not route.

    python -m benchmarks.context_cost          # exits with 1 above the limit

An addition of four numbers, inside `context_parallel` and outside, in turns. The median of the differences counts.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from longspan.torch_api import context_parallel

LIMIT = 3.0
"""Microseconds."""
ROUNDS, CALLS = 101, 2_000


def measure() -> float:
    """Return this thread's processor time of one operation, in microseconds."""
    x = torch.zeros(4)
    start = time.thread_time_ns()
    for _ in range(CALLS):
        x + x
    return (time.thread_time_ns() - start) / CALLS / 1e3


def main() -> int:
    """Print the cost and return the exit code."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    outside, added = [], []
    for _ in range(ROUNDS):
        outside.append(measure())
        with context_parallel(mesh, seq_len=64):
            added.append(measure() - outside[-1])
    dist.destroy_process_group()
    cost = statistics.median(added)
    print(f"an operation takes {statistics.median(outside):.2f} us, and {cost:.2f} us more inside a context")
    print(f"limit: {LIMIT} us")
    return int(cost > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
