"""How much memory a rank needs beside its own q, k, v and results, step by step, from its steps alone.

Counted is what the runner holds: pieces that arrived or are arriving, messages being sent, float32 sums, copies of rows
that lie in several places and are put together for a kernel, and results that are about to be merged. What a kernel
allocates inside itself is not.
"""

from __future__ import annotations

import numpy as np

from longspan.layouts import Layout
from longspan.schedules.cost.reuse import Uses, in_one_piece, key_of, labelled, uses_of
from longspan.schedules.cost.traffic import BYTES, DST, STEP, UNTIL, piece_bytes, traffic
from longspan.schedules.fetch import by_taker
from longspan.schedules.steps import Piece, Role, Sizes, Step
from longspan.span import Ints, union


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
