"""Memory: the tensors of one call, found by the buffers that stand for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.execution.engine.buffers import Buffers
from longspan.execution.engine.flat.recorder import Buffer
from longspan.span import Ints, Span

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
        if found is None:
            found = self._part_of_message(buffer) if buffer.inside is not None else self._new(buffer)
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

    def _new(self, buffer: Buffer) -> Tensor:
        if buffer.is_message:
            return self.messages.take(buffer.num_bytes, self.device)
        if buffer.initial is None:  # with strides it is quicker by half
            return torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=self.device)
        return torch.full(buffer.shape, buffer.initial, dtype=buffer.dtype, device=self.device)

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
