"""Shard a batch for a model of transformers: check the model, and build this rank's arguments."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from longspan import layouts
from longspan.huggingface.adapter import ModelAdapter, adapter_of
from longspan.huggingface.attention import BLIND, NAME
from longspan.huggingface.batches import (
    BY_TOKEN,
    IGNORE,
    PACKED,
    USED,
    BatchInfo,
    check_arguments,
    check_others,
    positions_of,
    shifted_labels,
)
from longspan.huggingface.head import HeadTask, OutputKind
from longspan.huggingface.masks import counts_inside_documents
from longspan.huggingface.mixers import uses_attention
from longspan.huggingface.rules import Rules
from longspan.huggingface.sequence import ShardedSequence, Whole
from longspan.huggingface.structure import check_structure, text_model
from longspan.layouts import Layout
from longspan.layouts.layout import to_device
from longspan.training import Batch, BatchError
from longspan.training.batch import BatchCut, restarts
from longspan.training.loss_without_logits import start_copy

STATE_KEYS = 2048
"""The weight of a state that goes from span to span, in keys and values: 6 MiB in Qwen3-Next against 2 KiB."""
WARN_BYTES = 2**30
"""The size from which a warning says that logits are computed: they and their loss take 12 bytes a number."""
MOST_GEOMETRIES = 4
"""Batch sizes whose layouts and plans a model keeps."""
_LOG = logging.getLogger("longspan")
_WARNED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def check_model(model: Any, batch: Mapping[str, Any]) -> Any:
    """Return the model of transformers inside of `model`; raise for what no model supports over ranks."""
    inner = text_model(model)
    config = getattr(model if inner is None else inner, "config", model)
    if not hasattr(config, "get_text_config"):
        raise BatchError(f"shard_inputs takes a model of transformers, but got {type(model).__name__}.")
    text = config.get_text_config()
    if text._attn_implementation != NAME:
        is_known = inner is not None and type(inner).__module__.startswith("transformers.models.")
        if inner is not None and is_known and not uses_attention(inner):
            adapter_of(inner).check_mixers()
            raise BatchError(
                f"{type(inner).__name__} cannot be used over ranks: its layers do not call transformers' attention"
                f" interface, so another attention would change nothing. Use one device."
            )
        raise BatchError(
            f"the model's attention must be {NAME!r}, but got {text._attn_implementation!r}, which ignores other ranks."
            f" Call model.set_attn_implementation({NAME!r}), or from_pretrained(...,"
            f" attn_implementation={NAME!r})."
        )
    check_arguments(batch)
    if inner is None:
        raise BatchError(
            f"shard_inputs takes the model itself, whose layers are checked and counted, but got {type(model).__name__}"
            f" without its model."
        )
    adapter_of(inner).check_mixers()
    check_structure(inner, text)
    return inner


@dataclass(frozen=True)
class Sharding:
    """The options of `shard_inputs`."""

    layout: Any = "balanced"
    positions: str | None = None
    scheme: str = "auto"
    dropout_seed: int | None = None
    output_kind: OutputKind = "loss"
    temperature: float = 1.0
    """Of log-probabilities."""


def build_arguments(
    inner: Any, info: BatchInfo, members: Any, rules: Rules, options: Sharding, wrapped: Any = None
) -> dict[str, Any]:
    """Return this rank's arguments of a model that runs by these rules."""
    batch, adapter = info.batch, adapter_of(inner)
    config = adapter.text_config
    if rules.body is None:
        check_others(info)
    kinds = adapter.layer_kinds(config)
    if info.documents is not None:
        _check_packing(inner, adapter, info, kinds, config)
    whole, layout, plans, local_positions = _geometry(adapter, info, kinds, members.size(), options)
    sequence = ShardedSequence(whole, layout, members, options.scheme, options.dropout_seed, rules, plans)
    sequence.num_layers, rank = adapter.num_layers, sequence.rank
    sequence.needed = adapter.mixers if adapter.is_hybrid else {}
    adapter.install_hooks(rules, wrapped)

    # Tokens, and arguments without a dim of tokens
    part: dict[str, Any] = Batch(cut=BatchCut(layout, rank)) if rules.body is None else {}
    if rules.body is None:
        for name, value in batch.items():
            if value is None or name in USED:
                continue
            is_token = name in ("input_ids", "inputs_embeds", *BY_TOKEN)
            part[name] = layout.shard(value, rank, 1) if is_token else value
        if rules.loss in ("shifted", "in place"):
            part.pop("num_items_in_batch", None)
    else:
        kept = ("labels", "num_items_in_batch") if rules.loss == "pooled" else ()
        dropped = {"labels", "shift_labels", "num_items_in_batch", *PACKED, "max_length_q", "max_length_k"} - {*kept}
        part.update({name: value for name, value in batch.items() if name not in dropped and value is not None})

    # Positions
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    position_ids = batch.get("position_ids")
    if rules.body is None:
        is_counted = position_ids is None and options.positions is None and rules.positions in ("count", "none")
        if is_counted and info.documents is None and not adapter.depends_on_largest:
            if tokens.device not in local_positions:
                counted = torch.arange(info.seq_len, device="cpu").expand(info.rows, -1)
                local_positions[tokens.device] = to_device(layout.shard(counted, rank, 1), tokens.device)
            position_ids = local_positions[tokens.device].clone()
        else:
            position_ids = _positions(adapter, info, rules, options, sequence)
            position_ids = to_device(layout.shard(position_ids, rank, 1), tokens.device)
    elif isinstance(position_ids, Tensor) and position_ids.ndim == 3:  # of images and video: sharded in the backbone
        sequence.largest = position_ids.max() if adapter.depends_on_largest else None
    else:
        counted = _positions(adapter, info, rules, options, sequence)
        if position_ids is None:
            sequence.position_ids = layout.shard(counted, rank, 1)
    part.pop("position_ids", None)
    if position_ids is not None and rules.positions != "none" and adapter.accepts("position_ids"):
        part["position_ids"] = position_ids if position_ids.device == tokens.device else position_ids.to(tokens.device)
    part.pop("use_cache", None)
    if adapter.accepts("use_cache"):
        part["use_cache"] = False

    # Labels
    labels = batch.get("labels") if rules.loss == "in place" else shifted_labels(batch)
    if labels is not None and rules.loss in ("own", "shifted", "in place"):
        if whole.padding is not None and (adapter.is_hybrid or not rules.exact_at_padding):
            _check_predicted(inner, labels, sequence)
        count = batch.get("num_items_in_batch")
        if count is not None and not adapter.accepts("num_items_in_batch"):
            raise BatchError(
                f"the batch must not have `num_items_in_batch`, but got {int(count)}: {type(inner).__name__}.forward"
                f" does not take it. Take it out of the batch, and scale the loss yourself."
            )
        if count is None or not rules.obeys_count:
            count = (labels != IGNORE).sum().clamp(min=1)
        count, mine = torch.as_tensor(count), layout.shard(labels, rank, 1, IGNORE)
        start_copy(mine)
        if options.output_kind != "logits":
            _prepare_head(adapter, config, sequence, mine, count, options)
        if options.output_kind == "scores":
            pass  # no loss
        elif rules.loss == "own":
            part.update(shift_labels=mine, labels=labels[:, :0], num_items_in_batch=count)
        else:
            sequence.labels, sequence.num_items = mine, count
    sequence.arguments = frozenset(part)
    part[NAME] = sequence
    return part


