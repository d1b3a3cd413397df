"""A pass over schedules, for tests: it finds by itself which rows nobody needs, so planners can be held against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from longspan.errors import ScheduleError
from longspan.planning.steps import Piece, Role, Schedule, Step, Transfer
from longspan.planning.validator import Board, Key
from longspan.spans import as_spans, union

_Live = dict[tuple[int, Role, Key], NDArray[np.bool_]]


def prune(schedule: Schedule) -> Schedule:
    """The same computes with only the rows on the wire that some later compute uses, there or further on.

    It walks the steps backwards and knows at each point which rows every rank still has a use for. A ring loses the
    rows that nobody behind needs; an all-gather becomes an exchange.
    """
    if schedule.direction != "forward":
        raise ScheduleError("prune works on a forward schedule; reverse the pruned one to get its backward.")
    board = Board(schedule)
    live: _Live = {}
    pruned: dict[tuple[int, Transfer], Transfer | None] = {}
    by_step: dict[int, list[Transfer]] = {}
    for number, transfer in schedule.transfers():
        by_step.setdefault(number, []).append(transfer)
    for number in reversed(range(schedule.num_steps)):
        moved: list[Piece | None] = []
        for t in by_step.get(number, []):
            piece = t.piece if t.piece.role is Role.OUT else _used(t, live, board)
            moved.append(piece)
            pruned[number, t] = None if piece is None else replace(t, piece=piece)
        for t, piece in zip(by_step.get(number, []), moved, strict=True):
            if piece is not None and piece.role is not Role.OUT:
                _mark(live, t.src, piece, board)
        for rank, steps in enumerate(schedule.ranks):
            for compute in steps[number].computes if number < len(steps) else ():
                _mark(live, rank, compute.q, board)
                _mark(live, rank, compute.kv, board)
    ranks = tuple(
        tuple(
            Step(tuple(p for t in step.transfers if (p := pruned[i, t]) is not None), step.computes)
            for i, step in enumerate(steps)
        )
        for steps in schedule.ranks
    )
    return Schedule(schedule.scheme, "forward", schedule.layout, schedule.sizes, ranks)


def _mark(live: _Live, rank: int, piece: Piece, board: Board) -> None:
    cells, keys = board.place(piece)
    for key in keys:
        live.setdefault((rank, piece.role, key), np.zeros(board.num_cells, dtype=np.bool_))[cells] = True


def _used(t: Transfer, live: _Live, board: Board) -> Piece | None:
    """The rows of a transfer that its target has a use for; they need not arrive earlier as well."""
    cells, keys = board.place(t.piece)
    wanted = np.zeros(len(cells), dtype=np.bool_)
    for key in keys:
        here = live.get((t.dst, t.piece.role, key))
        if here is not None:
            wanted |= here[cells]
            here[cells] = False
    rows = np.stack((board.edges[cells[wanted]], board.edges[cells[wanted] + 1]), axis=1)
    return replace(t.piece, spans=as_spans(union(rows))) if len(rows) else None
