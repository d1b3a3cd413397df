"""Masks with a part that everybody sees: prefix language models and global tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import MaskError
from longspan.masks.bands import LIMIT, LO, length_or_none, rectangles
from longspan.masks.document_masks import document_edges, flat_numbers
from longspan.masks.mask import Mask
from longspan.span import shortened, whole


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
    sizes = flat_numbers(prefix, "prefix is a whole number, or one for every document")
    if sizes.size and not np.issubdtype(sizes.dtype, np.integer):
        raise MaskError(f"prefix_lm() was given prefix = {shortened(prefix)}. It counts tokens, in whole numbers.")
    if lengths is None:
        edges = np.array([0, LIMIT if seq_len is None else seq_len], dtype=np.int64)
    else:
        edges = document_edges(lengths)
        if seq_len not in (None, int(edges[-1])):
            raise MaskError(
                f"prefix_lm() was given documents of {int(edges[-1])} tokens together and seq_len = {seq_len}. Lengths"
                f" cover the sequence: leave seq_len out."
            )
        seq_len = int(edges[-1])
    starts, stops = edges[:-1], edges[1:]
    if sizes.shape not in ((), starts.shape):
        raise MaskError(
            f"prefix_lm() was given prefixes of shape {sizes.shape} for {len(starts)} documents. Give one for all, or"
            f" one for each document."
        )
    sizes = np.broadcast_to(sizes.astype(np.int64), starts.shape)
    if sizes.size and (int(sizes.min()) < 0 or bool((sizes > stops - starts).any())):
        raise MaskError(
            f"prefix_lm needs 0 <= prefix <= length for every document, but prefixes {sizes.tolist()!r:.60} were given"
            f" for lengths {(stops - starts).tolist()!r:.60}."
        )
    mid = starts + sizes
    onward = rectangles(mid, stops, starts, stops)
    onward[:, LO] = 0
    return Mask.of_bands(np.concatenate((rectangles(starts, mid, starts, mid), onward)), seq_len, "prefix_lm()")


def global_prefix(num: int, seq_len: int | None = None) -> Mask:
    """Every token sees the first `num` tokens and nothing else; made to be combined.

    >>> print(((sliding_window(1) | global_prefix(2)) & causal()).draw(6, width=6))
    █·····
    ██····
    ███···
    ████··
    ██·██·
    ██··██
    """
    num = whole(num, "num", "global_prefix()", MaskError)
    seq_len = length_or_none(seq_len, "global_prefix()")
    side = LIMIT if seq_len is None else seq_len
    return Mask.of_bands(rectangles(0, side, 0, min(num, side)), seq_len, f"global_prefix({num})")
