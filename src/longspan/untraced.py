"""Functions that compiled code calls and does not trace: masks and plans are made with numpy, outside of graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
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
