"""Tiny configurations of every family that can be sized, and what was measured of them."""

NARROW = {
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADED = {**NARROW, "head_dim": 8}
CHOSEN = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA = {
    **HEADED, "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}  # fmt: skip
MAMBA = {
    **NARROW, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16,
    "mamba_d_ssm": 128,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 40}
LATENT = {
    **NARROW, "num_key_value_heads": 8, "kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "qk_nope_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
NEMOTRON = {
    **HEADED, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
TINY = {  # model_type: (layers of one period, sizes)
    "llama": (1, HEADED),
    "granite": (1, HEADED),
    "smollm3": (1, HEADED),
    "mistral": (1, HEADED),
    "phi3": (1, NARROW),
    "qwen2": (1, NARROW),
    "qwen3": (1, HEADED),
    "qwen2_moe": (1, {**NARROW, **QWEN_MOE, **SHARED}),
    "qwen3_moe": (1, {**HEADED, **QWEN_MOE}),
    "mixtral": (1, {**HEADED, **CHOSEN}),
    "gemma2": (2, HEADED),
    "gemma3_text": (6, HEADED),
    "gpt_oss": (2, {**HEADED, **CHOSEN}),
    "olmo": (1, NARROW),
    "olmo2": (1, NARROW),
    "olmo3": (4, NARROW),
    "deepseek_v3": (1, LATENT),
    "qwen3_next": (4, {**DELTA, **QWEN_MOE, **SHARED}),
    "qwen3_5_text": (4, DELTA),
    "qwen3_5_moe_text": (4, {**DELTA, **QWEN_MOE, **SHARED}),
    "bamba": (1, MAMBA),
    "granitemoehybrid": (1, {**MAMBA, **CHOSEN, "shared_intermediate_size": 40}),
    "falcon_h1": (1, MAMBA),
    "nemotron_h": (0, NEMOTRON),
    "lfm2": (1, {**NARROW, "block_multiple_of": 16}),
}

MEASURED = {
    "llama": 3048,
    "granite": 3048,
    "smollm3": 3048,
    "mistral": 3048,
    "phi3": 3208,
    "qwen2": 3048,
    "qwen3": 3568,
    "qwen2_moe": 3343,
    "qwen3_moe": 3413,
    "mixtral": 5213,
    "gemma2": 8704,
    "gemma3_text": 30199,
    "gpt_oss": 15489,
    "olmo": 2800,
    "olmo2": 3952,
    "olmo3": 15808,
    "deepseek_v3": 5493,
    "qwen3_next": 27996,
    "qwen3_5_text": 26770,
    "qwen3_5_moe_text": 27996,
    "bamba": 6862,
    "granitemoehybrid": 9307,
    "falcon_h1": 5675,
    "nemotron_h": 9631,
    "lfm2": 3056,
}
"""Bytes that autograd keeps of a token in the layers of one period, in bfloat16, as `tests/hosts/test_sizing_models.py`
measures them."""


def config_of(name):
    """A whole configuration of one period of the family's layers, as transformers would write it."""
    period, sizes = TINY[name]
    rest = {
        "n_shared_experts": 1, "mamba_d_conv": 4, "linear_conv_kernel_dim": 4, "conv_L_cache": 3, "conv_kernel": 4,
        "sliding_window": 8 if name in ("gemma2", "gemma3_text", "gpt_oss", "olmo3") else None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    }  # fmt: skip
    return {**rest, **sizes, "model_type": name, "num_hidden_layers": period or 4}
