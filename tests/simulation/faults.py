"""Faults of a virtual network: what may go wrong, at which rank and step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

RANK_FAULTS = ("kill", "stop", "raise", "skip")
MESSAGE_FAULTS = ("lose", "double", "late", "short", "damage")


class KilledError(Exception):
    """What became of a rank that was killed; no process would see it."""


@dataclass(frozen=True)
class Fault:
    """Something goes wrong at one rank in one step: with itself, or with its message to `dst`."""

    kind: str
    rank: int
    step: int
    direction: str = "forward"
    dst: int | None = None
    seconds: float = 1e9
    """How long a rank stops, or how late a message is."""

    def fits(self, kind: str, rank: int, step: int | None, direction: str) -> bool:
        """Whether it is of this kind, here and now; no step is any."""
        return (self.kind, self.rank, self.direction) == (kind, rank, direction) and step in (None, self.step)

    def error(self) -> Exception:
        """What a rank raises that raises."""
        return ValueError(f"mask_mod of rank {self.rank} met a wall in step {self.step}")

    def __str__(self) -> str:
        to = "" if self.dst is None else f" to rank {self.dst}"
        return f"{self.kind} at rank {self.rank}{to}, {self.direction} step {self.step}"


def spoiled(fault: Fault, copies: Sequence[Tensor], draw: random.Random) -> tuple[list[Tensor], float]:
    """What becomes of a message, and how much later it arrives."""
    message = copies[0]
    if fault.kind == "lose":
        return [], 0.0
    if fault.kind == "double":
        return [*copies, message.clone()], 0.0
    if fault.kind == "late":
        return list(copies), fault.seconds
    message = message.clone()
    if fault.kind == "short":
        return [message[: draw.randrange(message.numel())]], 0.0
    if fault.kind == "damage":
        place = draw.randrange(message.numel())
        message[place] ^= 1 << draw.randrange(8)
        return [message], 0.0
    return list(copies), 0.0
