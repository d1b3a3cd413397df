"""Raising an error in the main thread, which may be waiting for a device in PyTorch.

When a communicator is aborted that wait ends as if all were well, with whatever the device had by then in its memory.
A program that goes on would train on it, and save it. So the error comes as soon as the main thread is back in Python.
"""

from __future__ import annotations

import ctypes
import threading

from longspan.errors import RankError


class Interrupt:
    """One error for the main thread, raised once: by the call that it is in, or else between two of its lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_raised = self._is_sent = False

    def send(self, text: str) -> None:
        """Has the error raised, unless a call has raised it already."""

        class FoundError(RankError):
            def __init__(self, *args: object) -> None:  # it is made without arguments
                super().__init__(*(args or (text,)))

        FoundError.__name__ = FoundError.__qualname__ = RankError.__name__
        FoundError.__module__ = RankError.__module__
        with self._lock:
            if not self._is_raised and not self._is_sent:
                self._is_sent = True
                _set_async(ctypes.py_object(FoundError))

    def take(self) -> None:
        """To be called before an error is raised here: the other one is not needed any more."""
        with self._lock:
            if self._is_sent and not self._is_raised:
                _set_async(None)
            self._is_raised = True


def _set_async(error: ctypes.py_object[type[RankError]] | None) -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)
