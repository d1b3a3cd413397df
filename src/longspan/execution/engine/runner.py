"""The one runner: walks a rank's steps, whatever planner made them. Forward and backward fill in what a step does.

What the rank holds is kept in a `TokenStore`; messages are handed to a transport by yielding them (see
`transports.Program`), so that the same code runs in loopback and on a process group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.execution.engine.buffers import Buffers
from longspan.execution.engine.observe import mark
from longspan.execution.engine.tiles import tiles_for
from longspan.execution.engine.token_store import RowTables, TokenStore, gather, laid_out
from longspan.execution.engine.transports import Exchange, Program
from longspan.execution.engine.wire import Format
from longspan.execution.kernels.contract import Kernel, TileWork
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


_tables: WeakKeyDictionary[Plan, RowTables] = WeakKeyDictionary()


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


class Runner(ABC):
    """One rank's run in one direction."""

    direction = "forward"

    def __init__(self, job: Job, device: torch.device, captured: Sequence[Tensor] = ()) -> None:
        self.job, self.sizes, self.form, self.device = job, job.plan.sizes, job.format, device
        self.tables = _tables.setdefault(job.plan, RowTables())
        self.steps = job.plan.steps(job.rank, self.direction)
        self.never = len(self.steps) + 2
        self.num_computes = 0
        self.held: dict[Role, list[tuple[int, TokenStore]]] = {}
        self.totals = Totals(captured)
        self.buffers = Buffers()

    # -- what a direction fills in ----------------------------------------------------------------------------------

    @abstractmethod
    def compute(self, compute: Compute) -> None:
        """Works on the pairs of one compute."""

    def fill(self, piece: Piece, targets: Sequence[Tensor]) -> None:
        """Writes a piece to be sent into the tensors of a message."""
        source, target = self.get(piece), self.store(piece, targets)
        source.copy_to(target, self.tables.moves(source.runs, target.runs))

    def arrived(self, transfer: Transfer, rows: TokenStore) -> None:
        self.hold(transfer.piece.role, rows, transfer.until)

    def work(self, compute: Compute, q: TokenStore, kv: TokenStore) -> TileWork:
        """The compute as tiles of local rows, with its pairs where more than bands matters.

        To be asked once for each compute, in their order.
        """
        self.num_computes += 1
        which = (self.job.rank, self.direction, self.num_computes)
        plane = self.job.plan.mask.plane(q.batch.start, q.heads.start)
        tiles = tiles_for(self.job.plan, which, compute, plane, q, kv)
        pairs = None
        if self.job.scoring is not None or plane.predicate is not None:
            where = TilePositions.of(q.batch, q.heads, q.positions(), kv.positions(), self.device)
            known = self.job.plan.mask.known
            pairs = TilePairs(where, self.job.scoring, plane.predicate, self.totals, known)
        k, v = kv.tensors
        return TileWork(q.tensors[0], k, v, tiles, self.job.scale, pairs)

    # -- walking ----------------------------------------------------------------------------------------------------

    def walk(self) -> Program[None]:
        """Every step: start its messages, compute while they travel, take in what arrived."""
        for number, step in enumerate(self.steps):
            messages = self.tables.once(messages_of, step, self.job.rank)
            outgoing = {peer: self._packed(transfers) for peer, transfers in messages.sends.items()}
            expected = {peer: self.form.num_bytes(transfers) for peer, transfers in messages.receives.items()}
            yield Exchange(number, outgoing, expected, self.device, messages.pieces, self.buffers)
            del outgoing  # the transport lets go of the messages when they are delivered
            with mark(self.direction, self.job.rank, number):
                for compute in step.computes:
                    self.compute(compute)
            found = yield None
            self._drop_after(number)
            for peer, transfers in messages.receives.items():
                assert found is not None
                self._unpack(transfers, found.pop(peer))

    def _packed(self, transfers: list[Transfer]) -> Tensor:
        message = self.buffers.take(self.form.num_bytes(transfers), self.device)
        offset = 0
        for t in transfers:
            offset = self.form.pack(t.piece, message, offset, partial(self.fill, t.piece))
        return message

    def _unpack(self, transfers: list[Transfer], message: Tensor) -> None:
        offset = 0
        for t in transfers:
            tensors, offset = self.form.tensors(t.piece, message, offset)
            self.arrived(t, self.store(t.piece, tensors))

    # -- holding ----------------------------------------------------------------------------------------------------

    def own(self, role: Role, tensors: Sequence[Tensor]) -> TokenStore:
        """Holds the rank's own shard of a role for good."""
        heads = self.sizes.kv_heads if role is Role.KV else self.sizes.q_heads
        runs = self.tables.once(own_runs, self.job.plan.layout, self.job.rank)
        rows = TokenStore(runs, Span(0, heads), Span(0, self.sizes.batch), tuple(tensors))
        self.hold(role, rows, self.never)
        return rows

    def store(self, piece: Piece, tensors: Sequence[Tensor]) -> TokenStore:
        """Tensors that have the piece's rows in its order."""
        return TokenStore(self.tables.runs(piece), piece.heads, self.form.batch(piece), tuple(tensors))

    def hold(self, role: Role, rows: TokenStore, until: int) -> None:
        self.held.setdefault(role, []).append((until, rows))

    def get(self, piece: Piece) -> TokenStore:
        """The piece's rows, from what is held."""
        return gather([rows for _, rows in self.held.get(piece.role, [])], piece, self.form.batch(piece), self.tables)

    def _drop_after(self, step: int) -> None:
        for role, stores in self.held.items():
            self.held[role] = [(until, rows) for until, rows in stores if until > step]
