"""A rank's steps of a scan plan, walked: folds of maps and states, and their transposes in backward.

A state is (batch rows, heads, K, V), as rows of attention are (batch rows, heads, tokens, features): messages, buffers
and programs are the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan.execution.engine.flat.memory import Memory
from longspan.execution.engine.flat.program import FlatProgram, memory_for, part_of
from longspan.execution.engine.flat.recorder import Buffer, Launched, Recorder, Rows
from longspan.execution.engine.transports import Program
from longspan.execution.engine.walk import PlanWalk
from longspan.schedules.scans.plan import ScanPlan
from longspan.schedules.scans.words import ChainPiece, Fold, ScanRole, StateSizes
from longspan.schedules.steps import Moved, PlanStep

Place = tuple[int, int, int]
"""A chain, and which of its segments: first, end."""


@dataclass(frozen=True)
class StateFormat:
    """Which tensors make up a piece, and how they lie in a message."""

    sizes: StateSizes
    dtype: torch.dtype

    @property
    def alignment(self) -> int:
        return 256

    def num_bytes(self, transfers: Sequence[Moved]) -> int:
        return sum(t.piece.num_bytes(self.sizes) for t in transfers)

    def state(self, piece: ChainPiece) -> tuple[int, int, int, int]:
        return len(piece.batch), self.sizes.heads, self.sizes.keys, self.sizes.values

    def map(self, piece: ChainPiece) -> tuple[int, int, int, int]:
        return len(piece.batch), self.sizes.heads, self.sizes.map_rows, self.sizes.map_cols

    def tensors(self, recorder: Recorder, piece: ChainPiece, message: Buffer, offset: int) -> tuple[list[Rows], int]:
        """M, if it is a map, and U or its gradient, and where the next piece begins."""
        shapes = [self.map(piece)] if piece.role is ScanRole.MAP else []
        found: list[Rows] = []
        for shape in (*shapes, self.state(piece)):
            found.append(recorder.new(shape, self.dtype, inside=message, offset=offset))
            offset += found[-1].buffer.num_bytes
        return found, offset


def place_of(piece: ChainPiece) -> Place:
    return piece.chain, piece.start, piece.stop


@dataclass(frozen=True)
class Ends:
    """A rank's segments as a scan sees them: those that a state enters, and those whose state somebody needs."""

    entered: tuple[ChainPiece, ...]
    """[0:i) of every segment i > 0, by slot."""
    left: tuple[ChainPiece, ...]
    """[i:i+1) of every segment that is not its chain's last."""


def ends_of(plan: ScanPlan, rank: int) -> Ends:
    lengths = [len(ranks) for ranks in plan.chains.ranks()]
    batches = plan.chains.batches
    mine = [(chain, place) for chain, place, _, _ in plan.chains.of_rank(rank).tolist()]
    return Ends(
        tuple(ChainPiece.of(chain, 0, place, batches[chain]) for chain, place in mine if place),
        tuple(ChainPiece.of(c, i, i + 1, batches[c]) for c, i in mine if i + 1 < lengths[c]),
    )


class StatesWalk(PlanWalk):
    """Forward. Inputs are M (none where a document begins) and U of every segment that is followed by another; results
    the states that enter segments, and then the M that backward needs."""

    def __init__(self, plan: ScanPlan, rank: int, form: StateFormat) -> None:
        super().__init__(plan.steps(rank), rank, form)
        self.format, self.dense = form, bool(form.sizes.dense)
        self.ends, self.kept = ends_of(plan, rank), plan.kept(rank)
        self.maps: dict[Place, Rows] = {}
        self.states: dict[Place, Rows] = {}
        for piece in self.ends.left:
            if piece.role is ScanRole.MAP:
                self.maps[place_of(piece)] = self.recorder.new(form.map(piece), form.dtype)
            self.states[place_of(piece)] = self.recorder.new(form.state(piece), form.dtype)

    def prepare(self, step: PlanStep) -> None:
        for fold in step.computes:
            self._join(fold)

    def compute(self, compute: Fold) -> None:
        """Folds are done before messages are packed."""

    def _join(self, fold: Fold) -> None:
        left, right, whole = place_of(fold.left), place_of(fold.right), place_of(fold.whole)
        sources = self.maps[right], self.states[left], self.states[right]
        apply = apply_dense if self.dense else apply_diagonal
        self.states[whole] = self.recorder.call(apply, sources, self.format.state(fold.whole))
        if fold.whole.role is ScanRole.MAP:
            compose = torch.matmul if self.dense else torch.mul
            maps = self.maps[right], self.maps[left]
            self.maps[whole] = self.recorder.call(compose, maps, self.format.map(fold.whole))

    def fill(self, piece: ChainPiece, targets: Sequence[Rows]) -> None:
        *maps, state = targets
        for target in maps:
            target.copy_(self.maps[place_of(piece)])
        state.copy_(self.states[place_of(piece)])

    def take(self, transfer: Moved, tensors: Sequence[Rows]) -> None:
        place = place_of(transfer.piece)
        *maps, self.states[place] = tensors
        for rows in maps:
            self.maps[place] = rows

    def finish(self) -> list[Rows]:
        entered = [self.states[place_of(piece)] for piece in self.ends.entered]
        return [*entered, *(self.maps[place_of(piece)] for piece in self.kept)]


