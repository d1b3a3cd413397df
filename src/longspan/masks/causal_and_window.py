"""Causal, sliding window, prefix and full masks: bands around the diagonal."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from longspan._compile import run_eagerly
from longspan.errors import MaskError
from longspan.masks.bands import LIMIT, LO, length_or_none, rectangles
from longspan.masks.document_rows import document_edges, flat_array
from longspan.masks.mask import Mask
from longspan.spans import check_int, truncated_repr


def diagonal(lo: int, hi: int, seq_len: int | None, name: str) -> Mask:
    """Return the mask of all pairs with `lo <= q - kv <= hi`."""
    return _cached_diagonal(lo, hi, length_or_none(seq_len, name), name)


@lru_cache(maxsize=64)
def _cached_diagonal(lo: int, hi: int, seq_len: int | None, name: str) -> Mask:
    side = LIMIT if seq_len is None else seq_len
    return Mask.of_bands(np.array([[0, side, 0, side, lo, hi]], dtype=np.int64), seq_len, name)


@run_eagerly
def full(seq_len: int | None = None) -> Mask:
    """Every token sees every token."""
    return diagonal(-LIMIT, LIMIT, seq_len, "full()")


@run_eagerly
def causal(seq_len: int | None = None) -> Mask:
    """Every token sees itself and what came before.

    >>> print(causal().draw(8, width=4))
    ▒···
    █▒··
    ██▒·
    ███▒
    """
    return diagonal(0, LIMIT, seq_len, "causal()")


@run_eagerly
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
    left, right = (check_int(n, name, "sliding_window()", MaskError) for n, name in ((left, "left"), (right, "right")))
    name = f"sliding_window({left})" if right == 0 else f"sliding_window({left}, {right})"
    return diagonal(-right, left, seq_len, name)


@run_eagerly
def prefix_lm(prefix: ArrayLike, lengths: ArrayLike | None = None, seq_len: int | None = None) -> Mask:
    """A prefix whose tokens see each other both ways, then causal tokens that see the prefix and their past.

    With `lengths` there is one prefix per document, and documents do not see each other.

    >>> print(prefix_lm(3).draw(6, width=6))
    ███···
    ███···
    ███···
    ████··
    █████·
    ██████
    """
    seq_len = length_or_none(seq_len, "prefix_lm()")
    sizes = flat_array(prefix, "prefix is a whole number, or one for every document")
    if sizes.size and not np.issubdtype(sizes.dtype, np.integer):
        raise MaskError(
            f"prefix_lm() needs a prefix in whole numbers of tokens, but got prefix = {truncated_repr(prefix)}."
        )
    if lengths is None:
        edges = np.array([0, LIMIT if seq_len is None else seq_len], dtype=np.int64)
    else:
        edges = document_edges(lengths)
        if seq_len not in (None, int(edges[-1])):
            raise MaskError(
                f"prefix_lm() got documents of {int(edges[-1])} tokens together and seq_len = {seq_len}. Lengths cover"
                f" the sequence: leave seq_len out."
            )
        seq_len = int(edges[-1])
    starts, stops = edges[:-1], edges[1:]
    if sizes.shape not in ((), starts.shape):
        raise MaskError(
            f"prefix_lm() got prefixes of shape {sizes.shape} for {len(starts)} documents. Pass one for all, or one for"
            f" each document."
        )
    sizes = np.broadcast_to(sizes.astype(np.int64), starts.shape)
    if sizes.size and (int(sizes.min()) < 0 or bool((sizes > stops - starts).any())):
        raise MaskError(
            f"prefix_lm() needs 0 <= prefix <= length for every document, but got prefixes {sizes.tolist()!r:.60} for"
            f" lengths {(stops - starts).tolist()!r:.60}."
        )
    mid = starts + sizes
    onward = rectangles(mid, stops, starts, stops)
    onward[:, LO] = 0
    return Mask.of_bands(np.concatenate((rectangles(starts, mid, starts, mid), onward)), seq_len, "prefix_lm()")


@run_eagerly
def global_prefix(num: int, seq_len: int | None = None) -> Mask:
    """Every token sees the first `num` tokens and nothing else; meant to be combined with other masks.

    >>> print(((sliding_window(1) | global_prefix(2)) & causal()).draw(6, width=6))
    █·····
    ██····
    ███···
    ████··
    ██·██·
    ██··██
    """
    num = check_int(num, "num", "global_prefix()", MaskError)
    seq_len = length_or_none(seq_len, "global_prefix()")
    side = LIMIT if seq_len is None else seq_len
    return Mask.of_bands(rectangles(0, side, 0, min(num, side)), seq_len, f"global_prefix({num})")
