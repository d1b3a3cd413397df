"""Walk the steps of a rank once, record the operations on rows, and replay them in every call.

A plan is walked once per rank, direction and kernel. The result is a program (`run/program.py`), which runs on the
loopback transport and on a process group. Attention (`passes.py`), halo exchange (`halo.py`) and scans
(`mixers/scan_run.py`) share this code.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from longspan.device_tables import build_shared, keep_recent
from longspan.errors import PlanError
from longspan.kernels.contract import Group, Kernel, TileWork, Upstream
from longspan.layouts import Layout
from longspan.planning.plan import Plan
from longspan.planning.steps import Compute, Moved, Piece, PlanStep, Role
from longspan.run.moves import NO_INDEX, Memory
from longspan.run.packing import Format, PieceRuns, TokenStore, gather, have_all, laid_out
from longspan.run.program import MessageBatch, MessageBuffer, ProgramStep, RankProgram, items_of, memory_for
from longspan.run.recorder import Buffer, Launched, Recorder, Rows, Taken
from longspan.run.tiles import tiles_for
from longspan.run.transports import Program
from longspan.scoring.pipeline import NO_TOTALS, Scoring, TilePairs, TilePositions, Totals
from longspan.spans import Ints, Span

# -- Steps of any kind -------------------------------------------------------------------------------------------------
# Every step starts its messages, computes while they are in flight, and unpacks what arrived. Subclasses define pieces
# and computes: rows of attention (below), states of recurrences (`mixers/scan_run.py`).


@dataclass(frozen=True, eq=False)
class Messages:
    """One rank's transfers of one step by peer, one message each, in the order that both ends use."""

    sends: dict[int, list[Moved]]
    receives: dict[int, list[Moved]]


def messages_of(step: PlanStep, rank: int, early: int | None = None) -> Messages:
    """Return the messages of all transfers, or of those that are `early` by as many steps."""
    sends: dict[int, list[Moved]] = {}
    receives: dict[int, list[Moved]] = {}
    for t in step.transfers:
        if early is not None and t.early != early:
            continue
        if t.src == rank:
            sends.setdefault(t.dst, []).append(t)
        else:
            receives.setdefault(t.src, []).append(t)
    for lists in (sends, receives):
        for transfers in lists.values():
            transfers.sort(key=lambda t: t.piece.order)
    return Messages(sends, receives)


class PieceFormat(Protocol):
    """Where pieces lie in messages."""

    @property
    def alignment(self) -> int: ...

    def num_bytes(self, transfers: Sequence[Moved]) -> int: ...

    def tensors(self, recorder: Recorder, piece: Any, message: Buffer, offset: int) -> tuple[list[Rows], int]: ...


