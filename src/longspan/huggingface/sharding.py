"""Turn a whole batch into one rank's arguments of `model(...)`, by the rules that the check of the model found."""

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
from longspan.huggingface.attention import BLIND, NAME, longspan_attention
from longspan.huggingface.batches import (
    BY_TOKEN,
    IGNORE,
    PACKED,
    USED,
    Reading,
    check_arguments,
    check_others,
    is_between,
    positions_of,
    shifted_labels,
)
from longspan.huggingface.head import LOGITS, LOSS, SCORES, at_head, watch_head, why_logits
from longspan.huggingface.hooks import listen, listen_to_layers, route_losses, shield, takes, watch_body, watch_rotary
from longspan.huggingface.masks import Kind, LayerMask, layer_mask
from longspan.huggingface.mixers import check_mixers, is_hybrid, needs, route
from longspan.huggingface.sequence import ShardedSequence, Whole
from longspan.huggingface.structure import (
    AFTER_PADDING,
    IN_PLACE,
    NO_POSITIONS,
    OWN,
    POOLED,
    SHIFTED,
    Rules,
    check_packing,
    check_structure,
    masks_by_kind,
    num_layers,
    padding_id,
    text_model,
)
from longspan.layouts import Layout
from longspan.layouts.layout import to_device
from longspan.training import BatchError, shard_batch
from longspan.training.head import start_copy

# Which of transformers' models may be spread over ranks, and which kinds of attention layers they have.
# Attention is exact for any of them. What a model does beside attention decides: layers that mix tokens by other means,
# positions that a rank counts from its own first token, losses that are no sum over tokens.


def check_model(model: Any, batch: Mapping[str, Any]) -> Any:
    """The model of transformers inside of `model`; what cannot be had over ranks whatever the model is refused."""
    inner = text_model(model)
    config = getattr(model if inner is None else inner, "config", model)
    if not hasattr(config, "get_text_config"):
        raise BatchError(f"shard_inputs takes a model of transformers, but {type(model).__name__} was given.")
    text = config.get_text_config()
    implementation = text._attn_implementation
    if implementation != NAME:
        raise BatchError(
            f"the model's attention is {implementation!r}, which knows nothing of other ranks. Call register(), and"
            f" model.set_attn_implementation({NAME!r}) or from_pretrained(..., attn_implementation={NAME!r})."
        )
    check_arguments(batch)
    if inner is None:
        raise BatchError(
            f"{type(model).__name__} was given without its model. What a model does beside attention is looked at, and"
            f" its layers are counted: pass the model itself."
        )
    check_mixers(inner)
    check_structure(inner, text)
    return inner


def layer_kinds(config: Any) -> list[Kind]:
    """The kinds of attention layers of a model, as transformers makes masks for them; full attention where it makes
    none that can be told before there are tokens."""
    from transformers.masking_utils import create_causal_mask

    try:
        masks = masks_by_kind(config)
        if not masks:  # there are layers of a kind that generate() knows no mask for, or none with attention
            masks = [create_causal_mask(config, torch.empty(1, 2, 0), None, None, None)]
    except Exception:  # transformers asks for what this model has not, or has for single layers
        return [("full",)]
    ours = [mask for mask in masks if isinstance(mask, LayerMask)]
    if len(ours) != len(masks):
        raise BatchError("transformers made masks for this model that are not Longspan's. Call register() first.")
    return sorted({mask.kind or ("full",) for mask in ours}, key=repr)


# -- Sharding ----------------------------------------------------------------------------------------------------------


STATE_KEYS = 2048
"""What a state that goes from span to span weighs, in keys and values: 6 MiB of a layer of Qwen3-Next against 2 KiB."""

SAID_BYTES = 2**30
"""From here on it is said that logits are computed: they and what a loss makes of them take 12 bytes a number."""
_LOG = logging.getLogger("longspan")
_TOLD: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_HOOKED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


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


@dataclass(frozen=True)
class Sharding:
    """What `shard_inputs` was asked for beside model and batch."""

    layout: Any = "balanced"
    positions: str | None = None
    scheme: str = "auto"
    dropout_seed: int | None = None
    wants: str = LOSS
    """Whether the loss is enough, or logits are wanted, or log-probabilities."""
    temperature: float = 1.0
    """Of log-probabilities."""