def _check_packing(inner: Any, adapter: ModelAdapter, info: BatchInfo, kinds: Any, config: Any) -> None:
    """Raise for documents in position_ids that the model would not separate on one device."""
    if any(info.batch.get(name) is not None for name in PACKED) or config.model_type in BLIND or adapter.is_hybrid:
        return
    if not all("causal" in repr(kind) for kind in kinds) or not adapter.shows_positions:
        raise BatchError(
            f"position_ids start again with every document, but {type(inner).__name__} does not pass them to"
            f" transformers' masks: on one device its documents see each other, and over ranks they would not. Pack"
            f" documents with cu_seq_lens_q or seq_idx, which work for all models, or give every document a row."
        )


def _geometry(
    adapter: ModelAdapter, info: BatchInfo, kinds: Any, world_size: int, options: Sharding
) -> tuple[Any, ...]:
    """Return the whole batch, its layout, and dicts for its plans and this rank's positions. All of them are kept for
    batches of this size if there are no documents and no padding."""
    padding = None if info.padding is None or info.padding.all() else info.padding
    key: Any = None
    if padding is None and info.documents is None and isinstance(options.layout, str | Layout):
        key = info.rows, info.seq_len, options.layout, world_size, options.scheme, tuple(kinds)
        if key in adapter.geometries:
            return adapter.geometries[key]
    seq_len = info.seq_len
    layout: Any = options.layout
    positions = None
    if padding is None and info.documents is not None and "chunk" in repr(kinds) and counts_inside_documents():
        counted = positions_of(info, options.positions, "", None)
        positions = None if restarts(counted, info.rows, seq_len) is None else counted.cpu().numpy()
    whole = Whole(info.rows, seq_len, padding, info.documents, positions)
    if layout == "balanced":
        masks = [whole.mask(kind).resized(seq_len) for kind in kinds]
        span_keys = STATE_KEYS if adapter.is_hybrid else 0
        layout = layouts.balanced(*masks, world_size=world_size, seq_len=seq_len, span_keys=span_keys)
    elif layout in ("zigzag", "contiguous", "striped"):
        layout = getattr(layouts, layout)(seq_len, world_size)
    if isinstance(options.layout, str) and isinstance(layout, Layout) and int(layout.num_tokens.min()) == 0:
        # Transformers' models cannot run on no tokens: every rank gets one, or a slot of padding.
        layout = layouts.contiguous(seq_len, world_size, equal_tokens=seq_len < world_size)
    if not isinstance(layout, Layout):
        raise BatchError(
            f"layout must be 'balanced', 'zigzag', 'contiguous', 'striped' or a layout of longspan.layouts, but got"
            f" {layout!r}."
        )
    if (layout.seq_len, layout.world_size) != (seq_len, world_size):
        raise BatchError(
            f"{layout} is for {layout.seq_len} tokens on {layout.world_size} ranks, but the batch has {seq_len} tokens"
            f" and the group {world_size} ranks. Make a layout for these."
        )
    if layout.local_len is None and int(layout.num_tokens.min()) == 0:
        raise BatchError(
            f"layout must give every rank a token or a slot of padding, but got {layout}, which gives rank"
            f" {int(layout.num_tokens.argmin())} none. Use layout='balanced', or a layout with equal_tokens=True."
        )
    geometry = whole, layout, {}, {}
    if key is not None:
        while len(adapter.geometries) >= MOST_GEOMETRIES:
            del adapter.geometries[next(iter(adapter.geometries))]
        adapter.geometries[key] = geometry
    return geometry


