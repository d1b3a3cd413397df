"""Agreement between ranks: records that are compared before data moves, and headers of messages in checked mode.

A record is a row of fixed-width strings that must be equal on every rank. It is compared once per new call. Every rank
sees all rows, so every rank raises the same error.
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
# Point-to-point messages are matched by order and size only. With a header, a receiver detects a swapped, short, stale
# or damaged message.


MAGIC = b"LSh2"
_FORM = struct.Struct("<4s8sIqBIHHIQ8sIHI")
HEADER_SIZE = 64
"""Bytes before a message, a multiple of every item size."""
assert _FORM.size <= HEADER_SIZE


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a message."""

    plan: bytes
    """First 8 bytes of the plan's fingerprint."""
    call: int
    training_step: int
    direction: int
    step: int
    src: int
    dst: int
    pieces: int
    """Checksum of the pieces' names, in order."""
    num_bytes: int
    dtype: bytes
    """First 8 characters of the dtype."""
    forward: int = 0
    """For a backward pass, the number of its forward."""
    name: int = 0
    """Checksum of the call's name."""
    checksum: int = 0
    """Checksum of the message."""

    def __str__(self) -> str:
        direction = {1: "forward", 2: "backward"}.get(self.direction, "?")
        direction += f" of call {self.forward}" if self.forward else ""
        return (
            f"call {self.call} {direction} step {self.step + 1}, rank {self.src} to {self.dst}, {self.num_bytes} bytes"
            f" of {self.dtype.rstrip(bytes(1)).decode(errors='replace')}, plan {self.plan.hex()[:12]}"
        )


def checksum_pieces(transfers: Sequence[Moved]) -> int:
    return zlib.crc32(" ".join(repr(t.piece) for t in transfers).encode())


def add_header(header: Header, message: Tensor) -> Tensor:
    whole = torch.empty(HEADER_SIZE + message.numel(), dtype=torch.uint8, device=message.device)
    values = [getattr(header, f.name) for f in fields(Header)][:-1]
    raw = _FORM.pack(MAGIC, *values, _checksum(message)).ljust(HEADER_SIZE, b"\0")
    whole[:HEADER_SIZE] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    whole[HEADER_SIZE:] = message
    return whole


def remove_header(expected: Header, whole: Tensor) -> Tensor:
    """Return the message without its header. Raise if the header is not the expected one."""
    raw = whole[:HEADER_SIZE].cpu().numpy().tobytes()
    if raw[:4] != MAGIC or len(raw) < HEADER_SIZE:
        raise RankError(
            f"A message without a header arrived from rank {expected.src}, but expected {expected}. Enable checked mode"
            f" on all ranks or none, and let only Longspan send over this group."
        )
    header = Header(*_FORM.unpack(raw[: _FORM.size])[1:])
    message = whole[HEADER_SIZE:]
    wrong = [
        f.name for f in fields(Header) if f.name != "checksum" and getattr(header, f.name) != getattr(expected, f.name)
    ]
    if wrong:
        raise RankError(
            f"A message differs from the expected one in {', '.join(wrong)}: expected {expected}, but got {header}. A"
            f" rank skipped a call, or runs another program than the others."
        )
    if header.checksum != _checksum(message):
        raise RankError(
            f"The message {expected} arrived damaged: its checksum is wrong. End this job; if it happens again, check"
            f" the network, and whether other code sends over this group."
        )
    return message


def _checksum(message: Tensor) -> int:
    return zlib.crc32(message.detach().cpu().contiguous().numpy().data)


# -- Comparing rows through the job's store, for groups that cannot send from CPUs -------------------------------------
# No accelerator is used, so the host does not wait for its queue. Three ranks, the last with another row:
#
#     rank 0   claims "call 7": its row is the reference; it arrives first, and waits
#     rank 1   reads the row of rank 0, which equals its own; it arrives second, and waits
#     rank 2   reads a row that differs from its own, writes its own next to it, arrives last and reports it
#
# A rank that arrives at the next comparison has read all of this one, so the last rank to arrive there deletes it.


SAME, DIFFERENT = b"same", b"different"