def sharded(
    inner: Any, read: Reading, members: Any, rules: Rules, asked: Sharding, wrapped: Any = None
) -> dict[str, Any]:
    """This rank's arguments of a model that is treated by these rules."""
    config = inner.config.get_text_config()
    if rules.body is None:
        check_others(read)
    kinds = layer_kinds(config)
    _check_packed(inner, read, kinds)
    whole = Whole(read.rows, read.seq_len, read.padding, read.documents)
    dealt = _layout(asked.layout, whole, kinds, members.size(), STATE_KEYS if is_hybrid(inner) else 0)
    sequence = ShardedSequence(whole, dealt, members, asked.scheme, asked.dropout_seed, rules)
    sequence.num_layers = num_layers(inner, config)
    part = _arguments(inner, read.batch, sequence, _positions(inner, read, rules, asked), asked)
    part[NAME], sequence.arguments = sequence, frozenset(part)
    _prepare(inner, sequence)
    listen(wrapped, inner, inner.base_model)
    return part


def _positions(inner: Any, read: Reading, rules: Rules, asked: Sharding) -> Tensor | None:
    given = read.batch.get("position_ids")
    if rules.body is not None and isinstance(given, Tensor) and given.ndim == 3:
        return given  # of images and video: the body's door cuts them
    skipped = padding_id(inner) if rules.positions == AFTER_PADDING else None
    return positions_of(read, asked.positions, rules.positions, skipped)


def _check_packed(inner: Any, read: Reading, kinds: list[Kind]) -> None:
    stated = any(read.batch.get(name) is not None for name in PACKED)
    model_type = inner.config.get_text_config().model_type
    if read.documents is not None and not stated and model_type not in BLIND and not is_hybrid(inner):
        check_packing(inner, all("causal" in repr(kind) for kind in kinds))


def check_padding(inner: Any, read: Reading) -> None:
    """Refuses padding that a recurrence would carry its state across."""
    if is_between(read.padding) and is_hybrid(inner):
        raise BatchError(
            "attention_mask has padding between real tokens. Recurrences of this model would carry their state across"
            " it. Move padding to the front or the end of each row."
        )


def _hooked(inner: Any) -> bool:
    """Whether rotary embeddings of the model depend on the largest position. Hooks that depend on the model alone are
    put in place here, once: a walk through all modules takes milliseconds, and this is asked in every step."""
    if inner not in _HOOKED:
        route_losses(inner)
        shield(inner)
        _HOOKED[inner] = watch_rotary(inner)
    return _HOOKED[inner]


def _prepare(inner: Any, sequence: ShardedSequence) -> None:
    """What the model calls beside attention goes over ranks too, and every layer of a hybrid is watched for it."""
    if sequence.rules.body is not None:
        watch_body(inner, sequence.rules.body, sequence.rules.joined)
    if not is_hybrid(inner):
        return
    route(inner)
    sequence.needed = needs(inner)
    listen_to_layers(inner, sequence.needed)


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


def _arguments(
    inner: Any, batch: Mapping[str, Any], sequence: ShardedSequence, position_ids: Tensor | None, asked: Sharding
) -> dict[str, Any]:
    """What the model is called with: this rank's tokens, or all of them where it is cut inside; labels shifted before
    anything is cut."""
    rules, layout, rank = sequence.rules, sequence.layout, sequence.rank
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    if _hooked(inner) and position_ids is not None:
        sequence.largest = position_ids.max()
    part = (
        _whole_tokens(batch, sequence, position_ids)
        if rules.body is not None
        else _own_tokens(batch, sequence, position_ids)
    )
    labels = batch.get("labels") if rules.loss == IN_PLACE else shifted_labels(batch)
    if labels is not None and rules.loss in (OWN, SHIFTED, IN_PLACE):
        _check_predicted(inner, labels, sequence)
        count = _count_of(inner, batch, labels, rules)
        mine = layout.shard(labels, rank, 1, IGNORE)
        start_copy(mine)
        _prepare_head(inner, sequence, mine, count, asked)
        if asked.wants == SCORES:
            pass  # no loss
        elif rules.loss == OWN:
            part.update(shift_labels=mine, labels=labels[:, :0], num_items_in_batch=count)
        else:
            sequence.labels, sequence.num_items = mine, count
    for name, value in (("position_ids", part.get("position_ids")), ("use_cache", False)):
        if (
            value is not None
            and takes(type(inner), name)
            and (name != "position_ids" or rules.positions != NO_POSITIONS)
        ):
            part[name] = to_device(value, tokens.device) if isinstance(value, Tensor) else value
        else:
            part.pop(name, None)
    return part


