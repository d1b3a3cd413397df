"""Recorder: rows without data that stand in for tensors, and the list of operations recorded on them.

The operations of a run do not depend on the values of rows. So a rank walks its steps once with `Rows`, which have
shapes and no data; the result is a list of operations, which runs in every call.

    >>> recorder = Recorder()
    >>> own, message = recorder.new((1, 2, 8, 4), torch.float32), recorder.new((1, 2, 3, 4), torch.float32)
    >>> message[:, :, 0:1].copy_(own[:, :, 7:8])
    >>> recorder.log
    [copy b1[0:1 0:2 0:1] b0[0:1 0:2 7:8]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from longspan.formatting import counted
from longspan.spans import Span

if TYPE_CHECKING:
    from longspan.tile import KnownTiles

Shape = tuple[int, int, int, int]
"""Batch rows, heads, tokens, features."""


@dataclass(eq=False)
class Buffer:
    """Memory of a run: `(B, H, T, D)` rows. What a kernel gives comes in a dtype and with strides of its own."""

    number: int
    shape: Shape
    dtype: torch.dtype | None
    initial: float | None = None
    """What all of it is before anything is written."""
    inside: Buffer | None = None
    """The message it is a part of."""
    offset: int = 0
    """Where in the message it begins, in bytes."""
    is_message: bool = False

    @property
    def root(self) -> Buffer:
        return self.inside or self

    @property
    def num_bytes(self) -> int:
        assert self.dtype is not None
        b, h, t, d = self.shape
        return b * h * t * d * self.dtype.itemsize

    @cached_property
    def strides(self) -> Shape:
        """Those of a tensor without gaps. Asked for when calls run: what is being recorded may still grow."""
        _, h, t, d = self.shape
        return h * t * d, t * d, d, 1

    @cached_property
    def first(self) -> int | None:
        """Which of its message's numbers it begins with, if the message is all numbers of its dtype; else None."""
        assert self.inside is not None
        assert self.dtype is not None
        size = self.dtype.itemsize
        return None if self.offset % size or self.inside.num_bytes % size else self.offset // size

    @property
    def is_loose(self) -> bool:
        """Whether it is a part of a message that begins at no multiple of its numbers' size: no view can show it."""
        return self.inside is not None and self.dtype is not None and self.offset % self.dtype.itemsize != 0


class Kind(StrEnum):
    """What is done to rows."""

    COPY = "copy"  # target, source
    ADD = "add"  # target, source
    FILL = "fill"  # target
    MERGE = "merge"  # acc, top, num, out, lse: see `run.merge.merge`
    FINISH = "finish"  # out, lse, acc, top, num: see `run.merge.finished_rows`

    @property
    def num_targets(self) -> int:
        return 3 if self is Kind.MERGE else 2 if self is Kind.FINISH else 1


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of a buffer, in the place of a `(B, H, T, D)` tensor; of statistics D is 1."""

    recorder: Recorder
    buffer: Buffer
    batch: Span
    heads: Span
    tokens: Span

    @property
    def shape(self) -> Shape:
        return len(self.batch), len(self.heads), len(self.tokens), self.buffer.shape[3]

    @property
    def dtype(self) -> torch.dtype | None:
        return self.buffer.dtype

    def __getitem__(self, at: tuple[slice, ...]) -> Rows:
        spans = [self.batch, self.heads, self.tokens]
        for dim, part in enumerate(at):
            start, stop, _ = part.indices(len(spans[dim]))
            spans[dim] = Span(spans[dim].start + start, spans[dim].start + stop)
        return Rows(self.recorder, self.buffer, *spans)

    def copy_(self, source: Rows) -> None:
        self.recorder.note(Kind.COPY, self, source)

    def add_(self, source: Rows) -> None:
        self.recorder.note(Kind.ADD, self, source)

    def fill_(self, value: float) -> None:
        self.recorder.note(Kind.FILL, self, value=value)

    def follows(self, other: Rows) -> bool:
        """Whether these rows come right after the others in the same memory."""
        same = self.buffer is other.buffer and self.batch == other.batch and self.heads == other.heads
        return same and other.tokens.stop == self.tokens.start

    def with_next(self, other: Rows) -> Rows:
        """These rows and those that follow."""
        return Rows(self.recorder, self.buffer, self.batch, self.heads, Span(self.tokens.start, other.tokens.stop))

    def __repr__(self) -> str:
        return f"b{self.buffer.number}[{self.batch} {self.heads} {self.tokens}]"


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """One operation on rows; those that it writes come first."""

    kind: Kind
    sides: tuple[Rows, ...]
    value: float = 0.0

    @property
    def targets(self) -> tuple[Rows, ...]:
        return self.sides[: self.kind.num_targets]

    @property
    def sources(self) -> tuple[Rows, ...]:
        """What is read; a sum or state is read as well as written."""
        return self.sides[self.kind.num_targets :]

    def __repr__(self) -> str:
        return f"{self.kind} {' '.join(map(repr, self.sides))}"


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """A function of whole tensors, whose result is a new buffer."""

    function: Callable[..., Any]
    sources: tuple[Rows, ...]
    result: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """Attention over some tiles. Results come one after the other, each some buffers."""

    inputs: tuple[Rows, ...]
    """q, k, v; in backward also dout, out, lse and delta."""
    tiles: KnownTiles
    stores: tuple[Any, Any]
    """Where query and key rows lie in the sequence: token stores without tensors."""
    batch: Span
    heads: Span
    known: dict[Any, Any] = field(default_factory=dict)
    """What was worked out for it, by device."""

    def __repr__(self) -> str:
        return f"launch of {counted(len(self.tiles), 'tile')}"


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """The next result of a launch."""

    launch: Launched
    number: int
    results: tuple[Buffer, ...]
    is_last: bool

    def __repr__(self) -> str:
        return f"result {self.number}: {' '.join(f'b{buffer.number}' for buffer in self.results)}"


Event = Called | Launched | Taken


class Recorder:
    """The operations of a run, in order."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.log: list[Note | Event] = []

    def buffer(self, shape: Sequence[int], dtype: torch.dtype | None, **more: Any) -> Buffer:
        b, h, t, d = shape
        self.buffers.append(Buffer(len(self.buffers), (b, h, t, d), dtype, **more))
        return self.buffers[-1]

    def rows(self, buffer: Buffer) -> Rows:
        """All of a buffer."""
        b, h, t, _ = buffer.shape
        return Rows(self, buffer, Span(0, b), Span(0, h), Span(0, t))

    def new(self, shape: Sequence[int], dtype: torch.dtype | None, **more: Any) -> Rows:
        return self.rows(self.buffer(shape, dtype, **more))

    def grown(self, buffer: Buffer, num: int) -> Rows:
        """More rows at the end of a buffer."""
        b, h, t, d = buffer.shape
        buffer.shape = b, h, t + num, d
        return Rows(self, buffer, Span(0, b), Span(0, h), Span(t, t + num))

    def message(self, num_bytes: int) -> Buffer:
        made = self.buffer((1, 1, num_bytes, 1), torch.uint8)
        made.is_message = True
        return made

    def note(self, kind: Kind, *sides: Rows, value: float = 0.0) -> None:
        if all(sides[0].shape[:3]):  # there are rows
            self.log.append(Note(kind, sides, value))

    def call(self, function: Callable[..., Any], sources: tuple[Rows, ...], shape: Shape) -> Rows:
        result = self.buffer(shape, sources[0].dtype)
        self.log.append(Called(function, sources, result))
        return self.rows(result)

    def cut(self) -> list[Note | Event]:
        """What was noted since the last cut."""
        log, self.log = self.log, []
        return log
