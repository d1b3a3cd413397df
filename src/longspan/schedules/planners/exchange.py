"""Exchange: only the rows the mask needs travel, straight from owner to user, in overlapped stages.

Which rows a rank fetches in which stage depends on that rank's needs alone, so owner and user work it out separately
and agree without talking. A rank starts with the rows just before its own and goes round the sequence from there;
ranks start at different places, so nobody is asked by everybody at once.
"""

from __future__ import annotations

import numpy as np

from longspan.schedules.problem import Problem, num_rows
from longspan.schedules.steps import Step, Transfer
from longspan.span import Ints, join, union

DEFAULT_STAGES = 4
MIN_STAGE_ROWS = 1024


def exchange(problem: Problem, rank: int, stages: int | None = None) -> tuple[Step, ...]:
    """The rank's steps: step 0 computes local pairs, step k those of stage k - 1, while the next stage is in flight."""
    count = num_stages(problem) if stages is None else stages
    staged = [_staged(rows, problem, count) for rows in problem.fetches]
    transfers: list[list[Transfer]] = [[] for _ in range(count)]
    for lane, rows in zip(problem.lanes, staged, strict=True):
        for (stage, src, dst), spans in _moves(rows, problem, rank):
            transfers[stage].append(Transfer(src, dst, lane.kv(spans), until=stage + 1))
    steps: list[Step] = []
    for i in range(count + 1):
        computes = [
            compute
            for lane, rows in zip(problem.lanes, staged, strict=True)
            for compute in problem.computes(rank, problem.held(rank) if i == 0 else _arrived(rows, rank, i - 1), lane)
        ]
        steps.append(Step(tuple(transfers[i]) if i < count else (), tuple(computes)))
    return tuple(steps)


def num_stages(problem: Problem, max_rows: int | None = None) -> int:
    """How many stages all ranks use: enough to overlap, and to keep two of them within `max_rows` if that is given."""
    size = problem.layout.world_size
    rows = np.zeros(size, dtype=np.int64)
    for fetch in problem.fetches:
        np.add.at(rows, fetch[:, 2], fetch[:, 1] - fetch[:, 0])
    most = int(rows.max(initial=0))
    if most == 0:
        return 0
    wanted = min(DEFAULT_STAGES, -(-most // MIN_STAGE_ROWS))
    return wanted if max_rows is None else max(wanted, -(-2 * most // max(max_rows, 1)))


def _arrived(staged: Ints, rank: int, stage: int) -> Ints:
    """The (start, stop) rows that reach the rank in a stage, sorted."""
    return union(staged[(staged[:, 2] == rank) & (staged[:, 3] == stage)][:, :2])


def _staged(fetch: Ints, problem: Problem, count: int) -> Ints:
    """(start, stop, rank, stage): what each rank fetches when, every rank's rows cut into `count` equal shares."""
    if not len(fetch):
        return np.empty((0, 4), dtype=np.int64)
    layout = problem.layout
    first = np.full(layout.world_size, 0, dtype=np.int64)
    first[layout.rows[::-1, 2]] = layout.rows[::-1, 0]
    rank, sizes = fetch[:, 2], fetch[:, 1] - fetch[:, 0]
    # Downwards from the rank's first token, round the end of the sequence, until that token is met again.
    fetch = fetch[np.lexsort(((first[rank] - fetch[:, 1]) % layout.seq_len, rank))]
    rank, sizes = fetch[:, 2], fetch[:, 1] - fetch[:, 0]
    per_rank = np.bincount(rank, weights=sizes.astype(np.float64), minlength=layout.world_size).astype(np.int64)
    share = np.maximum(-(-per_rank // count), 1)[rank]
    before = np.cumsum(sizes) - sizes - (np.cumsum(per_rank) - per_rank)[rank]
    low, high = before // share, (before + sizes - 1) // share
    pieces = high - low + 1
    i = np.repeat(np.arange(len(fetch)), pieces)
    stage = low[i] + np.arange(len(i)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    # Rows are taken from the top of each span downwards.
    begin = np.maximum(stage * share[i] - before[i], 0)
    end = np.minimum((stage + 1) * share[i] - before[i], sizes[i])
    return np.stack((fetch[i, 1] - end, fetch[i, 1] - begin, rank[i], stage), axis=1)


def _moves(staged: Ints, problem: Problem, rank: int) -> list[tuple[tuple[int, int, int], Ints]]:
    """((stage, src, dst), sorted (start, stop) rows) of everything the rank sends or receives."""
    mine = staged[staged[:, 2] == rank]
    owners = problem.layout.by_position
    i, j = join(mine[:, :2], owners[:, :2])
    incoming = _meet(mine, i, owners[j, :2], owners[j, 2])
    others = staged[staged[:, 2] != rank]
    held = problem.held(rank)
    i, j = join(others[:, :2], held)
    outgoing = _meet(others, i, held[j], np.full(len(i), rank, dtype=np.int64))
    rows = np.concatenate((incoming, outgoing))
    rows = rows[np.lexsort((rows[:, 3], rows[:, 2], rows[:, 1], rows[:, 0]))]
    keys, start = np.unique(rows[:, :3], axis=0, return_index=True)
    groups = np.split(rows[:, 3:], start[1:]) if len(start) else []
    return [((int(key[0]), int(key[1]), int(key[2])), union(group)) for key, group in zip(keys, groups, strict=True)]


def _meet(staged: Ints, i: Ints, places: Ints, src: Ints) -> Ints:
    """(stage, src, dst, start, stop) of staged rows i cut to the places where they are held."""
    start = np.maximum(staged[i, 0], places[:, 0])
    stop = np.minimum(staged[i, 1], places[:, 1])
    return np.stack((staged[i, 3], src, staged[i, 2], start, stop), axis=1)


def rows_fetched(problem: Problem) -> int:
    """Remote K/V rows of all ranks together, each key/value head set counted once."""
    return sum(num_rows(rows) for rows in problem.fetches)
