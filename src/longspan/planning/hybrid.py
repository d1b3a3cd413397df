"""Hybrid: heads are spread over groups of neighbouring ranks, and another planner works across the groups.

Inside a group of `heads` ranks, rank u takes the u-th slice of the heads of all the group's tokens. The slices carry
equal work: where heads do not divide, a head is cut by query rows, so any number of heads fits any number of ranks,
and a key/value head that several ranks need goes to each of them. With one group this is all-to-all over heads; with
groups of one rank it is the inner planner itself.

Eight causal tokens and two heads (a, b) on four ranks, in groups of two::

                 step 0                step 1 and 2                              step 3
    rank 0  0:2  gathers head a        a of 0:4 ─┐ keys and values,              results go to their owners
    rank 1  2:4  gathers head b        b of 0:4 ─│─┐ as the inner planner says
    rank 2  4:6  gathers head a        a of 4:8 ◄┘ │
    rank 3  6:8  gathers head b        b of 4:8 ◄──┘

In steps 1 and 2, ranks 0 and 2 follow the inner planner as if they were the only two ranks and `a` the only head; so do
ranks 1 and 3 with `b`. Heads are independent in attention, so the two pairs exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Plane
from longspan.masks import bands as bd
from longspan.planning.problem import Lane, Part, Problem, in_rows, lanes_of, needed_rows
from longspan.planning.steps import Compute, Piece, Recall, Role, Step, Transfer
from longspan.spans import Ints, Span, as_spans, by_position, intersect, union

Planner = Callable[[Problem, int], tuple[Step, ...]]


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
    def _made(self) -> dict[int, Problem]:
        return {}

    def slice(self, number: int) -> Problem:
        """The problem that the ranks with this number, one in each group, solve together."""
        if number not in self._made:
            lanes: list[Lane] = []
            for rows, base in self._bases():
                lanes += lanes_of(list(self._parts(base, number)), rows, self.problem.sizes)
            self._made[number] = replace(self._whole, lanes=tuple(lanes), stages=self._whole.num_stages)
        return self._made[number]

    def kind(self, number: int) -> object:
        """What decides how much a slice computes and moves: slices with as many heads of the same rows are alike."""
        return tuple(
            (lane.batch, len(lane.kv_heads), tuple((len(p.q_heads), id(p.plane), id(p.q_rows)) for p in lane.parts))
            for lane in self.slice(number).lanes
        )

    @cached_property
    def _whole(self) -> Problem:
        """All heads over the groups. No slice needs more rows, so its number of stages serves all of them alike."""
        lanes = [
            Lane(lane.batch, lane.kv_heads, tuple(Part(p.q_heads, p.plane, self.groups.table) for p in lane.parts))
            for lane in self.problem.lanes
        ]
        node, size = self.problem.node, self.problem.layout.world_size
        # Where a group fills a node or more, groups are all equally far from one another.
        whole = node < size and node % self.heads == 0 and node > self.heads
        return Problem(
            self.groups,
            self.problem.sizes,
            tuple(lanes),
            node // self.heads if whole else self.groups.world_size,
            self.problem.max_rows,
            self.problem.stages,
        )

    def _bases(self) -> list[tuple[Span | None, list[Part]]]:
        """The parts of all lanes, batch rows by batch rows, in head order."""
        parts_by_batch: dict[Span | None, list[Part]] = {}
        for lane in self.problem.lanes:
            parts_by_batch.setdefault(lane.batch, []).extend(lane.parts)
        return [(rows, sorted(parts, key=lambda part: part.q_heads.start)) for rows, parts in parts_by_batch.items()]

    def _parts(self, base: list[Part], number: int) -> list[Part]:
        """The slice's share of the parts: whole heads, and query rows of a head that two slices share."""
        weight = [self._weight[part.plane] for part in base]
        work = [Fraction(w * len(part.q_heads)) for w, part in zip(weight, base, strict=True)]
        if not any(work):  # a mask without pairs: any even cut will do
            weight, work = [1] * len(base), [Fraction(len(part.q_heads)) for part in base]
        whole = sum(work, Fraction(0))
        start, stop = whole * number / self.heads, whole * (number + 1) / self.heads
        parts: list[Part] = []
        before = Fraction(0)
        for part, share, w in zip(base, work, weight, strict=True):
            low, high = max(start - before, Fraction(0)), min(stop - before, share)
            if high > low and w:
                parts += self._cut_heads(part, low / w, high / w)
            before += share
        return parts

    @cached_property
    def _weight(self) -> dict[Plane, int]:
        """The pairs of every plane."""
        planes = {part.plane for lane in self.problem.lanes for part in lane.parts}
        return {plane: int(bd.area(plane.region).sum()) for plane in planes}

    def _cut_heads(self, part: Part, low: Fraction, high: Fraction) -> list[Part]:
        """Heads low to high of the part, counted from its first; both may be fractions of a head."""
        parts: list[Part] = []
        for head in range(int(low), -(-high.numerator // high.denominator)):
            first, last = max(low - head, Fraction(0)), min(high - head, Fraction(1))
            span = Span(part.q_heads.start + head, part.q_heads.start + head + 1)
            if (first, last) == (0, 1):
                parts.append(Part(span, part.plane, self.groups.table))
            else:
                parts.append(Part(span, part.plane, self._share_of_rows(part.plane, first, last)))
        return parts

    def _share_of_rows(self, plane: Plane, first: Fraction, last: Fraction) -> Ints:
        """In every group, the query rows that hold the work between two shares of the group's work."""
        shares: list[Ints] = []
        for group in range(self.groups.world_size):
            rows = self.groups.table[self.groups.table[:, 2] == group]
            low, high = (cut_at_work(plane.region, rows[:, :2], share) for share in (first, last))
            kept = intersect(rows[:, :2], np.array([[low, high]], dtype=np.int64))
            kept = kept[kept[:, 1] > kept[:, 0]]
            shares.append(np.column_stack((kept, np.full(len(kept), group, dtype=np.int64))))
        return np.concatenate(shares)


def cut_at_work(bands: Ints, rows: Ints, share: Fraction) -> int:
    """The position in sorted (start, stop) query rows before which `share` of their allowed pairs lie."""
    if share == 0 or not len(rows):
        return 0
    if share == 1:
        return int(rows[-1, 1])
    pieces, at = in_rows(bands, rows)
    work = np.zeros(len(rows), dtype=np.int64)
    np.add.at(work, at, bd.area(pieces))
    wanted = share * int(work.sum())
    row = min(int(np.searchsorted(np.cumsum(work), float(wanted))), len(rows) - 1)
    rest = wanted - int(work[:row].sum())
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
    """The rank's steps: gather its heads from the group, run `inner` across groups, send results home.

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
    steps = [_shifted(step, heads, number) for step in inner(slices.slice(number), group)]
    peers = [group * heads + other for other in range(heads)]
    last = len(steps)
    gather: list[Transfer] = []
    deliver: list[Transfer] = []
    for taker in peers:
        for piece in _inputs(slices, taker):
            for src in peers if taker == rank else [rank]:
                mine = _held_part(piece, problem, src)
                if src != taker and mine is not None:
                    # Held one step longer than used: in backward, others ask for it again one step before that.
                    gather.append(Transfer(src, taker, mine, until=last + 1))
                    if mine.role is Role.Q:
                        deliver.append(Transfer(taker, src, mine.to(Role.OUT), last + 2, Recall.KEEP))
    return Step(tuple(gather)), *steps, Step(tuple(deliver))


def alone(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The planner of all-to-all: a group that holds everything computes everything in one step."""
    held = problem.held(rank)
    rows = np.column_stack((held, np.zeros(len(held), dtype=np.int64)))
    return (Step((), tuple(problem.computes(rank, (rows,) * len(problem.lanes), 1)[0])),)


def _inputs(slices: Slices, taker: int) -> list[Piece]:
    """What a rank must hold for its slice: the query rows it computes, and the group's K and V.

    A lone group serves nobody else, so there only the K/V rows that the slice's queries see are gathered.
    """
    group, number = divmod(taker, slices.heads)
    problem = slices.slice(number)
    pieces: list[Piece] = []
    for lane in problem.lanes:
        for part in lane.parts:
            bands = bd.tighten(np.concatenate(problem.rank_bands(part, group)))  # rows that see nothing stay at home
            pieces.append(Piece(Role.Q, as_spans(union(bands[:, :2])), part.q_heads, lane.batch))
        alone = slices.groups.world_size == 1
        pieces.append(lane.kv(needed_rows(lane, problem.layout.seq_len)[:, :2] if alone else problem.held(group)))
    return pieces


def _held_part(piece: Piece, problem: Problem, rank: int) -> Piece | None:
    """The part of a piece that a rank holds from the start; None when that is nothing."""
    rows = np.array([(span.start, span.stop) for span in piece.spans], dtype=np.int64).reshape(-1, 2)
    rows = intersect(rows, problem.held(rank))
    return Piece(piece.role, as_spans(rows), piece.heads, piece.batch) if len(rows) else None


def _shifted(step: Step, heads: int, number: int) -> Step:
    """An inner step with groups replaced by the ranks that stand for them, one step later."""

    def real(group: int) -> int:
        return group * heads + number

    transfers = [Transfer(real(t.src), real(t.dst), t.piece, t.until + 1, t.recall) for t in step.transfers]
    computes = [Compute(real(c.rank), c.q, c.kv, c.bands, c.maybe) for c in step.computes]
    return Step(tuple(transfers), tuple(computes))
