"""The failure detector: decides whether a rank that others wait for is dead, stopped, elsewhere, or only slow.

It has no threads, clock or sockets. `turn` is a generator that yields requests to the store and is sent the answers;
`look` examines processes and the store's answers, with the time as an argument. `Watch` runs both in a real process,
`tests.simulation.detection` in a simulated one.

Time counts only while it is watched: at most `STRIDE` seconds between two looks. A rank that was stopped for a minute,
or whose clock jumped, has not seen the others silent for that long.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longspan.watch.processes import GONE, NOWHERE, STOPPED, TRACED, UNKNOWN, Process, Sight
from longspan.watch.records import TRAIL, Fault, Phase, Status, packed_process, parsed_life, parsed_process

# -- Other ranks as last seen, and whether they make the same calls ----------------------------------------------------


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


# -- The detector ------------------------------------------------------------------------------------------------------


BEAT = 0.25
"""Seconds between signs of life."""
LOOK = 0.1
"""Seconds between looks at others while waiting."""
STRIDE = 0.5
"""Seconds that one look counts for at most."""
LOOKS = 64
"""Ranks that are looked at in one go."""
LAGS = 4.0
"""Ranks that speak through the store may be late by this multiple of its own slowness."""
SLOW_SIGNS = 30.0
"""Seconds of silence that a rank on another host is granted while it has no watcher: a thread may lack the lock."""
DELIVERY = 1.0
"""Seconds within which the last message of an ended process arrives, and the store says why it has ended."""
LATE = 30.0
"""The same for one that had finished this very call when it ended: all it owed is on its way, if slowly on a crowded
machine."""
MADE = 4096
"""Calls that are remembered, to be compared with those of ranks that are behind."""
WARN = 10.0
"""Seconds after which a wait is worth a warning; the next come after twice as long each."""

Question = tuple[str, str, bytes]
"""What to do with the store: "get", "set" or "claim", a key, a value."""
Turn = Generator[Question, bytes | None, None]


class Detector:
    """What one rank knows of the others of its group, and of the store."""

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        me: Process,
        store: Process | None,
        look_at: Callable[[Process], Sight],
    ) -> None:
        self.rank, self.names, self.size = rank, tuple(names), len(names)
        self.me, self.store = me, store
        self.patience, self.status, self.num_beats = 2.0, Status(), 0
        self.must_beat = False
        """Whether others can tell only by its signs of life that this rank lives."""
        self.is_alone = True
        """Whether all ranks that were met so far are on this host."""
        self.peers: dict[int, Peer] = {}
        self.waiting: tuple[int, ...] = ()
        self.owed: dict[int, Status] = {}
        """Of a wait for works of a device: where this rank was when it began the last of them, by peer."""
        self.oldest = self.status
        """The same for the first of all."""
        self.made: dict[int, int] = {}
        """Which call each of the last ones was whose messages have no tags, by number."""
        self.flying: Callable[[], int] = lambda: 0
        """The oldest call that a device has not finished."""
        self.lost: str | None = None
        """Why the store cannot be asked any more."""
        self.strange: str | None = None
        """What was read in the store that no rank of this job can have written."""
        self.closes = False
        """Whether the store's host has ended in good order, and took the store with it."""
        self._look_at = look_at
        self.fault: Fault | None = None
        """What a rank has written down for all, for good."""
        self._refused: Fault | None = None
        """That a rank has refused this very call."""
        self._published: Status | None = None
        self._introduced = False
        self._asked: float | None = None
        self._lag = self._unanswered = self._store_stopped = 0.0
        self._began = self._looked = self._waited = self._current_for = 0.0
        self._timeout, self._warn = 0.0, WARN
        self._current, self._num_waits, self._turn = -1, -1, 0

    # -- The store -----------------------------------------------------------------------------------------------------

    def turn(self, now: Callable[[], float]) -> Turn:
        """One conversation with the store: what this rank says, and, while it waits, what the others said."""
        if not self._introduced:
            yield from self._introduces()
        status = replace(self.status, flying=self.flying())
        if self.must_beat or status != self._published:
            self.num_beats += 1
            self._published = status
            yield "set", f"status/{self.rank}", replace(self._published, beat=self.num_beats).packed()
        if self.is_alone and (yield "get", "several", b"") is not None:
            self.is_alone = False
        if not self.closes and (yield "get", "closes", b"") is not None:
            self.closes = True
        raw = None if self.fault is not None else (yield "get", "fault", b"")
        if raw is not None:
            self.fault = Fault.parsed(raw, self.size)
        waiting = self.waiting
        if waiting:
            yield from self._hear(waiting, now)
        elif self.made:
            raw = yield "get", f"status/{(self.rank + 1) % self.size}", b""
            self._peer((self.rank + 1) % self.size).status = None if raw is None else Status.parsed(raw)

    def _introduces(self) -> Turn:
        """Says which process this is. The first of the group says where; a rank that is elsewhere says that there are
        several hosts."""
        yield "set", f"process/{self.rank}", packed_process(self.me)
        first = yield "claim", "host", self.me.host
        if first != self.me.host or self.me.host == NOWHERE:
            self.is_alone = False
            yield "set", "several", b"1"
        self._introduced = True

    def _hear(self, waiting: tuple[int, ...], now: Callable[[], float]) -> Turn:
        raw = yield "get", f"refused/{(self.oldest if self.owed else self.status).call}", b""
        if raw is not None and self.waiting is waiting:
            self._refused = Fault.parsed(raw, self.size)
        for number in self._next_to_look_at(waiting):
            peer = self._peer(number)
            if peer.process is None:
                raw = yield "get", f"process/{number}", b""
                peer.process = None if raw is None else parsed_process(raw)
            before = peer.number, peer.status
            if peer.process is not None and not self._is_near(peer):
                raw = yield "get", f"life/{number}", b""
                if raw is not None:
                    peer.number, peer.sight = parsed_life(raw)
            asked = now()
            raw = yield "get", f"status/{number}", b""
            peer.status = None if raw is None else Status.parsed(raw)
            passed = min(max(asked - peer.heard, 0.0), STRIDE) * max(1.0, len(waiting) / LOOKS)
            peer.silent = peer.silent + passed if (peer.number, peer.status) == before else 0.0
            peer.heard = asked

    def asks(self, now: float) -> None:
        """A question goes out."""
        self._asked, self._unanswered = now, 0.0

    def answered(self, now: float) -> None:
        if self._asked is not None:
            self._lag = max(0.9 * self._lag, now - self._asked)
        self._asked = None

    # -- Waiting -------------------------------------------------------------------------------------------------------

    def remember(self, call: int, identity: int) -> None:
        """A call whose messages have no tags goes ahead."""
        self.made[call] = identity
        if len(self.made) > MADE:
            del self.made[next(iter(self.made))]

    def begin(self, now: float, peers: Sequence[int], timeout: float) -> None:
        """A wait for these ranks begins."""
        goes_on = 0 <= now - self._looked <= STRIDE  # a rank that was stopped in the last wait may be so still
        self._began = self._looked = now
        self._waited = self._current_for = self._unanswered = 0.0
        self._timeout, self._warn, self._num_waits = timeout, WARN, -1
        self._refused = None
        self.owed, self.waiting = {}, self._met_anew(dict.fromkeys(peers), goes_on)

    def begin_device(self, now: float, oldest: Status, owed: dict[int, Status], timeout: float) -> None:
        """A wait of a device for these ranks begins, or goes on with others beside them."""
        if not self.owed:
            self.begin(now, (), timeout)
        self.oldest, self.owed = oldest, owed
        self._met_anew([peer for peer in owed if peer not in self.waiting], False)
        self.waiting = tuple(owed)

    def _met_anew(self, peers: Iterable[int], goes_on: bool) -> tuple[int, ...]:
        """These ranks, none of them silent or gone so far."""
        for peer in map(self._peer, peers):
            peer.silent, peer.stopped = 0.0, peer.stopped if goes_on else 0.0
            peer.over_since, peer.began = -1.0, None
        return tuple(peers)

    def end(self) -> None:
        self.waiting, self.owed = (), {}

    def look(self, now: float, current: int, num_waits: int, *, broken: bool = False) -> Verdict | None:
        """Why this wait cannot end well, if it cannot. `current` is the rank whose message is waited for right now, the
        `num_waits`-th one, or this rank itself for anyone's; `broken` if that failed."""
        passed = min(max(now - self._looked, 0.0), STRIDE)
        self._looked = now
        self._waited += passed
        self._current_for = self._current_for + passed if (current, num_waits) == self._at else 0.0
        self._current, self._num_waits = current, num_waits
        fault = self.fault or self._refused
        if fault is not None:
            return Verdict(fault.rank, fault.text)
        if self.strange is not None:
            return Verdict(-1, self.strange)
        if self.lost is not None and not self.closes:
            return Verdict(-1, f"the job's store is gone ({self.lost}): its host{self._holder()} has ended.")
        verdict = self._store_trouble(passed)
        looked_at = self._next_to_look_at(self.waiting) if verdict is None else ()
        for number in looked_at:
            text = self._trouble(number, now, passed * len(self.waiting) / len(looked_at), broken)
            if text is not None:
                theirs = self._peer(number).status
                return Verdict(number, text, theirs is not None and first_apart(self.made, theirs) is not None)
        late = [n for n in self.waiting if not self._has_come(n)] if self._waited >= self._timeout else []
        if verdict is None and late:
            seen = "; ".join(f"{self.name(n)} was last seen {self.last(n)}" for n in late[:4])
            verdict = Verdict(late[0], f"no answer for {self._waited:.0f} s, though all are alive: {seen}")
        return verdict

    def _mine(self, number: int) -> Status:
        """Where this rank is, or was when it began what it waits for, of a peer."""
        return self.owed.get(number, self.status)

    def _has_come(self, number: int) -> bool:
        """Whether a device waits for a rank that has done its part; how long devices take is not for us to judge."""
        theirs = self._peer(number).status
        return bool(self.owed) and theirs is not None and theirs.has_left(self._mine(number).call)

    def unexplained(self, current: int, error: str) -> Verdict:
        """The verdict on a message that failed though everyone it may have been with is alive."""
        peers = self.waiting if current == self.rank else (current,)
        who = " or ".join(f"{self.name(n)}, last seen {self.last(n)}," for n in peers[:4])
        return Verdict(peers[0], f"messages with {who} failed: {error}")

    @property
    def _at(self) -> tuple[int, int]:
        return self._current, self._num_waits

    def _store_trouble(self, passed: float) -> Verdict | None:
        """Whether the store's host is gone or stopped; one that lives may be as slow as it likes."""
        if self.closes or self.lost is not None:
            return None
        if self.store is not None:
            state = self._look_at(self.store).state
            self._store_stopped = self._store_stopped + passed if state == STOPPED else 0.0
            if state == GONE:
                return Verdict(-1, f"the job's store is gone: its host{self._holder()} has ended.")
            if self._store_stopped >= self.patience:
                return Verdict(
                    -1,
                    f"the job's store does not answer: its host{self._holder()} has been stopped (SIGSTOP) for"
                    f" {self._store_stopped:.1f} s.",
                )
            return None
        self._unanswered = 0.0 if self._asked is None else self._unanswered + passed
        if self._unanswered >= self.patience + LAGS * self._lag:
            return Verdict(
                -1,
                f"the job's store has not answered for {self._unanswered:.1f} s: its host (the launcher, or global rank"
                f" 0) is dead or stopped.",
            )
        return None

    @property
    def _is_doubtful(self) -> bool:
        """Whether the store may be in trouble: a rank that has ended may have ended because of that."""
        if self.store is not None:
            return self._store_stopped > 0
        return self._unanswered > BEAT + LAGS * self._lag

    def _trouble(self, number: int, now: float, passed: float, broken: bool) -> str | None:
        """What is wrong with a rank that is waited for, if anything is."""
        peer = self._peer(number)
        if peer.process is None:
            return None  # it never got this far; the timeout ends that
        if self.owed and peer.status is not None and peer.status.has_finished(self._mine(number).call):
            return self._protocol(number, peer)  # it has delivered all: this rank's own device is slow
        near = self._is_near(peer)
        if near:
            peer.sight = self._look_at(peer.process)
        peer.began = peer.began or peer.sight
        peer.stopped = peer.stopped + passed if peer.sight.state == STOPPED else 0.0
        ended = peer.status is not None and peer.status.phase is Phase.ENDED
        if ended or peer.sight.state == GONE:
            # If it may be anyone's message, ranks that said goodbye are doubted after those that did not.
            sure = broken and not (ended and self._current == self.rank)
            if not self._is_needed(number, peer, now, passed, sure):
                return None
            cause = "has ended" if ended else f"is dead: its process (pid {peer.process.pid}) has ended"
            return f"{self.name(number)} {cause}; last seen {self.last(number)}."
        text = self._protocol(number, peer)
        if text is not None:
            return text
        if peer.stopped >= self.patience:
            stopped = f"has been stopped (SIGSTOP) for {peer.stopped:.1f} s"
            return f"{self.name(number)} {stopped}; last seen {self.last(number)}."
        granted = SLOW_SIGNS if peer.number < 0 else self.patience + LAGS * self._lag
        if not near and peer.silent >= granted:
            return (
                f"{self.name(number)} is lost: its host, or the network to it, is dead or stopped: no sign of life for"
                f" {peer.silent:.1f} s; last seen {self.last(number)}."
            )
        return None

    def _is_needed(self, number: int, peer: Peer, now: float, passed: float, broken: bool) -> bool:
        """Whether a rank that has ended still owes this one a message. It may have delivered all and rightly ended:
        which messages are done cannot be asked, only which one is waited for. So it is given time to arrive, and the
        store to say why the rank ended."""
        if self._current not in (number, self.rank):
            peer.over_since = -1.0
            return False
        peer.over = peer.over + passed if peer.over_since >= 0 else 0.0
        peer.over_since = now if peer.over_since < 0 else peer.over_since
        finished = peer.status is not None and peer.status.has_finished(self.status.call)
        granted = LATE if finished else DELIVERY
        return not self._is_doubtful and (peer.over >= granted or (broken and peer.heard > peer.over_since))

    def _protocol(self, number: int, peer: Peer) -> str | None:
        """What a rank says of itself that does not fit this wait, if anything."""
        theirs, mine, who = peer.status, self._mine(number), self.name(number)
        if theirs is None or peer.heard < self._began:
            return None
        if theirs.call == mine.call:
            return difference(mine, theirs, self.name(self.rank), who) or self._apart(number, theirs)
        if self.owed:  # hosts run ahead of their devices: how far says nothing
            return self._apart(number, theirs)
        then = theirs.was_in(mine.call)
        if then and then != mine.was_in(mine.call):
            return (
                f"{who} did something else in call {mine.call}: it is {theirs}, while {self.name(self.rank)} is {mine}."
            )
        # A rank whose trail shows this call has been in it, so its message is on the way, however late.
        ahead = theirs.call > mine.call and not then
        if ahead and self._current == number and self._current_for > 5 * self.patience:
            return f"{who} went on alone: it is {theirs}, while {self.name(self.rank)} is {mine}."
        return None

    def _apart(self, number: int, theirs: Status) -> str | None:
        """That a rank made another call than this one under some number, if it did."""
        call = first_apart(self.made, theirs)
        if call is None:
            return None
        return (
            f"{self.name(number)} did something else in call {call} (another plan, pass, name or training step): it is"
            f" {theirs}, while {self.name(self.rank)} is {self.status}."
        )

    def overheard(self) -> Verdict | None:
        """That ranks make different calls, if they do, though nobody waits: messages of a device have no tags, so those
        of different calls may have met. What else went wrong is no matter for a rank that needs nothing."""
        if self.fault is not None and self.fault.spoils:
            return Verdict(self.fault.rank, self.fault.text, True)
        number = (self.rank + 1) % self.size
        theirs = self._peer(number).status
        text = None if theirs is None else self._apart(number, theirs)
        return None if text is None else Verdict(number, text, True)

    # -- Messages ------------------------------------------------------------------------------------------------------

    def warning(self) -> str | None:
        """What to say about a wait that is long although nothing is wrong; after 10, 20, 40, ... seconds."""
        if self._waited < self._warn or not self.waiting:
            return None
        self._warn *= 2
        number = self._current if self._current in self.waiting else self.waiting[0]
        peer = self._peer(number)
        activity = "it has not come to this group yet" if peer.process is None else peer.activity(self._waited)
        slow = f" The job's store has not answered for {self._unanswered:.0f} s." if self._unanswered > 1 else ""
        return (
            f"{self.name(self.rank)} has waited {self._waited:.0f} s for {self.name(number)} {self._mine(number)}."
            f" {self.name(number)} is alive, last seen {self.last(number)}: {activity}.{slow} It is waited for until"
            f" {self._timeout:.0f} s have passed."
        )

    def name(self, rank: int) -> str:
        return f"rank {rank}" if self.names[rank] == rank else f"rank {rank} (global rank {self.names[rank]})"

    def last(self, number: int) -> str:
        status = self._peer(number).status
        return "in no call over this group" if status is None else str(status)

    def _holder(self) -> str:
        if self.store is None:
            return " (the launcher, or global rank 0)"
        ranks = [n for n, peer in self.peers.items() if peer.process == self.store]
        return f" ({self.name(ranks[0])}, pid {self.store.pid})" if ranks else f" (pid {self.store.pid})"

    def _is_near(self, peer: Peer) -> bool:
        return peer.process is not None and peer.process.host == self.me.host != NOWHERE

    def _peer(self, number: int) -> Peer:
        return self.peers.setdefault(number, Peer())

    def _next_to_look_at(self, waiting: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks to look at now: a few at a time, in turn."""
        if len(waiting) <= LOOKS:
            return waiting
        self._turn += LOOKS
        first = self._turn % len(waiting)
        return (waiting[first:] + waiting[:first])[:LOOKS]


def answered_by(turn: Turn, ask: Callable[[Question], Any]) -> None:
    """Runs a conversation to its end."""
    answer = None
    while True:
        try:
            question = turn.send(answer)
        except StopIteration:
            return
        answer = ask(question)
