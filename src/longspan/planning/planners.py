"""The planners (ring, exchange, all-gather, chunked), their names, and what a scheme's name stands for.

A planner is a function from a problem and a rank to that rank's steps. `PLANNERS` lists planners by name. `VOLUMES`
gives in closed form how much every rank receives under a planner; a planner without an entry is summed step by step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.errors import PlanError
from longspan.masks import bands as bd
from longspan.planning.backward_plan import reverse
from longspan.planning.cost import received
from longspan.planning.fetch import Fetch, arrivals, moves
from longspan.planning.hybrid import Planner, Slices, alone, hybrid
from longspan.planning.problem import Chunks, Lane, Part, Problem, cells, in_rows
from longspan.planning.steps import Compute, Piece, Recall, Role, Schedule, Step, Transfer
from longspan.planning.volume import (
    Volume,
    all_gather_volume,
    alone_volume,
    exchange_volume,
    hybrid_volume,
    ring_volume,
)
from longspan.spans import Ints, Span, as_spans, by_position, union

# -- Ring: in step i a rank computes on the block of the rank i places behind it, and passes it on ---------------------


def ring(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The rank's steps. Every block visits every rank, whatever the mask."""
    size, rows = problem.layout.world_size, problem.layout.by_position
    arrived = np.column_stack((rows[:, :2], (rank - rows[:, 2]) % size))
    computes = problem.computes(rank, (arrived,) * len(problem.lanes), size)
    steps: list[Step] = []
    for i in range(size):
        transfers: list[Transfer] = []
        if i < size - 1:
            # The first hop leaves its owner, who needs nothing back; later hops return what they took along.
            recall = Recall.KEEP if i == 0 else Recall.RETURN
            for src in sorted({rank, (rank - 1) % size}):
                block = problem.blocks[(src - i) % size]
                transfers += [Transfer(src, (src + 1) % size, piece, i + 1, recall) for piece in block]
        steps.append(Step(tuple(transfers), tuple(computes[i])))
    return tuple(steps)


# -- Chunked: an exchange that computes chunk by chunk, in an order independent of the number of ranks -----------------
# A query meets the keys of its own chunk first, then those before it, nearest first, then those after it, last first.
# The first ones are local if neighbouring chunks are on one rank, and are computed while other keys are in flight.
# Backward uses the reverse order.


def chunked(problem: Problem, chunks: Chunks, rank: int) -> tuple[Step, ...]:
    """The rank's steps: pairs that need nothing from others while the rest is in flight, then all others."""
    transfers: list[Transfer] = []
    early: list[Compute] = []
    late: list[Compute] = []
    for lane, pairs in zip(problem.lanes, problem.chunk_pairs, strict=True):
        transfers += _transfers(lane, pairs, chunks, rank)
        for (q, kv), compute in _computes(lane, chunks, rank):
            at_once = kv <= q and chunks.run[kv] == chunks.run[q]
            (early if at_once else late).append(compute)
    return Step(tuple(transfers), tuple(early)), Step((), tuple(late))


def _transfers(lane: Lane, pairs: Ints, chunks: Chunks, rank: int) -> list[Transfer]:
    """What the rank sends and receives: of every chunk of keys the stretch that is seen, apart by who sees it.

    Stretches have no gaps, so that tiles lie in them as they lie in a whole chunk.
    """
    q, kv = pairs[:, 0], pairs[:, 1]
    dst, src = chunks.owner[q], chunks.owner[kv]
    mine = (src != dst) & ((src == rank) | (dst == rank))
    seen: dict[tuple[int, int, int], tuple[int, int, set[Span]]] = {}
    for s, d, j, i, start, stop in zip(*(x[mine].tolist() for x in (src, dst, kv, q, *pairs[:, 2:].T)), strict=True):
        low, high, branches = seen.get((s, d, j), (start, stop, set[Span]()))
        seen[s, d, j] = (min(low, start), max(high, stop), branches | {chunks.branch(i)})
    alike: dict[tuple[int, int, tuple[Span, ...]], list[tuple[int, int]]] = {}
    for (s, d, _), (start, stop, branches) in sorted(seen.items()):
        alike.setdefault((s, d, tuple(sorted(branches))), []).append((start, stop))
    return [
        Transfer(s, d, Piece(Role.KV, as_spans(union(np.array(rows))), lane.kv_heads, lane.batch, apart), until=1)
        for (s, d, apart), rows in alike.items()
    ]


