"""Documents of packed sequences, as numbers per position: labels and positions must not run across their borders.

Shapes: R batch rows (1 where all rows are alike), S tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.masks import Mask
from longspan.masks.document_masks import document_edges
from longspan.span import Ints, shortened, whole
from longspan.training.groups import BatchError


def document_numbers(documents: Any, seq_len: int) -> Ints:
    """The document each position belongs to, (R, S), counted from 0.

    `documents` is None (one document), lengths, a list of lengths per batch row, or a mask. In a mask, neighbours that
    may attend to each other, in any head, belong together: right for documents under any window or prefix, while the
    chunks of chunked attention would count as documents (give lengths there).

    >>> document_numbers([2, 3], 5).tolist()
    [[0, 0, 1, 1, 1]]
    >>> document_numbers(masks.documents([2, 3]) & masks.causal(), 5).tolist()
    [[0, 0, 1, 1, 1]]
    """
    if documents is None:
        return np.zeros((1, seq_len), dtype=np.int64)
    if isinstance(documents, Mask):
        return _of_mask(documents, seq_len)
    if isinstance(documents, Tensor):
        documents = documents.tolist()
    if isinstance(documents, str | bytes) or not hasattr(documents, "__len__"):
        raise BatchError(
            f"documents = {shortened(documents)} was given. It is a list of lengths, a list of lengths per batch row,"
            f" or a mask."
        )
    nested = len(documents) and np.ndim(documents[0]) == 1
    return np.stack([_of_lengths(lengths, seq_len) for lengths in (documents if nested else [documents])])


def _of_lengths(lengths: Any, seq_len: int) -> Ints:
    edges = document_edges(np.asarray(lengths, dtype=None if len(lengths) else np.int64))
    if int(edges[-1]) != seq_len:
        raise BatchError(
            f"document lengths add up to {int(edges[-1])}, but the sequence has {seq_len} tokens. Lengths cover all of"
            f" it: count padding at the end as one more document, and keep it out of the loss with loss_mask."
        )
    return np.repeat(np.arange(len(edges) - 1, dtype=np.int64), np.diff(edges))


def _of_mask(mask: Mask, seq_len: int) -> Ints:
    if not mask.is_structured:
        raise BatchError(
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


def positions_within(numbers: Ints) -> Ints:
    """Positions that start again at 0 with every document.

    >>> positions_within(np.array([[0, 0, 1, 1, 1]])).tolist()
    [[0, 1, 0, 1, 2]]
    """
    place = np.broadcast_to(np.arange(numbers.shape[1], dtype=np.int64), numbers.shape)
    starts = np.ones(numbers.shape, dtype=bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)


def shift_tokens(x: Tensor, shift: int, *, documents: Any = None, fill: float = 0) -> Tensor:
    """The whole tensor, tokens last, with the token `shift` positions later in each place; `fill` where that is past
    the end of the sequence or in another document.

    >>> shift_tokens(torch.arange(5), 1, documents=[2, 3], fill=-1).tolist()
    [1, -1, 3, 4, -1]
    """
    if not isinstance(x, Tensor) or not x.ndim:
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise BatchError(f"shift_tokens takes a tensor whose last dim is tokens, but {given} was given.")
    return shifted(x, shift, document_numbers(documents, x.shape[-1]), fill)


def shifted(x: Tensor, shift: int, numbers: Ints, fill: float, reach: int | None = None) -> Tensor:
    """As `shift_tokens`; places whose document ends within `reach` tokens are filled (`shift` unless given)."""
    seq_len = x.shape[-1]
    reach = shift if reach is None else reach
    shift = whole(shift, "shift", "shift_tokens()", BatchError)
    check_rows(x, numbers)
    moved = x.new_full(x.shape, fill)
    if reach >= seq_len:
        return moved
    same = torch.as_tensor(numbers[:, reach:] == numbers[:, : seq_len - reach], device=x.device)
    if x.ndim == 1:
        same = same[0]
    taken = x[..., shift : shift + seq_len - reach]
    moved[..., : seq_len - reach] = torch.where(same, taken, moved[..., : seq_len - reach])
    return moved


def check_rows(x: Tensor, numbers: Ints) -> None:
    """Refuses documents for another number of batch rows than `x` (..., B, S) has."""
    rows = 1 if x.ndim < 2 else x.shape[-2]
    if len(numbers) not in (1, rows):
        raise BatchError(
            f"documents are given for {len(numbers)} batch rows, but the tensor of shape {tuple(x.shape)} has {rows}."
            f" Give one list of lengths for all rows, or one per row."
        )
