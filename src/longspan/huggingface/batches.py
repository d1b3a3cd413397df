"""What a batch of transformers says: its size, padding, documents and positions, as values of whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.huggingface.masks import runs
from longspan.huggingface.structure import AFTER_PADDING, REAL
from longspan.training import BatchError, shift_tokens
from longspan.training.batch import numbers_of, restarts

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
LABELS = ("labels", "shift_labels")
USED = ("attention_mask", "position_ids", *LABELS, *PACKED, "max_length_q", "max_length_k")
BY_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Further arguments (batch, tokens) that are cut as tokens are."""
SEEN = ("pixel_values", "image_grid_thw")
"""What is known about images; videos are not tried."""
IGNORE = -100


@dataclass(frozen=True, eq=False)
class Reading:
    """A batch, and what was read out of it: on a GPU every look costs a copy to the host, so it is read once."""

    batch: Mapping[str, Any]
    rows: int
    seq_len: int
    padding: NDArray[np.bool_] | None
    documents: NDArray[Any] | None


def read_batch(batch: Mapping[str, Any]) -> Reading:
    """The batch's size, padding and documents."""
    rows, seq_len = _shape(batch)
    _check_images(batch)
    return Reading(batch, rows, seq_len, _padding(batch, rows, seq_len), _documents(batch, rows, seq_len))


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    tensors = [batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor) or tensors[0].ndim not in (2, 3):
        raise BatchError(
            "a batch has input_ids (batch, tokens) or inputs_embeds (batch, tokens, features), one of them. This one"
            f" has {', '.join(batch) or 'nothing'}."
        )
    return int(tensors[0].shape[0]), int(tensors[0].shape[1])


def _check_images(batch: Mapping[str, Any]) -> None:
    """Refuses what was never tried beside images."""
    given = [
        name for name in batch if batch[name] is not None and name.startswith(("pixel_", "image_", "video_", "audio"))
    ]
    unknown = [name for name in given if name not in SEEN] + [n for n in PACKED if given and batch.get(n) is not None]
    if unknown:
        raise BatchError(
            f"the batch has {', '.join(unknown)}, and over ranks images come as pixel_values, with image_grid_thw or"
            f" without, in batches that are not packed. Use one device for others."
        )


def check_others(read: Reading) -> None:
    """Refuses arguments that may be about tokens and have no meaning where a rank gets a part of the batch."""
    batch, seq_len = read.batch, read.seq_len
    if batch.get("loss_mask") is not None:
        raise BatchError(
            "the batch has a loss_mask, which transformers' losses do not know. Put -100 into labels where it is 0, and"
            " take it out: labels = labels.masked_fill(loss_mask == 0, -100)."
        )
    for name, value in batch.items():
        shape = tuple(getattr(value, "shape", ()))
        if name not in (*USED, *BY_TOKEN, "input_ids", "inputs_embeds") and seq_len in shape:
            raise BatchError(
                f"{name} of shape {shape} has a dim as long as the sequence, {seq_len}, but it is not known here how to"
                f" cut it. Take it out of the batch if the model computes the same without it (cache_position)."
                f" Otherwise cut it yourself: add inputs['longspan'].layout.shard(value, rank, dim) to the inputs that"
                f" shard_inputs returns."
            )


def _padding(batch: Mapping[str, Any], rows: int, seq_len: int) -> NDArray[np.bool_] | None:
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, seq_len):
        kind = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"attention_mask is {kind}, but over ranks it is (batch, tokens) = {(rows, seq_len)}, 1 for real tokens."
            f" Pass other masks, in global positions, to longspan.attention."
        )
    return mask.detach().cpu().numpy().astype(bool)


def is_between(real: NDArray[np.bool_] | None) -> bool:
    """Return whether any row has padding between real tokens.

    >>> [is_between(np.array([row], dtype=bool)) for row in ([1, 1], [0, 1, 0], [0, 0], [1, 0, 1], [0, 1, 0, 1])]
    [False, False, False, True, True]
    """
    if real is None:
        return False
    begins = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(axis=1)
    return int(begins.max(initial=0)) > 1


def _documents(batch: Mapping[str, Any], rows: int, seq_len: int) -> NDArray[Any] | None:
    """The document number of each token, (rows or 1, S), or None where every row is one document."""
    stated = numbers_of({name: batch.get(name) for name in PACKED}, rows, seq_len)
    from_positions = restarts(batch.get("position_ids"), rows, seq_len)
    mask = batch.get("attention_mask")
    if mask is not None:
        if stated is None and from_positions is not None:
            _check_padded(mask, from_positions)
        return stated
    if stated is not None and from_positions is not None and not _same_borders(stated, from_positions):
        raise BatchError(
            "position_ids restart elsewhere than where cu_seq_lens or seq_idx let documents begin. Give one of them, or"
            " make them agree."
        )
    return stated if stated is not None else from_positions


