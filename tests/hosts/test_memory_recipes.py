"""The recipes of docs/memory.md: MLPs in chunks and inputs of layers on the host are exact, and save what the page and
the command say."""

import re
from pathlib import Path

import pytest
import torch

from longspan import huggingface
from tests.hosts.hf_versions import checkpoint_layers
from tests.unit.test_bytes_memory import Ledger

transformers = pytest.importorskip("transformers")

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
SIZES = {
    "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 100, "num_hidden_layers": 4,
}  # fmt: skip


def recipe():
    """The function that the page shows, as it is printed there."""
    (code,) = re.findall(r"^(def in_chunks.*?)\n\n\n", PAGE, re.DOTALL | re.MULTILINE)
    names = {"torch": torch, "checkpoint": torch.utils.checkpoint.checkpoint}
    exec(compile(code, "docs/memory.md", "exec"), names)
    return names["in_chunks"]


def made(name, dtype, **more):
    huggingface.register()
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
def test_an_mlp_in_chunks_is_exact(name, more, tokens):
    """In float64, with layers checkpointed and without; tokens that do not divide too."""
    model = made(name, torch.float64, **more)
    ids, dout = torch.randint(3, 90, (2, tokens)), torch.randn(2, tokens, 64, dtype=torch.float64)
    expected = stepped(model, ids, dout)
    in_chunks = recipe()
    for layer in model.model.layers:
        layer.mlp.forward = in_chunks(layer.mlp.forward, 8)
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_layers(model)
        for ours, theirs in zip(stepped(model, ids, dout), expected, strict=True):
            # a router's softmax is in float32, whatever the model computes in
            bar = 1e-6 if name == "qwen3_moe" else 1e-12
            assert (ours - theirs).abs().max() <= bar * max(1.0, theirs.abs().max())


def test_an_mlp_in_chunks_saves_memory():
    """To a third, where an MLP of eight times the hidden size is most of what a layer keeps."""
    tokens = 2048
    ids, dout = torch.randint(3, 90, (1, tokens)), torch.randn(1, tokens, 64)
    model = made("llama", torch.float32, intermediate_size=512)
    checkpoint_layers(model)
    whole, expected = peak(model, ids, dout)
    in_chunks = recipe()
    for layer in model.model.layers:
        layer.mlp.forward = in_chunks(layer.mlp.forward, 8)
    chunked, found = peak(model, ids, dout)
    assert 0.3 * whole < chunked < 0.42 * whole, (chunked, whole, chunked / whole)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


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
