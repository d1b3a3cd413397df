"""All ranks on one card. NCCL needs a card for each rank, and Gloo does not send a card's memory: here what lies on the
card is copied to the host, sent by Gloo, and copied back.

The kernels, the recorded programs, packing and merging are those of many cards. The order of messages and kernels is
not: each copy makes the host wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.cli.launch import JobRanks, join_ranks

COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
)  # fmt: skip


@contextmanager
def join_one_card() -> Iterator[JobRanks]:
    """Join the ranks over Gloo, with tensors on the first GPU; on CPUs where there is none."""
    with join_ranks("gloo") as ranks:
        if not torch.cuda.is_available():
            yield ranks
            return
        torch.cuda.set_device(0)
        with through_host():
            yield replace(ranks, device="cuda:0")


@contextmanager
def through_host() -> Iterator[None]:
    """Let the functions of `torch.distributed` send tensors of a card by way of the host."""
    with ExitStack() as stack:
        replaced = {name: _collective(getattr(dist, name)) for name in COLLECTIVES}
        for name, call in (replaced | {"batch_isend_irecv": _messages(dist.batch_isend_irecv)}).items():
            stack.enter_context(mock.patch.object(dist, name, call))
        yield


@contextmanager
def waits_allowed() -> Iterator[None]:
    """Inside, the host may wait for the card: these copies are not Longspan's."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass
class Message:
    """A message under way, and the memory of the card that it arrives in."""

    work: Any
    memory: Tensor
    target: Tensor | None = None

    def wait(self, *timeout: Any) -> bool:
        self.work.wait(*timeout)
        if self.target is not None:
            with waits_allowed():
                self.target.copy_(self.memory)
        return True


class Done:
    """The work of a collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _messages(start: Callable[..., Any]) -> Callable[..., Any]:
    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Any]:
        if all(op.tensor.device.type == "cpu" for op in ops):
            return start(ops)
        targets = [op.tensor if op.op is dist.irecv else None for op in ops]
        with waits_allowed():
            memory = [
                op.tensor.cpu() if target is None else torch.empty_like(op.tensor, device="cpu")
                for op, target in zip(ops, targets, strict=True)
            ]
        works = start([
            dist.P2POp(op.op, host, group=op.group, group_peer=op.group_peer, tag=op.tag)
            for op, host in zip(ops, memory, strict=True)
        ])  # fmt: skip
        return [Message(*row) for row in zip(works, memory, targets, strict=True)]

    return batch_isend_irecv


def _collective(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective on copies. Its first argument is what it writes to."""
    parameters = inspect.signature(call)
    written = next(iter(parameters.parameters))

    def run(*args: Any, **options: Any) -> Any:
        given = parameters.bind(*args, **options).arguments
        with waits_allowed():
            copies = {name: _to_host(value) for name, value in given.items()}
        if copies[written] is given[written]:
            return call(*args, **options)
        is_async = copies.pop("async_op", False)
        call(**copies)
        pairs = zip(given[written], copies[written], strict=True) if isinstance(given[written], list) else ()
        with waits_allowed():
            for target, value in pairs or [(given[written], copies[written])]:
                target.detach().copy_(value)
        return Done() if is_async else None

    return run


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().cpu()
    if isinstance(value, list) and any(isinstance(x, Tensor) and x.device.type != "cpu" for x in value):
        return [_to_host(x) for x in value]
    return value
