"""The failure detector: decides whether a rank that others wait for is dead, stopped, in another call, or only slow.

It has no threads, clock or sockets. `exchange` is a generator that yields requests to the store and is sent the
answers; `check` inspects processes and those answers, with the time as an argument. `Watch` runs both in a real
process, `tests.simulation.detection` in a simulated one.

Time counts only while it is watched: at most `STRIDE` seconds between two checks. A rank that was stopped for a minute,
or whose clock jumped, has not seen the others silent for that long.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from longspan.errors import RankError
from longspan.watch.processes import (
    BEAT,
    GONE,
    HEARTBEAT,
    HEARTBEAT_MAGIC,
    STOPPED,
    TRACED,
    UNKNOWN,
    UNKNOWN_HOST,
    Process,
    ProcessState,
)

# -- Records in the job's store ----------------------------------------------------------------------------------------
# They have fixed layouts. Anyone on the network may write to the store, so a value that is no record is refused.


MAGIC = b"LSp3"
MAX_TEXT = 1000
"""Bytes of a verdict's text that are sent."""
NAME = 32
"""Bytes of a call's name that are sent."""
TRAIL = 8
"""Number of calls that a status lists."""
_PROCESS = struct.Struct("<4s16sIQ")


class Phase(IntEnum):
    """What a rank is doing."""

    IDLE = 0
    AGREEING = 1
    RUNNING = 2
    WAITING = 3
    ENDED = 4


