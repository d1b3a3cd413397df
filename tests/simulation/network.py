"""A virtual network: the real runner, all ranks in one process, on a clock that a seed drives.

Every delay, every order of events and every fault comes from one seed, so a run that fails is run again by its seed.
Messages between two ranks stay in order, as transports promise; all else may be reordered. Messages carry the headers
of checked mode. A fault (`faults.Fault`) is something that really happens: a rank dies, stops, raises or skips a call;
a message is lost, doubled, late, cut short or damaged. Every rank ends: with its result, or with an error that names
rank, step and cause.
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

import torch
from torch import Tensor

from longspan.errors import RankError
from longspan.run import agreement
from longspan.run.agreement import Header
from longspan.run.transports import Exchange, Program
from tests.simulation.faults import Fault, KilledError, spoiled
from tests.simulation.waits import Graph, State, WaitError

T = TypeVar("T")

PATIENCE = 2.0
"""Virtual seconds without a sign of life after which a rank counts as dead or stopped."""
TIMEOUT = 60.0
"""Virtual seconds to wait for a rank that is alive but does not come."""


@dataclass
class Rank:
    """One rank's run, as the network sees it."""

    number: int
    program: Program[Any]
    state: State = State.RUNNING
    step: int = -1
    """The last step whose messages it started."""
    exchange: Exchange | None = None
    flying: list[Exchange] = field(default_factory=list)
    """All exchanges whose messages were not taken, in the order in which they began."""
    queues: dict[int, deque[Tensor]] = field(default_factory=dict)
    """What has arrived and was not taken, by source, in order."""
    order: list[int] = field(default_factory=list)
    """Sources of what has arrived in this step, in order of arrival."""
    since: float = 0.0
    """When it began to wait, or to be silent."""
    waits: int = 0
    result: Any = None
    error: BaseException | None = None
    ended: float | None = None

    def due(self) -> list[Exchange]:
        """The exchanges that this step waits for."""
        return [exchange for exchange in self.flying if exchange.due == self.step]

    def missing(self) -> list[tuple[int, int]]:
        """(source, step) of messages that this step waits for and that are not there."""
        return [
            (src, exchange.step)
            for exchange in self.due()
            for src in exchange.receives
            if len(self.queues.get(src, ())) <= self._place(exchange, src)
        ]

    def taken(self, exchange: Exchange, src: int) -> Tensor:
        """Takes a message out of the queue of its source, in which they are in the order in which they began."""
        place = self._place(exchange, src)
        message = self.queues[src][place]
        del self.queues[src][place]
        return message

    def _place(self, exchange: Exchange, src: int) -> int:
        before = self.flying[: next(n for n, other in enumerate(self.flying) if other is exchange)]
        return sum(src in other.receives for other in before)