class PlanWalk(ABC):
    """One rank's steps in one direction."""

    def __init__(self, steps: Sequence[PlanStep], rank: int, form: PieceFormat) -> None:
        self.steps, self.rank, self.form = steps, rank, form
        self.recorder = Recorder()
        self.unaligned: list[Buffer] = []

    # -- Defined by subclasses -----------------------------------------------------------------------------------------

    def prepare(self, step: PlanStep) -> None:  # noqa: B027
        """Called before the step's messages are packed."""

    @abstractmethod
    def compute(self, compute: Any) -> None:
        """Run one of the step's computes, while messages are in flight."""

    @abstractmethod
    def fill(self, piece: Any, targets: Sequence[Rows]) -> None:
        """Write a piece into its part of a sent message."""

    @abstractmethod
    def take(self, transfer: Moved, tensors: Sequence[Rows]) -> None:
        """Take a piece that arrived, in its part of a message."""

    def drop_after(self, step: int) -> None:  # noqa: B027
        """Forget rows whose last use is this step."""

    @abstractmethod
    def finish(self) -> list[Rows]:
        """Return the results after the last step."""

    # -- Walking -------------------------------------------------------------------------------------------------------

    def program(self) -> RankProgram:
        """Record all steps: start messages, compute while they are in flight, unpack what arrived."""
        recorded: list[tuple[Any, ...]] = []
        arriving: dict[int, list[tuple[Messages, MessageBuffer]]] = {}  # by the step that waits for them
        for number, step in enumerate(self.steps):
            self.prepare(step)
            batches: list[MessageBatch] = []
            for early in sorted({0, *(t.early for t in step.transfers)}):
                messages = messages_of(step, self.rank, early)
                sends = self._message_buffer(messages.sends) if messages.sends else None
                if sends is not None:
                    for peer, transfers in messages.sends.items():
                        offset, _ = sends.places[peer]
                        for t in transfers:
                            offset = self._pack_piece(t.piece, sends.buffer, offset)
                # Messages with the same last use share a buffer.
                lifetimes: dict[int, dict[int, list[Moved]]] = {}
                for peer, transfers in messages.receives.items():
                    lifetimes.setdefault(max(t.until for t in transfers), {})[peer] = transfers
                receives = [self._message_buffer(lists) for lists in lifetimes.values()]
                batches.append(MessageBatch(number + early, sends, receives))
                arriving.setdefault(number + early, []).extend((messages, message) for message in receives)
            pack, unaligned = self.recorder.take_log(), self._take_unaligned()
            for compute in step.computes:
                self.compute(compute)
            work = self.recorder.take_log()
            self.drop_after(number)
            for messages, message in arriving.pop(number):
                for peer, (offset, _) in message.places.items():
                    for t in messages.receives[peer]:
                        tensors, offset = self.form.tensors(self.recorder, t.piece, message.buffer, offset)
                        self.take(t, tensors)
            recorded.append((pack, batches, work, self.recorder.take_log(), unaligned))
        results = self.finish()
        # Operations are grouped last, when buffers of states have their final size.
        end = items_of(self.recorder.take_log())
        steps = [
            ProgramStep(items_of(pack), batches, items_of(work), items_of(unpack), unaligned)
            for pack, batches, work, unpack, unaligned in recorded
        ]
        return RankProgram(steps, end, results, self.recorder.buffers, self._take_unaligned())

    def _message_buffer(self, lists: dict[int, list[Moved]]) -> MessageBuffer:
        """Allocate the messages of these transfers in one buffer, each aligned for operations on rows."""
        places: dict[int, tuple[int, int]] = {}
        offset, step = 0, self.form.alignment
        for peer, transfers in lists.items():
            size = self.form.num_bytes(transfers)
            places[peer] = offset, size
            offset = -(-(offset + size) // step) * step
        return MessageBuffer(self.recorder.message(offset), places)

    def _pack_piece(self, piece: Any, message: Buffer, offset: int) -> int:
        targets, offset = self.form.tensors(self.recorder, piece, message, offset)
        self.unaligned += [rows.buffer for rows in targets if rows.buffer.is_unaligned]
        self.fill(piece, targets)
        return offset

    def _take_unaligned(self) -> list[Buffer]:
        unaligned, self.unaligned = self.unaligned, []
        return unaligned


# -- Rows of attention -------------------------------------------------------------------------------------------------


class Task(Protocol):
    """What one rank runs: a plan, its rank, and the dtype of its rows."""

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
    """The attention of one rank: a plan, its rank, a kernel, a scale, and changes to scores."""

    plan: Plan
    rank: int
    kernel: Kernel
    scale: float
    dtype: torch.dtype
    scoring: Scoring | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.scale < math.inf:
            raise PlanError(
                f"scale must be > 0 and finite, but got {self.scale}. For another factor, multiply q by it and pass"
                f" scale=1.0."
            )

    @property
    def format(self) -> Format:
        return Format(self.plan.sizes, self.dtype)


def own_runs(layout: Layout, rank: int) -> Ints:
    return laid_out(layout.span_table(rank))


_runs: WeakKeyDictionary[Plan, dict[int, PieceRuns]] = WeakKeyDictionary()
"""Runs of pieces, by rank."""

Result = tuple[Group, list[Rows]]
"""Tiles, and a kernel's results for them."""


class RowWalk(PlanWalk):
    """One rank's steps in one direction, whose pieces are rows of tokens."""

    direction = "forward"

    def __init__(self, job: Task) -> None:
        super().__init__(job.plan.steps(job.rank, self.direction), job.rank, job.format)
        self.job, self.sizes, self.form = job, job.plan.sizes, job.format
        self.never = len(self.steps) + 2
        self.held: dict[Role, list[tuple[int, TokenStore]]] = {}
        of_ranks = _runs.setdefault(job.plan, {})
        if job.rank not in of_ranks:
            of_ranks[job.rank] = PieceRuns(own_runs(job.plan.layout, job.rank))
        self._runs = of_ranks[job.rank]
        self.own_runs = self._runs.own

    # -- Defined by forward and backward -------------------------------------------------------------------------------

    def fill(self, piece: Piece, targets: Sequence[Rows]) -> None:
        gather(self._stores(piece), self.store(piece, targets), piece)

    def take(self, transfer: Moved, tensors: Sequence[Rows]) -> None:
        self.store_arrival(transfer, self.store(transfer.piece, tensors))

    def store_arrival(self, transfer: Moved, rows: TokenStore) -> None:
        self.hold(transfer.piece.role, rows, transfer.until)

    # -- Stored rows ---------------------------------------------------------------------------------------------------

    def own(self, role: Role) -> TokenStore:
        """Hold the rank's own shard of a role until the end: inputs of the program, one per tensor of the role."""
        heads = self.sizes.kv_heads if role is Role.KV else self.sizes.q_heads
        shape = (self.sizes.batch, heads, int(self.job.plan.layout.num_slots(self.job.rank)))
        tensors = [self.recorder.new((*shape, dim), dtype) for dim, dtype in self.form.fields(role)]
        rows = TokenStore(self.own_runs, Span(0, heads), Span(0, self.sizes.batch), tuple(tensors))
        self.hold(role, rows, self.never)
        return rows

    def store(self, piece: Piece, tensors: Sequence[Rows]) -> TokenStore:
        """Return the tensors of a piece, in its order of rows, as a store."""
        return TokenStore(self.runs(piece), piece.heads, self.form.batch(piece), tuple(tensors))

    def runs(self, piece: Piece) -> Ints:
        """Return the runs of a piece, the same array for the same rows."""
        return self._runs.of(piece.spans)

    def hold(self, role: Role, rows: TokenStore, until: int) -> None:
        self.held.setdefault(role, []).append((until, rows))

    def get(self, piece: Piece) -> TokenStore:
        """Return the piece's rows: a view of one store that has them all, or a copy from several."""
        stores = self._stores(piece)
        batch = self.form.batch(piece)
        if stores and have_all(stores[0].runs, self.runs(piece)):
            return TokenStore(stores[0].runs, piece.heads, batch, stores[0].part(piece.heads, batch))
        shape = (len(batch), len(piece.heads), piece.num_tokens)
        store = self.store(
            piece, [self.recorder.new((*shape, dim), dtype) for dim, dtype in self.form.fields(piece.role)]
        )
        gather(stores, store, piece)
        return store

    def _stores(self, piece: Piece) -> list[TokenStore]:
        """Return the held stores of these heads and batch rows, one that has all rows of the piece first."""
        batch, wanted = self.form.batch(piece), self.runs(piece)
        stores = [rows for _, rows in self.held.get(piece.role, []) if rows.has(piece.heads, batch)]
        whole = next((number for number, rows in enumerate(stores) if have_all(rows.runs, wanted)), 0)
        return stores[whole : whole + 1] + stores[:whole] + stores[whole + 1 :]

    def drop_after(self, step: int) -> None:
        for role, stores in self.held.items():
            self.held[role] = [(until, rows) for until, rows in stores if until > step]


class Walk(RowWalk):
    """The steps of attention, whose computes are kernel launches."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.kernel = job.kernel

    def launch(self, compute: Compute, inputs: Sequence[Rows], q: TokenStore, kv: TokenStore) -> Iterator[Result]:
        """Record attention over the compute's tiles; yield the tiles and rows of each result."""
        plane = self.job.plan.mask.plane(q.batch.start, q.heads.start)
        tiles = tiles_for(self.job.plan, compute, plane, q, kv)
        (batch, _, num_q, _), num_k = inputs[0].shape, inputs[1].shape[2]
        launch = Launched(tuple(inputs), tiles, (replace(q, tensors=()), replace(kv, tensors=())), q.batch, q.heads)
        if (index_arrays := getattr(self.kernel, "index_arrays", None)) is not None:
            launch = replace(launch, index_arrays=partial(index_arrays, tiles, num_q, num_k, batch))
        groups = self.kernel.groups(tiles, num_q, num_k)
        self.recorder.log += [launch] if groups else []
        for number, group in enumerate(groups):
            results = [self.recorder.new(shape, None) for shape in self.result_shapes(group, inputs)]
            taken = Taken(launch, number, tuple(rows.buffer for rows in results), number == len(groups) - 1)
            self.recorder.log.append(taken)
            yield group, results

    @abstractmethod
    def result_shapes(self, group: Group, inputs: Sequence[Rows]) -> list[tuple[int, int, int, int]]:
        """Return the shapes of a kernel's results for a group of tiles."""


T = TypeVar("T")
_built: WeakKeyDictionary[Any, dict[Any, tuple[object, Any]]] = WeakKeyDictionary()
"""Recorded programs and tables, by plan."""
_building = threading.RLock()
"""Held while a program is recorded: a call waits for a thread that prepares its plan instead of recording it again."""
os.register_at_fork(after_in_child=_building._at_fork_reinit)  # type: ignore[attr-defined]


def build_once(plan: Any, key: Any, build: Callable[[], T], alive: object = None) -> T:
    """Return the result of `build` for a plan and key, built at its first use. `alive` is kept alive with it."""
    entries = _built.setdefault(plan, {})
    entry = entries.get(key)
    if entry is None:
        with _building:
            entry = entries.get(key)  # another thread may have built it
            if entry is None:
                value, can_cache = build_shared(build)
                entry = alive, value
                if can_cache:
                    entries[key] = entry
    return entry[1]


def record_once(
    task: Task, direction: str, computed_by: tuple[Any, object], saves: bool, walk: Callable[[], RowWalk]
) -> RankProgram:
    """Return the program of a plan, rank and direction, recorded at its first use. `program_key` is the rest of its
    key, and an object to keep alive with it."""
    name, alive = computed_by
    key = task.rank, direction, saves, task.dtype, name
    return build_once(task.plan, key, lambda: walk().program(), alive)


class RowRun(ABC):
    """One rank's run in one direction, on tensors: replays the program recorded for its plan."""

    direction: str
    index: Mapping[int, Mapping[object, Tensor]] = NO_INDEX
    """Index arrays of launches on the device, by the launch's id."""

    def __init__(self, task: Task, inputs: Sequence[Tensor]) -> None:
        self.task, self.inputs, self.device = task, inputs, inputs[0].device

    @abstractmethod
    def walk(self, *, saves: bool) -> RowWalk:
        """Return the walk that records the program."""

    @property
    @abstractmethod
    def program_key(self) -> tuple[Any, object]:
        """The key of a program among those of one plan, rank and direction, and an object to keep alive with it."""

    def attend(self, launch: Launched, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        raise AssertionError(f"{launch!r} of {len(tensors)} tensors in a run that launches nothing")

    def run(self, *, saves: bool = False) -> Program[list[Tensor]]:
        """Run the program and return its results."""
        program, memory = self.start(saves)
        alone = self.task.plan.layout.world_size == 1
        yield from program.run(memory, self.attend, self.direction, self.task.rank, alone=alone)
        return self.results(program, memory)

    def start(self, saves: bool) -> tuple[RankProgram, Memory]:
        """Return the program and the memory of this run with its inputs."""
        program = record_once(self.task, self.direction, self.program_key, saves, lambda: self.walk(saves=saves))
        memory = memory_for(program, self.device)
        self.index = memory.index
        memory.tensors[: len(self.inputs)] = self.inputs
        del self.inputs
        return program, memory

    def results(self, program: RankProgram, memory: Memory) -> list[Tensor]:
        """Return results in memory of their own: a part of a message would keep all messages of its step alive."""
        results: list[Tensor] = []
        for number, parts in program.result_cuts:
            part = memory.narrow(number, parts)
            is_message = memory.buffers[number].inside is not None
            results.append(part.clone() if is_message and part.dtype == self.task.dtype else part)  # else converted
        return results


@keep_recent(least=16)
def tile_positions(batch: Span, heads: Span, q_runs: bytes, kv_runs: bytes, device: torch.device) -> TilePositions:
    """Return the positions of queries and keys on a device, for mask and score functions. Cached by the bytes of their
    runs: both directions, and all layers, have the same."""
    tables = (np.frombuffer(runs, dtype=np.int64).reshape(-1, 3) for runs in (q_runs, kv_runs))
    q, kv = (TokenStore(table, heads, batch, ()).positions() for table in tables)
    return TilePositions.of(batch, heads, q, kv, device)


class Run(RowRun):
    """A run of attention: launches go to a kernel."""

    def __init__(self, job: Job, inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        self.task = self.job = job
        self.inputs, self.device = inputs, inputs[0].device
        self.totals = Totals(captured) if captured else NO_TOTALS

    @property
    def program_key(self) -> tuple[Any, object]:
        return id(self.job.kernel), self.job.kernel  # kept alive, so that no other kernel gets its id

    def attend(self, launch: Launched, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Start a launch; yield its results one by one."""
        work = self.work(launch, tensors)
        if len(tensors) == 3:
            return self.job.kernel.forward(work)
        dout, out, lse, delta = tensors[3:]
        return self.job.kernel.backward(work, Upstream(dout, out, lse.squeeze(3), delta.squeeze(3)))

    def work(self, launch: Launched, tensors: Sequence[Tensor]) -> TileWork:
        """Return the launch as a kernel takes it, with mask and score functions where bands are not all."""
        q, k, v = tensors[:3]
        pairs: TilePairs | None = None
        if self.job.scoring is not None or not self.job.plan.is_structured:
            mask = self.job.plan.mask
            predicate = mask.plane(launch.batch.start, launch.heads.start).predicate
            if self.job.scoring is not None or predicate is not None:
                runs = (store.runs.tobytes() for store in launch.stores)
                positions = tile_positions(launch.batch, launch.heads, *runs, self.device)
                pairs = TilePairs(positions, self.job.scoring, predicate, self.totals, mask.known)
        return TileWork(q, k, v, launch.tiles, self.job.scale, pairs, self.index.get(id(launch)))
