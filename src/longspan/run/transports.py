"""Transports: send the messages of a program between ranks. A message is a flat uint8 tensor of a size both ends know.

`ProcessGroup` uses a PyTorch process group (NCCL or Gloo), one rank per process. `Loopback` runs all ranks in one
process, for tests and inspection.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan import _torch
from longspan.planning.steps import MAX_BATCH
from longspan.run.group import MAX_STEP, Call

# -- Observation: count sent bytes and messages. Off by default --------------------------------------------------------


@dataclass
class Traffic:
    """Bytes and messages that were sent, by (source, target)."""

    num_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    num_messages: dict[tuple[int, int], int] = field(default_factory=dict)

    def count(self, src: int, dst: int, size: int) -> None:
        self.num_bytes[src, dst] = self.num_bytes.get((src, dst), 0) + size
        self.num_messages[src, dst] = self.num_messages.get((src, dst), 0) + 1

    def sent_bytes(self, rank: int) -> int:
        return sum(size for (src, _), size in self.num_bytes.items() if src == rank)


_observer: ContextVar[Traffic | None] = ContextVar("longspan_observer", default=None)
_all_observers: list[Traffic] = []
"""Observers of the process, newest last, for threads that were not started by Python."""


@contextmanager
def observe() -> Iterator[Traffic]:
    """Count messages sent inside the context.

    On GPUs autograd runs backward passes on threads of its own; the newest observer counts those.
    """
    traffic = Traffic()
    token = _observer.set(traffic)
    _all_observers.append(traffic)
    try:
        yield traffic
    finally:
        _all_observers[:] = [other for other in _all_observers if other is not traffic]
        _observer.reset(token)


def count(src: int, dst: int, size: int) -> None:
    """Count one message if an observer is active."""
    if not _all_observers:
        return
    traffic = _observer.get()
    if traffic is None and threading.current_thread().name.startswith("Dummy-"):
        traffic = _all_observers[-1]  # a thread of autograd has no context
    if traffic is not None:
        traffic.count(src, dst, size)


# -- Ranges for profilers ----------------------------------------------------------------------------------------------


NO_RANGE = nullcontext()


def step_range(direction: str, rank: int, step: int) -> AbstractContextManager[object]:
    """Return a range for `torch.profiler` in which a rank computes."""
    return torch.profiler.record_function(f"longspan {direction} rank {rank} step {step}")


def wait_range(direction: str, rank: int, exchange: Exchange) -> AbstractContextManager[object]:
    """Return a range for `torch.profiler` in which a rank waits for messages."""
    sends, receives = (", ".join(map(str, peers)) or "none" for peers in (exchange.sends, exchange.into))
    about = f"longspan {direction} rank {rank} step {exchange.step} wait, to {sends}, from {receives}"
    return torch.profiler.record_function(about)


# -- Buffers: message memory, reused within a call ---------------------------------------------------------------------
# A freed message returns to PyTorch's allocator, but on GPUs not immediately: NCCL sends and receives record that
# another stream uses the memory, so it is free only when that stream has passed it. A host that runs ahead of the GPU,
# as it should, would allocate new memory for the messages of every step. Here memory is reused in host order: every
# reader of a message has been queued on the current stream by then, and new messages start after that stream.
#
# A ring of four ranks, each message R bytes, forwarded in the step after it arrived, needs three buffers, not six:
#
#     step     sends    receives    held and read
#     0        a        b
#     1        a        c           b
#     2        a        b           c


SLACK = 8
"""A buffer may be larger than its message by 1 / SLACK."""


class Buffers:
    """Message buffers of one rank's run."""

    def __init__(self) -> None:
        self._all: list[Tensor] = []

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return uninitialized bytes: the smallest free buffer that fits, or a new one.

        >>> buffers = Buffers()
        >>> first = buffers.take(80, torch.device("cpu"))
        >>> row, place = first[:16].view(torch.float32), first.data_ptr()
        >>> buffers.take(80, torch.device("cpu")).data_ptr() == place
        False
        >>> del first
        >>> buffers.take(80, torch.device("cpu")).data_ptr() == place  # `row` still views it
        False
        >>> del row
        >>> buffers.take(76, torch.device("cpu")).data_ptr() == place
        True
        """
        best: Tensor | None = None
        for whole in self._all:
            size = whole.numel()
            if (
                num_bytes <= size <= num_bytes + num_bytes // SLACK
                and (best is None or size < best.numel())
                and whole.device == device
                and not is_shared(whole)
            ):
                best = whole
        if best is not None:
            return best[:num_bytes]
        self._all.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        return self._all[-1][:num_bytes]

    def release(self) -> None:
        """Free the buffers that no message uses."""
        self._all[:] = filter(is_shared, self._all)


def is_shared(tensor: Tensor) -> bool:
    """Return whether another tensor uses the same memory.

    >>> whole = torch.empty(8)
    >>> part = whole[2:]
    >>> is_shared(whole), is_shared(torch.empty(8))
    (True, False)
    """
    return _torch.num_users(tensor.untyped_storage()._cdata) > 2  # the tensor itself and this query count as two


# -- Exchanges, loopback and process groups ----------------------------------------------------------------------------


T = TypeVar("T")


@dataclass(slots=True)
class Exchange:
    """One rank's messages of one step: tensors to send by target, and numbers of bytes to receive by source."""

    step: int
    sends: dict[int, Tensor]
    receives: dict[int, int]
    device: torch.device
    into: dict[int, Tensor] = field(default_factory=dict)
    """Memory for received messages, by source. A transport may use it, or memory of its own."""
    due: int = -1
    """The step at whose end they must have arrived."""
    later: Sequence[Exchange] = ()
    """Messages that start now, after these, and that later steps wait for. A transport puts them into their `into`."""


