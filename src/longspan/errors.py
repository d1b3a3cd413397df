"""The exception classes, and helpers that add the call's context to a message once.

Every message says what was expected, what Longspan got and how to fix it.
"""

from __future__ import annotations

from collections.abc import Callable


class LongspanError(Exception):
    """Base class of every error that Longspan raises on purpose."""

    context = ""
    """The call that raised, in words. The outermost function sets it, so inner functions need not know the call."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}{chr(10) if chr(10) in text else ' '}{self.context}" if self.context else text


class MaskError(LongspanError, ValueError):
    """Invalid mask, or a mask that does not fit the sequence."""


class LayoutError(LongspanError, ValueError):
    """Invalid layout, or a layout that does not fit the sequence."""


class ScheduleError(LongspanError, ValueError):
    """Malformed, incomplete or incorrect schedule."""


class PlanError(LongspanError, ValueError):
    """No plan is possible for this mask, layout and shapes."""


class NotSupportedError(PlanError, NotImplementedError):
    """A request that PyTorch's own API refuses with NotImplementedError, and Longspan refuses too."""


class KernelError(LongspanError, ValueError):
    """Unknown kernel, or a kernel that does not support the tensors."""


class AgreementError(LongspanError, ValueError):
    """Ranks of a group called with different arguments."""


class in_context:  # noqa: N801  (used like a function; a generator-based context manager takes three times as long)
    """Context manager that sets `context` on errors raised inside. If several are nested, the innermost one sets it.

    >>> with in_context(lambda: "The call: f(3)."):
    ...     raise LongspanError("x must be 4, but got 3.")
    Traceback (most recent call last):
    longspan.errors.LongspanError: x must be 4, but got 3. The call: f(3).
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, LongspanError) and not isinstance(error, AgreementError):  # about all ranks
            error.context = error.context or self._describe()
