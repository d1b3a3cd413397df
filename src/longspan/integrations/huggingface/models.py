"""Which of transformers' models may be spread over ranks, and which kinds of attention layers they have.

Attention is exact for any of them. What a model does beside attention decides: layers that mix tokens by other means,
positions that a rank counts from its own first token, losses that are no sum over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longspan.integrations.huggingface._transformers import masks_by_kind
from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.masks import LayerMask
from longspan.integrations.huggingface.mixers import check_mixers, is_hybrid
from longspan.integrations.huggingface.structure import check_structure, text_model
from longspan.integrations.huggingface.terms import Kind
from longspan.training import BatchError

HYBRIDS = frozenset({
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "granitemoehybrid", "bamba",
    "nemotron_h", "falcon_h1", "zamba2", "lfm2", "lfm2_moe",
})  # fmt: skip
"""Those among them with convolutions or recurrences beside attention."""
TRIED = HYBRIDS | {"llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "llama4_text"}
"""Model types whose loss and gradients over ranks were compared with one device."""
ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
ALONE = frozenset({"mlp", "moe"})
"""Kinds of layers in which every token is by itself."""


def check_model(model: Any, batch: Mapping[str, Any], any_model: bool) -> Any:
    """The model of transformers inside of `model`; what would go wrong over ranks is refused."""
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
    if config.model_type not in TRIED and not any_model:
        raise BatchError(
            f"{config.model_type!r} models have not been tried over ranks; {', '.join(sorted(TRIED))} have. If tokens"
            f" meet in its attention layers alone, pass any_model=True, and compare its loss with one device's."
        )
    _check_rope(text)
    _check_arguments(text, batch)
    if inner is None:
        raise BatchError(
            f"{type(model).__name__} was given without its model. What a model does beside attention is looked at, and"
            f" its layers are counted: pass the model itself."
        )
    _check_layers(inner, text)
    check_structure(inner, text, batch, config.model_type in TRIED, any_model)
    return inner


def _check_layers(model: Any, config: Any) -> None:
    """Refuses kinds of layers that are neither attention nor call a known function, and known ones that cannot be
    computed over ranks."""
    check_mixers(model)
    named = (getattr(config, name, None) or () for name in ("layer_types", "layers_block_type", "block_types"))
    other = {str(kind) for kinds in named for kind in kinds} - ATTENTION - ALONE
    if other and not is_hybrid(model):
        raise BatchError(
            f"the model has layers {', '.join(sorted(other))}, in which tokens meet by other means than attention, and"
            f" not by functions that Longspan knows. Over ranks they would see this rank's tokens alone:"
            f" longspan.training.relayout brings them together."
        )


def _check_rope(config: Any) -> None:
    """Frequencies that depend on the longest position would differ from rank to rank."""
    given = getattr(config, "rope_parameters", None) or {}
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    moving = {part.get("rope_type") for part in parts} & {"dynamic", "longrope"}
    if moving:
        raise BatchError(
            f"rotary embeddings of type {moving.pop()!r} depend on the largest position that a rank holds, so ranks"
            f" would rotate differently. Use a fixed type (default, linear, yarn, llama3)."
        )


def _check_arguments(config: Any, batch: Mapping[str, Any]) -> None:
    routed = batch.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if routed is None else routed:
        raise BatchError(
            "output_router_logits=True adds a loss that balances experts over all tokens, which is not a sum of the"
            " ranks' own. Set it to False; with TRL, which sets it again, router_aux_loss_coef=0.0."
        )
    for name in ("logits_to_keep", "num_logits_to_keep"):
        number = batch.get(name)
        if number is not None and (isinstance(number, torch.Tensor) or number != 0):
            raise BatchError(
                f"{name} = {number} was asked for over ranks, where each would keep the last tokens of its own part."
                f" Take it out of the batch, and put logits together with longspan.training.gather_outputs."
            )
    for name in ("use_cache", "output_attentions", "past_key_values"):
        if batch.get(name) is not None and batch[name] is not False:
            raise BatchError(
                f"{name} was asked for over ranks, where there is none: caches and attention weights would hold this"
                f" rank's tokens alone. Take it out of the batch, and generate on one device."
            )


def layer_kinds(config: Any) -> list[Kind]:
    """The kinds of attention layers of a model, as transformers makes masks for them."""
    from transformers.masking_utils import create_causal_mask

    masks = masks_by_kind(config)
    if not masks:  # there are layers of a kind that generate() knows no mask for, or none with attention
        masks = [create_causal_mask(config, torch.empty(1, 2, 0), None, None, None)]
    kinds = {mask.kind: None for mask in masks if isinstance(mask, LayerMask) and mask.kind is not None}
    if len(kinds) != len(masks):
        raise BatchError("transformers made masks for this model that are not Longspan's. Call register() first.")
    return sorted(kinds, key=repr)
