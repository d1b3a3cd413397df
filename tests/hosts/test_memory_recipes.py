"""The recipes of docs/memory.md: MLPs in chunks and inputs of layers on the host are exact, and save what the page and
the command say."""

import copy

import pytest
import torch
from torch import nn

import longspan.huggingface  # noqa: F401  (registers the attention)
from longspan.training import tile
from tests.hosts.hf_versions import checkpoint_layers
from tests.unit.test_bytes_memory import Ledger

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 100, "num_hidden_layers": 4,
}  # fmt: skip


def made(name, dtype, **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **more}, pad_token_id=None)
    options = {"attn_implementation": "longspan", "dtype": dtype}
    if name == "qwen3_moe":
        options["experts_implementation"] = "eager"  # grouped products know no float64
    return transformers.AutoModelForCausalLM.from_config(config, **options).train()


def stepped(model, ids, dout):
    """Output and gradients of all parameters."""
    out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return [out.detach(), *torch.autograd.grad(out, list(model.base_model.parameters()), dout)]


def peak(model, ids, dout):
    ledger = Ledger((*model.parameters(), *model.buffers(), ids, dout))
    with ledger:
        found = stepped(model, ids, dout)
    return ledger.peak(()), found


@pytest.mark.share(3)
@pytest.mark.parametrize("tokens", [96, 101])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
        ("gemma2", {}),
    ],
    ids=["llama", "qwen3_moe", "gemma2"],
)
def test_tiles_are_exact(name, more, tokens):
    """In float64, with layers checkpointed and without; tokens that do not divide too."""
    model = made(name, torch.float64, **more)
    ids, dout = torch.randint(3, 90, (2, tokens)), torch.randn(2, tokens, 64, dtype=torch.float64)
    expected = stepped(model, ids, dout)
    named = [name for name, _ in model.base_model.named_parameters()]
    tiled = tile(model, 8)
    assert {"model.layers.0.mlp", "model.layers.3.input_layernorm", "model.norm"} <= {*tiled}
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_layers(model)
        for what, ours, theirs in zip(["out", *named], stepped(model, ids, dout), expected, strict=True):
            # A router's softmax and norms are in float32, whatever the model computes in, as are their sums.
            bar = 1e-5 if name == "qwen3_moe" or "norm" in what else 1e-12
            assert (ours - theirs).abs().max() <= bar * max(1.0, theirs.abs().max()), what


def test_tiles_save_memory():
    """To a third, where an MLP of eight times the hidden size is most of what a layer keeps."""
    tokens = 2048
    ids, dout = torch.randint(3, 90, (1, tokens)), torch.randn(1, tokens, 64)
    model = made("llama", torch.float32, intermediate_size=512)
    checkpoint_layers(model)
    whole, expected = peak(model, ids, dout)
    mlps = copy.deepcopy(model)
    tile(mlps, 8, modules=[layer.mlp for layer in mlps.model.layers])
    chunked, _ = peak(mlps, ids, dout)
    assert 0.3 * whole < chunked < 0.42 * whole, (chunked, whole, chunked / whole)
    tile(model, 8)
    both, found = peak(model, ids, dout)
    assert both < 0.95 * chunked, (both, chunked, both / chunked)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


class Layer(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        return self.mlp(hidden)


def test_modules_that_cannot_be_tiled_are_refused():
    hidden = torch.randn(1, 12, 8)
    with pytest.raises(ValueError, match=r"no dropout.*modules="):
        tile(Layer(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))))
    layer = Layer(nn.Linear(8, 8))
    tile(layer, 2)
    with pytest.raises(ValueError, match="Call tile once"):
        tile(layer, 2)
    with pytest.raises(ValueError, match="`chunks` must be a positive integer, but got 0"):
        tile(Layer(nn.Linear(8, 8)), 0)
    with pytest.raises(ValueError, match="are in Linear"):
        tile(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="0 of 1 are in"):
        tile(Layer(nn.Linear(8, 8)), modules=[nn.Linear(8, 8)])
    layer = Layer(nn.Identity())
    tile(layer, 2)
    with pytest.raises(TypeError, match="one tensor"):
        layer.mlp(hidden, hidden)


def test_router_losses_are_refused_in_tiles():
    model = made("qwen3_moe", torch.float32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    tile(model, 2)
    ids = torch.randint(3, 90, (1, 12))
    model(input_ids=ids, labels=ids)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits"):
        model(input_ids=ids, labels=ids)


def test_copies_and_compiled_models_use_their_own_parameters():
    layer, hidden = Layer(nn.Linear(8, 8)), torch.randn(2, 12, 8)
    tile(layer, 3)
    whole = layer(hidden)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)(hidden)
    assert torch.equal(compiled, whole)
    other = copy.deepcopy(layer)
    nn.init.zeros_(other.mlp.weight)
    nn.init.zeros_(other.mlp.bias)
    assert other(hidden).abs().max() == 0
    assert torch.equal(layer(hidden), whole)
    with torch.no_grad():
        assert torch.allclose(layer(hidden[:, :1]), whole[:, :1], atol=1e-6)


class Host(torch.autograd.graph.saved_tensors_hooks):
    """What `save_on_cpu` does, on a machine whose only memory is its host's: counts what leaves, and copies it."""

    def __init__(self):
        self.sizes = []

        def pack(tensor):
            self.sizes.append(tensor.numel() * tensor.element_size())
            return tensor.clone()

        super().__init__(pack, lambda tensor: tensor)


def test_inputs_of_layers_on_the_host_are_exact_and_are_all_that_leaves():
    tokens = 64
    model = made("llama", torch.bfloat16)
    ids, dout = torch.randint(3, 90, (1, tokens)), torch.randn(1, tokens, 64).bfloat16()
    checkpoint_layers(model)
    expected = stepped(model, ids, dout)
    for hooks in (Host(), torch.autograd.graph.save_on_cpu()):
        with hooks:
            out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = [out.detach(), *torch.autograd.grad(out, list(model.base_model.parameters()), dout)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        if isinstance(hooks, Host):
            assert hooks.sizes.count(tokens * 64 * 2) >= 4  # an input for each of four layers
            assert sum(hooks.sizes) < 1.5 * 4 * tokens * 64 * 2 + 8 * tokens * 64 * 4
