"""The ranks that torchrun started: join them, gather numbers, compare their clocks.

Numbers are sent as tensors; nothing is pickled.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longspan.errors import LongspanError, PlanError
from longspan.planning.steps import Sizes

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = {"gloo": "Gloo", "nccl": "NCCL"}


@dataclass(frozen=True, slots=True)
class JobRanks:
    """This process's place among the ranks."""

    rank: int
    size: int
    local_size: int
    """Ranks on this host."""
    backend: str
    device: str
    """Where this rank's tensors live, so that the backend can send them."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor on the CPU; they must agree in dtype and all sizes but the first."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return [mine]
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)], device=self.device))
        most = max(int(length) for length in lengths)
        padded = torch.zeros((most, *mine.shape[1:]), dtype=mine.dtype, device=self.device)
        padded[: len(mine)] = mine
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [rows[: int(length)].cpu() for rows, length in zip(parts, lengths, strict=True)]

    def most(self, value: float) -> float:
        """Return the largest value of any rank."""
        import torch

        return max(float(number) for number in self.gather(torch.tensor([value], dtype=torch.float64)))

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier()
        self.finish()

    def finish(self) -> None:
        """Synchronize the device, so that a clock read next includes its work."""
        if self.device != "cpu":
            import torch

            torch.accelerator.synchronize(self.device)


def is_launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def add_backend(parser: argparse.ArgumentParser) -> None:
    text = "nccl, with tensors on GPUs, or gloo, on CPUs (nccl where there is CUDA)"
    parser.add_argument("--backend", choices=("nccl", "gloo"), help=text)


def place(backend: str | None, num_gpus: int, local_rank: int, *, sees_one_gpu: bool = False) -> tuple[str, str]:
    """Return the backend, and the device of this rank's tensors; each rank of a host has its own GPU.

    With `sees_one_gpu` the launcher exposes one GPU to this rank, which is number 0 for every rank.

    >>> place(None, 8, 3), place("gloo", 8, 3), place(None, 0, 3), place(None, 1, 3, sees_one_gpu=True)
    (('nccl', 'cuda:3'), ('gloo', 'cpu'), ('gloo', 'cpu'), ('nccl', 'cuda:0'))
    """
    backend = backend or ("nccl" if num_gpus else "gloo")
    if backend == "gloo":
        return backend, "cpu"
    if num_gpus == 1 and sees_one_gpu:
        return backend, "cuda:0"
    if local_rank >= num_gpus:
        raise LongspanError(
            f"NCCL needs a GPU for every rank, but PyTorch sees {num_gpus} on this host, which has a rank {local_rank}"
            f" (they count from 0). Start at most {num_gpus} ranks on a host, make one GPU visible to each rank"
            f" (CUDA_VISIBLE_DEVICES), or use --backend gloo."
            if num_gpus
            else "--backend nccl needs CUDA devices, but PyTorch sees none here. Use --backend gloo, or leave it out."
        )
    return backend, f"cuda:{local_rank}"


def sees_one_gpu(env: Mapping[str, str]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES names exactly one GPU.

    >>> [sees_one_gpu({"CUDA_VISIBLE_DEVICES": names}) for names in ("3", "GPU-1f", "0,1", "")], sees_one_gpu({})
    ([True, True, False, False], False)
    """
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    return bool(visible) and "," not in visible


def init_group(backend: str, device: str) -> None:
    """Create the process group of all ranks, or raise a PlanError that says why it cannot be created."""
    import torch
    import torch.distributed as dist

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise PlanError(
            f"the ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe did not meet: {reason:.160}. Start"
            f" all with torchrun."
        ) from error


@contextmanager
def join_ranks(command: str, backend: str | None, *, alone: bool = False) -> Iterator[JobRanks]:
    """Join the ranks of the job while the context lasts; with `alone`, also without a launcher, as one rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints to stderr
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # the caller's group, which outlives the command
        used, size = str(dist.get_backend_config()), dist.get_world_size()
        if backend is not None and backend not in used:
            raise LongspanError(f"--backend {backend} does not fit the process group, which uses {used}. Leave it out.")
        backend = backend or ("nccl" if "nccl" in used else "gloo")
        device = f"cuda:{torch.cuda.current_device()}" if backend == "nccl" else "cpu"
        yield JobRanks(dist.get_rank(), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), backend, device)
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    where = place(backend, torch.cuda.device_count(), local_rank, sees_one_gpu=sees_one_gpu(os.environ))
    if not is_launched():
        if not alone:
            raise LongspanError(
                f"{command} runs on all ranks at once. Start it as: torchrun --nproc-per-node 4 -m longspan"
                f" {command} ..."
            )
        yield JobRanks(0, 1, 1, *where)
        return
    init_group(*where)
    try:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield JobRanks(dist.get_rank(), dist.get_world_size(), local, *where)
        dist.barrier()  # other ranks may still use the connections
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a rank's clock is ahead of rank 0's, and how long a message takes there and back, in seconds."""

    ahead: float
    round_trip: float


def clocks(ranks: JobRanks, rounds: int = 20) -> list[Clock]:
    """Return every rank's clock against that of rank 0, from the exchange of many that took least time."""
    import torch
    import torch.distributed as dist

    if ranks.size == 1:
        return [Clock(0.0, 0.0)]
    table = torch.zeros(ranks.size, 2, dtype=torch.float64, device=ranks.device)
    reading = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    for peer in range(1, ranks.size):
        best = (float("inf"), 0.0)
        for _ in range(rounds):
            if ranks.rank == 0:
                begin = time.perf_counter()
                dist.send(reading, peer)
                dist.recv(reading, peer)
                end = time.perf_counter()
                best = min(best, (end - begin, float(reading) - (begin + end) / 2))
            elif ranks.rank == peer:
                dist.recv(reading, 0)
                reading[0] = time.perf_counter()
                dist.send(reading, 0)
        if ranks.rank == 0:
            table[peer, 0], table[peer, 1] = best[1], best[0]
    dist.broadcast(table, 0)
    return [Clock(ahead, back) for ahead, back in table.tolist()]


def describe_kernel(sizes: Sizes, dtype: str, device: Any, **features: bool) -> str:
    """Return the name of the kernel that `auto` chooses, with the flash attention that it runs.

    >>> describe_kernel(Sizes(4, 2, 64, 64, 4), "float32", "cpu", score_function=True)
    'reference'
    """
    import torch

    from longspan.kernels import choose_kernel, full_name
    from longspan.tile import Features

    shapes = (sizes.q_heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.v_head_dim)
    q, k, v = (torch.zeros(1, heads, 16, dim, dtype=getattr(torch, dtype), device=device) for heads, dim in shapes)
    return full_name(choose_kernel("auto", q, k, v, Features(**features)))


def describe_device(device: Any) -> str:
    """Return the device with the name of the GPU.

    >>> describe_device("cpu")
    'cpu'
    """
    if str(device) == "cpu":
        return "cpu"
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})" if str(device).startswith("cuda") else str(device)