Program = Generator[Exchange | None, dict[int, Tensor] | None, T]
"""A rank's run. It yields an Exchange to start messages, then None to wait for them, and is sent what arrived."""


class Loopback:
    """All ranks in one process, taking turns step by step."""

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Run every rank's program to completion and return the results by rank."""
        results: dict[int, T] = {}
        started: dict[int, Exchange] = {}
        later: dict[tuple[int, int], dict[int, Exchange]] = {}  # by the step that waits, and their own
        for rank, program in enumerate(programs):
            self._resume(rank, program, None, started, results)
        while started:
            now, started = started, {}
            for rank in now:  # compute while messages are in flight
                next(programs[rank])
            for rank, first in now.items():
                for exchange in first.later:
                    later.setdefault((exchange.due, exchange.step), {})[rank] = exchange
            number = next(iter(now.values())).step
            for key in [key for key in later if key[0] == number]:
                late = later.pop(key)
                for rank, exchange in late.items():
                    for src in exchange.receives:
                        self._take(late, src, rank, exchange)
            for rank, exchange in now.items():
                arrived = {src: self._take(now, src, rank, exchange) for src in exchange.receives}
                self._resume(rank, programs[rank], arrived, started, results)
        return [results[rank] for rank in range(len(programs))]

    def _take(self, now: dict[int, Exchange], src: int, dst: int, exchange: Exchange) -> Tensor:
        message = now[src].sends[dst]
        assert now[src].step == exchange.step
        assert message.numel() == exchange.receives[src]
        count(src, dst, message.numel())
        if (into := exchange.into.get(src)) is None:
            return message.clone()
        return into.copy_(message)

    def _resume(
        self,
        rank: int,
        program: Program[T],
        arrived: dict[int, Tensor] | None,
        started: dict[int, Exchange],
        results: dict[int, T],
    ) -> None:
        try:
            exchange = program.send(arrived)
        except StopIteration as stop:
            results[rank] = stop.value
        else:
            assert exchange is not None
            started[rank] = exchange


def run_alone(program: Program[T]) -> T:
    """Run a program that sends no messages to completion."""
    try:
        while True:
            next(program)
    except StopIteration as stop:
        return stop.value


Started = tuple[Exchange, dict[int, Tensor], list[dist.Work]]
"""Messages, the memory that they arrive in, by source, and their works."""


class ProcessGroup:
    """One rank per process, over `torch.distributed`. Both ends batch matching lists of operations."""

    def __init__(self, group: dist.ProcessGroup, call: Call, number: int) -> None:
        """`number` is that of the call over the group."""
        self.group, self.call, self.tag = group, call, call.tag(number)
        self.rank, self.size = group.rank(), group.size()

    def run(self, program: Program[T]) -> T:
        """Run this rank's program to completion."""
        arrived: dict[int, Tensor] | None = None
        flying: list[Started] = []
        direction, is_profiling = self.call.direction, _torch.is_profiling()
        try:
            while True:
                exchange = program.send(arrived)
                assert exchange is not None
                buffers, works = self._start(exchange)
                if exchange.later:
                    flying += [(later, *self._start(later)) for later in exchange.later]
                next(program)  # compute while messages are in flight
                if flying:
                    flying = self._wait_due(flying, exchange.step)
                with wait_range(direction, self.rank, exchange) if works and is_profiling else NO_RANGE:
                    wait_all(works)
                arrived = buffers
                del exchange, buffers, works  # free messages before the next step allocates its own
        except StopIteration as stop:
            return stop.value

    def _wait_due(self, flying: list[Started], step: int) -> list[Started]:
        """Wait for messages of earlier steps that are due; return the others."""
        for exchange, _, works in flying:
            if exchange.due == step:
                wait_all(works)
        return [started for started in flying if started[0].due != step]

    def _start(self, exchange: Exchange) -> tuple[dict[int, Tensor], list[dist.Work]]:
        buffers = exchange.into
        if not exchange.sends and not buffers:
            return {}, []
        # Both ends put a message into the list given by its distance, so lists match (see Step.batches).
        lists: dict[int, list[dist.P2POp]] = {}
        me, size, tag = self.rank, self.size, self.tag | (exchange.step & MAX_STEP)
        for peer, message in exchange.sends.items():
            count(me, peer, message.numel())
            op = dist.P2POp(dist.isend, message, group=self.group, group_peer=peer, tag=tag)
            lists.setdefault(((peer - me) % size - 1) // (MAX_BATCH // 2), []).append(op)
        for peer, buffer in buffers.items():
            op = dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer, tag=tag)
            lists.setdefault(((me - peer) % size - 1) // (MAX_BATCH // 2), []).append(op)
        return dict(buffers), [work for n in sorted(lists) for work in dist.batch_isend_irecv(lists[n])]


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait until messages have arrived. Those of an accelerator are only ordered on its current stream."""
    for work in works:
        work.wait()
