"""The one runner: walks a rank's steps, whatever planner made them, and notes what is to be done to rows.

A plan is walked once for each rank, direction and kernel; what was noted becomes a program (`flat.program`), and that
is what runs, in loopback and on a process group. Forward and backward fill in what a step does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.execution.engine.flat.memory import Memory
from longspan.execution.engine.flat.program import FlatProgram, FlatStep, Mail, items_of, memory_for
from longspan.execution.engine.flat.recorder import Buffer, Launched, Recorder, Rows, Taken
from longspan.execution.engine.tiles import tiles_for
from longspan.execution.engine.token_store import TokenStore, gather, have_all, laid_out, runs_of
from longspan.execution.engine.transports import Program
from longspan.execution.engine.wire import Format
from longspan.execution.kernels.contract import Group, Kernel, TileWork, Upstream
from longspan.execution.scoring.captured import Totals
from longspan.execution.scoring.pairs import TilePairs, TilePositions
from longspan.execution.scoring.pipeline import Scoring
from longspan.layouts import Layout
from longspan.schedules.plan import Plan
from longspan.schedules.steps import Compute, Piece, Role, Step, Transfer
from longspan.span import Ints, Span


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


@dataclass(frozen=True, eq=False)
class Messages:
    """One rank's transfers of one step by the peer they go to or come from, in the order in which both ends list them.

    They are one message for each peer.
    """

    sends: dict[int, list[Transfer]]
    receives: dict[int, list[Transfer]]
    pieces: dict[tuple[int, int], list[Transfer]]
    """All of them, by source and target."""


def messages_of(step: Step, rank: int) -> Messages:
    sends: dict[int, list[Transfer]] = {}
    receives: dict[int, list[Transfer]] = {}
    for t in step.transfers:
        if t.src == rank:
            sends.setdefault(t.dst, []).append(t)
        else:
            receives.setdefault(t.src, []).append(t)
    for lists in (sends, receives):
        for transfers in lists.values():
            transfers.sort(key=lambda t: (t.piece.role, t.piece.heads, t.piece.spans, t.piece.apart))
    pieces = {(rank, peer): transfers for peer, transfers in sends.items()}
    return Messages(sends, receives, pieces | {(peer, rank): transfers for peer, transfers in receives.items()})


def own_runs(layout: Layout, rank: int) -> Ints:
    return laid_out(layout.span_table(rank))


Result = tuple[Group, list[Rows]]
"""Tiles, and what a kernel gives for them."""


class Walk(ABC):
    """One rank's steps in one direction, walked with rows that stand for tensors."""

    direction = "forward"

    def __init__(self, job: Job) -> None:
        self.job, self.sizes, self.form = job, job.plan.sizes, job.format
        self.recorder = Recorder()
        self.steps = job.plan.steps(job.rank, self.direction)
        self.never = len(self.steps) + 2
        self.num_computes = 0
        self.held: dict[Role, list[tuple[int, TokenStore]]] = {}
        self.own_runs = own_runs(job.plan.layout, job.rank)
        self.loose: list[Buffer] = []
        self._runs: dict[tuple[Span, ...], Ints] = {}

    # -- what a direction fills in ----------------------------------------------------------------------------------

    @abstractmethod
    def compute(self, compute: Compute) -> None:
        """Works on the pairs of one compute."""

    @abstractmethod
    def finish(self) -> list[Rows]:
        """What the run is for, when all steps are done."""

    def fill(self, piece: Piece, targets: Sequence[Rows]) -> None:
        """Writes a piece to be sent into its part of a message."""
        gather(self._stores(piece), self.store(piece, targets), repr(piece))

    def arrived(self, transfer: Transfer, rows: TokenStore) -> None:
        self.hold(transfer.piece.role, rows, transfer.until)

    def launch(self, compute: Compute, inputs: Sequence[Rows], q: TokenStore, kv: TokenStore) -> Iterator[Result]:
        """Attention over the compute's tiles: for each result, its tiles and rows. Once for each compute, in order."""
        self.num_computes += 1
        which = (self.job.rank, self.direction, self.num_computes)
        plane = self.job.plan.mask.plane(q.batch.start, q.heads.start)
        tiles = tiles_for(self.job.plan, which, compute, plane, q, kv)
        launch = Launched(tuple(inputs), tiles, (replace(q, tensors=()), replace(kv, tensors=())), q.batch, q.heads)
        groups = self.job.kernel.groups(tiles, inputs[0].shape[2], inputs[1].shape[2])
        self.recorder.log += [launch] if groups else []
        for number, group in enumerate(groups):
            results = [self.recorder.new(shape, None) for shape in self.result_shapes(group, inputs)]
            taken = Taken(launch, number, tuple(rows.buffer for rows in results), number == len(groups) - 1)
            self.recorder.log.append(taken)
            yield group, results

    @abstractmethod
    def result_shapes(self, group: Group, inputs: Sequence[Rows]) -> list[tuple[int, int, int, int]]:
        """What a kernel gives for a group of tiles."""

    # -- walking ----------------------------------------------------------------------------------------------------

    def program(self) -> FlatProgram:
        """Every step: start its messages, compute while they travel, take in what arrived."""
        made: list[tuple[Any, ...]] = []
        self.recorder.cut()
        for number, step in enumerate(self.steps):
            messages = messages_of(step, self.job.rank)
            sends = self._mail(messages.sends) if messages.sends else None
            if sends is not None:
                self._pack(messages.sends, sends)
            pack, loose = self.recorder.cut(), self._loose()
            receives = self._receives(messages.receives)
            for compute in step.computes:
                self.compute(compute)
            work = self.recorder.cut()
            self._drop_after(number)
            for mail in receives:
                for peer, (offset, _) in mail.places.items():
                    self._unpack(messages.receives[peer], mail.buffer, offset)
            made.append((pack, sends, receives, messages.pieces, work, self.recorder.cut(), loose))
        results = self.finish()
        end = items_of(self.recorder.cut())  # and only now, because buffers of states have grown
        steps = [
            FlatStep(items_of(pack), sends, receives, pieces, items_of(work), items_of(unpack), loose)
            for pack, sends, receives, pieces, work, unpack, loose in made
            if work or self.job.plan.layout.world_size > 1  # others are in step with this rank
        ]
        return FlatProgram(steps, end, results, self.recorder.buffers, self._loose())

    def _mail(self, lists: dict[int, list[Transfer]]) -> Mail:
        """Messages with these transfers in one buffer, each on a multiple that suits operations on rows."""
        places: dict[int, tuple[int, int]] = {}
        offset, step = 0, self.form.alignment
        for peer, transfers in lists.items():
            size = self.form.num_bytes(transfers)
            places[peer] = offset, size
            offset = -(-(offset + size) // step) * step
        return Mail(self.recorder.message(offset), places)

    def _receives(self, lists: dict[int, list[Transfer]]) -> list[Mail]:
        """One buffer for all messages that are used up to the same step."""
        groups: dict[int, dict[int, list[Transfer]]] = {}
        for peer, transfers in lists.items():
            groups.setdefault(max(t.until for t in transfers), {})[peer] = transfers
        return [self._mail(group) for group in groups.values()]

    def _pack(self, lists: dict[int, list[Transfer]], mail: Mail) -> None:
        for peer, transfers in lists.items():
            offset, _ = mail.places[peer]
            for t in transfers:
                offset = self._pack_piece(t.piece, mail.buffer, offset)

    def _pack_piece(self, piece: Piece, message: Buffer, offset: int) -> int:
        targets, offset = self.form.tensors(self.recorder, piece, message, offset)
        self.loose += [rows.buffer for rows in targets if rows.buffer.is_loose]
        self.fill(piece, targets)
        return offset

    def _loose(self) -> list[Buffer]:
        loose, self.loose = self.loose, []
        return loose

    def _unpack(self, transfers: list[Transfer], message: Buffer, offset: int) -> None:
        for t in transfers:
            tensors, offset = self.form.tensors(self.recorder, t.piece, message, offset)
            self.arrived(t, self.store(t.piece, tensors))

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

    def _drop_after(self, step: int) -> None:
        for role, stores in self.held.items():
            self.held[role] = [(until, rows) for until, rows in stores if until > step]


_programs: WeakKeyDictionary[Plan, dict[Any, tuple[object, Kernel, FlatProgram]]] = WeakKeyDictionary()
"""What was recorded before. A program is the same as long as the mask's functions read the same."""


class Run(ABC):
    """One rank's run in one direction, on tensors: plays back what was recorded for its plan."""

    direction: str

    def __init__(self, job: Job, inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        self.job, self.inputs, self.device = job, inputs, inputs[0].device
        self.totals = Totals(captured)

    @abstractmethod
    def walk(self, *, saves: bool) -> Walk:
        """What is to be recorded."""

    def run(self, *, saves: bool = False) -> Program[list[Tensor]]:
        """Results of the program, as they lie in memory."""
        program = self._recorded(saves)
        memory = memory_for(program, self.device)
        memory.tensors[: len(self.inputs)] = self.inputs
        del self.inputs
        yield from program.run(memory, self.attend, self.direction, self.job.rank)
        return [self._result(memory, *cut) for cut in program.found]

    def _result(self, memory: Memory, *cut: Any) -> Tensor:
        """A result in memory of its own: a part of a message would keep all messages of its step alive."""
        part = memory.cut(*cut)
        is_part = memory.buffers[cut[0]].inside is not None and part.dtype == self.job.dtype  # others are converted
        return part.clone() if is_part else part

    def _recorded(self, saves: bool) -> FlatProgram:
        """The program of this rank, from memory if it was recorded before."""
        plan, kernel = self.job.plan, self.job.kernel
        known = _programs.setdefault(plan, {})
        key = self.job.rank, self.direction, saves, self.job.dtype, id(kernel)
        reads, _, program = known.get(key, (None, None, None))
        if program is None or reads is not plan.mask.last_reads:
            program = self.walk(saves=saves).program()
            known[key] = plan.mask.last_reads, kernel, program  # which holds the kernel, so that no other has its id
        return program

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
