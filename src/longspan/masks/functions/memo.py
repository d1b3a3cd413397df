"""What was worked out for a mask whose functions read data, as long as that data stays as it is."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from longspan.masks.functions.reads import Reads

T = TypeVar("T")
PAST = 8
"""How many past readings are remembered."""


class Knowledge:
    """What a mask's functions read when they were last looked at, and what was worked out from that."""

    def __init__(self) -> None:
        self.readers: tuple[Any, ...] | None = None
        """How its functions are called, each once; none for a structured mask. None: not looked for yet."""
        self.reads: tuple[Reads, ...] = ()
        self.known: dict[Any, Any] = {}
        self.past: list[tuple[Reads, ...]] = []

    def read_anew(self) -> tuple[Reads, ...]:
        """What functions read now: the same object as before if nothing changed; else all that is known is dropped."""
        if not self.readers:
            return ()
        now = self._now(self.reads)
        if not self.reads or difference(self.reads, now) is not None:
            self._take(now)
        self._note()
        return self.reads

    def settled(self) -> tuple[Reads, ...]:
        """What was read, after a pass in which functions ran; see `Reads.settled`."""
        if not self.readers:
            return self.reads
        after = tuple(reads.settled(reader.call) for reads, reader in zip(self.reads, self.readers, strict=False))
        if any(a is not b for a, b in zip(after, self.reads, strict=False)):
            self.reads = after
            self._note()
        return self.reads

    def _note(self) -> None:
        if not any(reads is self.reads for reads in self.past):
            self.past = [*self.past[1 - PAST :], self.reads]

    def change_since(self, reads: tuple[Reads, ...] | None) -> str | None:
        """What differs now from what was read then (None: in any forward pass of late), in words."""
        if not self.readers:
            return None
        change, now = None, self._now(self.reads)
        for then in self.past[::-1] if reads is None else (reads,):
            change = difference(then, now)
            if change is None:
                if then is not self.reads:
                    self._take(then)
                return None
        return change

    def _now(self, before: tuple[Reads, ...]) -> tuple[Reads, ...]:
        readers = self.readers or ()
        befores = before or (None,) * len(readers)
        return tuple(reader.reads(known) for reader, known in zip(readers, befores, strict=True))

    def _take(self, reads: tuple[Reads, ...]) -> None:
        self.reads = reads
        self.known.clear()
        for reader in self.readers or ():
            reader.device = None


class Memo:
    """A mask's own: copies of the mask in its plans share the state, but not the plans, which would keep themselves
    alive. It stays behind when a mask is copied or sent elsewhere."""

    def __init__(self) -> None:
        self.plans: dict[Any, Any] = {}
        self.state = Knowledge()

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()


def difference(then: tuple[Reads, ...], now: tuple[Reads, ...]) -> str | None:
    """What has changed, in words; None if nothing has."""
    if then is now:
        return None
    return next((change for a, b in zip(then, now, strict=True) if (change := a.difference(b)) is not None), None)


class ByIdentity(Generic[T]):
    """An object as a key: this one, not an equal one, so that looking it up costs nothing."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return id(self.value)
