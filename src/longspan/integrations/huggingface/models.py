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
from longspan.integrations.huggingface.batches import check_arguments
from longspan.integrations.huggingface.hooks.mixers import check_mixers
from longspan.integrations.huggingface.masks import LayerMask
from longspan.integrations.huggingface.structure import check_structure, text_model
from longspan.integrations.huggingface.terms import Kind
from longspan.training import BatchError


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
