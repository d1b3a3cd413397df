"""The exception classes, and helpers that add the call's context to a message once.

Every refusal says what was expected, what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class LongspanError(Exception):
    """Root of everything Longspan raises on purpose."""

    context = ""
    """In which call it was raised; added where the call was made, so messages deep inside need not know."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}{chr(10) if chr(10) in text else ' '}{self.context}" if self.context else text


class MaskError(LongspanError, ValueError):
    """A mask that cannot mean what was asked."""


class LayoutError(LongspanError, ValueError):
    """A layout that cannot hold the sequence as asked."""


class ScheduleError(LongspanError, ValueError):
    """A schedule that is malformed, incomplete or impossible."""


class PlanError(LongspanError, ValueError):
    """A plan that cannot be made from the given mask, layout and shapes."""


class KernelError(LongspanError, ValueError):
    """A kernel that does not exist or cannot take the given tensors."""


class AgreementError(LongspanError, ValueError):
    """Ranks of a group that were asked for different things."""


class BusyError(LongspanError, RuntimeError):
    """A group that another thread of this process is using."""


class RankError(LongspanError, RuntimeError):
    """A rank that died, stopped, raised, or went another way than the others."""


class in_context:  # noqa: N801  (used like a function; in every call, where a generator would take three times as long)
    """Errors from inside say where they come from; where such calls lie in each other, the inner one.

    >>> with in_context(lambda: "The call: f(3)."):
    ...     raise LongspanError("3 was given. Give 4.")
    Traceback (most recent call last):
    longspan.errors.LongspanError: 3 was given. Give 4. The call: f(3).
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, LongspanError) and not isinstance(error, AgreementError | RankError):  # about all ranks
            error.context = error.context or self._describe()


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that says what arguments are called now, to those who use their old names.

    >>> renamed(schedule="scheme")(lambda scheme: scheme)(schedule="ring")
    Traceback (most recent call last):
    longspan.errors.PlanError: schedule = 'ring' was given to <lambda>. It is called scheme now: say scheme='ring'.
    """

    def with_names(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in names.keys() & kwargs.keys():
                name, value = function.__qualname__.removesuffix(".__init__"), repr(kwargs[old])
                raise PlanError(
                    f"{old} = {value:.60} was given to {name}. It is called {names[old]} now: say"
                    f" {names[old]}={value:.60}."
                )
            return function(*args, **kwargs)

        return called

    return with_names
