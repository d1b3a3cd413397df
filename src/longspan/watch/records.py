"""Records of fixed layout that ranks publish in the job's store: where a rank is, and what went wrong.

Anyone on the network may write to the store, so a value that is not exactly a record is refused.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum

from longspan.errors import RankError
from longspan.watch.processes import LIFE, LIFE_MARK, Process, Sight

MAGIC = b"LSp3"
MAX_TEXT = 1000
"""Bytes of an error's text that travel."""
NAME = 32
"""Bytes of a call's name that travel."""
TRAIL = 8
"""Calls that a status tells of."""


class Phase(IntEnum):
    """What a rank is doing."""

    IDLE = 0
    AGREEING = 1
    RUNNING = 2
    WAITING = 3
    ENDED = 4


class Direction(IntEnum):
    """Which pass a call is."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2


@dataclass(frozen=True, slots=True)
class Status:
    """Where a rank is: its call, the step of it, and the training step if the user said so. `beat` shows life."""

    beat: int = 0
    call: int = 0
    direction: Direction = Direction.NONE
    step: int = 0
    num_steps: int = 0
    phase: Phase = Phase.IDLE
    compares: bool = False
    """Whether this call was new here, so that it had to be compared first."""
    training_step: int = -1
    plan: bytes = bytes(8)
    """The first bytes of the plan's fingerprint."""
    forward: int = 0
    """Of a backward pass: the call that was its forward."""
    name: bytes = bytes(NAME)
    """What the user calls the call."""
    trail: tuple[int, ...] = (0,) * TRAIL
    """Which call, plan, pass and forward each of the last calls was, this one last, as a number; 0: not known."""

    flying: int = 0
    """The oldest call whose messages a device has not sent and received yet; 0: none."""

    _form = struct.Struct(f"<4sQQBIIBBq8sQ{NAME}s{TRAIL}IQ")

    def packed(self) -> bytes:
        return self._form.pack(
            MAGIC, self.beat, self.call, self.direction, self.step, self.num_steps, self.phase, self.compares,
            self.training_step, self.plan, self.forward, self.name, *self.trail, self.flying,
        )  # fmt: skip

    @classmethod
    def parsed(cls, raw: bytes) -> Status:
        """The status in these bytes, which come from a store that strangers may write to.

        >>> Status.parsed(Status(call=3, direction=Direction.FORWARD).packed()).call
        3
        """
        if len(raw) != cls._form.size or raw[:4] != MAGIC:
            raise RankError(_strange("status", raw))
        _, beat, call, direction, step, num_steps, phase, compares, training_step, plan, *rest = cls._form.unpack(raw)
        if direction > Direction.BACKWARD or phase > Phase.ENDED or compares > 1:
            raise RankError(_strange("status", raw))
        way, phase, compares = Direction(direction), Phase(phase), bool(compares)
        forward, name, *trail, flying = rest
        trail = tuple(trail)
        return cls(beat, call, way, step, num_steps, phase, compares, training_step, plan, forward, name, trail, flying)

    def entered(self, call: int, identity: int, name: str) -> Status:
        """The same rank as it enters a call, under a name.

        >>> status = Status().entered(1, 7, "").entered(3, 9, "vision")
        >>> status.was_in(1), status.was_in(2), status.was_in(3), status.was_in(4)
        (7, 0, 9, 0)
        """
        skipped = (0,) * min(TRAIL, max(0, call - self.call - 1))  # calls that this rank refused
        trail = (*self.trail, *skipped, identity)[-TRAIL:]
        raw = name.encode()
        if len(raw) > NAME:  # as many letters as there is room for, and a checksum of all
            raw = raw[: NAME - 9] + f"~{zlib.crc32(raw):08x}".encode()
        return replace(self, call=call, trail=trail, name=raw.ljust(NAME, b"\0"))

    def was_in(self, call: int) -> int:
        """The identity of a call here; 0 if that is not known."""
        back = self.call - call
        return self.trail[-1 - back] if 0 <= back < TRAIL else 0

    def has_finished(self, call: int) -> bool:
        """Whether the rank has left a call behind, and its device too: all it had to send in it is sent.

        >>> Status(call=3, phase=Phase.ENDED).has_finished(3), Status(call=3, phase=Phase.WAITING).has_finished(3)
        (True, False)
        >>> Status(call=9, flying=4).has_finished(3), Status(call=9, flying=4).has_finished(4)
        (True, False)
        """
        return self.has_left(call) and not 0 < self.flying <= call

    def has_left(self, call: int) -> bool:
        """Whether the rank's host has left a call behind; its device may still be at it."""
        return self.call > call or (self.call == call and self.phase in (Phase.IDLE, Phase.ENDED))

    def __str__(self) -> str:
        """Where the rank is.

        >>> print(Status(call=3, direction=Direction.FORWARD, step=1, num_steps=4, phase=Phase.WAITING))
        in call 3 (forward, step 2 of 4, plan 000000000000)
        """
        training = "" if self.training_step < 0 else f", in training step {self.training_step}"
        if self.direction is Direction.NONE:
            return f"before its first call{training}"
        name = "".join(c if c.isprintable() else "?" for c in self.name.rstrip(b"\0").decode(errors="replace"))
        call = f"call {self.call}{f' {name!r}' if name else ''} ({self.direction.name.lower()}"
        call += f" of call {self.forward}" if self.forward else ""
        if 0 < self.flying < self.call:
            training = f", with messages since call {self.flying} under way{training}"
        if self.phase in (Phase.IDLE, Phase.ENDED):
            return f"after {call}){training}"
        plan = f"plan {self.plan.hex()[:12]}"
        place = (
            f"comparing {plan}" if self.phase is Phase.AGREEING else f"step {self.step + 1} of {self.num_steps}, {plan}"
        )
        return f"in {call}, {place}){training}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong, first told by one rank, then read by all."""

    rank: int
    """The rank that is to blame."""
    text: str
    spoils: bool = False
    """Whether it may have spoilt what ranks have computed that wait for nobody now."""

    _form = struct.Struct("<4sIHB")

    def packed(self) -> bytes:
        raw = self.text.encode()[:MAX_TEXT]
        return self._form.pack(MAGIC, self.rank, len(raw), self.spoils) + raw

    @classmethod
    def parsed(cls, raw: bytes, world_size: int) -> Fault:
        """The fault in these bytes.

        >>> Fault.parsed(Fault(2, "ValueError: no").packed(), 4)
        Fault(rank=2, text='ValueError: no', spoils=False)
        """
        size = cls._form.size
        if len(raw) < size or len(raw) > size + MAX_TEXT or raw[:4] != MAGIC:
            raise RankError(_strange("fault", raw))
        _, rank, length, spoils = cls._form.unpack(raw[:size])
        if length != len(raw) - size or rank >= world_size or spoils > 1:
            raise RankError(_strange("fault", raw))
        text = raw[size:].decode(errors="replace")
        return cls(rank, "".join(c if c.isprintable() or c == "\n" else "?" for c in text), bool(spoils))