class Direction(IntEnum):
    """The direction of a call."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2


@dataclass(slots=True)
class Status:
    """Where a rank is: its call, the step in it, and the training step if known.

    A call creates a new status; `step`, `phase` and `training_step` are then changed in place, and may be read by
    another thread at any time.
    """

    beat: int = 0
    """A count that grows while the rank is alive."""
    call: int = 0
    direction: Direction = Direction.NONE
    step: int = 0
    num_steps: int = 0
    phase: Phase = Phase.IDLE
    is_new: bool = False
    """Whether this call was new to the rank, so that the ranks compared it first."""
    training_step: int = -1
    plan: bytes = bytes(8)
    """The first bytes of the plan's fingerprint."""
    forward: int = 0
    """For a backward pass: the number of its forward call."""
    name: bytes = bytes(NAME)
    """The user's name for the call."""
    trail: tuple[int, ...] = (0,) * TRAIL
    """Identities (of plan, direction, name and forward) of the last calls, this one last; 0: unknown."""
    pending: int = 0
    """The oldest call whose messages a device has not finished; 0: none."""

    _form = struct.Struct(f"<4sQQBIIBBq8sQ{NAME}s{TRAIL}IQ")

    def pack(self) -> bytes:
        return self._form.pack(
            MAGIC, self.beat, self.call, self.direction, self.step, self.num_steps, self.phase, self.is_new,
            self.training_step, self.plan, self.forward, self.name, *self.trail, self.pending,
        )  # fmt: skip

    @classmethod
    def parse(cls, raw: bytes) -> Status:
        """Return the status in these bytes, or raise a `RankError` if they are no status.

        >>> Status.parse(Status(call=3, direction=Direction.FORWARD).pack()).call
        3
        """
        if len(raw) != cls._form.size or raw[:4] != MAGIC:
            raise _protocol_error("status", raw)
        _, beat, call, direction, step, num_steps, phase, is_new, *rest, pending = cls._form.unpack(raw)
        if direction > Direction.BACKWARD or phase > Phase.ENDED or is_new > 1:
            raise _protocol_error("status", raw)
        training_step, plan, forward, name, *trail = rest
        return cls(
            beat, call, Direction(direction), step, num_steps, Phase(phase), bool(is_new),
            training_step, plan, forward, name, tuple(trail), pending,
        )  # fmt: skip

    def enter(self, call: int, identity: int, name: str, **changes: object) -> Status:
        """Return the status of the same rank as it enters a call.

        >>> status = Status().enter(1, 7, "").enter(3, 9, "vision")
        >>> status.identity_of(1), status.identity_of(2), status.identity_of(3), status.identity_of(4)
        (7, 0, 9, 0)
        """
        skipped = (0,) * min(TRAIL, max(0, call - self.call - 1))  # calls that this rank refused
        trail = (*self.trail, *skipped, identity)[-TRAIL:]
        raw = name.encode()
        if len(raw) > NAME:  # as many letters as fit, and a checksum of all
            raw = raw[: NAME - 9] + f"~{zlib.crc32(raw):08x}".encode()
        return replace(self, call=call, trail=trail, name=raw.ljust(NAME, b"\0"), **changes)  # type: ignore[arg-type]

    def identity_of(self, call: int) -> int:
        """Return the identity of one of the last calls; 0 if it is unknown."""
        back = self.call - call
        return self.trail[-1 - back] if 0 <= back < TRAIL else 0

    def has_finished(self, call: int) -> bool:
        """Whether the rank's host and device have left a call, so that all its messages are sent.

        >>> Status(call=3, phase=Phase.ENDED).has_finished(3), Status(call=3, phase=Phase.WAITING).has_finished(3)
        (True, False)
        >>> Status(call=9, pending=4).has_finished(3), Status(call=9, pending=4).has_finished(4)
        (True, False)
        """
        return self.has_left(call) and not 0 < self.pending <= call

    def has_left(self, call: int) -> bool:
        """Whether the rank's host has left a call; its device may still be running it."""
        return self.call > call or (self.call == call and self.phase in (Phase.IDLE, Phase.ENDED))

    def __str__(self) -> str:
        """Describe where the rank is.

        >>> print(Status(call=3, direction=Direction.FORWARD, step=1, num_steps=4, phase=Phase.WAITING))
        in call 3 (forward, step 2 of 4, plan 000000000000)
        """
        training = "" if self.training_step < 0 else f", in training step {self.training_step}"
        if self.direction is Direction.NONE:
            return f"before its first call{training}"
        name = "".join(c if c.isprintable() else "?" for c in self.name.rstrip(b"\0").decode(errors="replace"))
        call = f"call {self.call}{f' {name!r}' if name else ''} ({self.direction.name.lower()}"
        call += f" of call {self.forward}" if self.forward else ""
        if 0 < self.pending < self.call:
            training = f", with messages since call {self.pending} under way{training}"
        if self.phase in (Phase.IDLE, Phase.ENDED):
            return f"after {call}){training}"
        plan = f"plan {self.plan.hex()[:12]}"
        if self.phase is Phase.AGREEING:
            return f"in {call}, comparing {plan}){training}"
        return f"in {call}, step {self.step + 1} of {self.num_steps}, {plan}){training}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a wait cannot succeed. The first rank that finds out writes it to the store, and all ranks read it there."""

    rank: int
    """The rank at fault; -1 for the store."""
    text: str
    spoils: bool = False
    """Whether results of all ranks may be wrong, also of those that wait for no message."""

    _form = struct.Struct("<4sIHB")

    def pack(self) -> bytes:
        raw = self.text.encode()[:MAX_TEXT]
        return self._form.pack(MAGIC, self.rank, len(raw), self.spoils) + raw

    @classmethod
    def parse(cls, raw: bytes, world_size: int) -> Verdict:
        """Return the verdict in these bytes, or raise a `RankError` if they are none.

        >>> Verdict.parse(Verdict(2, "ValueError: no").pack(), 4)
        Verdict(rank=2, text='ValueError: no', spoils=False)
        """
        size = cls._form.size
        if len(raw) < size or len(raw) > size + MAX_TEXT or raw[:4] != MAGIC:
            raise _protocol_error("fault", raw)
        _, rank, length, spoils = cls._form.unpack(raw[:size])
        if length != len(raw) - size or rank >= world_size or spoils > 1:
            raise _protocol_error("fault", raw)
        text = raw[size:].decode(errors="replace")
        return cls(rank, "".join(c if c.isprintable() or c == "\n" else "?" for c in text), bool(spoils))


def pack_process(process: Process) -> bytes:
    return _PROCESS.pack(MAGIC, *process)


def parse_process(raw: bytes) -> Process:
    """Return the process in these bytes, or raise a `RankError`.

    >>> parse_process(pack_process(Process(bytes(16), 7, 9))).pid
    7
    """
    if len(raw) != _PROCESS.size or raw[:4] != MAGIC:
        raise _protocol_error("process", raw)
    _, host, pid, start = _PROCESS.unpack(raw)
    if not 0 < pid < 1 << 31:
        raise _protocol_error("process", raw)
    return Process(host, pid, start)


