"""Handles: numbers under which operators find masks and plans.

Compiled code passes tensors on and takes everything else for a constant. So every mask and every plan has a tensor that
holds a number: one graph serves them all, and looks up which one it was given when it runs.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

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
