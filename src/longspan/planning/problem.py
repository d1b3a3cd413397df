"""Problem: the input of a planner. Mask, layout and sizes, resolved into lanes.

A lane is a set of key/value heads (of some batch rows) whose rows travel together. Its parts are the query heads that
use them, each with one plane of the mask and the query rows that every rank computes. Usually there is one lane with
one part. Masks that differ per head or per batch row make more, and so does splitting heads over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Mask, Plane
from longspan.masks import bands as bd
from longspan.masks.plane import ByIdentity
from longspan.masks.work import Pairs, block_work, pairs_in
from longspan.planning.fetch import STAGES, Fetch, by_taker, num_stages, plan_fetch, without
from longspan.planning.steps import Compute, Piece, Role, Sizes
from longspan.spans import Ints, Span, as_spans, by_position, join, union

X = TypeVar("X")

MAX_TOKENS = 3_000_000_000
"""The pairs of tokens of a mask are counted in 63 bits."""


# -- Lanes, parts and the problem --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Queries:
    """A plane and the query rows that each rank computes; parts of different heads share one, and what it caches."""

    plane: Plane
    rows: Ints
    """(start, stop, rank), by rank and position."""

    @cached_property
    def pieces(self) -> tuple[Ints, Ints]:
        """The plane's bands in the query rows of all ranks, and the rank of each."""
        rows = by_position(self.rows)
        pieces, row = cut_to_rows(self.plane.region, rows)
        return pieces, rows[row, 2]

    @cached_property
    def _bands(self) -> dict[int, tuple[Ints, Ints]]:
        return {}

    def bands(self, rank: int) -> tuple[Ints, Ints]:
        """Return the plane's sure and maybe bands in the query rows that the rank computes."""
        if rank not in self._bands:
            mine = self.rows[self.rows[:, 2] == rank][:, :2]
            self._bands[rank] = cut_to_rows(self.plane.sure, mine)[0], cut_to_rows(self.plane.maybe, mine)[0]
        return self._bands[rank]

    @cached_property
    def _attending(self) -> dict[int, Ints]:
        return {}

    def attending(self, rank: int) -> Ints:
        """Return the (start, stop) query rows that the rank computes, without those that attend to nothing."""
        if rank not in self._attending:
            self._attending[rank] = union(bd.tighten(np.concatenate(self.bands(rank)))[:, :2])
        return self._attending[rank]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Query heads that share a plane and query rows."""

    q_heads: Span
    queries: Queries

    @property
    def plane(self) -> Plane:
        return self.queries.plane


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Key/value heads of some batch rows, and the query heads that use them."""

    batch: Span | None
    kv_heads: Span
    parts: tuple[Part, ...]

    def kv(self, rows: Ints) -> Piece:
        """Return the piece of K and V with these (start, stop) rows."""
        return Piece(Role.KV, as_spans(rows), self.kv_heads, self.batch)

    def weight(self, sizes: Sizes) -> int:
        """Return key/value heads times batch rows."""
        return len(self.kv_heads) * (sizes.batch if self.batch is None else len(self.batch))


