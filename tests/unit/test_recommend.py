"""Recommended configurations: what is searched, what fits, in which order, and what is said where nothing fits."""

import ast
import inspect
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

import longspan as ls
from longspan.cli import command, plan_gpus
from longspan.errors import PlanError
from longspan.planning.machine import CPU, GPU_MEMORY, H100, MACHINES, machines_of_gpu
from longspan.sizing import BUILT_IN, HUB, RESERVE, Recipe, built_in_config, sizes_of
from longspan.sizing import recommend as search
from longspan.sizing.recommend import Request, best_of, changes_that_fit, divisors, fitting_configurations, recommend

TINY = {
    "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "vocab_size": 2000,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
QWEN = sizes_of(built_in_config("qwen3-8b"))


def asked(sizes=QWEN, seq_len=1 << 18, gpus=8, gpu="h100", **more):
    return Request(sizes, seq_len, gpus, machines_of_gpu(gpu), **{"memory": GPU_MEMORY[gpu], **more})


@pytest.fixture
def plan(capsys):
    """Runs `longspan plan`: (exit code, stdout, stderr)."""

    def run(*words):
        code = command.main(("plan", *words))
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def peak(one):
    return one.memory.peak.size


# -- the search -----------------------------------------------------------------------------------------------------


def test_the_best_fit_and_are_sorted():
    """Each slower one needs less memory than all before it, and no configuration that fits is faster than the first."""
    for request in (asked(), asked(seq_len=1 << 20), asked(gpus=4, gpu="rtx4090", seq_len=1 << 14)):
        found, fitting = recommend(request).best, list(fitting_configurations(request))
        assert found
        assert len(found) <= 3
        assert found[0].order == min(one.order for one in fitting)
        assert [one.order for one in found] == sorted(one.order for one in found)
        for one in found:
            assert peak(one) <= (request.memory << 30) - RESERVE
            assert one.data_parallel * one.ranks == request.gpus
        for faster, slower in itertools.pairwise(found):
            assert peak(slower) < 0.99 * peak(faster)


def test_every_option_is_tried():
    """All meshes, kernels and recipes, where memory allows all of them; a scheme once."""
    fitting = list(fitting_configurations(asked(sizes_of(TINY), 4096, 8, memory=1000)))
    assert {(one.data_parallel, one.ranks) for one in fitting} == {(8, 1), (4, 2), (2, 4), (1, 8)}
    assert {one.machine.kernel for one in fitting} == {"FA2", "FA3"}
    recipes = {(r.checkpointing, r.offload, r.mlp_chunks, r.offload_optimizer) for r in (one.recipe for one in fitting)}
    states = {(False, False, 1), (True, False, 1), (True, False, 8), (True, True, 1), (True, True, 8)}
    assert recipes == {(*state, place) for state in states for place in (False, True)}
    assert {"ring", "all_to_all"} <= {one.scheme for one in fitting if one.ranks == 4}
    keys = [(one.machine, one.ranks, one.schemes, one.recipe) for one in fitting]
    assert len(keys) == len(set(keys))
    assert not any(one.recipe.logits for one in fitting)


@pytest.mark.parametrize(("gpus", "seq_len"), [(8, 1 << 18), (2, 1 << 16), (6, 1 << 17)])
def test_more_memory_is_never_slower(gpus, seq_len):
    before, fitted = (True, float("inf")), False
    for memory in (24, 32, 40, 48, 64, 80, 96, 141, 180, 400):
        best = recommend(asked(gpus=gpus, seq_len=seq_len, memory=memory)).best
        assert best or not fitted
        if best:
            fitted = True
            assert best[0].order[:2] <= before
            before = best[0].order[:2]
    assert fitted


def test_memory_is_respected_to_the_byte(monkeypatch):
    request = asked(seq_len=1 << 20)
    best = recommend(request).best[0]
    monkeypatch.setattr(search, "RESERVE", (request.memory << 30) - peak(best))
    assert recommend(request).best[0].order == best.order
    monkeypatch.setattr(search, "RESERVE", (request.memory << 30) - peak(best) + 1)
    assert recommend(request).best[0].order > best.order


def test_an_unknown_time_comes_last():
    """Shards on the host: Adam's time there is not known, so that nothing known comes after it."""
    fitting = list(fitting_configurations(asked(sizes_of(TINY), 4096, 8, memory=1000)))
    ordered = sorted(fitting, key=lambda one: one.order)
    bounds = [one.time.at_least for one in ordered]
    assert bounds == sorted(bounds)
    assert any(bounds)
    assert not all(bounds)
    only = recommend(asked(recipe=Recipe(offload_optimizer=True))).best
    assert all(one.recipe.offload_optimizer for one in only)


def test_figures_are_those_of_the_command(plan):
    """The first recommended configuration, asked for by its options: the same memory and time."""
    found = json.loads(plan("--model", "qwen3-8b", "--seq", "1M", "--gpus", "8", "--json")[1])["best"][0]
    words = ["--scheme", found["schemes"][0], "--machine", found["machine"], "--ranks", str(found["context_parallel"])]
    words += ["--data-parallel", str(found["data_parallel"]), "--mlp-chunks", str(found["mlp_chunks"])]
    words += ["--offload"] * found["offload"] + ["--no-checkpointing"] * (not found["checkpointing"])
    one = json.loads(plan("--model", "qwen3-8b", "--seq", "1M", *words, "--json")[1])
    assert one["peak_bytes"] == found["peak_bytes"]
    assert one["time"]["seconds"] == pytest.approx(found["seconds"], rel=1e-9)
    assert one["time"]["mfu"] == pytest.approx(found["mfu"], rel=1e-9)
    assert one["time"]["tokens"] == found["tokens"]


def test_the_kernel_of_pytorch_is_named_beside_one_to_install():
    found = recommend(asked())
    assert (found.best[0].machine.kernel, found.without_install.machine.kernel) == ("FA3", "FA2")
    assert recommend(asked(gpu="a100")).without_install is None
    wide = sizes_of({**TINY, "head_dim": 256})  # FA4 takes heads of 128
    assert {one.machine.kernel for one in recommend(asked(wide, 4096, gpu="b200")).best} == {"FA2"}
    assert recommend(asked(sizes_of(TINY), 4096, gpu="b200")).best[0].machine.kernel == "FA4"


def test_memory_that_a_kernel_does_not_tell_is_marked():
    named = Request(QWEN, 1 << 16, 8, machines_of_gpu("h100", "cudnn"), 80)
    assert not any(one.memory_known for one in recommend(named).best)
    assert all(one.memory_known for one in recommend(asked(seq_len=1 << 16)).best)


def test_what_beats_another_in_time_and_memory_stands_alone():
    fitting = list(fitting_configurations(asked(sizes_of(TINY), 4096, 8, memory=1000)))
    best = best_of(fitting)
    for one in fitting:
        assert any(other.order <= one.order and peak(other) * 0.99 <= peak(one) for other in best) or len(best) == 3
    assert best_of([]) == ()


# -- where nothing fits ---------------------------------------------------------------------------------------------


def test_what_would_fit_is_said_and_fits():
    request = asked(seq_len=1 << 21, gpus=4)
    found = recommend(request)
    assert found.best == ()
    assert peak(found.least) > request.room
    options = {change.option.partition(" ")[0]: change for change in found.changes}
    assert options.keys() == {"--gpus", "--seq", "--gpu"}
    number = int(options["--gpus"].option.split()[1])
    assert recommend(replace(request, gpus=number)).best
    fewer = [gpus for gpus in search.numbers_of_gpus(8) if 4 < gpus < number]
    assert not any(recommend(replace(request, gpus=gpus)).best for gpus in fewer)
    assert recommend(asked(seq_len=1 << 20, gpus=4)).best == () or options["--seq"].option == "--seq 1M"
    for memory in (17, 20, 26, 32, 40):  # with 17, 16 GPUs have room for all but attention
        tight = asked(seq_len=1 << 20, gpus=8, memory=memory)
        assert all(peak(change.configuration) <= tight.room for change in itertools.islice(changes_that_fit(tight), 1))


def test_adapters_are_proposed_where_they_are_what_is_missing():
    """State of 8e9 parameters on two cards of 24 GB, with a host of no use: adapters have none."""
    few = asked(gpus=2, gpu="rtx4090", seq_len=3 << 16)
    assert recommend(few).best == ()
    assert "--lora" in {change.option.split()[0] for change in changes_that_fit(few)}
    assert all(
        change.configuration.memory.peak.size <= few.room
        for change in changes_that_fit(few)
        if "--gpu " not in change.option
    )
    assert "--lora" not in {
        change.option.split()[0] for change in changes_that_fit(replace(few, recipe=Recipe(lora=8)))
    }
    experts = asked(sizes_of(built_in_config("gpt-oss-20b")), 1 << 20, 1, "rtx4090")
    assert not any("--lora" in change.option for change in changes_that_fit(experts))


def test_requests_that_cannot_be_are_refused():
    for wrong, words in (
        ({"gpus": 0}, "`gpus` must be from 1"),
        ({"gpus": 1 << 20}, "`gpus` must be from 1"),
        ({"recipe": Recipe(dtype="float32")}, "FA2 takes bfloat16"),
        ({"sizes": sizes_of(built_in_config("gpt-oss-20b")), "recipe": Recipe(lora=8)}, "`lora` must be 0"),
    ):
        with pytest.raises(PlanError, match=words):
            asked(**wrong)
    with pytest.raises(PlanError, match="no matmul_share"):
        Request(QWEN, 1 << 16, 8, (CPU,), 80)
    for gpu, kernel, words in (("h101", None, "`gpu`"), ("h100", "FA4", "`kernel`"), ("l40s", "fa3", "`kernel`")):
        with pytest.raises(PlanError, match=words):
            machines_of_gpu(gpu, kernel)
    assert machines_of_gpu("h100", "fa3") == (MACHINES["h100-fa3"],)


def test_edges_of_requests():
    assert recommend(asked(sizes_of(TINY), 3, 8)).best  # fewer tokens than ranks
    assert recommend(asked(sizes_of(TINY), 4096, 1)).best[0].ranks == 1
    alone = recommend(asked(sizes_of(TINY), 4096, 6, scheme="hybrid(4,ring)"))  # no mesh of 6 has groups of 4
    assert (alone.best, alone.least) == ((), None)
    pairs = recommend(asked(sizes_of(TINY), 4096, 8, scheme="hybrid(4,ring)")).best
    assert {one.scheme for one in pairs} == {"hybrid(4,ring)"}
    mamba = {**built_in_config("nemotron-h-8b"), "hybrid_override_pattern": "M-M-"}
    assert recommend(asked(sizes_of(mamba), 4096, 2)).best[0].schemes == ()


# -- the command ----------------------------------------------------------------------------------------------------


def test_three_on_a_screen(plan):
    code, out, err = plan("--model", "qwen3-8b", "--seq", "1M", "--gpus", "8", "--price", "2")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "qwen3-8b in training, 1,048,576 tokens on 8 GPUs"
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("* ") for line in lines) == 1
    text = " ".join(out.split())
    for words in (
        "FA3, which has to be installed; without it, FA2",
        "nothing here has run on a GPU",
        "a billion tokens",
    ):
        assert words in text
    assert "# torchrun --nproc-per-node 8 train.py" in lines


