"""Recorder: rows without data in place of tensors, and the list of operations recorded on them.

The operations of a run do not depend on the values of rows. So a rank walks its steps once with `Rows`, which have a
shape and no data; the resulting list of operations is replayed in every call.

    >>> recorder = Recorder()
    >>> own, message = recorder.new((1, 2, 8, 4), torch.float32), recorder.new((1, 2, 3, 4), torch.float32)
    >>> message[:, :, 0:1].copy_(own[:, :, 7:8])
    >>> recorder.log
    [copy b1[0:1 0:2 0:1] b0[0:1 0:2 7:8]]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from longspan.formatting import format_count
from longspan.spans import Span

if TYPE_CHECKING:
    from longspan.tile import KnownTiles

Shape = tuple[int, int, int, int]
"""Batch rows, heads, tokens, features."""


@dataclass(eq=False)
class Buffer:
    """Memory of a run: `(B, H, T, D)` rows. A kernel's results have a dtype (None here) and strides of their own."""

    number: int
    shape: Shape
    dtype: torch.dtype | None
    initial: float | None = None
    """Fill value, or None if uninitialized."""
    inside: Buffer | None = None
    """The message it is part of."""
    offset: int = 0
    """Offset in that message, in bytes."""
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
        """Strides of a contiguous tensor. Cached at the first run: a buffer may grow while it is recorded."""
        _, h, t, d = self.shape
        return h * t * d, t * d, d, 1

    @cached_property
    def first(self) -> int | None:
        """Its offset in items, if the message can be viewed in its dtype; else None."""
        assert self.inside is not None
        assert self.dtype is not None
        size = self.dtype.itemsize
        return None if self.offset % size or self.inside.num_bytes % size else self.offset // size

    @property
    def is_unaligned(self) -> bool:
        """Whether its offset in the message is no multiple of the item size, so that no view exists."""
        return self.inside is not None and self.dtype is not None and self.offset % self.dtype.itemsize != 0


class Kind(StrEnum):
    """Operations on rows, with their operands."""

    COPY = "copy"  # target, source
    ADD = "add"  # target, source
    FILL = "fill"  # target
    MERGE = "merge"  # acc, top, num, out, lse: see `run.merge.merge`
    FINISH = "finish"  # out, lse, acc, top, num: see `run.merge.finished_rows`

    @property
    def num_targets(self) -> int:
        return 3 if self is Kind.MERGE else 2 if self is Kind.FINISH else 1


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
class Rows:
    """Some rows of a buffer, in place of a `(B, H, T, D)` tensor; D is 1 for statistics."""

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
            if part.start is None and part.stop is None:
                continue
            start, stop, _ = part.indices(len(spans[dim]))
            spans[dim] = Span(spans[dim].start + start, spans[dim].start + stop)
        return Rows(self.recorder, self.buffer, *spans)

    def part(self, start: int, stop: int) -> Rows:
        """Return tokens start to stop; the same as `[:, :, start:stop]`, in a third of the time."""
        first = self.tokens.start
        return Rows(self.recorder, self.buffer, self.batch, self.heads, Span(first + start, first + stop))

    def copy_(self, source: Rows) -> None:
        self.recorder.note(Kind.COPY, self, source)

    def add_(self, source: Rows) -> None:
        self.recorder.note(Kind.ADD, self, source)

    def fill_(self, value: float) -> None:
        self.recorder.note(Kind.FILL, self, value=value)

    def follows(self, other: Rows) -> bool:
        """Return whether these rows come right after the others in the same memory."""
        if self.buffer is not other.buffer or other.tokens.stop != self.tokens.start:
            return False
        return self.batch == other.batch and self.heads == other.heads

    def with_next(self, other: Rows) -> Rows:
        """Return these rows and the ones that follow."""
        return Rows(self.recorder, self.buffer, self.batch, self.heads, Span(self.tokens.start, other.tokens.stop))

    def __repr__(self) -> str:
        return f"b{self.buffer.number}[{self.batch} {self.heads} {self.tokens}]"


