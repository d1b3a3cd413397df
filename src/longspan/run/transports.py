"""Transports: how messages get from rank to rank. A message is a flat uint8 tensor whose size both ends know.

`ProcessGroup` is PyTorch's NCCL or Gloo group, one rank per process. `Loopback` runs all ranks in one process, for
tests and for inspection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan import _torch
from longspan.planning.steps import MAX_BATCH, Moved
from longspan.run import agreement
from longspan.run.group import Running

# -- Observation: bytes and messages that were sent, and profiler marks per step ---------------------------------------
# Off by default, and scoped.


@dataclass
class Traffic:
    """Bytes and messages that were really sent, by (source, target)."""

    num_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    num_messages: dict[tuple[int, int], int] = field(default_factory=dict)

    def count(self, src: int, dst: int, size: int) -> None:
        self.num_bytes[src, dst] = self.num_bytes.get((src, dst), 0) + size
        self.num_messages[src, dst] = self.num_messages.get((src, dst), 0) + 1

    def sent(self, rank: int) -> int:
        return sum(size for (src, _), size in self.num_bytes.items() if src == rank)


Observed = tuple[Traffic, bool]
"""What is counted, and whether steps are marked."""
_observed: ContextVar[Observed | None] = ContextVar("longspan_observed", default=None)
_all_observed: list[Observed] = []
"""Those of the whole process, the last one last: for threads that were not started by Python."""


@contextmanager
def observe(*, marks: bool = False) -> Iterator[Traffic]:
    """Count what is sent inside; with `marks`, every step shows up in torch's profiler. Backward passes of GPUs, which
    autograd runs on threads of its own, are counted by the observer that was started last."""
    observed = Traffic(), marks
    token = _observed.set(observed)
    _all_observed.append(observed)
    try:
        yield observed[0]
    finally:
        _all_observed[:] = [other for other in _all_observed if other is not observed]
        _observed.reset(token)


def _current() -> Observed | None:
    found = _observed.get()
    if found is None and _all_observed and threading.current_thread().name.startswith("Dummy-"):
        return _all_observed[-1]  # a thread of autograd, which has no context
    return found


def count(src: int, dst: int, size: int) -> None:
    """Note one message, if an observer is active."""
    if (observed := _current()) is not None:
        observed[0].count(src, dst, size)


def marks() -> bool:
    """Return whether an observer wants marks: then steps without work have one, too."""
    observed = _current()
    return observed is not None and observed[1]


def mark(direction: str, rank: int, step: int) -> AbstractContextManager[object]:
    """A profiler mark around a step, if somebody asked for marks."""
    observed = _current()
    if observed is None or not observed[1]:
        return nullcontext()
    return torch.profiler.record_function(f"longspan {direction} rank {rank} step {step}")


# -- Buffers: the memory of messages, reused within a call -------------------------------------------------------------
# A freed message goes back to PyTorch's allocator, but on GPUs not at once: sending and receiving over NCCL records
# that another stream uses the memory, so it is free only when that stream has passed it. A host that runs ahead of the
# GPU, as it should, would get new memory for the messages of every step. Here memory is reused in the order of the
# host: every reader of a message has been queued on the current stream by then, and new messages start after that
# stream.
#
# A ring of four ranks, each message R bytes, sent on in the step after it arrived: three buffers, not six:
#
#     step     sends    receives    held and read
#     0        a        b
#     1        a        c           b
#     2        a        b           c


SLACK = 8
"""A buffer may be larger than its message by one part in so many."""


class Buffers:
    """Those of one rank's run."""

    def __init__(self) -> None:
        self._all: list[Tensor] = []

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """So many bytes, in no particular state: the smallest buffer that is free and fits, or a new one.

        >>> buffers = Buffers()
        >>> first = buffers.take(80, torch.device("cpu"))
        >>> row, place = first[:16].view(torch.float32), first.data_ptr()
        >>> buffers.take(80, torch.device("cpu")).data_ptr() == place
        False
        >>> del first
        >>> buffers.take(80, torch.device("cpu")).data_ptr() == place  # the row is a view of it
        False
        >>> del row
        >>> buffers.take(76, torch.device("cpu")).data_ptr() == place
        True
        """
        fits = [
            whole
            for whole in self._all
            if num_bytes <= whole.numel() <= num_bytes + num_bytes // SLACK
            and whole.device == device
            and not is_shared(whole)
        ]
        if fits:
            return min(fits, key=Tensor.numel)[:num_bytes]
        self._all.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        return self._all[-1][:num_bytes]

    def release(self) -> None:
        """Lets go of buffers that are free: a plan's memory is that of messages that are there."""
        if self._all:
            self._all = [whole for whole in self._all if is_shared(whole)]


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor has the same memory.

    >>> whole = torch.empty(8)
    >>> part = whole[2:]
    >>> is_shared(whole), is_shared(torch.empty(8))
    (True, False)
    """
    return _torch.num_users(tensor.untyped_storage()._cdata) > 2  # beside the tensor there is who asks


# -- Exchanges, loopback and process groups ----------------------------------------------------------------------------


T = TypeVar("T")


@dataclass(slots=True)
class Exchange:
    """One rank's messages of one step: what it sends to whom, and how many bytes it expects from whom."""

    step: int
    sends: dict[int, Tensor]
    receives: dict[int, int]
    device: torch.device
    pieces: dict[tuple[int, int], list[Moved]] = field(default_factory=dict)
    """What the messages are made of, by source and target."""
    into: dict[int, Tensor] = field(default_factory=dict)
    """Memory for what is expected, by source: a transport may use it, or memory of its own."""


