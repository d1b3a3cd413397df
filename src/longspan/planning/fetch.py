"""Fetch: which K/V rows every rank gets, from which rank and when. Owner and user compute the same result separately.

Rows whose owner is in the same node come directly from the owner. Rows from other nodes enter a node once, through
one of its ranks (the port; every rank of the node is the port of an equal share), and go on to their users over the
node's own links. With one node there is only the first kind.

A rank, or a node, starts with the rows just before its own and goes round the sequence from there; different ranks
start at different places, so that no rank has to send to all others at once.

Eight causal tokens on two nodes of two ranks, two tokens on each rank. Ranks 2 and 3 both need tokens 0:4 of node 0::

    node 0                  network              node 1
    rank 0 (0:2)  ── 0:2 ─────────────────►  rank 3 (6:8)  ── 0:2 ──►  rank 2
    rank 1 (2:4)  ── 2:4 ─────────────────►  rank 2 (4:6)  ── 2:4 ──►  rank 3

Each of them is the port for one half. Four rows cross the network instead of eight, over two links at once; then
the two ranks exchange halves over their own, faster link. See `plan_fetch` and `moves`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.layouts import Layout
from longspan.spans import Ints, by_position, join, on_one_line, steps_within, subtract, union

START, STOP, TAKER, STAGE, PORT = range(5)
STAGES = 4
"""Stages of an exchange whose messages start a step early. With two, half of the pairs are left when the last rows
arrive; eight cost more launches and messages than they hide (`python -m benchmarks.overlap`)."""


def lead(stage: Ints, stages: int, ahead: int) -> tuple[Ints, Ints]:
    """Return how many steps before the step that waits for it each stage starts, in forward and in backward."""
    return np.minimum(stage, ahead), np.minimum(stages - 1 - stage, ahead)  # backward begins with the last stage


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """One lane's fetches. `near`: (start, stop, rank, stage); `far`: (start, stop, node, stage, port rank)."""

    near: Ints
    far: Ints
    remote: Ints
    """(start, stop, rank) of all rows that a rank needs from other nodes."""


