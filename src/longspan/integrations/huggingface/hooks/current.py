"""The sequence that a model is running on in this thread, while its forward pass lasts.

It is for what models call without keywords: masks, rotary embeddings, losses of routers. Layers that may be computed
again in backward, when no forward pass is on, must not ask here; masks carry the sequence to them.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_RUNNING: ContextVar[tuple[Any, ...]] = ContextVar("longspan_sequences", default=())


@dataclass
class LastForward:
    """What is known of the forward pass that began last, in any thread: backward runs in threads of its own."""

    checks_hooks: bool = False
    """Whether it is over ranks, of a model that is checked: hooks of users may then change nothing."""


LAST_FORWARD = LastForward()


def current() -> Any:
    """The sequence of the innermost model that is running, or None."""
    running = _RUNNING.get()
    return running[-1] if running else None


def enter(sequence: Any) -> None:
    _RUNNING.set((*_RUNNING.get(), sequence))


def leave() -> None:
    _RUNNING.set(_RUNNING.get()[:-1])
