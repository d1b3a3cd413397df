"""Operations on rows: group what was recorded, and run the groups on tensors.

On CPUs a group runs one run of rows at a time. On GPUs, where the number of launches matters, all runs go at once, by
tables of row numbers that stay on the device.

Shapes: B batch rows, H heads, T tokens, D features. A row is a (batch row, head, token). If a group covers several
places, tensors are viewed as one long list of rows of D numbers.
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
"""The number of a buffer's first row, and how far apart neighbours among batch rows, heads and tokens are, in rows."""


def rows_in_message(buffer: Buffer) -> Strides | None:
    """How rows of a part of a message are numbered among rows of their size, from the start of the message; None if
    they do not begin on a multiple of their size."""
    assert buffer.inside is not None
    assert buffer.dtype is not None
    size = buffer.shape[3] * buffer.dtype.itemsize
    if buffer.offset % size or buffer.inside.num_bytes % size:
        return None
    _, heads, tokens, _ = buffer.shape
    return buffer.offset // size, heads * tokens, tokens, 1


Cut = tuple[int, tuple[tuple[int, int, int], ...]]
"""A buffer's number, and what is cut out of it: dim, start and length."""


def cut_of(buffer: Buffer, *spans: Span) -> Cut:
    """Some batch rows, heads and tokens (or the first of these) of a buffer, whose size is final by now.

    >>> cut_of(Buffer(7, (1, 4, 9, 8), None), Span(0, 1), Span(2, 4))
    (7, ((1, 2, 2),))
    """
    sides = ((dim, span.start, span.stop - span.start) for dim, span in enumerate(spans))
    return buffer.number, tuple(side for side in sides if side[2] != buffer.shape[side[0]])


class Memory:
    """Tensors by the number of their buffer, messages as flat bytes. What is not there is allocated when asked for."""

    def __init__(self, buffers: Sequence[Buffer], device: torch.device, *, by_index: bool) -> None:
        self.tensors: list[Tensor | None] = [None] * len(buffers)
        self.buffers, self.device, self.by_index = buffers, device, by_index
        self.messages = Buffers()
        self._typed: dict[int, dict[torch.dtype, Tensor]] = {}
        """Views of messages as numbers: most parts of a message are of one dtype."""

    def get(self, buffer: Buffer) -> Tensor:
        found = self.tensors[buffer.number]
        if found is not None:
            return found
        if buffer.inside is not None:
            found = self._part_of_message(buffer)
        elif buffer.is_message:
            found = self.messages.take(buffer.num_bytes, self.device)
        elif buffer.initial is None:  # with strides it is quicker by half
            found = torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=self.device)
        else:
            found = torch.full(buffer.shape, buffer.initial, dtype=buffer.dtype, device=self.device)
        self.tensors[buffer.number] = found
        return found

    def cut(self, number: int, parts: Sequence[tuple[int, int, int]]) -> Tensor:
        """Some of a buffer: for each dim that is cut, its number, a start and a length; see `cut_of`."""
        found = self.tensors[number]
        if found is None:
            found = self.get(self.buffers[number])
        for part in parts:
            found = found.narrow(*part)
        return found

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.tensors[number] = None
            self._typed.pop(number, None)

    def _part_of_message(self, buffer: Buffer) -> Tensor:
        assert buffer.inside is not None
        assert buffer.dtype is not None
        if buffer.first is not None:
            typed = self._as_numbers(buffer.inside, buffer.dtype)
            return typed.as_strided(buffer.shape, buffer.strides, typed.storage_offset() + buffer.first)
        part = self.get(buffer.inside)[buffer.offset : buffer.offset + buffer.num_bytes]
        if buffer.is_loose:
            part = part.clone()
        return part.view(buffer.dtype).view(buffer.shape)

    def _as_numbers(self, message: Buffer, dtype: torch.dtype) -> Tensor:
        known = self._typed.setdefault(message.number, {})
        if dtype not in known:
            known[dtype] = self.get(message).view(dtype)
        return known[dtype]

    def as_list(self, buffer: Buffer) -> tuple[Tensor, Strides | None] | None:
        """The buffer's memory, or that of the message it is in, as `(1, 1, rows, D)`, and, if it is in no message, how
        its rows are numbered there. None if rows are not multiples of D apart."""
        if buffer.inside is None:
            return _as_list(self.get(buffer))
        assert buffer.dtype is not None
        return self._as_numbers(buffer.inside, buffer.dtype).view(1, 1, -1, buffer.shape[3]), None

    def table(self, rows: Ints) -> Tensor:
        """Row numbers on the device. Triton's kernels take short ones; some of PyTorch's operators on CPUs do not."""
        short = self.device.type == "cuda" and (not len(rows) or int(rows.max()) < 2**31)
        return torch.from_numpy(rows.astype(np.int32 if short else np.int64)).to(self.device)


