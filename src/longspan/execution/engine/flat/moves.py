"""Moves: groups of operations on rows, done to tensors. Run by run on CPUs; on GPUs, where what counts is the number of
launches, all runs at once by tables of row numbers that stay on the device.

Shapes: B batch rows, H heads, T tokens, D features. A row is a (batch row, head, token); where a group goes over
several places, tensors are seen as one long list of rows of D numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.execution.engine.flat.grouping import Group, Place, RowLane, Run
from longspan.execution.engine.flat.memory import Cut, Memory, Strides, cut_of, rows_in_message
from longspan.execution.engine.flat.recorder import Kind
from longspan.execution.engine.merge import finished_rows, merge
from longspan.execution.fused import pieces
from longspan.span import Ints, Span

FEW, LONG = 8, 256
"""So few runs, or rows a run on average, are copied run by run on CPUs, where that is quicker than row by row."""


Table = tuple[Tensor, Tensor, bool, bool]
"""Tokens or rows of the targets, those of the sources, and whether each are all that there are, in order."""


class Move:
    """A group of operations on rows, ready to be done."""

    def __init__(self, group: Group) -> None:
        self.kind, self.value, self.lanes = group.kind, group.value, group.lanes
        self.buffers = [place[0] for lane in self.lanes for place in lane.places]
        self._tables: dict[Any, Table] = {}
        self._by_row = [lane for lane in self.lanes if self._is_quicker_by_row(lane)]
        self._cuts = [cuts for lane in self.lanes if lane not in self._by_row for cuts in self._cuts_of(lane)]
        self._parts = {id(lane): [cut_of(*place) for place in lane.places] for lane in self.lanes}
        self._is_one = len(self.lanes) == 1 and len(self.lanes[0].runs) == 1
        self.level = group.level
        self.twin: Move | None = None
        """Another of the same kind that does not wait for this one: on GPUs both are one launch."""

    def __repr__(self) -> str:
        lines = [_text(self.kind, lane) for lane in self.lanes]
        return "; ".join((*lines, repr(self.twin)) if self.twin is not None else lines)

    def fits(self, other: Move) -> bool:
        """Whether the other can be its twin."""
        return self.kind is other.kind and self.kind in (Kind.COPY, Kind.ADD) and 0 < self.level == other.level

    def run(self, memory: Memory) -> None:
        if self.twin is not None:
            if memory.by_index and pieces.is_fused(memory.get(self.buffers[0])):
                first, second = self.as_rows(memory), self.twin.as_rows(memory)
                if first is not None and second is not None:
                    return pieces.move_two(first, second, adds=self.kind is Kind.ADD)
            self.twin.run(memory)
        return self._run(memory)

    def as_rows(self, memory: Memory) -> pieces.Rows | None:
        """The whole move as rows of one tensor that become rows of another, if it is such a one."""
        if len(self.lanes) == 1:
            target, source = self._sides(memory, self.lanes[0])
            there, here, *_ = self._table(memory, self.lanes[0])
            return source, target, here, there
        found = self._as_lists(memory)
        if found is None:
            return None
        (target, source), (there, here, *_) = found
        return source, target, here, there

    def _run(self, memory: Memory) -> None:
        if not memory.by_index or self._is_one:
            for cuts in self._cuts:
                self._do([memory.cut(*cut) for cut in cuts])
            for lane in self._by_row:
                self._by_tokens(memory, lane)
        elif len(self.lanes) > 1 and (found := self._as_lists(memory)) is not None:
            self._indexed(*found)
        else:
            for lane in self.lanes:
                self._by_tokens(memory, lane)

    # -- run by run -------------------------------------------------------------------------------------------------

    def _is_quicker_by_row(self, lane: RowLane) -> bool:
        """Whether one copy row by row takes a CPU less than a copy for every run."""
        if self.kind is not Kind.COPY or len(lane.runs) <= FEW:
            return False
        (target, *_), (source, *_) = lane.places
        rows = sum(num for *_, num in lane.runs)
        fills = rows == target.shape[2] and _are_neighbours(lane.runs)
        return fills and rows < LONG * len(lane.runs) and source.dtype == target.dtype

    def _cuts_of(self, lane: RowLane) -> Iterator[tuple[Cut, ...]]:
        num_targets = self.kind.num_targets
        for run in lane.runs:
            yield tuple(
                cut_of(*place, Span(start, start + run[2]))
                for number, place in enumerate(lane.places)
                for start in (run[0] if number < num_targets else run[1],)
            )

    def _do(self, sides: list[Tensor]) -> None:
        match self.kind:
            case Kind.COPY:
                sides[0].copy_(sides[1])
            case Kind.ADD:
                sides[0].add_(sides[1])
            case Kind.FILL:
                sides[0].fill_(self.value)
            case Kind.MERGE:
                acc, top, num, out, lse = sides
                merge(acc, top.squeeze(3), num.squeeze(3), out, lse.squeeze(3))
            case Kind.FINISH:
                out, lse, acc, top, num = sides
                made, stat = finished_rows(acc, top, num)
                out.copy_(made)
                lse.copy_(stat)

    # -- by tables of tokens ----------------------------------------------------------------------------------------

    def _table(self, memory: Memory, lane: RowLane) -> Table:
        """Tokens of the targets and of the sources, and whether each are all that there are, in order."""
        key = id(lane), memory.device
        if key not in self._tables:
            there, here = (_tokens(lane.runs, side) for side in (0, 1))
            sizes = (lane.places[0][0].shape[2], lane.places[-1][0].shape[2])
            all_there, all_here = (_is_all(rows, size) for rows, size in zip((there, here), sizes, strict=True))
            self._tables[key] = memory.table(there), memory.table(here), all_there, all_here
        return self._tables[key]

    def _by_tokens(self, memory: Memory, lane: RowLane) -> None:
        self._indexed(self._sides(memory, lane), self._table(memory, lane))

    def _sides(self, memory: Memory, lane: RowLane) -> list[Tensor]:
        """The lane's heads and batch rows of each of its places."""
        return [memory.cut(number, parts) for number, parts in self._parts[id(lane)]]

    def _indexed(self, sides: list[Tensor], table: Table) -> None:
        there, here, all_there, all_here = table
        match self.kind:
            case Kind.COPY | Kind.ADD:
                _move(sides[0], sides[1], table, adds=self.kind is Kind.ADD)
            case Kind.FILL:
                sides[0].index_fill_(2, there.long(), self.value)
            case Kind.MERGE:
                _merge(sides, table)
            case Kind.FINISH:
                state = sides[2:] if all_here else [side.index_select(2, here) for side in sides[2:]]
                for target, rows in zip(sides[:2], finished_rows(*state), strict=True):
                    if all_there:
                        target.copy_(rows)
                    else:
                        target.index_copy_(2, there.long(), rows.to(target.dtype))

    # -- by tables of rows ------------------------------------------------------------------------------------------

    @cached_property
    def _in_messages(self) -> list[list[Strides | None]]:
        """For each side how rows of its lanes are numbered in their message; empty for a side that is in none."""
        sides = zip(*(lane.places for lane in self.lanes), strict=True)
        return [[] if side[0][0].inside is None else [rows_in_message(place[0]) for place in side] for side in sides]

    @cached_property
    def _are_whole(self) -> bool:
        """Whether all parts of messages begin on multiples of their rows."""
        return not any(None in side for side in self._in_messages)

    def _as_lists(self, memory: Memory) -> tuple[list[Tensor], Table] | None:
        """All lanes at once, if their places can be seen as one list of rows on each side."""
        if not self._are_whole:
            return None
        lists: list[Tensor] = []
        numbered: list[Strides | None] = []
        for buffer, *_ in self.lanes[0].places:
            found = memory.as_list(buffer)
            if found is None:
                return None
            lists.append(found[0])
            numbered.append(found[1])
        key = (memory.device, *numbered)
        if key not in self._tables:
            there, here = (self._numbers(numbered[side], side) for side in (0, -1))
            all_there = _is_all(there, lists[0].shape[2])
            self._tables[key] = memory.table(there), memory.table(here), all_there, False
        return lists, self._tables[key]

    def _numbers(self, strides: Strides | None, side: int) -> Ints:
        """The rows of one side, lane by lane."""
        every = self._in_messages[side] if strides is None else [strides] * len(self.lanes)
        found = [
            _numbered(lane.places[side], _tokens(lane.runs, 0 if side == 0 else 1), stride)
            for lane, stride in zip(self.lanes, every, strict=True)
            if stride is not None
        ]
        return np.concatenate(found)