def _count_of(inner: Any, batch: Mapping[str, Any], labels: Tensor, rules: Rules) -> Tensor:
    """Return what the sum of the loss over tokens is divided by on one device."""
    count = batch.get("num_items_in_batch")
    if count is not None and not takes(type(inner), "num_items_in_batch"):
        raise BatchError(
            f"the batch must not have `num_items_in_batch`, but got {int(count)}: {type(inner).__name__}.forward does"
            f" not take it. Take it out of the batch, and scale the loss yourself."
        )
    if count is None or not rules.obeys_count:
        return (labels != IGNORE).sum().clamp(min=1)
    return torch.as_tensor(count)


def _prepare_head(inner: Any, sequence: ShardedSequence, labels: Tensor, count: Any, asked: Sharding) -> None:
    """Logits are not computed where the loss, or log-probabilities, can be had without them."""
    if asked.wants == LOGITS:
        return
    config, rules = inner.config.get_text_config(), sequence.rules
    needed = why_logits(inner, rules)
    if not needed:
        watch_head(inner, rules)
    elif inner not in _TOLD and labels.numel() * int(getattr(config, "vocab_size", 0)) * 12 >= SAID_BYTES:
        _TOLD[inner] = True
        _LOG.warning(
            "logits of %s are computed whole, %d tokens x %d words on this rank, because %s.",
            type(inner).__name__, labels.numel(), config.vocab_size, needed,
        )  # fmt: skip
    if asked.wants == SCORES or not needed:
        temperature = asked.temperature if asked.wants == SCORES else None
        sequence.model = weakref.ref(inner)
        sequence.at_head = at_head(config, rules, labels, count, temperature)


def _check_predicted(inner: Any, labels: Tensor, sequence: ShardedSequence) -> None:
    """Refuses labels of what a model computes at padding, where that differs between one device and ranks."""
    padding = sequence.whole.padding
    if padding is None or (sequence.rules.exact_at_padding and not is_hybrid(inner)):
        return
    wrong = (labels != IGNORE).cpu().numpy() & ~padding
    if wrong.any():
        row, place = (int(x[0]) for x in np.nonzero(wrong))
        later = "" if sequence.rules.loss == IN_PLACE else ": the token after it is to be predicted from it"
        first = "" if sequence.rules.loss == IN_PLACE else " and at the first real token after it"
        raise BatchError(
            f"token {place} of row {row} is padding, and it has a label{later}. What {type(inner).__name__} computes at"
            f" padding means nothing, and differs between one device and ranks. Put -100 into labels at padding{first}."
        )


def _own_tokens(batch: Mapping[str, Any], sequence: ShardedSequence, position_ids: Tensor | None) -> dict[str, Any]:
    whole = {name: value for name, value in batch.items() if name not in USED and value is not None}
    whole["position_ids"] = position_ids
    dims = {name: 1 for name in whole if name in ("inputs_embeds", *BY_TOKEN)}
    if sequence.rules.loss in (SHIFTED, IN_PLACE):
        whole.pop("num_items_in_batch", None)
    return shard_batch(whole, sequence.layout, sequence.rank, dims=dims or None)


def _whole_tokens(batch: Mapping[str, Any], sequence: ShardedSequence, position_ids: Tensor | None) -> dict[str, Any]:
    kept = ("labels", "num_items_in_batch") if sequence.rules.loss == POOLED else ()
    dropped = {"labels", "shift_labels", "num_items_in_batch", *PACKED, "max_length_q", "max_length_k"} - set(kept)
    part = {name: value for name, value in batch.items() if name not in dropped and value is not None}
    if position_ids is not None and batch.get("position_ids") is None:
        sequence.position_ids = sequence.layout.shard(position_ids, sequence.rank, 1)
    return part
