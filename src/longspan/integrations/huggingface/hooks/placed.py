"""Whether a hook is in place. The module is asked, not a list of modules: a copy of a model has its hooks as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from longspan.execution._torch import hooks_of


def has_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether this function, or a partial of it, is called by the module already.

    >>> import copy
    >>> linear, hook = nn.Linear(2, 2), print
    >>> handle = linear.register_forward_hook(hook)
    >>> has_hook(linear, hook), has_hook(copy.deepcopy(linear), hook), has_hook(nn.Linear(2, 2), hook)
    (True, True, False)
    """
    return any(getattr(found, "func", found) is hook for kind in hooks_of(module) for found in kind.values())