@dataclass(frozen=True, eq=False)
class Problem:
    """The layout of K and V, and the pairs that must be computed (`lanes`)."""

    layout: Layout
    sizes: Sizes
    lanes: tuple[Lane, ...]
    node: int
    """Ranks per node: neighbours that share fast links. The number of ranks if all links are equal."""
    max_rows: int | None = None
    """Limit on fetched K/V rows that a rank holds at once in an exchange; None: no limit."""
    stages: int | None = None
    """Stages of an exchange; None: decided by the rows that are needed."""
    known: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)
    """Rows by what they depend on other than the layout. Problems made by `replace`, such as the slices of a hybrid,
    share it. Keys are values or objects, not their `id()`, which differs after pickling."""

    @staticmethod
    def make(
        mask: Mask,
        layout: Layout,
        sizes: Sizes,
        *,
        node: int | None = None,
        max_rows: int | None = None,
    ) -> Problem:
        """Return the problem of a mask over a layout; every rank computes the query rows it holds."""
        if layout.seq_len > MAX_TOKENS:
            raise PlanError(
                f"layout must have at most {MAX_TOKENS:,} tokens, but got {layout.seq_len:,}. Split the batch."
            )
        mask = mask.resized(layout.seq_len)
        for noun, number, expected in (
            ("heads", mask.num_heads, sizes.q_heads),
            ("batch rows", mask.num_rows, sizes.batch),
        ):
            if number not in (1, expected):
                raise PlanError(
                    f"{mask} differs over {number} {noun}, but the plan is for {expected}. Use a mask for {expected}"
                    f" {noun}, or one that is the same for all."
                )
        lanes = [lane for rows, row in _row_groups(mask) for lane in _lanes(mask, rows, row, layout, sizes)]
        # If the ranks do not fill all nodes, some shares would have no port: treat such a group as one level.
        if node is None or not 0 < node < layout.world_size or layout.world_size % node:
            node = layout.world_size
        return Problem(layout, sizes, tuple(lanes), node, max_rows)

    def _once(self, lane: Lane, make: Callable[[Lane], X], *more: object) -> X:
        """Return what `make` returns for the lane, computed once for all lanes of the same planes and query rows."""
        key = (make.__name__, *more, *(part.queries for part in lane.parts))
        if key not in self.known:
            self.known[key] = make(lane)
        return self.known[key]

    def needed_rows(self, lane: Lane) -> Ints:
        """Return (start, stop, rank) of all K/V rows that each rank's queries need, by rank and position, disjoint."""
        return self._once(lane, self._needed_rows)

    def _needed_rows(self, lane: Lane) -> Ints:
        needed: list[Ints] = []
        for part in lane.parts:
            pieces, rank = part.queries.pieces
            start = np.maximum(pieces[:, bd.K0], pieces[:, bd.Q0] - pieces[:, bd.HI])
            stop = np.minimum(pieces[:, bd.K1], pieces[:, bd.Q1] - pieces[:, bd.LO])
            needed.append(np.stack((start, stop, rank), axis=1))
        return by_taker(np.concatenate(needed), self.layout.seq_len)

    @cached_property
    def estimates(self) -> dict[Any, Any]:
        """Predicted times by scheme, machine and `keep`, which a choice and its reasons share."""
        return {}

    @cached_property
    def needed(self) -> tuple[Ints, ...]:
        """For each lane, (start, stop, rank) of the K/V rows that a rank's queries need and the rank does not hold."""
        return tuple(self._once(lane, self._remote_rows) for lane in self.lanes)

    def _remote_rows(self, lane: Lane) -> Ints:
        return without(self.needed_rows(lane), self.layout.table, self.layout.seq_len)

    @cached_property
    def needed_fetches(self) -> tuple[Fetch, ...]:
        """How each lane's needed rows travel."""
        return tuple(self._once(lane, self._fetch, self.node, self.num_stages) for lane in self.lanes)

    def _fetch(self, lane: Lane) -> Fetch:
        return plan_fetch(self._once(lane, self._remote_rows), self.layout, self.node, self.num_stages)

    @cached_property
    def staged_fetches(self) -> tuple[Fetch, ...]:
        """How each lane's needed rows travel in `num_early_stages`, each with a share of the rows of every owner."""
        return tuple(self._once(lane, self._staged_fetch, self.node, self.num_early_stages) for lane in self.lanes)

    def _staged_fetch(self, lane: Lane) -> Fetch:
        needed = self._once(lane, self._remote_rows)
        return plan_fetch(needed, self.layout, self.node, self.num_early_stages, by_owner=True)

    @property
    def num_early_stages(self) -> int:
        """The number of stages if the next one but one is on its way while a stage is computed.

        A rank then holds three stages instead of two; the rest is for shares of owners, which are rounded up.
        """
        return max(STAGES, 2 * self.num_stages) if self.num_stages else 0

    @cached_property
    def num_stages(self) -> int:
        """The number of stages in which all ranks fetch the rows they need."""
        if self.stages is not None:
            return self.stages
        if self.max_rows is None:
            return int(self.layout.world_size > 1)
        rows = np.zeros(self.layout.world_size)
        for lane, needed in zip(self.lanes, self.needed, strict=True):
            share = lane.weight(self.sizes) / (self.sizes.kv_heads * self.sizes.batch)
            np.add.at(rows, needed[:, 2], (needed[:, 1] - needed[:, 0]) * share)
        return num_stages(rows, self.node, self.max_rows)

    @cached_property
    def gather_fetch(self) -> Fetch:
        """How all rows travel to all ranks."""
        size, seq_len = self.layout.world_size, self.layout.seq_len
        ranks = np.arange(size, dtype=np.int64)
        everything = np.stack((np.zeros_like(ranks), np.full_like(ranks, seq_len), ranks), axis=1)
        return plan_fetch(without(everything, self.layout.table, seq_len), self.layout, self.node, stages=1)

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """Pairs that each rank computes, all heads and batch rows together: allowed ones; where a function decides,
        those of all blocks that hold any."""
        pairs = np.zeros(self.layout.world_size)  # with heads and rows, they may be more than int64 counts
        for lane in self.lanes:
            rows = self.sizes.batch if lane.batch is None else len(lane.batch)
            for part in lane.parts:
                work = block_work(part.plane)
                if work is not None:
                    found, rank = work.in_rows(part.queries.rows), part.queries.rows[:, 2]
                else:
                    pieces, rank = part.queries.pieces
                    found = bd.area(pieces)
                np.add.at(pairs, rank, found * float(len(part.q_heads) * rows))
        return pairs

    @cached_property
    def work_variance(self) -> NDArray[np.float64]:
        """The variance of `work`: 0 unless functions were called on a sample."""
        total = np.zeros(self.layout.world_size)
        for lane in self.lanes:
            rows = self.sizes.batch if lane.batch is None else len(lane.batch)
            for part in lane.parts:
                work = block_work(part.plane)
                if work is not None and not work.is_counted:
                    variance = work.variance_of_rows(part.queries.rows, part.queries.rows[:, 2], self.layout.world_size)
                    total += variance * float(len(part.q_heads) * rows) ** 2
        return total

    @property
    def pairs_of(self) -> Callable[[Compute], Pairs] | None:
        """Return the pairs that are computed of each band of a compute; None where bands say it."""
        has_function = any(block_work(part.plane) is not None for lane in self.lanes for part in lane.parts)
        return self._pairs_of if has_function else None

    def _pairs_of(self, compute: Compute) -> Pairs:
        parts = [part for lane in self.lanes if lane.batch == compute.q.batch for part in lane.parts]
        head = compute.q.heads.start
        plane = next(part.plane for part in parts if part.q_heads.start <= head < part.q_heads.stop)
        return pairs_in(plane, bd.as_array((*compute.bands, *compute.maybe)))

    def held_rows(self, rank: int) -> Ints:
        """Return the rank's (start, stop) rows, sorted by position."""
        key = "held", rank
        if key not in self.known:
            self.known[key] = by_position(self.layout.span_table(rank))
        return self.known[key]

    @cached_property
    def blocks(self) -> tuple[tuple[Piece, ...], ...]:
        """Every rank's own K and V, lane by lane; empty for a rank without tokens."""
        rows = [self.held_rows(rank) for rank in range(self.layout.world_size)]
        return tuple(tuple(lane.kv(held) for lane in self.lanes) if len(held) else () for held in rows)

    def computes(self, rank: int, arrived: Sequence[Ints], num_steps: int) -> list[list[Compute]]:
        """Return for each step the rank's computes between its query rows and the K/V rows that arrived for that step.

        `arrived` has (start, stop, step) rows for each lane, sorted by position and disjoint.
        """
        seq_len = self.layout.seq_len
        computes: list[list[Compute]] = [[] for _ in range(num_steps)]
        parts = [(lane, part, rows) for lane, rows in zip(self.lanes, arrived, strict=True) for part in lane.parts]
        for lane, part, kv_rows in parts:
            # All steps of a part at once: a ring has as many as there are ranks.
            tight = [bd.tighten(cells(bands, kv_rows)) for bands in part.queries.bands(rank)]
            sure, maybe = (rows[np.argsort(rows[:, STEP], kind="stable")] for rows in tight)
            both = np.concatenate((sure, maybe))
            q, kv = (by_taker(both[:, columns], seq_len) for columns in ((bd.Q0, bd.Q1, STEP), (bd.K0, bd.K1, STEP)))
            q_spans, kv_spans = as_spans(q[:, :2]), as_spans(kv[:, :2])
            sure_bands, maybe_bands = bd.as_bands(sure[:, :STEP]), bd.as_bands(maybe[:, :STEP])
            steps = np.unique(both[:, STEP])
            labels = (q[:, 2], kv[:, 2], sure[:, STEP], maybe[:, STEP])
            begins = [np.searchsorted(label, steps).tolist() for label in labels]
            ends = [np.searchsorted(label, steps, side="right").tolist() for label in labels]
            numbers: list[int] = steps.tolist()
            for k, step in enumerate(numbers):
                (q0, kv0, sure0, maybe0), (q1, kv1, sure1, maybe1) = ([at[k] for at in side] for side in (begins, ends))
                queries = Piece(Role.Q, q_spans[q0:q1], part.q_heads, lane.batch)
                keys = Piece(Role.KV, kv_spans[kv0:kv1], lane.kv_heads, lane.batch)
                bands = sure_bands[sure0:sure1], maybe_bands[maybe0:maybe1]
                computes[step].append(Compute(rank, queries, keys, *bands))
        return computes


