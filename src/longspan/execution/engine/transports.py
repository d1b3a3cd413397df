"""Transports: how messages get from rank to rank. A message is a flat uint8 tensor whose size both ends know.

`Loopback` runs all ranks in one process, for tests and for seeing what happens. `ProcessGroup` is PyTorch's own NCCL or
Gloo group, one rank per process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.execution.engine.observe import count
from longspan.execution.trust import headers
from longspan.execution.trust.group import Running
from longspan.schedules.steps import MAX_BATCH, Moved

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
        extra = headers.SIZE if self.checked else 0
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
                message = headers.sealed(self._header(exchange, me, peer, message.numel()), message)
            self._add(lists, dist.isend, message, peer, (peer - me) % size, exchange.step)
        for peer, buffer in buffers.items():
            self._add(lists, dist.irecv, buffer, peer, (me - peer) % size, exchange.step)
        peers = list(dict.fromkeys((*exchange.sends, *buffers)))
        started = self.running.started(lambda: [pair for n in sorted(lists) for pair in _started(lists[n])], peers)
        return buffers, started

    def _opened(self, exchange: Exchange, buffers: dict[int, Tensor]) -> dict[int, Tensor]:
        me = self.group.rank()
        return {
            src: headers.opened(self._header(exchange, src, me, exchange.receives[src]), buffer)
            for src, buffer in buffers.items()
        }

    def _header(self, exchange: Exchange, src: int, dst: int, num_bytes: int) -> headers.Header:
        pieces = headers.name_of(exchange.pieces.get((src, dst), []))
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