def parse_heartbeat(raw: bytes) -> tuple[int, ProcessState]:
    """Return the count of a watcher's heartbeat and the state of its rank's process, or raise a `RankError`."""
    if len(raw) != HEARTBEAT.size or raw[:4] != HEARTBEAT_MAGIC:
        raise _protocol_error("heartbeat", raw)
    _, count, state, seconds = HEARTBEAT.unpack(raw)
    if not state.isascii() or not state.decode().isprintable() or not 0 <= seconds < 1e12:
        raise _protocol_error("heartbeat", raw)
    return count, ProcessState(state.decode(), seconds)


def _protocol_error(kind: str, raw: bytes) -> RankError:
    return RankError(
        f"the job's store holds {len(raw)} bytes that are not a {kind} of Longspan under a key of its own. Another"
        f" version or another program writes there: run one version on all ranks, on a network of your own."
    )


# -- Other ranks, and whether they make the same calls -----------------------------------------------------------------


UNSEEN = ProcessState(UNKNOWN)


@dataclass(slots=True)
class Peer:
    """Another rank, as last observed."""

    process: Process | None = None
    status: Status | None = None
    queried: float = -1.0
    """When the query was sent whose answer was `status`."""
    sample: ProcessState = UNSEEN
    first_sample: ProcessState | None = None
    """The first sample in this wait."""
    heartbeat: int = -1
    """The count of its watcher's last heartbeat; -1 without a watcher."""
    silent: float = 0.0
    """Seconds in which queries to the store showed no change."""
    stopped: float = 0.0
    ended: float = 0.0
    """Seconds for which it is known to have ended while its message is waited for."""
    ended_since: float = -1.0

    def describe_activity(self, waited: float) -> str:
        """Describe what its process did during a wait of this many seconds.

        >>> Peer(sample=ProcessState("S", 1.5), first_sample=ProcessState("S", 1.5)).describe_activity(20.0)
        'asleep, 0.0 s of processor time in 20.0 s'
        """
        if self.sample.state == UNKNOWN:
            return "its process cannot be inspected from here"
        if self.sample.state == TRACED:
            return "held by a debugger"
        used = self.sample.seconds - (self.first_sample or self.sample).seconds
        share = f"{used:.1f} s of processor time in {waited:.1f} s"
        if used > 0.1 * waited:
            return f"busy, {share}"
        return f"held up by other processes, {share}" if self.sample.state == "R" else f"asleep, {share}"


def describe_difference(mine: Status, theirs: Status, me: str, who: str) -> str | None:
    """Describe how a rank in the call of this number does something else than this rank; None if it does not."""
    # All ranks remember the same agreements, so a call is new to all of them or to none.
    if theirs.is_new != mine.is_new and (theirs.training_step, theirs.direction) == (
        mine.training_step,
        mine.direction,
    ):
        return (
            f"{who} does something else: it is {theirs}, while {me} is {mine}, and the call is new to"
            f" {who if theirs.is_new else me} only."
        )
    if theirs.phase is Phase.IDLE:
        return None
    # While both compare the call, they will find other differences themselves.
    names = ("training_step", "direction")
    if theirs.phase is not Phase.AGREEING or mine.phase is not Phase.AGREEING:
        names += ("plan", "forward", "name")
    if any(getattr(theirs, name) != getattr(mine, name) for name in names):
        return f"{who} does something else: it is {theirs}, while {me} is {mine}."
    return None


def first_difference(calls: Mapping[int, int], theirs: Status) -> int | None:
    """Return the first call in a rank's trail whose identity differs from this rank's, in `calls` by number; None if
    there is none. Calls that only one of the two remembers are not compared.

    >>> theirs = Status().enter(1, 70, "").enter(2, 80, "").enter(3, 90, "")
    >>> first_difference({1: 70, 2: 80}, theirs), first_difference({2: 81, 3: 91}, theirs)
    (None, 2)
    """
    for call in range(max(1, theirs.call - TRAIL + 1), theirs.call + 1):
        identity = theirs.identity_of(call)
        if identity != 0 and identity != calls.get(call, identity):
            return call
    return None


# -- The detector ------------------------------------------------------------------------------------------------------