def cut_to_rows(bands: Ints, q_rows: Ints) -> tuple[Ints, Ints]:
    """Return bands cut to query rows (sorted by position, disjoint), and for each piece the row it lies in."""
    i, j = join(bands[:, :2], q_rows)
    pieces = bands[i].copy()
    pieces[:, bd.Q0] = np.maximum(pieces[:, bd.Q0], q_rows[j, 0])
    pieces[:, bd.Q1] = np.minimum(pieces[:, bd.Q1], q_rows[j, 1])
    low = np.maximum(pieces[:, bd.LO], pieces[:, bd.Q0] - pieces[:, bd.K1] + 1)
    high = np.minimum(pieces[:, bd.HI], pieces[:, bd.Q1] - 1 - pieces[:, bd.K0])
    keep = low <= high
    return pieces[keep], j[keep]


STEP = 6
"""The column after those of a band: the step in which it is computed."""


def cells(bands: Ints, kv_rows: Ints) -> Ints:
    """Return bands cut to K/V rows (sorted by position, disjoint); further columns of the rows are appended."""
    i, j = join(bands[:, 2:4], kv_rows)
    pieces = np.column_stack((bands[i], kv_rows[j, 2:]))
    pieces[:, bd.K0] = np.maximum(pieces[:, bd.K0], kv_rows[j, 0])
    pieces[:, bd.K1] = np.minimum(pieces[:, bd.K1], kv_rows[j, 1])
    return bd.drop_empty(pieces)


