"""Model families of transformers, their test configurations, and a step of each on one device."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "classify": "SEQUENCE_CLASSIFICATION",
    "image": "IMAGE_TEXT_TO_TEXT",
}
TOKENS = 52
"""Different from the values of the check at first use, so that both cannot be wrong in the same way by chance."""
LIMIT = 1e-5
"""Tolerance of Longspan's attention against transformers' own on one device: models compute parts in float32."""

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
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
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


def cases(kinds: list[str], only: list[str] | None = None) -> list[Case]:
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


def batch_of(case: Case, config: Any, rows: int = 2, seed: int = 5) -> dict[str, Any]:
    """Return a random batch without special tokens, with labels for the head."""
    from longspan.huggingface.tiny import special_tokens

    draw = torch.Generator().manual_seed(seed)
    text = config.get_text_config()
    allowed = torch.tensor([n for n in range(getattr(text, "vocab_size", 99)) if n not in special_tokens(config)])
    ids = allowed[torch.randint(0, len(allowed), (rows, TOKENS), generator=draw)]
    if case.kind == "classify":
        return {"input_ids": ids, "labels": torch.arange(rows) % 2}
    labels = allowed[torch.randint(0, len(allowed), (rows, TOKENS), generator=draw)]
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
    return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True)
class Step:
    """Results of a step."""

    loss: float
    logits: Tensor | None
    """None if they are sharded over ranks."""
    grads: dict[str, Tensor]


def step(model: Any, batch: dict[str, Any]) -> Step:
    """Run forward and backward on one device."""
    model.zero_grad()
    out = model(**batch)
    if out.loss is None:
        raise ValueError(f"{type(model).__name__} computes no loss from labels")
    out.loss.backward()
    return Step(out.loss.item(), out.logits.detach(), gradients(model))


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradient of every parameter that takes part."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(outcome: Step, expected: Step) -> float:
    """Return the largest difference of loss, logits and gradients, each relative to the largest of its kind."""
    if outcome.grads.keys() != expected.grads.keys():
        return float("inf")
    largest = max((float(g.abs().max()) for g in expected.grads.values()), default=1.0) or 1.0
    errors = [float((outcome.grads[name] - grad).abs().max()) / largest for name, grad in expected.grads.items()]
    errors.append(abs(outcome.loss - expected.loss) / max(abs(expected.loss), 1e-30))
    if outcome.logits is not None and expected.logits is not None:
        if outcome.logits.shape != expected.logits.shape:
            return float("inf")
        errors.append(float((outcome.logits - expected.logits).abs().max() / expected.logits.abs().max()))
    return float("inf") if any(math.isnan(error) for error in errors) else max(errors)


@contextlib.contextmanager
def counted() -> Any:
    """Count the calls of Longspan's attention inside, in a list of one number."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = [0]
    attention = ALL_ATTENTION_FUNCTIONS["longspan"]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return attention(*args, **kwargs)

    AttentionInterface.register("longspan", counting)
    try:
        yield calls
    finally:
        AttentionInterface.register("longspan", attention)


def on_one_device(case: Case) -> dict[str, Any]:
    """Check whether the family builds and runs, and whether Longspan's attention equals its own."""
    from longspan import huggingface
    from longspan.huggingface.tiny import CannotShrinkError, build, tiny_config

    huggingface.register()
    try:
        config = config_of(case)
    except Exception as error:
        return {
            "outcome": "not built",
            "reason": f"its default configuration is refused by its own code: {one_line(error)}",
        }
    if config.is_encoder_decoder:
        return {"outcome": "refused", "reason": "encoder-decoder: queries and keys of two sequences"}
    try:
        tiny = tiny_config(config)
        tiny._attn_implementation = "eager"
        model: Any = build(class_of(case), tiny)
    except CannotShrinkError as error:
        return {"outcome": "not built", "reason": one_line(error)}
    model.config.use_cache = False
    try:
        batch = batch_of(case, model.config)
        expected = step(model, batch)
    except Exception as error:
        return {"outcome": "not built", "reason": f"its tiny copy does not run on text alone: {one_line(error)}"}
    try:
        model.set_attn_implementation("longspan")
        with counted() as calls:
            outcome = step(model, batch)
    except Exception as error:
        return {"outcome": "refused", "reason": one_line(error)}
    error = difference(outcome, expected)
    if not error <= LIMIT:
        return {"outcome": "differs", "reason": f"off by {error:.1e} on one device", "error": error}
    return {"outcome": "runs", "error": error, "calls": calls[0]}


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return text[:300] if "longspan" in type(error).__module__ else f"{name}: {text}"[:300]
