"""Who waits for whom, and who is the one that everybody, in the end, waits for.

The virtual network sees all ranks at once, so it can say this without finding out: it is about the runner and its
messages. How real ranks find out, each by itself, is the detector's work, which `detection.py` simulates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from longspan.errors import RankError

if TYPE_CHECKING:
    from tests.simulation.network import Rank


class State(Enum):
    """What a rank is doing. In the order in which it is blamed, the worst last."""

    WAITING = 0
    RUNNING = 1
    DONE = 2
    LOST = 3
    STOPPED = 4
    DEAD = 5
    FAILED = 6


@dataclass(frozen=True)
class Culprit:
    """The rank at the end of a chain of waits, and what is the matter with it."""

    rank: int
    state: State
    step: int
    since: float
    needed: int
    """The step whose message is missing."""
    to: int
    """The rank that misses it."""
    direction: str
    why: BaseException | None = None

    def text(self, waiting: int, now: float) -> str:
        """What a rank says that gives up."""
        seen = f"last seen in {self.direction} step {self.step}"
        missing = (
            f"its message of {self.direction} step {self.needed} to rank {self.to} never arrived: it was lost, or the"
            f" ranks' plans differ"
        )
        what = {
            State.WAITING: f"waits in a circle, {seen}: the ranks' plans differ",
            State.RUNNING: f"is alive but did not come, {seen}",
            State.DONE: f"has finished, but {missing}",
            State.LOST: f"has gone on, but {missing}; {seen}",
            State.STOPPED: f"is dead or stopped: no sign of life for {now - self.since:.1f} s, {seen}",
            State.DEAD: f"is dead or stopped: no sign of life for {now - self.since:.1f} s, {seen}",
            State.FAILED: f"failed in {self.direction} step {self.step}: {type(self.why).__name__}: {self.why}",
        }[self.state]
        return f"rank {self.rank} {what} (rank {waiting} waited for it). End the job; it can be started again."


class WaitError(RankError):
    """A rank gave up waiting; it knows whose fault that is."""

    def __init__(self, culprit: Culprit, waiting: int, now: float) -> None:
        super().__init__(culprit.text(waiting, now))
        self.culprit = culprit


class Graph:
    """The waits of all ranks at one moment."""

    def __init__(self, ranks: Sequence[Rank], flying: Mapping[tuple[int, int], int], direction: str) -> None:
        self.ranks, self.flying, self.direction = ranks, flying, direction

    def culprit(self, number: int) -> Culprit:
        """The worst of those at the ends of the chains of waits that begin here."""
        seen, todo, found = {number}, [number], list[Culprit]()
        while todo:
            rank = self.ranks[todo.pop()]
            for src, step in rank.missing():
                other = self.ranks[src]
                if self.flying.get((src, rank.number)):
                    found.append(self._culprit(src, State.RUNNING, step, rank.number))
                elif other.state in (State.RUNNING, State.WAITING) and other.step >= step:
                    found.append(self._culprit(src, State.LOST, step, rank.number))
                elif other.state is not State.WAITING:
                    found.append(self._culprit(src, other.state, step, rank.number))
                elif src not in seen:
                    seen.add(src)
                    todo.append(src)
        if not found:
            return self._culprit(number, State.WAITING, self.ranks[number].step, number)
        return self._first_cause(max(found, key=lambda culprit: (culprit.state.value, -culprit.rank)))

    def _culprit(self, number: int, state: State, needed: int, to: int) -> Culprit:
        rank = self.ranks[number]
        return Culprit(number, state, rank.step, rank.since, needed, to, self.direction, rank.error)

    def _first_cause(self, culprit: Culprit) -> Culprit:
        """A rank that failed because of another passes the blame on, as it has it."""
        return culprit.why.culprit if isinstance(culprit.why, WaitError) else culprit