def _row_groups(mask: Mask) -> Iterator[tuple[Span | None, int]]:
    """Yield runs of batch rows that share all planes, each with one row of it; None is all rows."""
    if mask.num_rows == 1:
        yield None, 0
        return
    start = 0
    for row in range(1, mask.num_rows + 1):
        if row == mask.num_rows or any(a is not b for a, b in zip(mask.grid[row], mask.grid[start], strict=True)):
            yield Span(start, row), start
            start = row


def _lanes(mask: Mask, batch: Span | None, row: int, layout: Layout, sizes: Sizes) -> Iterator[Lane]:
    rows = layout.table[np.lexsort((layout.table[:, 0], layout.table[:, 2]))]
    queries = {ByIdentity(plane): Queries(plane, rows) for plane in mask.grid[row]}
    if mask.num_heads == 1:
        part = Part(Span(0, sizes.q_heads), queries[ByIdentity(mask.plane(row, 0))])
        yield Lane(batch, Span(0, sizes.kv_heads), (part,))
        return
    parts = [Part(Span(h, h + 1), queries[ByIdentity(plane)]) for h, plane in enumerate(mask.grid[row])]
    yield from lanes_of(parts, batch, sizes)


def lanes_of(parts: list[Part], batch: Span | None, sizes: Sizes) -> Iterator[Lane]:
    """Yield the fewest lanes for parts of single heads, in head order: equal neighbours are joined."""

    def can_join(a: Part, b: Part) -> bool:
        return a.q_heads.stop == b.q_heads.start and a.queries is b.queries

    def is_whole(lane: Lane) -> bool:
        """Whether one part has all query heads of the lane, so that joined neighbours stay aligned with their keys."""
        return len(lane.parts) == 1 and len(lane.parts[0].q_heads) == sizes.group * len(lane.kv_heads)

    by_kv: dict[int, list[Part]] = {}
    for part in parts:
        head = part.q_heads.start
        while head < part.q_heads.stop:  # cut the part where the key/value head changes
            stop = min((head // sizes.group + 1) * sizes.group, part.q_heads.stop)
            piece = Part(Span(head, stop), part.queries)
            mine = by_kv.setdefault(head // sizes.group, [])
            if mine and can_join(mine[-1], piece):
                piece = Part(Span(mine.pop().q_heads.start, stop), piece.queries)
            mine.append(piece)
            head = stop
    run: Lane | None = None
    for head, mine in sorted(by_kv.items()):
        lane = Lane(batch, Span(head, head + 1), tuple(mine))
        if run and run.kv_heads.stop == head and is_whole(run) and is_whole(lane) and can_join(run.parts[0], mine[0]):
            joined = Part(Span(run.parts[0].q_heads.start, mine[0].q_heads.stop), mine[0].queries)
            run = Lane(batch, Span(run.kv_heads.start, head + 1), (joined,))
            continue
        if run:
            yield run
        run = lane
    if run:
        yield run
