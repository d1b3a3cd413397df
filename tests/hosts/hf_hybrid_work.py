"""Tiny hybrid models of transformers, batches of three kinds, and a whole training step over ranks; importable by name.

The judge is the unchanged model on one device that gets every document alone, with recurrences token by token in
float64: transformers' own compute in float32, and mix packed documents.
"""

import contextlib
import logging
import sys

import torch
import torch.distributed as dist
from torch.nn import functional

from tests.hosts.hf_versions import checkpoint_layers

VOCAB, TOKENS = 48, 41
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
TURNS = {"layer_types": ["linear_attention", "full_attention"] * 2}
MODELS = {
    "qwen3_next": {**BASE, **EXPERTS, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**BASE, **DELTA},
    "qwen3_5_moe_text": {**BASE, **EXPERTS, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**BASE, **DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        **BASE, **EXPERTS, **TURNS, "linear_head_dim": 8, "linear_num_heads": 2, "num_local_experts": 4,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "granitemoehybrid": {
        **BASE, **MAMBA, **TURNS, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
    },
    "bamba": {**BASE, **MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**BASE, **MAMBA, "mamba_d_ssm": 64},
    "nemotron_h": {
        **BASE, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "mlp"],
    },
    "zamba2": {
        **BASE, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_headdim": 8,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "lfm2": {**BASE, "layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": {**BASE, **EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_experts": 4},
}  # fmt: skip
CASES = ("plain", "padded", "packed")
LENGTHS = ([11, 3, 20, 7], [1, 24, 16])
PADDING = ((6, 0), (0, 9))
"""Of each row: tokens of padding in front and at the end."""


def model_of(model_type, attention="longspan", **changes):
    """A model in float64 whose states and gates matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**MODELS[model_type], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch_of(case, seed=3):
    """(batch, stretches of real tokens that belong together: row, start, stop)."""
    torch.manual_seed(seed)
    rows = 2
    ids = torch.randint(3, VOCAB, (rows, TOKENS))
    labels = ids.clone()
    batch = {"input_ids": ids, "labels": labels}
    if case == "plain":
        return batch, [(row, 0, TOKENS) for row in range(rows)]
    if case == "padded":
        mask = torch.ones_like(ids)
        for row, (front, end) in enumerate(PADDING):
            mask[row, :front] = 0
            mask[row, TOKENS - end :] = 0
        labels[mask == 0] = -100
        real = [(row, front, TOKENS - end) for row, (front, end) in enumerate(PADDING)]
        for row, start, _ in real:
            labels[row, start] = -100  # nothing before it is known
        return {**batch, "attention_mask": mask}, real
    stretches = []
    positions = torch.empty_like(ids)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            stretches.append((row, start, start + length))
            positions[row, start : start + length] = torch.arange(length)
            labels[row, start] = -100
            start += length
    return {**batch, "position_ids": positions}, stretches


# -- one device --------------------------------------------------------------------------------------------------------


def _delta(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **_):
    from longspan.mixers.scan_reference import GatedDelta

    out = _tokens(GatedDelta(key.shape[3] ** -0.5, use_qk_l2norm_in_kernel), (query, key, value, g, beta), ())
    return out.to(query.dtype), None


def _ssd(x, dt, A, B, C, chunk_size=None, D=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf")), **_):
    from longspan.mixers.scan_reference import Ssd

    return _tokens(Ssd(dt_softplus, tuple(dt_limit)), (x, dt, B, C), (A, D, dt_bias)).to(x.dtype)


def _tokens(recurrence, tokens, shared):
    import numpy as np

    from longspan.mixers.scan_reference import ScanWork, Segments
    from tests.scan_oracle import recurrence_by_tokens

    batch, length = tokens[0].shape[:2]
    table = np.array([(row, 0, length) for row in range(batch)])
    state = torch.zeros(batch, *recurrence.state_shape(tokens), dtype=torch.float64)
    return recurrence_by_tokens(ScanWork(recurrence, tokens, shared, Segments(table)), state)[0]


JUDGES = {"torch_chunk_gated_delta_rule": _delta, "chunk_kimi_delta_attention": _delta, "mamba2_chunk_scan": _ssd}


@contextlib.contextmanager
def judged(model):
    """The model's recurrences are computed token by token inside."""
    module = sys.modules[type(model).__module__]
    kept = {name: getattr(module, name) for name in JUDGES if hasattr(module, name)}
    try:
        for name in kept:
            setattr(module, name, JUDGES[name])
        yield
    finally:
        for name, function in kept.items():
            setattr(module, name, function)


