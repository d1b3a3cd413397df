"""Deprecated names of `longspan.huggingface`, `longspan.torch_api` and `longspan.torchtitan`."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def forward_to(old: str, new: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that takes names from another module and warns."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(f"{old} is deprecated, use {new} instead.", DeprecationWarning, stacklevel=2)
        return value

    return get
