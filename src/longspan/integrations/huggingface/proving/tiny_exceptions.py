"""Families whose sizes are related in ways that names do not tell: what is set after the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def jamba(config: Any) -> None:
    """Mamba, Mamba with experts, attention."""
    config.num_hidden_layers = 3
    config.attn_layer_period, config.attn_layer_offset = 3, 2
    config.expert_layer_period, config.expert_layer_offset = 2, 1


def zamba(config: Any) -> None:
    """Attention is shared by several layers, so that there must be one more than there are weights of it."""
    shared = getattr(config, "num_mem_blocks", 1) + 1
    config.layers_block_type = ["linear_attention"] + ["linear_attention", "hybrid"] * shared
    config.num_hidden_layers = len(config.layers_block_type)
    config.hybrid_layer_ids = [i for i, kind in enumerate(config.layers_block_type) if kind == "hybrid"]


def longformer(config: Any) -> None:
    """Half of the window is on each side."""
    config.attention_window = [8] * config.num_hidden_layers


def reformer(config: Any) -> None:
    """Positions are pairs of rows of two tables, whose features follow each other."""
    config.axial_pos_shape = (8, 16)
    config.axial_pos_embds_dim = (config.hidden_size // 4, config.hidden_size - config.hidden_size // 4)
    config.attn_layers = ["local", "lsh"]
    config.num_hidden_layers = 2


def lilt(config: Any) -> None:
    """Six tables of the layout follow each other."""
    config.hidden_size = 48


def layoutlmv3(config: Any) -> None:
    """Four corners and two lengths of a box follow each other."""
    config.coordinate_size, config.shape_size = config.hidden_size // 8, config.hidden_size // 4


def molmo2(config: Any) -> None:
    """Features are taken from these layers of the images' part."""
    config.adapter_config.vision_feature_layer = [-1, -2]


def vq(config: Any) -> None:
    """Norms of 32 groups."""
    config.base_channels = 32


def glm5_next(config: Any) -> None:
    """Keys are chosen by groups of `index_kpool`."""
    config.index_kpool, config.index_topk = 4, 8


def perceiver(config: Any) -> None:
    """Latents that all tokens are read into."""
    config.num_latents, config.d_latents, config.num_self_attends_per_block = 16, config.d_model, 2


def hrm_text(config: Any) -> None:
    """Layers are gone through again and again, and counted as often."""
    config.num_layers_per_stack = 1
    config.num_hidden_layers = config.H_cycles * (config.L_cycles + 1)


def blt(config: Any) -> None:
    """Patches have as many features as `cross_attn_k` bytes."""
    around, inside = config.encoder_config, config.global_config
    inside.hidden_size = around.hidden_size_global = config.decoder_config.hidden_size_global = (
        around.hidden_size * config.cross_attn_k
    )
    inside.head_dim = inside.hidden_size // inside.num_attention_heads


def llama4_vision(config: Any) -> None:
    """Neighbouring patches become one with all of their features."""
    config.intermediate_size = int(config.hidden_size / config.pixel_shuffle_ratio**2)
    config.vision_output_dim = config.projector_output_dim


EXCEPTIONS: dict[str, Callable[[Any], None]] = {
    "blt": blt,
    "chameleon_vqgan": vq,
    "emu3_vqgan": vq,
    "glm5_next_text": glm5_next,
    "hrm_text": hrm_text,
    "jamba": jamba,
    "janus_vqgan": vq,
    "layoutlmv3": layoutlmv3,
    "lilt": lilt,
    "llama4_vision_model": llama4_vision,
    "longformer": longformer,
    "molmo2": molmo2,
    "perceiver": perceiver,
    "reformer": reformer,
    "zamba": zamba,
    "zamba2": zamba,
}