def widened(function, *args):
    """function(*args), with what modeling files compute in float32 whatever the model's dtype in float64."""
    from unittest import mock

    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
    ):
        return function(*args)


def one_device(model_type, case):
    """The loss, and gradients by parameter, of every document alone."""
    batch, stretches = batch_of(case)
    model = model_of(model_type, "sdpa")
    labels = batch["labels"]
    total = (labels[:, 1:] != -100).sum()
    positions = batch.get("position_ids", torch.arange(TOKENS).expand(2, -1))
    loss = torch.zeros((), dtype=torch.float64)
    with judged(model):
        for row, start, stop in stretches:
            part = slice(row, row + 1), slice(start, stop)
            logits = model(input_ids=batch["input_ids"][part], position_ids=positions[part], use_cache=False).logits
            targets = labels[row, start + 1 : stop]
            loss = loss + functional.cross_entropy(logits[0, :-1].double(), targets, reduction="sum") / total
        loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- over ranks --------------------------------------------------------------------------------------------------------


def step_over_ranks(model_type, case, layout, checkpointing=False):
    """On every rank: the whole loss, and gradients added up over ranks."""
    from longspan import huggingface

    batch, _ = batch_of(case)
    model = model_of(model_type)
    if checkpointing:
        checkpoint_layers(model, {"use_reentrant": False})
    inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD, layout=layout)
    targets, total = inputs.pop("shift_labels"), inputs.pop("num_items_in_batch")
    inputs.pop("labels")
    logits = model(**inputs).logits.double()
    share = (
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100) / total
    )
    share.backward()
    loss = share.detach().clone()
    dist.all_reduce(loss)
    gradients = {}
    for name, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(found)
        gradients[name] = found
    return float(loss), gradients if dist.get_rank() == 0 else {}


# -- what must be noticed, refused or left alone -----------------------------------------------------------------------

REFUSED = {
    "jamba": "mamba_selective_scan",
    "mamba": "mamba_inner_fn",
    "mamba2": "mixer (Mamba2Mixer)",
    "falcon_mamba": "mamba_inner_fn",
    "zamba": "mamba_selective_scan",
    "minimax": "MiniMaxLightningAttention",
    "recurrent_gemma": "RecurrentGemma",
    "inkling_text": "position_bias",
    "zaya": "conv_qk",
    "rwkv": "its layers do not call transformers' attention interface",
    "xlstm": "xLSTM",
}
"""Model types that are refused, and what the refusal speaks of if any model is asked for."""
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
OTHERS = {
    "jamba": {**BASE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "mamba": SMALL,
    "mamba2": {**SMALL, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "falcon_mamba": SMALL,
    "zamba": {
        **BASE, "mamba_d_state": 8, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_hidden_layers": 6, "num_key_value_heads": 4,
    },
    "minimax": {**BASE, "num_local_experts": 2, "block_size": 16},
    "recurrent_gemma": {**BASE, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    "inkling_text": BASE,
    "zaya": BASE,
    "rwkv": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
    "xlstm": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "embedding_dim": 64},
}  # fmt: skip


def said(call):
    """The kind and text of what is raised, or None."""
    from longspan.errors import LongspanError

    try:
        call()
    except LongspanError as error:
        return type(error).__name__, str(error)
    return None


def refusal(model_type, attention="longspan"):
    from transformers import AutoConfig, AutoModelForCausalLM

    from longspan import huggingface

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **OTHERS[model_type]))
    with contextlib.suppress(ValueError):  # rwkv has no attention to name
        model.set_attn_implementation(attention)
    batch = {"input_ids": torch.randint(3, VOCAB, (1, 24))}
    return said(lambda: model(**huggingface.shard_inputs(model, batch, dist.group.WORLD)))


