"""The ranks that torchrun started, seen from a command: joining them, asking all of them for numbers, their clocks.

Numbers travel as tensors of a fixed layout; nothing is pickled.
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
    def speaks(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank, on the CPU; they share dtype and all sizes but the first."""
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
        """The largest of every rank's number."""
        import torch

        return max(float(number) for number in self.gather(torch.tensor([value], dtype=torch.float64)))

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier()
        self.finish()

    def finish(self) -> None:
        """Waits until the device has done what it was given, so that a clock read next tells the truth."""
        if self.device != "cpu":
            import torch

            torch.accelerator.synchronize(self.device)


def is_launched() -> bool:
    """Whether torchrun, or something that speaks like it, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def add_backend(parser: argparse.ArgumentParser) -> None:
    """The argument of commands that measure on all ranks."""
    words = "what ranks talk over: nccl, with tensors on GPUs, or gloo, on CPUs (nccl where there is CUDA)"
    parser.add_argument("--backend", choices=("nccl", "gloo"), help=words)


def place(asked: str | None, num_gpus: int, local_rank: int, *, shown_one: bool = False) -> tuple[str, str]:
    """The backend, and the device of this rank's tensors: each rank of a host has a GPU of its own.

    With `shown_one` the launcher has shown this rank a single GPU, its own, which is number 0 to each of them.

    >>> place(None, 8, 3), place("gloo", 8, 3), place(None, 0, 3), place(None, 1, 3, shown_one=True)
    (('nccl', 'cuda:3'), ('gloo', 'cpu'), ('gloo', 'cpu'), ('nccl', 'cuda:0'))
    """
    backend = asked or ("nccl" if num_gpus else "gloo")
    if backend == "gloo":
        return backend, "cpu"
    if num_gpus == 1 and shown_one:
        return backend, "cuda:0"
    if local_rank >= num_gpus:
        raise LongspanError(
            f"NCCL gives every rank a GPU of its own, but PyTorch sees {num_gpus} on this host, which has a rank"
            f" {local_rank} (they count from 0). Start at most {num_gpus} ranks on a host, show each rank its own GPU"
            f" only (CUDA_VISIBLE_DEVICES), or say --backend gloo."
            if num_gpus
            else "--backend nccl was asked for, but PyTorch sees no CUDA device here. Say --backend gloo, or leave it"
            " out."
        )
    return backend, f"cuda:{local_rank}"


def is_shown_one(env: Mapping[str, str]) -> bool:
    """Whether whoever started this process has shown it exactly one of the GPUs.

    >>> [is_shown_one({"CUDA_VISIBLE_DEVICES": names}) for names in ("3", "GPU-1f", "0,1", "")], is_shown_one({})
    ([True, True, False, False], False)
    """
    shown = env.get("CUDA_VISIBLE_DEVICES", "")
    return bool(shown) and "," not in shown


def meet(backend: str, device: str) -> None:
    """Makes the group of all ranks, or says in plain words why it cannot be made."""
    import torch
    import torch.distributed as dist

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend)
    except (ValueError, RuntimeError) as wrong:
        reason = str(wrong).strip().partition("\n")[0].rstrip(".")
        raise PlanError(
            f"the ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe did not meet: {reason:.160}. Start"
            f" all with torchrun."
        ) from wrong


def _ranks_of_group(asked: str | None) -> JobRanks:
    """This process's place in a group that somebody else has made, and that outlives the command."""
    import torch
    import torch.distributed as dist

    known = str(dist.get_backend_config())
    if asked is not None and asked not in known:
        raise LongspanError(f"--backend {asked} was asked for, but the ranks talk over {known} already. Leave it out.")
    backend = asked or ("nccl" if "nccl" in known else "gloo")
    device = f"cuda:{torch.cuda.current_device()}" if backend == "nccl" else "cpu"
    size = dist.get_world_size()
    return JobRanks(dist.get_rank(), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), backend, device)


@contextmanager
def joined(command: str, backend: str | None, *, alone: bool = False) -> Iterator[JobRanks]:
    """The ranks of the job for as long as they are needed; with `alone`, also without a launcher, as one rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks on stderr
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield _ranks_of_group(backend)
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    where = place(backend, torch.cuda.device_count(), local_rank, shown_one=is_shown_one(os.environ))
    if not is_launched() and not alone:
        raise LongspanError(
            f"{command} runs on all ranks at once. Start it as: torchrun --nproc-per-node 4 -m longspan {command} ..."
        )
    if not is_launched():
        yield JobRanks(0, 1, 1, *where)
        return
    meet(*where)
    try:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield JobRanks(dist.get_rank(), dist.get_world_size(), local, *where)
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
    table = torch.zeros(ranks.size, 2, dtype=torch.float64, device=ranks.device)
    reading = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    for peer in range(1, ranks.size):
        best = (float("inf"), 0.0)
        for _ in range(rounds):
            if ranks.rank == 0:
                asked = time.perf_counter()
                dist.send(reading, peer)
                dist.recv(reading, peer)
                answered = time.perf_counter()
                best = min(best, (answered - asked, float(reading) - (asked + answered) / 2))
            elif ranks.rank == peer:
                dist.recv(reading, 0)
                reading[0] = time.perf_counter()
                dist.send(reading, 0)
        if ranks.rank == 0:
            table[peer, 0], table[peer, 1] = best[1], best[0]
    dist.broadcast(table, 0)
    return [Clock(ahead, back) for ahead, back in table.tolist()]


# -- Where a command's tensors live and which kernel `auto` takes for them, in a word ----------------------------------


def kernel_used(sizes: Sizes, dtype: str, device: Any, **features: bool) -> str:
    """The kernel's name, and whose flash attention it is where that can be chosen.

    >>> kernel_used(Sizes(4, 2, 64, 64, 2), "bfloat16", "cpu"), kernel_used(Sizes(4, 2, 64, 64, 4), "float32", "cpu",
    ...     score_function=True)
    ('cpu_flash', 'reference')
    """
    import torch

    from longspan.kernels import choose_kernel
    from longspan.kernels.cuda_flash import implementation
    from longspan.tile import Features

    shapes = (sizes.q_heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.v_head_dim)
    q, k, v = (torch.zeros(1, heads, 16, dim, dtype=getattr(torch, dtype), device=device) for heads, dim in shapes)
    name = choose_kernel("auto", q, k, v, Features(**features))
    return f"{name} ({implementation()})" if name in ("varlen", "flash") else name


def device_used(device: Any) -> str:
    """The device, and the GPU's own name.

    >>> device_used("cpu")
    'cpu'
    """
    if str(device) == "cpu":
        return "cpu"
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})" if str(device).startswith("cuda") else str(device)
