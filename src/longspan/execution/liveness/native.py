"""Two things that Python's own library has no words for, said to the interpreter and to CUDA's runtime themselves.

The first is to raise an error in the main thread, which may be waiting for a device in PyTorch. When a communicator is
aborted that wait ends as if all were well, with whatever the device had by then in its memory. A program that goes on
would train on it, and save it. So the error comes as soon as the main thread is back in Python. The second lets a
thread poll works while another one captures a CUDA graph. Both calls have fixed names and nothing of a user's in them.
"""

from __future__ import annotations

import ctypes
import os
import threading

import torch

from longspan.errors import RankError

RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


class Interrupt:
    """One error for the main thread, raised once: by the call that it is in, or else between two of its lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_raised = self._is_sent = False

    @property
    def is_told(self) -> bool:
        """Whether the program has heard of it, one way or the other."""
        return self._is_raised or self._is_sent

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


def poll_beside_captures() -> None:
    """Lets this thread poll works while another one captures a CUDA graph, which CUDA otherwise takes for a mistake in
    the capture. The runtime that PyTorch has loaded is asked; where there is none, there is nothing to let."""
    if torch.version.cuda is None:
        return
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
    except (OSError, AttributeError):
        return
