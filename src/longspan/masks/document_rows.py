"""Masks of packed documents, and document numbers per position, from lengths or from a mask.

Shapes: R batch rows (1 if all rows are equal), S tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan._compile import run_eagerly
from longspan.errors import LongspanError, MaskError
from longspan.masks import bands as bd
from longspan.masks.bands import LIMIT, rectangles
from longspan.masks.mask import Mask
from longspan.spans import Ints, check_int, truncated_repr

Documents: TypeAlias = Mask | ArrayLike | None
"""Lengths, a list of lengths per batch row, a mask, or None for one document."""
MAX_CHUNKS = 1 << 24

# -- Masks of documents and chunks -------------------------------------------------------------------------------------


def flat_array(values: ArrayLike, form: str) -> NDArray[Any]:
    """Return the values as an array of any type; raise for lists of different lengths."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:  # numpy's message for ragged lists does not help
        raise MaskError(f"{form}, but got {truncated_repr(values)}.") from error


def document_edges(lengths: ArrayLike) -> Ints:
    """Return 0 and the end of each document; raise unless `lengths` is a list of token counts."""
    form = "document lengths are a flat list of whole numbers"
    counts = flat_array(lengths, form)
    if counts.ndim != 1 or (counts.size and not np.issubdtype(counts.dtype, np.integer)):
        raise MaskError(f"{form}, but got an array of shape {counts.shape} and type {counts.dtype}.")
    if counts.size and int(counts.min()) < 0:
        where = int(np.argmax(counts < 0))
        raise MaskError(f"document {where} has length {int(counts[where])}. A document has 0 tokens or more.")
    total = sum(counts.tolist())  # Python's integers do not overflow
    if total > LIMIT:
        raise MaskError(f"documents have {total} tokens together; {LIMIT} is the limit.")
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))


@lru_cache(maxsize=64)
def _blocks(edges: bytes, name: str) -> Mask:
    """Return the mask of blocks on the diagonal. The same edges give the same object: every layer asks again."""
    array = np.frombuffer(edges, dtype=np.int64)
    starts, stops = array[:-1], array[1:]
    return Mask.of_bands(rectangles(starts, stops, starts, stops), int(array[-1]), name)


@run_eagerly
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
    return _blocks(edges.tobytes(), f"documents({len(edges) - 1})")


@run_eagerly
def from_cu_seqlens(cu_seqlens: ArrayLike) -> Mask:
    """`documents` from cumulative lengths 0, end of the first, end of the second, ... as varlen kernels take them.

    >>> from_cu_seqlens([0, 3, 4, 6]) == documents([3, 1, 2])
    True
    """
    form = "cu_seqlens starts with 0 and then lists where each document ends, in whole numbers"
    edges = flat_array(cu_seqlens, form)
    is_flat = edges.ndim == 1 and edges.size and np.issubdtype(edges.dtype, np.integer)
    if not is_flat or int(edges[0]) != 0:
        raise MaskError(f"{form}, but got {truncated_repr(edges.tolist())}.")
    return documents(np.diff(edges))


@run_eagerly
def chunked(size: int, seq_len: int) -> Mask:
    """Every token sees all of its own chunk of `size` tokens; the last chunk may be shorter.

    >>> chunked(2, 5) == documents([2, 2, 1])
    True
    """
    size = check_int(size, "size", "chunked()", MaskError, low=1)
    seq_len = check_int(seq_len, "seq_len", "chunked()", MaskError)
    if seq_len > size * MAX_CHUNKS:
        raise MaskError(
            f"chunked(size={size}, seq_len={seq_len}) makes {-(-seq_len // size)} chunks; {MAX_CHUNKS} is the limit."
            f" Use larger chunks."
        )
    edges = np.append(np.arange(0, seq_len, size, dtype=np.int64), seq_len)
    return _blocks(edges.tobytes(), f"chunked({size})")


# -- Document numbers --------------------------------------------------------------------------------------------------


def document_rows(documents: Any, seq_len: int, error: type[LongspanError] = MaskError) -> Ints:
    """Return the document of each position, (R, S), counted from 0.

    `documents` is None (one document), lengths, a list of lengths per batch row, or a mask. A mask must be one of
    documents in every head, with or without `causal`, a window, or a prefix that all later tokens see:

    - every token sees itself. A document begins where a token does not see the token before it;
    - no token sees a token of another document;
    - a document's tokens are seen by all later ones of it or, after a prefix, by those within one distance.

    `chunked` is a mask of documents, too: for chunks of attention inside documents, pass lengths. Other masks raise
    `error`.

    >>> document_rows([2, 3], 5).tolist()
    [[0, 0, 1, 1, 1]]
    >>> document_rows([[2, 3], [5]], 5).tolist()
    [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    >>> document_rows(masks.documents([2, 3]) & masks.causal(), 5).tolist()
    [[0, 0, 1, 1, 1]]
    """
    if documents is None:
        return np.zeros((1, seq_len), dtype=np.int64)
    if isinstance(documents, Mask):
        return _of_mask(documents, seq_len, error)
    if hasattr(documents, "tolist"):  # an array, or a tensor on any device
        documents = documents.tolist()
    has_order = not isinstance(cast("object", documents), str | bytes | set | frozenset | dict)
    if not has_order or not hasattr(documents, "__len__"):
        raise error(
            f"`documents` must be a list of lengths, a list of lengths per batch row, or a mask, but got documents ="
            f" {truncated_repr(documents)}."
        )
    is_nested = len(documents) and np.ndim(documents[0]) == 1
    rows: list[Ints] = []
    for lengths in documents if is_nested else [documents]:
        edges = document_edges(np.asarray(lengths, dtype=None if len(lengths) else np.int64))
        if int(edges[-1]) != seq_len:
            raise error(
                f"document lengths add up to {int(edges[-1])}, but the sequence has {seq_len} tokens. Lengths cover all"
                f" of it: count padding at the end as one more document, which in training is kept out of the loss with"
                f" loss_mask."
            )
        rows.append(np.repeat(np.arange(len(edges) - 1, dtype=np.int64), np.diff(edges)))
    return np.stack(rows)


