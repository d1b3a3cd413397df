"""Tiny copies of configurations: small, of the same kinds of layers, with what decides about results as it was; and
models made from them, whose weights show what they do."""

import copy
import random
import time

import numpy as np
import pytest
import torch

from tests.hosts.hf_published import PUBLISHED, config_of, model_class

pytest.importorskip("transformers")

from longspan.huggingface.prove.tiny import CannotShrinkError, build, special_tokens, tiny_config

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
DEFAULTS = (
    "mistral", "mixtral", "bloom", "falcon", "gpt2", "mamba2", "recurrent_gemma", "gemma3n_text", "longcat_flash",
    "deepseek_v2", "kimi_linear", "qwen3_vl", "lfm2", "cohere2", "xlnet", "minimax",
)  # fmt: skip
"""Default configurations, of families of different kinds."""


def default(family):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**({"num_experts_per_tok": 6} if family == "deepseek_v2" else {}))


def parts(config):
    """The configuration and all parts of it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from parts(value)


def batch_of(config, rows=2, tokens=40):
    allowed = [n for n in range(config.get_text_config().vocab_size) if n not in special_tokens(config)]
    ids = torch.tensor(random.Random(1).choices(allowed, k=rows * tokens)).view(rows, tokens)
    return {"input_ids": ids, "labels": ids}


def stepped(model):
    out = model(**batch_of(model.config))
    out.loss.backward()
    return out


@pytest.mark.parametrize("name", [*PUBLISHED, *DEFAULTS])
def test_a_tiny_copy_is_small_runs_and_every_layer_takes_part(name):
    config = config_of(name) if name in PUBLISHED else default(name)
    began = time.process_time()
    tiny = tiny_config(config)
    model = build(model_class(config), tiny)
    assert type(tiny) is type(config)
    assert time.process_time() - began < 3  # 0.02 to 0.3 s, on a machine that others use
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert next(model.parameters()).dtype == torch.float64
    assert model.training
    out = stepped(model)
    assert torch.isfinite(out.logits).all()
    assert out.logits.std() > 1e-3
    used = [n for n, p in model.named_parameters() if p.grad is not None and float(p.grad.abs().max()) > 0]
    layers = {tuple(n.split(".")[:3]) for n, _ in model.named_parameters() if ".layers." in n and "vision" not in n}
    idle = layers - {tuple(n.split(".")[:3]) for n in used}
    assert not {layer for layer in idle if layer[1] == "layers"}


@pytest.mark.parametrize("name", [*PUBLISHED, *DEFAULTS])
def test_nothing_random_is_left_in_a_step(name):
    """Dropout of all kinds is off: two steps are the same, bit for bit."""
    config = config_of(name) if name in PUBLISHED else default(name)
    model = build(model_class(config), tiny_config(config))
    with torch.no_grad():
        first, second = (model(**batch_of(model.config)).logits for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_kind_of_layer_stays_and_none_comes(name):
    config = config_of(name)
    tiny = tiny_config(config)
    for then, now in zip(parts(config), parts(tiny), strict=True):
        for attribute in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"):
            if isinstance(getattr(then, attribute, None), list):
                assert set(getattr(now, attribute)) == set(getattr(then, attribute)), attribute
                assert len(getattr(now, attribute)) == now.num_hidden_layers < then.num_hidden_layers


def combinations(config):
    moe, pairs = set(config.moe_layers), zip(config.layer_types, config.no_rope_layers, strict=True)
    return {(kind, rope, n in moe) for n, (kind, rope) in enumerate(pairs)}


def test_combinations_stay():
    """Llama 4 Maverick: chunks with and without experts, and full attention with experts and without rotation."""
    config = config_of("Llama-4-Maverick")
    assert combinations(tiny_config(config)) == combinations(config)
    assert len(combinations(config)) == 3


def test_dense_layers_at_the_start_and_experts_after():
    tiny = tiny_config(config_of("DeepSeek-V3"))
    assert (tiny.num_hidden_layers, tiny.first_k_dense_replace) == (2, 1)
    kinds = [type(layer.mlp).__name__ for layer in build(model_class(tiny), tiny).model.layers]
    assert kinds == ["DeepseekV3MLP", "DeepseekV3MoE"]


def test_dense_layers_by_number():
    from transformers import Qwen3MoeConfig

    tiny = tiny_config(Qwen3MoeConfig(mlp_only_layers=[0, 5, 6], num_hidden_layers=24))
    assert tiny.mlp_only_layers == [0]
    assert tiny.num_hidden_layers == 2


def test_shared_caches_at_the_end():
    """The last layers of Gemma 3n take keys and values of earlier ones of their kind."""
    tiny = tiny_config(default("gemma3n_text"))
    shared = tiny.num_kv_shared_layers
    assert 0 < shared < tiny.num_hidden_layers
    assert set(tiny.layer_types[-shared:]) <= set(tiny.layer_types[:-shared])


def test_settings_of_single_layers_stay():
    """Full attention of Gemma 4 has heads of twice the size."""
    config = default("gemma4_text")
    tiny = tiny_config(config)
    then = config.per_layer_config["full_attention"].head_dim / config.per_layer_config["sliding_attention"].head_dim
    full, near = (tiny.per_layer_config[kind].head_dim for kind in ("full_attention", "sliding_attention"))
    assert full / near == then == 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_decides_about_results_stays(name):
    config, kept = (
        config_of(name),
        ("activation", "hidden_act", "softcap", "scaling_factor", "bias", "tie", "multiplier"),
    )
    tiny = tiny_config(config)
    for then, now in zip(parts(config), parts(tiny), strict=True):
        for attribute, value in vars(then).items():
            flag = isinstance(value, (bool, str))
            if flag or (any(word in attribute for word in kept) and isinstance(value, (bool, str, float))):
                assert getattr(now, attribute) == value, attribute


def test_rotary_embeddings_switch_within_a_test():
    for name, kind in (("Llama-3.1-8B", "llama3"), ("DeepSeek-V3", "yarn"), ("Phi-3-mini-128k", "longrope")):
        rope = tiny_config(config_of(name)).rope_parameters
        assert rope["rope_type"] == kind
        assert rope["original_max_position_embeddings"] == 24
    tiny = tiny_config(config_of("Phi-3-mini-128k"))
    assert len(rope["long_factor"]) == len(rope["short_factor"]) == tiny.hidden_size // tiny.num_attention_heads // 2
    assert rope["long_factor"] != rope["short_factor"]


def test_dynamic_rotary_embeddings_switch_at_the_end_of_the_table():
    from transformers import LlamaConfig

    tiny = tiny_config(LlamaConfig(rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert tiny.max_position_embeddings == 24
    assert tiny_config(LlamaConfig()).max_position_embeddings == 128


def test_sections_of_several_axes_fill_the_rotated_features():
    tiny = tiny_config(config_of("Qwen2.5-VL-7B")).get_text_config()
    assert tiny.rope_parameters["mrope_section"] == [2, 3, 3]
    assert 2 * sum(tiny.rope_parameters["mrope_section"]) == tiny.hidden_size // tiny.num_attention_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"), [(32, 8, (4, 2)), (32, 32, (4, 4)), (71, 1, (4, 1)), (1, 1, (1, 1))]
)
def test_heads_keep_their_kind_of_ratio(heads, kv_heads, expected):
    from transformers import LlamaConfig

    tiny = tiny_config(
        LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=64 * heads, head_dim=64)
    )
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == expected
    assert tiny.hidden_size == tiny.num_attention_heads * tiny.head_dim


def test_heads_that_are_wider_than_features_stay_so():
    """Qwen3's heads have more features together than the model."""
    from transformers import Qwen3Config

    tiny = tiny_config(Qwen3Config(hidden_size=1024, num_attention_heads=16, head_dim=128))
    assert tiny.num_attention_heads * tiny.head_dim > tiny.hidden_size


