"""Tensor and expert parallelism in memory and time, against counts by hand for models of random sizes."""

import inspect
import json
import random
from dataclasses import replace

import pytest

from longspan.cli import command, plan_gpus
from longspan.errors import PlanError
from longspan.planning.machine import H100, Link, machines_of_gpu
from longspan.sizing import (
    AttentionBytes,
    AttentionSeconds,
    Recipe,
    TrainingStep,
    built_in_config,
    model_flop,
    sizes_of,
    step_memory,
    step_time,
    time,
)
from longspan.sizing.parallel import axis_machine, split_model
from longspan.sizing.recommend import Request, changes_that_fit, recommend

SEEDS = range(4)


def random_config(chance, model_type="llama"):
    """A model whose heads, inner sizes and experts can be divided by 8; the vocabulary cannot."""
    config = {
        "model_type": model_type, "hidden_size": 16 * chance.randint(2, 9), "head_dim": 4 * chance.randint(1, 5),
        "intermediate_size": 8 * chance.randint(2, 30), "num_hidden_layers": chance.randint(1, 4),
        "num_attention_heads": 16 * chance.randint(1, 2), "num_key_value_heads": 8,
        "vocab_size": 8 * chance.randint(5, 90) + 3,
    }  # fmt: skip
    if model_type == "qwen2_moe":
        config |= {
            "num_experts": 8 * chance.randint(1, 4), "num_experts_per_tok": chance.randint(1, 4),
            "moe_intermediate_size": 8 * chance.randint(1, 9),
            "shared_expert_intermediate_size": 8 * chance.randint(1, 9),
        }  # fmt: skip
    if model_type == "mixtral":
        config |= {"num_local_experts": 8 * chance.randint(1, 4), "num_experts_per_tok": chance.randint(1, 4)}
    return config


def step_of(sizes, tokens, ranks, recipe=None):
    nothing = {heads: AttentionBytes(0, 0) for heads in sizes.attentions}
    return TrainingStep(sizes, tokens, ranks, nothing, recipe or Recipe())


def lines_of(moment):
    return {line.name: line.size for line in moment.lines}


def seconds_of(step, machine):
    free = {heads: AttentionSeconds(0.0, 0.0, 0.0) for heads in step.sizes.attentions}
    return {line.name: line.seconds for line in step_time(step, free, machine).lines}