def _of_mask(mask: Mask, seq_len: int, error: type[LongspanError]) -> Ints:
    if not mask.is_structured:
        raise error(
            f"documents cannot be read from {mask}, because a function decides which pairs it allows. Pass the lengths"
            f" of the documents instead."
        )
    key = "documents", seq_len
    if key not in mask.known:  # every layer asks
        by_plane: dict[int, Ints] = {}
        rows: list[Ints] = []
        for planes in mask.resized(seq_len).grid:
            for head, plane in enumerate(planes):
                if id(plane) not in by_plane:
                    by_plane[id(plane)], problem = _of_bands(bd.tighten(plane.region), seq_len)
                    if problem is not None:
                        raise _not_documents(mask, problem, error)
                if not np.array_equal(by_plane[id(plane)], by_plane[id(planes[0])]):
                    raise _not_documents(mask, f"heads 0 and {head} have different documents", error)
            rows.append(by_plane[id(planes[0])])
        mask.known[key] = np.stack(rows)
    return mask.known[key]


def _not_documents(mask: Mask, problem: str, error: type[LongspanError]) -> LongspanError:
    return error(
        f"`documents` must be lengths or a mask of documents, such as documents(lengths) & causal(), with or without a"
        f" window, but got {mask}: {problem}. Pass the lengths of the documents instead."
    )


def _of_bands(bands: Ints, seq_len: int) -> tuple[Ints, str | None]:
    """Return the document of each position, (S,), and why `bands` are not a mask of documents, or None."""
    sees_itself, sees_previous = (_counts_by_key(bands, seq_len, d, d) > 0 for d in (0, 1))
    starts = np.append(True, ~sees_previous[:-1])[:seq_len]  # key k - 1 is seen at distance 1 by token k
    numbers = np.cumsum(starts) - 1
    if not sees_itself.all():
        return numbers, f"token {int(np.argmin(sees_itself))} does not see itself"
    first = np.flatnonzero(starts)
    last = np.append(first[1:], seq_len)
    blocks = bd.rectangles(first, last, first, last)
    if bd.area(bd.intersect(bands, blocks)).sum() != bd.area(bands).sum():
        q, _, _, k_stop, low, _ = bd.tighten(bd.subtract(bands, blocks))[0].tolist()
        kv = min(k_stop - 1, q - low)
        edge = int(first[numbers[max(q, kv)]])
        return numbers, f"token {q} sees token {kv}, although token {edge} does not see token {edge - 1}"
    left = last[numbers] - np.arange(seq_len)  # tokens of the document from each one on, itself included
    seen = _counts_by_key(bands, seq_len, 0)
    windowed = np.flatnonzero(seen < left)
    if not len(windowed):
        return numbers, None
    window, key = int(seen[windowed[0]]), int(windowed[0])
    before = np.zeros(seq_len, dtype=np.int64)  # tokens with a window, up to each one, in its document
    before[windowed] = 1
    before = np.cumsum(before) - np.append(0, np.cumsum(before))[first][numbers]
    irregular = (seen < left) & (seen != window)
    irregular |= (seen < left) & (_counts_by_key(bands, seq_len, window) > 0)
    irregular |= (seen == left) & (left > window) & (before > 0)
    if irregular.any():
        other = int(np.argmax(irregular))
        return numbers, f"tokens {key} and {other} are not seen by all later tokens of a document, nor in one window"
    return numbers, None


def _counts_by_key(bands: Ints, seq_len: int, low: int, high: int = bd.LIMIT) -> Ints:
    """Return how many queries at distances q - kv from `low` to `high` see each key, (S,).

    Within a band, key k is seen by the queries from max(q0, k + lo) to min(q1 - 1, k + hi), so counts are straight
    lines between four keys: their slopes and offsets are added up as differences.
    """
    bands = bands.copy()
    bands[:, bd.LO] = np.maximum(bands[:, bd.LO], low)
    bands[:, bd.HI] = np.minimum(bands[:, bd.HI], high)
    q0, q1, k0, k1, lo, hi = bd.tighten(bands).T
    slope, offset = np.zeros((2, seq_len + 1), dtype=np.int64)

    def add(start: Ints, stop: Ints, slopes: int, offsets: Ints) -> None:
        for at, sign in ((start, 1), (stop, -1)):
            np.add.at(slope, at, sign * slopes)
            np.add.at(offset, at, sign * offsets)

    turn = np.clip(q1 - 1 - hi, k0, k1)
    add(k0, turn, 1, hi + 1)
    add(turn, k1, 0, q1)
    turn = np.clip(q0 - lo, k0, k1)
    add(k0, turn, 0, -q0)
    add(turn, k1, -1, -lo)
    return (np.cumsum(slope) * np.arange(seq_len + 1) + np.cumsum(offset))[:seq_len]
