"""All model families of the installed transformers, with configurations to prove them with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from longspan.huggingface.rules import PLAIN, Form, config_key

KINDS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "classify": "SEQUENCE_CLASSIFICATION",
    "image": "IMAGE_TEXT_TO_TEXT",
}
FORMS = {
    "plain": PLAIN,
    "padded": Form(padding="right"),
    "padded left": Form(padding="left"),
    "packed": Form(packed="position_ids", positions=True),
    "unlabeled": Form(labels=False),
}
"""Forms of batches in the table of rules."""

HYBRID = ["linear_attention"] * 3 + ["full_attention"]
NESTED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20]}
PUBLISHED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "chameleon": {"vocabulary_map": {"<image>": 8711, "IMGIMGAAZ": 4}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": NESTED}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": NESTED}},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_ocr2": {"text_config": {
        "num_experts_per_tok": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 11, "num_hidden_layers": 12,
    }},
    "deepseek_v2": {
        "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
        "n_routed_experts": 160, "first_k_dense_replace": 1,
    },
    "diffusion_gemma": {"text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "emu3": {"vocabulary_map": {"<image>": 151900, "<|extra_200|>": 151846, "<|visual token 000000|>": 151854}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},  # nosec B105
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "granite4_vision": {"deepstack_layer_map": [(-1, 0), (-2, 1)], "downsample_rate": "4/8"},
    "granitemoehybrid": {"layer_types": HYBRID * 8},
    "paddleocr_vl": {"text_config": {"rope_parameters": {**NESTED, "mrope_section": [16, 24, 24]}}},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen4_exp": {"text_config": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    }},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
    "causal:reformer": {"is_decoder": True},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
"""Values for defaults that do not run or lack a kind of layer: similar to published ones, not compared with them."""


@dataclass(frozen=True)
class Case:
    """One family with one kind of head."""

    kind: str
    family: str
    model: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.family}"


def cases(kinds: Iterable[str] = KINDS, only: list[str] | None = None) -> list[Case]:
    """Return all families of these kinds in the installed transformers, by name."""
    from transformers.models.auto import modeling_auto

    known = []
    for kind in kinds:
        for family, model in getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind]}_MAPPING_NAMES").items():
            if not only or family in only:
                known.append(Case(kind, family, model if isinstance(model, str) else model[0]))
    return sorted(known, key=lambda case: (list(KINDS).index(case.kind), case.family))


def config_of(case: Case) -> Any:
    """Return the family's default configuration, with values of published ones; classifiers get a padding token."""
    from transformers import CONFIG_MAPPING

    given = PUBLISHED.get(str(case), PUBLISHED.get(case.family, {}))
    config = CONFIG_MAPPING[case.family](**copy.deepcopy(given))
    if case.kind == "classify":
        for part in (config, config.get_text_config()):
            if getattr(part, "pad_token_id", None) is None:
                part.pad_token_id = 0
    return config


def class_of(case: Case) -> type:
    import transformers

    return getattr(transformers, case.model)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3}, "qwen2": {"rope_parameters": YARN}, "qwen3": {"rope_parameters": YARN},
    "qwen3_moe": {"rope_parameters": YARN}, "esm": {"position_embedding_type": "absolute"},
}  # fmt: skip
"""Values of published models beside those of `config_of`."""
VARIED = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt2")
"""Causal families that are in the table with and without a padding token, with and without tied embeddings."""


def variants(case: Case, config: Any) -> Iterator[Any]:
    """Yield the configuration, and others that are common (`CHANGES`, `VARIED`)."""
    yield config
    text = config.get_text_config()
    given: list[dict[str, Any]] = [{}]
    if case.kind == "causal" and case.family in VARIED:
        paddings = (text.pad_token_id, 0 if text.pad_token_id is None else None)
        given = [{"pad_token_id": p, "tie_word_embeddings": t} for p in paddings for t in (True, False)]
    changes = CHANGES.get(case.family) if case.kind in ("causal", "masked") else None
    for change, values in itertools.product([{}] if changes is None else [{}, changes], given):
        other = copy.deepcopy(config)
        for part in {id(part): part for part in (other, other.get_text_config())}.values():
            for name, value in {**change, **values}.items():
                setattr(part, name, copy.deepcopy(value))
        if config_key(other) != config_key(config):
            yield other