def plan_fetch(needed: Ints, layout: Layout, node: int, stages: int, *, by_owner: bool = False) -> Fetch:
    """Return the fetches of (start, stop, rank) rows that ranks need and do not hold, in `stages` stages.

    `by_owner`: of the rows of each owner, every stage has an equal share, so that all ranks are busy sending in all
    stages. Otherwise it has an equal share of all rows that a rank needs.

    The example above, in one stage: rank 1 gets 0:2 and rank 3 gets 4:6 from their neighbours, and node 1 gets 2:4
    through rank 2 and 0:2 through rank 3.

    >>> fetch = plan_fetch(np.array([[0, 2, 1], [0, 4, 2], [0, 6, 3]]), contiguous(8, 4), node=2, stages=1)
    >>> fetch.near.tolist(), fetch.far.tolist()
    ([[0, 2, 1, 0], [4, 6, 3, 0]], [[2, 4, 1, 0, 2], [0, 2, 1, 0, 3]])
    """
    rows, owners, seq_len = layout.table, layout.by_position, layout.seq_len
    if node >= layout.world_size:
        near = _by_owner(needed, owners, stages) if by_owner else split_in_stages(needed, rows, seq_len, stages)
        return Fetch(near, np.empty((0, 5), dtype=np.int64), needed[:0])
    i, j = join(needed[:, :2], owners[:, :2])
    cut = np.stack(
        (np.maximum(needed[i, 0], owners[j, 0]), np.minimum(needed[i, 1], owners[j, 1]), needed[i, 2]), axis=1
    )
    is_far = owners[j, 2] // node != cut[:, 2] // node
    remote = by_taker(cut[is_far], seq_len)
    near = by_taker(cut[~is_far], seq_len)
    near = _by_owner(near, owners, stages) if by_owner else split_in_stages(near, rows, seq_len, stages)
    nodes, node_rows = remote.copy(), rows.copy()
    nodes[:, 2] //= node
    node_rows[:, 2] //= node
    # Stages times ports equal shares: consecutive shares of a stage enter through consecutive ports.
    far = split_in_stages(by_taker(nodes, seq_len), node_rows, seq_len, stages * node)
    port = far[:, TAKER] * node + far[:, STAGE] % node
    return Fetch(near, np.column_stack((far[:, :STAGE], far[:, STAGE] // node, port)), remote)


def num_stages(rows: NDArray[np.float64], node: int, max_rows: int) -> int:
    """Return how many stages all ranks use, given the rows that each needs: one, or as many as `max_rows` requires.

    One stage is hidden behind the local pairs already; more cost launches and merges, which on a GPU outweigh what they
    hide. A rank holds one stage while the next arrives; a port holds its share of four stages, of at most all that its
    node's ranks need. A few rows are lost to rounding.
    """
    if len(rows) == 1:
        return 0
    ported = 0.0 if node >= len(rows) else 4 * float(rows.reshape(-1, node).sum(axis=1).max()) / node
    return max(1, math.ceil((2 * float(rows.max()) + ported) / max(max_rows - 8, 1)))


def by_taker(rows: Ints, seq_len: int) -> Ints:
    """Return (start, stop, taker) rows sorted by taker and position, without overlap."""
    return _from_line(union(on_one_line(rows, rows[:, 2], seq_len)), seq_len)


def without(rows: Ints, held: Ints, seq_len: int) -> Ints:
    """Return (start, stop, taker) rows without those that the taker holds, both disjoint per taker."""
    needed, present = (by_position(on_one_line(part, part[:, 2], seq_len)) for part in (rows, held))
    return _from_line(subtract(needed, present), seq_len)


def _from_line(line: Ints, seq_len: int) -> Ints:
    taker = line[:, 0] // (seq_len + 1)
    return np.column_stack((on_one_line(line, -taker, seq_len), taker))


def split_in_stages(rows: Ints, held: Ints, seq_len: int, count: int) -> Ints:
    """Return (start, stop, taker, share): every taker's rows cut into `count` equal shares, starting before its own."""
    rows = rows[rows[:, 1] > rows[:, 0]]  # a sequence of no tokens needs nothing
    if count == 1 or not len(rows):
        return np.column_stack((rows, np.zeros(len(rows), dtype=np.int64)))
    takers = int(max(rows[:, 2].max(), held[:, 2].max())) + 1
    first = np.zeros(takers, dtype=np.int64)
    first[held[::-1, 2]] = held[::-1, 0]
    # Downwards from the taker's first token, wrapping around the sequence, back to that token.
    rows = rows[np.lexsort(((first[rows[:, 2]] - rows[:, 1]) % seq_len, rows[:, 2]))]
    i, number, begin, end = _shares(rows[:, 1] - rows[:, 0], rows[:, 2], count)
    # Rows are taken from the top of each span downwards.
    return np.stack((rows[i, 1] - end, rows[i, 1] - begin, rows[i, 2], number), axis=1)


def _by_owner(rows: Ints, owners: Ints, count: int) -> Ints:
    """Return (start, stop, taker, share): each owner's rows for each taker cut into `count` equal shares.

    Shares ascend: the rows of the first are those that most queries of a causal mask use, so that the last share, whose
    pairs are computed when all has arrived, is the least work.
    """
    rows = rows[rows[:, 1] > rows[:, 0]]
    i, j = join(rows[:, :2], owners[:, :2])
    start, stop = np.maximum(rows[i, 0], owners[j, 0]), np.minimum(rows[i, 1], owners[j, 1])
    order = np.lexsort((start, owners[j, 2], rows[i, 2]))
    start, stop, taker, owner = start[order], stop[order], rows[i[order], 2], owners[j[order], 2]
    is_new = (np.diff(taker, prepend=-1) != 0) | (np.diff(owner, prepend=-1) != 0)
    which, number, begin, end = _shares(stop - start, np.cumsum(is_new) - 1, count)
    return np.stack((start[which] + begin, start[which] + end, taker[which], number), axis=1)


def _shares(sizes: Ints, group: Ints, count: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut spans of these sizes, sorted by group, into `count` equal shares of each group. Return for each piece its
    span, its share, and where it begins and ends in its span."""
    each = np.bincount(group, weights=sizes.astype(np.float64)).astype(np.int64)
    share = np.maximum(-(-each // count), 1)[group]
    before = np.cumsum(sizes) - sizes - (np.cumsum(each) - each)[group]
    low, high = before // share, (before + sizes - 1) // share
    pieces = high - low + 1
    i = np.repeat(np.arange(len(sizes)), pieces)
    number = low[i] + steps_within(pieces)
    begin = np.maximum(number * share[i] - before[i], 0)
    end = np.minimum((number + 1) * share[i] - before[i], sizes[i])
    return i, number, begin, end


Move = tuple[int, int, int, int, int, int]
"""Step, source, target, the last step of use, and how many steps it may travel longer, in forward and in backward."""


def moves(fetch: Fetch, layout: Layout, node: int, rank: int, stages: int = 1, ahead: int = 0) -> dict[Move, Ints]:
    """Return everything the rank sends or receives: for each move, its sorted (start, stop) rows.

    A stage starts `ahead` steps before the step at whose end it must have arrived, or in the first step.

    Rank 2 of the example above is the port for 2:4: it passes them on to rank 3 a step after they came in, and gets 0:2
    from rank 3, the other port. The rows 4:6 are its own, and its neighbour needs them.

    >>> fetch = plan_fetch(np.array([[0, 2, 1], [0, 4, 2], [0, 6, 3]]), contiguous(8, 4), node=2, stages=1)
    >>> for (step, src, dst, until, *_), rows in moves(fetch, contiguous(8, 4), 2, rank=2).items():
    ...     print(f"step {step}: {src} > {dst}", rows.tolist(), f"until {until}")
    step 0: 1 > 2 [[2, 4]] until 3
    step 0: 2 > 3 [[4, 6]] until 1
    step 1: 2 > 3 [[2, 4]] until 2
    step 1: 3 > 2 [[0, 2]] until 2
    """
    owners = layout.by_position
    parts = [_cut_by_owner(fetch.near, owners, rank, lag=1)]
    if len(fetch.far):
        # A port holds rows one step longer than its users: in backward it must have them before it serves them.
        parts.append(_cut_by_owner(fetch.far[:, [START, STOP, PORT, STAGE]], owners, rank, lag=3))
    for part in parts:
        part[:, 4], part[:, 5] = lead(part[:, 0], stages, ahead)
        part[:, 0] -= part[:, 4]
    if len(fetch.far):
        # Inside the rank's node, ports pass rows on one step after they arrived.
        ports = by_position(fetch.far[fetch.far[:, TAKER] == rank // node])
        users = fetch.remote[fetch.remote[:, 2] // node == rank // node]
        i, j = join(users[:, :2], ports[:, :2])
        start, stop = np.maximum(users[i, 0], ports[j, 0]), np.minimum(users[i, 1], ports[j, 1])
        step = ports[j, STAGE] + 1
        none = np.zeros_like(step)
        relayed = np.stack((step, ports[j, PORT], users[i, 2], step + 1, none, none, start, stop), axis=1)
        parts.append(relayed[relayed[:, 1] != relayed[:, 2]])
    rows = np.concatenate(parts)
    rows = rows[(rows[:, 1] == rank) | (rows[:, 2] == rank)]
    rows = rows[np.lexsort(rows[:, 6::-1].T)]
    keys, start = np.unique(rows[:, :6], axis=0, return_index=True)
    groups = np.split(rows[:, 6:], start[1:]) if len(start) else []
    return {(k[0], k[1], k[2], k[3], k[4], k[5]): union(group) for k, group in zip(keys.tolist(), groups, strict=True)}


def _cut_by_owner(rows: Ints, owners: Ints, rank: int, lag: int) -> Ints:
    """Return (stage, owner, taker, until, 0, 0, start, stop) of staged rows that the rank takes or owns, by owner."""
    owned, _ = join(rows[:, :2], owners[owners[:, 2] == rank][:, :2])
    rows = rows[np.union1d(np.flatnonzero(rows[:, TAKER] == rank), owned)]
    i, j = join(rows[:, :2], owners[:, :2])
    start, stop = np.maximum(rows[i, 0], owners[j, 0]), np.minimum(rows[i, 1], owners[j, 1])
    stage, none = rows[i, STAGE], np.zeros(len(i), dtype=np.int64)
    moved = np.stack((stage, owners[j, 2], rows[i, TAKER], stage + lag, none, none, start, stop), axis=1)
    return moved[(moved[:, 1] == rank) | (moved[:, 2] == rank)]


def arrivals(fetch: Fetch, node: int, rank: int, num_steps: int) -> list[Ints]:
    """Return for every step the sorted rows whose pairs are computed in it."""
    near = fetch.near[fetch.near[:, TAKER] == rank]
    parts = [(near[:, STAGE] + 1, near[:, :2])]
    if len(fetch.far):
        ports = by_position(fetch.far[fetch.far[:, TAKER] == rank // node])
        mine = fetch.remote[fetch.remote[:, 2] == rank]
        i, j = join(mine[:, :2], ports[:, :2])
        cut = np.stack((np.maximum(mine[i, 0], ports[j, 0]), np.minimum(mine[i, 1], ports[j, 1])), axis=1)
        parts.append((ports[j, STAGE] + 2, cut))
    return [union(np.concatenate([rows[step == number] for step, rows in parts])) for number in range(num_steps)]
