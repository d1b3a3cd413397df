"""Ranks as processes that are reused between calls: forkserver with torch preloaded, Gloo on loopback, one thread."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    while (call := pipe.recv()) is not None:
        function, args = call
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """`world_size` processes in one Gloo group, each with one thread.

    >>> import os
    >>> with Ranks(1) as ranks:
    ...     ranks.run(os.getpid)[0] != os.getpid()
    True
    """

    def __init__(self, world_size: int, timeout: float = 900.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "longspan"])
        self._timeout = timeout
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as with torchrun
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            args = (rank, world_size, self._store.port, there)
            self._processes.append(context.Process(target=_serve, args=args, daemon=True))
            self._processes[-1].start()
            self._pipes.append(here)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run function(*args) on every rank and return the results by rank. The function must be importable by name."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._timeout):
                raise TimeoutError(f"rank {rank} did not answer within {self._timeout} s.")
            fine, value = pipe.recv()
            if not fine:
                raise RuntimeError(f"rank {rank} raised:\n{value}")
            results.append(value)
        return results

    def end(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.kill()
            process.join(10)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if error is None and process.is_alive():
                pipe.send(None)
                process.join(10)
            process.kill()
