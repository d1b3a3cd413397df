"""Safety: how carefully a call runs. Settings of a scope; a backward pass has those of the last forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from longspan.errors import PlanError


@dataclass(frozen=True, slots=True)
class Safety:
    """How long to wait for whom, and whether every message is checked. None of it changes a result."""

    patience: float = 2.0
    """Seconds for which a rank is stopped, or its host silent, before that is a fault; 0: nobody watches."""
    timeout: float | None = None
    """Seconds to wait for a rank that is alive but does not come; None: as long as the group itself does."""
    checked: bool = False
    """Every message carries a header and a checksum."""

    def __post_init__(self) -> None:
        for name in ("patience", "timeout"):
            value = getattr(self, name)
            if name == "timeout" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
                raise PlanError(f"{name} = {value!r} was asked for. It is a number of seconds, 0 or more.")
        if self.timeout is not None and self.timeout < 1:
            raise PlanError(f"timeout = {self.timeout} s was asked for. A rank may be late by a second at any time.")
        if 0 < self.patience < 0.5:
            raise PlanError(
                f"patience = {self.patience} s was asked for. Ranks are looked at every 0.25 s: less than 0.5 s would"
                f" name healthy ones."
            )


_safety: ContextVar[Safety] = ContextVar("longspan_safety")


def safety(last: Safety | None = None) -> Safety:
    """The settings of this scope; on threads of autograd, which have no scope, the `last` that a call had."""
    settings = _safety.get(None)
    if settings is None and last is not None and threading.current_thread() is not threading.main_thread():
        return last
    return settings or Safety()


@contextmanager
def safely(settings: Safety) -> Iterator[None]:
    """These settings for all calls inside."""
    token = _safety.set(settings)
    try:
        yield
    finally:
        _safety.reset(token)