def _positions(adapter: ModelAdapter, info: BatchInfo, rules: Rules, options: Sharding, sequence: Any) -> Tensor:
    skipped = adapter.padding_id if rules.positions == "after padding" else None
    position_ids = positions_of(info, options.positions, rules.positions, skipped)
    if adapter.depends_on_largest:
        sequence.largest = position_ids.max()
    return position_ids


def _prepare_head(
    adapter: ModelAdapter, config: Any, sequence: ShardedSequence, labels: Tensor, count: Any, options: Sharding
) -> None:
    """Compute the loss, or log-probabilities, without logits if the model allows it."""
    reason = adapter.why_logits(sequence.rules)
    num_bytes = labels.numel() * int(getattr(config, "vocab_size", 0)) * 12
    if reason and num_bytes >= WARN_BYTES and adapter.model not in _WARNED:
        _WARNED[adapter.model] = True
        _LOG.warning(
            "logits of %s are computed whole, %d tokens x vocab_size=%d on this rank, because %s.",
            type(adapter.model).__name__, labels.numel(), config.vocab_size, reason,
        )  # fmt: skip
    if options.output_kind == "scores" or not reason:
        temperature = options.temperature if options.output_kind == "scores" else None
        sequence.model = weakref.ref(adapter.model)
        sequence.at_head = HeadTask(config, sequence.rules, labels, count, temperature)


def _check_predicted(inner: Any, labels: Tensor, sequence: ShardedSequence) -> None:
    """Raise for labels of predictions at padding, which differ between one device and ranks."""
    padding = sequence.whole.padding
    assert padding is not None
    wrong = (labels != IGNORE).cpu().numpy() & ~padding
    if wrong.any():
        row, place = (int(x[0]) for x in np.nonzero(wrong))
        later = "" if sequence.rules.loss == "in place" else ": the token after it is to be predicted from it"
        first = "" if sequence.rules.loss == "in place" else " and at the first real token after it"
        raise BatchError(
            f"token {place} of row {row} is padding, and it has a label{later}. What {type(inner).__name__} computes at"
            f" padding means nothing, and differs between one device and ranks. Put -100 into labels at padding{first}."
        )