def _computes(lane: Lane, chunks: Chunks, rank: int) -> list[tuple[tuple[int, int], Compute]]:
    """One compute for every pair of chunks and part, in the order of merging."""
    computes: list[tuple[tuple[int, int], Compute]] = []
    for part in lane.parts:
        for (q, kv), (sure, maybe) in _bands(part, chunks, rank).items():
            both = np.concatenate((sure, maybe))
            rows = Piece(Role.Q, as_spans(union(both[:, :2])), part.q_heads, lane.batch)
            keys = Piece(Role.KV, as_spans(union(both[:, 2:4])), lane.kv_heads, lane.batch, (chunks.branch(q),))
            computes.append(((q, kv), Compute(rank, rows, keys, bd.as_bands(sure), bd.as_bands(maybe))))
    # Reversed, which is backward, this is ascending in queries for the keys of one chunk and one branch.
    return sorted(computes, key=lambda pair: (pair[0][1] > pair[0][0], -pair[0][1], -pair[0][0]))


def _bands(part: Part, chunks: Chunks, rank: int) -> dict[tuple[int, int], tuple[Ints, Ints]]:
    """The part's sure and maybe bands in the queries of the rank, by chunk of queries and chunk of keys."""
    mine = chunks.rows[chunks.owner == rank]
    by_pair: dict[tuple[int, int], list[Ints]] = {}
    for kind, bands in enumerate((part.plane.sure, part.plane.maybe)):
        cut = bd.tighten(cells(in_rows(bands, mine)[0], chunks.rows))
        numbers = cut[:, [bd.Q0, bd.K0]] // chunks.length
        order = np.lexsort((numbers[:, 1], numbers[:, 0]))
        keys, first = np.unique(numbers[order], axis=0, return_index=True)
        for (q, kv), group in zip(keys.tolist(), np.split(cut[order], first[1:]) if len(first) else [], strict=True):
            by_pair.setdefault((q, kv), [cut[:0], cut[:0]])[kind] = group
    return {pair: (sure, maybe) for pair, (sure, maybe) in by_pair.items()}


# -- Exchange: only rows that the mask needs travel, from owner to user, in overlapped stages --------------------------


