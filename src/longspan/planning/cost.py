"""Costs of a rank's steps, without times: traffic, row uses, live memory, and kernel launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from longspan.layouts import Layout
from longspan.masks import bands as bd
from longspan.planning.fetch import by_taker
from longspan.planning.steps import Compute, Piece, Role, Sizes, Step
from longspan.spans import Ints, Span, join, on_one_line, steps_within, union

# -- Traffic: the bytes that a rank's steps move, summed as one table --------------------------------------------------


STEP, SRC, DST, UNTIL, BYTES, ADDED = range(6)
_ADDED = (Role.OUT, Role.DQ, Role.DKV)
"""What is put to a rank's own rows when it comes home; all else is used where it arrived."""


def traffic(steps: tuple[Step, ...], sizes: Sizes) -> Ints:
    """(step, source, target, until, bytes, whether it is added to own rows) of every transfer, step by step."""
    moved = [(number, t) for number, step in enumerate(steps) for t in step.transfers]
    weights = piece_bytes([t.piece for _, t in moved], sizes)
    rows = [
        (number, t.src, t.dst, t.until, weight, t.piece.role in _ADDED)
        for (number, t), weight in zip(moved, weights, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def piece_bytes(pieces: list[Piece], sizes: Sizes) -> list[int]:
    """`Piece.num_bytes` of each piece."""
    row_bytes = {role: sizes.row_bytes(role) for role in Role}
    tokens: dict[int, int] = {}  # a piece, its gradient and its copies share one tuple of spans
    num_bytes: list[int] = []
    for piece in pieces:
        spans = piece.spans
        if id(spans) not in tokens:
            tokens[id(spans)] = sum([span.stop - span.start for span in spans])
        rows, heads = piece.batch, piece.heads
        weight = (heads.stop - heads.start) * (sizes.batch if rows is None else rows.stop - rows.start)
        num_bytes.append(tokens[id(spans)] * weight * row_bytes[piece.role])
    return num_bytes


def received(steps: tuple[Step, ...], rank: int, sizes: Sizes) -> int:
    """Bytes the rank takes from the wire."""
    return sum(piece_bytes([t.piece for step in steps for t in step.transfers if t.dst == rank], sizes))


# -- Uses: which rows a rank's computes touch, and how often each row was touched before -------------------------------
# All steps are handled at once. Rows are cut into cells at every edge, so that all rows of a cell are used equally; a
# ring of a thousand steps then takes a few arrays instead of a thousand unions.


Key = tuple[Span, Span | None, tuple[Span, ...]]
"""Heads, batch rows, and which queries are added up apart."""


@dataclass(frozen=True, eq=False)
class Uses:
    """One side of all computes with the same heads and batch: an entry per compute and cell it uses, in their order."""

    key: Key
    steps: Ints
    """The step of each compute."""
    edges: Ints
    use: Ints
    cell: Ints
    own: NDArray[np.bool_]
    """Whether the rank holds the cell itself."""
    num_queries: int
    """How many different stretches of queries there are on the other side."""

    @staticmethod
    def of(key: Key, sides: list[tuple[int, Piece]], num_queries: int, own: Ints, seq_len: int) -> Uses:
        """The uses of (step, piece), beside a rank's own sorted and disjoint rows."""
        rows = by_taker(labelled([piece for _, piece in sides]), seq_len)
        edges = np.unique(np.concatenate((rows[:, :2].ravel(), own.ravel())))
        first, last = np.searchsorted(edges, rows[:, 0]), np.searchsorted(edges, rows[:, 1])
        at = np.repeat(np.arange(len(rows)), last - first)
        cell = first[at] + steps_within(last - first)
        held = np.zeros(len(edges), dtype=np.bool_)
        held[join(np.stack((edges, edges + 1), axis=1), own)[0]] = True
        steps = np.array([number for number, _ in sides], dtype=np.int64)
        return Uses(key, steps, edges, rows[at, 2], cell, held[cell], num_queries)

    @cached_property
    def tokens(self) -> Ints:
        """The rows of each entry's cell."""
        return self.edges[self.cell + 1] - self.edges[self.cell]

    @cached_property
    def nth(self) -> Ints:
        """How many earlier computes used the entry's cell."""
        order = np.argsort(self.cell, kind="stable")
        cells = self.cell[order]
        begin = np.searchsorted(cells, cells)
        nth = np.empty(len(order), dtype=np.int64)
        nth[order] = np.arange(len(order)) - begin
        return nth

    @cached_property
    def fresh(self) -> NDArray[np.bool_]:
        """The entries that are their cell's first."""
        return self.nth == 0

    def num_rows(self, own: bool | None = None) -> int:
        """How many different rows are used: all, or only the rank's own, or only those of others."""
        which = self.fresh if own is None else self.fresh & (self.own == own)
        return int(self.tokens[which].sum())

    def merging(self, num_steps: int) -> Ints:
        """In each step, the most rows of contributions that one compute brings together, beside the sums they go into.

        Where it is a row's second, the first has been kept as it came until now.
        """
        brought = self.tokens * np.where(self.nth == 1, 2, self.nth > 1)
        most = np.zeros(num_steps, dtype=np.int64)
        np.maximum.at(most, self.steps, self._sums(brought))
        return most

    def arriving(self, num_steps: int) -> Ints:
        """In each step, rows of others that no earlier compute used."""
        rows = np.zeros(num_steps, dtype=np.int64)
        np.add.at(rows, self.steps, self._sums(self.tokens * (self.fresh & ~self.own)))
        return rows

    def num_remote(self, rows: Ints) -> Ints:
        """How many positions of each (start, stop) row are rows of others that some compute uses."""
        cells = np.sort(self.cell[self.fresh & ~self.own])
        if not len(cells):
            return np.zeros(len(rows), dtype=np.int64)
        starts, sizes = self.edges[cells], self.edges[cells + 1] - self.edges[cells]
        before = np.cumsum(sizes) - sizes
        at = np.searchsorted(starts, rows, side="right") - 1
        count = before[at] + np.minimum(rows - starts[at], sizes[at])
        count[at < 0] = 0
        return count[:, 1] - count[:, 0]

    def branching(self) -> int:
        """An upper bound on rows of dK/dV sums that wait for their sibling in the tree of sums (see `chunks`)."""
        if not self.key[2]:
            return 0
        return (self.num_queries - 1).bit_length() * int(self._sums(self.tokens).max())

    def _sums(self, values: Ints) -> Ints:
        """The values added up for each compute."""
        sums = np.zeros(len(self.steps), dtype=np.int64)
        np.add.at(sums, self.use, values)
        return sums

    def weight(self, sizes: Sizes) -> int:
        """Heads times batch rows."""
        heads, rows, _ = self.key
        return len(heads) * (sizes.batch if rows is None else len(rows))


def uses_of(steps: tuple[Step, ...], role: Role, own: Ints, seq_len: int) -> list[Uses]:
    """The query or key sides of all computes, by heads, batch rows and what is added up apart."""
    sides: dict[Key, list[tuple[int, Piece]]] = {}
    queries: dict[Key, set[int]] = {}
    for number, step in enumerate(steps):
        for compute in step.computes:
            piece = compute.q if role is Role.Q else compute.kv
            sides.setdefault(key_of(piece), []).append((number, piece))
            queries.setdefault(key_of(piece), set()).add(compute.q.spans[0].start)
    return [Uses.of(key, pieces, len(queries[key]), own, seq_len) for key, pieces in sides.items()]


def key_of(piece: Piece) -> Key:
    return piece.heads, piece.batch, piece.apart


def labelled(pieces: list[Piece]) -> Ints:
    """(start, stop, number) of every span of the pieces, in their order."""
    rows = [(span.start, span.stop, number) for number, piece in enumerate(pieces) for span in piece.spans]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def in_one_piece(steps: Ints, rows: Ints, pieces: Ints, window: Ints, seq_len: int) -> NDArray[np.bool_]:
    """Whether all rows of each compute lie in one of the pieces that are there in its step.

    `rows` and `pieces` are (start, stop, number) as `by_taker` gives them; a piece is there in the steps after
    `window[:, 0]` up to `window[:, 1]`.
    """
    first = np.searchsorted(rows[:, 2], np.arange(len(steps)))
    points, which = np.unique(rows[first, 0], return_inverse=True)  # a piece with all rows has the first
    order = np.argsort(which, kind="stable")
    begin = np.searchsorted(which[order], np.arange(len(points) + 1))
    i, point = join(pieces[:, :2], np.stack((points, points + 1), axis=1))
    count = (begin[1:] - begin[:-1])[point]
    piece = np.repeat(pieces[i, 2], count)
    compute = order[np.repeat(begin[point], count) + steps_within(count)]
    there = (window[piece, 0] < steps[compute]) & (steps[compute] <= window[piece, 1])
    piece, compute = piece[there], compute[there]
    # Every row of the compute is looked for in the piece, all pieces laid one after another on a long line.
    last = np.append(first[1:], len(rows))
    sizes = last[compute] - first[compute]
    pair = np.repeat(np.arange(len(piece)), sizes)
    row = rows[first[compute][pair] + steps_within(sizes), :2]
    row, line = on_one_line(row, piece[pair], seq_len), on_one_line(pieces, pieces[:, 2], seq_len)
    at = np.searchsorted(line[:, 0], row[:, 0], side="right") - 1
    missing = (at < 0) | (line[at, 1] < row[:, 1]) if len(line) else np.ones(len(row), dtype=np.bool_)
    whole = np.ones(len(piece), dtype=np.bool_)
    whole[pair[missing]] = False
    answer = np.zeros(len(steps), dtype=np.bool_)
    answer[compute[whole]] = True
    return answer


# -- Memory of a rank besides its own q, k, v and results, step by step ------------------------------------------------
# Counted is what a run holds: pieces that arrived or are arriving, messages being sent, float32 sums, copies of rows
# that are gathered for a kernel, and results that are about to be merged. Memory that a kernel allocates internally is
# not counted.


def live_bytes(
    steps: tuple[Step, ...], rank: int, layout: Layout, sizes: Sizes, direction: str, kept: tuple[Piece, ...] = ()
) -> Ints:
    """Bytes alive in each step."""
    size = max(len(steps), 1)
    change = np.zeros(size + 1, dtype=np.int64)  # of what stays from a step on
    change[0] = sum(piece_bytes(list(kept), sizes))
    once = np.zeros(size, dtype=np.int64)  # what is there in a step only
    if len(steps):
        own = union(layout.span_table(rank))
        _add_transfers(change, once, traffic(steps, sizes), rank)
        once += _gathered(steps, rank, own, layout.seq_len, sizes, kept)
        queries, keys = (uses_of(steps, role, own, layout.seq_len) for role in (Role.Q, Role.KV))
        if direction == "forward":
            _add_results(change, once, queries, sizes)
        else:
            _add_gradients(change, once, queries, sizes)
            _add_key_gradients(change, once, keys, steps, rank, sizes)
    return np.cumsum(change[:size]) + once


def peak_bytes(
    steps: tuple[Step, ...], rank: int, layout: Layout, sizes: Sizes, direction: str, kept: tuple[Piece, ...] = ()
) -> int:
    """The largest of `live_bytes`."""
    return int(live_bytes(steps, rank, layout, sizes, direction, kept).max(initial=0))


def _add_transfers(change: Ints, once: Ints, moved: Ints, rank: int) -> None:
    """What arrives, until its last use, and what is sent, while it is sent."""
    into = moved[moved[:, DST] == rank]
    np.add.at(change, into[:, STEP], into[:, BYTES])
    np.subtract.at(change, np.clip(into[:, UNTIL] + 1, into[:, STEP], len(once)), into[:, BYTES])
    sent = moved[moved[:, DST] != rank]
    np.add.at(once, sent[:, STEP], sent[:, BYTES])


def _gathered(
    steps: tuple[Step, ...], rank: int, own: Ints, seq_len: int, sizes: Sizes, kept: tuple[Piece, ...]
) -> Ints:
    """In each step, the largest copy of K and V that must be put together from several pieces."""
    most = np.zeros(len(steps), dtype=np.int64)
    uses = [(number, compute.kv) for number, step in enumerate(steps) for compute in step.computes]
    here = [(-1, len(steps), piece) for piece in kept if piece.role is Role.KV]
    for number, step in enumerate(steps):
        here += [(number, t.until, t.piece) for t in step.transfers if t.dst == rank and t.piece.role is Role.KV]
    pieces = labelled([piece for _, _, piece in here])
    held = np.column_stack((own, np.full(len(own), len(here), dtype=np.int64)))
    window = np.array([(begin, end) for begin, end, _ in here] + [(-1, len(steps))], dtype=np.int64)
    number = np.array([number for number, _ in uses], dtype=np.int64)
    rows = by_taker(labelled([piece for _, piece in uses]), seq_len)
    whole = in_one_piece(number, rows, by_taker(np.concatenate((pieces, held)), seq_len), window, seq_len)
    copied = np.array(piece_bytes([piece for _, piece in uses], sizes), dtype=np.int64)
    np.maximum.at(most, number[~whole], copied[~whole])
    return most


def _add_results(change: Ints, once: Ints, queries: list[Uses], sizes: Sizes) -> None:
    """One accumulator, maximum and sum per query row and head, from its first compute to the end."""
    wide = max(sizes.itemsize, 4)
    state, partial = (sizes.v_head_dim + 2) * wide, sizes.row_bytes(Role.OUT) + sizes.v_head_dim * wide
    for uses in queries:
        weight, copied = uses.weight(sizes), sizes.row_bytes(Role.Q) if uses.num_rows(own=False) else 0
        change[uses.steps[0]] += uses.num_rows() * weight * (state + copied)
        once += uses.merging(len(once)) * (weight * partial)


def _add_gradients(change: Ints, once: Ints, queries: list[Uses], sizes: Sizes) -> None:
    """dq per query row, from its first compute to the end."""
    wide = max(sizes.itemsize, 4)
    # a copy of q and of the output's gradient, and a stand-in for the output, where they came from elsewhere
    copies = sizes.row_bytes(Role.Q) + sizes.row_bytes(Role.DOUT) + sizes.v_head_dim * sizes.itemsize
    for uses in queries:
        weight, copied = uses.weight(sizes), copies if uses.num_rows(own=False) else 0
        change[uses.steps[0]] += uses.num_rows() * weight * (sizes.head_dim * wide + copied)
        once += uses.merging(len(once)) * (weight * sizes.row_bytes(Role.DQ))


def _add_key_gradients(
    change: Ints, once: Ints, keys: list[Uses], steps: tuple[Step, ...], rank: int, sizes: Sizes
) -> None:
    """dk and dv per key row, until they are sent home or, for own rows, to the end."""
    sent = [
        (n, t.piece) for n, s in enumerate(steps) for t in s.transfers if t.src == rank and t.piece.role is Role.DKV
    ]
    for uses in keys:
        once += uses.merging(len(once)) * (uses.weight(sizes) * sizes.row_bytes(Role.KV))
        weight = uses.weight(sizes) * sizes.row_bytes(Role.DKV)
        change[uses.steps[0]] += uses.num_rows(own=True) * weight
        waiting = uses.branching() * weight
        change[uses.steps[0]] += waiting
        change[uses.steps[-1] + 1] -= waiting
        change[: len(once)] += uses.arriving(len(once)) * weight
        mine = [(number, piece) for number, piece in sent if key_of(piece) == uses.key]
        rows = labelled([piece for _, piece in mine])
        left = np.array([number for number, _ in mine], dtype=np.int64)[rows[:, 2]] + 1
        np.subtract.at(change, left, uses.num_remote(rows[:, :2]) * weight)


# -- Launches: what the computes of a step become for a kernel that takes many slices ----------------------------------
# A variable-length kernel takes all slices of one window in one launch. The window is counted from the diagonal that
# ends in a slice's bottom-right corner, so all causal documents have the same window, whatever their lengths, and all
# rectangles have another. A launch packs no row twice: slices that need a row again go to another launch.
#
#     bands of a compute              window (left, right)     launch
#     q 0:4  x kv 0:4,  q - kv >= 0   (open, 0)                first
#     q 4:9  x kv 4:9,  q - kv >= 0   (open, 0)                first
#     q 9:12 x kv 4:9                 (open, open)             second


OPEN = -1
"""A window's bound where there is none."""
LANES = 6
Q_HEADS, KV_HEADS, Q_TOKENS, KV_TOKENS, BATCH, BANDS = range(LANES)


@dataclass(frozen=True, eq=False)
class LaunchTable:
    """One entry for each compute and window: how many launches, and what the largest of them packs."""

    compute: Ints
    """The number of the compute."""
    launches: Ints
    rows: Ints
    """Query rows of a launch, of one batch row."""
    cols: Ints
    slices: Ints
    """Slices of a launch, of one batch row."""

    def per_compute(self, num: int) -> NDArray[np.float64]:
        """How many launches each of the `num` computes takes."""
        return np.bincount(self.compute, self.launches, num).astype(np.float64)


def sides(computes: list[Compute], sizes: Sizes) -> Ints:
    """(query heads, key heads, query tokens, key tokens, batch rows, bands) of each compute."""
    facts = [
        (
            len(c.q.heads),
            len(c.kv.heads),
            c.q.num_tokens,
            c.kv.num_tokens,
            sizes.batch if c.q.batch is None else len(c.q.batch),
            len(c.bands) + len(c.maybe),
        )
        for c in computes
    ]
    return np.array(facts, dtype=np.int64).reshape(-1, LANES)


def bands_of(computes: list[Compute]) -> Ints:
    """The bands of all computes, one after another."""
    return bd.as_array(tuple(chain.from_iterable((*compute.bands, *compute.maybe) for compute in computes)))


def launch_table(rows: Ints, side: Ints) -> LaunchTable:
    """The launches of computes, from their bands and `sides`.

    >>> from longspan.masks import Band
    >>> bands = [Band.parse(text) for text in ("0:4x0:4/0..", "4:9x4:9/0..", "9:12x4:9")]
    >>> found = launch_table(bd.as_array(tuple(bands)), np.array([[8, 2, 12, 9, 1, 3]]))
    >>> sorted(zip(found.launches.tolist(), found.rows.tolist(), found.cols.tolist(), found.slices.tolist()))
    [(1, 3, 5, 1), (1, 9, 9, 2)]
    """
    each = np.repeat(np.arange(len(side)), side[:, BANDS])
    near, far = bd.borders(rows)
    left = np.where(far, rows[:, bd.HI] + rows[:, bd.K1] - rows[:, bd.Q1], OPEN)
    right = np.where(near, rows[:, bd.Q1] - rows[:, bd.K1] - rows[:, bd.LO], OPEN)
    windows, window = np.unique((left + 1) * (right.max(initial=0) + 2) + right + 1, return_inverse=True)
    keys, which = np.unique(each * max(len(windows), 1) + window, return_inverse=True)
    compute = keys // max(len(windows), 1)
    q, kv = (
        np.bincount(which, rows[:, end] - rows[:, begin], len(keys)).astype(np.int64)
        for begin, end in ((bd.Q0, bd.Q1), (bd.K0, bd.K1))
    )
    slices = np.bincount(which, minlength=len(keys)).astype(np.int64)
    room_q, room_kv = np.maximum(side[compute, Q_TOKENS], 1), np.maximum(side[compute, KV_TOKENS], 1)
    launches = np.minimum(np.maximum(-(-q // room_q), -(-kv // room_kv)), slices)
    return LaunchTable(compute, launches, np.minimum(q, room_q), np.minimum(kv, room_kv), -(-slices // launches))
