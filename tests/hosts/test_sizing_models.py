"""Sizes of models against the models themselves, as transformers builds and runs them: every parameter of every family,
and what autograd keeps of a token in a layer."""

import importlib
import json
from collections import Counter

import pytest
import torch

import longspan.huggingface  # noqa: F401  (registers the attention)
from longspan.huggingface.structure import transformers_version
from longspan.sizing import FAMILIES, AttentionBytes, Recipe, TrainingStep, sizes_of, step_memory
from longspan.sizing.memory import why_no_lora
from longspan.training import tile
from tests.hosts.fsdp_memory_work import phases
from tests.hosts.hf_versions import checkpoint_layers
from tests.pool import pool
from tests.sizing_cases import MEASURED, TINY, config_of
from tests.unit.test_bytes_memory import Ledger

transformers = pytest.importorskip("transformers")

SWITCHES = (
    {}, {"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}, {"mamba_proj_bias": True},
    {"mamba_rms_norm": True}, {"mamba_conv_bias": False}, {"conv_bias": True}, {"full_attn_idxs": [1]},
    {"attn_layer_indices": [0]}, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {"q_lora_rank": None}, {"first_k_dense_replace": 1},
    {"num_local_experts": 0}, {"use_bias": True}, {"use_conv_bias": False},
    {"projectors_bias": True},
)  # fmt: skip


def made(name, layers, **more):
    """A configuration of so many layers."""
    number = {"num_hidden_layers": layers} if layers else {}
    return transformers.AutoConfig.for_model(name, **{**TINY[name][1], **number, **more})


def as_json(config):
    return json.loads(json.dumps(config.to_dict(), default=str))


def test_all_families_are_tried():
    assert sorted(TINY) == sorted(FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_is_counted(name):
    defaults = transformers.AutoConfig.for_model(name)
    configs = [defaults]
    for switch in SWITCHES:
        known = switch.keys() <= defaults.to_dict().keys() | {"attn_layer_indices"}
        if known and not (switch == {"num_local_experts": 0} and name != "granitemoehybrid"):
            configs.append(made(name, 4 if TINY[name][0] else 0, **switch))
    for config in configs:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert sizes_of(as_json(config)).params == sum(p.numel() for p in model.parameters()), config


class Kept(torch.autograd.Function):
    """Stands for a kernel: keeps what it is given."""

    @staticmethod
    def forward(ctx, out, *tensors):
        ctx.save_for_backward(*tensors)
        return out.clone()

    @staticmethod
    def backward(ctx, *grads):
        return (grads[0], *(None for _ in ctx.saved_tensors))


def delta_kernel(query, key, value, g, beta, **_):
    """What fla's kernel keeps: its inputs, their norms, and a row of a chunk's triangle for each head and token."""
    triangle = query.new_zeros((*value.shape[:3], 64))
    norms = [x.detach().float().sum(-1) for x in (query, key)]
    return Kept.apply(value, query, key, value, g.detach() * 1.0, beta, triangle, *norms), None


def scan_kernel(x, dt, A, B, C, *_, **__):
    """What mamba_ssm's kernel keeps: its inputs, its output and its sums of decays."""
    out = x * 1.0
    return Kept.apply(out, x, dt, B, C, out, dt.detach().float())


def kept(model, ids):
    """Bytes that autograd keeps in a forward pass, each storage once, without those of parameters; by shape."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes():
            found[storage.data_ptr()] = (storage.nbytes(), tuple(tensor.shape), tensor.dtype)
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=ids, use_cache=False)
    return Counter(found.values())


def stubbed(monkeypatch, model):
    """Recurrences of transformers written in plain PyTorch keep more than the kernels that train."""
    module = importlib.import_module(type(model).__module__)
    for name, kernel in (("torch_chunk_gated_delta_rule", delta_kernel), ("mamba2_chunk_scan", scan_kernel)):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, kernel)


def measured(monkeypatch, name, dtype, tokens=64, **more):
    """Bytes per token of the layers of one period: those of a model of two periods without those of one."""
    period = TINY[name][0]
    ids, both = torch.randint(3, 90, (1, tokens)), []
    for periods in (1, 2):
        config = made(name, period * periods, **more)
        if not period:
            config = made(name, 0, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"] * periods)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="longspan", dtype=dtype)
        stubbed(monkeypatch, model)
        both.append((sizes_of(as_json(config)), kept(model.train(), ids)))
    (less, few), (most, many) = both
    extra = many - few
    size = torch.finfo(dtype).bits // 8
    expected = sum(x.kept_bytes(size) for x in most.layers) - sum(x.kept_bytes(size) for x in less.layers)
    return sum(key[0] * count for key, count in extra.items()) / tokens, expected, extra


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", TINY)
def test_what_a_layer_keeps(monkeypatch, name, dtype):
    torch.manual_seed(0)
    found, expected, extra = measured(monkeypatch, name, dtype)
    listed = "\n".join(f"{n} x {size / 64:.0f} {shape} {kind}" for (size, shape, kind), n in extra.items())
    assert abs(expected / found - 1) < 0.1, f"{expected} for {found}:\n{listed}"
    if dtype == torch.bfloat16 and transformers_version() >= (5, 23):  # before, layers repeat the keys of delta rules
        assert abs(MEASURED[name] / found - 1) < 0.01, f"tests/sizing_cases.py has {MEASURED[name]} for {found}"


DENSE = [name for name in TINY if why_no_lora(sizes_of(config_of(name))) is None]


@pytest.mark.parametrize("name", DENSE)
def test_adapters_are_those_of_peft(monkeypatch, name):
    """Every parameter of adapters of all linear layers, and what layers keep beside frozen weights."""
    peft = pytest.importorskip("peft")
    ids, both = torch.randint(3, 90, (1, 64)), []
    for periods in (1, 2):
        made_of = made(name, TINY[name][0] * periods)
        model = transformers.AutoModelForCausalLM.from_config(
            made_of, attn_implementation="longspan", dtype=torch.bfloat16
        )
        config = peft.LoraConfig(r=4, target_modules="all-linear")  # peft writes the model's own names into it
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)  # as FSDP2 computes, in bfloat16
        model.enable_input_require_grads()
        sizes = sizes_of(as_json(made_of))
        assert sizes.adapters(4) == sum(p.numel() for p in model.parameters() if p.requires_grad)
        both.append((sum(layer.kept_bytes(2, 4) for layer in sizes.layers), kept(model.train().base_model.model, ids)))
    (less, few), (most, many) = both
    found = sum(key[0] * count for key, count in (many - few).items()) / 64
    assert abs((most - less) / found - 1) < 0.01


def most(model, tokens):
    """The most bytes that are alive at once in forward and backward, gradients of parameters included."""
    ids = torch.randint(3, 90, (1, tokens))
    ledger = Ledger((*model.parameters(), *model.buffers()))
    with ledger:
        out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        out.backward(torch.randn_like(out))
    return ledger.peak(())


@pytest.mark.parametrize("chunks", [1, 8], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "qwen3_5_text", "bamba", "lfm2"])
def test_the_backward_of_a_checkpointed_layer(monkeypatch, name, chunks):
    """What one more token adds to the peak of a model of one layer, whole and with MLPs and norms in chunks."""
    torch.manual_seed(0)
    config = made(name, 1)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="longspan", dtype=torch.bfloat16
    ).train()
    stubbed(monkeypatch, model)
    checkpoint_layers(model, {"use_reentrant": False})
    if chunks > 1:
        tile(model, chunks)
    slope = (most(model, 1024) - most(model, 512)) / 512
    sizes = sizes_of(as_json(config))
    heads = {heads: AttentionBytes(0, 0) for heads in sizes.attentions}  # on one device nothing is remote
    sums = [
        sum(line.size for line in moment.lines if line.name in OF_TOKENS)
        for moment in step_memory(TrainingStep(sizes, 1000, 1, heads, Recipe(mlp_chunks=chunks))).moments
    ]
    over = 0.1 if chunks == 1 else 0.25  # experts in chunks free what is counted
    assert -0.1 < max(sums) / 1000 / slope - 1 < over, (max(sums) / 1000, slope)


OF_TOKENS = ("inputs of layers", "one layer", "gradients of rows")


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("words", "tokens", "checkpointing"),
    [(100, 2048, True), (100, 2048, False), (100, 64, True), (20000, 64, True)],
    ids=["tokens", "kept", "parameters", "vocabulary"],
)
def test_a_step_under_fsdp(words, tokens, checkpointing):
    """Backward and optimizer on two Gloo ranks, where tokens, parameters or the vocabulary take most."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6, "vocab_size": words,
        "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    sizes = sizes_of(config)
    heads = {heads: AttentionBytes(0, 0) for heads in sizes.attentions}  # each rank has a sequence of its own
    moments = step_memory(TrainingStep(sizes, tokens, 2, heads, Recipe(checkpointing))).moments
    # there is no head and no loss here
    *_, last, first, end, optimizer = (
        sum(line.size for line in moment.lines if line.name != "gradient of the head") for moment in moments
    )
    for found in pool(2).run(phases, config, tokens, checkpointing, timeout=200.0):
        assert abs(max(last, first, end) / found["backward"] - 1) < 0.1, (last, first, end, found)
        assert abs(optimizer / found["optimizer"] - 1) < 0.15, (optimizer, found)
