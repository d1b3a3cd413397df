"""MLPs and experts of a layer, from a configuration."""

from __future__ import annotations

from longspan.sizing.config import ConfigReader
from longspan.sizing.modules import Block, ExpertSizes, ModuleSizes, experts, gated_mlp


def dense(reader: ConfigReader, _layer: int) -> Block:
    hidden, inner = reader.size("hidden_size"), reader.size("intermediate_size")
    return Block("mlp", gated_mlp(hidden, inner, bias=reader.flag("mlp_bias")))


def all_experts(reader: ConfigReader, _layer: int) -> Block:
    """Experts in every layer, of the MLP's size (Mixtral)."""
    choice = ExpertSizes(
        reader.size("num_local_experts"), reader.size("num_experts_per_tok"), reader.size("intermediate_size")
    )
    return Block("experts", experts(reader.size("hidden_size"), choice))


def gpt_oss_experts(reader: ConfigReader, _layer: int) -> Block:
    """The same with biases; clamping gate and up keeps three more rows."""
    choice = ExpertSizes(
        reader.size("num_local_experts"), reader.size("num_experts_per_tok"), reader.size("intermediate_size"),
        bias=True, kept_inner=7,
    )  # fmt: skip
    return Block("experts", experts(reader.size("hidden_size"), choice))


def qwen_experts(reader: ConfigReader, layer: int) -> Block:
    """Experts in every layer, or in every so many, or an MLP; with an expert for all tokens, if it is named."""
    hidden, step = reader.size("hidden_size"), reader.size("decoder_sparse_step", default=1)
    total = reader.count("num_experts", "num_local_experts")
    if layer in (reader.indices("mlp_only_layers") or []) or not total or (layer + 1) % step:
        return dense(reader, layer)
    choice = ExpertSizes(total, reader.size("num_experts_per_tok"), reader.size("moe_intermediate_size"))
    modules = experts(hidden, choice)
    if reader.model_type != "qwen3_moe":
        shared = reader.size("shared_expert_intermediate_size")
        modules += (
            *gated_mlp(hidden, shared, keeps=False),
            ModuleSizes("gate of the shared expert", hidden, hidden + 1),
        )
    return Block("experts", modules)


def deepseek_experts(reader: ConfigReader, layer: int) -> Block:
    """An MLP in the first layers, then experts beside one for all tokens; its router works in float32."""
    if layer < reader.count("first_k_dense_replace"):
        return dense(reader, layer)
    hidden, inner = reader.size("hidden_size"), reader.size("moe_intermediate_size")
    choice = ExpertSizes(reader.size("n_routed_experts"), reader.size("num_experts_per_tok"), inner)
    shared = gated_mlp(hidden, inner * reader.size("n_shared_experts"), keeps=False)
    return Block("experts", (*experts(hidden, choice), ModuleSizes("router's input", 0, 0, hidden), *shared))
