"""Model sizes from configurations of transformers: one short function per kind of family, and a table of families.

The number of parameters is that of the model that transformers builds (a test builds all of them). A family that is not
in the table is refused: sizes are never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longspan.errors import PlanError
from longspan.sizing import modules
from longspan.sizing.config import ConfigReader
from longspan.sizing.modules import (
    AttentionTraits,
    Block,
    Heads,
    LayerSizes,
    MambaSizes,
    ModelSizes,
    ModuleSizes,
    attention,
    dense,
    experts,
    gated_delta,
    gated_mlp,
    latent_attention,
    mamba2,
    norm,
    plain_mlp,
    qwen_experts,
    short_convolution,
)

# -- Hybrids: attention with recurrences and convolutions --------------------------------------------------------------


MIXING = ("full_attention", "linear_attention")


def _heads(reader: ConfigReader, head_dim: int | None = None, kv_heads: int | None = None) -> Heads:
    """Return the heads of an attention without a window; the arguments are defaults for keys that are missing."""
    q_heads, hidden = reader.size("num_attention_heads"), reader.size("hidden_size")
    size = reader.size("head_dim", default=head_dim or max(hidden // q_heads, 1))
    return Heads(q_heads, reader.size("num_key_value_heads", default=kv_heads), size, size)


def _model(reader: ConfigReader, layers: list[LayerSizes], *, style: str = "rms", tied: bool = False) -> ModelSizes:
    hidden = reader.size("hidden_size")
    tied = reader.flag("tie_word_embeddings", reader.flag("tie_embedding", tied))
    last = norm("last norm", hidden, style=style)
    return ModelSizes(reader.model_type, hidden, reader.size("vocab_size"), tied, tuple(layers), last)


def _after(norms: tuple[ModuleSizes, ...], block: Block) -> Block:
    return replace(block, modules=(*norms, *block.modules))


def qwen_hybrid(reader: ConfigReader) -> ModelSizes:
    """Qwen3-Next and Qwen3.5: gated delta rules, and every fourth layer gated attention."""
    hidden, num_layers = reader.size("hidden_size"), reader.size("num_hidden_layers")
    words = reader.words("layer_types", num_layers, MIXING)
    if words is None:
        period = reader.size("full_attention_interval", default=4)
        words = [MIXING[1] if (layer + 1) % period else MIXING[0] for layer in range(num_layers)]
    bias = reader.flag("attention_bias")
    traits = AttentionTraits(bias, bias, qk_norm="wide", gated=True)
    norms, inner = (norm("norm", hidden, style="wide"),), dense if reader.model_type == "qwen3_5_text" else qwen_experts
    mixers = {
        MIXING[0]: attention(hidden, _heads(reader, 256), norms, traits),
        MIXING[1]: gated_delta(reader, norms),
    }
    layers = [LayerSizes((mixers[word], _after(norms, inner(reader, i)))) for i, word in enumerate(words)]
    return _model(reader, layers, style="wide")


def _mamba(reader: ConfigReader) -> MambaSizes:
    """Return a Mamba-2 mixer, from the keys of IBM's and TII's configurations."""
    heads = reader.size("mamba_n_heads")
    inner = reader.optional_size("mamba_d_ssm") or reader.size("mamba_expand", default=2) * reader.size("hidden_size")
    head_dim = reader.keys.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner // heads
    if head_dim * heads != inner:
        raise PlanError(
            f"mamba_n_heads = {heads} and mamba_d_head = {head_dim} make {head_dim * heads} features, but the mixer has"
            f" {inner}. Pass the config.json as it was published."
        )
    return MambaSizes(
        heads, head_dim, reader.size("mamba_n_groups"), reader.size("mamba_d_state"), reader.size("mamba_d_conv"),
        reader.flag("mamba_conv_bias", True), reader.flag("mamba_proj_bias"), reader.flag("mamba_proj_bias"),
    )  # fmt: skip


def _mamba_layers(reader: ConfigReader) -> list[bool]:
    """Return for each layer whether it is attention."""
    num_layers = reader.size("num_hidden_layers")
    words = reader.words("layer_types", num_layers, (*MIXING, "attention", "mamba"))
    if words is not None:
        return [word in ("full_attention", "attention") for word in words]
    chosen = reader.indices("attn_layer_indices") or []
    return [layer in chosen for layer in range(num_layers)]


def bamba(reader: ConfigReader) -> ModelSizes:
    """Mamba-2 with some layers of attention, an MLP in each."""
    hidden = reader.size("hidden_size")
    bias = reader.flag("attention_bias")
    norms = (norm("norm", hidden),)
    attend = attention(hidden, _heads(reader), norms, AttentionTraits(bias, bias))
    recur = mamba2(hidden, _mamba(reader), norms)
    inner = _after(norms, dense(reader, 0))
    return _model(reader, [LayerSizes((attend if full else recur, inner)) for full in _mamba_layers(reader)])


def granite_hybrid(reader: ConfigReader) -> ModelSizes:
    """Bamba with experts and an MLP for all tokens, or that MLP alone."""
    hidden = reader.size("hidden_size")
    bias = reader.flag("attention_bias")
    norms = (norm("norm", hidden),)
    attend = attention(hidden, _heads(reader), norms, AttentionTraits(bias, bias))
    recur = mamba2(hidden, _mamba(reader), norms)
    total, shared = reader.count("num_local_experts"), reader.size("shared_intermediate_size")
    inner = Block("mlp", (*norms, *gated_mlp(hidden, shared)))
    if total:
        routed = experts(hidden, total, reader.size("num_experts_per_tok"), reader.size("intermediate_size"))
        inner = Block("experts", (*norms, *routed, *gated_mlp(hidden, shared, keeps=False)))
    return _model(reader, [LayerSizes((attend if full else recur, inner)) for full in _mamba_layers(reader)])


def falcon_h1(reader: ConfigReader) -> ModelSizes:
    """Attention and Mamba-2 side by side in every layer, on the same input."""
    hidden = reader.size("hidden_size")
    bias = reader.flag("attention_bias")
    norms = (norm("norm", hidden),)
    mamba = replace(_mamba(reader), gated_norm=reader.flag("mamba_rms_norm"), out_bias=reader.flag("projectors_bias"))
    layer = LayerSizes((
        attention(hidden, _heads(reader), norms, AttentionTraits(bias, bias)),
        mamba2(hidden, mamba, ()),
        _after(norms, dense(reader, 0)),
    ))  # fmt: skip
    return _model(reader, [layer] * reader.size("num_hidden_layers"))


def nemotron_h(reader: ConfigReader) -> ModelSizes:
    """One block per layer: Mamba-2, attention, an MLP or experts."""
    hidden = reader.size("hidden_size")
    norms = (norm("norm", hidden, style="wide"),)
    makers: dict[str, Callable[[], Block]] = {
        "mamba": lambda: mamba2(hidden, _nemotron_mamba(reader), norms),
        "attention": lambda: attention(hidden, _heads(reader), norms, AttentionTraits()),
        "mlp": lambda: Block(
            "mlp",
            (*norms, *plain_mlp(hidden, reader.size("intermediate_size"), bias=reader.flag("mlp_bias"))),
        ),
        "moe": lambda: Block("experts", (*norms, *_nemotron_experts(reader))),
    }
    words = _nemotron_words(reader)
    kinds = {word: LayerSizes((makers[word](),)) for word in dict.fromkeys(words)}
    layers = [kinds[word] for word in words]
    return replace(_model(reader, layers, style="wide"), tied=False)  # whatever tie_word_embeddings says


def _nemotron_words(reader: ConfigReader) -> list[str]:
    """Return the kind of each layer, from words or from letters."""
    letters = reader.keys.get("hybrid_override_pattern")
    if isinstance(letters, str):
        names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        wrong = sorted(set(letters) - names.keys())
        if wrong or not letters:
            raise PlanError(f"`hybrid_override_pattern` must be M, *, - and E, not {wrong}, but got {letters!r:.60}.")
        return [names[letter] for letter in letters]
    kinds = reader.keys.get("layers_block_type")
    if not isinstance(kinds, list | tuple):
        raise PlanError("the configuration of a nemotron_h has neither layers_block_type nor hybrid_override_pattern.")
    known = ("mamba", "attention", "mlp", "moe", *MIXING)
    words = reader.words("layers_block_type", len(kinds), known) or []
    return [{"linear_attention": "mamba", "full_attention": "attention"}.get(word, word) for word in words]


def _nemotron_mamba(reader: ConfigReader) -> MambaSizes:
    return MambaSizes(
        reader.size("mamba_num_heads"), reader.size("mamba_head_dim"), reader.size("n_groups"),
        reader.size("ssm_state_size"), reader.size("conv_kernel"), reader.flag("use_conv_bias", True),
        reader.flag("use_bias"), reader.flag("use_bias"),
    )  # fmt: skip


def _nemotron_experts(reader: ConfigReader) -> tuple[ModuleSizes, ...]:
    if reader.optional_size("moe_latent_size") is not None:
        raise PlanError("experts with `moe_latent_size` are not supported.")
    hidden = reader.size("hidden_size")
    total, active = reader.size("n_routed_experts"), reader.size("num_experts_per_tok")
    routed = experts(hidden, total, active, reader.size("moe_intermediate_size"), gated=False)
    inner = reader.size("moe_shared_expert_intermediate_size")
    shared = plain_mlp(hidden, inner, bias=reader.flag("mlp_bias"), keeps=False)
    return (*routed, ModuleSizes("router's input", 0, 0, hidden), *shared)


def lfm2(reader: ConfigReader) -> ModelSizes:
    """Short convolutions with some layers of attention, an MLP in each."""
    hidden, num_layers = reader.size("hidden_size"), reader.size("num_hidden_layers")
    words = reader.words("layer_types", num_layers, ("full_attention", "conv"))
    if words is None:
        chosen = reader.indices("full_attn_idxs")
        full = range(num_layers) if chosen is None else chosen
        words = ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
    norms = (norm("norm", hidden),)
    mixers = {
        "full_attention": attention(hidden, _heads(reader), norms, AttentionTraits(qk_norm="rms")),
        "conv": short_convolution(hidden, reader.size("conv_L_cache"), norms, bias=reader.flag("conv_bias")),
    }
    inner = Block("mlp", (*norms, *gated_mlp(hidden, _lfm2_inner(reader))))
    return _model(reader, [LayerSizes((mixers[word], inner)) for word in words], tied=True)


def _lfm2_inner(reader: ConfigReader) -> int:
    """Return the MLP's size: two thirds of the configured one, rounded up."""
    inner = reader.size("block_ff_dim", "intermediate_size")
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return inner
    factor = reader.keys.get("block_ffn_dim_multiplier", 1.0)
    inner = int((1.0 if factor is None else float(factor)) * int(2 * inner / 3))
    unit = reader.size("block_multiple_of", default=256)
    return unit * -(-inner // unit)


HYBRID_FAMILIES: dict[str, Callable[[ConfigReader], ModelSizes]] = {
    "qwen3_next": qwen_hybrid,
    "qwen3_5_text": qwen_hybrid,
    "qwen3_5_moe_text": qwen_hybrid,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "lfm2": lfm2,
}
"""Hybrids, by model_type."""


# -- Transformers, and the table of families ---------------------------------------------------------------------------


PLAIN = AttentionTraits()
WINDOWS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """The differences between families of attention and MLPs."""

    style: str = "rms"
    """Style of its norms."""
    num_norms: int = 2
    """Norms in a layer."""
    tied: bool = False
    head_dim: int | None = None
    """Default of head_dim; None for hidden size / heads."""
    kv_heads: bool = False
    """Whether num_key_value_heads may be missing: as many as query heads."""
    attention: AttentionTraits = PLAIN
    bias: bool = False
    """Default of attention_bias."""
    biases: str = "all"
    """Which projections attention_bias applies to: "all", or "none" where the family has no such key."""
    window: str = "none"
    """Which layers have a sliding window, where layer_types is missing."""
    mlp: Callable[[ConfigReader, int], Block] = modules.dense


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of the model that a `config.json` describes.

    >>> tiny = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    ...         "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100}
    >>> sizes_of(tiny).params, sizes_of(tiny).num_blocks
    (107328, {'full': 2, 'mlp': 2})
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise PlanError("the configuration has no `model_type`. Pass a config.json as transformers writes it.")
    reader = ConfigReader(config)
    name = reader.model_type
    if isinstance(config.get("text_config"), Mapping):
        raise PlanError(
            f"the configuration is that of a {name:.60}, which has more than its language model. Only language models"
            f" are sized: save its text_config as a file and pass that."
        )
    if name in FAMILIES:
        return replace(_transformer(reader, FAMILIES[name]), config=config)
    if name in HYBRID_FAMILIES:
        return replace(HYBRID_FAMILIES[name](reader), config=config)
    known = ", ".join(sorted((*FAMILIES, *HYBRID_FAMILIES)))
    raise PlanError(f"`model_type` of the configuration must be one of {known}, but got {name!r:.60}.")


def windows_of(reader: ConfigReader, family: Family, num_layers: int) -> list[int | None]:
    """Return each layer's window: how many tokens before its own a token sees, or None for all of them.

    Configurations count the token itself as well.
    """
    window = (
        reader.size("sliding_window") - 1 if family.window != "none" and reader.keys.get("sliding_window") else None
    )
    if window is None:
        return [None] * num_layers
    words = reader.words("layer_types", num_layers, WINDOWS)
    if words is not None:
        return [window if word == "sliding_attention" else None for word in words]
    if family.window in ("late", "optional"):
        first = reader.count("max_window_layers", default=28) if family.window == "late" else 0
        is_used = reader.flag("use_sliding_window")
        return [window if is_used and layer >= first else None for layer in range(num_layers)]
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
    kv_heads = reader.size("num_attention_heads") if family.kv_heads else None
    heads = None if reader.model_type == "deepseek_v3" else _heads(reader, family.head_dim, kv_heads)
    layers: list[LayerSizes] = []
    for layer, window in enumerate(windows_of(reader, family, num_layers)):
        if heads is None:
            mixer = latent_attention(reader, norms)
        else:
            mixer = attention(hidden, replace(heads, window=window), norms, traits)
        layers.append(LayerSizes((mixer, _after(norms, family.mlp(reader, layer)))))
    return replace(_model(reader, layers, style=family.style), tied=reader.flag("tie_word_embeddings", family.tied))


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
        attention=AttentionTraits(qkv_bias=True), biases="none", window="late", mlp=modules.qwen_experts
    ),
    "qwen3_moe": Family(attention=_QK, window="optional", mlp=modules.qwen_experts),
    "mixtral": Family(biases="none", window="all", mlp=modules.all_experts),
    "gemma2": Family(style="wide", num_norms=4, tied=True, head_dim=256, window="2"),
    "gemma3_text": Family(
        style="wide", num_norms=4, tied=True, head_dim=256, window="6", attention=AttentionTraits(qk_norm="wide")
    ),
    "gpt_oss": Family(
        style="wide", head_dim=64, bias=True, window="2", attention=AttentionTraits(sinks=True),
        mlp=modules.gpt_oss_experts,
    ),
    "olmo": Family(style="plain", kv_heads=True),
    "olmo2": Family(style="wide", kv_heads=True, attention=AttentionTraits(qk_norm="wide", whole_qk_norm=True)),
    "olmo3": Family(
        style="wide", kv_heads=True, window="4", attention=AttentionTraits(qk_norm="wide", whole_qk_norm=True)
    ),
    "deepseek_v3": Family(mlp=modules.deepseek_experts),
}  # fmt: skip
"""Families of attention layers, by model_type."""