class Network:
    """A transport for all ranks of a plan. Several runs in a row (forward, backward) go on with one clock."""

    def __init__(
        self,
        seed: int,
        faults: Sequence[Fault] = (),
        *,
        plans: Sequence[str] | str = "0" * 16,
        dtype: str = "float32",
        checked: bool = True,
        slow: float = 1.0,
    ) -> None:
        self.random = random.Random(seed)  # nosec B311  # delays, not secrets
        self.seed, self.faults, self.checked, self.slow = seed, tuple(faults), checked, slow
        self.plans, self.dtype = plans, dtype.encode()[:8].ljust(8, b"\0")
        self.now, self.calls, self.num_events = 0.0, 0, 0
        self.ranks: list[Rank] = []
        self._numbers = count()

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Every rank's result, by rank; the error of the first rank that has one is raised. `ranks` tells of all."""
        self.calls += 1
        self.ranks = [Rank(number, program) for number, program in enumerate(programs)]
        self._heap: list[tuple[float, tuple[float, int], Callable[[Rank, Any], None], int, Any]] = []
        self._arrival: dict[tuple[int, int], float] = {}
        self._flying: dict[tuple[int, int], int] = {}
        self.graph = Graph(self.ranks, self._flying, self.direction)
        for rank in self.ranks:
            self._go_on(rank, None)
        while self._heap:
            self.now, _, event, number, data = heapq.heappop(self._heap)
            self.num_events += 1
            event(self.ranks[number], data)
        self._end()
        failed = [rank for rank in self.ranks if rank.error is not None]
        if failed:
            raise min(failed, key=lambda rank: (isinstance(rank.error, KilledError), rank.ended, rank.number)).error  # type: ignore[misc]
        return [rank.result for rank in self.ranks]

    @property
    def direction(self) -> str:
        """Runs alternate: forward, backward, forward, ..."""
        return "forward" if self.calls % 2 else "backward"

    def _faults(self, kind: str, rank: int, step: int | None = None) -> list[Fault]:
        return [f for f in self.faults if f.fits(kind, rank, step, self.direction)]

    # -- a rank goes on ---------------------------------------------------------------------------------------------

    def _go_on(self, rank: Rank, arrived: dict[int, Tensor] | None) -> None:
        """The rank takes what arrived, and starts the messages of its next step."""
        rank.state = State.RUNNING
        try:
            for fault in self._faults("raise", rank.number, rank.step + 1):
                rank.program.throw(fault.error())
            exchange = rank.program.send(arrived)
        except StopIteration as stop:
            rank.state, rank.result, rank.ended = State.DONE, stop.value, self.now
            return None
        except Exception as error:
            return self._fail(rank, error)
        assert exchange is not None, "a program starts one exchange at a time"
        rank.exchange, rank.order = exchange, []
        rank.flying += [exchange, *exchange.later]
        killed = self._faults("kill", rank.number, exchange.step)
        messages = [(each, *item) for each in (exchange, *exchange.later) for item in each.sends.items()]
        for each, dst, message in messages[: len(messages) // 2] if killed else messages:  # it dies while it sends
            self._send(rank, each, dst, message)
        rank.step = exchange.step
        if killed:
            rank.state, rank.since = State.DEAD, self.now
            rank.error, rank.ended = KilledError(f"rank {rank.number} was killed in step {exchange.step}"), self.now
            return None
        for fault in self._faults("stop", rank.number, exchange.step):
            rank.state, rank.since = State.STOPPED, self.now
            return self._at(self.now + fault.seconds, self._wake, rank.number)
        return self._at(self.now + self._drawn(1e-3), self._computed, rank.number)

    def _wake(self, rank: Rank, _: Any) -> None:
        rank.state = State.RUNNING
        self._computed(rank, None)

    def _computed(self, rank: Rank, _: Any) -> None:
        """The step's computes run, then the rank waits for its messages."""
        try:
            next(rank.program)  # which starts no other exchange
        except Exception as error:
            return self._fail(rank, error)
        rank.state, rank.since, rank.waits = State.WAITING, self.now, rank.waits + 1
        self._take(rank)
        if rank.state is State.WAITING:
            self._look(rank, rank.waits)
        return None

    def _take(self, rank: Rank) -> None:
        """Goes on if all messages of the step are there."""
        exchange = rank.exchange
        assert exchange is not None
        if rank.missing():
            return None
        first = [src for src in dict.fromkeys(rank.order) if src in exchange.receives]
        sources = first + [src for src in exchange.receives if src not in first]  # early ones of the step before
        try:
            arrived: dict[int, Tensor] = {}
            for each in rank.due():
                wanted = sources if each is exchange else each.receives
                arrived = {src: self._opened(each, src, rank) for src in wanted}
                rank.flying = [other for other in rank.flying if other is not each]
                for src, message in arrived.items() if each is not exchange else ():
                    each.into[src].copy_(message)
        except RankError as error:
            return self._fail(rank, error)
        return self._go_on(rank, arrived)  # of the last of them, which is this step's

    def _fail(self, rank: Rank, error: BaseException) -> None:
        rank.state, rank.error, rank.ended = State.FAILED, error, self.now
        for other in self.ranks:  # the news travels
            if other.ended is None:
                self._at(self.now + self._drawn(1e-3), self._look, other.number, other.waits)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _header(self, exchange: Exchange, src: int, dst: int, size: int, rank: int) -> Header:
        plan = self.plans if isinstance(self.plans, str) else self.plans[rank]
        way = 1 if self.direction == "forward" else 2
        call = self.calls + len(self._faults("skip", rank))  # one that skipped a call is in the next one
        pieces = agreement.checksum_pieces(exchange.pieces.get((src, dst), []))
        return Header(bytes.fromhex(plan[:16]), call, -1, way, exchange.step, src, dst, pieces, size, self.dtype)

    def _send(self, rank: Rank, exchange: Exchange, dst: int, message: Tensor) -> None:
        message = message.clone()
        if self.checked:
            message = agreement.add_header(
                self._header(exchange, rank.number, dst, message.numel(), rank.number), message
            )
        copies, delay = [message], self._drawn(1e-3)
        for fault in self.faults:
            if fault.dst == dst and fault.fits(fault.kind, rank.number, exchange.step, self.direction):
                copies, more = spoiled(fault, copies, self.random)
                delay += more
        for copy in copies:
            pair = rank.number, dst
            before = self._arrival.get(pair, 0.0)
            at = max(self.now + delay, math.nextafter(before, math.inf))  # a pair's messages stay in order
            self._arrival[pair] = at
            self._flying[pair] = self._flying.get(pair, 0) + 1
            self._at(at, self._deliver, dst, (rank.number, copy))

    def _deliver(self, rank: Rank, data: tuple[int, Tensor]) -> None:
        src, message = data
        self._flying[src, rank.number] -= 1
        rank.queues.setdefault(src, deque()).append(message)
        rank.order.append(src)
        if rank.state is State.WAITING:
            self._take(rank)

    def _opened(self, exchange: Exchange, src: int, rank: Rank) -> Tensor:
        """The next message of a source, in a buffer of the size that was expected: a short one leaves zeros."""
        found = rank.taken(exchange, src)
        size = exchange.receives[src] + (agreement.HEADER_SIZE if self.checked else 0)
        where = f"rank {rank.number}, {self.direction} step {exchange.step}: "
        if found.numel() > size:
            raise RankError(
                f"{where}a message of {found.numel()} bytes arrived from rank {src}, where {size} were expected. The"
                f" ranks run different plans or different steps."
            )
        buffer = torch.zeros(size, dtype=torch.uint8)
        buffer[: found.numel()] = found
        if not self.checked:
            return buffer
        try:
            return agreement.remove_header(
                self._header(exchange, src, rank.number, exchange.receives[src], rank.number), buffer
            )
        except RankError as error:
            raise RankError(f"{where}from rank {src}: {error}") from error

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _look(self, rank: Rank, wait: int) -> None:
        """A waiting rank asks whom everybody waits for, now and then."""
        if rank.state is not State.WAITING or rank.waits != wait:
            return None
        culprit = self.graph.culprit(rank.number)
        silent = culprit.state in (State.DEAD, State.STOPPED)
        certain = culprit.state in (State.FAILED, State.DONE, State.LOST)
        late = silent and self.now - culprit.since >= PATIENCE
        if certain or late or self.now - rank.since >= TIMEOUT:
            return self._fail(rank, WaitError(culprit, rank.number, self.now))
        later = culprit.since if silent else self.now
        return self._at(max(later + PATIENCE, self.now + 1e-3), self._look, rank.number, wait)

    def _end(self) -> None:
        """Nobody may be left waiting, and no message untaken: that would be met by a later call."""
        for rank in self.ranks:
            assert rank.ended is not None, f"seed {self.seed}: rank {rank.number} hangs in step {rank.step}"
            left = [src for src, queue in rank.queues.items() if queue]
            if left and rank.state is State.DONE:
                rank.error = RankError(
                    f"rank {rank.number}, {self.direction} step {rank.step}: a message from rank {left[0]} was never"
                    f" asked for. One of the two skipped a step or sent twice."
                )

    def _drawn(self, mean: float) -> float:
        """A delay: mostly near the mean, now and then a hundred times as long."""
        scale = mean * self.slow * (100.0 if self.random.random() < 0.02 else 1.0)
        return scale * self.random.random()

    def _at(self, time: float, event: Callable[[Rank, Any], None], rank: int, data: Any = None) -> None:
        tie = self.random.random(), next(self._numbers)  # what happens at one moment happens in any order
        heapq.heappush(self._heap, (time, tie, event, rank, data))
