"""`attn_implementation="longspan"` for models of Hugging Face transformers, on one device and over ranks.

`register()` once; then models that go through transformers' attention interface take the name. On one device nothing
else changes: masks, windows, packing, soft caps, sinks, caches and `generate()` mean what they mean to "eager". Over
ranks, `shard_inputs` turns a whole batch into this rank's arguments of `model(...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from longspan import layouts
from longspan.integrations.huggingface.attention import BLIND, NAME, longspan_attention
from longspan.integrations.huggingface.masks import LayerMask, layer_mask
from longspan.integrations.huggingface.mixers import is_hybrid, needs, route
from longspan.integrations.huggingface.models import check_model, layer_kinds
from longspan.integrations.huggingface.seen import listen, listen_to_layers
from longspan.integrations.huggingface.sequence import ShardedSequence, Whole
from longspan.integrations.huggingface.structure import check_packing, num_layers
from longspan.integrations.huggingface.terms import Kind, runs
from longspan.layouts import Layout
from longspan.training import BatchError, shard_batch, shift_tokens
from longspan.training.groups import process_group
from longspan.training.loss import Reported
from longspan.training.packed_batch import numbers_of, restarts

__all__ = ["NAME", "LayerMask", "ShardedSequence", "full_loss", "register", "shard_inputs"]

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
USED = ("attention_mask", "position_ids", "labels", "shift_labels", *PACKED, "max_length_q", "max_length_k")
IGNORE = -100
STATE_KEYS = 2048
"""What a state that goes from span to span weighs, in keys and values: 6 MiB of a layer of Qwen3-Next against 2 KiB."""


def register() -> str:
    """The name under which transformers now knows Longspan's attention, "longspan". May be called again.

    >>> register()
    'longspan'
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    # Masks and plans are values, not tensors: compiled code stops before them and goes on after.
    AttentionInterface.register(NAME, torch.compiler.disable(longspan_attention))
    AttentionMaskInterface.register(NAME, torch.compiler.disable(layer_mask))
    return NAME


def shard_inputs(
    model: Any,
    batch: Mapping[str, Any],
    group: Any,
    *,
    layout: str | Layout = "balanced",
    positions: str | None = None,
    schedule: str = "auto",
    dropout_seed: int | None = None,
    any_model: bool = False,
) -> dict[str, Any]:
    """This rank's arguments: `model(**shard_inputs(model, batch, mesh["cp"]))`.

    Documents are found as transformers finds them: in `position_ids` that do not go on by one (without an
    `attention_mask`), in `cu_seq_lens_q`, or in `seq_idx`. `loss` of the model's output is this rank's share: shares
    add up to the loss, and gradients to gradients; `full_loss` says what the whole is.

    Args:
        model: the model, wrapped or not.
        batch: what the model would get on one device, the same on every rank.
        group: the ranks of the sequence: a process group or a mesh of one axis.
        layout: a `Layout`, or the name of one.
        positions: "sequence" or "document": how tokens are counted where documents come from `cu_seq_lens_q` or
            `seq_idx` and there are no `position_ids`.
        schedule: see `longspan.plan`.
        dropout_seed: decides which pairs attention dropout strikes.
        any_model: take a model that Longspan has not been tried with over ranks. A layer that mixes tokens by other
            means than attention, or counts positions itself, would go wrong unnoticed.

    Returns:
        Arguments for the model.

        - `input_ids` (or `inputs_embeds`) and `position_ids` of this rank's tokens;
        - `shift_labels`, shifted while the sequence was whole, and `num_items_in_batch`, all labels of the batch unless
          it is given (with gradient accumulation). `labels` is empty: transformers only asks whether it is there, and a
          loss that would shift labels of this rank alone fails on it;
        - `longspan`, a `ShardedSequence`; `use_cache=False`; and what else was in the batch and has nothing to do with
          tokens.
    """
    members = process_group(group, "shard_inputs")
    inner = check_model(model, batch, any_model)
    config = inner.config.get_text_config()
    rows, seq_len = _shape(batch)
    _check_others(batch, seq_len)
    padding, documents = _padding(batch, rows, seq_len), _documents(batch, rows, seq_len)
    kinds = layer_kinds(config)
    stated = any(batch.get(name) is not None for name in PACKED)
    if documents is not None and not stated and config.model_type not in BLIND and not is_hybrid(inner):
        check_packing(inner, all("causal" in repr(kind) for kind in kinds))
    whole = Whole(rows, seq_len, padding, documents)
    dealt = _layout(layout, whole, kinds, members.size(), STATE_KEYS if is_hybrid(inner) else 0)
    part = _part(batch, dealt, members.rank(), _positions(batch, rows, seq_len, documents, positions))
    part[NAME] = ShardedSequence(whole, dealt, members, schedule, dropout_seed)
    part[NAME].num_layers = num_layers(inner, config)
    if is_hybrid(inner):
        _prepare_hybrid(inner, part[NAME])
    listen(model, inner, inner.base_model)
    return part


def _prepare_hybrid(model: Any, sequence: ShardedSequence) -> None:
    """Convolutions and recurrences of the model go over ranks, and every layer is watched for it."""
    padding = sequence.whole.padding
    if padding is not None and (np.diff(padding.astype(np.int8), axis=1) != 0).sum(axis=1).max(initial=0) > 2:
        raise BatchError(
            "attention_mask has padding between real tokens. Recurrences of this model would carry their state across"
            " it. Move padding to the front or the end of each row."
        )
    route(model)
    sequence.needed = needs(model)
    listen_to_layers(model, sequence.needed)