_PROCESS = struct.Struct("<4s16sIQ")


def packed_process(process: Process) -> bytes:
    return _PROCESS.pack(MAGIC, *process)


def parsed_process(raw: bytes) -> Process:
    """The process in these bytes.

    >>> parsed_process(packed_process(Process(bytes(16), 7, 9))).pid
    7
    """
    if len(raw) != _PROCESS.size or raw[:4] != MAGIC:
        raise RankError(_strange("process", raw))
    _, host, pid, start = _PROCESS.unpack(raw)
    if not 0 < pid < 1 << 31:
        raise RankError(_strange("process", raw))
    return Process(host, pid, start)


def parsed_life(raw: bytes) -> tuple[int, Sight]:
    """How often a watcher has looked at its rank, and what it saw last."""
    if len(raw) != LIFE.size or raw[:4] != LIFE_MARK:
        raise RankError(_strange("sign of life", raw))
    _, number, state, seconds = LIFE.unpack(raw)
    if not state.isascii() or not state.decode().isprintable() or not 0 <= seconds < 1e12:
        raise RankError(_strange("sign of life", raw))
    return number, Sight(state.decode(), seconds)


def _strange(kind: str, raw: bytes) -> str:
    return (
        f"the job's store holds {len(raw)} bytes that are not a {kind} of Longspan under a key of its own. Another"
        f" version or another program writes there: run one version on all ranks, on a network of your own."
    )
