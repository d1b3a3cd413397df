"""The planners (ring, exchange, staged, all-gather, hybrid), their volumes, and schemes by name.

A planner is a function from a problem and a rank to that rank's steps. `PLANNERS` lists planners by name. `VOLUMES`
gives in closed form how much every rank receives under a planner; a planner without an entry is summed step by step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Plane
from longspan.masks import bands as bd
from longspan.masks.work import block_work, num_pairs
from longspan.planning.backward_plan import reverse
from longspan.planning.cost import received_bytes
from longspan.planning.fetch import PORT, START, STOP, TAKER, Fetch, arrivals, by_taker, moves
from longspan.planning.problem import Lane, Part, Problem, Queries, cut_to_rows, lanes_of
from longspan.planning.steps import Compute, Piece, Recall, Role, Schedule, Sizes, Step, Transfer
from longspan.spans import Ints, Span, as_spans, by_position, intersect, join, on_one_line

Planner = Callable[[Problem, int], tuple[Step, ...]]

# -- Ring: in step i a rank computes on the block of the rank i places behind it, and passes it on ---------------------


def ring(problem: Problem, rank: int) -> tuple[Step, ...]:
    """Return the rank's steps. Every block visits every rank, independent of the mask."""
    size, rows = problem.layout.world_size, problem.layout.by_position
    arrived = np.column_stack((rows[:, :2], (rank - rows[:, 2]) % size))
    computes = problem.computes(rank, (arrived,) * len(problem.lanes), size)
    steps: list[Step] = []
    for i in range(size):
        transfers: list[Transfer] = []
        if i < size - 1:
            # The first hop leaves its owner, who needs nothing back; later hops return what they passed on.
            recall = Recall.KEEP if i == 0 else Recall.RETURN
            for src in sorted({rank, (rank - 1) % size}):
                block = problem.blocks[(src - i) % size]
                transfers += [Transfer(src, (src + 1) % size, piece, i + 1, recall) for piece in block]
        steps.append(Step(tuple(transfers), tuple(computes[i])))
    return tuple(steps)


# -- Exchange: only rows that the mask needs travel, from owner to user, in overlapped stages --------------------------


def exchange(problem: Problem, rank: int) -> tuple[Step, ...]:
    """Return the rank's steps: local pairs first, then those of each stage, while the next stage is in flight."""
    return _fetch_steps(problem, rank, problem.needed_fetches, problem.num_stages)


def all_gather(problem: Problem, rank: int) -> tuple[Step, ...]:
    """Return the rank's steps: local pairs while everything is in flight, then all the rest at once.

    This is an exchange of all rows in one stage. Between nodes every row crosses once per node, as in the collective of
    the same name.
    """
    fetches = (problem.gather_fetch,) * len(problem.lanes)
    return _fetch_steps(problem, rank, fetches, min(problem.layout.world_size - 1, 1))


def staged(problem: Problem, rank: int) -> tuple[Step, ...]:
    """Return the rank's steps: an exchange in several stages, each sent one step before the step that waits for it.

    So the network is busy while a stage is computed, however long that takes, and the pairs that are left when the last
    rows arrive are few. It pays off if messages take longer than the local pairs.
    """
    return _fetch_steps(problem, rank, problem.staged_fetches, problem.num_early_stages, ahead=1)


def _fetch_steps(
    problem: Problem, rank: int, fetches: tuple[Fetch, ...], stages: int, ahead: int = 0
) -> tuple[Step, ...]:
    node, layout = problem.node, problem.layout
    # Rows from other nodes come a step later, and their ports hold them one more, which backward needs to fetch again.
    num_steps = stages + 1 + 2 * (node < layout.world_size)
    transfers: list[list[Transfer]] = [[] for _ in range(num_steps)]
    arrived: list[Ints] = []
    for lane, fetch in zip(problem.lanes, fetches, strict=True):
        for (step, src, dst, until, early, back), rows in moves(fetch, layout, node, rank, stages, ahead).items():
            transfers[step].append(Transfer(src, dst, lane.kv(rows), until, Recall.AGAIN, early, back))
        by_step = [problem.held_rows(rank), *arrivals(fetch, node, rank, num_steps)[1:]]
        number = np.repeat(np.arange(num_steps), [len(rows) for rows in by_step])
        arrived.append(by_position(np.column_stack((np.concatenate(by_step), number))))
    computes = problem.computes(rank, arrived, num_steps)
    return tuple(Step(tuple(moved), tuple(work)) for moved, work in zip(transfers, computes, strict=True))