def full_loss(loss: Tensor, inputs: Mapping[str, Any], *, gradients: str = "sum") -> Tensor:
    """The loss of whole sequences, the same on every rank, from this rank's share; backward is that of the share.

    `gradients` says what happens to parameters' gradients over the group afterwards, as in `training.token_loss`:
    "sum" if they are added up, "average" if they are averaged, as FSDP and DDP do (shares are then multiplied by the
    number of ranks).
    """
    sequence = inputs.get(NAME)
    if not isinstance(sequence, ShardedSequence) or gradients not in ("sum", "average"):
        raise BatchError(
            f"full_loss takes a loss, the dict of shard_inputs that it was computed from, and gradients='sum' or"
            f" 'average', but {type(sequence).__name__} was found under {NAME!r}, and gradients = {gradients!r}."
        )
    sequence.check_seen("the model")
    value = loss.detach().clone()
    dist.all_reduce(value, group=sequence.group)
    share = loss * sequence.group.size() if gradients == "average" else loss
    return Reported.apply(share, value)  # type: ignore[return-value]


# -- what a batch says -------------------------------------------------------------------------------------------------


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    tensors = [batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor) or tensors[0].ndim not in (2, 3):
        raise BatchError(
            "a batch has input_ids (batch, tokens) or inputs_embeds (batch, tokens, features), one of them. This one"
            f" has {', '.join(batch) or 'nothing'}."
        )
    return int(tensors[0].shape[0]), int(tensors[0].shape[1])


def _check_others(batch: Mapping[str, Any], seq_len: int) -> None:
    """Refuses arguments that may be about tokens and have no meaning here."""
    if batch.get("loss_mask") is not None:
        raise BatchError(
            "the batch has a loss_mask, which transformers' losses do not know. Put -100 into labels where it is 0, and"
            " take it out: labels = labels.masked_fill(loss_mask == 0, -100)."
        )
    for name, value in batch.items():
        shape = tuple(getattr(value, "shape", ()))
        if name not in (*USED, "input_ids", "inputs_embeds") and seq_len in shape:
            raise BatchError(
                f"{name} of shape {shape} has a dim as long as the sequence, {seq_len}, but it is not known here how to"
                f" cut it. Take it out of the batch if the model computes the same without it (token_type_ids of text,"
                f" cache_position). Otherwise cut it yourself: add inputs['longspan'].layout.shard(value, rank, dim) to"
                f" the inputs that shard_inputs returns."
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


def _positions(
    batch: Mapping[str, Any], rows: int, seq_len: int, documents: NDArray[Any] | None, positions: str | None
) -> Tensor:
    """Global positions, (B, S)."""
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
    counted = torch.arange(seq_len, device="cpu").expand(rows, -1)
    if positions == "document" and documents is not None:
        edges = [runs(row)[0] for row in documents]
        counted = counted - torch.from_numpy(np.stack([np.repeat(row[:-1], np.diff(row)) for row in edges]))
    return counted


def _layout(layout: Any, whole: Whole, kinds: list[Kind], world_size: int, span_keys: int) -> Layout:
    seq_len = whole.seq_len
    if layout == "balanced":
        masks = [whole.mask(kind).resized(seq_len) for kind in kinds]
        layout = layouts.balanced(*masks, world_size=world_size, seq_len=seq_len, span_keys=span_keys)
    elif layout in ("zigzag", "contiguous", "striped"):
        layout = getattr(layouts, layout)(seq_len, world_size)
    if not isinstance(layout, Layout):
        raise BatchError(
            f"layout = {layout!r} was asked for. Choose one of 'balanced', 'zigzag', 'contiguous', 'striped', or pass a"
            f" layout of longspan.layouts."
        )
    if (layout.seq_len, layout.world_size) != (seq_len, world_size):
        raise BatchError(
            f"{layout} is for {layout.seq_len} tokens on {layout.world_size} ranks, but the batch has {seq_len} tokens"
            f" and the group {world_size} ranks. Make a layout for these."
        )
    if int(layout.num_tokens.min()) == 0:
        raise BatchError(
            f"{layout} leaves rank {int(layout.num_tokens.argmin())} without tokens, and transformers' models cannot"
            f" run on none. Use fewer ranks for {seq_len} tokens, or layout='zigzag'."
        )
    return layout


def _part(batch: Mapping[str, Any], layout: Layout, rank: int, position_ids: Tensor) -> dict[str, Any]:
    """This rank's tokens, with labels that were shifted before."""
    whole = {name: value for name, value in batch.items() if name not in USED and value is not None}
    tokens = whole["input_ids"] if "input_ids" in whole else whole["inputs_embeds"]
    whole["position_ids"] = position_ids.to(tokens.device)
    labels = _shifted(batch)
    if labels is not None:
        whole["shift_labels"] = labels
    part = shard_batch(whole, layout, rank, dims={"inputs_embeds": 1} if "inputs_embeds" in whole else None)
    if labels is not None:
        part["labels"] = labels[:, :0]
        if part.get("num_items_in_batch") is None:
            part["num_items_in_batch"] = (labels != IGNORE).sum().clamp(min=1)
    part["use_cache"] = False
    return part


def _shifted(batch: Mapping[str, Any]) -> Tensor | None:
    """Labels one place earlier, as transformers' loss shifts them, documents or not; shift_labels take precedence over
    labels."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is None or shifted is not None:
        return shifted
    return shift_tokens(labels, 1, fill=IGNORE)