def test_nothing_fits_on_a_screen(plan):
    code, out, _ = plan("--model", "llama3-8b", "--seq", "4500000", "--gpus", "8")
    text = " ".join(out.split())
    assert code == 1
    assert "fits in 80 GB: no, because the smallest need of all configurations is" in text
    assert "needs --gpus 16 or --gpu h200 or --seq 2M" in text
    assert "torchrun" not in out
    found = json.loads(plan("--model", "llama3-8b", "--seq", "4500000", "--gpus", "8", "--json")[1])
    assert (found["best"], found["lines"]) == ([], [])
    assert [change["option"] for change in found["ways"]] == ["--gpus 16", "--gpu h200", "--seq 2M"]
    assert found["least"]["peak_bytes"] > 77 << 30


REFUSED = [
    (("--ranks", "8"), "--ranks must not be set with --gpus"),
    (("--layout", "zigzag"), "--layout must not be set with --gpus"),
    (("--offload",), "--offload must not be set with --gpus"),
    (("--data-parallel", "2"), "--data-parallel must not be set"),
    (("--mlp-chunks", "2"), "--mlp-chunks must not be set"),
    (("--no-checkpointing",), "--no-checkpointing must not be set"),
    (("--gpu", "h101"), "`gpu` must be one of h100"),
    (("--machine", "h100", "--gpu", "h100"), "--gpu must not be set with --machine"),
    (("--machine", "cpu"), "--memory is needed"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_the_command_refuses(plan, words, says):
    code, out, err = plan("--model", "qwen3-8b", "--seq", "64k", "--gpus", "8", *words)
    assert (code, out) == (2, "")
    assert says in err


def test_what_it_takes_beside_what_it_refuses(plan):
    model = ("--model", "qwen3-8b", "--seq", "64k")
    for words in (
        ("--machine", "h100-fa3"),
        ("--gpu", "H200", "--kernel", "fa2"),
        ("--docs", "longtail"),
        ("--lora", "8"),
    ):
        assert plan(*model, "--gpus", "8", *words)[0] == 0
    for option in ("--gpu", "--kernel"):
        assert f"{option} needs --gpus" in plan(*model, option, "h100")[2]
    assert "--gpus needs a whole model" in plan("--seq", "64k", "--gpus", "8")[2]
    assert plan(*model, "--gpus", "8", "--scheme", "ring", "--json")[0] == 0
    assert plan(*model, "--ranks", "4")[0] == 0


def test_the_options_of_a_single_configuration(plan):
    base = ("--model", "qwen3-8b", "--seq", "64k", "--ranks", "8", "--scheme", "ring", "--json")
    plain, state, both, lora = (
        json.loads(plan(*base, *words)[1])
        for words in ((), ("--offload", "optimizer"), ("--offload", "inputs,optimizer"), ("--lora", "16"))
    )
    assert plain["peak_bytes"] > state["peak_bytes"] > both["peak_bytes"]
    assert plain["peak_bytes"] > lora["peak_bytes"]
    assert (plain["time"]["at_least"], state["time"]["at_least"]) == (False, True)
    assert "checkpointing, LoRA of rank 16" in [one["with"] for one in lora["recipes"]]
    assert (
        "it must be inputs, optimizer, or inputs,optimizer, but got 'weights'" in plan(*base, "--offload", "weights")[2]
    )


def test_help_begins_with_the_model(capsys):
    assert command.main(("plan", "--help")) == 0
    out = capsys.readouterr().out
    assert out.index("a whole model, in training:") < out.index("workload:") < out.index("tensors:")


# -- lines to paste -------------------------------------------------------------------------------------------------


def calls(lines):
    """The calls of a program, by the name that is called: a set of keywords each."""
    tree = ast.parse("\n".join(lines))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found.setdefault(ast.unparse(node.func), set()).update(word.arg for word in node.keywords)
    return found


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(), Recipe(offload=True), Recipe(checkpointing=False), Recipe(mlp_chunks=8, offload=True),
        Recipe(offload_optimizer=True), Recipe(lora=16),
    ],
)  # fmt: skip
def test_the_lines_name_what_exists(recipe):
    request = asked(recipe=Recipe(lora=recipe.lora))
    one = next(request.plans(4)).with_recipe(recipe)
    found = calls(plan_gpus.config_lines(one, "Qwen/Qwen3-8B", request))
    training = pytest.importorskip("longspan.training")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    known = {
        "make_mesh": training.make_mesh, "fully_shard": fsdp.fully_shard, "ls.plan": ls.plan,
        "MixedPrecisionPolicy": fsdp.MixedPrecisionPolicy, "CPUOffloadPolicy": fsdp.CPUOffloadPolicy,
        "ls.layouts.balanced": ls.layouts.balanced, "tile": training.tile,
    }  # fmt: skip
    rest = found.keys() - known.keys()
    assert rest <= {
        "LongTrainer", "AutoModelForCausalLM.from_pretrained", "DistributedConfig", "TrainingArguments",
        "model.activation_checkpointing_enable", "get_peft_model", "LoraConfig",
    }  # fmt: skip
    for name in found.keys() & known.keys():
        assert found[name] <= inspect.signature(known[name]).parameters.keys(), name
    assert ("LongTrainer" in found) == (not recipe.lora and recipe.mlp_chunks == 1)
    assert ("CPUOffloadPolicy" in found) == recipe.offload_optimizer
    assert ("tile" in found) == (recipe.mlp_chunks > 1)
    assert ("model.activation_checkpointing_enable" in found) == recipe.checkpointing
    text = "\n".join(plan_gpus.config_lines(one, "Qwen/Qwen3-8B", request))
    assert text.count("offload=True") == (2 if recipe.offload and recipe.mlp_chunks == 1 else recipe.offload) + (
        recipe.offload_optimizer
    )