LOOK = 0.1
"""Seconds between checks of others while waiting."""
STRIDE = 0.5
"""Seconds that one check counts for at most."""
LOOKS = 64
"""Ranks that are checked at a time."""
LAGS = 4.0
"""Ranks observed through the store may be late by this multiple of the store's own latency."""
SLOW_SIGNS = 30.0
"""Seconds of silence allowed to a rank on another host without a watcher: it may hold the interpreter's lock."""
DELIVERY = 1.0
"""Seconds within which the last message of an ended process arrives, and the reason of its end is in the store."""
LATE = 30.0
"""The same for a process that had finished this very call: its messages are sent, but may be slow on a busy machine."""
MAX_CALLS = 4096
"""Number of calls that are remembered, to be compared with those of ranks that are behind."""
WARN = 10.0
"""Seconds after which a wait causes a warning; the next ones come after twice as long each."""

Request = tuple[str, str, bytes]
"""A request to the store: "get", "set" or "claim", a key, a value."""
Exchange = Generator[Request, bytes | None, None]


@dataclass(slots=True)
class Wait:
    """A wait for messages of some ranks, and for how long it was watched."""

    began: float
    peers: tuple[int, ...]
    timeout: float
    pending: dict[int, Status] = field(default_factory=dict)
    """For works of a device: the status of this rank when it started the last of them, by peer."""
    oldest: Status | None = None
    """The same for the first of all."""
    seconds: float = 0.0
    current: tuple[int, int] = (-1, -1)
    """The rank whose message is waited for, and the number of that message."""
    current_seconds: float = 0.0
    warn_at: float = WARN
    refusal: Verdict | None = None
    """That a rank has refused this very call."""


