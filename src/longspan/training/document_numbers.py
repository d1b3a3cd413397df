"""Documents of packed sequences, as numbers per position: labels and positions must not run across their borders.

Shapes: R batch rows (1 where all rows are alike), S tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.masks import Mask
from longspan.masks.document_rows import Documents, document_rows
from longspan.span import Ints, whole
from longspan.training.groups import BatchError


def document_numbers(documents: Any, seq_len: int) -> Ints:
    """The document each position belongs to, as `document_rows` says; refusals are those of a batch.

    >>> document_numbers([2, 3], 5).tolist()
    [[0, 0, 1, 1, 1]]
    """
    return document_rows(documents, seq_len, BatchError)


def document_counts(documents: Any, numbers: Ints) -> list[int]:
    """How many documents each row of `numbers` has; those of length 0 count where lengths were given.

    >>> document_counts([2, 0, 3], document_numbers([2, 0, 3], 5)), document_counts(None, document_numbers(None, 5))
    ([3], [1])
    """
    if documents is None or isinstance(documents, Mask):
        return [int(row[-1]) + 1 if len(row) else 1 for row in numbers]
    nested = len(documents) and np.ndim(documents[0]) == 1
    return [len(lengths) for lengths in (documents if nested else [documents])]


def positions_within(numbers: Ints) -> Ints:
    """Positions that start again at 0 with every document.

    >>> positions_within(np.array([[0, 0, 1, 1, 1]])).tolist()
    [[0, 1, 0, 1, 2]]
    """
    place = np.broadcast_to(np.arange(numbers.shape[1], dtype=np.int64), numbers.shape)
    starts = np.ones(numbers.shape, dtype=bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)


def shift_tokens(x: Tensor, shift: int, *, documents: Documents = None, fill: float = 0) -> Tensor:
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
    check_holds(x, fill)
    moved = x.new_full(x.shape, fill)
    if reach >= seq_len:
        return moved
    same = torch.as_tensor(numbers[:, reach:] == numbers[:, : seq_len - reach], device=x.device)
    if x.ndim == 1:
        same = same[0]
    taken = x[..., shift : shift + seq_len - reach]
    moved[..., : seq_len - reach] = torch.where(same, taken, moved[..., : seq_len - reach])
    return moved


def check_holds(x: Tensor, mark: float) -> None:
    """Refuses a mark that the dtype cannot hold: -100 would be 156 in a uint8, and word 156 be predicted."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        return
    limits = torch.iinfo(x.dtype)
    if not (limits.min <= mark <= limits.max and mark == int(mark)):
        raise BatchError(
            f"places without a token are marked with {mark}, which {x.dtype} cannot hold: it has whole numbers from"
            f" {limits.min} to {limits.max}. Cast the tensor to torch.int64 first, or choose another mark."
        )


def check_rows(x: Tensor, numbers: Ints) -> None:
    """Refuses documents for another number of batch rows than `x` (..., B, S) has."""
    rows = 1 if x.ndim < 2 else x.shape[-2]
    if len(numbers) not in (1, rows):
        raise BatchError(
            f"documents are given for {len(numbers)} batch rows, but the tensor of shape {tuple(x.shape)} has {rows}."
            f" Give one list of lengths for all rows, or one per row."
        )
