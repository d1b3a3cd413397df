"""Other ranks, as they were last seen and heard, and what is found of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from longspan.execution.liveness.processes import TRACED, UNKNOWN, Process, Sight
from longspan.execution.liveness.records import Status


@dataclass(frozen=True)
class Verdict:
    """Why a wait cannot end well."""

    rank: int
    """Who is to blame; -1 if it is the store."""
    text: str


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
