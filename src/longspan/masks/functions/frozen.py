"""Functions as they are now: variables that a loop binds anew afterwards do not reach them."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any


def frozen(function: Any, within: tuple[int, ...] = ()) -> Any:
    """A copy of a function with its own variables, for a call that comes later; other callables as they are.

    Backward calls a function again after forward, and by then a loop over layers has gone on:

    >>> functions = [lambda: width for width in (1, 2)]
    >>> [function() for function in functions]
    [2, 2]
    >>> [frozen(lambda: width)() for width in (1, 2)]
    [1, 2]

    A function that writes to its variables is left alone: others may read them.
    """
    if not isinstance(function, FunctionType) or not function.__closure__ or _writes(function.__code__):
        return function
    cells = tuple(_cell(cell, (*within, id(function))) for cell in function.__closure__)
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


def _cell(cell: CellType, within: tuple[int, ...]) -> CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # not bound yet
        return cell
    if isinstance(value, FunctionType):
        return cell if id(value) in within else CellType(frozen(value, within))  # one that calls itself, or another
    return CellType(value)


@lru_cache(maxsize=256)
def _writes(code: CodeType) -> bool:
    """Whether the code binds a variable of the function around it."""
    return any(i.opname == "STORE_DEREF" and i.argval in code.co_freevars for i in dis.get_instructions(code))