def test_published_lengths_fit_and_a_limit_of_remote_keys_is_in_the_lines():
    """ALST's lengths of Llama-3-8B on H100s of 80 GB; on 32 only an exchange in stages fits."""
    llama = sizes_of(built_in_config("llama3-8b"))
    staged = asked(llama, 15_000_000, 32)
    for request in (asked(llama, 500_000, 1), asked(llama, 3_700_000, 8), staged):
        assert all(peak(one) <= request.room for one in recommend(request).best)
        assert recommend(request).best
    first = recommend(staged).best[0]
    assert (first.scheme, first.fetch_bytes) == ("exchange", 468750 * 8 * 256 * 2)
    lines = plan_gpus.config_lines(first, "llama3-8b", staged)
    assert "fetch_bytes" in calls(lines)["ls.plan"]
    assert "LongTrainer" not in calls(lines)
    assert recommend(replace(staged, fetch_bytes=first.fetch_bytes, scheme="exchange")).best[0].memory == first.memory
    assert recommend(replace(staged, scheme="ring")).best == ()


def test_the_lines_of_transformers_name_what_exists():
    transformers = pytest.importorskip("transformers")
    trainer = pytest.importorskip("longspan.huggingface.trainer").ContextParallelTrainer
    request = asked()
    both = (Recipe(offload=True, offload_optimizer=True), Recipe())
    for recipe in both:
        found = calls(plan_gpus.config_lines(next(request.plans(4)).with_recipe(recipe), "a/b", request))
        config = inspect.signature(transformers.distributed.DistributedConfig).parameters
        assert found["DistributedConfig"] <= config.keys()
        assert found["TrainingArguments"] <= transformers.TrainingArguments.__dataclass_fields__.keys()
        model = transformers.PreTrainedModel
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable = inspect.signature(enable).parameters
        assert found["model.activation_checkpointing_enable"] <= enable.keys()
        own = inspect.signature(trainer.__init__).parameters.keys()
        assert found["LongTrainer"] <= own | inspect.signature(transformers.Trainer.__init__).parameters.keys()


