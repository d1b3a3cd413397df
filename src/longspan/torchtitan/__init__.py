"""torchtitan with Longspan's attention: `with_longspan`, and every config of torchtitan's models by its name.

The code is in `hooks.py`, which imports torchtitan and is loaded on first use; `masks.py` does not need it.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name in ("hooks", "masks"):  # the import system asks before it looks for files
        raise AttributeError(name)
    return getattr(import_module("longspan.torchtitan.hooks"), name)


def __dir__() -> list[str]:
    return dir(import_module("longspan.torchtitan.hooks"))