@pytest.mark.parametrize("name", PUBLISHED)
def test_special_tokens_are_in_the_vocabulary_and_apart(name):
    config = config_of(name)
    tiny = tiny_config(config)
    assert max(special_tokens(tiny), default=0) < tiny.get_text_config().vocab_size <= 128
    assert len(special_tokens(tiny)) == len(special_tokens(config))
    assert len(special_tokens(tiny)) < 20


def test_special_tokens_of_a_small_vocabulary_stay_in_it():
    from transformers import LlamaConfig

    tiny = tiny_config(LlamaConfig(vocab_size=100, eos_token_id=99, bos_token_id=70, pad_token_id=3))
    assert (tiny.vocab_size, tiny.pad_token_id) == (100, 3)
    assert {tiny.eos_token_id, tiny.bos_token_id} == {98, 99}


def test_kernels_and_quantization_of_the_real_model_are_not_asked_for():
    config = config_of("gemma-3-4b")
    config._attn_implementation = {"text_config": "eager", "vision_config": "flash_attention_2"}
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tiny = tiny_config(config)
    assert tiny.text_config._attn_implementation == "eager"
    assert tiny.vision_config._attn_implementation is None
    config._attn_implementation = "longspan"  # parts with a table of their own (SAM) cannot be built with it
    assert tiny_config(config).text_config._attn_implementation is None
    assert not hasattr(tiny, "quantization_config")
    stepped(build(model_class(config), tiny))


def test_sizes_of_parts_still_fit():
    tiny = tiny_config(config_of("Qwen2.5-VL-7B"))
    assert tiny.vision_config.out_hidden_size == tiny.get_text_config().hidden_size


def test_windows_and_chunks_matter_in_forty_tokens():
    assert tiny_config(default("mistral")).sliding_window == 7
    assert tiny_config(config_of("Llama-4-Maverick")).attention_chunk_size == 8
    assert tiny_config(config_of("Qwen2.5-VL-7B")).get_text_config().sliding_window is None


