"""What a training step takes: sizes from configurations, bytes at each moment, and what the command says of them. That
sizes are those of real models is shown in tests/hosts/test_sizing_models.py."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from longspan.cli import command
from longspan.errors import PlanError
from longspan.sizing import (
    BUILT_IN,
    RESERVE,
    AttentionBytes,
    Recipe,
    TrainingStep,
    built_in_config,
    sizes_of,
    step_memory,
)
from longspan.sizing.memory import slab_rows
from longspan.sizing.time import recipes

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 100,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
ASKED = ("--seq", "64k", "--ranks", "8", "--machine", "h100", "--scheme", "exchange")


@pytest.fixture
def plan(capsys):
    """Runs `longspan plan`: (exit code, stdout, stderr)."""

    def run(*words):
        code = command.main(("plan", *words))
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def step(sizes, recipe=None, tokens=4096, ranks=8, peak=1 << 20):
    heads = {heads: AttentionBytes(peak, peak) for heads in sizes.attentions}
    return step_memory(TrainingStep(sizes, tokens, ranks, heads, recipe or Recipe()))


def line(moment, name):
    return sum(one.size for one in moment.lines if one.name == name)


# -- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_models_have_the_parameters_that_were_published(name):
    config, billions = BUILT_IN[name]
    assert abs(sizes_of(config).params / 1e9 / billions - 1) < 0.01


def test_models_are_known_by_their_layers():
    kinds = sizes_of(built_in_config("gemma3-27b")).num_blocks
    assert kinds == {"window": 52, "full": 10, "mlp": 62}
    next_ = sizes_of(built_in_config("qwen3-next-80b-a3b"))
    assert next_.num_blocks == {"recurrent": 36, "full": 12, "experts": 48}
    assert 3.5e9 < next_.active_params < 4.2e9  # "A3B" leaves the embedding out
    assert {heads.window for heads in sizes_of(built_in_config("gpt-oss-20b")).attentions} == {None, 127}


WRONG = [
    ({}, "model_type"),
    ({**TINY, "model_type": "gpt5"}, "but got 'gpt5'"),
    ({**TINY, "text_config": {}}, "text_config"),
    ({key: value for key, value in TINY.items() if key != "vocab_size"}, "of a llama has no vocab_size"),
    ({**TINY, "hidden_size": True}, "`hidden_size` of the configuration must be a positive integer, but got True."),
    ({**TINY, "hidden_size": -4}, "hidden_size"),
    ({**TINY, "hidden_size": 64.0}, "got 64.0"),
    ({**TINY, "attention_bias": "yes"}, "attention_bias"),
    ({**TINY, "model_type": "mistral", "num_key_value_heads": None}, "has no num_key_value_heads"),
    (
        {**TINY, "model_type": "olmo3", "sliding_window": 4, "layer_types": ["full_attention"]},
        "layer_types",
    ),
    (
        {**TINY, "model_type": "olmo3", "sliding_window": 4, "layer_types": ["chunked"] * 3},
        "'chunked'",
    ),
    ({**TINY, "model_type": "nemotron_h"}, "neither layers_block_type nor hybrid_override_pattern"),
    ({**TINY, "model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "not ['X']"),
    (
        {**TINY, "model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 9},
        "mamba_n_heads = 8 and mamba_d_head = 9 make 72 features, but the mixer has 128",
    ),
]


@pytest.mark.parametrize(("config", "says"), WRONG)
def test_what_cannot_be_sized_is_refused(config, says):
    with pytest.raises(PlanError) as error:
        sizes_of(config)
    assert says in str(error.value)


def test_the_right_configuration_beside_it_is_taken():
    assert sizes_of(TINY).params == 2 * 100 * 64 + 64 + 3 * (2 * 64 + 64 * (64 + 16 + 16 + 64) + 3 * 64 * 192)
    windows = {**TINY, "model_type": "olmo3", "sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
    assert sizes_of(windows).num_blocks == {"window": 3, "mlp": 3}
    assert sizes_of({**windows, "sliding_window": None}).num_blocks == {"full": 3, "mlp": 3}


# -- bytes ----------------------------------------------------------------------------------------------------------


def test_state_is_sixteen_bytes_a_parameter_over_all_ranks():
    sizes = sizes_of(built_in_config("llama3-8b"))
    for ranks, (state, total) in itertools.product((8, 64), (("float32", 16), ("bfloat16", 8))):
        last = step(sizes, Recipe(state=state), ranks=ranks).moments[-1]
        found = sum(line(last, name) for name in ("parameters", "optimizer", "gradients"))
        assert abs(found * ranks / sizes.params - total) < 1e-4


def test_the_peak_is_a_moment_and_not_the_sum_of_all():
    found = step(sizes_of(TINY))
    assert found.peak.size == max(sum(one.size for one in moment.lines) for moment in found.moments)
    names = {one.name for moment in found.moments for one in moment.lines}
    assert not {"slab of logits", "square roots"} <= {one.name for one in found.peak.lines}
    assert {"slab of logits", "square roots", "one layer", "inputs of layers"} <= names


def test_whole_logits_are_twelve_bytes_a_number():
    sizes = sizes_of(built_in_config("llama3-8b"))
    loss = step(sizes, Recipe(logits=True), tokens=32768).moments[0]
    assert line(loss, "logits") == 32768 * 128256 * 12
    assert line(step(sizes, tokens=32768).moments[0], "slab of logits") < line(loss, "logits") / 20


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_switch_saves(name):
    """On every model; what waits on the host is what left the device, but for what is on its way."""
    sizes = sizes_of(built_in_config(name))
    peaks = [step(sizes, recipe, tokens=131072) for recipe in recipes(Recipe())]
    for more, less in ((0, 1), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5)):
        assert peaks[less].peak.size <= peaks[more].peak.size
    assert peaks[0].peak.size > 2 * peaks[-1].peak.size
    kept, sent = (step(sizes, Recipe(offload=on), tokens=131072).moments[0] for on in (False, True))
    assert step(sizes, Recipe(offload=True), tokens=131072).host == line(kept, "inputs of layers")
    layers = len(sizes.layers)
    assert line(kept, "inputs of layers") * 2 == line(sent, "inputs of layers") * layers


def test_bytes_of_tokens_grow_with_tokens_and_those_of_parameters_with_ranks_only():
    sizes = sizes_of(built_in_config("qwen3-8b"))
    few, many = (step(sizes, tokens=tokens).moments[1] for tokens in (4096, 8192))
    for name in ("inputs of layers", "one layer", "gradients of rows"):
        assert line(many, name) == 2 * line(few, name)
    for name in ("parameters", "optimizer", "gathered layers", "gradient of a layer", "embedding and head"):
        assert line(many, name) == line(few, name)


def test_what_attention_takes_is_counted_where_it_runs():
    sizes = sizes_of(built_in_config("qwen3-8b"))
    huge = step(sizes, peak=1 << 40)
    assert "remote K/V" in {one.name for one in huge.peak.lines}
    assert "remote K/V" not in {one.name for one in huge.moments[0].lines}
    assert huge.peak.size - step(sizes, peak=1 << 39).peak.size == 2 << 39


def test_recipes_that_cannot_be_are_refused():
    for wrong in ({"offload": True, "checkpointing": False}, {"mlp_chunks": 0}, {"state": "int8"}, {"lora": -1}):
        with pytest.raises(PlanError):
            Recipe(**wrong)
    with pytest.raises(PlanError, match="state"):
        Recipe(dtype="float32", state="bfloat16")
    assert replace(Recipe(), offload=True).words == "checkpointing, offload"


def test_adapters_have_state_and_the_frozen_model_has_none():
    """Llama-3-8B with adapters of rank 16 on all linear layers, 41,943,040 parameters, as peft counts them."""
    sizes, adapters = sizes_of(built_in_config("llama3-8b")), 41_943_040
    found = step(sizes, Recipe(lora=16))
    by_name = {moment.name: moment for moment in found.moments}
    last, layer = by_name["optimizer"], by_name["backward of the first layer"]
    assert line(last, "parameters") == 2 * sizes.params // 8
    assert line(last, "adapters") == line(last, "gradients") == 4 * adapters // 8
    assert line(last, "optimizer") == 2 * 4 * adapters // 8
    assert line(layer, "gradient of a layer") == (2 + 4) * adapters // 32
    assert line(layer, "gathered layers") == 2 * 2 * (218_112_000 + adapters // 32)
    names = {one.name for moment in found.moments for one in moment.lines}
    assert not names & {"gradient of the head", "gradient"}
    assert found.host == 0
    # of a token: 2 norms keep no rows for their weights, 7 adapters keep theirs
    kept = [layer.kept_bytes(2, lora) for layer in sizes.layers[:1] for lora in (0, 16)]
    assert kept[0] - kept[1] == 2 * 4096 * 2 - 7 * 16 * 2


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "nemotron-h-8b"])
def test_adapters_that_peft_makes_differently_are_refused(name):
    with pytest.raises(PlanError, match=r"`lora` must be 0 for this model: adapters of (experts|recurrent)"):
        step(sizes_of(built_in_config(name)), Recipe(lora=16))
    assert step(sizes_of(built_in_config(name))).peak.size > 0


def test_an_optimizer_on_the_host_leaves_no_state_on_the_device():
    sizes = sizes_of(built_in_config("llama3-8b"))
    for recipe, state in ((Recipe(), 16), (Recipe(state="bfloat16"), 8)):
        here, there = (step(sizes, replace(recipe, offload_optimizer=on)) for on in (False, True))
        names = {one.name for moment in there.moments for one in moment.lines}
        assert not names & {"parameters", "optimizer", "gradients", "square roots"}
        assert {"embedding and head", "gathered layers", "shards in transit"} <= names
        assert abs(there.host * 8 / sizes.params - state) < 1e-4
        assert here.host == 0
        for one, other in zip(here.moments, there.moments, strict=True):
            assert other.size < one.size
    both = step(sizes, Recipe(offload=True, offload_optimizer=True))
    assert both.host == there.host * 2 + 32 * 4096 * 4096 * 2  # inputs of 32 layers, of 4,096 tokens


def test_slabs_are_those_of_the_loss():
    slabs = pytest.importorskip("longspan.training.loss_without_logits")
    draw = random.Random(0)
    for _ in range(200):
        tokens, words = draw.randrange(1, 1 << draw.randrange(1, 21)), draw.randrange(1, 1 << draw.randrange(1, 19))
        assert slab_rows(tokens, words, 4) == slabs.rows_for(tokens, words, 4)


# -- the command ----------------------------------------------------------------------------------------------------


def test_a_model_on_one_screen(plan):
    words = ("--seq", "256k", "--ranks", "8", "--machine", "h100", "--memory", "80")
    code, out, err = plan("--model", "qwen3-8b", *words)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "qwen3-8b in training, 262,144 tokens on 8 ranks"
    assert max(map(len, lines)) <= 100
    assert "in 80 GB: yes, " in out
    assert "nothing here has run on a GPU" in " ".join(out.split())
    for name in ("parameters", "optimizer", "inputs of layers", "one layer", "backward of the last layer"):
        assert any(line.strip("* ").startswith(name) for line in lines), name


def test_a_file_says_the_same_as_a_name(plan, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(built_in_config("gpt-oss-20b")))
    named = json.loads(plan("--model", "gpt-oss-20b", *ASKED, "--json")[1])
    for given in (path, tmp_path):
        found = json.loads(plan("--config", str(given), *ASKED, "--json")[1])
        assert found["model"].pop("name") == tmp_path.name
        assert {**found, "model": None} == {**named, "model": None}
    assert [one["window"] for one in named["attentions"]] == [127, None]
    assert named["peak_bytes"] == max(moment["bytes"] for moment in named["moments"])
    assert named["fits"] is None


def test_what_does_not_fit_is_a_failed_check_that_says_what_would(plan):
    asked = ("--model", "qwen3-8b", "--seq", "1M", "--ranks", "8", "--machine", "h100", "--scheme", "ring")
    code, out, _ = plan(*asked, "--memory", "80", "--json")
    fits = json.loads(out)["fits"]
    assert (code, fits["fits"]) == (1, False)
    assert fits["fits_with"] == "checkpointing, offload"
    assert fits["fits_with_ranks"] == 16
    assert plan(*asked, "--memory", "80", "--ranks", "16")[0] == 0
    code, out, _ = plan(*asked, "--memory", "80", "--offload", "--json")
    found = json.loads(out)
    assert (code, found["fits"]["fits"]) == (0, True)
    assert found["peak_bytes"] + RESERVE + found["fits"]["bytes_left"] == 80 << 30
    code, out, _ = plan(*asked, "--memory", "30")
    assert code == 1
    assert "with --ranks 32: yes" in " ".join(out.split())
    code, out, _ = plan(*asked, "--memory", "8")  # embedding and head are whole on every rank
    assert code == 1
    assert "the thriftiest recipe below takes" in " ".join(out.split())


REFUSED = [
    (("--model", "gpt5"), "but got 'gpt5'"),
    (("--config", "nowhere.json"), "--config must be"),
    (("--model", "qwen3-8b", "--config", "x"), "not allowed with argument"),
    (("--model", "qwen3-8b", "--q-heads", "8"), "--q-heads must not be set with a model"),
    (("--model", "qwen3-8b", "--window", "8"), "--window must not be set with a model"),
    (("--offload",), "--offload needs a whole model"),
    (("--memory", "80"), "--memory needs a whole model"),
    (("--model", "qwen3-8b", "--no-checkpointing", "--offload"), "Leave checkpointing on"),
    (("--model", "qwen3-8b", "--no-checkpointing", "--keep"), "every layer would keep remote K/V"),
    (("--model", "qwen3-8b", "--dtype", "float32", "--state", "bfloat16"), "computing in float32"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_the_command_refuses(plan, words, says):
    try:
        code, out, err = plan(*words, *ASKED)
    except SystemExit as ended:  # what argparse refuses
        code, out, err = ended.code, "", says
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": 3}', "\xff", '{"model_type": "llama"}'])
def test_files_that_are_no_configuration_are_refused(plan, tmp_path, text):
    path = tmp_path / "model.json"
    path.write_bytes(text.encode("latin-1"))
    code, out, err = plan("--config", str(path), *ASKED)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert str(path) in err


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_model_is_answered_for(plan, name):
    words = ("--seq", "16k", "--ranks", "4", "--machine", "h100", "--scheme", "exchange", "--batch", "2", "--json")
    code, out, err = plan("--model", name, *words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["tokens_per_rank"] == 2 * 16384 // 4
    assert len(found["attentions"]) == len(sizes_of(built_in_config(name)).attentions)


def test_what_is_left_aside_is_said(plan, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**built_in_config("gpt-oss-20b"), "quantization_config": {"quant_method": "mxfp4"}}))
    assert "quantization_config is left aside" in " ".join(plan("--config", str(path), *ASKED)[1].split())
    assert "quantization_config" not in plan("--model", "gpt-oss-20b", *ASKED)[1]


def test_a_model_without_attention_has_no_plan(plan, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**built_in_config("nemotron-h-8b"), "hybrid_override_pattern": "M-M-"}))
    code, out, _ = plan("--config", str(path), "--seq", "16k", "--ranks", "1")
    assert code == 0
    assert "attention  none" in out


def test_without_a_model_figures_are_one_attentions(plan):
    code, out, _ = plan(*ASKED)
    assert code == 0
    assert "figures one attention layer's; --model NAME or --config FILE answers for a whole model" in " ".join(
        out.split()
    )
    assert json.loads(plan(*ASKED, "--json")[1])["figures_of"] == "one attention layer"
    assert "32 query and 8 key/value heads of 128" in out
    assert "16 query and 4 key/value heads of 128" in plan(*ASKED, "--q-heads", "16", "--kv-heads", "4")[1]
