"""Operations on rows: group the recorded operations, and run the groups on tensors.

On CPUs a group copies one run of rows at a time. On GPUs, where launches are the cost, all runs are one launch: the
kernel reads them from a table on the device (`run/tables.py`), one line per run, for any number of rows and heads.

Shapes: B batch rows, H heads, T tokens, D features. A row is a (batch row, head, token).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.run import fused
from longspan.run.merge import finished_rows, merge
from longspan.run.recorder import Buffer, Event, Kind, Note, Run
from longspan.run.transports import Buffers
from longspan.spans import Ints, Span

# -- Memory: the tensors of one call, by the buffers of the recorder ---------------------------------------------------


Cut = tuple[int, tuple[tuple[int, int, int], ...]]
"""A buffer's number, and (dim, start, length) of every narrowed dim."""


def cut_of(buffer: Buffer, *spans: Span) -> Cut:
    """Return the cut for batch rows, heads and tokens (or the first of these) of a buffer of final size.

    >>> cut_of(Buffer(7, (1, 4, 9, 8), None), Span(0, 1), Span(2, 4))
    (7, ((1, 2, 2),))
    """
    sides = ((dim, span.start, span.stop - span.start) for dim, span in enumerate(spans))
    return buffer.number, tuple(side for side in sides if side[2] != buffer.shape[side[0]])


NO_INDEX: Mapping[int, Mapping[object, Tensor]] = MappingProxyType({})