def _as_list(x: Tensor) -> tuple[Tensor, Strides] | None:
    if x.is_contiguous():  # as most are
        _, heads, tokens, dim = x.shape
        return x.view(1, 1, -1, dim), (0, heads * tokens, tokens, 1)
    dim = x.shape[3]
    steps = [stride if n > 1 else 0 for stride, n in zip(x.stride(), x.shape, strict=True)]
    if (dim > 1 and steps[3] != 1) or any(step % dim for step in steps[:3]):
        return None
    by_batch, by_head, by_token = (step // dim for step in steps[:3])
    rows = 1 + sum((n - 1) * step // dim for n, step in zip(x.shape[:3], steps[:3], strict=True))
    return x.as_strided((1, 1, rows, dim), (rows * dim, rows * dim, dim, 1)), (0, by_batch, by_head, by_token)


# -- Grouping independent operations on the same memory ----------------------------------------------------------------
# An operation waits for earlier ones that wrote what it reads or writes, or read what it writes. Its level is one more
# than the highest level it waits for, and operations of one level can run in any order:
#
#     copy message <- own 0:4        level 1  \ one copy of seven rows
#     copy message <- own 9:12       level 1  /
#     add  message <- sums 0:4       level 2     waits for the first


Place = tuple[Buffer, Span, Span]
"""A buffer, and batch rows and heads of it."""
ALONE = (Kind.MERGE, Kind.FINISH)
"""Kinds whose notes are grouped only within one set of heads and batch rows."""


Run = tuple[int, int, int]
"""The first token of the targets, the first of the sources, and how many; of a fill the second is not used."""


@dataclass(eq=False)
class RowLane:
    """Runs of tokens between the same places, in the order of targets."""

    places: tuple[Place, ...]
    runs: list[Run]


@dataclass(eq=False)
class Group:
    """Notes of one kind in any order."""

    kind: Kind
    value: float
    lanes: list[RowLane]
    level: int = 0
    """That of its notes; 0 if nobody asked."""


def grouped(log: Iterable[Note | Event]) -> list[Group | Event]:
    """The same operations, those on rows in groups; events stay where they are, and nothing moves across one."""
    made: list[Group | Event] = []
    notes: list[Note] = []
    for item in log:
        if isinstance(item, Note):
            notes.append(item)
            continue
        made += _groups(notes)
        made.append(item)
        notes = []
    return made + _groups(notes)


def _groups(notes: Sequence[Note]) -> list[Group]:
    if len(notes) == 1:
        return [_alone(notes[0])]
    found: dict[tuple[object, ...], list[Note]] = {}
    for note, level in zip(notes, levels_of(notes), strict=True):
        found.setdefault((level, note.kind, note.value, *_memory(note)), []).append(note)
    ordered = sorted(found.items(), key=lambda item: (item[0][0], item[0][1]))  # type: ignore[arg-type, return-value]
    return [Group(notes[0].kind, notes[0].value, list(_lanes(notes)), key[0]) for key, notes in ordered]  # type: ignore[arg-type]


def _alone(note: Note) -> Group:
    return Group(note.kind, note.value, [RowLane(_places(note), [_run(note)])])


def _places(note: Note) -> tuple[Place, ...]:
    return tuple([(side.buffer, side.batch, side.heads) for side in note.sides])


def _run(note: Note) -> Run:
    target = note.sides[0].tokens
    return target.start, note.sides[-1].tokens.start, target.stop - target.start


def _memory(note: Note) -> Iterator[object]:
    """What notes of one group have in common."""
    for side in note.sides:
        yield from (side.buffer.root.number, side.buffer.shape[3], side.buffer.dtype)
        if note.kind in ALONE:
            yield from (side.batch, side.heads)


def _lanes(notes: Sequence[Note]) -> Iterator[RowLane]:
    found: dict[tuple[Place, ...], list[Run]] = {}
    for note in notes:
        found.setdefault(_places(note), []).append(_run(note))
    for places, runs in found.items():
        yield RowLane(places, joined(runs))


def joined(runs: Sequence[Run]) -> list[Run]:
    """Runs in the order of targets, those that follow each other on both sides as one.

    >>> joined([(4, 9, 2), (0, 5, 4), (6, 0, 1)])
    [(0, 5, 6), (6, 0, 1)]
    """
    made: list[Run] = []
    for there, here, num in sorted(runs):
        before = made[-1] if made else (0, 0, 0)
        if made and (before[0] + before[2], before[1] + before[2]) == (there, here):
            made[-1] = (before[0], before[1], before[2] + num)
        else:
            made.append((there, here, num))
    return made


def levels_of(notes: Sequence[Note]) -> list[int]:
    """For each note, after how many others it can go."""
    touched = _Touched(notes)
    found: list[int] = []
    for note in notes:
        before = [touched.written(rows) for rows in (*note.targets, *note.sources)]
        level = 1 + max(*before, *(touched.read(rows) for rows in note.targets))
        for rows in note.targets:
            touched.note(rows, 0, level)
        for rows in note.sources:
            touched.note(rows, 1, level)
        found.append(level)
    return found


class _Touched:
    """For every stretch of rows that no note begins or ends within, the highest level that wrote it and the highest
    that read it."""

    def __init__(self, notes: Sequence[Note]) -> None:
        bounds: dict[int, set[int]] = {}
        for rows in (rows for note in notes for rows in note.sides):
            bounds.setdefault(rows.buffer.number, set()).update((rows.tokens.start, rows.tokens.stop))
        self._stretch = {
            buffer: {bound: number for number, bound in enumerate(sorted(found))} for buffer, found in bounds.items()
        }
        self._levels: dict[int, list[tuple[Span, Span, Ints]]] = {}

    def written(self, rows: Rows) -> int:
        return self._highest(rows, 0)

    def read(self, rows: Rows) -> int:
        return self._highest(rows, 1)

    def note(self, rows: Rows, how: int, level: int) -> None:
        lanes = self._levels.setdefault(rows.buffer.number, [])
        found = next((levels for b, h, levels in lanes if (b, h) == (rows.batch, rows.heads)), None)
        if found is None:
            found = np.zeros((2, len(self._stretch[rows.buffer.number])), dtype=np.int64)
            lanes.append((rows.batch, rows.heads, found))
        part = found[how, self._at(rows)]
        np.maximum(part, level, out=part)

    def _highest(self, rows: Rows, how: int) -> int:
        highest = 0
        for b, h, levels in self._levels.get(rows.buffer.number, ()):
            if _overlap(b, rows.batch) and _overlap(h, rows.heads):
                highest = max(highest, int(levels[how, self._at(rows)].max()))
        return highest

    def _at(self, rows: Rows) -> slice:
        numbers = self._stretch[rows.buffer.number]
        return slice(numbers[rows.tokens.start], numbers[rows.tokens.stop])


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop


# -- Moves: groups on tensors ------------------------------------------------------------------------------------------


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
            if memory.by_index and fused.is_fused(memory.get(self.buffers[0])):
                first, second = self.as_rows(memory), self.twin.as_rows(memory)
                if first is not None and second is not None:
                    fused.move_two(first, second, adds=self.kind is Kind.ADD)
                    return
            self.twin.run(memory)
        if memory.by_index and not self._is_one:
            self._run_at_once(memory)
            return
        for cuts in self._cuts:
            sides: list[Tensor] = []
            for number, parts in cuts:  # as Memory.cut, without a call for each
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
            else:
                self._do(sides)
        for lane in self._by_row:
            self._by_tokens(memory, lane)

    def as_rows(self, memory: Memory) -> fused.Rows | None:
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

    def _run_at_once(self, memory: Memory) -> None:
        """All runs of rows by tables."""
        if len(self.lanes) > 1 and (found := self._as_lists(memory)) is not None:
            self._indexed(*found)
        else:
            for lane in self.lanes:
                self._by_tokens(memory, lane)

    # -- Run by run ----------------------------------------------------------------------------------------------------

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

    # -- By tables of tokens -------------------------------------------------------------------------------------------

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

    # -- By tables of rows ---------------------------------------------------------------------------------------------

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
    if fused.is_fused(target):
        return fused.move_rows(source, target, here, there, adds=adds)
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
    if fused.is_fused(acc):
        return fused.merge_rows((acc, top, num), out, lse, here, there)
    if not all_here:
        out, lse = out.index_select(2, here), lse.index_select(2, here)
    state = sides[:3] if all_there else [side.index_select(2, there) for side in sides[:3]]
    merge(state[0], state[1].squeeze(3), state[2].squeeze(3), out, lse.squeeze(3))
    if not all_there:
        for side, rows in zip(sides[:3], state, strict=True):
            side.index_copy_(2, there.long(), rows)
    return None
