"""Documents as packed batches tell them: positions that start again, cumulative lengths, or a number for each token.

Shapes: B batch rows, S tokens; numbers have as many rows as what they were told by, B or 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longspan.errors import MaskError


def restarts(position_ids: Any, batch: int, length: int) -> NDArray[Any] | None:
    """Document numbers (rows, S) from positions that do not go on by one; None for one document.

    >>> import torch
    >>> restarts(torch.tensor([[0, 1, 0, 1, 2]]), 1, 5)
    array([[0, 0, 1, 1, 1]])
    """
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2 or position_ids.shape[1] != length:
        return None
    if position_ids.shape[0] not in (1, batch) or not length:
        return None
    places = position_ids.detach().cpu().numpy()
    numbers = np.zeros(places.shape, dtype=np.int64)
    numbers[:, 1:] = np.cumsum(places[:, 1:] - places[:, :-1] != 1, axis=1)
    return numbers if numbers[:, -1].any() else None


def numbers_of(documents: dict[str, Any], batch: int, length: int) -> NDArray[Any] | None:
    """Document numbers (rows, S) from what flash attention and recurrent layers are told: cumulative lengths, or
    numbers.

    >>> import torch
    >>> numbers_of({"cu_seq_lens_q": torch.tensor([0, 1, 3])}, 1, 3)
    array([[0, 1, 1]])
    """
    given = [documents.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    edges = {_edges(x) for x in given if x is not None}
    if len(edges) > 1:
        raise MaskError("cu_seq_lens_q and cu_seq_lens_k differ, but queries and keys are the same tokens.")
    if not edges:
        return _numbered(documents.get("seq_idx"), batch, length)
    borders = np.asarray(edges.pop())
    if borders[0] != 0 or borders[-1] != length:
        raise MaskError(
            f"cu_seq_lens run from {borders[0]} to {borders[-1]}, but the sequence has {length} tokens in one row."
            f" Packed batches have one row, and cumulative lengths from 0 to its end."
        )
    if batch != 1:
        raise MaskError(
            f"cu_seq_lens came with {batch} rows of {length} tokens, but they are about one row. Pack all documents"
            f" into one row, or give seq_idx (batch, tokens), a number for each token's document."
        )
    return np.repeat(np.arange(len(borders) - 1), np.diff(borders))[None]


def _edges(given: Any) -> tuple[int, ...]:
    """Cumulative lengths as numbers."""
    whole = isinstance(given, Tensor) and not given.is_floating_point() and given.ndim == 1
    edges = tuple(given.tolist()) if whole else ()
    if len(edges) < 2 or list(edges) != sorted(edges):
        kind = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise MaskError(
            f"cu_seq_lens must be a tensor of whole numbers that do not fall, 0 and where each document ends, but"
            f" {kind} was given. Give torch.tensor([0, 10, 25]) for documents of 10 and 15 tokens."
        )
    return edges


def _numbered(index: Any, batch: int, length: int) -> NDArray[Any] | None:
    if index is None:
        return None
    if not isinstance(index, Tensor) or tuple(index.shape) not in ((length,), (1, length), (batch, length)):
        kind = f"a tensor of shape {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise MaskError(
            f"seq_idx is {kind}, but must be a tensor (batch, tokens) = {(batch, length)} or (1, {length}), with the"
            f" number of each token's document."
        )
    return index.detach().cpu().numpy().reshape(-1, length)
