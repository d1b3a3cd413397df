"""Observation: bytes and messages really sent, and profiler marks per step. Off unless asked for, and scoped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


@dataclass
class Traffic:
    """Bytes and messages that were really sent, by (source, target)."""

    num_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    num_messages: dict[tuple[int, int], int] = field(default_factory=dict)

    def count(self, src: int, dst: int, size: int) -> None:
        self.num_bytes[src, dst] = self.num_bytes.get((src, dst), 0) + size
        self.num_messages[src, dst] = self.num_messages.get((src, dst), 0) + 1

    def sent(self, rank: int) -> int:
        return sum(size for (src, _), size in self.num_bytes.items() if src == rank)


_traffic: ContextVar[Traffic | None] = ContextVar("longspan_traffic", default=None)
_marks: ContextVar[bool] = ContextVar("longspan_marks", default=False)


@contextmanager
def observe(*, marks: bool = False) -> Iterator[Traffic]:
    """Counts what is sent inside; with `marks`, every step shows up in torch's profiler. Backward passes that autograd
    runs on threads of its own see neither."""
    traffic = Traffic()
    tokens = _traffic.set(traffic), _marks.set(marks)
    try:
        yield traffic
    finally:
        _traffic.reset(tokens[0])
        _marks.reset(tokens[1])


def count(src: int, dst: int, size: int) -> None:
    """Notes one message, if somebody is counting."""
    traffic = _traffic.get()
    if traffic is not None:
        traffic.count(src, dst, size)


def marks() -> bool:
    """Whether somebody asked for marks: then steps without work have one, too."""
    return _marks.get()


def mark(direction: str, rank: int, step: int) -> AbstractContextManager[object]:
    """A profiler mark around a step, if somebody asked for marks."""
    if not _marks.get():
        return nullcontext()
    return torch.profiler.record_function(f"longspan {direction} rank {rank} step {step}")
