"""Models, batches and references of `benchmarks.rival`: tiny models of transformers.

The reference is "eager" on one device. Where transformers mixes packed documents, it is every document alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCAB, TOKENS, WINDOW = 48, 48, 7
"""Tokens are a multiple of two and of three, so that nothing is padded."""
DOCUMENTS = (11, 3, 20, 14)
CASES = ("plain", "packed")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
"""Six heads of keys, which two and three ranks divide."""
TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("full attention", "llama", {}),
    "Mistral": ("a window", "mistral", {"sliding_window": WINDOW}),
    "Gemma 3": ("window and full layers", "gemma3_text", {**TURNS, "query_pre_attn_scalar": 3}),
    "Llama 4": (
        "chunks, temperatures by position",
        "llama4_text",
        {
            "intermediate_size_mlp": 32, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 11,
            "layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0],
            "floor_scale": 5, "attn_scale": 0.5,
        },
    ),
    "Gemma 2": ("soft caps", "gemma2", {**TURNS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5}),
    "GPT-OSS": (
        "sinks",
        "gpt_oss",
        {
            **TURNS, "num_local_experts": 2, "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "Bamba": (
        "Mamba-2 layers",
        "bamba",
        {
            "attn_layer_indices": [1, 3], "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 8,
            "mamba_expand": 2, "mamba_n_groups": 2, "mamba_chunk_size": 16,
        },
    ),
    "LFM2": (
        "short convolutions",
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8, "num_attention_heads": 6},
    ),
    "Qwen3-Next": (
        "gated delta rule",
        "qwen3_next",
        {
            **EXPERTS, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
    ),
    "Zaya": (
        "convolutions inside of attention",
        "zaya",
        {**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16},
    ),
}  # fmt: skip
"""By the name in the table: its special feature, transformers' model type, changes of its configuration."""
MIXING = ("GPT-OSS", "Bamba", "LFM2", "Qwen3-Next", "Zaya")
"""Families whose packed documents are mixed by transformers on one device."""


def model_of(family: str) -> nn.Module:
    """Initialise the same weights in every process, none of them zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(7)
    _, model_type, changes = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    built = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model = built.float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch_of(case: str) -> dict[str, Tensor]:
    """Return the inputs on one device: two rows, or one row of packed documents."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (1 if case == "packed" else 2, TOKENS), generator=generator)
    if case == "plain":
        return {"input_ids": ids}
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in DOCUMENTS])[None]}


def targets_of(case: str) -> Tensor:
    """Return the next tokens, -100 at the end of a document."""
    ids = batch_of(case)["input_ids"]
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    if case == "packed":
        targets[:, torch.tensor(DOCUMENTS).cumsum(0) - 1] = -100
    return targets


def loss_of(logits: Tensor, targets: Tensor, case: str) -> Tensor:
    """Return these tokens' part of the batch's loss: parts add up, and so do gradients."""
    count = (targets_of(case) != -100).sum()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / count


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter; zeros for experts without tokens."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def truth(family: str, case: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients on one device."""
    model, batch = model_of(family), batch_of(case)
    parts = [batch]
    if case == "packed" and family in MIXING:
        parts = [{"input_ids": ids} for ids in batch["input_ids"].split(DOCUMENTS, dim=1)]
    logits = torch.cat([model(**part, use_cache=False).logits for part in parts], dim=1)
    loss_of(logits, targets_of(case), case).backward()
    return logits.detach(), gradients_of(model)
