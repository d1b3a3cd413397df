"""Configurations of transformers to sizes: one short function for each kind of family, and a table of families.

The number of parameters is that of the model that transformers builds (a test builds all of them). A family that is not
in the table is refused: sizes are never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longspan.errors import PlanError
from longspan.sizing import hybrid_families, mlps
from longspan.sizing.config import ConfigReader
from longspan.sizing.mixers import AttentionTraits, LatentSizes, attention, latent_attention
from longspan.sizing.modules import Block, Heads, LayerSizes, ModelSizes, norm

PLAIN = AttentionTraits()
WINDOWS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """What families of attention and MLPs differ in."""

    style: str = "rms"
    """Of its norms."""
    num_norms: int = 2
    """In a layer."""
    tied: bool = False
    head_dim: int | None = None
    """Where a configuration has none; None: hidden size / heads."""
    kv_heads: bool = False
    """Whether a configuration may leave out how many key/value heads there are: as many as query heads."""
    attention: AttentionTraits = PLAIN
    bias: bool = False
    """Where attention_bias is not given."""
    biases: str = "all"
    """Which projections attention_bias is about: "all", or "none" where the family has no such key."""
    window: str = "none"
    """Which layers have a sliding window, where layer_types does not say."""
    mlp: Callable[[ConfigReader, int], Block] = mlps.dense


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes of the model that a `config.json` describes.

    >>> tiny = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    ...         "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100}
    >>> sizes_of(tiny).params, sizes_of(tiny).num_blocks
    (107328, {'full': 2, 'mlp': 2})
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise PlanError("the configuration names no model_type. Give a config.json as transformers writes it.")
    reader = ConfigReader(config)
    name = reader.model_type
    if isinstance(config.get("text_config"), Mapping):
        raise PlanError(
            f"the configuration is that of a {name:.60}, which has more than its language model. Only language models"
            f" are sized: save its text_config as a file of its own and give that."
        )
    if name in FAMILIES:
        return _transformer(reader, FAMILIES[name])
    if name in hybrid_families.FAMILIES:
        return hybrid_families.FAMILIES[name](reader)
    known = ", ".join(sorted((*FAMILIES, *hybrid_families.FAMILIES)))
    raise PlanError(f"a configuration of model_type {name!r:.60} was given. Sizes are known of: {known}.")


def heads_of(reader: ConfigReader, family: Family) -> Heads:
    """The heads of a family's attention, without a window."""
    q_heads = reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", default=q_heads if family.kv_heads else None)
    hidden = reader.size("hidden_size")
    head_dim = reader.size("head_dim", default=family.head_dim or max(hidden // q_heads, 1))
    return Heads(q_heads, kv_heads, head_dim, head_dim)


def windows_of(reader: ConfigReader, family: Family, num_layers: int) -> list[int | None]:
    """For each layer how many tokens before its own a token sees, or None; configurations count its own as well."""
    window = (
        reader.size("sliding_window") - 1 if family.window != "none" and reader.keys.get("sliding_window") else None
    )
    if window is None:
        return [None] * num_layers
    words = reader.words("layer_types", num_layers, WINDOWS)
    if words is not None:
        return [window if word == "sliding_attention" else None for word in words]
    if family.window in ("late", "asked"):
        first = reader.count("max_window_layers", default=28) if family.window == "late" else 0
        asked = reader.flag("use_sliding_window")
        return [window if asked and layer >= first else None for layer in range(num_layers)]
    if family.window == "all":
        return [window] * num_layers
    period = reader.size("sliding_window_pattern", "_sliding_window_pattern", default=int(family.window))
    return [window if (layer + 1) % period else None for layer in range(num_layers)]


def _transformer(reader: ConfigReader, family: Family) -> ModelSizes:
    """Layers of attention and an MLP or experts."""
    hidden, num_layers = reader.size("hidden_size"), reader.size("num_hidden_layers")
    bias = reader.flag("attention_bias", family.bias) if family.biases == "all" else False
    traits = replace(
        family.attention,
        qkv_bias=bias or (family.attention.qkv_bias and reader.flag("qkv_bias", True)),
        out_bias=bias,
    )
    norms = tuple(norm("norm", hidden, style=family.style) for _ in range(family.num_norms // 2))
    heads = None if reader.model_type == "deepseek_v3" else heads_of(reader, family)
    layers: list[LayerSizes] = []
    for layer, window in enumerate(windows_of(reader, family, num_layers)):
        if heads is None:
            mixer = latent_attention(hidden, _latent(reader), norms)
        else:
            mixer = attention(hidden, replace(heads, window=window), norms, traits)
        inner = family.mlp(reader, layer)
        layers.append(LayerSizes((mixer, replace(inner, modules=(*norms, *inner.modules)))))
    last = norm("last norm", hidden, style=family.style)
    return ModelSizes(
        reader.model_type, hidden, reader.size("vocab_size"), reader.flag("tie_word_embeddings", family.tied),
        tuple(layers), last,
    )  # fmt: skip


def _latent(reader: ConfigReader) -> LatentSizes:
    return LatentSizes(
        reader.size("num_attention_heads"),
        reader.size("qk_nope_head_dim"),
        reader.size("qk_rope_head_dim"),
        reader.size("v_head_dim"),
        reader.size("kv_lora_rank"),
        reader.optional_size("q_lora_rank"),
        reader.flag("attention_bias"),
    )


_QK = AttentionTraits(qk_norm="rms")
FAMILIES = {
    "llama": Family(kv_heads=True),
    "granite": Family(kv_heads=True),
    "smollm3": Family(tied=True),
    "mistral": Family(biases="none", window="all"),
    "phi3": Family(kv_heads=True, biases="none", window="all"),
    "qwen2": Family(attention=AttentionTraits(qkv_bias=True), biases="none", window="late"),
    "qwen3": Family(attention=_QK, head_dim=128, window="late"),
    "qwen2_moe": Family(
        attention=AttentionTraits(qkv_bias=True), biases="none", window="late", mlp=mlps.qwen_experts
    ),
    "qwen3_moe": Family(attention=_QK, window="asked", mlp=mlps.qwen_experts),
    "mixtral": Family(biases="none", window="all", mlp=mlps.all_experts),
    "gemma2": Family(style="wide", num_norms=4, tied=True, head_dim=256, window="2"),
    "gemma3_text": Family(
        style="wide", num_norms=4, tied=True, head_dim=256, window="6", attention=AttentionTraits(qk_norm="wide")
    ),
    "gpt_oss": Family(
        style="wide", head_dim=64, bias=True, window="2", attention=AttentionTraits(sinks=True),
        mlp=mlps.gpt_oss_experts,
    ),
    "olmo": Family(style="plain", kv_heads=True),
    "olmo2": Family(style="wide", kv_heads=True, attention=AttentionTraits(qk_norm="wide", whole_qk_norm=True)),
    "olmo3": Family(
        style="wide", kv_heads=True, window="4", attention=AttentionTraits(qk_norm="wide", whole_qk_norm=True)
    ),
    "deepseek_v3": Family(mlp=mlps.deepseek_experts),
}  # fmt: skip
"""Families of attention layers, by model_type."""
