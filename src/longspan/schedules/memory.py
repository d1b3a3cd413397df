"""How much memory a rank needs beside its own q, k, v and results, step by step, from its steps alone."""

from __future__ import annotations

import numpy as np

from longspan.layouts import Layout
from longspan.schedules.steps import GRADIENT, Piece, Role, Sizes, Step
from longspan.span import Ints, as_rows, intersect, subtract, total, union

FLOAT32 = 4


def live_bytes(
    steps: tuple[Step, ...], rank: int, layout: Layout, sizes: Sizes, direction: str, kept: tuple[Piece, ...] = ()
) -> Ints:
    """Bytes alive in each step: what arrived or is arriving, what is being sent, and float32 accumulators."""
    live = np.zeros(len(steps) + 1, dtype=np.int64)
    live += sum(piece.num_bytes(sizes) for piece in kept)
    for number, step in enumerate(steps):
        for t in step.transfers:
            size = t.piece.num_bytes(sizes)
            if t.dst == rank:
                live[number : min(t.until, len(steps)) + 1] += size
            else:
                live[number] += size
    if direction == "forward":
        _add_results(live, steps, sizes)
    else:
        _add_gradients(live, steps, rank, layout, sizes)
    return live[:-1] if len(steps) else live


def peak_bytes(
    steps: tuple[Step, ...], rank: int, layout: Layout, sizes: Sizes, direction: str, kept: tuple[Piece, ...] = ()
) -> int:
    """The largest of `live_bytes`."""
    return int(live_bytes(steps, rank, layout, sizes, direction, kept).max(initial=0))


def _by_heads(steps: tuple[Step, ...], role: Role) -> dict[tuple[object, object], list[tuple[int, Ints]]]:
    """(step, rows) of every compute, grouped by the heads and batch rows of its query or key side."""
    found: dict[tuple[object, object], list[tuple[int, Ints]]] = {}
    for number, step in enumerate(steps):
        for compute in step.computes:
            piece = compute.q if role is Role.Q else compute.kv
            found.setdefault((piece.heads, piece.rows), []).append((number, as_rows(piece.spans)))
    return found


def _weight(key: tuple[object, object], sizes: Sizes) -> int:
    heads, rows = key
    return len(heads) * (sizes.batch if rows is None else len(rows))  # type: ignore[arg-type]


def _add_results(live: Ints, steps: tuple[Step, ...], sizes: Sizes) -> None:
    """One accumulator, maximum and sum per query row and head, from its first compute to the end."""
    per_row = (sizes.v_head_dim + 2) * FLOAT32
    for key, uses in _by_heads(steps, Role.Q).items():
        rows = union(np.concatenate([rows for _, rows in uses]))
        live[uses[0][0] :] += total(rows) * _weight(key, sizes) * per_row


def _add_gradients(live: Ints, steps: tuple[Step, ...], rank: int, layout: Layout, sizes: Sizes) -> None:
    """dq per query row; dk and dv per key row, until they are sent home or, for own rows, to the end."""
    for key, uses in _by_heads(steps, Role.Q).items():
        rows = union(np.concatenate([rows for _, rows in uses]))
        live[uses[0][0] :] += total(rows) * _weight(key, sizes) * sizes.head_dim * FLOAT32
    own = layout.span_rows(rank)
    own = own[np.argsort(own[:, 0], kind="stable")]
    per_row = sizes.row_bytes(GRADIENT[Role.KV])
    sent = [
        (n, t.piece) for n, s in enumerate(steps) for t in s.transfers if t.src == rank and t.piece.role is Role.DKV
    ]
    for key, uses in _by_heads(steps, Role.KV).items():
        weight = _weight(key, sizes) * per_row
        mine = union(np.concatenate([intersect(rows, own) for _, rows in uses]))
        live[uses[0][0] :] += total(mine) * weight
        seen = mine[:0]
        for number, rows in uses:
            fresh = subtract(subtract(union(rows), own), seen)
            seen = union(np.concatenate((seen, fresh)))
            live[number:] += total(fresh) * weight
        for number, piece in sent:
            if (piece.heads, piece.rows) == key:
                live[number + 1 :] -= total(intersect(as_rows(piece.spans), seen)) * weight
