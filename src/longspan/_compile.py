"""Helpers for torch.compile and module wrappers: handles, opaque dataclasses, eager-only functions.

Masks and plans are built with numpy, outside of compiled graphs. A graph holds handles of them.
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
# Compiled code treats every value except tensors as a constant. So each mask and each plan has a tensor with a number:
# one graph serves all of them, and looks up the number when it runs.


_numbers = count(1)
_alive: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register_value(value: Any) -> int:
    """Return a new number by which `lookup_value` looks up the value while it is alive. Numbers are never reused.

    >>> class Value: pass
    >>> value = Value()
    >>> number = register_value(value)
    >>> lookup_value(number) is value
    True
    >>> del value
    >>> lookup_value(number) is None
    True
    """
    number = next(_numbers)
    _alive[number] = value
    return number


def lookup_value(number: int) -> Any:
    """Return the value with this number; None if it was freed."""
    return _alive.get(number)


class Handled:
    """A frozen dataclass with a handle. A copy, in this process or another, gets a new one."""

    handle: Any
    """None if it was created before torch was loaded, see `handle_of`."""
    __match_args__: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", create_handle(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)


def create_handle(value: Any) -> Any:
    """Return a tensor with a new number for a value; None if torch is not loaded, as in planning."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "inference_mode"):
        return None
    with torch.inference_mode(False):  # compiled code has guards on inference tensors
        return torch.tensor(register_value(value), device="cpu")


# -- Dataclasses that module wrappers do not traverse ------------------------------------------------------------------
# FSDP with mixed precision, DDP and other wrappers traverse the arguments of a module for tensors. They rebuild
# dataclasses, so the module would get a new plan in every call, without anything cached on it.


T = TypeVar("T")


def opaque(kind: type[T]) -> type[T]:
    """Make a dataclass opaque to the input traversal of FSDP and DDP.

    It is created, compared, copied and pickled as before, but is no dataclass for `dataclasses.fields` and `replace`.

    >>> import dataclasses
    >>> @opaque
    ... @dataclasses.dataclass(frozen=True)
    ... class Pair:
    ...     a: int
    ...     b: int
    >>> Pair(1, 2), Pair(1, 2) == Pair(1, 2), dataclasses.is_dataclass(Pair)
    (Pair(a=1, b=2), True, False)
    """
    names = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]
    if "__slots__" in vars(kind):  # dataclasses with slots pickle by `dataclasses.fields`

        def get_state(self: Any) -> list[Any]:
            return [getattr(self, name) for name in names]

        def set_state(self: Any, values: Sequence[Any]) -> None:
            for name, value in zip(names, values, strict=True):
                object.__setattr__(self, name, value)  # the class may be frozen

        kind.__getstate__, kind.__setstate__ = get_state, set_state  # type: ignore[attr-defined]
    for name in ("__dataclass_fields__", "__replace__"):
        if name in vars(kind):
            delattr(kind, name)
    return kind


# -- Functions that run eagerly under torch.compile --------------------------------------------------------------------


P = ParamSpec("P")
_disabled: dict[Any, Any] = {}


def run_eagerly(function: Callable[P, T]) -> Callable[P, T]:
    """Run the function eagerly, with a graph break, under torch.compile. Loads neither torch nor its compiler.

    >>> run_eagerly(len)([1, 2])
    2
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled; loading it takes seconds
            return function(*args, **kwargs)
        eager = _disabled.get(function)
        if eager is None:
            compiler = sys.modules["torch"].compiler
            eager = compiler.disable(function, reason="masks and plans are built outside of compiled graphs")
            _disabled[function] = eager
        return eager(*args, **kwargs)

    return called


def assume_constant(function: T) -> T:
    """Make the function's result a constant of compiled graphs: `torch.compiler.assume_constant_result`, which would
    load the compiler."""
    vars(function)["_dynamo_marked_constant"] = True
    return function