Program = Generator[Exchange | None, dict[int, Tensor] | None, T]
"""A rank's run: yields an Exchange to start one, then None to wait for it and be sent what arrived, by source."""


class Loopback:
    """All ranks in one process, taking turns step by step."""

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs every rank's program to its end and returns their results, by rank."""
        results: dict[int, T] = {}
        started: dict[int, Exchange] = {}
        for rank, program in enumerate(programs):
            self._resume(rank, program, None, started, results)
        while started:
            now, started = started, {}
            for rank in now:  # everybody computes while messages are on their way
                next(programs[rank])  # which starts no other exchange
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
    """Runs the program of a rank that has no others to its end: nothing is sent, and nothing arrives."""
    try:
        while True:
            next(program)
    except StopIteration as stop:
        return stop.value


class ProcessGroup:
    """One rank per process, over `torch.distributed`. Lists of operations are matched on both ends and batched."""

    def __init__(self, running: Running) -> None:
        self.running, self.group = running, running.members.group
        self.checked = running.call.safety.checked

    def run(self, program: Program[T]) -> T:
        """Runs this rank's program to its end."""
        arrived: dict[int, Tensor] | None = None
        try:
            while True:
                exchange = program.send(arrived)
                assert exchange is not None
                self.running.at(exchange.step)
                buffers, works = self._start(exchange)
                next(program)  # which starts no other exchange
                self.running.wait(works)
                arrived = self._opened(exchange, buffers) if self.checked else buffers
                del exchange, buffers, works  # messages end here, not after the next step's have been made
        except StopIteration as stop:
            return stop.value

    def _start(self, exchange: Exchange) -> tuple[dict[int, Tensor], list[tuple[int, dist.Work]]]:
        extra = agreement.HEADER_SIZE if self.checked else 0
        buffers = {
            src: torch.zeros(size + extra, dtype=torch.uint8, device=exchange.device)
            if self.checked
            else exchange.into[src]
            for src, size in exchange.receives.items()
        }
        lists: dict[int, list[dist.P2POp]] = {}
        size, me = self.group.size(), self.group.rank()
        for peer, message in exchange.sends.items():
            count(me, peer, message.numel())
            if self.checked:
                message = agreement.sealed(self._header(exchange, me, peer, message.numel()), message)
            self._add(lists, dist.isend, message, peer, (peer - me) % size, exchange.step)
        for peer, buffer in buffers.items():
            self._add(lists, dist.irecv, buffer, peer, (me - peer) % size, exchange.step)
        peers = list(dict.fromkeys((*exchange.sends, *buffers)))
        started = self.running.started(lambda: [pair for n in sorted(lists) for pair in _started(lists[n])], peers)
        return buffers, started

    def _opened(self, exchange: Exchange, buffers: dict[int, Tensor]) -> dict[int, Tensor]:
        me = self.group.rank()
        return {
            src: agreement.opened(self._header(exchange, src, me, exchange.receives[src]), buffer)
            for src, buffer in buffers.items()
        }

    def _header(self, exchange: Exchange, src: int, dst: int, num_bytes: int) -> agreement.Header:
        pieces = agreement.name_of(exchange.pieces.get((src, dst), []))
        return self.running.header(src, dst, exchange.step, pieces, num_bytes)

    def _add(
        self,
        lists: dict[int, list[dist.P2POp]],
        kind: Callable[..., object],
        tensor: Tensor,
        peer: int,
        distance: int,
        step: int,
    ) -> None:
        # Both ends put a message into the list that its distance gives, so lists match (see Step.batches).
        op = dist.P2POp(kind, tensor, group=self.group, group_peer=peer, tag=self.running.tag(step))
        lists.setdefault((distance - 1) // (MAX_BATCH // 2), []).append(op)


def _started(ops: list[dist.P2POp]) -> list[tuple[int, dist.Work]]:
    """The work of a batch, each with the peer it is with; NCCL gives one for all."""
    works = dist.batch_isend_irecv(ops)
    peers = [op.group_peer for op in ops] if len(works) == len(ops) else [ops[0].group_peer] * len(works)
    return list(zip(peers, works, strict=True))
