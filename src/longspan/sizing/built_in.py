"""Configurations of well-known models, by name: what sizes need of their `config.json`, and nothing else.

They were written down from memory, without network. A test holds each against the number of parameters that its makers
publish, within 1%. For a model that is trained, give its own file: `longspan plan --config config.json`.
"""

from __future__ import annotations

from typing import Any

from longspan.errors import PlanError


def _config(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A configuration from (hidden size, MLP's inner size, layers, query heads, key/value heads, vocabulary)."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size",
    )  # fmt: skip
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


_QWEN_MOE = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
_NEXT = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
}  # fmt: skip
_DEEPSEEK = {
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
_NEMOTRON = {
    "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
    "conv_kernel": 4, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip

BUILT_IN = {  # name: (configuration, published parameters in 1e9)
    "llama3-8b": (_config("llama", (4096, 14336, 32, 32, 8, 128256)), 8.03),
    "llama3-70b": (_config("llama", (8192, 28672, 80, 64, 8, 128256)), 70.6),
    "qwen3-8b": (_config("qwen3", (4096, 12288, 36, 32, 8, 151936), head_dim=128), 8.19),
    "qwen3-32b": (_config("qwen3", (5120, 25600, 64, 64, 8, 151936), head_dim=128), 32.8),
    "qwen3-30b-a3b": (_config("qwen3_moe", (2048, 6144, 48, 32, 4, 151936), **_QWEN_MOE), 30.5),
    "mistral-7b": (_config("mistral", (4096, 14336, 32, 32, 8, 32768)), 7.25),
    "mixtral-8x7b": (
        _config("mixtral", (4096, 14336, 32, 32, 8, 32000), num_local_experts=8, num_experts_per_tok=2), 46.7,
    ),
    "gemma3-27b": (
        _config("gemma3_text", (5376, 21504, 62, 32, 16, 262208), head_dim=128, sliding_window=1024), 27.0,
    ),
    "gpt-oss-20b": (_config("gpt_oss", (2880, 2880, 24, 64, 8, 201088), num_local_experts=32, **_GPT_OSS), 20.9),
    "gpt-oss-120b": (_config("gpt_oss", (2880, 2880, 36, 64, 8, 201088), num_local_experts=128, **_GPT_OSS), 116.8),
    "olmo2-7b": (_config("olmo2", (4096, 11008, 32, 32, 32, 100352)), 7.30),
    "deepseek-v3": (_config("deepseek_v3", (7168, 18432, 61, 128, 128, 129280), **_DEEPSEEK), 671.0),
    "qwen3-next-80b-a3b": (_config("qwen3_next", (2048, 5632, 48, 16, 2, 151936), **_NEXT), 80.0),
    "nemotron-h-8b": (_config("nemotron_h", (4096, 21504, 52, 32, 8, 131072), **_NEMOTRON), 8.1),
    "lfm2-1.2b": (
        _config("lfm2", (2048, 12288, 16, 32, 8, 65536), conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14]), 1.17,
    ),
}  # fmt: skip
"""Gemma's is its language model, without the part that sees."""


def built_in_config(name: str) -> dict[str, Any]:
    """The configuration of that name.

    >>> built_in_config("qwen3-8b")["num_hidden_layers"]
    36
    """
    if name not in BUILT_IN:
        raise PlanError(
            f"model {name!r:.60} was asked for. Choose one of {', '.join(BUILT_IN)}, or give its own file, with"
            f" --config."
        )
    return dict(BUILT_IN[name][0])
