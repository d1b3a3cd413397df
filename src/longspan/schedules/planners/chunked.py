"""Chunked: an exchange that computes chunk by chunk, in an order that no number of ranks changes.

A query meets the keys of its own chunk first, then those before it, nearest first, then those after it, last first.
What comes first lies on its own rank wherever chunks are neighbours there, and is computed while other keys are in
flight. Backward goes the other way round.
"""

from __future__ import annotations

import numpy as np

from longspan.masks import bands as bd
from longspan.schedules.chunks import Chunks
from longspan.schedules.problem import Lane, Part, Problem, cells, in_rows
from longspan.schedules.steps import Compute, Piece, Role, Step, Transfer
from longspan.span import Ints, Span, as_spans, union


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
