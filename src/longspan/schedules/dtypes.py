"""Dtypes by name: plans are made without torch."""

from __future__ import annotations

from typing import Any

from longspan.errors import PlanError
from longspan.span import shortened

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype, or of its name; others are refused.

    >>> dtype_name("bfloat16")
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise PlanError(
            f"dtype {shortened(dtype)} was asked for. Choose one of {', '.join(ITEMSIZE)}, as torch dtypes or names."
        )
    return name
