"""Grouping: operations on rows that do not wait for each other, and do the same to the same memory, become one.

A note waits for those before it that wrote what it reads or writes, or read what it writes; that gives each a level,
one more than the highest it waits for, and notes of a level can go in any order::

    copy message <- own 0:4        level 1  \\ one copy of seven rows
    copy message <- own 9:12       level 1  /
    add  message <- sums 0:4       level 2     waits for the first
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from longspan.execution.engine.flat.recorder import Buffer, Event, Kind, Note, Rows
from longspan.span import Ints, Span

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
