"""How long a training step takes and what it costs: worked out by hand on a machine of round rates, and what the
command says of it. That it is near published runs is shown by test_published_models.py."""

import json
import math
from dataclasses import replace

import pytest

from longspan.cli import command
from longspan.errors import PlanError
from longspan.planning.machine import CPU, H100, MACHINES, Link, machine_text, parse_machine
from longspan.sizing import (
    BUILT_IN,
    AttentionBytes,
    AttentionSeconds,
    Recipe,
    StepCost,
    TrainingStep,
    built_in_config,
    model_flop,
    sizes_of,
    step_time,
    why_no_time,
)
from longspan.sizing.recommend import numbers_of_gpus
from longspan.sizing.time import gather_seconds

FAST = Link(1 << 30, 1e18, 0.0)
ROUND = replace(
    H100, flops=1e15, matmul_share=0.5, copy_bandwidth=1e12, host_bandwidth=1e10, links=(FAST,), name="round"
)  # fmt: skip
LLAMA = sizes_of(built_in_config("llama3-8b"))
LAYER, INNER = 218_112_000, 3 * 4096 * 14336 + 4096
"""Parameters of a layer of Llama-3-8B, and of its MLP with the norm before it."""
ASKED = ("--seq", "64k", "--ranks", "8", "--machine", "h100", "--scheme", "exchange")


@pytest.fixture
def plan(capsys):
    """Runs `longspan plan`: (exit code, stdout, stderr)."""

    def run(*words):
        code = command.main(("plan", *words))
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def seconds(recipe=None, machine=ROUND, sizes=LLAMA, tokens=1000, ranks=8):
    """A step's lines by name; attentions take 1 s forward and 2 s backward."""
    heads = {heads: AttentionBytes(0, 0) for heads in sizes.attentions}
    each = {heads: AttentionSeconds(1.0, 2.0, 1e12) for heads in sizes.attentions}
    found = step_time(TrainingStep(sizes, tokens, ranks, heads, recipe or Recipe()), each, machine)
    return {line.name: line.seconds for line in found.lines}


def about(value, expected):
    return math.isclose(value, expected, rel_tol=1e-9)


# -- worked out by hand ---------------------------------------------------------------------------------------------


def test_attention_runs_forward_twice_where_layers_are_computed_again():
    assert seconds()["attention"] == 32 * (1 + 1 + 2)
    assert seconds(Recipe(checkpointing=False))["attention"] == 32 * (1 + 2)


def test_products_are_six_operations_for_each_token_and_parameter_and_two_more_where_again():
    plain, again = seconds(Recipe(checkpointing=False)), seconds()
    assert about(plain["matrix products"], 6 * 1000 * 32 * LAYER / 5e14)
    assert about(again["matrix products"], 8 * 1000 * 32 * LAYER / 5e14)
    chunked = seconds(Recipe(mlp_chunks=8))["matrix products"] - again["matrix products"]
    assert about(chunked, 2 * 1000 * 32 * INNER / 5e14)


def test_what_is_kept_passes_twice_forward_and_three_times_backward():
    kept = 1000 * sum(layer.kept_bytes(2) for layer in LLAMA.layers)
    assert about(seconds(Recipe(checkpointing=False))["between them"], 5 * kept / 1e12)
    assert about(seconds()["between them"], 7 * kept / 1e12)


