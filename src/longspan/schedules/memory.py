"""How much memory a rank needs beside its own q, k, v and results, step by step, from its steps alone.

Counted is what the runner holds: pieces that arrived or are arriving, messages being sent, float32 sums, copies of rows
that lie in several places and are put together for a kernel, and results that are about to be merged. What a kernel
allocates inside itself is not.
"""

from __future__ import annotations

import numpy as np

from longspan.layouts import Layout
from longspan.schedules.steps import GRADIENT, Piece, Role, Sizes, Step
from longspan.span import Ints, as_rows, intersect, subtract, total, union

_Key = tuple[object, object, object]
"""Heads, batch rows, and which queries are added up apart."""


def live_bytes(
    steps: tuple[Step, ...], rank: int, layout: Layout, sizes: Sizes, direction: str, kept: tuple[Piece, ...] = ()
) -> Ints:
    """Bytes alive in each step."""
    live = np.zeros(len(steps) + 1, dtype=np.int64)
    live += sum(piece.num_bytes(sizes) for piece in kept)
    for number, step in enumerate(steps):
        for t in step.transfers:
            size = t.piece.num_bytes(sizes)
            if t.dst == rank:
                live[number : min(t.until, len(steps)) + 1] += size
            else:
                live[number] += size
    own = layout.span_rows(rank)
    own = own[np.argsort(own[:, 0], kind="stable")]
    live[: len(steps)] += _gathered(steps, rank, own, sizes, kept)
    if direction == "forward":
        _add_results(live, steps, own, sizes)
    else:
        _add_gradients(live, steps, rank, own, sizes)
    return live[:-1] if len(steps) else live


def peak_bytes(
    steps: tuple[Step, ...], rank: int, layout: Layout, sizes: Sizes, direction: str, kept: tuple[Piece, ...] = ()
) -> int:
    """The largest of `live_bytes`."""
    return int(live_bytes(steps, rank, layout, sizes, direction, kept).max(initial=0))


def _by_heads(steps: tuple[Step, ...], role: Role) -> dict[_Key, list[tuple[int, Ints]]]:
    """(step, rows) of every compute, grouped by the heads and batch rows of its query or key side."""
    found: dict[_Key, list[tuple[int, Ints]]] = {}
    for number, step in enumerate(steps):
        for compute in step.computes:
            piece = compute.q if role is Role.Q else compute.kv
            found.setdefault((piece.heads, piece.rows, piece.apart), []).append((number, as_rows(piece.spans)))
    return found


def _weight(key: _Key, sizes: Sizes) -> int:
    heads, rows, _ = key
    return len(heads) * (sizes.batch if rows is None else len(rows))  # type: ignore[arg-type]


def _gathered(steps: tuple[Step, ...], rank: int, own: Ints, sizes: Sizes, kept: tuple[Piece, ...]) -> Ints:
    """In each step, the largest copy of K and V that must be put together from several pieces."""
    most = np.zeros(len(steps), dtype=np.int64)
    own = union(own)
    here = [(len(steps), union(as_rows(piece.spans))) for piece in kept if piece.role is Role.KV]
    for number, step in enumerate(steps):
        here = [(until, rows) for until, rows in here if until >= number]
        for compute in step.computes:
            rows = union(as_rows(compute.kv.spans))
            if not any(_has(whole, rows) for whole in (own, *(rows for _, rows in here))):
                most[number] = max(most[number], compute.kv.num_bytes(sizes))
        arriving = [t for t in step.transfers if t.dst == rank and t.piece.role is Role.KV]
        here += [(t.until, union(as_rows(t.piece.spans))) for t in arriving]
    return most


def _has(whole: Ints, rows: Ints) -> bool:
    """Whether all positions of `rows` are in `whole`; both sorted, disjoint and non-touching."""
    at = np.searchsorted(whole[:, 0], rows[:, 0], side="right") - 1
    return bool((at >= 0).all() and (whole[at, 1] >= rows[:, 1]).all())