def _text(kind: Kind, lane: RowLane) -> str:
    """A lane in words: buffers, and tokens of the targets and of the sources."""
    targets, sources = (
        " ".join(f"b{buffer.number}" for buffer, *_ in places)
        for places in (lane.places[: kind.num_targets], lane.places[kind.num_targets :])
    )
    there, here = (" ".join(f"{run[side]}:{run[side] + run[2]}" for run in lane.runs) for side in (0, 1))
    return f"{kind} {targets}[{there}]" + (f" <- {sources}[{here}]" if sources else "")


def _are_neighbours(runs: Sequence[Run]) -> bool:
    return all(a[0] + a[2] == b[0] for a, b in pairwise(runs))


def _tokens(runs: Sequence[Run], side: int) -> Ints:
    """One by one, the tokens of runs.

    >>> _tokens([(4, 0, 2), (9, 7, 1)], 0)
    array([4, 5, 9])
    """
    table = np.array(runs)
    starts, lengths = table[:, side], table[:, 2]
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(int(ends[-1]))


def _numbered(place: Place, tokens: Ints, strides: Strides) -> Ints:
    _, batch, heads = place
    first, by_batch, by_head, by_token = strides
    b, h = np.arange(batch.start, batch.stop), np.arange(heads.start, heads.stop)
    rows = (b * by_batch)[:, None, None] + (h * by_head)[None, :, None] + (tokens * by_token)[None, None, :]
    return (first + rows).ravel()


