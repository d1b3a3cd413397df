"""A virtual network: the real runner, all ranks in one process, on a clock that a seed drives.

Every delay and every order of events comes from one seed, so a run that fails is run again by its seed. Messages
between two ranks stay in order, as transports promise; all else may be reordered.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from torch import Tensor

from longspan.run.transports import Exchange, Program

T = TypeVar("T")


@dataclass
class Rank:
    """One rank's run, as the network sees it."""

    number: int
    program: Program[Any]
    exchange: Exchange | None = None
    waits: bool = False
    flying: list[Exchange] = field(default_factory=list)
    """All exchanges whose messages were not taken, in the order in which they began."""
    queues: dict[int, deque[Tensor]] = field(default_factory=dict)
    """What has arrived and was not taken, by source, in order."""
    order: list[int] = field(default_factory=list)
    """Sources of what has arrived in this step, in order of arrival."""
    is_done: bool = False
    result: Any = None

    def due(self) -> list[Exchange]:
        """The exchanges that this step waits for."""
        assert self.exchange is not None
        return [exchange for exchange in self.flying if exchange.due == self.exchange.step]

    def has_all(self) -> bool:
        """Whether all messages that this step waits for are there."""
        return all(
            len(self.queues.get(src, ())) > self._place(exchange, src)
            for exchange in self.due()
            for src in exchange.receives
        )

    def taken(self, exchange: Exchange, src: int) -> Tensor:
        """Takes a message out of the queue of its source, in which they are in the order in which they began."""
        place = self._place(exchange, src)
        message = self.queues[src][place]
        del self.queues[src][place]
        assert message.numel() == exchange.receives[src]
        return message

    def _place(self, exchange: Exchange, src: int) -> int:
        before = self.flying[: next(n for n, other in enumerate(self.flying) if other is exchange)]
        return sum(src in other.receives for other in before)


class Network:
    """A transport for all ranks of a plan. Several runs in a row (forward, backward) go on with one clock."""

    def __init__(self, seed: int, *, slow: float = 1.0) -> None:
        self.random = random.Random(seed)  # nosec B311  # delays, not secrets
        self.seed, self.slow = seed, slow
        self.now, self.calls, self.num_events = 0.0, 0, 0
        self._numbers = count()

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Every rank's result, by rank."""
        self.calls += 1
        ranks = self.ranks = [Rank(number, program) for number, program in enumerate(programs)]
        self._heap: list[tuple[float, tuple[float, int], Callable[[Rank, Any], None], int, Any]] = []
        self._arrival: dict[tuple[int, int], float] = {}
        for rank in ranks:
            self._go_on(rank, None)
        while self._heap:
            self.now, _, event, number, data = heapq.heappop(self._heap)
            self.num_events += 1
            event(ranks[number], data)
        for rank in ranks:
            assert rank.is_done, f"seed {self.seed}: rank {rank.number} hangs"
            assert not any(rank.queues.values()), f"seed {self.seed}: rank {rank.number} was sent more than it takes"
        return [rank.result for rank in ranks]

    def _go_on(self, rank: Rank, arrived: dict[int, Tensor] | None) -> None:
        """The rank takes what arrived, and starts the messages of its next step."""
        try:
            exchange = rank.program.send(arrived)
        except StopIteration as stop:
            rank.is_done, rank.result = True, stop.value
            return
        assert exchange is not None, "a program starts one exchange at a time"
        rank.exchange, rank.order = exchange, []
        rank.flying += [exchange, *exchange.later]
        for each in (exchange, *exchange.later):
            for dst, message in each.sends.items():
                self._send(rank.number, dst, message.clone())
        self._at(self.now + self._drawn(1e-3), self._computed, rank.number)

    def _computed(self, rank: Rank, _: Any) -> None:
        """The step's computes run, then the rank waits for its messages."""
        next(rank.program)  # which starts no other exchange
        rank.waits = True
        self._take(rank)

    def _take(self, rank: Rank) -> None:
        """Goes on if all messages of the step are there."""
        exchange = rank.exchange
        assert exchange is not None
        if not rank.has_all():
            return
        rank.waits = False
        first = [src for src in dict.fromkeys(rank.order) if src in exchange.receives]
        sources = first + [src for src in exchange.receives if src not in first]  # early ones of the step before
        arrived: dict[int, Tensor] = {}
        for each in rank.due():
            arrived = {src: rank.taken(each, src) for src in (sources if each is exchange else each.receives)}
            rank.flying = [other for other in rank.flying if other is not each]
            for src, message in arrived.items() if each is not exchange else ():
                each.into[src].copy_(message)
        self._go_on(rank, arrived)  # of the last of them, which is this step's

    def _send(self, src: int, dst: int, message: Tensor) -> None:
        before = self._arrival.get((src, dst), 0.0)
        at = max(self.now + self._drawn(1e-3), math.nextafter(before, math.inf))  # a pair's messages stay in order
        self._arrival[src, dst] = at
        self._at(at, self._deliver, dst, (src, message))

    def _deliver(self, rank: Rank, data: tuple[int, Tensor]) -> None:
        src, message = data
        rank.queues.setdefault(src, deque()).append(message)
        rank.order.append(src)
        if rank.waits:
            self._take(rank)

    def _drawn(self, mean: float) -> float:
        """A delay: mostly near the mean, now and then a hundred times as long."""
        scale = mean * self.slow * (100.0 if self.random.random() < 0.02 else 1.0)
        return scale * self.random.random()

    def _at(self, time: float, event: Callable[[Rank, Any], None], rank: int, data: Any = None) -> None:
        tie = self.random.random(), next(self._numbers)  # what happens at one moment happens in any order
        heapq.heappush(self._heap, (time, tie, event, rank, data))
