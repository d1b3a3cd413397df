"""Documents of packed sequences, as numbers per position, from lengths or read from a mask.

Shapes: R batch rows (1 where all rows are alike), S tokens.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import LongspanError, MaskError
from longspan.masks.document_masks import document_edges
from longspan.masks.mask import Mask
from longspan.span import Ints, shortened

Documents: TypeAlias = Mask | ArrayLike | None
"""Documents as users give them: lengths, a list of lengths per batch row, a mask; None is one document."""


def document_rows(documents: Any, seq_len: int, error: type[LongspanError] = MaskError) -> Ints:
    """The document each position belongs to, (R, S), counted from 0.

    `documents` is None (one document), lengths, a list of lengths per batch row, or a mask. In a mask, neighbours that
    may attend to each other, in any head, belong together: right for documents under any window or prefix, while the
    chunks of chunked attention would count as documents (give lengths there). Refusals are of the kind `error`.

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
    if hasattr(documents, "tolist"):  # an array or a tensor, on whatever device
        documents = documents.tolist()
    if isinstance(documents, str | bytes) or not hasattr(documents, "__len__"):
        raise error(
            f"documents = {shortened(documents)} was given. It is a list of lengths, a list of lengths per batch row,"
            f" or a mask."
        )
    nested = len(documents) and np.ndim(documents[0]) == 1
    return np.stack([_of_lengths(lengths, seq_len, error) for lengths in (documents if nested else [documents])])


def _of_lengths(lengths: Any, seq_len: int, error: type[LongspanError]) -> Ints:
    edges = document_edges(np.asarray(lengths, dtype=None if len(lengths) else np.int64))
    if int(edges[-1]) != seq_len:
        raise error(
            f"document lengths add up to {int(edges[-1])}, but the sequence has {seq_len} tokens. Lengths cover all of"
            f" it: count padding at the end as one more document, which in training is kept out of the loss with"
            f" loss_mask."
        )
    return np.repeat(np.arange(len(edges) - 1, dtype=np.int64), np.diff(edges))


def _of_mask(mask: Mask, seq_len: int, error: type[LongspanError]) -> Ints:
    if not mask.is_structured:
        raise error(
            f"documents cannot be read from {mask}, because a function decides there who sees whom. Give the lengths of"
            f" the documents instead."
        )
    whole = mask.resized(seq_len)
    rows: list[Ints] = []
    for row in range(mask.num_rows):
        links = np.zeros(seq_len + 1, dtype=np.int64)
        for head in range(mask.num_heads):
            _add_links(links, whole.plane(row, head).region, seq_len)
        rows.append(np.cumsum(np.cumsum(links)[:seq_len] == 0) - 1)
    return np.stack(rows)


def _add_links(links: Ints, bands: Ints, seq_len: int) -> None:
    """Counts, as differences, for every x the bands that let x see x - 1 or be seen by it."""
    q_start, q_stop, kv_start, kv_stop, low, high = bands.T
    for distance in (1, -1):
        kept = (low <= distance) & (distance <= high)
        later = max(0, -distance)  # the pair (q, q + 1) links q + 1 to its predecessor
        first = np.maximum(q_start, kv_start + distance)[kept] + later
        last = np.minimum(q_stop, kv_stop + distance)[kept] + later
        first, last = np.clip(first, 1, seq_len), np.clip(last, 1, seq_len)
        real = first < last
        np.add.at(links, first[real], 1)
        np.add.at(links, last[real], -1)
