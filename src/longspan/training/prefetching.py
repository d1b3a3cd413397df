"""Prepare the next batch in a thread while the current step runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from longspan.run.group import PREFETCHING

T = TypeVar("T")
R = TypeVar("R")


def prefetch(batches: Iterable[T], prepare: Callable[[T], R]) -> Iterator[R]:
    """Yield `prepare(batch)` for every batch. A thread reads and prepares the next batch while the loop uses this one.

    `prepare` plans, shards and prepares: everything that a new batch needs on the host, and that sends no messages.

        def prepare(batch):
            plan = ls.plan(mask_of(batch), layout_of(batch), ...)
            plan.prepare(rank, device)
            return plan, plan.shard(batch, rank).to(device)

        for plan, batch in ls.training.prefetch(loader, prepare):
            ...

    Batches come in order. An exception is raised where its batch would come. The thread uses the device and stream
    that are current when the loop starts, and has ended when the loop has.
    """
    stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None
    source = iter(batches)

    def start() -> None:
        PREFETCHING.add(threading.get_ident())
        if stream is not None:
            torch.accelerator.set_stream(stream)  # also makes its device current

    def step() -> tuple[R] | None:
        for batch in source:
            return (prepare(batch),)
        return None

    with ThreadPoolExecutor(1, "longspan-prefetch", start) as worker:
        try:
            future = worker.submit(step)
            while (found := future.result()) is not None:
                future = worker.submit(step)
                yield found[0]
        finally:
            worker.submit(lambda: PREFETCHING.discard(threading.get_ident()))
