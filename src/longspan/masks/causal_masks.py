"""Masks that look only at the difference q - kv: full, causal, sliding window."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from longspan.errors import MaskError
from longspan.masks.bands import LIMIT, length_or_none
from longspan.masks.mask import Mask
from longspan.span import whole


def diagonal(lo: int, hi: int, seq_len: int | None, name: str) -> Mask:
    """Every pair with `lo <= q - kv <= hi`."""
    return _diagonal(lo, hi, length_or_none(seq_len, name), name)


@lru_cache(maxsize=64)
def _diagonal(lo: int, hi: int, seq_len: int | None, name: str) -> Mask:
    side = LIMIT if seq_len is None else seq_len
    return Mask.of_bands(np.array([[0, side, 0, side, lo, hi]], dtype=np.int64), seq_len, name)


def full(seq_len: int | None = None) -> Mask:
    """Every token sees every token."""
    return diagonal(-LIMIT, LIMIT, seq_len, "full()")


def causal(seq_len: int | None = None) -> Mask:
    """Every token sees itself and what came before.

    >>> print(causal().draw(8, width=4))
    ▒···
    █▒··
    ██▒·
    ███▒
    """
    return diagonal(0, LIMIT, seq_len, "causal()")


def sliding_window(left: int, right: int = 0, seq_len: int | None = None) -> Mask:
    """Every token sees `left` tokens before it, itself and `right` tokens after it.

    >>> print(sliding_window(2).draw(6, width=6))
    █·····
    ██····
    ███···
    ·███··
    ··███·
    ···███
    """
    left, right = (whole(n, name, "sliding_window()", MaskError) for n, name in ((left, "left"), (right, "right")))
    name = f"sliding_window({left})" if right == 0 else f"sliding_window({left}, {right})"
    return diagonal(-right, left, seq_len, name)
