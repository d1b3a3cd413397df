"""Read a batch of transformers: its size, padding, documents and positions, as values of whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.huggingface.masks import runs
from longspan.training import BatchError
from longspan.training.batch import numbers_of, restarts

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
LABELS = ("labels", "shift_labels")
USED = ("attention_mask", "position_ids", *LABELS, *PACKED, "max_length_q", "max_length_k")
BY_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Further arguments (batch, tokens), which are sharded as tokens are."""
IMAGE_INPUTS = ("pixel_values", "image_grid_thw")
"""Supported arguments of images; videos are not supported."""
_TOKENS = frozenset((*USED, *BY_TOKEN, "input_ids", "inputs_embeds"))
IGNORE = -100


class BatchInfo(NamedTuple):
    """A batch and the facts read from it. It is read once, since every look at a GPU tensor costs a copy."""

    batch: Mapping[str, Any]
    rows: int
    seq_len: int
    padding: NDArray[np.bool_] | None
    documents: NDArray[Any] | None
    """The document number of each token, (rows or 1, S), or None if every row is one document."""


def read_batch(batch: Mapping[str, Any]) -> BatchInfo:
    """Return the batch with its size, padding and documents."""
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    tokens, ndim = (embeds, 3) if ids is None else (ids, 2)
    if not isinstance(tokens, Tensor) or tokens.ndim != ndim or (ids is not None and embeds is not None):
        raise BatchError(
            "a batch has input_ids (batch, tokens) or inputs_embeds (batch, tokens, features), one of them, but got"
            f" {', '.join(batch) or 'nothing'}."
        )
    rows, seq_len = int(tokens.shape[0]), int(tokens.shape[1])
    images = unknown = ""
    for name, value in batch.items():
        if value is not None and name.startswith(("pixel_", "image_", "video_", "audio")):
            images = name
            unknown = unknown or (name if name not in IMAGE_INPUTS else "")
    if images:
        unknown = unknown or next((name for name in PACKED if batch.get(name) is not None), "")
    if unknown:
        raise BatchError(
            f"images must come as pixel_values, with image_grid_thw or without, in batches that are not packed, but got"
            f" {unknown} over ranks. Use one device."
        )
    real = None
    mask = batch.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, seq_len):
            kind = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise BatchError(
                f"attention_mask must be (batch, tokens) = {(rows, seq_len)} over ranks, 1 for real tokens, but got"
                f" {kind}. Pass other masks, in global positions, to longspan.attention."
            )
        real = mask.detach().cpu().numpy().astype(bool)
    return BatchInfo(batch, rows, seq_len, real, _documents(batch, rows, seq_len, real))


def _documents(
    batch: Mapping[str, Any], rows: int, seq_len: int, real: NDArray[np.bool_] | None
) -> NDArray[Any] | None:
    packed = from_positions = None
    if not batch.keys().isdisjoint(PACKED):
        packed = numbers_of({name: batch.get(name) for name in PACKED}, rows, seq_len)
    if batch.get("position_ids") is not None:
        from_positions = restarts(batch["position_ids"], rows, seq_len)
    if from_positions is None:
        return packed
    if real is not None:
        # With a mask of padding transformers finds no documents: positions may jump at padding, and nowhere else.
        borders = (np.diff(from_positions, axis=1) != 0) & real[:, 1:] & real[:, :-1]
        if packed is None and borders.any():
            row, place = (int(x[0]) for x in np.nonzero(borders))
            raise BatchError(
                f"documents begin at token {place + 1} of row {row}, and there is an attention_mask: transformers would"
                f" then let documents see each other. Take the attention_mask out of the batch; padding at the end is"
                f" one more document, whose position_ids start again."
            )
        return packed
    if packed is None:
        return from_positions
    for first, second in zip(*np.broadcast_arrays(packed, from_positions), strict=True):
        if not np.array_equal(runs(first)[0], runs(second)[0]):
            raise BatchError(
                "position_ids restart elsewhere than at the documents of cu_seq_lens or seq_idx. Give one of them, or"
                " make them agree."
            )
    return packed


def check_others(info: BatchInfo) -> None:
    """Raise for arguments that may have a dim of tokens and that cannot be sharded."""
    if info.batch.get("loss_mask") is not None:
        raise BatchError(
            "loss_mask is not supported: transformers' losses do not take it. Put -100 into labels where it is 0, and"
            " take it out of the batch: labels = labels.masked_fill(loss_mask == 0, -100)."
        )
    for name, value in info.batch.items():
        if name not in _TOKENS and info.seq_len in getattr(value, "shape", ()):
            raise BatchError(
                f"{name} of shape {tuple(value.shape)} has a dim as long as the sequence, {info.seq_len}, but it is not"
                f" known how to shard it. Take it out of the batch if the model computes the same without it"
                f" (cache_position). Otherwise shard it yourself: add inputs['longspan'].layout.shard(value, rank, dim)"
                f" to the inputs that shard_inputs returns."
            )