# -- Hybrid: heads are spread over groups of neighbouring ranks, and another planner works across the groups -----------
# Inside a group of `heads` ranks, rank u takes the u-th slice of the heads of all the group's tokens. The slices carry
# equal work: where heads do not divide, a head is cut by query rows, so any number of heads fits any number of ranks,
# and a key/value head that several ranks need goes to each of them. With one group this is all-to-all over heads; with
# groups of one rank it is the inner planner itself.
#
# Eight causal tokens and two heads (a, b) on four ranks, in groups of two:
#
#                  step 0                step 1 and 2                              step 3
#     rank 0  0:2  gathers head a        a of 0:4 ─┐ keys and values,              results go to their owners
#     rank 1  2:4  gathers head b        b of 0:4 ─│─┐ by the inner planner
#     rank 2  4:6  gathers head a        a of 4:8 ◄┘ │
#     rank 3  6:8  gathers head b        b of 4:8 ◄──┘
#
# In steps 1 and 2, ranks 0 and 2 follow the inner planner as if they were the only two ranks and `a` the only head; so
# do ranks 1 and 3 with `b`. Heads are independent in attention, so the two pairs exchange nothing.


@dataclass(frozen=True, eq=False)
class Slices:
    """The problem cut into `heads` slices of heads, each a problem of its own over the groups."""

    problem: Problem
    heads: int

    def __post_init__(self) -> None:
        size = self.problem.layout.world_size
        if self.heads < 1 or size % self.heads:
            raise PlanError(
                f"a hybrid spreads heads over groups of {self.heads} ranks, but {size} ranks do not divide into such"
                f" groups. Use a divisor of {size}."
            )

    @cached_property
    def groups(self) -> Layout:
        """The layout with a whole group in the place of a rank; its rows by group, then by position."""
        layout = self.problem.layout
        rows = layout.table.copy()
        rows[:, 2] //= self.heads
        return Layout.from_table(layout.seq_len, layout.world_size // self.heads, by_position(rows), layout.name)

    @cached_property
    def _slices(self) -> dict[int, Problem]:
        return {}

    def slice(self, number: int) -> Problem:
        """Return the problem that the ranks with this number, one in each group, solve together."""
        if number not in self._slices:
            parts_by_batch: dict[Span | None, list[Part]] = {}
            for lane in self.problem.lanes:
                parts_by_batch.setdefault(lane.batch, []).extend(lane.parts)
            lanes: list[Lane] = []
            for batch, parts in parts_by_batch.items():
                parts.sort(key=lambda part: part.q_heads.start)
                lanes += lanes_of(self._share(parts, number), batch, self.problem.sizes)
            self._slices[number] = replace(self._whole, lanes=tuple(lanes), stages=self._whole.num_stages)
        return self._slices[number]

    @cached_property
    def kinds(self) -> tuple[object, ...]:
        """A key of the work and traffic of every slice: slices with as many heads of the same rows are equal."""
        sizes = self.problem.sizes
        is_one = all(len(lane.parts) == 1 and len(lane.kv_heads) == sizes.kv_heads for lane in self.problem.lanes)
        each, rest = divmod(sizes.q_heads, self.heads)
        if is_one and not rest and (each % sizes.group == 0 or sizes.group % each == 0):
            return (None,) * self.heads  # whole heads under one plane
        return tuple(
            tuple(
                (lane.batch, len(lane.kv_heads), tuple((len(p.q_heads), p.queries) for p in lane.parts))
                for lane in self.slice(number).lanes
            )
            for number in range(self.heads)
        )

    @cached_property
    def by_kind(self) -> dict[object, Problem]:
        """The problem of the first slice of every kind."""
        return {kind: self.slice(self.kinds.index(kind)) for kind in dict.fromkeys(self.kinds)}

    @cached_property
    def _whole(self) -> Problem:
        """All heads over the groups. No slice needs more rows, so all slices use its number of stages."""
        lanes = [
            Lane(lane.batch, lane.kv_heads, tuple(Part(p.q_heads, self._of_groups[p.queries]) for p in lane.parts))
            for lane in self.problem.lanes
        ]
        node, size = self.problem.node, self.problem.layout.world_size
        # If a group fills a node or more, all groups are equally far from one another.
        has_nodes = node < size and node % self.heads == 0 and node > self.heads
        return Problem(
            self.groups,
            self.problem.sizes,
            tuple(lanes),
            node // self.heads if has_nodes else self.groups.world_size,
            self.problem.max_rows,
            self.problem.stages,
        )

    @cached_property
    def _of_groups(self) -> dict[Queries, Queries]:
        """The problem's queries with the query rows of whole groups."""
        distinct = dict.fromkeys(part.queries for lane in self.problem.lanes for part in lane.parts)
        return {queries: Queries(queries.plane, self.groups.table) for queries in distinct}

    @cached_property
    def _pairs(self) -> dict[Queries, int]:
        """The number of pairs that are computed of every plane."""
        return {queries: num_pairs(queries.plane) for queries in self._of_groups}

    def _share(self, base: list[Part], number: int) -> list[Part]:
        """Return the slice's share of parts in head order: whole heads, and query rows of heads that slices share."""
        weight = [self._pairs[part.queries] for part in base]
        if not any(weight):  # a mask without pairs: any even cut is fine
            weight = [1] * len(base)
        whole = sum(w * len(part.q_heads) for w, part in zip(weight, base, strict=True))
        start, stop = whole * number, whole * (number + 1)  # in units of 1 / self.heads pairs, which are whole numbers
        parts: list[Part] = []
        before = 0
        for part, w in zip(base, weight, strict=True):
            one = w * self.heads  # of one head
            low, high = max(start - before, 0), min(stop - before, one * len(part.q_heads))
            before += one * len(part.q_heads)
            if high <= low:
                continue
            head, first = part.q_heads.start, low // one
            for i in range(first, -(-high // one)):
                queries = self._of_groups[part.queries]
                if low > i * one or high < (i + 1) * one:  # a part of this head
                    ends = max(low - i * one, 0), min(high - i * one, one)
                    rows = self._share_of_rows(part.plane, *(Fraction(end, one) for end in ends))
                    queries = Queries(part.plane, rows)
                parts.append(Part(Span(head + i, head + i + 1), queries))
        return parts

    def _share_of_rows(self, plane: Plane, first: Fraction, last: Fraction) -> Ints:
        """Return for every group the query rows that hold the work between two shares of the group's work."""
        shares: list[Ints] = []
        for group in range(self.groups.world_size):
            rows = self.groups.table[self.groups.table[:, 2] == group]
            low, high = (_cut_at_work(plane, rows[:, :2], share) for share in (first, last))
            kept = intersect(rows[:, :2], np.array([[low, high]], dtype=np.int64))
            kept = kept[kept[:, 1] > kept[:, 0]]
            shares.append(np.column_stack((kept, np.full(len(kept), group, dtype=np.int64))))
        return np.concatenate(shares)


def _cut_at_work(plane: Plane, rows: Ints, share: Fraction) -> int:
    """Return the position in sorted (start, stop) query rows before which `share` of their pairs lie."""
    if share == 0 or not len(rows):
        return 0
    if share == 1:
        return int(rows[-1, 1])
    opened = block_work(plane)
    if opened is not None:
        return opened.row_at(rows, float(share))
    pieces, at = cut_to_rows(plane.region, rows)
    work = np.zeros(len(rows), dtype=np.int64)
    np.add.at(work, at, bd.area(pieces))
    target = share * int(work.sum())
    row = min(int(np.searchsorted(np.cumsum(work), float(target))), len(rows) - 1)
    rest = target - int(work[:row].sum())
    mine = pieces[at == row]
    low, high = int(rows[row, 0]), int(rows[row, 1])
    while low < high:
        middle = (low + high) // 2
        upper = mine.copy()
        upper[:, bd.Q1] = np.minimum(upper[:, bd.Q1], middle)
        if int(bd.area(upper[upper[:, bd.Q1] > upper[:, bd.Q0]]).sum()) < rest:
            low = middle + 1
        else:
            high = middle
    return low


def hybrid(slices: Slices, rank: int, inner: Planner) -> tuple[Step, ...]:
    """Return the rank's steps: gather its heads from the group, run `inner` across groups, send results to owners.

    Rank 0 of the example above, with an exchange across the groups:

    >>> from longspan.planning import Sizes, scheme
    >>> problem = Problem.make(causal(), contiguous(8, 4), Sizes(2, 2, 1, 1, 4))
    >>> for number, step in enumerate(scheme("hybrid(2, exchange)", problem).steps(rank=0)):
    ...     print(number, [f"{t.src}>{t.dst} {t.piece}" for t in step.transfers], [c.bands for c in step.computes])
    0 ['1>0 q[2:4]h0:1', '1>0 kv[2:4]h0:1', '0>1 q[0:2]h1:2', '0>1 kv[0:2]h1:2'] []
    1 ['0>2 kv[0:4]h0:1'] [(0:4x0:4/0..,)]
    2 [] []
    3 ['0>1 out[2:4]h0:1', '1>0 out[0:2]h1:2'] []
    """
    problem, heads = slices.problem, slices.heads
    if heads == 1:
        return inner(problem, rank)
    group, number = divmod(rank, heads)

    def shift(step: Step) -> Step:
        """Replace groups by the ranks that stand for them, one step later."""
        transfers = [
            replace(t, src=t.src * heads + number, dst=t.dst * heads + number, until=t.until + 1)
            for t in step.transfers
        ]
        computes = [Compute(c.rank * heads + number, c.q, c.kv, c.bands, c.maybe) for c in step.computes]
        return Step(tuple(transfers), tuple(computes))

    steps = [shift(step) for step in inner(slices.slice(number), group)]
    peers = [group * heads + other for other in range(heads)]
    last = len(steps)
    gather: list[Transfer] = []
    deliver: list[Transfer] = []
    held: dict[tuple[int, int], tuple[Span, ...]] = {}  # slices of equal rows share their spans
    for taker in peers:
        for role, rows, of_heads, batch in _slice_inputs(slices, taker):
            for src in peers if taker == rank else [rank]:
                if src == taker:
                    continue
                key = id(rows), src
                if key not in held:
                    held[key] = as_spans(intersect(rows, problem.held_rows(src)))
                if not held[key]:
                    continue
                mine = Piece(role, held[key], of_heads, batch)
                # Held one step longer than used: backward fetches it again one step before that.
                gather.append(Transfer(src, taker, mine, until=last + 1))
                if mine.role is Role.Q:
                    deliver.append(Transfer(taker, src, mine.to(Role.OUT), last + 2, Recall.KEEP))
    return Step(tuple(gather)), *steps, Step(tuple(deliver))


def alone(problem: Problem, rank: int) -> tuple[Step, ...]:
    """Plan one step in which a group that holds everything computes everything: the inner planner of all-to-all."""
    held = problem.held_rows(rank)
    rows = np.column_stack((held, np.zeros(len(held), dtype=np.int64)))
    return (Step((), tuple(problem.computes(rank, (rows,) * len(problem.lanes), 1)[0])),)


def _slice_inputs(slices: Slices, taker: int) -> list[tuple[Role, Ints, Span, Span | None]]:
    """Return what a rank must hold for its slice, as role, rows, heads and batch rows: the query rows it computes, and
    the group's K and V. Slices with the same rows get the same arrays.

    If there is only one group, only the K/V rows that the slice's queries attend to are gathered.
    """
    group, number = divmod(taker, slices.heads)
    problem = slices.slice(number)
    inputs: list[tuple[Role, Ints, Span, Span | None]] = []
    for lane in problem.lanes:
        inputs += [(Role.Q, part.queries.attending(group), part.q_heads, lane.batch) for part in lane.parts]
        is_alone = slices.groups.world_size == 1
        rows = problem.needed_rows(lane) if is_alone else problem.held_rows(group)
        inputs.append((Role.KV, rows, lane.kv_heads, lane.batch))
    return inputs


# -- Volume: how many rows every rank receives, in closed form, without building any rank's steps ----------------------
# The result is exact and covers all ranks, as a few arrays. Tests check that it equals the sum over every rank's steps.


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """Rows times heads times batch rows that each rank receives and sends in forward."""

    kv_in: Ints
    kv_out: Ints
    again: Ints
    """K/V that is sent to the rank again in backward, if it was not kept."""
    returned: Ints
    """K/V that the rank passed on and gets back in backward, if it was not kept."""
    q_in: Ints
    """Queries of other ranks: their results are sent, and the gradients of these are received."""
    q_out: Ints

    @staticmethod
    def zeros(size: int) -> Volume:
        return Volume(*(np.zeros(size, dtype=np.int64) for _ in fields(Volume)))

    def received_bytes(self, sizes: Sizes, direction: str, *, keep: bool) -> Ints:
        """Return the bytes that each rank receives in one pass; backward is forward reversed."""
        kv, q = sizes.row_bytes(Role.KV), sizes.row_bytes(Role.Q)
        if direction == "forward":
            return self.kv_in * kv + self.q_in * q + self.q_out * sizes.row_bytes(Role.OUT)
        gradients = self.kv_out * sizes.row_bytes(Role.DKV) + self.q_out * sizes.row_bytes(Role.DQ)
        gradients = gradients + self.q_in * sizes.row_bytes(Role.DOUT)
        return gradients if keep else gradients + (self.again + self.returned) * kv + self.q_in * q


def ring_volume(problem: Problem) -> Volume:
    """Each rank receives every block but its own and passes on every block but the next rank's.

    In backward it gets back those it passed on that are not its own.
    """
    size, own = problem.layout.world_size, problem.layout.num_tokens
    volume = Volume.zeros(size)
    if size > 1:
        weight, after = sum(lane.weight(problem.sizes) for lane in problem.lanes), np.roll(own, -1)
        volume.kv_in[:] = weight * (own.sum() - own)
        volume.kv_out[:] = weight * (own.sum() - after)
        volume.returned[:] = weight * (own.sum() - own - after)
    return volume


def _fetch_volume(problem: Problem, fetches: tuple[Fetch, ...]) -> Volume:
    size, seq_len, volume = problem.layout.world_size, problem.layout.seq_len, Volume.zeros(problem.layout.world_size)
    for lane, fetch in zip(problem.lanes, fetches, strict=True):
        weight = lane.weight(problem.sizes)
        for rows, taker in ((fetch.near, fetch.near[:, TAKER]), (fetch.far, fetch.far[:, PORT])):
            np.add.at(volume.kv_in, taker, weight * (rows[:, STOP] - rows[:, START]))
            volume.kv_out[:] += weight * lent(rows, problem.layout)
        if problem.node < size:  # rows that ports pass on inside the nodes
            line = on_one_line(fetch.far, fetch.far[:, TAKER], seq_len)
            ports = by_position(np.column_stack((line, fetch.far[:, PORT])))
            users = on_one_line(fetch.remote, fetch.remote[:, 2] // problem.node, seq_len)
            i, j = join(users, ports)
            rows = np.minimum(users[i, 1], ports[j, 1]) - np.maximum(users[i, 0], ports[j, 0])
            port, user = ports[j, 2], fetch.remote[i, 2]
            rows[port == user] = 0
            np.add.at(volume.kv_in, user, weight * rows)
            np.add.at(volume.kv_out, port, weight * rows)
    volume.again[:] = volume.kv_in
    return volume


def lent(needed: Ints, layout: Layout) -> Ints:
    """Return how many of the needed (start, stop, ...) rows each rank sends, once per rank that needs them."""
    segments = layout.table
    covered = np.zeros(len(segments), dtype=np.int64)
    # Needed rows before the stop of each segment, less those before its start.
    for ends, sign in ((needed[:, 0], 1), (needed[:, 1], -1)):
        ordered = np.sort(ends)
        sums = np.concatenate(([0], np.cumsum(ordered)))
        for edge, edge_sign in ((segments[:, 1], sign), (segments[:, 0], -sign)):
            number = np.searchsorted(ordered, edge)
            covered += edge_sign * (number * edge - sums[number])
    num_rows = np.zeros(layout.world_size, dtype=np.int64)
    np.add.at(num_rows, segments[:, 2], covered)
    return num_rows


def hybrid_volume(slices: Slices, inner: Callable[[Problem], Volume]) -> Volume:
    """Return what the inner planner moves across groups, plus queries and K/V for each rank's heads inside groups."""
    if slices.heads == 1:
        return inner(slices.problem)
    heads, volume = slices.heads, Volume.zeros(slices.problem.layout.world_size)
    known = {kind: (inner(problem), *gathered_rows(slices, problem)) for kind, problem in slices.by_kind.items()}
    for number in range(heads):
        across, q, kv = known[slices.kinds[number]]
        for name in Volume.__slots__:
            getattr(volume, name)[number::heads] += getattr(across, name)
        for rows, names, sent in ((q, ("q_in",), volume.q_out), (kv, ("kv_in", "again"), volume.kv_out)):
            for name in names:
                getattr(volume, name)[number::heads] += rows.reshape(-1, heads).sum(axis=1) - rows[number::heads]
            sent += rows
            sent[number::heads] -= rows[number::heads]
    return volume


def gathered_rows(slices: Slices, problem: Problem) -> tuple[Ints, Ints]:
    """Return how many of the query rows, and of the K/V rows, that its group needs for a slice each rank holds."""
    layout, seq_len = slices.problem.layout, problem.layout.seq_len
    group_line = on_one_line(layout.table, layout.table[:, 2] // slices.heads, seq_len)
    owners = by_position(np.column_stack((group_line, layout.table[:, 2])))
    q, kv = np.zeros(layout.world_size, dtype=np.int64), np.zeros(layout.world_size, dtype=np.int64)

    def add_held(sums: Ints, weight: int, rows: Ints) -> None:
        """Add how many of its group's (start, stop, group) rows each rank holds."""
        line = on_one_line(rows, rows[:, 2], seq_len)
        i, j = join(line, owners)
        held = np.minimum(line[i, 1], owners[j, 1]) - np.maximum(line[i, 0], owners[j, 0])
        np.add.at(sums, owners[j, 2], weight * held)

    for lane in problem.lanes:
        if problem.layout.world_size == 1:
            add_held(kv, lane.weight(problem.sizes), problem.needed_rows(lane))
        else:
            kv += lane.weight(problem.sizes) * layout.num_tokens
        for part in lane.parts:
            # (start, stop, group) of the query rows that attend to anything
            attending = bd.tighten(np.column_stack(part.queries.pieces))[:, [bd.Q0, bd.Q1, 6]]
            batch = lane.weight(problem.sizes) // len(lane.kv_heads)
            add_held(q, len(part.q_heads) * batch, by_taker(attending, seq_len))
    return q, kv


# -- Schemes by name ---------------------------------------------------------------------------------------------------


PLANNERS: dict[str, Planner] = {
    "ring": ring,
    "all_gather": all_gather,
    "exchange": exchange,
    "staged": staged,
}
VOLUMES: dict[Planner, Callable[[Problem], Volume]] = {
    ring: ring_volume,
    all_gather: lambda problem: _fetch_volume(problem, (problem.gather_fetch,) * len(problem.lanes)),
    exchange: lambda problem: _fetch_volume(problem, problem.needed_fetches),
    staged: lambda problem: _fetch_volume(problem, problem.staged_fetches),
    alone: lambda problem: Volume.zeros(problem.layout.world_size),
}

_HYBRID = re.compile(r"hybrid\((\d{1,6})(?:,\s*(\w+))?\)")
_USP = re.compile(r"usp\((\d{1,6})\)")


@dataclass(frozen=True, eq=False)
class Scheme:
    """A planner, spread over `heads` ranks by heads, bound to a problem."""

    name: str
    problem: Problem
    heads: int
    inner: Planner

    def __repr__(self) -> str:
        return self.name

    def __post_init__(self) -> None:
        _ = self.slices  # raises if the ranks do not divide into groups, now and not at the first call

    @cached_property
    def slices(self) -> Slices:
        return Slices(self.problem, self.heads)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the forward steps of one rank."""
        if not 0 <= rank < self.problem.layout.world_size:
            raise PlanError(f"{self.problem.layout} has no rank {rank}.")
        return hybrid(self.slices, rank, self.inner)

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """Pairs that each rank computes, all heads and batch rows together; see `Problem.work`."""
        return self._of_ranks(lambda problem: problem.work)

    @cached_property
    def work_variance(self) -> NDArray[np.float64]:
        """The variance of `work`: 0 unless functions were called on a sample."""
        return self._of_ranks(lambda problem: problem.work_variance)

    def _of_ranks(self, of: Callable[[Problem], NDArray[np.float64]]) -> NDArray[np.float64]:
        if self.heads == 1:
            return of(self.problem)
        by_kind = {kind: of(problem) for kind, problem in self.slices.by_kind.items()}
        return np.stack([by_kind[kind] for kind in self.slices.kinds], axis=1).ravel()

    @cached_property
    def _volume(self) -> Volume:
        return hybrid_volume(self.slices, VOLUMES[self.inner])

    def received_bytes(self, direction: str, *, keep: bool) -> Ints:
        """Return the bytes that each rank receives in one pass."""
        sizes = self.problem.sizes
        if self.inner in VOLUMES:
            return self._volume.received_bytes(sizes, direction, keep=keep)
        num_bytes: list[int] = []
        for rank in range(self.problem.layout.world_size):
            steps = self.steps(rank)
            steps = steps if direction == "forward" else reverse(steps, rank, keep=keep)[0]
            num_bytes.append(received_bytes(steps, rank, sizes))
        return np.array(num_bytes, dtype=np.int64)

    def schedule(self) -> Schedule:
        """Return every rank's forward steps, written out."""
        ranks = tuple(self.steps(rank) for rank in range(self.problem.layout.world_size))
        return Schedule(self.name, "forward", self.problem.layout, self.problem.sizes, ranks)


def scheme_name(text: str) -> str:
    """Return the name of a scheme without spaces, and with its own name in the place of an alias.

    >>> scheme_name("ulysses"), scheme_name("usp(4)"), scheme_name("hybrid(4, exchange)")
    ('all_to_all', 'hybrid(4,ring)', 'hybrid(4,exchange)')
    """
    name = text.replace(" ", "")
    if name == "ulysses":
        return "all_to_all"
    if name == "usp" or name.startswith("usp("):
        match = _USP.fullmatch(name)
        if match is None:  # its two degrees cannot be derived from the number of ranks
            raise PlanError(
                f"scheme must be usp(HEADS), as in usp(8), which is Ulysses over groups of 8 ranks and a ring across"
                f" the groups, but got {name!r}. Add the size of a group, or use 'auto', which compares all sizes."
            )
        return f"hybrid({match[1]},ring)"
    return name


def can_limit(name: str) -> bool:
    """Return whether the scheme of this name can fetch remote K/V in stages, to hold fewer at once.

    >>> can_limit("hybrid(4,exchange)"), can_limit("ring")
    (True, False)
    """
    return any(planner in name for planner in ("exchange", "staged"))


def check_limit(name: str, fetch_bytes: int | None) -> None:
    """Refuse a limit of remote K/V for a scheme that cannot keep it."""
    if fetch_bytes is not None and name != "auto" and not can_limit(name):
        raise PlanError(
            f"fetch_bytes must be None with scheme {name!r}, which does not fetch remote K/V in stages, but got"
            f" {fetch_bytes}. Leave fetch_bytes out, or use 'exchange', 'staged', a hybrid with one of them, or 'auto'."
        )


def scheme(name: str, problem: Problem) -> Scheme:
    """Return the scheme of this name: a planner, `all_to_all`, or `hybrid(HEADS, PLANNER)`.

    `ulysses` is an alias of `all_to_all`, and `usp(HEADS)` of `hybrid(HEADS, ring)`.

    >>> from longspan import masks, layouts
    >>> from longspan.planning import Problem, Sizes
    >>> problem = Problem.make(masks.causal(), layouts.zigzag(64, 4), Sizes(8, 2, 64, 64, 2))
    >>> scheme("hybrid(2, exchange)", problem).name
    'hybrid(2,exchange)'
    """
    name = name.replace(" ", "")
    name = scheme_name(name)
    if name in PLANNERS:
        return Scheme(name, problem, 1, PLANNERS[name])
    if name == "all_to_all":
        return Scheme(name, problem, problem.layout.world_size, alone)
    match = _HYBRID.fullmatch(name)
    if match and (match[2] or "ring") in PLANNERS:
        return Scheme(name, problem, int(match[1]), PLANNERS[match[2] or "ring"])
    raise PlanError(
        f"scheme must be one of {', '.join(PLANNERS)}, all_to_all (alias ulysses) and hybrid(HEADS, PLANNER), as in"
        f" hybrid(8, exchange) (usp(8) is hybrid(8, ring)), or 'auto', which compares them, but got {name!r}."
    )
