"""Costs of a rank's steps other than time: traffic, row uses, live memory, and kernel launches."""

from __future__ import annotations

from collections import Counter
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


STEP, SRC, DST, UNTIL, BYTES, ADDED, DUE = range(7)
_ADDED = (Role.OUT, Role.DQ, Role.DKV)
"""Roles that are added to the receiver's own rows; the others are used as they arrive."""


def traffic(steps: tuple[Step, ...], sizes: Sizes) -> Ints:
    """Return (step, source, target, until, bytes, whether it is added to own rows, step at whose end it has arrived) of
    every transfer, step by step."""
    moved = [(number, t) for number, step in enumerate(steps) for t in step.transfers]
    weights = piece_bytes([t.piece for _, t in moved], sizes)
    rows = [
        (number, t.src, t.dst, t.until, weight, t.piece.role in _ADDED, number + t.early)
        for (number, t), weight in zip(moved, weights, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 7)


def piece_bytes(pieces: list[Piece], sizes: Sizes) -> list[int]:
    """Return `Piece.num_bytes` of each piece."""
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


def received_bytes(steps: tuple[Step, ...], rank: int, sizes: Sizes) -> int:
    """Return the bytes that the rank receives."""
    return sum(piece_bytes([t.piece for step in steps for t in step.transfers if t.dst == rank], sizes))


# -- Uses: which rows a rank's computes touch, and how often each row was touched before -------------------------------
# All steps are handled at once. Rows are cut into cells at every edge, so that all rows of a cell are used equally; a
# ring of a thousand steps then takes a few arrays instead of a thousand unions.


Key = tuple[Span, Span | None]
"""Heads, batch rows, and the queries that are summed apart."""


@dataclass(frozen=True, eq=False)
class Uses:
    """One side of all computes with the same heads and batch: an entry per compute and cell it uses, in their order."""

    key: Key
    steps: Ints
    """The step of each compute."""
    edges: Ints
    use: Ints
    """The compute of each entry."""
    cell: Ints
    own: NDArray[np.bool_]
    """Whether the rank holds the entry's cell itself."""
    parts: Ints
    """1 for each compute; 2 if bands of it share rows, so that launches of one compute merge."""
    num_bands: int
    """Bands of all computes."""

    @cached_property
    def is_merged(self) -> NDArray[np.bool_]:
        """Whether the rows of each cell get several contributions, which have a float32 state."""
        return np.bincount(self.cell, self.parts[self.use], len(self.edges)) > 1

    @cached_property
    def tokens(self) -> Ints:
        """The rows of each entry's cell."""
        return self.edges[self.cell + 1] - self.edges[self.cell]

    @cached_property
    def nth(self) -> Ints:
        """How many earlier computes used the entry's cell."""
        order = np.argsort(self.cell, kind="stable")
        cells = self.cell[order]
        nth = np.empty(len(order), dtype=np.int64)
        nth[order] = np.arange(len(order)) - np.searchsorted(cells, cells)
        return nth

    @cached_property
    def fresh(self) -> NDArray[np.bool_]:
        """The entries that are their cell's first."""
        return self.nth == 0

    def num_rows(self, own: bool | None = None) -> int:
        """Return how many different rows are used: all, or only the rank's own, or only those of others."""
        return int(self.tokens[self.fresh if own is None else self.fresh & (self.own == own)].sum())

    def row_bytes(self, single: int, merged: int) -> Ints:
        """Return the bytes of a row of each cell: the kernel's result if it is the only one, else a state."""
        return np.where(self.is_merged, merged, single)

    def num_bytes(self, of_row: Ints, own: bool | None = None) -> int:
        """Return the bytes of different rows that are used: all, or only the rank's own."""
        is_counted = self.fresh if own is None else self.fresh & (self.own == own)
        return int((self.tokens * of_row[self.cell])[is_counted].sum())

    def merging(self, num_steps: int) -> Ints:
        """Return for each step the most rows that one compute merges into sums.

        The first contribution to a row is kept as it is until the second arrives, so the second merges two.
        """
        most = np.zeros(num_steps, dtype=np.int64)
        np.maximum.at(most, self.steps, self._sums(self.tokens * np.where(self.nth == 1, 2, self.nth > 1)))
        return most

    def arriving(self, num_steps: int, of_row: Ints) -> Ints:
        """Return for each step the bytes of rows of other ranks that no earlier compute used."""
        num_bytes = np.zeros(num_steps, dtype=np.int64)
        np.add.at(num_bytes, self.steps, self._sums(self.tokens * of_row[self.cell] * (self.fresh & ~self.own)))
        return num_bytes

    def remote_bytes(self, rows: Ints, of_row: Ints) -> Ints:
        """Return the bytes of each (start, stop) row that belong to other ranks and are used by some compute."""
        cells = np.sort(self.cell[self.fresh & ~self.own])
        if not len(cells):
            return np.zeros(len(rows), dtype=np.int64)
        starts, sizes, each = self.edges[cells], self.edges[cells + 1] - self.edges[cells], of_row[cells]
        before = np.cumsum(sizes * each) - sizes * each
        at = np.searchsorted(starts, rows, side="right") - 1
        count = before[at] + np.minimum(rows - starts[at], sizes[at]) * each[at]
        count[at < 0] = 0
        return count[:, 1] - count[:, 0]

    def is_result(self, num_own: int, num_planes: int, sizes: Sizes) -> bool:
        """Return whether one band has all of the rank's own rows: what its kernel returns is the result itself."""
        is_all = self.num_rows() == self.num_rows(own=True) == num_own and self.weight(sizes) == num_planes
        return is_all and self.num_bands == 1

    def _sums(self, values: Ints) -> Ints:
        """Return the sum of the values of each compute."""
        sums = np.zeros(len(self.steps), dtype=np.int64)
        np.add.at(sums, self.use, values)
        return sums

    def weight(self, sizes: Sizes) -> int:
        """Return heads times batch rows."""
        heads, rows = self.key
        return len(heads) * (sizes.batch if rows is None else len(rows))


def _uses_of(steps: tuple[Step, ...], role: Role, own: Ints, seq_len: int) -> list[Uses]:
    """Return the query or key sides of all computes, by heads and batch rows."""
    sides: dict[Key, list[tuple[int, Piece]]] = {}
    parts: dict[Key, list[int]] = {}
    num_bands: Counter[Key] = Counter()
    side = "q" if role is Role.Q else "kv"
    for number, step in enumerate(steps):
        for compute in step.computes:
            piece: Piece = getattr(compute, side)
            sides.setdefault(_key_of(piece), []).append((number, piece))
            bands = (*compute.bands, *compute.maybe)
            num_bands[_key_of(piece)] += len(bands)
            rows = sum([len(getattr(band, side)) for band in bands]) if len(bands) > 1 else 0
            parts.setdefault(_key_of(piece), []).append(1 + (rows > 0 and rows > piece.num_tokens))
    uses: list[Uses] = []
    for key, pieces in sides.items():
        rows = by_taker(_span_rows([piece for _, piece in pieces]), seq_len)
        edges = np.unique(np.concatenate((rows[:, :2].ravel(), own.ravel())))
        first, last = np.searchsorted(edges, rows[:, 0]), np.searchsorted(edges, rows[:, 1])
        at = np.repeat(np.arange(len(rows)), last - first)
        cell = first[at] + steps_within(last - first)
        held = np.zeros(len(edges), dtype=np.bool_)
        held[join(np.stack((edges, edges + 1), axis=1), own)[0]] = True
        numbers = np.array([number for number, _ in pieces], dtype=np.int64)
        each = np.array(parts[key], dtype=np.int64)
        uses.append(Uses(key, numbers, edges, rows[at, 2], cell, held[cell], each, num_bands[key]))
    return uses


def _key_of(piece: Piece) -> Key:
    return piece.heads, piece.batch


def _span_rows(pieces: list[Piece]) -> Ints:
    """Return (start, stop, number of the piece) of every span of the pieces."""
    rows = [(span.start, span.stop, number) for number, piece in enumerate(pieces) for span in piece.spans]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _is_in_one_piece(steps: Ints, rows: Ints, pieces: Ints, window: Ints, seq_len: int) -> NDArray[np.bool_]:
    """Return whether all rows of each compute lie in one of the pieces that are present in its step.

    `rows` and `pieces` are (start, stop, number) as `by_taker` returns them; a piece is present in the steps after
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
    is_present = (window[piece, 0] < steps[compute]) & (steps[compute] <= window[piece, 1])
    piece, compute = piece[is_present], compute[is_present]
    # Look up every row of the compute in the piece, with all pieces laid end to end on one line.
    last = np.append(first[1:], len(rows))
    sizes = last[compute] - first[compute]
    pair = np.repeat(np.arange(len(piece)), sizes)
    row = rows[first[compute][pair] + steps_within(sizes), :2]
    row, line = on_one_line(row, piece[pair], seq_len), on_one_line(pieces, pieces[:, 2], seq_len)
    at = np.searchsorted(line[:, 0], row[:, 0], side="right") - 1
    missing = (at < 0) | (line[at, 1] < row[:, 1]) if len(line) else np.ones(len(row), dtype=np.bool_)
    is_whole = np.ones(len(piece), dtype=np.bool_)
    is_whole[pair[missing]] = False
    answer = np.zeros(len(steps), dtype=np.bool_)
    answer[compute[is_whole]] = True
    return answer


# -- Memory of a rank beyond its own q, k, v and results, step by step ------------------------------------------------
# Counted: pieces that arrived or are arriving, messages being sent, a kernel's results for rows that get no other
# contribution, float32 sums of the others, copies of rows that are gathered for a kernel, and results that are about to
# be merged. Results of kernels have the dtype of the tensors, as on GPUs. Memory that a kernel allocates internally is
# not counted.


def live_bytes(
    steps: tuple[Step, ...],
    rank: int,
    layout: Layout,
    sizes: Sizes,
    direction: str,
    kept: tuple[Piece, ...] = (),
    *,
    at_kernel: bool = False,
) -> Ints:
    """Return the bytes alive in each step; `at_kernel`: while its kernels run, by when messages are freed of which all
    rows were copied."""
    size = max(len(steps), 1)
    change = np.zeros(size + 1, dtype=np.int64)  # of what stays from a step on
    change[0] = sum(piece_bytes(list(kept), sizes))
    once = np.zeros(size, dtype=np.int64)  # what is there in a step only
    if len(steps):
        own, wide = union(layout.span_table(rank)), max(sizes.itemsize, 4)
        # What arrives, from its start until its last use, and what is sent, while it travels.
        moved = traffic(steps, sizes)
        into, sent = moved[moved[:, DST] == rank], moved[moved[:, DST] != rank]
        np.add.at(change, into[:, STEP], into[:, BYTES])
        np.subtract.at(change, np.clip(into[:, UNTIL] + 1, into[:, STEP], size), into[:, BYTES])
        np.add.at(change, sent[:, STEP], sent[:, BYTES])
        np.subtract.at(change, np.minimum(sent[:, DUE] + 1, size), sent[:, BYTES])
        gathered = _gathered_bytes(steps, rank, own, layout.seq_len, sizes, kept)
        once += gathered
        computing = [number for number, step in enumerate(steps) if step.computes]
        if at_kernel and len(computing) == 1 and gathered[computing[0]]:  # as in an all-to-all
            is_copied = (into[:, STEP] < computing[0]) & (into[:, UNTIL] >= computing[0]) & (into[:, ADDED] == 0)
            once[computing[0]] -= into[is_copied, BYTES].sum()
        # For each query row from its first compute to the end: in forward its result, or an accumulator, maximum and
        # sum, in backward dq. Until its last compute: copies of the inputs (backward: of q, of the output's gradient
        # and a placeholder for the output) if some came from other ranks.
        if direction == "forward":
            result, state = sizes.row_bytes(Role.OUT), (sizes.v_head_dim + 2) * wide
            partial, copies = result + sizes.v_head_dim * wide, sizes.row_bytes(Role.Q)
        else:
            result, state = sizes.row_bytes(Role.DQ), sizes.head_dim * wide
            partial = result
            copies = sizes.row_bytes(Role.Q) + sizes.row_bytes(Role.DOUT) + sizes.v_head_dim * sizes.itemsize
        num_own = int(layout.num_tokens[rank])
        for uses in _uses_of(steps, Role.Q, own, layout.seq_len):
            weight, copied = uses.weight(sizes), copies if uses.num_rows(own=False) else 0
            if not uses.is_result(num_own, sizes.q_heads * sizes.batch, sizes):
                change[uses.steps[0]] += uses.num_bytes(uses.row_bytes(result, state)) * weight
            change[uses.steps[0]] += uses.num_rows() * weight * copied
            change[uses.steps[-1] + 1] -= uses.num_rows() * weight * copied
            once += uses.merging(size) * (weight * partial)
        if direction == "backward":
            keys = _uses_of(steps, Role.KV, own, layout.seq_len)
            _add_key_gradients(change, once, keys, steps, rank, sizes, num_own)
    live = np.cumsum(change[:size]) + once
    if direction == "backward":  # before the first step, on CPUs: products of the output and its gradient
        products = int(layout.num_slots(rank)) * sizes.batch * sizes.q_heads * sizes.v_head_dim * max(sizes.itemsize, 4)
        live[0] = max(live[0], sum(piece_bytes(list(kept), sizes)) + products)
    return live


def peak_bytes(
    steps: tuple[Step, ...], rank: int, layout: Layout, sizes: Sizes, direction: str, kept: tuple[Piece, ...] = ()
) -> int:
    """Return the largest of `live_bytes`."""
    return int(live_bytes(steps, rank, layout, sizes, direction, kept).max(initial=0))


def _gathered_bytes(
    steps: tuple[Step, ...], rank: int, own: Ints, seq_len: int, sizes: Sizes, kept: tuple[Piece, ...]
) -> Ints:
    """Return for each step the largest copy of K and V that must be gathered from several pieces."""
    uses = [(number, compute.kv) for number, step in enumerate(steps) for compute in step.computes]
    here = [(-1, len(steps), piece) for piece in kept if piece.role is Role.KV]
    for number, step in enumerate(steps):
        here += [
            (number + t.early, t.until, t.piece) for t in step.transfers if t.dst == rank and t.piece.role is Role.KV
        ]
    pieces = _span_rows([piece for _, _, piece in here])
    held = np.column_stack((own, np.full(len(own), len(here), dtype=np.int64)))
    window = np.array([(begin, end) for begin, end, _ in here] + [(-1, len(steps))], dtype=np.int64)
    number = np.array([number for number, _ in uses], dtype=np.int64)
    rows = by_taker(_span_rows([piece for _, piece in uses]), seq_len)
    is_whole = _is_in_one_piece(number, rows, by_taker(np.concatenate((pieces, held)), seq_len), window, seq_len)
    copied = np.array(piece_bytes([piece for _, piece in uses], sizes), dtype=np.int64)
    most = np.zeros(len(steps), dtype=np.int64)
    np.maximum.at(most, number[~is_whole], copied[~is_whole])
    return most


def _add_key_gradients(
    change: Ints, once: Ints, keys: list[Uses], steps: tuple[Step, ...], rank: int, sizes: Sizes, num_own: int
) -> None:
    """Add dk and dv of each key row, until they are sent to their owner or, for own rows, to the end."""
    moved = [(n, t) for n, step in enumerate(steps) for t in step.transfers if t.piece.role is Role.DKV]
    sent = [(n, t.piece) for n, t in moved if t.src == rank]
    for uses in keys:
        weight = uses.weight(sizes)
        once += uses.merging(len(once)) * (weight * sizes.row_bytes(Role.KV))
        of_row = uses.row_bytes(sizes.row_bytes(Role.KV), sizes.row_bytes(Role.DKV))
        if moved or not uses.is_result(num_own, sizes.kv_heads * sizes.batch, sizes):
            change[uses.steps[0]] += uses.num_bytes(of_row, own=True) * weight
        change[: len(once)] += uses.arriving(len(once), of_row) * weight
        mine = [(number, piece) for number, piece in sent if _key_of(piece) == uses.key]
        rows = _span_rows([piece for _, piece in mine])
        end = np.array([number for number, _ in mine], dtype=np.int64)[rows[:, 2]] + 1
        np.subtract.at(change, end, uses.remote_bytes(rows[:, :2], of_row) * weight)


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
"""The bound of a window that has none on that side."""
LANES = 6
Q_HEADS, KV_HEADS, Q_TOKENS, KV_TOKENS, BATCH, BANDS = range(LANES)


@dataclass(frozen=True, eq=False)
class LaunchTable:
    """One entry for each compute and window: the number of launches, and the sizes of the largest of them."""

    compute: Ints
    """The number of the compute."""
    launches: Ints
    rows: Ints
    """Query rows of a launch, of one batch row."""
    cols: Ints
    slices: Ints
    """Slices of a launch, of one batch row."""

    def per_compute(self, num: int) -> NDArray[np.float64]:
        """Return how many launches each of the `num` computes takes."""
        return np.bincount(self.compute, self.launches, num).astype(np.float64)


def sides(computes: list[Compute], sizes: Sizes) -> Ints:
    """Return (query heads, key heads, query tokens, key tokens, batch rows, bands) of each compute."""
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
    """Return the bands of all computes, one after another."""
    return bd.as_array(tuple(chain.from_iterable((*compute.bands, *compute.maybe) for compute in computes)))


def launch_table(rows: Ints, side: Ints) -> LaunchTable:
    """Return the launches of computes, from their bands and `sides`.

    >>> from longspan.masks import Band
    >>> bands = [Band.parse(text) for text in ("0:4x0:4/0..", "4:9x4:9/0..", "9:12x4:9")]
    >>> table = launch_table(bd.as_array(tuple(bands)), np.array([[8, 2, 12, 9, 1, 3]]))
    >>> sorted(zip(table.launches.tolist(), table.rows.tolist(), table.cols.tolist(), table.slices.tolist()))
    [(1, 3, 5, 1), (1, 9, 9, 2)]
    """
    each = np.repeat(np.arange(len(side)), side[:, BANDS])
    near, far = bd.borders(rows)
    left = np.where(far, rows[:, bd.HI] + rows[:, bd.K1] - rows[:, bd.Q1], OPEN)
    right = np.where(near, rows[:, bd.Q1] - rows[:, bd.K1] - rows[:, bd.LO], OPEN)
    window = (left + 1) * (right.max(initial=0) + 2) + right + 1
    window -= window.min(initial=0)
    num = int(window.max(initial=0)) + 1
    if num * len(side) > 1 << 62:  # too large to be numbered together with computes
        windows, window = np.unique(window, return_inverse=True)
        num = len(windows)
    keys, which = np.unique(each * num + window, return_inverse=True)
    compute = keys // num
    q, kv = (
        np.bincount(which, rows[:, end] - rows[:, begin], len(keys)).astype(np.int64)
        for begin, end in ((bd.Q0, bd.Q1), (bd.K0, bd.K1))
    )
    slices = np.bincount(which, minlength=len(keys)).astype(np.int64)
    room_q, room_kv = np.maximum(side[compute, Q_TOKENS], 1), np.maximum(side[compute, KV_TOKENS], 1)
    launches = np.minimum(np.maximum(-(-q // room_q), -(-kv // room_kv)), slices)
    return LaunchTable(compute, launches, np.minimum(q, room_q), np.minimum(kv, room_kv), -(-slices // launches))