def _is_all(rows: Ints, size: int) -> bool:
    return len(rows) == size and bool((np.diff(rows) == 1).all())


def _move(target: Tensor, source: Tensor, table: Table, *, adds: bool) -> None:
    there, here, all_there, all_here = table
    if pieces.is_fused(target):
        return pieces.move_rows(source, target, here, there, adds=adds)
    if all_there and not adds and source.dtype == target.dtype:
        torch.index_select(source, 2, here, out=target)
        return None
    rows = source if all_here else source.index_select(2, here)
    if all_there:
        change: Callable[[Tensor], Any] = target.add_ if adds else target.copy_
        change(rows)
    elif adds:
        target.index_add_(2, there, rows.to(target.dtype))
    else:
        target.index_copy_(2, there.long(), rows.to(target.dtype))
    return None


def _merge(sides: list[Tensor], table: Table) -> None:
    there, here, all_there, all_here = table
    acc, top, num, out, lse = sides
    if pieces.is_fused(acc):
        return pieces.merge_rows((acc, top, num), out, lse, here, there)
    if not all_here:
        out, lse = out.index_select(2, here), lse.index_select(2, here)
    state = sides[:3] if all_there else [side.index_select(2, there) for side in sides[:3]]
    merge(state[0], state[1].squeeze(3), state[2].squeeze(3), out, lse.squeeze(3))
    if not all_there:
        for side, rows in zip(sides[:3], state, strict=True):
            side.index_copy_(2, there.long(), rows)
    return None
