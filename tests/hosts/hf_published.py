"""Configurations in the form of well-known models' config.json, from memory; Phi-3's long factors are made up."""

PUBLISHED = {
    "Llama-3.1-8B": {
        "model_type": "llama", "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
        "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
        "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512, "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3,
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 4, "v_head_dim": 128,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "vocab_size": 129280,
    },
    "gemma-3-4b": {
        "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "vocab_size": 262208,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 200002, "pad_token_id": 199999,
        "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
    },
    "Phi-3-mini-128k": {
        "model_type": "phi3", "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "resid_pdrop": 0.1,
        "rope_scaling": {
            "long_factor": [1 + i / 2 for i in range(48)], "short_factor": [1 + i / 99 for i in range(48)],
            "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "vocab_size": 32064,
    },
    "Qwen2.5-VL-7B": {
        "model_type": "qwen2_5_vl", "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
        "vision_end_token_id": 151653, "image_token_id": 151655, "video_token_id": 151656, "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768,
        "use_sliding_window": False, "vocab_size": 152064,
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
            "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "temporal_patch_size": 2,
        },
    },
    "Jamba-v0.1": {
        "model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
        "expert_layer_period": 2, "hidden_size": 4096, "intermediate_size": 14336, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "num_attention_heads": 32, "num_experts": 16,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 65536,
    },
    "Nemotron-H-8B": {
        "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_hidden_layers": 52,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "expand": 2, "chunk_size": 128, "vocab_size": 131072,
    },
    "Llama-4-Maverick": {
        "model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128, "hidden_size": 5120,
        "interleave_moe_layer_step": 2, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 128, "vocab_size": 202048, "pad_token_id": 200018,
    },
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512, "vocab_size": 100352,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "mamba_chunk_size": 256,
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 48, "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40,
        "num_key_value_heads": 4, "num_local_experts": 64, "position_embedding_type": "nope",
        "shared_intermediate_size": 1024, "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
        "logits_scaling": 6, "residual_multiplier": 0.22,
    },
    "Zamba2-7B": {
        "model_type": "zamba2", "hidden_size": 3584, "num_hidden_layers": 81, "num_mem_blocks": 2,
        "num_attention_heads": 32, "use_mem_rope": True, "mamba_d_state": 64, "mamba_expand": 2,
        "n_mamba_heads": 112, "mamba_ngroups": 2, "vocab_size": 32000,
        "layers_block_type": ["mamba"] * 6 + ["hybrid"] + (["mamba"] * 5 + ["hybrid"]) * 12 + ["mamba"] * 2,
    },
    "ModernBERT-base": {
        "model_type": "modernbert", "bos_token_id": 50281, "cls_token_id": 50281, "eos_token_id": 50282,
        "pad_token_id": 50283, "sep_token_id": 50282, "global_attn_every_n_layers": 3, "hidden_size": 768,
        "intermediate_size": 1152, "local_attention": 128, "max_position_embeddings": 8192, "num_attention_heads": 12,
        "num_hidden_layers": 22, "vocab_size": 50368,
    },
    "bge-m3": {
        "model_type": "xlm-roberta", "hidden_size": 1024, "intermediate_size": 4096, "max_position_embeddings": 8194,
        "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1, "type_vocab_size": 1,
        "vocab_size": 250002, "bos_token_id": 0, "eos_token_id": 2,
    },
}  # fmt: skip


def config_of(name):
    """The configuration, as transformers makes it from the file."""
    from transformers import CONFIG_MAPPING

    given = dict(PUBLISHED[name])
    return CONFIG_MAPPING[given.pop("model_type")](**given)


def model_class(config):
    """Causal, or else masked, or else image-text."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for kind in ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT"):
        found = getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(config.model_type)
        if found is not None:
            return getattr(transformers, found if isinstance(found, str) else found[0])
    raise LookupError(config.model_type)
