"""Operations on rows: group the recorded operations, and run the groups on tensors.

On CPUs a group copies one run of rows at a time. On GPUs, where launches are the cost, all runs are one launch,
by tables of row numbers that stay on the device.

Shapes: B batch rows, H heads, T tokens, D features. A row is a (batch row, head, token). If a group covers several
places, tensors are viewed as one list of rows of D numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.run import fused
from longspan.run.merge import finished_rows, merge
from longspan.run.recorder import Buffer, Event, Kind, Note, Rows
from longspan.run.transports import Buffers
from longspan.spans import Ints, Span

# -- Memory: the tensors of one call, by the buffers of the recorder ---------------------------------------------------


Strides = tuple[int, int, int, int]
"""Number of a buffer's first row, and strides of batch rows, heads and tokens, in rows."""


def rows_in_message(buffer: Buffer) -> Strides | None:
    """Return how the rows of a part are numbered in its message; None if its offset is no multiple of their size."""
    assert buffer.inside is not None
    assert buffer.dtype is not None
    size = buffer.shape[3] * buffer.dtype.itemsize
    if buffer.offset % size or buffer.inside.num_bytes % size:
        return None
    _, heads, tokens, _ = buffer.shape
    return buffer.offset // size, heads * tokens, tokens, 1


Cut = tuple[int, tuple[tuple[int, int, int], ...]]
"""A buffer's number, and (dim, start, length) of every narrowed dim."""


def cut_of(buffer: Buffer, *spans: Span) -> Cut:
    """Return the cut for batch rows, heads and tokens (or the first of these) of a buffer of final size.

    >>> cut_of(Buffer(7, (1, 4, 9, 8), None), Span(0, 1), Span(2, 4))
    (7, ((1, 2, 2),))
    """
    sides = ((dim, span.start, span.stop - span.start) for dim, span in enumerate(spans))
    return buffer.number, tuple(side for side in sides if side[2] != buffer.shape[side[0]])


