"""Models compute parts in float32 whatever their dtype: norms, softmax, rotary embeddings, losses, recurrences. A proof
has them in float64, so that what is wrong stands clear of what is rounded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

OURS = "longspan."


class Wide(TorchFunctionMode):
    """Inside, whoever asks for float32 gets float64; Longspan's own code gets what it asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if sys._getframe(1).f_globals.get("__name__", "").startswith(OURS):
            return func(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
