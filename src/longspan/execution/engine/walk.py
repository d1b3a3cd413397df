"""Walking: a rank's steps, whatever they are about, with rows that stand for tensors. What is noted becomes a program.

Every step starts its messages, computes while they travel, and takes in what arrived. What pieces and computes are is
filled in: rows of attention (`runner`), states of recurrences (`execution.scans`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from longspan.execution.engine.flat.program import FlatProgram, FlatStep, Mail, items_of
from longspan.execution.engine.flat.recorder import Buffer, Recorder, Rows
from longspan.schedules.steps import Moved, PlanStep


@dataclass(frozen=True, eq=False)
class Messages:
    """One rank's transfers of one step by the peer they go to or come from, in the order in which both ends list them.

    They are one message for each peer.
    """

    sends: dict[int, list[Moved]]
    receives: dict[int, list[Moved]]
    pieces: dict[tuple[int, int], list[Moved]]
    """All of them, by source and target."""


def messages_of(step: PlanStep, rank: int) -> Messages:
    sends: dict[int, list[Moved]] = {}
    receives: dict[int, list[Moved]] = {}
    for t in step.transfers:
        if t.src == rank:
            sends.setdefault(t.dst, []).append(t)
        else:
            receives.setdefault(t.src, []).append(t)
    for lists in (sends, receives):
        for transfers in lists.values():
            transfers.sort(key=lambda t: t.piece.order)
    pieces = {(rank, peer): transfers for peer, transfers in sends.items()}
    return Messages(sends, receives, pieces | {(peer, rank): transfers for peer, transfers in receives.items()})


class PieceFormat(Protocol):
    """How pieces lie in messages."""

    @property
    def alignment(self) -> int: ...

    def num_bytes(self, transfers: Sequence[Moved]) -> int: ...

    def tensors(self, recorder: Recorder, piece: Any, message: Buffer, offset: int) -> tuple[list[Rows], int]: ...


class PlanWalk(ABC):
    """One rank's steps in one direction."""

    def __init__(self, steps: Sequence[PlanStep], rank: int, form: PieceFormat) -> None:
        self.steps, self.rank, self.form = steps, rank, form
        self.recorder = Recorder()
        self.loose: list[Buffer] = []

    # -- what is filled in ------------------------------------------------------------------------------------------

    def prepare(self, step: PlanStep) -> None:  # noqa: B027
        """Before the step's messages are packed."""

    @abstractmethod
    def compute(self, compute: Any) -> None:
        """One of the step's computes, while messages travel."""

    @abstractmethod
    def fill(self, piece: Any, targets: Sequence[Rows]) -> None:
        """Writes a piece to be sent into its part of a message."""

    @abstractmethod
    def take(self, transfer: Moved, tensors: Sequence[Rows]) -> None:
        """Takes in a piece that arrived, in its part of a message."""

    def drop_after(self, step: int) -> None:  # noqa: B027
        """Lets go of what is used up to this step."""

    @abstractmethod
    def finish(self) -> list[Rows]:
        """What the run is for, when all steps are done."""

    # -- walking ----------------------------------------------------------------------------------------------------

    def program(self) -> FlatProgram:
        """Every step: start its messages, compute while they travel, take in what arrived."""
        made: list[tuple[Any, ...]] = []
        for number, step in enumerate(self.steps):
            messages = messages_of(step, self.rank)
            self.prepare(step)
            sends = self._mail(messages.sends) if messages.sends else None
            if sends is not None:
                self._pack(messages.sends, sends)
            pack, loose = self.recorder.cut(), self._loose()
            receives = self._receives(messages.receives)
            for compute in step.computes:
                self.compute(compute)
            work = self.recorder.cut()
            self.drop_after(number)
            for mail in receives:
                for peer, (offset, _) in mail.places.items():
                    self._unpack(messages.receives[peer], mail.buffer, offset)
            made.append((pack, sends, receives, messages.pieces, work, self.recorder.cut(), loose))
        results = self.finish()
        end = items_of(self.recorder.cut())  # and only now, because buffers of states have grown
        steps = [
            FlatStep(items_of(pack), sends, receives, pieces, items_of(work), items_of(unpack), loose)
            for pack, sends, receives, pieces, work, unpack, loose in made
        ]
        return FlatProgram(steps, end, results, self.recorder.buffers, self._loose())

    def _mail(self, lists: dict[int, list[Moved]]) -> Mail:
        """Messages with these transfers in one buffer, each on a multiple that suits operations on rows."""
        places: dict[int, tuple[int, int]] = {}
        offset, step = 0, self.form.alignment
        for peer, transfers in lists.items():
            size = self.form.num_bytes(transfers)
            places[peer] = offset, size
            offset = -(-(offset + size) // step) * step
        return Mail(self.recorder.message(offset), places)

    def _receives(self, lists: dict[int, list[Moved]]) -> list[Mail]:
        """One buffer for all messages that are used up to the same step."""
        groups: dict[int, dict[int, list[Moved]]] = {}
        for peer, transfers in lists.items():
            groups.setdefault(max(t.until for t in transfers), {})[peer] = transfers
        return [self._mail(group) for group in groups.values()]

    def _pack(self, lists: dict[int, list[Moved]], mail: Mail) -> None:
        for peer, transfers in lists.items():
            offset, _ = mail.places[peer]
            for t in transfers:
                offset = self._pack_piece(t.piece, mail.buffer, offset)

    def _pack_piece(self, piece: Any, message: Buffer, offset: int) -> int:
        targets, offset = self.form.tensors(self.recorder, piece, message, offset)
        self.loose += [rows.buffer for rows in targets if rows.buffer.is_loose]
        self.fill(piece, targets)
        return offset

    def _loose(self) -> list[Buffer]:
        loose, self.loose = self.loose, []
        return loose

    def _unpack(self, transfers: list[Moved], message: Buffer, offset: int) -> None:
        for t in transfers:
            tensors, offset = self.form.tensors(self.recorder, t.piece, message, offset)
            self.take(t, tensors)