Run = tuple[int, int, int]
"""First token of the targets, first token of the sources (of fills: of the targets), and number of tokens."""


@dataclass(slots=True, eq=False)
class Note:
    """One operation on runs of tokens of the same places. Written rows come first; tokens of `sides` are not used."""

    kind: Kind
    sides: tuple[Rows, ...]
    runs: Sequence[Run]
    value: float = 0.0

    def __repr__(self) -> str:
        num_targets, texts = self.kind.num_targets, []
        for number, side in enumerate(self.sides):
            starts = [(run[0] if number < num_targets else run[1], run[2]) for run in self.runs]
            tokens = " ".join(f"{start}:{start + num}" for start, num in starts)
            texts.append(f"b{side.buffer.number}[{side.batch} {side.heads} {tokens}]")
        return f"{self.kind} {' '.join(texts)}"


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """A function of tensors whose result is a new buffer."""

    function: Callable[..., Any]
    sources: tuple[Rows, ...]
    result: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A kernel launch over some tiles. It yields results one by one, each a tuple of buffers."""

    inputs: tuple[Rows, ...]
    """q, k, v; for backward also dout, out, lse and delta."""
    tiles: KnownTiles
    stores: tuple[Any, Any]
    """Token stores of queries and keys without tensors: the position of every row."""
    batch: Span
    heads: Span
    index_arrays: Callable[[], Mapping[object, Any]] = dict
    """Makes the kernel's index arrays for these tiles."""

    def __repr__(self) -> str:
        return f"launch of {format_count(len(self.tiles), 'tile')}"


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


@lru_cache(maxsize=4096)
def _whole(num: int) -> Span:
    return Span(0, num)


class Recorder:
    """Records the operations of a run, in order."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.log: list[Note | Event] = []

    def buffer(self, shape: Sequence[int], dtype: torch.dtype | None, **more: Any) -> Buffer:
        b, h, t, d = shape
        self.buffers.append(Buffer(len(self.buffers), (b, h, t, d), dtype, **more))
        return self.buffers[-1]

    def rows(self, buffer: Buffer) -> Rows:
        """Return all rows of a buffer."""
        b, h, t, _ = buffer.shape
        return Rows(self, buffer, _whole(b), _whole(h), _whole(t))

    def new(self, shape: Sequence[int], dtype: torch.dtype | None, **more: Any) -> Rows:
        return self.rows(self.buffer(shape, dtype, **more))

    def grow(self, buffer: Buffer, num: int) -> Rows:
        """Append rows to a buffer and return them."""
        b, h, t, d = buffer.shape
        buffer.shape = b, h, t + num, d
        return Rows(self, buffer, Span(0, b), Span(0, h), Span(t, t + num))

    def message(self, num_bytes: int) -> Buffer:
        return self.buffer((1, 1, num_bytes, 1), torch.uint8, is_message=True)

    def note(self, kind: Kind, *sides: Rows, value: float = 0.0) -> None:
        first, last = sides[0].tokens, sides[-1].tokens
        num = first.stop - first.start
        if num and sides[0].batch and sides[0].heads:  # not empty
            self.log.append(Note(kind, sides, ((first.start, last.start, num),), value))

    def copy_runs(self, target: Rows, source: Rows, runs: Sequence[Run]) -> None:
        """Copy runs of tokens, counted from the first of each side."""
        if not runs or not target.batch or not target.heads:
            return
        there, here = target.tokens.start, source.tokens.start
        if there or here:
            runs = [(dst + there, src + here, num) for dst, src, num in runs]
        self.log.append(Note(Kind.COPY, (target, source), runs))

    def call(self, function: Callable[..., Any], sources: tuple[Rows, ...], shape: Shape) -> Rows:
        result = self.buffer(shape, sources[0].dtype)
        self.log.append(Called(function, sources, result))
        return self.rows(result)

    def take_log(self) -> list[Note | Event]:
        """Return the operations recorded since the last cut."""
        log, self.log = self.log, []
        return log
