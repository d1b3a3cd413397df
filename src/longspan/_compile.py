"""Helpers for torch.compile and module wrappers: handles, opaque dataclasses, eager-only functions.

Masks and plans are built with numpy, outside of compiled graphs. A graph carries them as handles, and calls the
functions that build them without tracing them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

# -- Handles -----------------------------------------------------------------------------------------------------------
# Compiled code passes tensors through and treats every other value as a constant. So each mask and each plan has a
# tensor that holds a number: one graph serves all of them, and looks up the number when it runs.


_numbers = count(1)
_alive: WeakValueDictionary[int, Any] = WeakValueDictionary()


def number_of(value: Any) -> int:
    """A new number for a value, under which it is found as long as somebody else holds it. No number is used twice.

    >>> class Value: pass
    >>> value = Value()
    >>> number = number_of(value)
    >>> found_under(number) is value
    True
    >>> del value
    >>> found_under(number) is None
    True
    """
    number = next(_numbers)
    _alive[number] = value
    return number


def found_under(number: int) -> Any:
    """The value with this number; None once it is gone."""
    return _alive.get(number)


class Handled:
    """A frozen dataclass with a handle. A copy, in this process or another, gets one of its own."""

    handle: Any
    """None where it was made before torch was loaded, see `handle_of`."""
    __match_args__: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", handle_of(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)


def handle_of(value: Any) -> Any:
    """A tensor with a new number for a value; None as long as torch is not loaded, which planning does without."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "inference_mode"):
        return None
    with torch.inference_mode(False):  # compiled code tells tensors of inference mode from others
        return torch.tensor(number_of(value), device="cpu")


# -- Dataclasses that module wrappers do not traverse ------------------------------------------------------------------
# FSDP with mixed precision, DDP and other wrappers look for tensors inside the arguments of a module. They take a
# dataclass apart and rebuild it, so the module would get a new plan in every call and nothing cached on the plan would
# be found.


T = TypeVar("T")


def sealed(kind: type[T]) -> type[T]:
    """The dataclass as an ordinary class: made, compared, copied and pickled as before, but `dataclasses.fields` and
    `dataclasses.replace` do not know it any more.

    >>> import dataclasses
    >>> @sealed
    ... @dataclasses.dataclass(frozen=True)
    ... class Pair:
    ...     a: int
    ...     b: int
    >>> Pair(1, 2), Pair(1, 2) == Pair(1, 2), dataclasses.is_dataclass(Pair)
    (Pair(a=1, b=2), True, False)
    """
    names = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]
    if "__slots__" in vars(kind):  # a dataclass with slots is pickled field by field
        _pickle_by_name(kind, names)
    for name in ("__dataclass_fields__", "__replace__"):
        if name in vars(kind):
            delattr(kind, name)
    return kind


def _pickle_by_name(kind: Any, names: Sequence[str]) -> None:
    def state(self: Any) -> list[Any]:
        return [getattr(self, name) for name in names]

    def set_state(self: Any, values: Sequence[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)  # of a frozen class

    kind.__getstate__, kind.__setstate__ = state, set_state


# -- Functions that are not traced -------------------------------------------------------------------------------------


P = ParamSpec("P")
_quiet: dict[Any, Any] = {}


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """The function, before which compiled code stops and after which it goes on; torch is not needed for it.

    >>> untraced(len)([1, 2])
    2
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return _of(function)(*args, **kwargs)

    return called


def _of(function: Callable[P, T]) -> Callable[P, T]:
    if function not in _quiet:
        compiler = getattr(sys.modules.get("torch"), "compiler", None)
        if compiler is None:
            return function
        _quiet[function] = compiler.disable(function, reason="masks and plans are made outside of compiled graphs")
    return _quiet[function]
