"""Walk a rank's steps once and record what is to be done to rows.

A plan is walked once for each rank, direction and kernel. The result is a program (`run/program.py`), which runs on the
loopback transport and on a process group. All planners, attention, halo exchange and scans share this code. `passes.py`
defines what a step of attention does forward and backward.
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
from longspan.kernels.contract import Group, Kernel, TileWork, Upstream
from longspan.layouts import Layout
from longspan.planning.plan import Plan
from longspan.planning.steps import Compute, Moved, Piece, PlanStep, Role
from longspan.run.moves import Memory
from longspan.run.packing import Format, TokenStore, gather, have_all, laid_out, runs_of
from longspan.run.program import FlatProgram, FlatStep, Mail, items_of, memory_for
from longspan.run.recorder import Buffer, Launched, Recorder, Rows, Taken
from longspan.run.tiles import tiles_for
from longspan.run.transports import Program
from longspan.scoring.captured import NO_TOTALS, Totals
from longspan.scoring.pipeline import Scoring, TilePairs, TilePositions
from longspan.spans import Ints, Span

# -- Steps of any kind -------------------------------------------------------------------------------------------------
# Every step starts its messages, computes while they travel, and takes in what arrived. Subclasses define pieces and
# computes: rows of attention (below), states of recurrences (`mixers/scan_run.py`).


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

    # -- Defined by subclasses -----------------------------------------------------------------------------------------

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

    # -- Walking -------------------------------------------------------------------------------------------------------

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


# -- Rows of attention -------------------------------------------------------------------------------------------------


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

    # -- Defined by forward and backward -------------------------------------------------------------------------------

    def fill(self, piece: Piece, targets: Sequence[Rows]) -> None:
        gather(self._stores(piece), self.store(piece, targets), repr(piece))

    def take(self, transfer: Moved, tensors: Sequence[Rows]) -> None:
        self.arrived(transfer, self.store(transfer.piece, tensors))

    def arrived(self, transfer: Moved, rows: TokenStore) -> None:
        self.hold(transfer.piece.role, rows, transfer.until)

    # -- Stored rows ---------------------------------------------------------------------------------------------------

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
        program, memory = self.start(saves)
        alone = self.task.plan.layout.world_size == 1
        yield from program.run(memory, self.attend, self.direction, self.task.rank, alone=alone)
        return self.results(program, memory)

    def start(self, saves: bool) -> tuple[FlatProgram, Memory]:
        """The program, and memory with its inputs."""
        program = self._recorded(saves)
        memory = memory_for(program, self.device)
        memory.tensors[: len(self.inputs)] = self.inputs
        del self.inputs
        return program, memory

    def results(self, program: FlatProgram, memory: Memory) -> list[Tensor]:
        """Results in memory of their own: a part of a message would keep all messages of its step alive."""
        made: list[Tensor] = []
        for number, parts in program.found:
            part = memory.cut(number, parts)
            is_message = memory.buffers[number].inside is not None
            made.append(part.clone() if is_message and part.dtype == self.task.dtype else part)  # others are converted
        return made

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
        self.task = self.job = job
        self.inputs, self.device = inputs, inputs[0].device
        self.totals = Totals(captured) if captured else NO_TOTALS

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
        is_plain = self.job.scoring is None and self.job.plan.is_structured
        return TileWork(q, k, v, launch.tiles, self.job.scale, None if is_plain else self._pairs(launch))

    def _pairs(self, launch: Launched) -> TilePairs | None:
        """What a kernel may ask about pairs, where more than bands matters."""
        mask = self.job.plan.mask
        predicate = mask.plane(launch.batch.start, launch.heads.start).predicate
        if self.job.scoring is None and predicate is None:
            return None
        if self.device not in launch.known:
            q, kv = (store.positions() for store in launch.stores)
            launch.known[self.device] = TilePositions.of(launch.batch, launch.heads, q, kv, self.device)
        return TilePairs(launch.known[self.device], self.job.scoring, predicate, self.totals, mask.known)