def is_between(real: NDArray[np.bool_] | None) -> bool:
    """Return whether any row has padding between real tokens.

    >>> [is_between(np.array([row], dtype=bool)) for row in ([1, 1], [0, 1, 0], [0, 0], [1, 0, 1], [0, 1, 0, 1])]
    [False, False, False, True, True]
    """
    if real is None:
        return False
    begins = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(axis=1)
    return int(begins.max(initial=0)) > 1


def positions_of(info: BatchInfo, positions: str | None, rule: str, padding_id: int | None) -> Tensor:
    """Return global positions, (B, S): those of the batch, else as `positions` says, else as the model counts."""
    batch, rows, seq_len, _, documents = info
    own = batch.get("position_ids")
    if own is not None and positions is not None:
        raise BatchError(f"positions must be None for a batch with position_ids, but got {positions!r}. Take one out.")
    if own is not None:
        if not isinstance(own, Tensor) or tuple(own.shape) not in ((1, seq_len), (rows, seq_len)):
            kind = f"shape {tuple(own.shape)}" if isinstance(own, Tensor) else type(own).__name__
            raise BatchError(
                f"position_ids must be a tensor (batch, tokens) = {(rows, seq_len)}, but got {kind}. Give whole"
                f" tensors, not shards."
            )
        return own.expand(rows, -1)
    if positions not in (None, "sequence", "document") or (positions is None and documents is not None):
        raise BatchError(
            f"positions must be 'document' or 'sequence' for a batch with"
            f" {'no documents' if documents is None else 'documents'} and no position_ids, but got {positions!r}. Say"
            f" 'document' if they start again with every document (as collators for packed batches do), 'sequence' if"
            f" they count on through all documents."
        )
    if positions is None and rule in ("after padding", "real tokens"):
        return count_without_padding(info, rule, padding_id)
    counted = torch.arange(seq_len, device="cpu").expand(rows, -1)
    if positions == "document" and documents is not None:
        edges = [runs(row)[0] for row in documents]
        counted = counted - torch.from_numpy(np.stack([np.repeat(row[:-1], np.diff(row)) for row in edges]))
    return counted


def count_without_padding(info: BatchInfo, rule: str, padding_id: int | None) -> Tensor:
    """Return positions of real tokens alone: from padding_id + 1 on if ids tell what is padding (RoBERTa), from 0 on
    if the mask does (OPT).

    >>> batch = {"input_ids": torch.tensor([[1, 7, 7, 1]]), "attention_mask": torch.tensor([[0, 1, 1, 0]])}
    >>> count_without_padding(read_batch(batch), "after padding", 1).tolist()
    [[1, 2, 3, 1]]
    >>> count_without_padding(read_batch(batch), "real tokens", None).tolist()
    [[-1, 0, 1, -1]]
    """
    if rule == "after padding":
        ids, first = info.batch.get("input_ids"), 0 if padding_id is None else padding_id
        if ids is None:
            return torch.arange(first + 1, first + 1 + info.seq_len).expand(info.rows, -1)
        real = (ids != first).long()
        return real.cumsum(1) * real + first
    real = torch.ones(info.rows, info.seq_len, dtype=torch.long)
    if info.padding is not None:
        real = torch.from_numpy(info.padding).long()
    return real.cumsum(1) * real - 1


def shifted_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Return labels one place earlier, as transformers' loss shifts them, across documents too; shift_labels take
    precedence over labels."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is None or shifted is not None:
        return shifted
    if not isinstance(labels, Tensor):
        raise BatchError(f"labels must be a tensor (batch, tokens), but got {type(labels).__name__}.")
    shifted = torch.full_like(labels, IGNORE)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments, of a batch or of a call of the model, that would apply to this rank's tokens alone."""
    for name in ("logits_to_keep", "num_logits_to_keep", "use_cache", "output_attentions", "past_key_values"):
        value = arguments.get(name)
        if value is None or value is False:
            continue
        if not name.endswith("logits_to_keep"):
            raise BatchError(
                f"{name} is not supported over ranks: caches and attention weights would hold this rank's tokens alone."
                f" Leave it out, and generate on one device."
            )
        if isinstance(value, Tensor) or value != 0:
            raise BatchError(
                f"{name} must be 0 over ranks, but got {value}: each rank would keep the last tokens of its own part."
                f" Leave it out, and gather logits with longspan.training.gather_outputs."
            )
