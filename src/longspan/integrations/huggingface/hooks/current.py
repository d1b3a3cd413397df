"""The sequence that a model is running on in this thread, while its forward pass lasts.

It is for what models call without keywords: masks, rotary embeddings, losses of routers. Layers that may be computed
again in backward, when no forward pass is on, must not ask here; masks carry the sequence to them.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

_RUNNING: ContextVar[tuple[Any, ...]] = ContextVar("longspan_sequences", default=())


def current() -> Any:
    """The sequence of the innermost model that is running, or None."""
    running = _RUNNING.get()
    return running[-1] if running else None


def enter(sequence: Any) -> None:
    _RUNNING.set((*_RUNNING.get(), sequence))


def leave() -> None:
    _RUNNING.set(_RUNNING.get()[:-1])
