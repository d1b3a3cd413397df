"""Validate the schedule of a scan. The proof tracks intervals of segments and does not depend on the planner.

Forward: a rank has the pieces [i:i+1) of its own segments; it sends what it has, and folds adjacent pieces. At the end
the owner of segment i > 0 has [0:i). Backward: the gradient of a piece [i:j) is a set of segments m >= j, those whose
entering states depend on it; sets that are added must not overlap, and the gradient of [i:i+1) ends as {i+1, i+2, ...}.

    chain of 3, doubling    forward   rank 2 ends with [0:2) = [0:1) + [1:2)
                            backward  [1:2) starts with {}, gets {2} from [0:2), and that is all of it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from longspan.errors import ScheduleError
from longspan.planning.scan_steps import CHAIN, PLACE, RANK, ChainPiece, Chains, Fold, ScanSchedule, StateTransfer

Place = tuple[int, int, int]
"""Chain, first segment, end."""
Spoken = frozenset[int]
"""Segments whose entering states a gradient speaks for."""


def validate_scan(forward: ScanSchedule, backward: ScanSchedule, chains: Chains) -> None:
    """Raises ScheduleError unless every segment gets the state that enters it, and every state its whole gradient."""
    for schedule, direction in ((forward, "forward"), (backward, "backward")):
        if schedule.direction != direction or schedule.layout != chains.layout:
            raise ScheduleError(
                f"a {schedule.direction} schedule over {schedule.layout} was given where a {direction} one over"
                f" {chains.layout} is proved."
            )
        _check_messages(schedule)
    _StatesProof(forward, chains).check()
    _GradientsProof(backward, chains).check()
    _check_kept(forward, backward)


def _check_kept(forward: ScanSchedule, backward: ScanSchedule) -> None:
    """Backward uses the maps that the same rank folded in forward."""
    for rank, (there, back) in enumerate(zip(forward.ranks, backward.ranks, strict=True)):
        kept = {fold.right for step in there for fold in step.computes}
        for fold in (fold for step in back for fold in step.computes):
            if fold.right not in kept:
                raise ScheduleError(f"rank {rank} needs M of {fold.right!r} in backward, which it did not fold before.")


def _place(piece: ChainPiece) -> Place:
    return piece.chain, piece.start, piece.stop


def _check_messages(schedule: ScanSchedule) -> None:
    """Both ends of a transfer list it, in the same step."""
    for number in range(schedule.num_steps):
        ends: list[set[StateTransfer]] = [set(), set()]
        for rank, steps in enumerate(schedule.ranks):
            for t in steps[number].transfers if number < len(steps) else ():
                if max(t.src, t.dst) >= schedule.world_size:
                    raise ScheduleError(f"{t!r} of step {number} is between ranks of {schedule.world_size}.")
                if rank not in (t.src, t.dst) or t.src == t.dst:
                    raise ScheduleError(f"rank {rank} lists {t!r} in step {number}, which does not concern it.")
                if t in ends[rank == t.dst]:
                    raise ScheduleError(f"rank {rank} lists {t!r} twice in step {number}.")
                ends[rank == t.dst].add(t)
        for t in ends[0] ^ ends[1]:
            raise ScheduleError(f"{t!r} is listed in step {number} by one of its two ends only.")


class _ScanProof(ABC):
    """Steps of all ranks, one after the other: folds first, then transfers, which arrive after all were sent."""

    def __init__(self, schedule: ScanSchedule, chains: Chains) -> None:
        self.schedule = schedule
        self.owners = {(row[CHAIN], row[PLACE]): row[RANK] for row in chains.table.tolist()}
        self.batches = chains.batches

    def run(self, fold: Callable[[Fold, int], None], send: Callable[[StateTransfer, int], Spoken]) -> None:
        by_step: dict[int, list[StateTransfer]] = {}
        for step, t in self.schedule.transfers():
            by_step.setdefault(step, []).append(t)
        for number in range(self.schedule.num_steps):
            for rank, steps in enumerate(self.schedule.ranks):
                for item in steps[number].computes if number < len(steps) else ():
                    if item.rank != rank:
                        raise ScheduleError(f"rank {rank} lists {item!r} in step {number}, which it cannot do.")
                    self._check(item)
                    fold(item, number)
            sent: list[tuple[StateTransfer, Spoken]] = []
            for t in by_step.get(number, []):
                self._check_piece(t.piece, t, gradient=self.schedule.direction == "backward")
                sent.append((t, send(t, number)))
            for t, found in sent:
                self.arrive(t, found)

    @abstractmethod
    def arrive(self, t: StateTransfer, found: Spoken) -> None:
        """Takes in what was sent."""

    def _check(self, fold: Fold) -> None:
        left, right = fold.left, fold.right
        meets = left.stop == right.start and left.chain == right.chain and left.batch == right.batch
        if not meets or not left.start < left.stop < right.stop:
            raise ScheduleError(f"rank {fold.rank}: {fold!r} joins pieces that do not meet.")
        for piece in (left, right):
            self._check_piece(piece, fold, gradient=False)

    def _check_piece(self, piece: ChainPiece, within: object, *, gradient: bool) -> None:
        """It is of a chain that there is, with all of its batch rows, and carries what it should."""
        if piece.chain >= len(self.batches) or not piece.start < piece.stop:
            raise ScheduleError(f"{within!r} names {piece!r}, but of {len(self.batches)} chains none has such a piece.")
        expected = ChainPiece.of(*_place(piece), self.batches[piece.chain])
        expected = expected.to_gradient() if gradient else expected
        if piece != expected:
            raise ScheduleError(f"{within!r} names {piece!r} where {expected!r} is meant.")


class _StatesProof(_ScanProof):
    def check(self) -> None:
        self.has: set[tuple[int, Place]] = {(r, (c, i, i + 1)) for (c, i), r in self.owners.items()}
        self.run(self._fold, self._send)
        for (chain, place), rank in self.owners.items():
            if place and (rank, (chain, 0, place)) not in self.has:
                raise ScheduleError(
                    f"rank {rank} holds segment {place} of chain {chain}, but never gets the state [0:{place}) that"
                    f" enters it."
                )

    def _fold(self, fold: Fold, number: int) -> None:
        for piece in (fold.left, fold.right):
            if (fold.rank, _place(piece)) not in self.has:
                raise ScheduleError(f"rank {fold.rank} folds {piece!r} in step {number} without having it.")
        if (fold.rank, _place(fold.whole)) in self.has:
            raise ScheduleError(f"rank {fold.rank} folds {fold.whole!r} in step {number}, which it has.")
        self.has.add((fold.rank, _place(fold.whole)))

    def _send(self, t: StateTransfer, number: int) -> Spoken:
        if (t.src, _place(t.piece)) not in self.has:
            raise ScheduleError(f"rank {t.src} sends {t.piece!r} in step {number} without having it.")
        if (t.dst, _place(t.piece)) in self.has:
            raise ScheduleError(f"rank {t.dst} is sent {t.piece!r} in step {number}, which it has.")
        return frozenset()

    def arrive(self, t: StateTransfer, found: Spoken) -> None:  # noqa: ARG002
        self.has.add((t.dst, _place(t.piece)))


class _GradientsProof(_ScanProof):
    def check(self) -> None:
        self.speaks: dict[tuple[int, Place], frozenset[int]] = {
            (rank, (chain, 0, place)): frozenset({place}) for (chain, place), rank in self.owners.items() if place
        }
        self.run(self._fold, self._send)
        lengths: dict[int, int] = {}
        for chain, _ in self.owners:
            lengths[chain] = lengths.get(chain, 0) + 1
        for (chain, place), rank in self.owners.items():
            found = self.speaks.pop((rank, (chain, place, place + 1)), frozenset())
            wanted = frozenset(range(place + 1, lengths[chain]))
            if found != wanted:
                raise ScheduleError(
                    f"the state that leaves segment {place} of chain {chain} gets gradients of segments"
                    f" {sorted(found)}, and should get those of {sorted(wanted)}."
                )
        for (rank, (chain, start, stop)), lost in self.speaks.items():
            raise ScheduleError(
                f"rank {rank} ends with gradients of segments {sorted(lost)} for [{start}:{stop}) of chain {chain},"
                f" which belong to others."
            )

    def _add(self, rank: int, place: Place, segments: frozenset[int]) -> None:
        before = self.speaks.get((rank, place), frozenset())
        if before & segments:
            chain, start, stop = place
            raise ScheduleError(
                f"rank {rank} adds the gradients of segments {sorted(before & segments)} to [{start}:{stop}) of chain"
                f" {chain} twice."
            )
        self.speaks[rank, place] = before | segments

    def _taken(self, rank: int, piece: ChainPiece, number: int) -> Spoken:
        found = self.speaks.pop((rank, _place(piece)), None)
        if found is None:
            raise ScheduleError(f"rank {rank} has no gradient of {piece!r} in step {number}.")
        return found

    def _fold(self, fold: Fold, number: int) -> None:
        segments = self._taken(fold.rank, fold.whole, number)
        for piece in (fold.left, fold.right):
            self._add(fold.rank, _place(piece), segments)

    def _send(self, t: StateTransfer, number: int) -> Spoken:
        return self._taken(t.src, t.piece, number)

    def arrive(self, t: StateTransfer, found: Spoken) -> None:
        self._add(t.dst, _place(t.piece), found)