class Detector:
    """What one rank knows about the other ranks of its group, and about the store."""

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        me: Process,
        store: Process | None,
        inspect: Callable[[Process], ProcessState],
    ) -> None:
        """`names` are global ranks; `store` is the process that holds the store, if it is on this host."""
        self.rank, self.names, self.me, self.store = rank, tuple(names), me, store
        self.peers = [Peer() for _ in names]
        self.patience, self.status, self.beat = 2.0, Status(), 0
        self.must_beat = False
        """Whether only this rank's own heartbeats, without a watcher, show that it is alive."""
        self.is_single_host = True
        """Whether all ranks observed so far are on this host."""
        self.wait: Wait | None = None
        self.calls: dict[int, int] = {}
        """Identities, by number, of the last calls whose messages have no tags."""
        self.lost: str | None = None
        """Why the store cannot be reached any more."""
        self.closes = False
        """Whether the store's host has exited normally, and the store with it."""
        self.fault: Verdict | None = None
        """The verdict in the store."""
        self._inspect = inspect
        self._published: Status | None = None
        self._request_sent: float | None = None
        self._lag = self._unanswered = self._store_stopped = self._checked = 0.0
        self._offset = 0

    # -- The store -----------------------------------------------------------------------------------------------------

    def exchange(self, now: Callable[[], float], pending: int = 0) -> Exchange:
        """Publish this rank's status and read the store; while this rank waits, read what others published."""
        if self._published is None:
            # The first rank of the group sets the host; a rank on another host sets that there are several.
            yield "set", f"process/{self.rank}", pack_process(self.me)
            host = yield "claim", "host", self.me.host
            if host != self.me.host or self.me.host == UNKNOWN_HOST:
                self.is_single_host = False
                yield "set", "several", b"1"
        status = replace(self.status, pending=pending)
        if self.must_beat or status != self._published:
            self.beat += 1
            self._published = status
            yield "set", f"status/{self.rank}", replace(status, beat=self.beat).pack()
        if self.is_single_host and (yield "get", "several", b"") is not None:
            self.is_single_host = False
        if not self.closes and (yield "get", "closes", b"") is not None:
            self.closes = True
        raw = None if self.fault is not None else (yield "get", "fault", b"")
        if raw is not None:
            self.fault = Verdict.parse(raw, len(self.names))
        wait = self.wait
        if wait is not None:
            yield from self._query_peers(wait, now)
        elif self.calls:
            number = (self.rank + 1) % len(self.names)
            raw = yield "get", f"status/{number}", b""
            self.peers[number].status = None if raw is None else Status.parse(raw)

    def _query_peers(self, wait: Wait, now: Callable[[], float]) -> Exchange:
        peers = wait.peers
        raw = yield "get", f"refused/{(wait.oldest or self.status).call}", b""
        if raw is not None and wait.peers is peers:
            wait.refusal = Verdict.parse(raw, len(self.names))
        for number in self._next_peers(peers):
            peer = self.peers[number]
            if peer.process is None:
                raw = yield "get", f"process/{number}", b""
                peer.process = None if raw is None else parse_process(raw)
            before = peer.heartbeat, peer.status
            if peer.process is not None and not self._is_local(peer):
                raw = yield "get", f"heartbeat/{number}", b""
                if raw is not None:
                    peer.heartbeat, peer.sample = parse_heartbeat(raw)
            queried = now()
            raw = yield "get", f"status/{number}", b""
            peer.status = None if raw is None else Status.parse(raw)
            elapsed = min(max(queried - peer.queried, 0.0), STRIDE) * max(1.0, len(peers) / LOOKS)
            peer.silent = peer.silent + elapsed if (peer.heartbeat, peer.status) == before else 0.0
            peer.queried = queried

    def mark_request_sent(self, now: float) -> None:
        self._request_sent, self._unanswered = now, 0.0

    def mark_answered(self, now: float) -> None:
        if self._request_sent is not None:
            self._lag = max(0.9 * self._lag, now - self._request_sent)
        self._request_sent = None

    # -- Waiting -------------------------------------------------------------------------------------------------------

    def remember(self, call: int, identity: int) -> None:
        """Remember a call whose messages have no tags."""
        self.calls[call] = identity
        if len(self.calls) > MAX_CALLS:
            del self.calls[next(iter(self.calls))]

    def begin_wait(self, now: float, peers: Iterable[int], timeout: float) -> None:
        """Begin a wait for these ranks."""
        is_continued = 0 <= now - self._checked <= STRIDE  # a rank that was stopped in the last wait may still be
        self._checked, self._unanswered = now, 0.0
        self.wait = Wait(now, tuple(dict.fromkeys(peers)), timeout)
        self._reset_peers(self.wait.peers, is_continued)

    def begin_device_wait(self, now: float, oldest: Status, pending: dict[int, Status], timeout: float) -> None:
        """Begin, or continue with other ranks, a wait of a device for these ranks."""
        if self.wait is None or not self.wait.pending:
            self.begin_wait(now, (), timeout)
        wait = self.wait
        assert wait is not None
        self._reset_peers([peer for peer in pending if peer not in wait.peers], False)
        wait.oldest, wait.pending, wait.peers = oldest, pending, tuple(pending)

    def _reset_peers(self, peers: Iterable[int], is_continued: bool) -> None:
        for number in peers:
            peer = self.peers[number]
            peer.silent, peer.ended_since, peer.first_sample = 0.0, -1.0, None
            if not is_continued:
                peer.stopped = 0.0

    def check(self, now: float, current: int, num_waits: int, *, broken: bool = False) -> Verdict | None:
        """Return why this wait cannot succeed, or None.

        `current` is the rank whose message is waited for, the `num_waits`-th one, or this rank itself if it may be any
        rank's; `broken` tells that the message failed.
        """
        wait = self.wait
        assert wait is not None
        elapsed = min(max(now - self._checked, 0.0), STRIDE)
        self._checked = now
        wait.seconds += elapsed
        wait.current_seconds = wait.current_seconds + elapsed if (current, num_waits) == wait.current else 0.0
        wait.current = current, num_waits
        known = self.fault or wait.refusal
        if known is not None:
            return known
        if self.lost is not None and not self.closes:
            return Verdict(-1, f"the job's store is gone ({self.lost}): its host{self._store_holder()} has ended.")
        verdict = self._check_store(elapsed)
        if verdict is not None:
            return verdict
        checked = self._next_peers(wait.peers)
        for number in checked:
            text = self._check_peer(wait, number, now, elapsed * len(wait.peers) / len(checked), broken)
            if text is not None:
                theirs = self.peers[number].status
                return Verdict(number, text, theirs is not None and first_difference(self.calls, theirs) is not None)
        late = [n for n in wait.peers if not self._has_arrived(wait, n)] if wait.seconds >= wait.timeout else []
        if not late:
            return None
        places = "; ".join(f"{self.name(n)} was last seen {self._last_place(n)}" for n in late[:4])
        return Verdict(late[0], f"no answer for {wait.seconds:.0f} s, though all are alive: {places}")

    def explain_failure(self, current: int, error: str) -> Verdict:
        """Return the verdict on a message that failed though all ranks it may have been with are alive."""
        assert self.wait is not None
        peers = self.wait.peers if current == self.rank else (current,)
        who = " or ".join(f"{self.name(n)}, last seen {self._last_place(n)}," for n in peers[:4])
        return Verdict(peers[0], f"messages with {who} failed: {error}")

    def _has_arrived(self, wait: Wait, number: int) -> bool:
        """Whether a device waits for a rank whose host has left the call: a device may take any time."""
        theirs = self.peers[number].status
        return bool(wait.pending) and theirs is not None and theirs.has_left(self._own_status(number).call)

    def _own_status(self, number: int) -> Status:
        """Return this rank's status, or for works of a device with a peer, its status when it started them."""
        return self.status if self.wait is None else self.wait.pending.get(number, self.status)

    def _check_store(self, elapsed: float) -> Verdict | None:
        """Return that the store's host has ended or is stopped; one that is alive may take any time."""
        if self.closes or self.lost is not None:
            return None
        if self.store is not None:
            state = self._inspect(self.store).state
            self._store_stopped = self._store_stopped + elapsed if state == STOPPED else 0.0
            if state == GONE:
                return Verdict(-1, f"the job's store is gone: its host{self._store_holder()} has ended.")
            if self._store_stopped >= self.patience:
                return Verdict(
                    -1,
                    f"the job's store does not answer: its host{self._store_holder()} has been stopped (SIGSTOP) for"
                    f" {self._store_stopped:.1f} s.",
                )
            return None
        self._unanswered = 0.0 if self._request_sent is None else self._unanswered + elapsed
        if self._unanswered >= self.patience + LAGS * self._lag:
            return Verdict(
                -1,
                f"the job's store has not answered for {self._unanswered:.1f} s: its host (the launcher, or global rank"
                f" 0) is dead or stopped.",
            )
        return None

    def _check_peer(self, wait: Wait, number: int, now: float, elapsed: float, broken: bool) -> str | None:
        """Return what is wrong with a rank that is waited for, or None."""
        peer, name = self.peers[number], self.name(number)
        if peer.process is None:
            return None  # it has never entered this group; the timeout ends that
        if wait.pending and peer.status is not None and peer.status.has_finished(self._own_status(number).call):
            return self._check_calls(wait, number)  # it has sent everything: this rank's own device is slow
        is_local = self._is_local(peer)
        if is_local:
            peer.sample = self._inspect(peer.process)
        peer.first_sample = peer.first_sample or peer.sample
        peer.stopped = peer.stopped + elapsed if peer.sample.state == STOPPED else 0.0
        has_exited = peer.status is not None and peer.status.phase is Phase.ENDED
        if has_exited or peer.sample.state == GONE:
            # If it may be any rank's message, ranks that ended normally are blamed after those that did not.
            is_certain = broken and not (has_exited and wait.current[0] == self.rank)
            if not self._is_needed(wait, number, now, elapsed, is_certain):
                return None
            cause = "has ended" if has_exited else f"is dead: its process (pid {peer.process.pid}) has ended"
            return f"{name} {cause}; last seen {self._last_place(number)}."
        text = self._check_calls(wait, number)
        if text is not None:
            return text
        if peer.stopped >= self.patience:
            return f"{name} has been stopped (SIGSTOP) for {peer.stopped:.1f} s; last seen {self._last_place(number)}."
        allowed = SLOW_SIGNS if peer.heartbeat < 0 else self.patience + LAGS * self._lag
        if not is_local and peer.silent >= allowed:
            return (
                f"{name} is lost: its host, or the network to it, is dead or stopped: no heartbeat for"
                f" {peer.silent:.1f} s; last seen {self._last_place(number)}."
            )
        return None

    def _is_needed(self, wait: Wait, number: int, now: float, elapsed: float, broken: bool) -> bool:
        """Whether a rank that has ended still owes this one a message.

        It may have sent everything and exited normally: which messages are done is unknown, only which one is waited
        for. So its message has time to arrive, and the store to tell why the rank ended.
        """
        peer = self.peers[number]
        if wait.current[0] not in (number, self.rank):
            peer.ended_since = -1.0
            return False
        peer.ended = peer.ended + elapsed if peer.ended_since >= 0 else 0.0
        peer.ended_since = now if peer.ended_since < 0 else peer.ended_since
        # The rank may have ended because the store is in trouble.
        if self.store is not None:
            is_store_healthy = self._store_stopped <= 0
        else:
            is_store_healthy = self._unanswered <= BEAT + LAGS * self._lag
        has_finished = peer.status is not None and peer.status.has_finished(self.status.call)
        is_overdue = peer.ended >= (LATE if has_finished else DELIVERY)
        return is_store_healthy and (is_overdue or (broken and peer.queried > peer.ended_since))

    def _check_calls(self, wait: Wait, number: int) -> str | None:
        """Return how the calls of a rank differ from this rank's, or None."""
        peer, who, me = self.peers[number], self.name(number), self.name(self.rank)
        theirs, mine = peer.status, self._own_status(number)
        if theirs is None or peer.queried < wait.began:
            return None
        if theirs.call == mine.call:
            return describe_difference(mine, theirs, me, who) or self._describe_divergence(number, theirs)
        if wait.pending:  # hosts run ahead of their devices by any number of calls
            return self._describe_divergence(number, theirs)
        identity = theirs.identity_of(mine.call)
        if identity and identity != mine.identity_of(mine.call):
            return f"{who} did something else in call {mine.call}: it is {theirs}, while {me} is {mine}."
        # A rank whose trail contains this call has been in it, so its message will arrive, however late.
        is_ahead = theirs.call > mine.call and not identity
        if is_ahead and wait.current[0] == number and wait.current_seconds > 5 * self.patience:
            return f"{who} continued without this rank: it is {theirs}, while {me} is {mine}."
        return None

    def _describe_divergence(self, number: int, theirs: Status) -> str | None:
        """Describe the first call whose identity differs between a rank and this one; None if there is none."""
        call = first_difference(self.calls, theirs)
        if call is None:
            return None
        return (
            f"{self.name(number)} did something else in call {call} (another plan, pass, name or training step): it is"
            f" {theirs}, while {self.name(self.rank)} is {self.status}."
        )

    def detect_divergence(self) -> Verdict | None:
        """Return that ranks make different calls, though none waits: messages of a device have no tags, so those of
        different calls may have been matched. Other faults do not affect a rank that waits for nothing."""
        if self.fault is not None and self.fault.spoils:
            return self.fault
        number = (self.rank + 1) % len(self.names)
        theirs = self.peers[number].status
        text = None if theirs is None else self._describe_divergence(number, theirs)
        return None if text is None else Verdict(number, text, True)

    # -- Messages ------------------------------------------------------------------------------------------------------

    def warning(self) -> str | None:
        """Return a warning about a wait that is long although nothing is wrong; after 10, 20, 40, ... seconds."""
        wait = self.wait
        if wait is None or wait.seconds < wait.warn_at or not wait.peers:
            return None
        wait.warn_at *= 2
        number = wait.current[0] if wait.current[0] in wait.peers else wait.peers[0]
        peer, name = self.peers[number], self.name(number)
        activity = "it has not entered this group yet" if peer.process is None else peer.describe_activity(wait.seconds)
        store = f" The job's store has not answered for {self._unanswered:.0f} s." if self._unanswered > 1 else ""
        return (
            f"{self.name(self.rank)} has waited {wait.seconds:.0f} s for {name} {self._own_status(number)}. {name} is"
            f" alive, last seen {self._last_place(number)}: {activity}.{store} The timeout is {wait.timeout:.0f} s."
        )

    def name(self, rank: int) -> str:
        return f"rank {rank}" if self.names[rank] == rank else f"rank {rank} (global rank {self.names[rank]})"

    def _last_place(self, number: int) -> str:
        status = self.peers[number].status
        return "in no call over this group" if status is None else str(status)

    def _store_holder(self) -> str:
        if self.store is None:
            return " (the launcher, or global rank 0)"
        ranks = [n for n, peer in enumerate(self.peers) if peer.process == self.store]
        return f" ({self.name(ranks[0])}, pid {self.store.pid})" if ranks else f" (pid {self.store.pid})"

    def _is_local(self, peer: Peer) -> bool:
        return peer.process is not None and peer.process.host == self.me.host != UNKNOWN_HOST

    def _next_peers(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks to check now: a few at a time, in turn."""
        if len(peers) <= LOOKS:
            return peers
        self._offset += LOOKS
        first = self._offset % len(peers)
        return (peers[first:] + peers[:first])[:LOOKS]
