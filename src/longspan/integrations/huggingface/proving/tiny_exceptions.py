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


EXCEPTIONS: dict[str, Callable[[Any], None]] = {
    "jamba": jamba,
    "longformer": longformer,
    "reformer": reformer,
    "zamba": zamba,
    "zamba2": zamba,
}