# -- names ----------------------------------------------------------------------------------------------------------


def test_names_on_the_hub(plan, tmp_path, monkeypatch):
    """A folder, then the local cache, then models that are built in; nothing is downloaded."""
    words = ("--seq", "16k", "--gpus", "8", "--json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    named = json.loads(plan("--model", "qwen/Qwen3-8B-Base", *words)[1])["model"]
    assert named["parameters"] == QWEN.params
    code, out, err = plan("--model", "Some/Tiny", *words)
    assert (code, out) == (2, "")
    assert "hf download Some/Tiny config.json" in err
    cached = tmp_path / "hub" / "models--Some--Tiny"
    for commit, layers in (("aaa", 1), ("bbb", 3)):
        (cached / "snapshots" / commit).mkdir(parents=True)
        config = {**TINY, "num_hidden_layers": layers}
        (cached / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("bbb")
    found = json.loads(plan("--model", "Some/Tiny", *words)[1])["model"]
    assert found == {
        "name": "Some/Tiny", "model_type": "qwen3", "parameters": sizes_of(TINY).params, "layers": 3,
        "active_parameters": sizes_of(TINY).params,
    }  # fmt: skip
    local = Path("Some/Tiny")
    local.mkdir(parents=True)
    (local / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 2}))
    for given in ("Some/Tiny", "Some/Tiny/config.json"):
        assert json.loads(plan("--model", given, *words)[1])["model"]["layers"] == 2
    assert "but got '../x'" in plan("--model", "../x", *words)[2]


def test_every_name_on_the_hub_is_a_model():
    assert set(HUB.values()) == set(BUILT_IN)
    for name, known in HUB.items():
        assert built_in_config(name) == built_in_config(known) == built_in_config(name.upper() + "-Instruct")


def test_numbers():
    assert divisors(96) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    assert set(GPU_MEMORY) == {name for name in MACHINES if "-" not in name} - {"cpu"}
    assert H100 in machines_of_gpu("h100")
