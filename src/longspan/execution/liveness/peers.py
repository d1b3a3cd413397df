"""Other ranks, as they were last seen and heard, and what is found of them: do they make the same calls?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from longspan.execution.liveness.processes import TRACED, UNKNOWN, Process, Sight
from longspan.execution.liveness.records import TRAIL, Phase, Status


@dataclass(frozen=True)
class Verdict:
    """Why a wait cannot end well."""

    rank: int
    """Who is to blame; -1 if it is the store."""
    text: str
    spoils: bool = False
    """Whether results of all ranks may be wrong by now."""


@dataclass
class Peer:
    """Another rank, as it was last seen and heard."""

    process: Process | None = None
    status: Status | None = None
    heard: float = -1.0
    """When the question was asked to which its status was the answer."""
    sight: Sight = field(default_factory=lambda: Sight(UNKNOWN))
    number: int = -1
    """How often its watcher has looked; -1 without one."""
    silent: float = 0.0
    """For how long the store has shown no sign of it, as often as it was asked."""
    stopped: float = 0.0
    over: float = 0.0
    """For how long it has been known to have ended while its message is waited for."""
    over_since: float = -1.0
    began: Sight | None = None
    """The first sight of it in this wait."""

    def activity(self, waited: float) -> str:
        """What its process did while it was waited for this number of seconds.

        >>> Peer(sight=Sight("S", 1.5), began=Sight("S", 1.5)).activity(20.0)
        'asleep, 0.0 s of processor time in 20.0 s'
        """
        used = self.sight.seconds - (self.began or self.sight).seconds
        if self.sight.state == UNKNOWN:
            return "what its process does cannot be seen from here"
        if self.sight.state == TRACED:
            return "held by a debugger"
        share = f"{used:.1f} s of processor time in {waited:.1f} s"
        if used > 0.1 * waited:
            return f"busy, {share}"
        return f"held up by other processes, {share}" if self.sight.state == "R" else f"asleep, {share}"


def difference(mine: Status, theirs: Status, me: str, who: str) -> str | None:
    """How a rank in the call of this number does something else than this rank, if it does."""
    # All ranks remember the same agreements, so a call is new to all of them or to none.
    if theirs.compares != mine.compares and (theirs.training_step, theirs.direction) == (
        mine.training_step,
        mine.direction,
    ):
        compares = who if theirs.compares else me
        return (
            f"{who} was asked for something else: it is {theirs}, while {me} is {mine}, and only {compares} was asked"
            f" for something new."
        )
    if theirs.phase is Phase.IDLE:
        return None
    both = theirs.phase is Phase.AGREEING and mine.phase is Phase.AGREEING  # they will see it for themselves
    for name in ("training_step", "direction") if both else ("training_step", "direction", "plan", "forward", "name"):
        if getattr(theirs, name) != getattr(mine, name):
            return f"{who} does something else: it is {theirs}, while {me} is {mine}."
    return None


def first_apart(made: Mapping[int, int], theirs: Status) -> int | None:
    """The first of the calls in a rank's trail that was another one here, where `made` has calls by number; None if
    there is none. Calls that only one of them knows of are not compared.

    >>> theirs = Status().entered(1, 70, "").entered(2, 80, "").entered(3, 90, "")
    >>> first_apart({1: 70, 2: 80}, theirs), first_apart({2: 81, 3: 91}, theirs), first_apart({4: 100}, theirs)
    (None, 2, None)
    """
    calls = range(max(1, theirs.call - TRAIL + 1), theirs.call + 1)
    return next((c for c in calls if 0 != theirs.was_in(c) != made.get(c, theirs.was_in(c))), None)
