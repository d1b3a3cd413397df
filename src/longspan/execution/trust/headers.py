"""Headers: in checked mode every message says what it is, and a receiver refuses what it did not expect.

Point-to-point messages are matched by order and size alone; a swapped, short, stale or damaged one would go unnoticed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from longspan.errors import RankError
from longspan.schedules.steps import Moved

MAGIC = b"LSh2"
_FORM = struct.Struct("<4s8sIqBIHHIQ8sIHI")
SIZE = 64
"""Bytes in front of a message, a multiple of every item size."""
assert _FORM.size <= SIZE


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
    whole = torch.empty(SIZE + message.numel(), dtype=torch.uint8, device=message.device)
    values = [getattr(header, f.name) for f in fields(Header)][:-1]
    raw = _FORM.pack(MAGIC, *values, _checksum(message)).ljust(SIZE, b"\0")
    whole[:SIZE] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    whole[SIZE:] = message
    return whole


def opened(expected: Header, whole: Tensor) -> Tensor:
    """The message without its header, which must be what was expected."""
    raw = whole[:SIZE].cpu().numpy().tobytes()
    if raw[:4] != MAGIC or len(raw) < SIZE:
        raise RankError(
            f"a message without a header arrived from rank {expected.src}, where {expected} was expected. All ranks"
            f" must be in checked mode or none, and no one else may send over this group."
        )
    header = Header(*_FORM.unpack(raw[: _FORM.size])[1:])
    message = whole[SIZE:]
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