class GradientsWalk(PlanWalk):
    """Backward. Inputs are gradients of the states that enter segments, and the M that forward kept; results gradients
    of the states that leave segments which are followed by another."""

    def __init__(self, plan: ScanPlan, rank: int, form: StateFormat) -> None:
        super().__init__(plan.steps(rank, "backward"), rank, form)
        self.format, self.dense = form, bool(form.sizes.dense)
        self.ends = ends_of(plan, rank)
        self.gradients: dict[Place, list[Rows]] = {}
        for piece in self.ends.entered:
            self._add(piece, self.recorder.new(form.state(piece), form.dtype))
        self.maps = {place_of(piece): self.recorder.new(form.map(piece), form.dtype) for piece in plan.kept(rank)}

    def prepare(self, step: PlanStep) -> None:
        for fold in step.computes:
            self._take_apart(fold)

    def compute(self, compute: Fold) -> None:
        """Folds are taken apart before messages are packed."""

    def _take_apart(self, fold: Fold) -> None:
        whole = self._total(fold.whole)
        turned = apply_dense_transposed if self.dense else torch.mul
        sources = self.maps[place_of(fold.right)], whole
        self._add(fold.left, self.recorder.call(turned, sources, self.format.state(fold.left)))
        self._add(fold.right, whole)

    def _add(self, piece: ChainPiece, rows: Rows) -> None:
        self.gradients.setdefault(place_of(piece), []).append(rows)

    def _total(self, piece: ChainPiece) -> Rows:
        """All that came for a piece, added up."""
        parts = self.gradients.pop(place_of(piece))
        if len(parts) == 1:
            return parts[0]
        total = self.recorder.new(self.format.state(piece), self.format.dtype)
        _sum_into(total, parts)
        return total

    def fill(self, piece: ChainPiece, targets: Sequence[Rows]) -> None:
        _sum_into(targets[0], self.gradients.pop(place_of(piece)))

    def take(self, transfer: Moved, tensors: Sequence[Rows]) -> None:
        self._add(transfer.piece, tensors[0])

    def finish(self) -> list[Rows]:
        return [self._total(piece) for piece in self.ends.left]


def _sum_into(target: Rows, parts: Sequence[Rows]) -> None:
    target.copy_(parts[0])
    for part in parts[1:]:
        target.add_(part)


def apply_dense(m: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The state that leaves, of the one that enters: M S + U."""
    return torch.matmul(m, left).add_(right)


def apply_diagonal(m: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.addcmul(right, m, left)


def apply_dense_transposed(m: Tensor, gradient: Tensor) -> Tensor:
    return torch.matmul(m.mT, gradient)


_programs: WeakKeyDictionary[ScanPlan, dict[tuple[int, str], FlatProgram]] = WeakKeyDictionary()


def scan(plan: ScanPlan, rank: int, direction: str, inputs: Sequence[Tensor], like: Tensor) -> Program[list[Tensor]]:
    """One rank's run of a scan plan: its walk says what inputs and results are. They have the dtype and device of
    `like`: a rank may have no inputs and still take part."""
    known = _programs.setdefault(plan, {})
    if (rank, direction) not in known:
        walk = StatesWalk if direction == "forward" else GradientsWalk
        known[rank, direction] = walk(plan, rank, StateFormat(plan.sizes, like.dtype)).program()
    program = known[rank, direction]
    memory = memory_for(program, like.device)
    memory.tensors[: len(inputs)] = list(inputs)
    yield from program.run(memory, _nothing_to_launch, direction, rank)
    return [_own(memory, rows) for rows in program.results]


def _own(memory: Memory, rows: Rows) -> Tensor:
    """A result in memory of its own: a part of a message would keep all messages of its step alive."""
    part = part_of(memory, rows)
    return part.clone() if rows.buffer.inside is not None else part


def _nothing_to_launch(launch: Launched, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:  # noqa: ARG001
    raise AssertionError("a scan launches no attention")