def test_loss_and_optimizer():
    found = seconds()
    assert about(found["loss"], 6 * 1000 * 128256 * 4096 / 5e14 + 16 * 1000 * 128256 / 1e12)
    assert about(found["optimizer"], 7 * 4 * -(-LLAMA.params // 8) / 1e12)
    assert about(seconds(Recipe(state="bfloat16"))["optimizer"], 7 * 2 * -(-LLAMA.params // 8) / 1e12)


def test_offload_goes_there_and_back():
    assert "offload" not in seconds()
    assert about(seconds(Recipe(offload=True))["offload"], 2 * 32 * 1000 * 4096 * 2 / 1e10)


def test_fsdp_is_seen_where_it_takes_longer_than_layers():
    root = LLAMA.root_params * (2 + 4) * 7 / 8
    hidden = replace(ROUND, links=(Link(1 << 30, 1e10, 0.0),))
    assert about(seconds(machine=hidden)["FSDP"], root / 1e10)  # a layer takes over 4 s, its messages 0.15
    slow = replace(ROUND, links=(Link(1 << 30, 1e8, 0.0),))
    products, between = (seconds(machine=slow)[name] / 32 for name in ("matrix products", "between them"))
    forward = 1 + products / 4 + between * 2 / 7
    backward = 3 + products * 3 / 4 + between * 5 / 7
    gather, reduce = LAYER * 2 * 7 / 8 / 1e8, LAYER * 4 * 7 / 8 / 1e8
    seen = 32 * (max(gather - forward, 0) + max(gather + reduce - backward, 0))
    assert gather > forward
    assert about(seconds(machine=slow)["FSDP"], seen + root / 1e8)
    assert seconds(machine=slow, ranks=1)["FSDP"] == 0


def test_frozen_weights_have_no_gradient():
    """Backward of a frozen product is as long as forward; adapters, head and messages are counted as what trains."""
    lora, adapters = Recipe(lora=16), 41_943_040
    found = seconds(lora)
    assert about(found["matrix products"], 1000 * (6 * 32 * LAYER + 8 * adapters) / 5e14)
    assert about(found["loss"], 4 * 1000 * 128256 * 4096 / 5e14 + 16 * 1000 * 128256 / 1e12)
    assert about(found["optimizer"], 7 * 4 * adapters / 8 / 1e12)
    hidden = replace(ROUND, links=(Link(1 << 30, 1e10, 0.0),))
    assert about(seconds(lora, machine=hidden)["FSDP"], LLAMA.root_params * 2 * 7 / 8 / 1e10)
    slow = replace(ROUND, links=(Link(1 << 30, 1e6, 0.0),))  # everything is seen but what layers hide
    layer = 2 * 2 * (LAYER + adapters // 32) + 4 * adapters // 32
    hides = sum(found[name] for name in ("attention", "matrix products", "between them"))
    expected = (LLAMA.root_params * 2 + 32 * layer) * 7 / 8 / 1e6 - hides
    assert about(seconds(lora, machine=slow)["FSDP"], expected)
    kept = 1000 * sum(layer.kept_bytes(2, 16) for layer in LLAMA.layers)
    assert about(found["between them"], 7 * kept / 1e12)
    each = {heads: AttentionSeconds(1.0, 1.0, 0.0) for heads in LLAMA.attentions}
    assert about(model_flop(LLAMA, 1000, each, 8, 16), 1000 * (4 * LLAMA.params + 6 * adapters))


def test_an_optimizer_on_the_host_makes_the_time_a_lower_bound():
    heads = {heads: AttentionBytes(0, 0) for heads in LLAMA.attentions}
    each = {heads: AttentionSeconds(1.0, 2.0, 1e12) for heads in LLAMA.attentions}
    for recipe, shard in ((Recipe(), 3 * 4 * LLAMA.params), (Recipe(lora=16), 2 * 2 * LLAMA.params + 3 * 4 * 41943040)):
        for on in (False, True):
            step = TrainingStep(LLAMA, 1000, 8, heads, replace(recipe, offload_optimizer=on))
            found = step_time(step, each, ROUND)
            assert found.at_least == on
            moved = next(line.seconds for line in found.lines if line.name == "optimizer")
            assert about(moved, shard / 8 / 1e10) == on


def test_what_comes_from_other_nodes_enters_a_node_once():
    two = replace(ROUND, links=(Link(8, 4e11, 0.0), Link(1 << 30, 5e10, 0.0)))
    assert about(gather_seconds(8e9, 8, two), 8e9 * 7 / 8 / 4e11)
    assert about(gather_seconds(8e9, 64, two), max(8e9 * 63 / 64 / 4e11, 8e9 * 56 / 64 / (8 * 5e10)))
    assert gather_seconds(8e9, 1, two) == 0
    late = replace(ROUND, links=(Link(8, 1e18, 1.0), Link(1 << 30, 1e18, 10.0)))
    assert round(gather_seconds(1.0, 32, late)) == 30  # from three other nodes, one after another


def test_experts_and_recurrences_are_counted():
    chosen = sizes_of(built_in_config("qwen3-30b-a3b"))
    active = chosen.active_params - chosen.root_params
    assert about(seconds(sizes=chosen)["matrix products"], 8 * 1000 * active / 5e14)
    delta = sizes_of(built_in_config("qwen3-next-80b-a3b"))
    scanned = 36 * 32 * (64 * (3 * 128 + 2 * 128) + 3 * 128 * 128)
    assert sum(block.products for block in delta.blocks) == scanned
    active = delta.active_params - delta.root_params
    assert about(seconds(sizes=delta)["matrix products"], 8 * 1000 * (active + scanned) / 5e14)
    mamba = sizes_of(built_in_config("nemotron-h-8b"))
    scanned = 8 * 256 * 128 + 128 * 64 * (256 + 2 * 128)
    assert {block.products for block in mamba.blocks if block.kind == "recurrent"} == {scanned}


def test_model_flop_is_counted_as_published_utilisation_is():
    """TRL says 34.7% of peak for Qwen3-8B, 1,048,576 tokens, 8 H100 and 373 s (huggingface/transformers#48324)."""
    sizes, tokens = sizes_of(built_in_config("qwen3-8b")), 1 << 20
    flop = 4 * 128 * 32 * tokens * (tokens + 1) / 2 / 8  # forward, of a rank
    each = {heads: AttentionSeconds(1.0, 1.0, flop) for heads in sizes.attentions}
    cost = StepCost(8, tokens, 373.0, model_flop(sizes, tokens, each, 8), 989e12)
    assert round(cost.mfu, 3) == 0.347


def test_money():
    cost = StepCost(gpus=8, tokens=1_000_000, seconds=36.0, flop=1.0, peak=1.0)
    assert about(cost.per_billion(2.5), 8 * 2.5 / 100 * 1000)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PlanError, match="price"):
            cost.per_billion(wrong)


# -- machines -------------------------------------------------------------------------------------------------------


def test_what_a_machine_does_not_say_is_not_guessed():
    heads = {heads: AttentionBytes(0, 0) for heads in LLAMA.attentions}
    each = {heads: AttentionSeconds(1.0, 1.0, 1.0) for heads in LLAMA.attentions}
    for recipe, machine, says in (
        (Recipe(), CPU, "cpu has no matmul_share"),
        (Recipe(dtype="float32"), H100, "not of float32"),
        (Recipe(offload=True), replace(H100, host_bandwidth=0.0), "h100 has no host_bandwidth"),
        (Recipe(offload_optimizer=True), replace(H100, host_bandwidth=0.0), "h100 has no host_bandwidth"),
    ):
        step = TrainingStep(LLAMA, 100, 8, heads, recipe)
        assert says in why_no_time(step, machine)
        with pytest.raises(PlanError, match=says):
            step_time(step, each, machine)
    assert why_no_time(TrainingStep(LLAMA, 100, 8, heads, Recipe(offload=True)), H100) is None


@pytest.mark.parametrize("name", [name for name in MACHINES if name != "cpu"])
def test_gpus_have_rates_below_their_peak(name):
    machine = MACHINES[name]
    assert 0.3 < machine.matmul_share < 0.7
    assert machine.host_bandwidth in (25e9, 50e9)
    assert parse_machine(machine_text(machine)) == machine


def test_files_of_machines_may_leave_the_new_rates_out():
    entries = json.loads(machine_text(H100))
    del entries["matmul_share"], entries["host_bandwidth"]
    assert parse_machine(json.dumps(entries)) == replace(H100, matmul_share=0.0, host_bandwidth=0.0)
    with pytest.raises(PlanError, match="matmul_share"):
        replace(H100, matmul_share=-1.0)


# -- the command ----------------------------------------------------------------------------------------------------


def test_time_and_cost_on_the_screen(plan):
    code, out, err = plan("--model", "qwen3-8b", *ASKED, "--price", "2.50")
    text = " ".join(out.split())
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert "simulated on h100 (FA2)" in text
    assert "for a billion tokens, at 2.5 for an hour of each GPU" in text
    found = json.loads(plan("--model", "qwen3-8b", *ASKED, "--price", "2.50", "--json")[1])
    time = found["time"]
    assert about(time["seconds"], sum(line["seconds"] for line in time["lines"]))
    assert about(time["tokens_per_second"], 65536 / time["seconds"])
    assert about(time["tokens_per_second_per_gpu"], 65536 / time["seconds"] / 8)
    assert about(time["price_per_billion_tokens"], 8 * 2.5 / 3600 / time["tokens_per_second"] * 1e9)
    assert 0.1 < time["mfu"] < 0.6
    steps = {one["with"]: one["seconds"] for one in found["recipes"]}
    assert steps["checkpointing"] == time["seconds"]
    assert steps["no checkpointing"] < steps["checkpointing"] < steps["checkpointing, offload"]
    assert steps["checkpointing"] < steps["checkpointing, tiled in 8 chunks"]


def test_sequences_side_by_side_share_parameters_and_nothing_else(plan):
    one, four = (
        json.loads(plan("--model", "qwen3-8b", *ASKED, "--data-parallel", number, "--json")[1]) for number in "14"
    )
    assert (one["gpus"], four["gpus"]) == (8, 32)
    assert four["tokens_per_rank"] == one["tokens_per_rank"]
    assert four["time"]["tokens"] == 4 * one["time"]["tokens"]
    assert four["peak_bytes"] < one["peak_bytes"]
    assert 3.9 < four["time"]["tokens_per_second"] / one["time"]["tokens_per_second"] < 4.1
    assert "4 sequences at once: 32 GPUs" in plan("--model", "qwen3-8b", *ASKED, "--data-parallel", "4")[1]


def test_the_smallest_number_of_gpus_fits_and_fewer_do_not(plan):
    asked = ("--model", "qwen3-8b", "--seq", "1M", "--machine", "h100", "--scheme", "ring", "--memory", "80")
    least = json.loads(plan(*asked, "--ranks", "16", "--json")[1])["fits"]["smallest"]
    assert least == {"gpus": 8, "ranks": 8, "with": "checkpointing, offload"}
    assert plan(*asked, "--ranks", "8", "--offload")[0] == 0
    for words in (("--offload",), ("--offload", "--mlp-chunks", "8"), ("--mlp-chunks", "8"), ()):
        assert plan(*asked, "--ranks", "4", *words)[0] == 1
    code, out, _ = plan(*asked, "--ranks", "8")
    text = " ".join(out.split())
    assert code == 1
    assert "in 80 GB: no, because" in text
    assert "with checkpointing, offload: yes; with --ranks 16: yes" in text
    assert "smallest 8 GPUs (--ranks 8), with checkpointing, offload" in text


def test_nodes_are_tried_too_and_what_cannot_be_is_left_out(plan):
    assert 24 in numbers_of_gpus(H100.node)
    assert numbers_of_gpus(CPU.node)[:4] == [1, 2, 4, 8]
    asked = ("--model", "qwen3-8b", "--seq", "1M", "--ranks", "8", "--machine", "h100", "--memory", "41", "--scheme")
    assert json.loads(plan(*asked, "ring", "--json")[1])["fits"]["fits_with_ranks"] == 24
    halves = json.loads(plan(*asked, "hybrid(16,ring)", "--ranks", "16", "--json")[1])["fits"]
    assert halves["fits_with_ranks"] == 32  # 24 ranks are no pairs of 16
    assert "smallest it fits on none that was tried, up to 1,024 ranks" in " ".join(
        plan(*asked, "ring", "--memory", "4")[1].split()
    )
    nothing = json.loads(plan(*asked, "ring", "--memory", "4", "--json")[1])["fits"]
    assert (nothing["smallest"], nothing["fits_with_ranks"]) == (None, None)


def test_without_a_rate_there_is_no_time_and_no_price(plan):
    asked = ("--model", "lfm2-1.2b", "--seq", "16k", "--ranks", "4", "--machine", "cpu")
    code, out, _ = plan(*asked)
    assert code == 0
    assert "how long it takes is not known: cpu has no matmul_share" in " ".join(out.split())
    found = json.loads(plan(*asked, "--json")[1])
    assert found["time"]["seconds"] is None
    assert found["recipes"][0]["seconds"] is None
    code, out, err = plan(*asked, "--price", "2")
    assert (code, out) == (2, "")
    assert "--price needs the time of a step" in err


@pytest.mark.parametrize("price", ["0", "-2", "nan", "inf", "cheap", "2,50", ""])
def test_prices_that_are_none_are_refused(plan, price):
    code, out, err = plan("--model", "qwen3-8b", *ASKED, f"--price={price}")
    assert (code, out) == (2, "")
    assert "the price of an hour of one GPU must be above 0" in err


@pytest.mark.parametrize("words", [("--price", "2"), ("--data-parallel", "2")])
def test_they_are_about_a_whole_model(plan, words):
    code, out, err = plan(*ASKED, *words)
    assert (code, out) == (2, "")
    assert f"{words[0]} needs a whole model: add --model or --config." in err


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_model_has_a_time(plan, name):
    words = ("--seq", "16k", "--ranks", "8", "--machine", "h100-fa3", "--scheme", "exchange", "--price", "2", "--json")
    code, out, err = plan("--model", name, *words)
    time = json.loads(out)["time"]
    assert (code, err) == (0, "")
    assert 0.02 < time["mfu"] < 0.51
    assert time["price_per_billion_tokens"] > 0
