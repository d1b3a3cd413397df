"""Observation: bytes and messages really sent, and profiler marks per step. Off unless asked for, and scoped."""

from __future__ import annotations

import threading
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


Observed = tuple[Traffic, bool]
"""What is counted, and whether steps are marked."""
_observed: ContextVar[Observed | None] = ContextVar("longspan_observed", default=None)
_all_observed: list[Observed] = []
"""Those of the whole process, the last one last: for threads that were not started by Python."""


@contextmanager
def observe(*, marks: bool = False) -> Iterator[Traffic]:
    """Count what is sent inside; with `marks`, every step shows up in torch's profiler. Backward passes of GPUs, which
    autograd runs on threads of its own, are counted by the observer that was started last."""
    observed = Traffic(), marks
    token = _observed.set(observed)
    _all_observed.append(observed)
    try:
        yield observed[0]
    finally:
        _all_observed[:] = [other for other in _all_observed if other is not observed]
        _observed.reset(token)


def _current() -> Observed | None:
    found = _observed.get()
    if found is None and _all_observed and threading.current_thread().name.startswith("Dummy-"):
        return _all_observed[-1]  # a thread of autograd, which has no context
    return found


def count(src: int, dst: int, size: int) -> None:
    """Note one message, if an observer is active."""
    if (observed := _current()) is not None:
        observed[0].count(src, dst, size)


def marks() -> bool:
    """Return whether an observer wants marks: then steps without work have one, too."""
    observed = _current()
    return observed is not None and observed[1]


def mark(direction: str, rank: int, step: int) -> AbstractContextManager[object]:
    """A profiler mark around a step, if somebody asked for marks."""
    if not marks():
        return nullcontext()
    return torch.profiler.record_function(f"longspan {direction} rank {rank} step {step}")