def exchange(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The rank's steps: local pairs first, then those of each stage, while the next stage is in flight."""
    if problem.chunks is not None:
        return chunked(problem, problem.chunks, rank)
    return fetching(problem, rank, problem.needed_fetches, problem.num_stages)


def fetching(problem: Problem, rank: int, fetches: tuple[Fetch, ...], stages: int) -> tuple[Step, ...]:
    """The steps of a rank whose rows come as `fetches` say, one for each lane."""
    node, layout = problem.node, problem.layout
    # Rows from other nodes come a step later, and their ports hold them one more, which backward needs to ask again.
    num_steps = stages + 1 + 2 * (node < layout.world_size)
    transfers: list[list[Transfer]] = [[] for _ in range(num_steps)]
    arrived: list[Ints] = []
    for lane, fetch in zip(problem.lanes, fetches, strict=True):
        for (step, src, dst, until), rows in moves(fetch, layout, node, rank).items():
            transfers[step].append(Transfer(src, dst, lane.kv(rows), until))
        arrived.append(_with_steps([problem.held(rank), *arrivals(fetch, node, rank, num_steps)[1:]]))
    computes = problem.computes(rank, arrived, num_steps)
    return tuple(Step(tuple(moved), tuple(work)) for moved, work in zip(transfers, computes, strict=True))


def _with_steps(arrived: list[Ints]) -> Ints:
    """(start, stop, step) of the rows of every step, sorted by position."""
    step = np.repeat(np.arange(len(arrived)), [len(rows) for rows in arrived])
    return by_position(np.column_stack((np.concatenate(arrived), step)))


# -- All-gather: every rank gets all K and V, then computes the rest ---------------------------------------------------
# This is an exchange of all rows in one stage. Between nodes every row crosses once per node, as in the collective of
# the same name.


def all_gather(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The rank's steps: local pairs while everything is in flight, then all the rest at once."""
    return fetching(problem, rank, (problem.gather_fetch,) * len(problem.lanes), min(problem.layout.world_size - 1, 1))


# -- Schemes by name ---------------------------------------------------------------------------------------------------


PLANNERS: dict[str, Planner] = {
    "ring": ring,
    "all_gather": all_gather,
    "exchange": exchange,
}
VOLUMES: dict[Planner, Callable[[Problem], Volume]] = {
    ring: ring_volume,
    all_gather: all_gather_volume,
    exchange: exchange_volume,
    alone: alone_volume,
}

_HYBRID = re.compile(r"hybrid\((\d{1,6})(?:,\s*(\w+))?\)")


@dataclass(frozen=True, eq=False)
class Scheme:
    """A planner, spread over `heads` ranks by heads, bound to a problem."""

    name: str
    problem: Problem
    heads: int
    inner: Planner

    def __post_init__(self) -> None:
        _ = self._slices  # refuses groups that the ranks do not divide into, now and not at the first call

    @cached_property
    def _slices(self) -> Slices:
        return Slices(self.problem, self.heads)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The forward steps of one rank."""
        if not 0 <= rank < self.problem.layout.world_size:
            raise PlanError(f"{self.problem.layout} has no rank {rank}.")
        return hybrid(self._slices, rank, self.inner)

    @cached_property
    def work(self) -> Ints:
        """Allowed pairs that each rank computes, all heads and batch rows together."""
        if self.heads == 1:
            return self.problem.work
        kinds = [self._slices.kind(number) for number in range(self.heads)]
        alike = {kind: self._slices.slice(kinds.index(kind)).work for kind in set(kinds)}
        return np.stack([alike[kind] for kind in kinds], axis=1).ravel()

    @cached_property
    def _volume(self) -> Volume:
        return hybrid_volume(self._slices, VOLUMES[self.inner])

    def received(self, direction: str, *, keep: bool) -> Ints:
        """Bytes that each rank takes from the wire in one pass."""
        sizes = self.problem.sizes
        if self.inner in VOLUMES and self.problem.chunks is None:
            return self._volume.received(sizes, direction, keep=keep)
        num_bytes: list[int] = []
        for rank in range(self.problem.layout.world_size):
            steps = self.steps(rank)
            num_bytes.append(
                received(steps if direction == "forward" else reverse(steps, rank, keep=keep)[0], rank, sizes)
            )
        return np.array(num_bytes, dtype=np.int64)

    def schedule(self) -> Schedule:
        """Every rank's forward steps, written out."""
        ranks = tuple(self.steps(rank) for rank in range(self.problem.layout.world_size))
        return Schedule(self.name, "forward", self.problem.layout, self.problem.sizes, ranks)


def scheme(name: str, problem: Problem) -> Scheme:
    """What a name stands for: a planner, `all_to_all`, or `hybrid(HEADS, PLANNER)`.

    >>> from longspan import masks, layouts
    >>> from longspan.planning import Problem, Sizes
    >>> problem = Problem.make(masks.causal(), layouts.zigzag(64, 4), Sizes(8, 2, 64, 64, 2))
    >>> scheme("hybrid(2, exchange)", problem).name
    'hybrid(2,exchange)'
    """
    name = name.replace(" ", "")
    if problem.chunks is not None and name != "exchange":
        raise PlanError(
            f"scheme {name!r} was asked for with chunks = {problem.chunks.num}. Only an exchange computes in chunks"
            f" and keeps queries at home, where their real output is; others add gradients up in an order that"
            f" depends on the number of ranks. Use 'exchange' or 'auto', or leave chunks out."
        )
    if name in PLANNERS:
        return Scheme(name, problem, 1, PLANNERS[name])
    if name == "all_to_all":
        return Scheme(name, problem, problem.layout.world_size, alone)
    match = _HYBRID.fullmatch(name)
    if match and (match[2] or "ring") in PLANNERS:
        return Scheme(name, problem, int(match[1]), PLANNERS[match[2] or "ring"])
    raise PlanError(
        f"scheme {name!r} was asked for. Choose one of {', '.join(PLANNERS)}, all_to_all and hybrid(HEADS, PLANNER),"
        f" as in hybrid(8, exchange); 'auto' compares them."
    )