def refusal_of_old(model_type):
    """The same of a type that is not refused today. Before 5.15, its kinds of layers have other names."""
    from tests.hosts.hf_versions import HAS_HYBRIDS

    names = {"linear_attention": "mamba", "full_attention": "attention"}
    if not HAS_HYBRIDS and model_type in ("zamba2", "granitemoehybrid", "nemotron_h"):
        given = MODELS[model_type]
        kinds = {n: [names.get(k, k) for k in given[n]] for n in ("layer_types", "layers_block_type") if n in given}
        OTHERS[model_type] = {**given, **kinds}
    else:
        OTHERS[model_type] = MODELS[model_type]
    return refusal(model_type)


def labels_at_padding():
    """What is said of labels that padding in front would predict, and of the same without them."""
    from longspan import huggingface

    model = model_of("qwen3_next")
    ids = torch.randint(3, VOCAB, (2, 24))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found = []
    for changed in (labels, labels.masked_fill(mask.cumsum(1) <= 1, -100)):
        batch = {"input_ids": ids, "attention_mask": mask, "labels": changed}
        found.append(said(lambda batch=batch: huggingface.shard_inputs(model, batch, dist.group.WORLD)))
    return found


def leak(model_type):
    """By how much transformers itself changes the second document's logits when the first one is another."""
    model = model_of(model_type, "sdpa")
    batch, stretches = batch_of("packed")
    ids, positions = batch["input_ids"][:1].clone(), batch["position_ids"][:1]
    _, start, stop = stretches[0]
    with torch.no_grad():
        before = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, stop:]
        ids[:, start:stop] = (ids[:, start:stop] + 7) % VOCAB
        after = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, stop:]
    return float((before - after).abs().max())


def step_with_loss(lost):
    """A training step in which something gets lost on its way from rank to rank."""
    from unittest import mock

    from longspan.mixers import scan_run
    from longspan.run import halo

    forward, backward = scan_run.RankScan.forward, scan_run.RankScan.backward

    def no_states(self, *args):
        states, kept, number = forward(self, *args)
        return torch.zeros_like(states), kept, number

    patches = {
        "states": mock.patch.object(scan_run.RankScan, "forward", no_states),
        "gradients of states": mock.patch.object(
            scan_run.RankScan, "backward", lambda self, *args: torch.zeros_like(backward(self, *args))
        ),
        "halos": mock.patch.object(halo.HaloForward, "program", zeroed(halo.HaloForward.program)),
        "gradients of halos": mock.patch.object(
            halo.HaloBackward, "__init__", halos_zeroed(halo.HaloBackward.__init__)
        ),
    }
    with patches[lost]:
        return step_over_ranks("qwen3_next", "plain", "zigzag")


def halos_zeroed(init):
    """A backward run whose gradients of the first three rows are zeros: a halo's, on all ranks but the first.

    Walks are recorded once for each plan: a patch of theirs would come too late, and stay."""

    def made(self, task, rows):
        rows = rows.clone()
        if dist.get_rank():
            rows[:, :3] = 0.0
        init(self, task, rows)

    return made


def zeroed(program):
    """Rows with halos, of which the first three of the rank are zeros."""

    def run(self):
        rows = yield from program(self)
        rows = rows.clone()
        if dist.get_rank():
            rows[:, :3] = 0.0
        return rows

    return run


def deaf_layer():
    """One layer's mixer forgets the keyword."""
    from longspan import huggingface

    model = model_of("qwen3_next")
    batch, _ = batch_of("plain")
    inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD)
    mixer = model.model.layers[0].linear_attn
    forward = mixer.forward
    mixer.forward = lambda *args, longspan=None, **kwargs: forward(*args, **kwargs)
    return said(lambda: model(**inputs))


def meaningless(what):
    from longspan import huggingface

    model = model_of("qwen3_next")
    batch, _ = batch_of("plain")
    if what == "cache":
        batch["use_cache"] = True
    else:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, [0, 9, 20]] = 0
    return said(lambda: huggingface.shard_inputs(model, batch, dist.group.WORLD))


def routed_and_not():
    from longspan.huggingface.mixers import route

    model = model_of("qwen3_next", "sdpa")
    batch, _ = batch_of("plain")
    logits = []
    for _ in range(2):
        with torch.no_grad():
            logits.append(model(input_ids=batch["input_ids"], use_cache=False).logits)
        route(model)
    return logits
