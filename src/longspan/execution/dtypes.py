"""In which dtype sums, statistics and scores are kept."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others.

    >>> wide(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