def test_the_given_configuration_is_not_changed():
    config = config_of("gemma-3-4b")
    before = copy.deepcopy(config.to_dict())
    build(model_class(config), tiny_config(config))
    assert config.to_dict() == before


def test_the_same_seed_the_same_model_and_another_seed_another():
    tiny = tiny_config(config_of("Llama-3.1-8B"))
    first, again, other = (build(model_class(tiny), tiny, seed=seed).state_dict() for seed in (4, 4, 5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if "weight" in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_generators_outside_go_on_as_if_nothing_was_drawn():
    def three():
        return torch.rand(3), np.random.rand(3), [random.random() for _ in range(3)]

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = three()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    tiny = tiny_config(default("recurrent_gemma"))
    build(model_class(tiny), tiny)
    found = three()
    assert torch.equal(expected[0], found[0])
    assert np.array_equal(expected[1], found[1])
    assert expected[2] == found[2]


@pytest.mark.parametrize("name", ["gemma-3-4b", "gpt-oss-20b", "Qwen3-Next-80B-A3B", "Zamba2-7B"])
def test_weights_are_neither_zero_nor_one(name):
    """Norms of Gemma start at 0, sinks of GPT-OSS anywhere, rates of recurrences where they are sensible."""
    tiny = tiny_config(config_of(name))
    for weight_name, weight in build(model_class(tiny), tiny).named_parameters():
        assert torch.isfinite(weight).all(), weight_name
        assert float((weight == 0).double().mean()) == 0, weight_name
        assert float((weight == 1).double().mean()) == 0, weight_name
        assert float(weight.abs().max()) < 30, weight_name
        if weight.numel() > 8:
            assert float(weight.std()) > 0.01, weight_name


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "gemma-3-4b"])
def test_a_tiny_copy_sees_an_image(name):
    """Sizes of its part for images fit: 4 x 4 patches become 4 tokens, and gradients come back to the first layer."""
    model = build(model_class(config_of(name)), tiny_config(config_of(name)))
    draw = torch.Generator().manual_seed(1)
    patch = model.config.vision_config.patch_size
    pixels = torch.randn(1, 3, 4 * patch, 4 * patch, generator=draw, dtype=torch.float64)
    batch = batch_of(model.config, rows=1)
    place = model.config.image_token_id
    batch["input_ids"][0, 9:13] = place
    if name.startswith("Qwen"):
        flat = torch.randn(16, 3 * 2 * patch * patch, generator=draw, dtype=torch.float64)
        images = {"pixel_values": flat, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    else:
        images = {"pixel_values": pixels, "token_type_ids": (batch["input_ids"] == place).long()}
    model(**batch, **images).loss.backward()
    first = next(p for n, p in model.named_parameters() if "patch_embed" in n)
    assert float(first.grad.abs().max()) > 0


# -- what cannot be shrunk ---------------------------------------------------------------------------------------------


def test_what_is_no_configuration_is_refused():
    with pytest.raises(CannotShrinkError, match="a configuration of transformers, but got dict"):
        tiny_config({"hidden_size": 4})


def test_a_model_that_cannot_be_made_says_whose_error_it_is():
    from transformers import Dots1Config, Dots1ForCausalLM

    config = tiny_config(Dots1Config(n_routed_experts=None))
    with pytest.raises(CannotShrinkError, match=r"'dots1'.*Dots1ForCausalLM could not be built from it: TypeError"):
        build(Dots1ForCausalLM, config)
    build(Dots1ForCausalLM, tiny_config(Dots1Config(n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2)))


def test_code_of_a_repository_is_named_as_such():
    from transformers import LlamaConfig, LlamaForCausalLM

    class Broken(LlamaForCausalLM):
        def __init__(self, config):
            raise ImportError("needs a GPU")

    Broken.__module__ = "transformers_modules.somebody.modeling"
    with pytest.raises(
        CannotShrinkError, match=r"Broken \(code of its own repository, trust_remote_code\).*needs a GPU"
    ):
        build(Broken, tiny_config(LlamaConfig()))


def test_a_copy_that_its_own_class_refuses_is_refused_here():
    from transformers import LlamaConfig

    class FixedConfig(LlamaConfig):
        model_type = "fixed"

        def validate_architecture(self):
            if self.hidden_size != 4096:
                raise ValueError("tables are for 4096 features")

    with pytest.raises(CannotShrinkError, match=r"FixedConfig \(fixed\).*validate_architecture.*4096 features"):
        tiny_config(FixedConfig())


def test_an_unknown_family_works_by_names_alone():
    """A configuration that no table knows, with a model around it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class NewConfig(Qwen2Config):
        model_type = "new_family"

    kinds = ["full_attention"] * 20 + ["sliding_attention"] * 12
    tiny = tiny_config(NewConfig(layer_types=kinds, sliding_window=99, use_sliding_window=True))
    assert tiny.layer_types == ["full_attention", "sliding_attention"]
    assert tiny.sliding_window == 7
    assert isinstance(build(Qwen2ForCausalLM, tiny).config, NewConfig)
