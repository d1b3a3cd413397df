"""Masks with a part that everybody sees: prefix language models and global tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import MaskError
from longspan.masks.bands import LIMIT
from longspan.masks.documents import document_edges
from longspan.masks.mask import Mask


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
    if lengths is None:
        edges = np.array([0, LIMIT if seq_len is None else seq_len], dtype=np.int64)
    else:
        edges = document_edges(lengths)
        seq_len = int(edges[-1])
    starts, stops = edges[:-1], edges[1:]
    sizes = np.broadcast_to(np.asarray(prefix, dtype=np.int64), starts.shape)
    if sizes.size and (int(sizes.min()) < 0 or bool((sizes > stops - starts).any())):
        raise MaskError(
            f"prefix_lm needs 0 <= prefix <= length for every document, but prefixes {sizes.tolist()!r:.60} were given"
            f" for lengths {(stops - starts).tolist()!r:.60}."
        )
    mid = starts + sizes
    far = np.full_like(starts, LIMIT)
    both_ways = np.stack((starts, mid, starts, mid, -far, far), axis=1)
    onward = np.stack((mid, stops, starts, stops, np.zeros_like(far), far), axis=1)
    return Mask.of_bands(np.concatenate((both_ways, onward)), seq_len, "prefix_lm()")


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
    if num < 0:
        raise MaskError(f"global_prefix({num}) was asked for. The number of global tokens is 0 or more.")
    side = LIMIT if seq_len is None else seq_len
    rows = np.array([[0, side, 0, min(num, side), -LIMIT, LIMIT]], dtype=np.int64)
    return Mask.of_bands(rows, seq_len, f"global_prefix({num})")