class Memory:
    """Tensors of one call by buffer number, messages as flat bytes. Allocated at first use."""

    def __init__(self, buffers: Sequence[Buffer], device: torch.device, *, by_index: bool) -> None:
        self.tensors: list[Tensor | None] = [None] * len(buffers)
        self.buffers, self.device, self.by_index = buffers, device, by_index
        self.messages = Buffers()
        self._typed: dict[int, dict[torch.dtype, Tensor]] = {}
        """Views of messages by dtype: most parts of a message have the same."""

    def get(self, buffer: Buffer) -> Tensor:
        """Return the buffer's tensor. Allocate it, or view it in its message, if the call has not used it yet."""
        tensor = self.tensors[buffer.number]
        if tensor is not None:
            return tensor
        if buffer.inside is not None:
            assert buffer.dtype is not None
            if buffer.first is not None:
                message = self.typed_message(buffer.inside, buffer.dtype)
                tensor = message.as_strided(buffer.shape, buffer.strides, message.storage_offset() + buffer.first)
            else:
                part = self.get(buffer.inside)[buffer.offset : buffer.offset + buffer.num_bytes]
                part = part.clone() if buffer.is_unaligned else part
                tensor = part.view(buffer.dtype).view(buffer.shape)
        elif buffer.is_message:
            tensor = self.messages.take(buffer.num_bytes, self.device)
        elif buffer.initial is None:  # half the host time of `torch.empty`
            tensor = torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=self.device)
        else:
            tensor = torch.full(buffer.shape, buffer.initial, dtype=buffer.dtype, device=self.device)
        self.tensors[buffer.number] = tensor
        return tensor

    def cut(self, number: int, parts: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return part of a buffer: for each narrowed dim its number, a start and a length; see `cut_of`."""
        tensor = self.tensors[number]
        if tensor is None:
            tensor = self.get(self.buffers[number])
        for part in parts:
            tensor = tensor.narrow(*part)
        return tensor

    def drop(self, numbers: Sequence[int]) -> None:
        """Release the tensors of these buffers."""
        for number in numbers:
            self.tensors[number] = None
            self._typed.pop(number, None)

    def typed_message(self, message: Buffer, dtype: torch.dtype) -> Tensor:
        """Return the message viewed in a dtype."""
        views = self._typed.get(message.number)
        if views is None:
            views = self._typed[message.number] = {}
        if dtype not in views:
            views[dtype] = self.get(message).view(dtype)
        return views[dtype]

    def as_list(self, buffer: Buffer) -> tuple[Tensor, Strides | None] | None:
        """Return the memory of a buffer, or of its message, as `(1, 1, rows, D)`, and how rows are numbered in it.

        Numbers are None for a part of a message. None if rows are not multiples of D apart.
        """
        if buffer.inside is not None:
            assert buffer.dtype is not None
            return self.typed_message(buffer.inside, buffer.dtype).view(1, 1, -1, buffer.shape[3]), None
        x = self.get(buffer)
        if x.is_contiguous():
            _, heads, tokens, dim = x.shape
            return x.view(1, 1, -1, dim), (0, heads * tokens, tokens, 1)
        return _as_strided_list(x)

    def table(self, rows: Ints) -> Tensor:
        """Return row numbers on the device: int32 for Triton kernels; some CPU operators of PyTorch need int64."""
        short = self.device.type == "cuda" and (not len(rows) or int(rows.max()) < 2**31)
        return torch.from_numpy(rows.astype(np.int32 if short else np.int64)).to(self.device)


def _as_strided_list(x: Tensor) -> tuple[Tensor, Strides] | None:
    dim = x.shape[3]
    steps = [stride if n > 1 else 0 for stride, n in zip(x.stride(), x.shape, strict=True)]
    if (dim > 1 and steps[3] != 1) or any(step % dim for step in steps[:3]):
        return None
    by_batch, by_head, by_token = (step // dim for step in steps[:3])
    rows = 1 + sum((n - 1) * step // dim for n, step in zip(x.shape[:3], steps[:3], strict=True))
    return x.as_strided((1, 1, rows, dim), (rows * dim, rows * dim, dim, 1)), (0, by_batch, by_head, by_token)


# -- Grouping independent operations on the same memory ----------------------------------------------------------------
# An operation depends on earlier ones that wrote what it reads or writes, or read what it writes. Its level is one more
# than the highest level it depends on, and operations of one level can run in any order:
#
#     copy message <- own 0:4        level 1  \ one copy of seven rows
#     copy message <- own 9:12       level 1  /
#     add  message <- sums 0:4       level 2     depends on the first


Place = tuple[Buffer, Span, Span]
"""Batch rows and heads of a buffer."""
ALONE = (Kind.MERGE, Kind.FINISH)
"""Kinds that are grouped only within one set of heads and batch rows."""


Run = tuple[int, int, int]
"""First token of the targets, first token of the sources (unused by fills), and number of tokens."""


@dataclass(eq=False)
class RowLane:
    """Runs of tokens between the same places, ordered by target."""

    places: tuple[Place, ...]
    runs: list[Run]


@dataclass(eq=False)
class Group:
    """Operations of one kind that can run in any order."""

    kind: Kind
    value: float
    lanes: list[RowLane]
    level: int = 0
    """Level of its operations; 0 for a single operation."""


def group_operations(log: Iterable[Note | Event]) -> list[Group | Event]:
    """Group the operations on rows between events. Nothing moves across an event."""
    items: list[Group | Event] = []
    notes: list[Note] = []
    for item in log:
        if isinstance(item, Note):
            notes.append(item)
            continue
        items += _groups(notes)
        items.append(item)
        notes = []
    return items + _groups(notes)


def _groups(notes: Sequence[Note]) -> list[Group]:
    if len(notes) == 1:
        return [Group(notes[0].kind, notes[0].value, _lanes(notes))]
    by_key: dict[tuple[Any, ...], list[Note]] = {}
    for note, level in zip(notes, levels_of(notes), strict=True):
        key: list[object] = [level, note.kind, note.value]
        for side in note.sides:
            key += [side.buffer.root.number, side.buffer.shape[3], side.buffer.dtype]
            if note.kind in ALONE:
                key += [side.batch, side.heads]
        by_key.setdefault(tuple(key), []).append(note)
    ordered = sorted(by_key.items(), key=lambda item: item[0][:2])
    return [Group(key[1], key[2], _lanes(group), key[0]) for key, group in ordered]


def _lanes(notes: Sequence[Note]) -> list[RowLane]:
    lanes: dict[tuple[Place, ...], list[Run]] = {}
    for note in notes:
        places = tuple([(side.buffer, side.batch, side.heads) for side in note.sides])
        target = note.sides[0].tokens
        run = target.start, note.sides[-1].tokens.start, target.stop - target.start
        lanes.setdefault(places, []).append(run)
    return [RowLane(places, joined(runs)) for places, runs in lanes.items()]


def joined(runs: Sequence[Run]) -> list[Run]:
    """Sort runs by target and join those that are adjacent on both sides.

    >>> joined([(4, 9, 2), (0, 5, 4), (6, 0, 1)])
    [(0, 5, 6), (6, 0, 1)]
    """
    joint: list[Run] = []
    for dst, src, num in sorted(runs):
        last = joint[-1] if joint else (0, 0, 0)
        if joint and (last[0] + last[2], last[1] + last[2]) == (dst, src):
            joint[-1] = (last[0], last[1], last[2] + num)
        else:
            joint.append((dst, src, num))
    return joint


def levels_of(notes: Sequence[Note]) -> list[int]:
    """Return the level of each operation: one more than the highest level that it depends on."""
    # Cut every buffer at all bounds of runs, so that each operation covers whole stretches of tokens.
    bounds: dict[int, set[int]] = {}
    for rows in (rows for note in notes for rows in note.sides):
        bounds.setdefault(rows.buffer.number, set()).update((rows.tokens.start, rows.tokens.stop))
    stretches = {
        buffer: {bound: number for number, bound in enumerate(sorted(cuts))} for buffer, cuts in bounds.items()
    }
    # For each buffer: batch rows, heads, and the highest level that wrote (0) or read (1) each stretch of theirs.
    touched: dict[int, list[tuple[Span, Span, Ints]]] = {}

    def at(rows: Rows) -> slice:
        numbers = stretches[rows.buffer.number]
        return slice(numbers[rows.tokens.start], numbers[rows.tokens.stop])

    def highest(rows: Rows, how: int) -> int:
        level = 0
        for batch, heads, levels in touched.get(rows.buffer.number, ()):
            if _overlap(batch, rows.batch) and _overlap(heads, rows.heads):
                level = max(level, int(levels[how, at(rows)].max()))
        return level

    def touch(rows: Rows, how: int, level: int) -> None:
        lanes = touched.setdefault(rows.buffer.number, [])
        levels = next((levels for b, h, levels in lanes if (b, h) == (rows.batch, rows.heads)), None)
        if levels is None:
            levels = np.zeros((2, len(stretches[rows.buffer.number])), dtype=np.int64)
            lanes.append((rows.batch, rows.heads, levels))
        part = levels[how, at(rows)]
        np.maximum(part, level, out=part)

    result: list[int] = []
    for note in notes:
        written = [highest(rows, 0) for rows in (*note.targets, *note.sources)]
        level = 1 + max(*written, *(highest(rows, 1) for rows in note.targets))
        for rows in note.targets:
            touch(rows, 0, level)
        for rows in note.sources:
            touch(rows, 1, level)
        result.append(level)
    return result


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop


# -- Moves: groups on tensors ------------------------------------------------------------------------------------------


FEW, LONG = 8, 256
"""On CPUs up to FEW runs, or runs of at least LONG rows on average, are copied run by run, which is faster than by
row numbers."""


Table = tuple[Tensor, Tensor, bool, bool]
"""Tokens or rows of the targets and of the sources, and whether each covers its dim in order."""


class Move:
    """A group of operations on rows, ready to run."""

    def __init__(self, group: Group) -> None:
        self.kind, self.value, self.lanes = group.kind, group.value, group.lanes
        self.buffers = [place[0] for lane in self.lanes for place in lane.places]
        self._tables: dict[Any, Table] = {}
        self._by_row = [lane for lane in self.lanes if self._is_quicker_by_row(lane)]
        self._cuts = [cuts for lane in self.lanes if lane not in self._by_row for cuts in self._cuts_of(lane)]
        self._parts = {id(lane): [cut_of(*place) for place in lane.places] for lane in self.lanes}
        self._is_one = len(self.lanes) == 1 and len(self.lanes[0].runs) == 1
        self.level = group.level
        self.fused_with: Move | None = None
        """Another move of the same kind and level: on GPUs both are one launch."""

    def __repr__(self) -> str:
        lines = [_text(self.kind, lane) for lane in self.lanes]
        return "; ".join((*lines, repr(self.fused_with)) if self.fused_with is not None else lines)

    def can_fuse(self, other: Move) -> bool:
        return self.kind is other.kind and self.kind in (Kind.COPY, Kind.ADD) and 0 < self.level == other.level

    def run(self, memory: Memory) -> None:
        if self.fused_with is not None:
            if memory.by_index and fused.is_fused(memory.get(self.buffers[0])):
                first, second = self.as_rows(memory), self.fused_with.as_rows(memory)
                if first is not None and second is not None:
                    fused.move_two(first, second, adds=self.kind is Kind.ADD)
                    return
            self.fused_with.run(memory)
        if memory.by_index and not self._is_one:
            if len(self.lanes) > 1 and (rows := self._as_lists(memory)) is not None:
                self._indexed(*rows)
            else:
                for lane in self.lanes:
                    self._indexed(self._sides(memory, lane), self._table(memory, lane))
            return
        for cuts in self._cuts:
            sides: list[Tensor] = []
            for number, parts in cuts:  # `Memory.cut`, inlined
                side = memory.tensors[number]
                if side is None:
                    side = memory.get(memory.buffers[number])
                for part in parts:
                    side = side.narrow(*part)
                sides.append(side)
            if self.kind is Kind.COPY:
                sides[0].copy_(sides[1])
            elif self.kind is Kind.ADD:
                sides[0].add_(sides[1])
            elif self.kind is Kind.FILL:
                sides[0].fill_(self.value)
            elif self.kind is Kind.MERGE:
                acc, top, num, out, lse = sides
                merge(acc, top.squeeze(3), num.squeeze(3), out, lse.squeeze(3))
            else:
                for target, rows in zip(sides[:2], finished_rows(*sides[2:]), strict=True):
                    target.copy_(rows)
        for lane in self._by_row:
            self._indexed(self._sides(memory, lane), self._table(memory, lane))

    def as_rows(self, memory: Memory) -> fused.Rows | None:
        """Return the move as rows of one tensor that become rows of another; None if it is several."""
        if len(self.lanes) == 1:
            lists = self._sides(memory, self.lanes[0]), self._table(memory, self.lanes[0])
        else:
            lists = self._as_lists(memory)
        if lists is None:
            return None
        (target, source), (dst_rows, src_rows, *_) = lists
        return source, target, src_rows, dst_rows

    # -- Run by run ----------------------------------------------------------------------------------------------------

    def _is_quicker_by_row(self, lane: RowLane) -> bool:
        """Return whether on a CPU one copy by row numbers is faster than one copy per run."""
        if self.kind is not Kind.COPY or len(lane.runs) <= FEW:
            return False
        (target, *_), (source, *_) = lane.places
        rows = sum(num for *_, num in lane.runs)
        fills = rows == target.shape[2] and all(a[0] + a[2] == b[0] for a, b in pairwise(lane.runs))
        return fills and rows < LONG * len(lane.runs) and source.dtype == target.dtype

    def _cuts_of(self, lane: RowLane) -> Iterator[tuple[Cut, ...]]:
        num_targets = self.kind.num_targets
        for run in lane.runs:
            yield tuple(
                cut_of(*place, Span(start, start + run[2]))
                for number, place in enumerate(lane.places)
                for start in (run[0] if number < num_targets else run[1],)
            )

    # -- By tables of tokens -------------------------------------------------------------------------------------------

    def _table(self, memory: Memory, lane: RowLane) -> Table:
        """Return the table of a lane's tokens."""
        key = id(lane), memory.device
        if key not in self._tables:
            dst, src = (_tokens(lane.runs, side) for side in (0, 1))
            is_all = _is_all(dst, lane.places[0][0].shape[2]), _is_all(src, lane.places[-1][0].shape[2])
            self._tables[key] = memory.table(dst), memory.table(src), *is_all
        return self._tables[key]

    def _sides(self, memory: Memory, lane: RowLane) -> list[Tensor]:
        """Return the lane's heads and batch rows of each of its places."""
        return [memory.cut(number, parts) for number, parts in self._parts[id(lane)]]

    def _indexed(self, sides: list[Tensor], table: Table) -> None:
        """Run on rows given by a table."""
        dst_rows, src_rows, all_dst, all_src = table
        match self.kind:
            case Kind.COPY | Kind.ADD:
                _move(sides[0], sides[1], table, adds=self.kind is Kind.ADD)
            case Kind.FILL:
                sides[0].index_fill_(2, dst_rows.long(), self.value)
            case Kind.MERGE:
                _merge(sides, table)
            case Kind.FINISH:
                state = sides[2:] if all_src else [side.index_select(2, src_rows) for side in sides[2:]]
                for target, rows in zip(sides[:2], finished_rows(*state), strict=True):
                    if all_dst:
                        target.copy_(rows)
                    else:
                        target.index_copy_(2, dst_rows.long(), rows.to(target.dtype))

    # -- By tables of rows ---------------------------------------------------------------------------------------------

    @cached_property
    def _in_messages(self) -> list[list[Strides | None]]:
        """For each side, how rows of its lanes are numbered in their message; empty for a side in no message."""
        sides = zip(*(lane.places for lane in self.lanes), strict=True)
        return [[] if side[0][0].inside is None else [rows_in_message(place[0]) for place in side] for side in sides]

    def _as_lists(self, memory: Memory) -> tuple[list[Tensor], Table] | None:
        """Return all lanes as one list of rows on each side; None if rows are not multiples of their size apart."""
        if any(None in side for side in self._in_messages):
            return None
        lists: list[Tensor] = []
        strides: list[Strides | None] = []
        for buffer, *_ in self.lanes[0].places:
            rows = memory.as_list(buffer)
            if rows is None:
                return None
            lists.append(rows[0])
            strides.append(rows[1])
        key = (memory.device, *strides)
        if key not in self._tables:
            dst, src = (self._numbers(strides[side], side) for side in (0, -1))
            self._tables[key] = memory.table(dst), memory.table(src), _is_all(dst, lists[0].shape[2]), False
        return lists, self._tables[key]

    def _numbers(self, strides: Strides | None, side: int) -> Ints:
        """Return the row numbers of one side, lane by lane."""
        every = self._in_messages[side] if strides is None else [strides] * len(self.lanes)
        numbers: list[Ints] = []
        for lane, stride in zip(self.lanes, every, strict=True):
            assert stride is not None
            (_, batch, heads), (first, by_batch, by_head, by_token) = lane.places[side], stride
            b, h = np.arange(batch.start, batch.stop), np.arange(heads.start, heads.stop)
            tokens = _tokens(lane.runs, 0 if side == 0 else 1)
            rows = (b * by_batch)[:, None, None] + (h * by_head)[None, :, None] + (tokens * by_token)[None, None, :]
            numbers.append((first + rows).ravel())
        return np.concatenate(numbers)


def _text(kind: Kind, lane: RowLane) -> str:
    """Describe a lane: buffers, and tokens of the targets and of the sources."""
    targets, sources = (
        " ".join(f"b{buffer.number}" for buffer, *_ in places)
        for places in (lane.places[: kind.num_targets], lane.places[kind.num_targets :])
    )
    dst, src = (" ".join(f"{run[side]}:{run[side] + run[2]}" for run in lane.runs) for side in (0, 1))
    return f"{kind} {targets}[{dst}]" + (f" <- {sources}[{src}]" if sources else "")


def _tokens(runs: Sequence[Run], side: int) -> Ints:
    """Return the token numbers of runs.

    >>> _tokens([(4, 0, 2), (9, 7, 1)], 0)
    array([4, 5, 9])
    """
    table = np.array(runs)
    starts, lengths = table[:, side], table[:, 2]
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(int(ends[-1]))


def _is_all(rows: Ints, size: int) -> bool:
    return len(rows) == size and bool((np.diff(rows) == 1).all())


def _move(target: Tensor, source: Tensor, table: Table, *, adds: bool) -> None:
    dst_rows, src_rows, all_dst, all_src = table
    if fused.is_fused(target):
        return fused.move_rows(source, target, src_rows, dst_rows, adds=adds)
    if all_dst and not adds and source.dtype == target.dtype:
        torch.index_select(source, 2, src_rows, out=target)
        return None
    rows = source if all_src else source.index_select(2, src_rows)
    if all_dst:
        change: Callable[[Tensor], Any] = target.add_ if adds else target.copy_
        change(rows)
    elif adds:
        target.index_add_(2, dst_rows, rows.to(target.dtype))
    else:
        target.index_copy_(2, dst_rows.long(), rows.to(target.dtype))
    return None


def _merge(sides: list[Tensor], table: Table) -> None:
    dst_rows, src_rows, all_dst, all_src = table
    acc, top, num, out, lse = sides
    if fused.is_fused(acc):
        return fused.merge_rows((acc, top, num), out, lse, src_rows, dst_rows)
    if not all_src:
        out, lse = out.index_select(2, src_rows), lse.index_select(2, src_rows)
    state = sides[:3] if all_dst else [side.index_select(2, dst_rows) for side in sides[:3]]
    merge(state[0], state[1].squeeze(3), state[2].squeeze(3), out, lse.squeeze(3))
    if not all_dst:
        for side, rows in zip(sides[:3], state, strict=True):
            side.index_copy_(2, dst_rows.long(), rows)
    return None