class Memory:
    """Tensors of one call by buffer number, messages as flat bytes. Allocated at first use.

    On GPUs with the table of the program's moves, and the index arrays of its launches, by id and name.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        device: torch.device,
        table: Tensor | None = None,
        index: Mapping[int, Mapping[object, Tensor]] = NO_INDEX,
    ) -> None:
        self.tensors: list[Tensor | None] = [None] * len(buffers)
        self.buffers, self.device, self.table, self.index = buffers, device, table, index
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
                views = self._typed.setdefault(buffer.inside.number, {})
                message = views.get(buffer.dtype)
                if message is None:
                    message = views[buffer.dtype] = self.get(buffer.inside).view(buffer.dtype)
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

    def narrow(self, number: int, parts: Sequence[tuple[int, int, int]]) -> Tensor:
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
        return [Group(notes[0].kind, notes[0].value, _lanes(notes, {}))]
    known: dict[int, list[Run]] = {}
    by_key: dict[tuple[Any, ...], list[Note]] = {}
    for note, level in zip(notes, levels_of(notes), strict=True):
        key: list[object] = [level, note.kind, note.value]
        for side in note.sides:
            buffer = side.buffer
            key += (buffer.root.number, buffer.shape[3], buffer.dtype)
            if note.kind in ALONE:
                key += [side.batch, side.heads]
        by_key.setdefault(tuple(key), []).append(note)
    ordered = sorted(by_key.items(), key=lambda item: item[0][:2])
    return [Group(key[1], key[2], _lanes(group, known), key[0]) for key, group in ordered]


def _lanes(notes: Sequence[Note], known: dict[int, list[Run]]) -> list[RowLane]:
    lanes: dict[tuple[int, ...], list[Note]] = {}
    for note in notes:
        key: list[int] = []
        for side in note.sides:
            batch, heads = side.batch, side.heads
            key += (side.buffer.number, batch.start, batch.stop, heads.start, heads.stop)
        lanes.setdefault(tuple(key), []).append(note)
    result: list[RowLane] = []
    for each in lanes.values():
        if len(each) == 1:  # rows of keys and values, for example, have the same runs
            runs = known.get(id(each[0].runs))
            if runs is None:
                runs = known[id(each[0].runs)] = join_runs(each[0].runs)
        else:
            runs = join_runs([run for note in each for run in note.runs])
        result.append(RowLane(tuple([(side.buffer, side.batch, side.heads) for side in each[0].sides]), runs))
    return result


def join_runs(runs: Sequence[Run]) -> list[Run]:
    """Sort runs by target and join those that are adjacent on both sides.

    >>> join_runs([(4, 9, 2), (0, 5, 4), (6, 0, 1)])
    [(0, 5, 6), (6, 0, 1)]
    """
    if len(runs) == 1:
        return list(runs)
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
    if _are_independent(notes):
        return [1] * len(notes)
    # Tokens of every buffer as sorted, disjoint stretches: each operation covers whole stretches.
    sides = [_side_runs(note) for note in notes]
    bounds: dict[int, list[int]] = {}
    for note, runs_of_sides in zip(notes, sides, strict=True):
        for side, runs in zip(note.sides, runs_of_sides, strict=True):
            known = bounds.setdefault(side.buffer.number, [])
            for start, stop in runs:
                known += (start, stop)
    stretches = {
        buffer: {bound: number for number, bound in enumerate(sorted(set(cuts)))} for buffer, cuts in bounds.items()
    }
    # For each buffer: batch rows, heads, and the highest level that wrote (0) or read (1) each stretch of theirs.
    touched: dict[int, list[tuple[Span, Span, tuple[list[int], list[int]]]]] = {}
    result: list[int] = []
    for note, runs_of_sides in zip(notes, sides, strict=True):
        level, places = 0, []
        for number, (side, runs) in enumerate(zip(note.sides, runs_of_sides, strict=True)):
            buffer = side.buffer.number
            numbers = stretches[buffer]
            parts = [(numbers[start], numbers[stop]) for start, stop in runs]
            is_target = number < note.kind.num_targets
            places.append((side, parts, is_target))
            for batch, heads, (written, read) in touched.get(buffer, ()):
                if _overlap(batch, side.batch) and _overlap(heads, side.heads):
                    for start, stop in parts:
                        level = max(level, *written[start:stop])
                        if is_target:
                            level = max(level, *read[start:stop])
        level += 1
        for side, parts, is_target in places:
            lanes = touched.setdefault(side.buffer.number, [])
            levels = next((levels for b, h, levels in lanes if (b, h) == (side.batch, side.heads)), None)
            if levels is None:
                size = len(stretches[side.buffer.number])
                levels = [0] * size, [0] * size
                lanes.append((side.batch, side.heads, levels))
            mine = levels[0 if is_target else 1]
            for start, stop in parts:
                mine[start:stop] = [max(level, known) for known in mine[start:stop]]
        result.append(level)
    return result


def _are_independent(notes: Sequence[Note]) -> bool:
    """Return whether no operation reads or writes what another one writes, as far as is seen at once."""
    written: dict[int, dict[tuple[int, ...], list[Sequence[Run]]]] = {}
    for note in notes:
        for side in note.sides[: note.kind.num_targets]:
            place = side.batch.start, side.batch.stop, side.heads.start, side.heads.stop
            written.setdefault(side.buffer.number, {}).setdefault(place, []).append(note.runs)
    for note in notes:
        for side in note.sides[note.kind.num_targets :]:
            if side.buffer.number in written:
                return False
    disjoint: set[int] = set()
    for lanes in written.values():
        if len(lanes) > 1:
            for a, b in combinations(lanes, 2):
                if a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]:
                    return False
        for lists in lanes.values():
            if len(lists) == 1 and (len(lists[0]) == 1 or id(lists[0]) in disjoint):
                continue
            stop = 0
            for dst, _, num in sorted(chain.from_iterable(lists)):
                if dst < stop:
                    return False
                stop = dst + num
            if len(lists) == 1:
                disjoint.add(id(lists[0]))
    return True


def _side_runs(note: Note) -> list[list[tuple[int, int]]]:
    """Return (start, stop) of the runs of each side."""
    targets = [(dst, dst + num) for dst, _, num in note.runs]
    sources = [(src, src + num) for _, src, num in note.runs] if len(note.sides) > note.kind.num_targets else []
    return [targets if number < note.kind.num_targets else sources for number in range(len(note.sides))]


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop


# -- Moves: groups on tensors ------------------------------------------------------------------------------------------


FEW, LONG = 8, 256
"""On CPUs up to FEW runs, or runs of at least LONG rows on average, are copied run by run, which is faster than by
row numbers."""
COLUMNS = 10
"""Numbers in a line of a table of runs; see `run/triton_kernels.py`."""
SECOND, FROM_MESSAGE, INTO_MESSAGE = 1, 2, 4


class Move:
    """A group of operations on rows, ready to run."""

    def __init__(self, group: Group) -> None:
        self.kind, self.value, self.lanes = group.kind, group.value, group.lanes
        self.buffers = [place[0] for lane in self.lanes for place in lane.places]
        self.level = group.level
        self.fused_with: Move | None = None
        """Another move of the same kind and level: on GPUs both are one launch."""
        self.lines: tuple[fused.Lines, ...] = ()
        """Its lines in the program's table, then those of the move it is fused with, and of both; none if operators of
        PyTorch are used on GPUs, too."""

    def __repr__(self) -> str:
        lines = [_text(self.kind, lane) for lane in self.lanes]
        return "; ".join((*lines, repr(self.fused_with)) if self.fused_with is not None else lines)

    def can_fuse(self, other: Move) -> bool:
        return self.kind is other.kind and self.kind in (Kind.COPY, Kind.ADD) and 0 < self.level == other.level

    def run(self, memory: Memory) -> None:
        if memory.table is not None and self.lines:
            return self._launch(memory, memory.table)
        by_row, every_cut = self._on_host if memory.device.type == "cpu" else ((), self._all_cuts)
        for cuts in every_cut:
            sides: list[Tensor] = []
            for number, parts in cuts:  # `Memory.narrow`, inlined
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
        for target, source, rows in by_row:
            torch.index_select(memory.narrow(*source), 2, rows, out=memory.narrow(*target))
        return None

    # -- Run by run ----------------------------------------------------------------------------------------------------

    @cached_property
    def _on_host(self) -> tuple[list[tuple[Cut, Cut, Tensor]], list[tuple[Cut, ...]]]:
        """On a CPU: copies by row numbers, with their tables, and copies run by run."""
        by_row = [lane for lane in self._all_lanes if self._is_quicker_by_row(lane)]
        if not by_row:
            return [], self._all_cuts
        tables = [
            (cut_of(*lane.places[0]), cut_of(*lane.places[1]), torch.from_numpy(tokens_of(lane.runs, 1)))
            for lane in by_row
        ]
        return tables, [cuts for lane in self._all_lanes if lane not in by_row for cuts in self._cuts_of(lane)]

    @cached_property
    def _all_cuts(self) -> list[tuple[Cut, ...]]:
        return [cuts for lane in self._all_lanes for cuts in self._cuts_of(lane)]

    @property
    def _all_lanes(self) -> list[RowLane]:
        return self.lanes if self.fused_with is None else [*self.fused_with.lanes, *self.lanes]

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

    # -- By lines of a table -------------------------------------------------------------------------------------------

    def _is_addressable(self, side: int) -> bool:
        """Return whether one side of all lanes is in one message, or in one tensor; states and what is merged into them
        must be tensors."""
        buffers = [lane.places[side][0] for lane in self.lanes]
        if is_part(buffers[0]):
            return self.kind not in ALONE and all(map(is_part, buffers))
        return all(buffer is buffers[0] for buffer in buffers)

    def _launch(self, memory: Memory, table: Tensor) -> None:
        if self.kind in ALONE:
            tensors = [memory.get(place[0]) for place in self.lanes[0].places]
            if self.kind is Kind.MERGE:
                return fused.merge_rows(table, self.lines[0], tensors[:3], tensors[3], tensors[4])
            return fused.finish_rows(table, self.lines[0], tensors[0], tensors[1], tensors[2:])
        moves = [self._ends(memory)]
        if self.fused_with is not None:
            moves.append(self.fused_with._ends(memory))
        if not fused.move_rows(table, self.lines[-1], moves, self.kind, self.value):
            for lines, move in zip(self.lines, moves, strict=False):
                # Lines of the second move refer to the second source and target.
                fused.move_rows(table, lines, [move, move], self.kind, self.value)
        return None

    def _ends(self, memory: Memory) -> tuple[fused.Place, fused.Place]:
        """Return source and target."""
        places = self.lanes[0].places
        return _place(memory, places[-1][0]), _place(memory, places[0][0])


def table_of(moves: Iterable[Move]) -> Ints:
    """Return a table with the lines of all moves, and set where those of each move are.

    A move has no lines if PyTorch's operators are used. A single run is one operator, unless it is fused or a merge,
    which would be several. Fills are rare, so that a few of them are not worth a kernel that has to be compiled.
    """
    chosen: list[tuple[Move, list[Move]]] = []
    for move in moves:
        both = [move] if move.fused_with is None else [move, move.fused_with]
        num_runs = sum([len(lane.runs) for each in both for lane in each.lanes])
        if move.kind not in ALONE and num_runs <= (FEW if move.kind is Kind.FILL else 1):
            continue
        if all(each._is_addressable(side) for each in both for side in (0, -1)):
            chosen.append((move, both))
    if not chosen:
        return np.zeros((0, COLUMNS), dtype=np.int64)
    # Per lane: number of programs by rows, factors of first tokens, and columns 1 and 3 to 9 of its lines.
    lanes: list[tuple[int, ...]] = []
    counts: list[int] = []
    """Runs of each lane."""
    bounds: list[int] = [0]
    """Where the lines of each move begin and end; a fused move counts as two."""
    rows_of: list[int] = []
    for _, both in chosen:
        rows_of.append(fused.rows_per_program(max(each.lanes[0].places[0][0].shape[3] for each in both)))
        for number, move in enumerate(both):
            num_lines = 0
            for lane in move.lanes:
                flags, numbers = SECOND * number, ()
                factors: tuple[int, ...] = ()
                for place, flag in ((lane.places[-1], FROM_MESSAGE), (lane.places[0], INTO_MESSAGE)):
                    buffer, batch, heads = place
                    if is_part(buffer):
                        assert buffer.dtype is not None
                        by_batch, by_head = (stride * buffer.dtype.itemsize for stride in buffer.strides[:2])
                        offset = buffer.offset + batch.start * by_batch + heads.start * by_head
                        numbers = *numbers, offset, by_batch, by_head
                        factors = *factors, buffer.shape[3] * buffer.dtype.itemsize, 0
                        flags += flag
                    else:
                        numbers = *numbers, batch.start, heads.start, 0
                        factors = *factors, 0, 1
                (_, batch, heads), num = lane.places[0], len(lane.runs)
                lanes.append((rows_of[-1], len(batch) * len(heads), *factors, flags, len(heads), *numbers))
                counts.append(num)
                num_lines += num
            bounds.append(bounds[-1] + num_lines)
    all_runs = chain.from_iterable(lane.runs for _, both in chosen for move in both for lane in move.lanes)
    runs = np.fromiter(chain.from_iterable(all_runs), dtype=np.int64).reshape(-1, 3)
    each = np.array(lanes, dtype=np.int64).repeat(counts, axis=0)
    lines = np.empty((len(runs), COLUMNS), dtype=np.int64)
    lines[:, 1], lines[:, 2], lines[:, 3:] = each[:, 6], runs[:, 2], each[:, 7:]
    for column, start, factor in ((4, runs[:, 1], 2), (7, runs[:, 0], 4)):
        lines[:, column] += start * each[:, factor]
        lines[:, column + 2] += start * each[:, factor + 1]
    programs = -(-runs[:, 2] // each[:, 0]) * each[:, 1]
    lines[:, 0] = np.cumsum(programs) - programs  # from the first move on; see below
    # The largest power of 2 that divides offsets and strides inside messages is the lowest bit of all of them.
    bits = np.zeros(len(lines), dtype=np.int64)
    for flag, column in ((FROM_MESSAGE, 4), (INTO_MESSAGE, 7)):
        bits |= np.where(lines[:, 1] & flag, np.bitwise_or.reduce(lines[:, column : column + 3], axis=1), 0)
    units = [bit & -bit for bit in (np.bitwise_or.reduceat(bits, bounds[:-1]) | fused.VECTOR).tolist()]
    firsts = [*lines[bounds[:-1], 0].tolist(), int(lines[-1, 0] + programs[-1])]
    at = 0
    for (move, both), rows in zip(chosen, rows_of, strict=True):
        base, last = firsts[at], at + len(both)
        spans = [(n, n + 1) for n in range(at, last)] + ([(at, last)] if len(both) == 2 else [])
        move.lines = tuple(
            fused.Lines(
                bounds[a], bounds[b], firsts[a] - base, firsts[b] - firsts[a], rows, min(units[a:b])
            )
            for a, b in spans
        )  # fmt: skip
        lines[bounds[at] : bounds[last], 0] -= base
        at = last
    return lines


def is_part(buffer: Buffer) -> bool:
    """Return whether kernels can address the buffer inside its message. An unaligned part is a separate tensor."""
    return buffer.inside is not None and not buffer.is_unaligned


def _place(memory: Memory, buffer: Buffer) -> fused.Place:
    if is_part(buffer):
        assert buffer.inside is not None
        assert buffer.dtype is not None
        return fused.Place(memory.get(buffer.inside), buffer.dtype, buffer.shape[3], is_message=True)
    tensor = memory.get(buffer)
    return fused.Place(tensor, tensor.dtype, buffer.shape[3], is_message=False)


def _text(kind: Kind, lane: RowLane) -> str:
    """Describe a lane: buffers, and tokens of the targets and of the sources."""
    targets, sources = (
        " ".join(f"b{buffer.number}" for buffer, *_ in places)
        for places in (lane.places[: kind.num_targets], lane.places[kind.num_targets :])
    )
    dst, src = (" ".join(f"{run[side]}:{run[side] + run[2]}" for run in lane.runs) for side in (0, 1))
    return f"{kind} {targets}[{dst}]" + (f" <- {sources}[{src}]" if sources else "")


def tokens_of(runs: Sequence[Run], side: int) -> Ints:
    """Return the token numbers of runs.

    >>> tokens_of([(4, 0, 2), (9, 7, 1)], 0)
    array([4, 5, 9])
    """
    table = np.array(runs)
    starts, lengths = table[:, side], table[:, 2]
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(int(ends[-1]))