def ceil(number, by):
    return -(-number // by)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_of_tp_has_its_share_of_parameters_and_rows(seed):
    chance = random.Random(seed)
    config, tp = random_config(chance), chance.choice((2, 4, 8))
    sizes = split_model(sizes_of(config), tp=tp)
    h, d, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv, layers = config["num_attention_heads"] // tp, 8 // tp, config["num_hidden_layers"]
    vocab = ceil(config["vocab_size"], tp)
    layer = 2 * h + h * d * (2 * q + 2 * kv) + 3 * h * inner // tp
    assert sizes.params == layers * layer + 2 * vocab * h + h
    norms = 2 * (2 * h // tp + 4 * (h // tp + 1))  # of a part of the rows; a number in float32 for each row
    attention = 2 * (h + (q + 2 * kv) * d + 2 * q * d) + 4 * q
    mlp = 2 * (h + 4 * inner // tp)
    assert sizes.layers[0].kept_bytes(2) == norms + attention + mlp
    assert sizes.row == h // tp

    tokens, ranks = chance.randint(100, 5000), chance.randint(1, 9)
    moments = step_memory(step_of(sizes, tokens, ranks)).moments
    shard = ceil(layers * layer + 2 * vocab * h + h, ranks)
    loss, last, *_, optimizer = moments
    assert lines_of(optimizer) == {
        "parameters": 4 * shard, "optimizer": 8 * shard, "gradients": 4 * shard, "square roots": 4 * shard,
    }  # fmt: skip
    assert lines_of(last)["inputs of layers"] == layers * tokens * h // tp * 2
    assert lines_of(last)["gathered layers"] == 2 * layer * 2
    assert lines_of(last)["gradient of the head"] == vocab * h * 2
    assert lines_of(loss)["last hidden states"] == tokens * (2 * h // tp + 4 * (h // tp + 1)) + tokens * h * 2
    # gradients of both rows of the block, the gathered one of its output, and those of q, k and v or of gate and up
    working = {"full": q * d + 2 * kv * d, "mlp": 2 * inner // tp}
    held = {kind: 2 * tokens * (number + 2 * h // tp + h) for kind, number in working.items()}
    assert lines_of(last)["gradients of rows"] in (*held.values(), tokens * h // tp * 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_and_products_of_tp(seed):
    chance = random.Random(seed)
    config, tp = random_config(chance), chance.choice((2, 4, 8))
    sizes, tokens = sizes_of(config), chance.randint(1000, 9000)
    machine = replace(H100, links=(Link(8, 1e9, 0.0), Link(1 << 30, 1e8, 0.0)))
    layers, row = config["num_hidden_layers"], tokens * config["hidden_size"] * 2
    for again in (0, 1):
        recipe = Recipe(checkpointing=bool(again))
        whole, part = (
            seconds_of(step_of(one, tokens, 4, recipe), machine) for one in (sizes, split_model(sizes, tp=tp))
        )
        one = row * (1 - 1 / tp) / 1e9
        expected = layers * 2 * 2 * (2 + again) * one + 4 * one
        assert part["tensor parallel"] == pytest.approx(expected, rel=1e-12)
        h = config["hidden_size"]  # norms have their weights on every rank, over fewer rows
        norms = 2 * layers * (ceil(h, tp) - h / tp) * 2 * (3 + again) * tokens / (H100.flops * H100.matmul_share)
        assert part["matrix products"] - norms == pytest.approx(whole["matrix products"] / tp, rel=1e-9)
        assert "tensor parallel" not in whole
        assert "expert parallel" not in part


def test_fsdp_crosses_nodes_where_tp_fills_one():
    sizes = split_model(sizes_of(random_config(random.Random(0))), tp=8)
    machine = replace(H100, links=(Link(8, 1e12, 0.0), Link(1 << 30, 1e3, 0.0)))
    root = sizes.root_params
    found = seconds_of(step_of(sizes, 1, 2), machine)["FSDP"]
    layer = sizes.layers[0].params * len(sizes.layers)
    expected = (root * (2 + 4) + layer * (2 + 2 + 4)) * (1 - 1 / 2) / 1e3
    assert found == pytest.approx(expected, rel=1e-3)  # of which layers hide next to nothing
    assert [link.ranks for link in axis_machine(H100, 2).links] == [4, 1 << 30]
    assert [link.ranks for link in axis_machine(H100, 16).links] == [1 << 30]
    assert axis_machine(H100, 1) == H100


def test_operations_of_a_model_do_not_depend_on_tp():
    sizes = sizes_of(random_config(random.Random(1)))
    part = split_model(sizes, tp=4)
    whole = {heads: AttentionSeconds(0.0, 0.0, 8e9) for heads in sizes.attentions}
    split = {heads: AttentionSeconds(0.0, 0.0, 2e9) for heads in part.attentions}
    assert model_flop(part, 1000, split, 8) == model_flop(sizes, 1000, whole, 2)


# -- expert parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_of_ep_has_its_share_of_experts(seed, tp):
    chance = random.Random(seed)
    config, ep = random_config(chance, "mixtral"), chance.choice((2, 4, 8))
    h, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    d, q, kv, vocab = config["head_dim"], config["num_attention_heads"] // tp, 8 // tp, ceil(config["vocab_size"], tp)
    total, active = config["num_local_experts"], config["num_experts_per_tok"]
    sizes = split_model(sizes_of(config), tp=tp, ep=ep)
    experts, router = total * 3 * h * inner, total * h
    dense = 2 * h + h * d * (2 * q + 2 * kv) + router
    assert sizes.layers[0].params == dense + experts // ep
    assert sizes.expert_params == layers * experts // ep

    tokens, ranks = 7919, 8 * chance.randint(1, 3)
    memory = step_memory(step_of(sizes, tokens, ranks))
    shard = ceil(layers * dense + 2 * vocab * h + h, ranks) + ceil(layers * experts // ep, ranks * tp // ep)
    assert lines_of(memory.moments[-1])["parameters"] == 4 * shard
    assert lines_of(memory.moments[1])["gathered layers"] == 2 * 2 * (dense + experts // ep)
    block = sizes.layers[0].blocks[1]
    rows = active * (2 * h + 4 * inner)  # of all experts of a token: a rank of tp routes its own tokens
    numbers = {module.name: module for module in block.modules}
    assert numbers["experts"].kept == ceil(rows, tp)
    assert numbers["experts"].working == ceil(active * (2 * inner + h), tp) + ceil(active * h, tp)
    assert (numbers["router"].kept, numbers["router"].params) == (ceil(h, tp), router)
    assert not block.gathers or ep == 1

    machine = replace(H100, links=(Link(8, 1e9, 0.0), Link(1 << 30, 1e8, 0.0)))
    for again in (0, 1):
        found = seconds_of(step_of(sizes, tokens, ranks, Recipe(checkpointing=bool(again))), machine)
        sent = tokens * ceil(active * h, tp) * 2 * (1 - 1 / ep) / 1e9
        assert found["expert parallel"] == pytest.approx(layers * 2 * (2 + again) * sent, rel=1e-12)
        gathered = tokens * h * 2 * (1 - 1 / tp) / 1e9
        if tp > 1:  # attention only
            expected = layers * 2 * (2 + again) * gathered + 4 * gathered
            assert found["tensor parallel"] == pytest.approx(expected, rel=1e-12)


def test_experts_are_gathered_by_the_ranks_that_hold_the_same_ones():
    sizes = split_model(sizes_of(random_config(random.Random(1), "mixtral")), ep=2)
    machine = replace(H100, links=(Link(8, 1e9, 0.0), Link(1 << 30, 1e8, 0.0)))
    found = time._exposed_seconds(step_of(sizes, 64, 8), (900, 900, 600), (0.0, 0.0), machine)
    sent = 300 * (1 - 1 / 8) + 600 * (1 - 1 / 4)  # over 8 ranks, and over the 4 with the same half of the experts
    assert found == pytest.approx((2 + Recipe().state_size) * sent / 1e9, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shared_expert_is_split_by_tp_and_the_routed_are_not(seed):
    chance = random.Random(seed)
    config = random_config(chance, "qwen2_moe")
    h, shared, inner = (config[f"{name}_size"] for name in ("hidden", "shared_expert_intermediate", "moe_intermediate"))
    whole = sizes_of(config)
    both, tp_only = split_model(whole, tp=4, ep=8), split_model(whole, tp=4)
    total = config["num_experts"]
    names = {module.name: module for module in both.layers[0].blocks[1].modules}
    assert names["experts"].params == total // 8 * 3 * h * inner
    assert (names["gate"].params, names["gate"].kept) == (h * shared // 4, h)  # its gathered input
    assert (names["down"].params, names["down"].kept) == (h * shared // 4, shared // 4)
    assert both.layers[0].blocks[1].gathers
    names = {module.name: module for module in tp_only.layers[0].blocks[1].modules}
    assert names["experts"].params == total * 3 * h * inner // 4
    assert (names["gate"].kept, names["router"].kept) == (0, h)  # the router has kept it
    active = config["num_experts_per_tok"]
    assert names["experts"].kept == active * (2 * h + inner)
    assert tp_only.layers[0].blocks[1].gathers


# -- refusals, and what is taken beside them ---------------------------------------------------------------------------


REFUSED = [
    ("llama3-8b", 16, 1, "`tp` must divide the 8 key/value heads, but got 16"),
    ("llama3-8b", 3, 1, "`tp` must divide the 32 query heads"),
    ("llama3-8b", 1, 2, "`ep` must be 1 for a model without experts"),
    ("mixtral-8x7b", 1, 3, "`ep` must divide the 8 experts, but got 3"),
    ("nemotron-h-8b", 2, 1, "`tp` must be 1 for this model.*recurrent layers"),
    ("qwen3-next-80b-a3b", 2, 1, "`tp` must be 1"),
    ("llama3-8b", 0, 1, "`tp` must be >= 1"),
    ("mixtral-8x7b", 1, -1, "`ep` must be >= 1"),
]


@pytest.mark.parametrize(("name", "tp", "ep", "says"), REFUSED)
def test_what_does_not_divide_is_refused(name, tp, ep, says):
    with pytest.raises(PlanError, match=says):
        split_model(sizes_of(built_in_config(name)), tp, ep)


@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [("llama3-8b", 8, 1), ("mixtral-8x7b", 4, 8), ("qwen3-next-80b-a3b", 1, 16), ("deepseek-v3", 8, 64),
     ("gpt-oss-120b", 8, 1), ("gemma3-27b", 4, 1), ("qwen3-30b-a3b", 2, 128)],
)  # fmt: skip
def test_what_divides_is_taken(name, tp, ep):
    sizes = sizes_of(built_in_config(name))
    part = split_model(sizes, tp, ep)
    assert part.whole is sizes
    assert part.num_blocks == sizes.num_blocks
    assert part.params < sizes.params
    assert split_model(sizes) is sizes


def test_norms_over_all_heads_and_joined_projections_are_refused():
    config = random_config(random.Random(2))
    for name in ("olmo2", "phi3"):
        with pytest.raises(PlanError, match="`tp` must be 1"):
            split_model(sizes_of({**config, "model_type": name}), tp=2)


def test_inner_sizes_that_do_not_divide_are_refused():
    config = random_config(random.Random(3)) | {"intermediate_size": 36}
    with pytest.raises(PlanError, match="`tp` must divide the 36 intermediate_size, but got 8"):
        split_model(sizes_of(config), tp=8)
    assert split_model(sizes_of(config), tp=4)


def test_recipes_and_gpus_that_do_not_go_with_it_are_refused():
    llama, mixtral = (sizes_of(built_in_config(name)) for name in ("llama3-8b", "mixtral-8x7b"))
    part = split_model(llama, tp=2)
    for recipe, says in ((Recipe(lora=8), "`lora` must be 0 with"), (Recipe(mlp_chunks=2), "`mlp_chunks` must be 1")):
        with pytest.raises(PlanError, match=says):
            step_of(part, 100, 4, recipe)
        assert step_of(llama, 100, 4, recipe)
    with pytest.raises(PlanError, match="`ep` must divide the 6 GPUs, but got 4"):
        step_of(split_model(mixtral, tp=2, ep=4), 100, 3)
    assert step_of(split_model(mixtral, tp=2, ep=4), 100, 6)
    with pytest.raises(PlanError, match="`tp` must divide the 12 GPUs, but got 8"):
        Request(llama, 4096, 12, machines_of_gpu("h100"), 80, tp=8)
    qwen = sizes_of({**built_in_config("qwen3-30b-a3b"), "num_experts": 120})
    with pytest.raises(PlanError, match="must divide the 8 ranks of a node"):
        Request(qwen, 4096, 12, machines_of_gpu("h100"), 80, ep=12)
    with pytest.raises(PlanError, match="must divide the 8 ranks of a node"):
        Request(qwen, 4096, 24, machines_of_gpu("h100"), 80, tp=2, ep=12)


# -- the search and the command ----------------------------------------------------------------------------------------


def test_meshes_of_the_search_leave_room_for_tp():
    sizes = sizes_of(built_in_config("llama3-8b"))
    found = recommend(Request(sizes, 1 << 17, 16, machines_of_gpu("h100"), 80, tp=4)).best
    assert found
    for one in found:
        assert (one.data_parallel * one.ranks * one.tp, one.recipe.mlp_chunks) == (16, 1)
        assert one.cost.tokens == one.data_parallel << 17
        assert 0.1 < one.cost.mfu < 0.7


def test_experts_over_ranks_are_proposed_where_they_make_it_fit():
    """A layer of DeepSeek-V3 with its gradient does not fit on one GPU."""
    request = Request(sizes_of(built_in_config("deepseek-v3")), 1 << 17, 256, machines_of_gpu("h100"), 80)
    ways = {change.option: change.configuration for change in changes_that_fit(request)}
    assert "--ep 2" in ways
    assert ways["--ep 2"].ep == 2
    assert recommend(replace(request, ep=8)).best
    dense = Request(sizes_of(built_in_config("llama3-70b")), 1 << 22, 8, machines_of_gpu("h100"), 80)
    assert not any(change.option.startswith("--ep") for change in changes_that_fit(dense))
    named = replace(request, ep=4, tp=2, seq_len=1 << 24, gpus=8)
    assert not any(change.option.startswith(("--ep", "--tp", "--lora")) for change in changes_that_fit(named))


@pytest.mark.parametrize(
    ("model", "words"), [("llama3-8b", ("--tp", "4")), ("mixtral-8x7b", ("--tp", "2", "--ep", "8"))]
)
def test_figures_are_those_of_a_single_configuration(capsys, model, words):
    def figures(*more):
        assert command.main(("plan", "--model", model, "--seq", "128k", *words, *more, "--json")) == 0
        return json.loads(capsys.readouterr().out)

    best = figures("--gpus", "16")["best"][0]
    more = ["--scheme", best["schemes"][0], "--machine", best["machine"], "--ranks", str(best["context_parallel"])]
    more += ["--data-parallel", str(best["data_parallel"]), "--offload"][: 3 if best["offload"] else 2]
    more += ["--no-checkpointing"] * (not best["checkpointing"])
    one = figures(*more)
    assert (one["peak_bytes"], one["gpus"]) == (best["peak_bytes"], 16)
    assert one["time"]["seconds"] == pytest.approx(best["seconds"], rel=1e-9)
    assert one["time"]["mfu"] == pytest.approx(best["mfu"], rel=1e-9)
    assert one["tensor_parallel"] == best["tensor_parallel"] == int(words[1])
    assert one["model"]["parameters"] == sizes_of(built_in_config(model)).params


def test_the_lines_have_the_mesh_with_tp_and_ep():
    sizes = sizes_of(built_in_config("mixtral-8x7b"))
    request = Request(sizes, 1 << 16, 16, machines_of_gpu("h100"), 80, tp=2, ep=8)
    one = next(request.plans(4)).with_recipe(Recipe())
    text = "\n".join(plan_gpus.config_lines(one, "a/b", request))
    for line in (
        "mesh = make_mesh(dp=2, cp=4, tp=2)",
        'experts = init_device_mesh("cuda", (2, 8), mesh_dim_names=("efsdp", "ep"))',
        "q_heads=16, kv_heads=4, head_dim=128",
        "Longspan itself uses mesh.cp only",
    ):
        assert line in text
    assert "LongTrainer" not in text
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    assert [*inspect.signature(parallel.parallelize_module).parameters][:3] == [
        "module",
        "device_mesh",
        "parallelize_plan",
    ]
    alone = replace(request, tp=1, ep=1)
    text = "\n".join(plan_gpus.config_lines(next(alone.plans(4)).with_recipe(Recipe()), "a/b", alone))
    assert "mesh = make_mesh(dp=4, cp=4)" in text
    assert "LongTrainer" in text
    assert "parallelize_module" not in text
    assert "init_device_mesh" not in text


def test_the_command_says_what_does_not_divide(capsys):
    base = ("plan", "--model", "llama3-8b", "--seq", "64k")
    for words, says in (
        (("--gpus", "8", "--tp", "16"), "`tp` must divide the 8 key/value heads"),
        (("--gpus", "8", "--ep", "2"), "`ep` must be 1 for a model without experts"),
        (("--ranks", "2", "--tp", "2", "--mlp-chunks", "4"), "`mlp_chunks` must be 1 with tensor parallelism"),
        (("--ranks", "2", "--tp", "2", "--lora", "8"), "`lora` must be 0 with tensor parallelism"),
    ):
        assert command.main((*base, *words)) == 2
        assert says in capsys.readouterr().err
    assert command.main(("plan", "--seq", "64k", "--tp", "2")) == 2
    assert "--tp needs a whole model" in capsys.readouterr().err


OF_MUTANTS = (
    *(lambda seed=seed: test_a_rank_of_tp_has_its_share_of_parameters_and_rows(seed) for seed in SEEDS),
    *(lambda seed=seed: test_messages_and_products_of_tp(seed) for seed in SEEDS),
    test_fsdp_crosses_nodes_where_tp_fills_one,
    test_operations_of_a_model_do_not_depend_on_tp,
    test_experts_are_gathered_by_the_ranks_that_hold_the_same_ones,
    *(lambda seed=seed, tp=tp: test_a_rank_of_ep_has_its_share_of_experts(seed, tp) for seed in SEEDS for tp in (1, 2)),
    *(lambda seed=seed: test_a_shared_expert_is_split_by_tp_and_the_routed_are_not(seed) for seed in SEEDS),
    *(lambda case=case: test_what_does_not_divide_is_refused(*case) for case in REFUSED),
    test_norms_over_all_heads_and_joined_projections_are_refused,
    test_inner_sizes_that_do_not_divide_are_refused,
    test_recipes_and_gpus_that_do_not_go_with_it_are_refused,
)
"""What mutants of sizes must fail."""
