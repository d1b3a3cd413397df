"""Values that wrappers of modules hand on whole.

FSDP with mixed precision, DDP and other wrappers look for tensors in whatever a module is given. A dataclass they take
apart and put together again: the module would get another plan with every call, which nothing remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

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
