"""The one runner: walks a rank's steps, whatever planner made them, and notes what is to be done to rows.

A plan is walked once for each rank, direction and kernel; what was noted becomes a program (`flat.program`), and that
is what runs, in loopback and on a process group. Forward and backward fill in what a step does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.execution.engine.flat.memory import Memory
from longspan.execution.engine.flat.program import FlatProgram, memory_for
from longspan.execution.engine.flat.recorder import Launched, Rows, Taken
from longspan.execution.engine.tiles import tiles_for
from longspan.execution.engine.token_store import TokenStore, gather, have_all, laid_out, runs_of
from longspan.execution.engine.transports import Program
from longspan.execution.engine.walk import PlanWalk
from longspan.execution.engine.wire import Format
from longspan.execution.kernels.contract import Group, Kernel, TileWork, Upstream
from longspan.execution.scoring.captured import Totals
from longspan.execution.scoring.pairs import TilePairs, TilePositions
from longspan.execution.scoring.pipeline import Scoring
from longspan.layouts import Layout
from longspan.schedules.plan import Plan
from longspan.schedules.steps import Compute, Moved, Piece, Role
from longspan.span import Ints, Span


class Task(Protocol):
    """What any run of one rank is about: a plan, the rank's place in it, and the dtype of its rows."""

    @property
    def plan(self) -> Plan: ...
    @property
    def rank(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def format(self) -> Format: ...


@dataclass(frozen=True)
class Job:
    """What one rank runs: a plan, its place in it, a kernel, a scale, and what happens to scores."""

    plan: Plan
    rank: int
    kernel: Kernel
    scale: float
    dtype: torch.dtype
    scoring: Scoring | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise PlanError(f"scale = {self.scale} was given. It multiplies scores: one finite number.")

    @property
    def format(self) -> Format:
        return Format(self.plan.sizes, self.dtype)


def own_runs(layout: Layout, rank: int) -> Ints:
    return laid_out(layout.span_table(rank))


Result = tuple[Group, list[Rows]]
"""Tiles, and what a kernel gives for them."""


class RowWalk(PlanWalk):
    """One rank's steps in one direction, walked with rows that stand for tensors, whatever is computed with them."""

    direction = "forward"

    def __init__(self, job: Task) -> None:
        super().__init__(job.plan.steps(job.rank, self.direction), job.rank, job.format)
        self.job, self.sizes, self.form = job, job.plan.sizes, job.format
        self.never = len(self.steps) + 2
        self.held: dict[Role, list[tuple[int, TokenStore]]] = {}
        self.own_runs = own_runs(job.plan.layout, job.rank)
        self._runs: dict[tuple[Span, ...], Ints] = {}

    # -- what a direction fills in ----------------------------------------------------------------------------------

    def fill(self, piece: Piece, targets: Sequence[Rows]) -> None:
        gather(self._stores(piece), self.store(piece, targets), repr(piece))

    def take(self, transfer: Moved, tensors: Sequence[Rows]) -> None:
        self.arrived(transfer, self.store(transfer.piece, tensors))

    def arrived(self, transfer: Moved, rows: TokenStore) -> None:
        self.hold(transfer.piece.role, rows, transfer.until)

    # -- holding ----------------------------------------------------------------------------------------------------

    def own(self, role: Role) -> TokenStore:
        """Holds the rank's own shard of a role for good: inputs of the program, one for each tensor of the role."""
        heads = self.sizes.kv_heads if role is Role.KV else self.sizes.q_heads
        shape = (self.sizes.batch, heads, int(self.job.plan.layout.num_slots(self.job.rank)))
        tensors = [self.recorder.new((*shape, dim), dtype) for dim, dtype in self.form.fields(role)]
        rows = TokenStore(self.own_runs, Span(0, heads), Span(0, self.sizes.batch), tuple(tensors))
        self.hold(role, rows, self.never)
        return rows

    def store(self, piece: Piece, tensors: Sequence[Rows]) -> TokenStore:
        """Tensors that have the piece's rows in its order."""
        return TokenStore(self.runs(piece), piece.heads, self.form.batch(piece), tuple(tensors))

    def runs(self, piece: Piece) -> Ints:
        """Those of tensors that have the piece's rows in its order; the same array for the same rows."""
        if piece.spans not in self._runs:
            self._runs[piece.spans] = runs_of(piece.spans)
        return self._runs[piece.spans]

    def hold(self, role: Role, rows: TokenStore, until: int) -> None:
        self.held.setdefault(role, []).append((until, rows))

    def get(self, piece: Piece) -> TokenStore:
        """The piece's rows, from what is held: of one store that has them all, or copied together."""
        stores = self._stores(piece)
        batch = self.form.batch(piece)
        if stores and have_all(stores[0].runs, self.runs(piece)):
            return TokenStore(stores[0].runs, piece.heads, batch, stores[0].part(piece.heads, batch))
        shape = (len(batch), len(piece.heads), piece.num_tokens)
        made = [self.recorder.new((*shape, dim), dtype) for dim, dtype in self.form.fields(piece.role)]
        store = self.store(piece, made)
        gather(stores, store, repr(piece))
        return store

    def _stores(self, piece: Piece) -> list[TokenStore]:
        """What is held for these heads and batch rows; first, if there is one, what has all rows of the piece."""
        batch, wanted = self.form.batch(piece), self.runs(piece)
        found = [rows for _, rows in self.held.get(piece.role, []) if rows.has(piece.heads, batch)]
        whole = next((number for number, rows in enumerate(found) if have_all(rows.runs, wanted)), 0)
        return found[whole : whole + 1] + found[:whole] + found[whole + 1 :]

    def drop_after(self, step: int) -> None:
        for role, stores in self.held.items():
            self.held[role] = [(until, rows) for until, rows in stores if until > step]


class Walk(RowWalk):
    """The steps of attention: what is computed are launches of a kernel."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.kernel, self.num_computes = job.kernel, 0

    def launch(self, compute: Compute, inputs: Sequence[Rows], q: TokenStore, kv: TokenStore) -> Iterator[Result]:
        """Attention over the compute's tiles: for each result, its tiles and rows. Once for each compute, in order."""
        self.num_computes += 1
        which = (self.job.rank, self.direction, self.num_computes)
        plane = self.job.plan.mask.plane(q.batch.start, q.heads.start)
        tiles = tiles_for(self.job.plan, which, compute, plane, q, kv)
        launch = Launched(tuple(inputs), tiles, (replace(q, tensors=()), replace(kv, tensors=())), q.batch, q.heads)
        groups = self.kernel.groups(tiles, inputs[0].shape[2], inputs[1].shape[2])
        self.recorder.log += [launch] if groups else []
        for number, group in enumerate(groups):
            results = [self.recorder.new(shape, None) for shape in self.result_shapes(group, inputs)]
            taken = Taken(launch, number, tuple(rows.buffer for rows in results), number == len(groups) - 1)
            self.recorder.log.append(taken)
            yield group, results

    @abstractmethod
    def result_shapes(self, group: Group, inputs: Sequence[Rows]) -> list[tuple[int, int, int, int]]:
        """What a kernel gives for a group of tiles."""


_programs: WeakKeyDictionary[Plan, dict[Any, tuple[object, object, FlatProgram]]] = WeakKeyDictionary()
"""What was recorded before. A program is the same as long as the mask's functions read the same."""


class RowRun(ABC):
    """One rank's run in one direction, on tensors: plays back what was recorded for its plan."""

    direction: str

    def __init__(self, task: Task, inputs: Sequence[Tensor]) -> None:
        self.task, self.inputs, self.device = task, inputs, inputs[0].device

    @abstractmethod
    def walk(self, *, saves: bool) -> RowWalk:
        """What is to be recorded."""

    @property
    @abstractmethod
    def computed_by(self) -> tuple[Any, object]:
        """What tells programs of one plan, rank and direction apart, and what must live as long as it does."""

    def attend(self, launch: Launched, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Starts a launch; gives its results one by one."""
        raise AssertionError(f"{launch!r} of {len(tensors)} tensors in a run that launches nothing")

    def run(self, *, saves: bool = False) -> Program[list[Tensor]]:
        """Results of the program, as they lie in memory."""
        program = self._recorded(saves)
        memory = memory_for(program, self.device)
        memory.tensors[: len(self.inputs)] = self.inputs
        del self.inputs
        yield from program.run(memory, self.attend, self.direction, self.task.rank)
        return [self._result(memory, *cut) for cut in program.found]

    def _result(self, memory: Memory, *cut: Any) -> Tensor:
        """A result in memory of its own: a part of a message would keep all messages of its step alive."""
        part = memory.cut(*cut)
        is_part = memory.buffers[cut[0]].inside is not None and part.dtype == self.task.dtype  # others are converted
        return part.clone() if is_part else part

    def _recorded(self, saves: bool) -> FlatProgram:
        """The program of this rank, from memory if it was recorded before."""
        plan, (name, alive) = self.task.plan, self.computed_by
        known = _programs.setdefault(plan, {})
        key = self.task.rank, self.direction, saves, self.task.dtype, name
        reads, _, program = known.get(key, (None, None, None))
        if program is None or reads is not plan.mask.last_reads:
            program = self.walk(saves=saves).program()
            known[key] = plan.mask.last_reads, alive, program
        return program


class Run(RowRun):
    """A run of attention: launches go to a kernel."""

    def __init__(self, job: Job, inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        super().__init__(job, inputs)
        self.job, self.totals = job, Totals(captured)

    @property
    def computed_by(self) -> tuple[Any, object]:
        return id(self.job.kernel), self.job.kernel  # held, so that no other has its id

    def attend(self, launch: Launched, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Starts a launch; gives its results one by one."""
        work = self.work(launch, tensors)
        if len(tensors) == 3:
            return self.job.kernel.forward(work)
        dout, out, lse, delta = tensors[3:]
        return self.job.kernel.backward(work, Upstream(dout, out, lse.squeeze(3), delta.squeeze(3)))

    def work(self, launch: Launched, tensors: Sequence[Tensor]) -> TileWork:
        """The launch as a kernel is given it."""
        q, k, v = tensors[:3]
        return TileWork(q, k, v, launch.tiles, self.job.scale, self._pairs(launch))

    def _pairs(self, launch: Launched) -> TilePairs | None:
        """What a kernel may ask about pairs, where more than bands matters."""
        if self.job.scoring is None and self.job.plan.is_structured:
            return None
        mask = self.job.plan.mask
        predicate = mask.plane(launch.batch.start, launch.heads.start).predicate
        if self.job.scoring is None and predicate is None:
            return None
        if self.device not in launch.known:
            q, kv = (store.positions() for store in launch.stores)
            launch.known[self.device] = TilePositions.of(launch.batch, launch.heads, q, kv, self.device)
        return TilePairs(launch.known[self.device], self.job.scoring, predicate, self.totals, mask.known)