def _check_padded(mask: Tensor, numbers: NDArray[Any]) -> None:
    """With a mask of padding transformers looks for no documents: positions may jump at padding, and nowhere else."""
    real = mask.detach().cpu().numpy().astype(bool)
    borders = (np.diff(numbers, axis=1) != 0) & real[:, 1:] & real[:, :-1]
    if borders.any():
        row, place = (int(x[0]) for x in np.nonzero(borders))
        raise BatchError(
            f"documents begin at token {place + 1} of row {row}, and there is an attention_mask: transformers would"
            f" then let documents see each other. Take the attention_mask out of the batch; padding at the end is one"
            f" more document, whose position_ids start again."
        )


def _same_borders(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return all(np.array_equal(runs(x)[0], runs(y)[0]) for x, y in zip(*np.broadcast_arrays(a, b), strict=True))


def positions_of(read: Reading, positions: str | None, rule: str, padding_id: int | None) -> Tensor:
    """Global positions, (B, S): what the batch says, else as `positions` says, else as the model counts."""
    batch = read.batch
    rows, seq_len, documents = read.rows, read.seq_len, read.documents
    given = batch.get("position_ids")
    if given is not None and positions is not None:
        raise BatchError(f"positions = {positions!r} was asked for, but the batch has position_ids. Take one out.")
    if given is not None:
        if not isinstance(given, Tensor) or tuple(given.shape) not in ((1, seq_len), (rows, seq_len)):
            kind = f"have shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"are {type(given).__name__}"
            raise BatchError(
                f"position_ids {kind}, but whole sequences have a tensor (batch, tokens) = {(rows, seq_len)}. Give"
                f" whole tensors, not shards."
            )
        return given.expand(rows, -1)
    if positions not in (None, "sequence", "document") or (positions is None and documents is not None):
        raise BatchError(
            f"the batch has {'no documents' if documents is None else 'documents'} and no position_ids, and positions ="
            f" {positions!r}. Say 'document' if they start again with every document (as collators for packed batches"
            f" do), 'sequence' if they count on through all documents."
        )
    if positions is None and rule in (AFTER_PADDING, REAL):
        return counted_without_padding(read, rule, padding_id)
    counted = torch.arange(seq_len, device="cpu").expand(rows, -1)
    if positions == "document" and documents is not None:
        edges = [runs(row)[0] for row in documents]
        counted = counted - torch.from_numpy(np.stack([np.repeat(row[:-1], np.diff(row)) for row in edges]))
    return counted


def counted_without_padding(read: Reading, rule: str, padding_id: int | None) -> Tensor:
    """Positions of real tokens alone: from padding_id + 1 on where ids tell what is padding (RoBERTa), from 0 on where
    the mask does (OPT).

    >>> batch = {"input_ids": torch.tensor([[1, 7, 7, 1]]), "attention_mask": torch.tensor([[0, 1, 1, 0]])}
    >>> counted_without_padding(read_batch(batch), "after padding", 1).tolist()
    [[1, 2, 3, 1]]
    >>> counted_without_padding(read_batch(batch), "real tokens", None).tolist()
    [[-1, 0, 1, -1]]
    """
    if rule == AFTER_PADDING:
        ids, first = read.batch.get("input_ids"), 0 if padding_id is None else padding_id
        if ids is None:
            return torch.arange(first + 1, first + 1 + read.seq_len).expand(read.rows, -1)
        real = (ids != first).long()
        return real.cumsum(1) * real + first
    real = torch.ones(read.rows, read.seq_len, dtype=torch.long)
    if read.padding is not None:
        real = torch.from_numpy(read.padding).long()
    return real.cumsum(1) * real - 1


def shifted_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Labels one place earlier, as transformers' loss shifts them, documents or not; shift_labels take precedence over
    labels."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is None or shifted is not None:
        return shifted
    return shift_tokens(labels, 1, fill=IGNORE)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuses what a model would do with this rank's tokens alone, in a batch or beside it in a call of the model."""
    for name in ("logits_to_keep", "num_logits_to_keep"):
        number = given.get(name)
        if number is not None and (isinstance(number, torch.Tensor) or number != 0):
            raise BatchError(
                f"{name} = {number} was asked for over ranks, where each would keep the last tokens of its own part."
                f" Leave it out, and put logits together with longspan.training.gather_outputs."
            )
    for name in ("use_cache", "output_attentions", "past_key_values"):
        if given.get(name) is not None and given[name] is not False:
            raise BatchError(
                f"{name} was asked for over ranks, where there is none: caches and attention weights would hold this"
                f" rank's tokens alone. Leave it out, and generate on one device."
            )