def _merging(uses: list[tuple[int, Ints]], num_steps: int) -> Ints:
    """In each step, the most rows of contributions that one compute brings together, beside the sums that they go into.

    Where it is a row's second, the first has been kept as it came until now.
    """
    most = np.zeros(num_steps, dtype=np.int64)
    once = many = uses[0][1][:0]
    for number, rows in uses:
        rows = union(rows)
        if _has(many, rows):  # as in most steps of a ring
            most[number] = max(most[number], total(rows))
            continue
        second = intersect(rows, once)
        most[number] = max(most[number], 2 * total(second) + total(intersect(rows, many)))
        if len(second):
            many = union(np.concatenate((many, second)))
        once = subtract(union(np.concatenate((once, rows))), many)
    return most


def _branching(steps: tuple[Step, ...], key: _Key) -> int:
    """The most rows of sums that wait for the other half of their branch, where queries are added up apart."""
    if not key[2]:
        return 0
    mine = [c for step in steps for c in step.computes if (c.kv.heads, c.kv.rows, c.kv.apart) == key]
    levels = (len({c.q.spans[0].start for c in mine}) - 1).bit_length()
    return levels * max(c.kv.num_tokens for c in mine)


def _add_results(live: Ints, steps: tuple[Step, ...], own: Ints, sizes: Sizes) -> None:
    """One accumulator, maximum and sum per query row and head, from its first compute to the end."""
    wide = max(sizes.itemsize, 4)
    state, partial = (sizes.v_head_dim + 2) * wide, sizes.row_bytes(Role.OUT) + sizes.v_head_dim * wide
    for key, uses in _by_heads(steps, Role.Q).items():
        weight, rows = _weight(key, sizes), union(np.concatenate([rows for _, rows in uses]))
        copied = 0 if _has(union(own), rows) else sizes.row_bytes(Role.Q)
        live[uses[0][0] :] += total(rows) * weight * (state + copied)
        live[: len(steps)] += _merging(uses, len(steps)) * (weight * partial)


def _add_gradients(live: Ints, steps: tuple[Step, ...], rank: int, own: Ints, sizes: Sizes) -> None:
    """dq per query row; dk and dv per key row, until they are sent home or, for own rows, to the end."""
    wide = max(sizes.itemsize, 4)
    for key, uses in _by_heads(steps, Role.Q).items():
        weight, rows = _weight(key, sizes), union(np.concatenate([rows for _, rows in uses]))
        # a copy of q and of the output's gradient, and a stand-in for the output, where they came from elsewhere
        copied = sizes.row_bytes(Role.Q) + sizes.row_bytes(Role.DOUT) + sizes.v_head_dim * sizes.itemsize
        copied = 0 if _has(union(own), rows) else copied
        live[uses[0][0] :] += total(rows) * weight * (sizes.head_dim * wide + copied)
        live[: len(steps)] += _merging(uses, len(steps)) * (weight * sizes.row_bytes(Role.DQ))
    per_row = sizes.row_bytes(GRADIENT[Role.KV])
    sent = [
        (n, t.piece) for n, s in enumerate(steps) for t in s.transfers if t.src == rank and t.piece.role is Role.DKV
    ]
    for key, uses in _by_heads(steps, Role.KV).items():
        live[: len(steps)] += _merging(uses, len(steps)) * (_weight(key, sizes) * sizes.row_bytes(Role.KV))
        weight = _weight(key, sizes) * per_row
        live[uses[0][0] : uses[-1][0] + 1] += _branching(steps, key) * weight
        mine = union(np.concatenate([intersect(rows, own) for _, rows in uses]))
        live[uses[0][0] :] += total(mine) * weight
        seen = mine[:0]
        for number, rows in uses:
            fresh = subtract(subtract(union(rows), own), seen)
            seen = union(np.concatenate((seen, fresh)))
            live[number:] += total(fresh) * weight
        for number, piece in sent:
            if (piece.heads, piece.rows, piece.apart) == key:
                live[number + 1 :] -= total(intersect(as_rows(piece.spans), seen)) * weight
