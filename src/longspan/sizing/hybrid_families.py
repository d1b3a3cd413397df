"""Configurations of hybrids to sizes: attention beside recurrences and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from longspan.errors import PlanError
from longspan.sizing.config import ConfigReader
from longspan.sizing.mixers import (
    AttentionTraits,
    DeltaSizes,
    MambaSizes,
    attention,
    gated_delta,
    mamba2,
    short_convolution,
)
from longspan.sizing.mlps import dense, qwen_experts
from longspan.sizing.modules import (
    Block,
    ExpertSizes,
    Heads,
    LayerSizes,
    ModelSizes,
    ModuleSizes,
    experts,
    gated_mlp,
    norm,
    plain_mlp,
)

MIXING = ("full_attention", "linear_attention")


def _heads(reader: ConfigReader, head_dim: int | None = None) -> Heads:
    q_heads, hidden = reader.size("num_attention_heads"), reader.size("hidden_size")
    size = reader.size("head_dim", default=head_dim or max(hidden // q_heads, 1))
    return Heads(q_heads, reader.size("num_key_value_heads"), size, size)


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
    delta = DeltaSizes(
        reader.size("linear_num_key_heads"), reader.size("linear_num_value_heads"), reader.size("linear_key_head_dim"),
        reader.size("linear_value_head_dim"), reader.size("linear_conv_kernel_dim"),
    )  # fmt: skip
    norms, inner = (norm("norm", hidden, style="wide"),), dense if reader.model_type == "qwen3_5_text" else qwen_experts
    mixers = {
        MIXING[0]: attention(hidden, _heads(reader, 256), norms, traits),
        MIXING[1]: gated_delta(hidden, delta, norms),
    }
    layers = [LayerSizes((mixers[word], _after(norms, inner(reader, i)))) for i, word in enumerate(words)]
    return _model(reader, layers, style="wide")


def _mamba(reader: ConfigReader) -> MambaSizes:
    """A Mamba-2 mixer by the names that IBM's and TII's configurations have."""
    heads = reader.size("mamba_n_heads")
    inner = reader.optional_size("mamba_d_ssm") or reader.size("mamba_expand", default=2) * reader.size("hidden_size")
    head_dim = reader.keys.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner // heads
    if head_dim * heads != inner:
        raise PlanError(
            f"mamba_n_heads = {heads} and mamba_d_head = {head_dim} make {head_dim * heads} features, but the mixer has"
            f" {inner}. Give the config.json as it was published."
        )
    return MambaSizes(
        heads, head_dim, reader.size("mamba_n_groups"), reader.size("mamba_d_state"), reader.size("mamba_d_conv"),
        reader.flag("mamba_conv_bias", True), reader.flag("mamba_proj_bias"), reader.flag("mamba_proj_bias"),
    )  # fmt: skip


def _mamba_layers(reader: ConfigReader) -> list[bool]:
    """For each layer whether it is attention."""
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
    """The same, with experts beside an MLP for all tokens, or that MLP alone."""
    hidden = reader.size("hidden_size")
    bias = reader.flag("attention_bias")
    norms = (norm("norm", hidden),)
    attend = attention(hidden, _heads(reader), norms, AttentionTraits(bias, bias))
    recur = mamba2(hidden, _mamba(reader), norms)
    total, shared = reader.count("num_local_experts"), reader.size("shared_intermediate_size")
    inner = Block("mlp", (*norms, *gated_mlp(hidden, shared)))
    if total:
        choice = ExpertSizes(total, reader.size("num_experts_per_tok"), reader.size("intermediate_size"))
        inner = Block("experts", (*norms, *experts(hidden, choice), *gated_mlp(hidden, shared, keeps=False)))
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
    """One thing a layer: Mamba-2, attention, an MLP or experts."""
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
    found: dict[str, LayerSizes] = {}
    layers: list[LayerSizes] = []
    for word in _nemotron_words(reader):
        if word not in found:
            found[word] = LayerSizes((makers[word](),))
        layers.append(found[word])
    return replace(_model(reader, layers, style="wide"), tied=False)  # whatever tie_word_embeddings says


def _nemotron_words(reader: ConfigReader) -> list[str]:
    """For each layer what it is, from words or from letters."""
    letters = reader.keys.get("hybrid_override_pattern")
    if isinstance(letters, str):
        names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        wrong = sorted(set(letters) - names.keys())
        if wrong or not letters:
            raise PlanError(f"hybrid_override_pattern is {letters!r:.60}. M, *, - and E are known, not {wrong}.")
        return [names[letter] for letter in letters]
    given = reader.keys.get("layers_block_type")
    if not isinstance(given, list | tuple):
        raise PlanError("the configuration of a nemotron_h has neither layers_block_type nor hybrid_override_pattern.")
    known = ("mamba", "attention", "mlp", "moe", *MIXING)
    words = reader.words("layers_block_type", len(given), known) or []
    return [{"linear_attention": "mamba", "full_attention": "attention"}.get(word, word) for word in words]


def _nemotron_mamba(reader: ConfigReader) -> MambaSizes:
    return MambaSizes(
        reader.size("mamba_num_heads"), reader.size("mamba_head_dim"), reader.size("n_groups"),
        reader.size("ssm_state_size"), reader.size("conv_kernel"), reader.flag("use_conv_bias", True),
        reader.flag("use_bias"), reader.flag("use_bias"),
    )  # fmt: skip


def _nemotron_experts(reader: ConfigReader) -> tuple[ModuleSizes, ...]:
    if reader.optional_size("moe_latent_size") is not None:
        raise PlanError("experts with a moe_latent_size were given. They are not sized yet.")
    hidden = reader.size("hidden_size")
    choice = ExpertSizes(
        reader.size("n_routed_experts"), reader.size("num_experts_per_tok"), reader.size("moe_intermediate_size"),
        gated=False,
    )  # fmt: skip
    inner = reader.size("moe_shared_expert_intermediate_size")
    shared = plain_mlp(hidden, inner, bias=reader.flag("mlp_bias"), keeps=False)
    return (*experts(hidden, choice), ModuleSizes("router's input", 0, 0, hidden), *shared)


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
    """The MLP's size, which the configuration gives before two thirds of it are taken and rounded up."""
    inner = reader.size("block_ff_dim", "intermediate_size")
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return inner
    factor = reader.keys.get("block_ffn_dim_multiplier", 1.0)
    inner = int((1.0 if factor is None else float(factor)) * int(2 * inner / 3))
    unit = reader.size("block_multiple_of", default=256)
    return unit * -(-inner // unit)


FAMILIES: dict[str, Callable[[ConfigReader], ModelSizes]] = {
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
