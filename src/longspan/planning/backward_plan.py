"""Derive the backward steps from the forward steps: the last step first, each received piece sent back as a gradient.

Forward step i becomes backward step n + 1 - i, n being the last; step 0 is there for pieces that must be fetched again
before the first compute. A piece that is not kept arrives in one of two ways: its source sends it again just before
the first use, or, if it was passed from rank to rank, it returns together with its gradient.

Eight causal tokens on two ranks: rank 1 holds 4:8 and needs the keys 0:4 of rank 0::

    forward     step 0  0 ── kv 0:4 ──► 1,  own pairs          step 1  1 computes 4:8 x 0:4
    backward    step 0  0 ── kv 0:4 ──► 1                      the piece was not kept and is sent again
                step 1  1 computes 4:8 x 0:4                   as forward's step 1
                step 2  1 ── dkv 0:4 ──► 0,  own pairs         as forward's step 0, its message reversed

This is correct because every compute appears once in each direction: backward has the inputs of a compute just before
it, and sends its contributions to gradients just after it, along the path of the inputs.
"""

from __future__ import annotations

from longspan.errors import ScheduleError
from longspan.planning.steps import GRADIENT, Piece, Recall, Role, Schedule, Step, Transfer
from longspan.spans import Span, as_spans, as_table, subtract, union


def reverse(steps: tuple[Step, ...], rank: int, *, keep: bool) -> tuple[tuple[Step, ...], tuple[Piece, ...]]:
    """Return the rank's backward steps, and the remote pieces it must keep from forward until then.

    Rank 1 of the example above, forward and backward:

    >>> from longspan.masks import Band
    >>> from longspan.planning.steps import Compute
    >>> head, first, last = Span(0, 1), (Span(0, 4),), (Span(4, 8),)
    >>> q, kv = Piece(Role.Q, last, head), Piece(Role.KV, last, head)
    >>> fetched = Transfer(0, 1, Piece(Role.KV, first, head), until=1)
    >>> own = Compute(1, q, kv, (Band.parse("4:8x4:8/0.."),))
    >>> remote = Compute(1, q, fetched.piece, (Band.parse("4:8x0:4"),))
    >>> steps = (Step((fetched,), (own,)), Step((), (remote,)))
    >>> for number, step in enumerate(reverse(steps, 1, keep=False)[0]):
    ...     print(number, step.transfers, [compute.bands for compute in step.computes])
    0 (0>1 kv[0:4]h0:1 until 1 keep,) []
    1 () [(4:8x0:4,)]
    2 (1>0 dkv[0:4]h0:1 until 3 keep,) [(4:8x4:8/0..,)]
    >>> reverse(steps, 1, keep=True)[1]  # kept, it need not be sent again
    (kv[0:4]h0:1,)
    """
    last = len(steps) - 1
    transfers: list[list[Transfer]] = [[] for _ in range(last + 2)]
    # Pieces that the rank passes on will return to it; their rows, by role, heads and batch rows.
    passed = {t.piece for step in steps for t in step.transfers if t.src == rank and t.recall is Recall.RETURN}
    passed_spans: dict[tuple[Role, Span, Span | None], list[Span]] = {}
    for piece in passed:
        passed_spans.setdefault((piece.role, piece.heads, piece.batch), []).extend(piece.spans)
    passed_rows = {key: union(as_table(spans)) for key, spans in passed_spans.items()}

    kept: list[Piece] = []
    for i, step in enumerate(steps):
        for t in step.transfers:
            if t.piece.role not in GRADIENT:
                raise ScheduleError(f"{t!r} carries a gradient already: only a forward schedule can be reversed.")
            gradient = t.piece.to(GRADIENT[t.piece.role])
            if t.piece.role is Role.OUT:  # its gradient is an input here: used by every compute that is left
                transfers[last + 1 - i].append(Transfer(t.dst, t.src, gradient, last + 1, Recall.KEEP))
                continue
            # A piece that arrived late was used late: its gradient starts as early, and travels as long.
            first = last + 1 - i - t.early
            transfers[first].append(Transfer(t.dst, t.src, gradient, last + 2 - i, Recall.KEEP, t.early))
            if keep:
                kept += [t.piece] if t.dst == rank else []
                continue
            if t.dst == rank and t.recall is not Recall.AGAIN and t.piece not in passed:
                # Rows that no rank sends again must be kept.
                rows = as_table(t.piece.spans)
                returning = passed_rows.get((t.piece.role, t.piece.heads, t.piece.batch))
                rows = rows if returning is None else subtract(rows, returning)
                if len(rows):
                    kept.append(Piece(t.piece.role, as_spans(rows), t.piece.heads, t.piece.batch))
            if t.recall is Recall.AGAIN:
                if t.until > last:
                    raise ScheduleError(f"{t!r} is used after the last step {last}, so it cannot be sent again.")
                sent = last - t.until - t.back
                again = Transfer(t.src, t.dst, t.piece, last - i - t.early, Recall.KEEP, t.back)
                transfers[sent].append(again)
            elif t.recall is Recall.RETURN:
                transfers[last - i].append(Transfer(t.dst, t.src, t.piece, last + 1 - i, Recall.KEEP))
    computes = [(), *(step.computes for step in reversed(steps))]
    return tuple(Step(tuple(moved), work) for moved, work in zip(transfers, computes, strict=True)), tuple(kept)


def backward(schedule: Schedule, *, keep: bool) -> Schedule:
    """Return the backward schedule of a forward schedule."""
    if schedule.direction != "forward":
        raise ScheduleError("only a forward schedule can be reversed, but this one is backward already.")
    pairs = [reverse(steps, rank, keep=keep) for rank, steps in enumerate(schedule.ranks)]
    return Schedule(
        schedule.scheme,
        "backward",
        schedule.layout,
        schedule.sizes,
        tuple(steps for steps, _ in pairs),
        tuple(kept for _, kept in pairs),
    )
