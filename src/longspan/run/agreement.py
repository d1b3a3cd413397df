"""Agreement between ranks: records that are compared before data moves, and headers of messages in checked mode.

A record is a row of strings of fixed width that must be equal on every rank. It is compared once per new call. Every
rank sees all rows, so every rank refuses, and names the same fields.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from longspan.errors import AgreementError, RankError
from longspan.planning.steps import Moved
from longspan.watch.store_client import LostError, Store

# -- Message headers in checked mode -----------------------------------------------------------------------------------
# Every message states what it is, and a receiver refuses what it did not expect. Point-to-point messages are matched by
# order and size only; without a header, a swapped, short, stale or damaged message would go unnoticed.


MAGIC = b"LSh2"
_FORM = struct.Struct("<4s8sIqBIHHIQ8sIHI")
HEADER_SIZE = 64
"""Bytes in front of a message, a multiple of every item size."""
assert _FORM.size <= HEADER_SIZE


@dataclass(frozen=True, slots=True)
class Header:
    """What a message is."""

    plan: bytes
    """The first 8 bytes of the plan's fingerprint."""
    call: int
    training_step: int
    direction: int
    step: int
    src: int
    dst: int
    pieces: int
    """A checksum of the pieces' names, in their order."""
    num_bytes: int
    dtype: bytes
    """The tensors' dtype, 8 letters of it."""
    forward: int = 0
    """Of a backward pass: the number of its forward."""
    name: int = 0
    """A checksum of the call's name."""
    checksum: int = 0
    """Of the message itself."""

    def __str__(self) -> str:
        way = {1: "forward", 2: "backward"}.get(self.direction, "?")
        way += f" of call {self.forward}" if self.forward else ""
        return (
            f"call {self.call} {way} step {self.step + 1}, rank {self.src} to {self.dst}, {self.num_bytes} bytes of"
            f" {self.dtype.rstrip(bytes(1)).decode(errors='replace')}, plan {self.plan.hex()[:12]}"
        )


def name_of(transfers: Sequence[Moved]) -> int:
    """A checksum of what these pieces are, equal on both ends."""
    return zlib.crc32(" ".join(repr(t.piece) for t in transfers).encode())


def sealed(header: Header, message: Tensor) -> Tensor:
    """The message with its header in front."""
    whole = torch.empty(HEADER_SIZE + message.numel(), dtype=torch.uint8, device=message.device)
    values = [getattr(header, f.name) for f in fields(Header)][:-1]
    raw = _FORM.pack(MAGIC, *values, _checksum(message)).ljust(HEADER_SIZE, b"\0")
    whole[:HEADER_SIZE] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    whole[HEADER_SIZE:] = message
    return whole


def opened(expected: Header, whole: Tensor) -> Tensor:
    """The message without its header, which must be what was expected."""
    raw = whole[:HEADER_SIZE].cpu().numpy().tobytes()
    if raw[:4] != MAGIC or len(raw) < HEADER_SIZE:
        raise RankError(
            f"a message without a header arrived from rank {expected.src}, where {expected} was expected. All ranks"
            f" must be in checked mode or none, and no one else may send over this group."
        )
    header = Header(*_FORM.unpack(raw[: _FORM.size])[1:])
    message = whole[HEADER_SIZE:]
    wrong = [
        f.name for f in fields(Header) if f.name != "checksum" and getattr(header, f.name) != getattr(expected, f.name)
    ]
    if wrong:
        raise RankError(
            f"a message arrived that is not the expected one: {', '.join(wrong)} differ. Expected {expected}; found"
            f" {header}. A rank skipped a call, or runs another program than the others."
        )
    if header.checksum != _checksum(message):
        raise RankError(
            f"the message {expected} arrived damaged or cut short: its checksum is wrong. End this job; if it"
            f" happens again, look at the network and at who else sends over this group."
        )
    return message


def _checksum(message: Tensor) -> int:
    return zlib.crc32(message.detach().cpu().contiguous().numpy().data)


# -- Comparing rows through the job's store, for groups that cannot send from CPUs -------------------------------------
# No device takes part, so the host does not wait for work queued on its device. Three ranks, of which the last has
# another row:
#
#     rank 0   claims "call 7": its row is the one to compare with; it arrives 1st, and waits
#     rank 1   finds the row of rank 0, which equals its own; it arrives 2nd, and waits
#     rank 2   finds a row that differs from its own: writes its own next to it; arrives 3rd, and reports the difference
#
# A rank that arrives at the next comparison has read all of this one: the last rank to arrive there deletes it.


SAME, DIFFERENT = b"same", b"different"


