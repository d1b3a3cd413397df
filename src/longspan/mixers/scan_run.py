"""One call of a recurrence over ranks: each rank computes its segments, and a scan plan passes states between them.

Forward: the maps of segments that have successors are inputs of the scan, which returns the entering states; with these
the rank computes its output. Backward: autograd runs through the kernel's graph, once for the gradient of entering
states (without later segments), then, after the transposed scan, with the gradient of leaving states as well. `Tail`
connects autograd and the scan: it is the last node after output and leaving states, so it runs first in backward, and
has the second gradient ready when autograd continues.

    tokens ──► kernel ──► out ─────► Tail ──► out
                 ▲  └──► leaving ──►  │
    entering ────┘ ◄ ─ ─ gradient ─ ─ ┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from longspan.derivatives import FirstDerivative
from longspan.device_tables import Copied
from longspan.layouts.layout import to_device
from longspan.mixers.scan_reference import ScanKernel, ScanWork, Segments
from longspan.planning.scan_plan import ScanPlan
from longspan.planning.scan_steps import ChainPiece, Fold, ScanRole, StateSizes
from longspan.planning.steps import Moved, PlanStep
from longspan.run.program import RankProgram, memory_for, part_of
from longspan.run.recorder import Buffer, Launched, Recorder, Rows
from longspan.run.transports import Program
from longspan.run.walk import PlanWalk, build_once
from longspan.spans import Ints, steps_within

# -- Walking a rank's steps of a scan plan: folds, and their transposes in backward ------------------------------------
# A state is (batch rows, heads, K, V), as rows of attention are (batch rows, heads, tokens, features), so messages,
# buffers and programs are the same.


Place = tuple[int, int, int]
"""A chain, and the range of its segments: first, end."""


@dataclass(frozen=True)
class StateFormat:
    """The tensors of a piece, and their layout in a message."""

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
        """Return M, if it is a map, and U or its gradient, and the offset of the next piece."""
        shapes = [self.map(piece)] if piece.role is ScanRole.MAP else []
        tensors: list[Rows] = []
        for shape in (*shapes, self.state(piece)):
            tensors.append(recorder.new(shape, self.dtype, inside=message, offset=offset))
            offset += tensors[-1].buffer.num_bytes
        return tensors, offset


def place_of(piece: ChainPiece) -> Place:
    return piece.chain, piece.start, piece.stop


@dataclass(frozen=True)
class Ends:
    """A rank's segments in a scan: those that a state enters, and those whose state is needed."""

    entered: tuple[ChainPiece, ...]
    """[0:i) of every segment i > 0, by slot."""
    left: tuple[ChainPiece, ...]
    """[i:i+1) of every segment that is not the last of its chain."""


def ends_of(plan: ScanPlan, rank: int) -> Ends:
    lengths = [len(ranks) for ranks in plan.chains.ranks()]
    batches = plan.chains.batches
    mine = [(chain, place) for chain, place, _, _ in plan.chains.of_rank(rank).tolist()]
    return Ends(
        tuple(ChainPiece.of(chain, 0, place, batches[chain]) for chain, place in mine if place),
        tuple(ChainPiece.of(c, i, i + 1, batches[c]) for c, i in mine if i + 1 < lengths[c]),
    )


class StatesWalk(PlanWalk):
    """The forward walk. Inputs are M (none at a document's begin) and U of every segment that is followed by another;
    results are the states that enter segments, and then the M that backward needs."""

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
        """Do nothing: folds are computed before messages are packed."""

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
    """The backward walk. Inputs are gradients of the states that enter segments, and the M that forward kept; results
    are gradients of the states that leave segments which are followed by another."""

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
            self._split(fold)

    def compute(self, compute: Fold) -> None:
        """Do nothing: folds are split before messages are packed."""

    def _split(self, fold: Fold) -> None:
        whole = self._total(fold.whole)
        apply = apply_dense_transposed if self.dense else torch.mul
        sources = self.maps[place_of(fold.right)], whole
        self._add(fold.left, self.recorder.call(apply, sources, self.format.state(fold.left)))
        self._add(fold.right, whole)

    def _add(self, piece: ChainPiece, rows: Rows) -> None:
        self.gradients.setdefault(place_of(piece), []).append(rows)

    def _total(self, piece: ChainPiece) -> Rows:
        """Return the sum of all gradients of a piece."""
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
    """Return the state that leaves, M S + U."""
    return torch.matmul(m, left).add_(right)


