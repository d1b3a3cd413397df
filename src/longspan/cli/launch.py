"""The ranks that torchrun started: join them, gather numbers, compare their clocks.

Numbers are sent as tensors; nothing is pickled.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longspan.errors import LongspanError
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

    @property
    def group(self) -> Any:
        """The group of all ranks; None for a single one."""
        import torch.distributed as dist

        return dist.group.WORLD if self.size > 1 else None

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


def add_backend(parser: argparse.ArgumentParser) -> None:
    text = "nccl, with tensors on GPUs, or gloo, on CPUs (nccl where every rank has a GPU)"
    parser.add_argument("--backend", choices=tuple(BACKENDS), help=text)


def place(backend: str | None, num_gpus: int, local_rank: int, local_size: int, visible: str = "") -> tuple[str, str]:
    """Return the backend, and the device of this rank's tensors; each rank of a host has its own GPU.

    A launcher may show each rank only its own GPU, which is then number 0: `visible` is CUDA_VISIBLE_DEVICES.

    >>> place(None, 8, 3, 8), place("gloo", 8, 3, 8), place(None, 2, 3, 4), place(None, 1, 3, 4, visible="3")
    (('nccl', 'cuda:3'), ('gloo', 'cpu'), ('gloo', 'cpu'), ('nccl', 'cuda:0'))
    """
    has_own = num_gpus == 1 and bool(visible) and "," not in visible
    backend = backend or ("nccl" if has_own or num_gpus >= local_size else "gloo")
    if backend == "gloo":
        return backend, "cpu"
    if not has_own and local_rank >= num_gpus:
        raise LongspanError(
            f"--backend nccl needs a GPU for every rank, but PyTorch sees {num_gpus} on this host, which has a rank"
            f" {local_rank} (they count from 0). Start fewer ranks, or use --backend gloo."
        )
    return backend, "cuda:0" if has_own else f"cuda:{local_rank}"


@contextmanager
def join_ranks(backend: str | None = None) -> Iterator[JobRanks]:
    """Join the ranks of the job while the context lasts; without a launcher there is one rank and no group."""
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
    local_rank, local_size = (
        int(os.environ.get(name, n)) for name, n in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    backend, device = place(backend, torch.cuda.device_count(), local_rank, local_size, visible)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield JobRanks(0, 1, 1, backend, device)
        return
    if device != "cpu":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise LongspanError(
            f"the ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe did not meet: {reason:.160}. Start"
            f" all with torchrun."
        ) from error
    try:
        yield JobRanks(dist.get_rank(), dist.get_world_size(), local_size, backend, device)
        dist.barrier()  # other ranks may still use the connections
    finally:
        dist.destroy_process_group()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: ranks share a host's cores, and these tensors are small."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