class Comparison:
    """One comparison. It is waited for like a message, by a thread that does nothing else."""

    def __init__(self, store: Store, place: tuple[int, int], names: tuple[str, str], row: bytes) -> None:
        """`place` is this rank and how many there are; `names` are those of this comparison and of the one before,
        which may be cleared away, or "" for none."""
        self.store, self.row = store, row
        self.rank, self.size = place
        self.name, self.before = names
        self.rows: Sequence[bytes] = ()
        """Every rank's row where they differ, this rank's alone where not."""

    def wait(self) -> bool:
        """Returns when all ranks have come."""
        store, name = self.store, self.name
        first = store.claim(name, self.row)
        if first != self.row:
            store.set(f"{name}/{self.rank}", self.row)
            store.add(f"{name}/others", 1)
        if store.add(f"{name}/came", 1) == self.size:
            store.set(f"{name}/end", SAME if store.add(f"{name}/others", 0) == 0 else DIFFERENT)
            self._clear()
        else:
            store.wait(f"{name}/end")
        if store.get(f"{name}/end") == SAME:
            self.rows = [self.row]
        else:
            self.rows = [store.get(f"{name}/{rank}") or first for rank in range(self.size)]
        return True

    def _clear(self) -> None:
        if self.before:
            for end in ("", "/others", "/came", "/end"):
                self.store.delete(f"{self.before}{end}")


def rows_alone(
    store: Store, place: tuple[int, int], names: tuple[str, str], row: bytes, timeout: float
) -> Sequence[bytes]:
    """The rows of a comparison that nobody watches."""
    connection = store.again(timeout)
    try:
        found = Comparison(connection, place, names, row)
        found.wait()
    except LostError as error:
        raise RankError(
            f"rank {place[0]} of {place[1]} could not compare its call with the others within {timeout:.0f} s: {error}."
            f" A rank did not come, or the job's store is gone; nobody watches here (patience = 0), so nobody is named."
        ) from None
    finally:
        connection.close()
    return found.rows


# -- Records -----------------------------------------------------------------------------------------------------------


WIDTH = 48
"""Bytes of a field; a longer text ends in its digest."""


@dataclass(frozen=True)
class Record:
    """What must be the same on all ranks of a group."""

    longspan: str
    torch: str
    plan: str
    mask: str
    layout: str
    shapes: str
    dtype: str
    device: str
    scheme: str
    scale: str
    scores: str
    sinks: str
    gradients: str
    checked: str
    name: str

    def row(self) -> bytes:
        return b"".join(_fixed(getattr(self, f.name)) for f in fields(self))

    @cached_property
    def digest(self) -> bytes:
        """What to remember of it."""
        return hashlib.sha256(self.row()).digest()


RECORD_SIZE = WIDTH * len(fields(Record))


def compare(rows: Sequence[bytes]) -> None:
    """Refuses when rows, by rank, are not all the same; every rank says the same."""
    if len(set(rows)) == 1:
        return
    names = [field.name for field in fields(Record)]
    texts = {
        name: [_text(row[number * WIDTH : (number + 1) * WIDTH]) for row in rows] for number, name in enumerate(names)
    }
    words = _SCAN_WORDS if all(text.startswith(SCAN) for text in texts["scheme"]) else {}
    differ = [name for name in names if len(set(texts[name])) > 1 and name != "plan"]
    parts = [f"{words.get(name, name)}: {_by_rank(texts[name])}" for name in differ]
    if not parts:
        parts.append(f"plan: {_by_rank([text[:12] for text in texts['plan']])}")
    raise AgreementError(
        f"the {len(rows)} ranks of the group were not asked for the same computation, and no data was sent."
        f" {'; '.join(parts)}. Every rank must pass the same {words.get('mask', 'mask')}, layout, shapes and options:"
        f" derive them from one batch (longspan.training.check_same tells whether it is one), and run one version"
        f" everywhere."
    )


SCAN = "scan by "
"""What the schemes of recurrences begin with."""
_SCAN_WORDS = {"mask": "documents", "shapes": "states", "scores": "recurrence"}
"""What the fields of a record are called in a recurrence."""


def _by_rank(texts: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    groups = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{text} on rank{'s' if len(who) > 1 else ''} {_few(who)}" for text, who in groups)


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _fixed(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > WIDTH:
        digest = hashlib.sha256(raw).hexdigest()[:10].encode()
        raw = raw[: WIDTH - 11] + b"~" + digest
    return raw.ljust(WIDTH, b"\0")


def _text(raw: bytes) -> str:
    """What came over the wire, made safe to print."""
    text = raw.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)