def apply_diagonal(m: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.addcmul(right, m, left)


def apply_dense_transposed(m: Tensor, gradient: Tensor) -> Tensor:
    return torch.matmul(m.mT, gradient)


def program_of(plan: ScanPlan, rank: int, direction: str) -> RankProgram:
    """Return the program of a rank's part of a scan plan, recorded at its first use."""
    walk = StatesWalk if direction == "forward" else GradientsWalk
    form = StateFormat(plan.sizes, getattr(torch, plan.dtype))
    return build_once(plan, (rank, direction), lambda: walk(plan, rank, form).program())


def scan(plan: ScanPlan, rank: int, direction: str, inputs: Sequence[Tensor], like: Tensor) -> Program[list[Tensor]]:
    """Run one rank's part of a scan plan; see the walks for its inputs and results. They have the dtype and device of
    `like`: a rank may have no inputs and still take part."""
    program = program_of(plan, rank, direction)
    memory = memory_for(program, like.device)
    memory.tensors[: len(inputs)] = list(inputs)
    yield from program.run(memory, _launch_nothing, direction, rank)
    # A part of a message is cloned: it would keep all messages of its step alive.
    parts = [(part_of(memory, rows), rows.buffer.inside is not None) for rows in program.results]
    return [part.clone() if is_inside else part for part, is_inside in parts]


def _launch_nothing(launch: Launched, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:  # noqa: ARG001
    raise AssertionError("a scan launches no attention")


# -- Segments of a rank, and autograd ----------------------------------------------------------------------------------


Carrier = Callable[[Program[list[Tensor]], str, int], tuple[list[Tensor], int]]
"""Runs a rank's program in a direction, for the forward call of this number; returns results and the call's number."""


@dataclass(frozen=True, eq=False)
class LocalSegments:
    """A rank's segments, whose states are one tensor, batch row by batch row, and which of them the scan uses."""

    segments: Segments
    entered: Ints
    """Indices of the states that enter from earlier segments."""
    left: Ints
    """Indices of the states that later segments need."""
    rows: tuple[list[int], list[int]]
    """The numbers of batch rows of each entered and each left segment."""
    first: list[bool]
    """For each left segment, whether it is the first of its document."""

    @staticmethod
    def of(plan: ScanPlan, rank: int) -> LocalSegments:
        return build_once(plan, rank, lambda: LocalSegments.build(plan, rank))

    @staticmethod
    def build(plan: ScanPlan, rank: int) -> LocalSegments:
        mine = plan.chains.of_rank(rank)
        batches = [plan.chains.batches[chain] for chain in mine[:, 0].tolist()]
        lengths = np.array([len(ranks) for ranks in plan.chains.ranks()], dtype=np.int64)
        counts = np.array([len(batch) for batch in batches], dtype=np.int64)
        starts = np.array([batch.start for batch in batches], dtype=np.int64)
        each = np.repeat(np.arange(len(mine)), counts)
        batch_row = starts[each] + steps_within(counts)
        table = np.stack((batch_row, mine[each, 2], mine[each, 3]), axis=1)
        entered, left = mine[:, 1] > 0, mine[:, 1] + 1 < lengths[mine[:, 0]]
        return LocalSegments(
            Segments(table),
            np.flatnonzero(entered[each]),
            np.flatnonzero(left[each]),
            (counts[entered].tolist(), counts[left].tolist()),
            (mine[left, 1] == 0).tolist(),
        )


@dataclass(frozen=True, eq=False)
class RankScan:
    """This rank's part of a scan plan, and the function that runs its messages."""

    plan: ScanPlan
    rank: int
    local: LocalSegments
    carry: Carrier

    def forward(self, maps: Tensor, states: Tensor) -> tuple[Tensor, list[Tensor], int]:
        """Return the states that enter, the maps that backward needs, and the call's number, from (M, U) of left
        segments."""
        inputs: list[Tensor] = []
        counts = self.local.rows[1]
        for m, u, is_first in zip(maps.split(counts), states.split(counts), self.local.first, strict=True):
            inputs += [u] if is_first else [m, u]
        results, number = self._run(inputs, "forward", 0, states)
        num = len(self.local.rows[0])
        return _concat(results[:num], states), results[num:], number

    def backward(self, gradients: Tensor, kept: Sequence[Tensor], number: int) -> Tensor:
        """Return gradients of states that leave, from those of states that enter."""
        inputs = [*gradients.split(self.local.rows[0]), *kept]
        results, _ = self._run(inputs, "backward", number, gradients)
        return _concat(results, gradients)

    def _run(self, inputs: list[Tensor], direction: str, number: int, like: Tensor) -> tuple[list[Tensor], int]:
        return self.carry(scan(self.plan, self.rank, direction, inputs, like), direction, number)


def _concat(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_empty((0, *like.shape[1:]))


def spread(kernel: ScanKernel, work: ScanWork, ranks: RankScan, *, learns: bool) -> Tensor:
    """Return the output of this rank's tokens; `learns` tells that a backward may follow."""
    if not learns:
        return _compute(kernel, work, ranks, None)[0]
    saved = Stash(keeps=kernel.name == "own")
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        # The anchor makes entering states a part of the graph even if no input requires gradients.
        anchor = torch.zeros((), device=work.tokens[0].device, requires_grad=True)
        out, leaving, entering, kept, number = _compute(kernel, work, ranks, anchor)
        out = out if out.requires_grad else out + anchor.to(out.dtype)  # no tokens
    context = ScanContext(get_gradient_edge(out), get_gradient_edge(entering), entering.shape, number, ranks, saved)
    inputs = (*work.tokens, *work.shared, *work.recurrence.captured)
    return Tail.apply(context, kept, out, leaving, *(x for x in inputs if x is not None))


def _compute(
    kernel: ScanKernel, work: ScanWork, ranks: RankScan, anchor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], int]:
    """Return output, states that later segments need, entering states, maps that backward needs, and the number of the
    call."""
    local, device = ranks.local, work.tokens[0].device
    entered, left = indices_of(ranks.plan, ranks.rank, device)
    states, kept, number = ranks.forward(*kernel.summary(replace(work, segments=local.segments.select(local.left))))
    entering = states if anchor is None else EnteringStates.apply(states, anchor)
    whole = states.new_zeros((len(local.segments), *states.shape[1:])).index_put((entered,), entering)
    out, leaving = kernel.local(work, whole)
    return out, leaving[left], entering, kept, number


def indices_of(plan: ScanPlan, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of segments that are entered and left, on the device."""
    local = LocalSegments.of(plan, rank)

    def build() -> Copied:
        return Copied(device, *(to_device(torch.from_numpy(which), device) for which in (local.entered, local.left)))

    copied = build_once(plan, (rank, device), build)
    copied.use()
    return copied.tensors


class Stash:
    """Tensors that autograd saved for a rank's computation, held by `Tail`, because backward needs them twice.

    Activation checkpointing drops them and recomputes them, which repeats this call, when they are unpacked, once in
    every pass of autograd. `Tail` unpacks them in the pass that all ranks are in, and its own pass inside of that one
    reads them here.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.packed: list[Tensor] = []
        self.unpacked: list[Tensor | None] = []
        self.keeps = keeps
        """Whether a tensor may be unpacked more than once, as in user-defined functions."""

    def pack(self, tensor: Tensor) -> int:
        self.packed.append(tensor)
        return len(self.packed) - 1

    def unpack(self, index: int) -> Tensor:
        tensor = self.unpacked[index]
        assert tensor is not None
        if not self.keeps:
            self.unpacked[index] = None
        return tensor

    def take_packed(self) -> list[Tensor]:
        packed, self.packed = self.packed, []
        return packed

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep tensors that are unpacked inside of this context."""
        keeps, self.keeps = self.keeps, True
        try:
            yield
        finally:
            self.keeps = keeps


@dataclass(frozen=True, eq=False)
class ScanContext:
    """What backward needs of its forward pass."""

    out: GradientEdge
    entering: GradientEdge
    shape: torch.Size
    """The shape of entering states."""
    number: int
    """The number of the forward call."""
    ranks: RankScan
    saved: Stash


class EnteringStates(torch.autograd.Function):
    """Entering states as a node of the graph, where gradients are read and end."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, anchor: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]  # noqa: ARG004
        return None, None


class Tail(FirstDerivative):
    """Return the output unchanged. Its backward first computes the gradient of leaving states, by the transposed scan.

    All tensors of the call are its inputs, so that every rank runs this backward whichever of them require gradients,
    also a rank without tokens, whose output depends on none.
    """

    @staticmethod
    def forward(ctx: Any, scan: ScanContext, kept: Sequence[Tensor], out: Tensor, *_: Tensor) -> Tensor:  # type: ignore[override]
        ctx.scan, ctx.num_kept = scan, len(kept)
        # At least one tensor is saved on every rank: a checkpoint recomputes, which repeats this call, when a saved
        # tensor is unpacked, and all ranks must do that at the same time.
        ctx.save_for_backward(out.new_empty(0), *kept, *scan.saved.take_packed())
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        scan: ScanContext = ctx.scan
        _, *saved = ctx.saved_tensors
        kept, scan.saved.unpacked = saved[: ctx.num_kept], saved[ctx.num_kept :]
        with scan.saved.keeping():
            (gradients,) = torch.autograd.grad(scan.out, scan.entering, dout, retain_graph=True, allow_unused=True)
        if gradients is None:  # an output that does not depend on states
            gradients = dout.new_zeros(scan.shape, dtype=getattr(torch, scan.ranks.plan.dtype))
        leaving = scan.ranks.backward(gradients, kept, scan.number)
        return None, None, dout, leaving, *(None for _ in ctx.needs_input_grad[4:])
