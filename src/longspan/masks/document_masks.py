"""Masks of packed sequences: tokens see only their own document, or their own fixed-size chunk."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import MaskError
from longspan.masks.bands import LIMIT, rectangles
from longspan.masks.mask import Mask
from longspan.span import Ints, shortened, whole

MAX_CHUNKS = 1 << 24


def flat_numbers(values: ArrayLike, form: str) -> NDArray[Any]:
    """The values as an array of whatever type they have; refuses lists of different lengths."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:  # numpy's own words for ragged lists help nobody
        raise MaskError(f"{form}, but {shortened(values)} was given.") from error


def document_edges(lengths: ArrayLike) -> Ints:
    """0, and where each document ends; refuses anything that is not a list of token counts."""
    counts = flat_numbers(lengths, "document lengths are a flat list of whole numbers")
    if counts.ndim != 1 or (counts.size and not np.issubdtype(counts.dtype, np.integer)):
        raise MaskError(
            f"document lengths are a flat list of whole numbers, but an array of shape {counts.shape} and type"
            f" {counts.dtype} was given."
        )
    if counts.size and int(counts.min()) < 0:
        where = int(np.argmax(counts < 0))
        raise MaskError(f"document {where} has length {int(counts[where])}. A document has 0 tokens or more.")
    if sum(counts.tolist()) > LIMIT:  # added up by Python, whose numbers do not overflow
        raise MaskError(f"documents of {sum(counts.tolist())} tokens together were given. {LIMIT} is the limit.")
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))


def _blocks(edges: Ints, name: str) -> Mask:
    return _known_blocks(edges.tobytes(), name)


@lru_cache(maxsize=64)
def _known_blocks(text: bytes, name: str) -> Mask:
    """The same lengths give the same object: every layer and every rank's data loader asks for them again."""
    edges = np.frombuffer(text, dtype=np.int64)
    starts, stops = edges[:-1], edges[1:]
    return Mask.of_bands(rectangles(starts, stops, starts, stops), int(edges[-1]), name)


def documents(lengths: ArrayLike) -> Mask:
    """Every token sees all of its own document; lengths add up to the sequence.

    >>> print((documents([3, 1, 2])).draw(width=6))
    ███···
    ███···
    ███···
    ···█··
    ····██
    ····██
    """
    edges = document_edges(lengths)
    return _blocks(edges, f"documents({len(edges) - 1})")


def from_cu_seqlens(cu_seqlens: ArrayLike) -> Mask:
    """`documents` from cumulative lengths 0, end of the first, end of the second, ... as varlen kernels take them.

    >>> from_cu_seqlens([0, 3, 4, 6]) == documents([3, 1, 2])
    True
    """
    form = "cu_seqlens starts with 0 and then lists where each document ends, in whole numbers"
    edges = flat_numbers(cu_seqlens, form)
    plain = edges.ndim == 1 and edges.size and np.issubdtype(edges.dtype, np.integer)
    if not plain or int(edges[0]) != 0:
        raise MaskError(f"{form}, but {shortened(edges.tolist())} was given.")
    return documents(np.diff(edges))


def chunked(size: int, seq_len: int) -> Mask:
    """Every token sees all of its own chunk of `size` tokens; the last chunk may be shorter.

    >>> chunked(2, 5) == documents([2, 2, 1])
    True
    """
    size = whole(size, "size", "chunked()", MaskError, low=1)
    seq_len = whole(seq_len, "seq_len", "chunked()", MaskError)
    if seq_len > size * MAX_CHUNKS:
        raise MaskError(
            f"chunked(size={size}, seq_len={seq_len}) makes {-(-seq_len // size)} chunks; {MAX_CHUNKS} is the limit."
            f" Give larger chunks."
        )
    edges = np.append(np.arange(0, seq_len, size, dtype=np.int64), seq_len)
    return _blocks(edges, f"chunked({size})")