class Comparison:
    """One comparison, with the `wait` of a `dist.Work`."""

    def __init__(self, store: Store, place: tuple[int, int], names: tuple[str, str], row: bytes) -> None:
        """`place` is (rank, world size); `names` are those of this comparison and of the one to delete, or ""."""
        self.store, self.row = store, row
        self.rank, self.size = place
        self.name, self.before = names
        self.rows: Sequence[bytes] = ()
        """Every rank's row if they differ, else this rank's alone."""

    def wait(self) -> bool:
        """Return when all ranks have arrived."""
        store, name = self.store, self.name
        first = store.claim(name, self.row)
        if first != self.row:
            store.set(f"{name}/{self.rank}", self.row)
            store.add(f"{name}/others", 1)
        if store.add(f"{name}/came", 1) == self.size:
            store.set(f"{name}/end", SAME if store.add(f"{name}/others", 0) == 0 else DIFFERENT)
            for end in ("", "/others", "/came", "/end") if self.before else ():
                store.delete(f"{self.before}{end}")
        else:
            store.wait(f"{name}/end")
        if store.get(f"{name}/end") == SAME:
            self.rows = [self.row]
        else:
            self.rows = [store.get(f"{name}/{rank}") or first for rank in range(self.size)]
        return True


def rows_alone(
    store: Store, place: tuple[int, int], names: tuple[str, str], row: bytes, timeout: float
) -> Sequence[bytes]:
    """Return the rows of a comparison without a watch."""
    connection = store.again(timeout)
    try:
        comparison = Comparison(connection, place, names, row)
        comparison.wait()
    except LostError as error:
        raise RankError(
            f"Rank {place[0]} of {place[1]} could not compare its call with the others within {timeout:.0f} s: {error}."
            f" A rank did not arrive, or the job's store is gone. Set patience > 0 to have the rank named."
        ) from None
    finally:
        connection.close()
    return comparison.rows


# -- Records -----------------------------------------------------------------------------------------------------------


WIDTH = 48
"""Bytes of a field; a longer text ends with its digest."""


@dataclass(frozen=True)
class Record:
    """Properties of a call that must be equal on all ranks of a group."""

    longspan: str
    torch: str
    plan: str
    mask: str
    layout: str
    shapes: str
    dtype: str
    device: str
    kernel: str
    scheme: str
    scale: str
    scores: str
    sinks: str
    gradients: str
    checked: str
    name: str

    def row(self) -> bytes:
        return b"".join(_to_fixed_size(getattr(self, f.name)) for f in fields(self))

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.row()).digest()


RECORD_SIZE = WIDTH * len(fields(Record))


def compare(rows: Sequence[bytes]) -> None:
    """Raise if the ranks' rows are not all equal, and name the fields that differ."""
    if len(set(rows)) == 1:
        return
    names = [field.name for field in fields(Record)]
    texts = {
        name: [_text(row[number * WIDTH : (number + 1) * WIDTH]) for row in rows] for number, name in enumerate(names)
    }
    words = _SCAN_WORDS if all(text.startswith(SCAN) for text in texts["scheme"]) else {}
    differ = [name for name in names if len(set(texts[name])) > 1 and name != "plan"]
    parts = [f"{words.get(name, name)}: {_by_rank(texts[name])}" for name in differ]
    if differ == ["kernel"]:
        raise AgreementError(
            f"The {len(rows)} ranks of the group chose different kernels, and no data was sent. {parts[0]}. Pass the"
            f" same `kernel` on every rank, one that all have, or install the same packages on the same kind of GPU."
        )
    if not parts:
        parts.append(f"plan: {_by_rank([text[:12] for text in texts['plan']])}")
    raise AgreementError(
        f"The {len(rows)} ranks of the group called different computations, and no data was sent."
        f" {'; '.join(parts)}. Every rank must pass the same {words.get('mask', 'mask')}, layout, shapes and options:"
        f" derive them from one batch (check with longspan.training.check_same), and run one version everywhere."
    )


SCAN = "scan by "
"""Prefix of the schemes of recurrences."""
_SCAN_WORDS = {"mask": "documents", "shapes": "states", "scores": "recurrence"}
"""Names of a record's fields for a recurrence."""


def _by_rank(texts: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    groups = sorted(ranks.items(), key=lambda item: -len(item[1]))
    parts: list[str] = []
    for text, numbers in groups:
        shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
        parts.append(f"{text} on rank{'s' if len(numbers) > 1 else ''} {shown}")
    return ", ".join(parts)


def _to_fixed_size(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > WIDTH:
        digest = hashlib.sha256(raw).hexdigest()[:10].encode()
        raw = raw[: WIDTH - 11] + b"~" + digest
    return raw.ljust(WIDTH, b"\0")


def _text(raw: bytes) -> str:
    """Decode a received field and make it printable."""
    text = raw.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)
