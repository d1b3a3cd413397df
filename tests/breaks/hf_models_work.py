"""Tiny models of transformers and batches of every kind, one training step on one device and over ranks.

One device runs transformers' own attention (sdpa, or eager for sinks). Documents of packed batches run one by one
there, because hybrid models of transformers and GPT-OSS let packed documents see each other.
"""

import contextlib
import itertools
import logging

import torch
import torch.distributed as dist
from torch.nn import functional

from tests.hosts.hf_versions import checkpoint_layers

VOCAB, TOKENS = 48, 40
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MODELS = {
    "llama": BASE,
    "gpt_oss": {
        **BASE, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        **BASE, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4,
    },
    "mixtral": {**BASE, **ROUTER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**BASE, **EXPERTS, **ROUTER, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_next": {
        **BASE, **EXPERTS, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "olmo_hybrid": {**BASE, **DELTA, "linear_num_key_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        **BASE, **EXPERTS, "linear_head_dim": 8, "linear_num_heads": 2, "num_local_experts": 4, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "granitemoehybrid": {
        **BASE, **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bamba": {**BASE, **MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**BASE, **MAMBA, "mamba_d_ssm": 64},
    "lfm2": {**BASE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
}  # fmt: skip
HYBRIDS = ("qwen3_next", "granitemoehybrid", "bamba", "falcon_h1", "lfm2")
ROUTERS = ("mixtral", "qwen3_moe")
"""Models whose loss balances experts over all tokens of the batch."""
CASES = ("plain", "left", "right", "packed", "cu_seq_lens", "seq_idx")
ENDS = ((11, 14, 33), (1, 24))
"""Where documents end in packed rows, beside the row's end."""


def model_of(family, attention="longspan", dtype=torch.float64, **changes):
    """A model with random weights that all matter. In float64 experts run one by one: the grouped matmul has none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**MODELS[family], **changes})
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **experts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).train()


def batch_of(case, seed=3, tokens=TOKENS, rows=2):
    """A batch, and its stretches of real tokens that belong together: (row, start, stop)."""
    draw = torch.Generator().manual_seed(seed)
    rows = 1 if case == "cu_seq_lens" else rows
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.2, -100)
    batch = {"input_ids": ids, "labels": labels}
    if case == "plain":
        return batch, [(row, 0, tokens) for row in range(rows)]
    if case in ("left", "right"):
        mask = torch.ones_like(ids)
        stretches = []
        for row in range(rows):
            num_padding = (9, 0, 4)[(row + seed) % 3]
            start, stop = (num_padding, tokens) if case == "left" else (0, tokens - num_padding)
            mask[row, :start] = 0
            mask[row, stop:] = 0
            labels[row, start] = -100  # the token before it is padding
            stretches.append((row, start, stop))
        labels[mask == 0] = -100
        return {**batch, "attention_mask": mask}, stretches
    positions, stretches = torch.empty_like(ids), []
    for row in range(rows):
        ends = sorted({min(end, tokens) for end in (*ENDS[(row + seed) % 2], tokens)})
        for start, stop in itertools.pairwise((0, *ends)):
            stretches.append((row, start, stop))
            positions[row, start:stop] = torch.arange(stop - start)
    labels[positions == 0] = -100
    batch["position_ids"] = positions
    if case == "seq_idx":
        batch["seq_idx"] = (positions == 0).cumsum(1).int() - 1
    if case == "cu_seq_lens":
        borders = torch.tensor([0, *ends], dtype=torch.int32)
        longest = int(borders.diff().max())
        batch.update(cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=longest, max_length_k=longest)
    return batch, stretches


def one_device(family, case, dtype=torch.float64, **options):
    """The loss and every gradient on one device."""
    batch, stretches = batch_of(case, **options)
    model = model_of(family, "eager" if family == "gpt_oss" else "sdpa", dtype)
    if family in ROUTERS:
        whole = {
            name: batch[name] for name in ("input_ids", "labels", "attention_mask", "position_ids") if name in batch
        }
        with precision(dtype):
            loss = model(**whole, use_cache=False).loss
            loss.backward()
        return float(loss.detach()), gradients(model)
    labels = batch["labels"]
    total = (labels[:, 1:] != -100).sum()
    loss = torch.zeros((), dtype=torch.float64)
    for row, start, stop in stretches:
        ids = batch["input_ids"][row : row + 1, start:stop]
        positions = torch.arange(
            start if case in ("plain", "right") else 0, stop - (0 if case in ("plain", "right") else start)
        )[None]
        with precision(dtype):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
        loss = loss + functional.cross_entropy(logits.double(), labels[row, start + 1 : stop], reduction="sum") / total
    loss.backward()
    return float(loss.detach()), gradients(model)


def precision(dtype):
    """In float64, what modeling files compute in float32 whatever the dtype is computed in float64 too."""
    from longspan.huggingface.prove.trials import Float64Mode

    return Float64Mode() if dtype == torch.float64 else contextlib.nullcontext()


def gradients(model):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def over_ranks(model, batch, sharded=None, called=None, wide=True, **options):
    """On every rank: the whole loss and gradients summed over ranks. `sharded` goes to shard_inputs and `called` runs
    in place of the model, which they wrap."""
    from longspan import huggingface

    model.zero_grad(set_to_none=True)
    inputs = huggingface.shard_inputs(model if sharded is None else sharded, batch, dist.group.WORLD, **options)
    with precision(model.dtype if wide else None):
        output = model(**inputs) if called is None else called(**inputs)
        loss = huggingface.full_loss(output.loss, inputs)
        loss.backward()
    summed = gradients(model)
    for gradient in summed.values():
        dist.all_reduce(gradient)
    return float(loss.detach()), summed


def step(family, case, layout="balanced"):
    """Errors of a training step over ranks, of one device."""
    found = over_ranks(model_of(family), batch_of(case)[0], layout=layout)
    return errors_of(found, one_device(family, case))


def float32_errors(family, case):
    """(errors over ranks, errors of one device) of a step in float32 with gradient checkpointing, of float64."""
    exact = one_device(family, case)
    model = model_of(family, dtype=torch.float32)
    checkpoint_layers(model, {"use_reentrant": False})
    found = over_ranks(model, batch_of(case)[0])
    return errors_of(found, exact)[:2], errors_of(one_device(family, case, torch.float32), exact)[:2]


def errors_of(found, wanted):
    """The error of the loss, and the largest of all gradients with its parameter, each relative to the largest entry of
    that parameter's gradient. Gradients below 1e-6 of the model's largest are 0 but for rounding (biases of keys)."""
    assert found[1].keys() == wanted[1].keys()
    largest = {name: float(right.abs().max()) for name, right in wanted[1].items()}
    least = 1e-6 * max(largest.values())
    worst, name = max(
        (float((found[1][name].double() - right.double()).abs().max()) / max(largest[name], least), name)
        for name, right in wanted[1].items()
    )
    return abs(found[0] - wanted[0]), worst, name


def said(call):
    """What is raised by Longspan, in words, or None."""
    from longspan.errors import LongspanError

    try:
        call()
    except LongspanError as error:
        return f"{type(error).__name__}: {error}"
    return None
