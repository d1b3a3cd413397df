"""Mutants of sizes and of the bytes of a step: each counts one thing wrongly, and checks of the kind that
test_sizing.py makes must notice every one of them."""

import __future__

import inspect
import textwrap

import pytest

from longspan.sizing import (
    BUILT_IN,
    AttentionBytes,
    Recipe,
    TrainingStep,
    families,
    memory,
    modules,
    parallel,
    sizes_of,
    step_memory,
    time,
)
from tests.sizing_cases import MEASURED, config_of
from tests.unit import test_sizing as checks
from tests.unit import test_sizing_parallel as parallel_checks
from tests.unit import test_sizing_time as time_checks

EXACT = ("llama", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "olmo", "olmo2", "lfm2")


def kept_as_measured():
    """What layers keep, against what was measured of them."""
    for name, found in MEASURED.items():
        bar = 0.01 if name in EXACT or "qwen3" in name else 0.07
        assert abs(sum(layer.kept_bytes(2) for layer in sizes_of(config_of(name)).layers) / found - 1) < bar, name


def parameters_as_published():
    for name in BUILT_IN:
        checks.test_built_in_models_have_the_parameters_that_were_published(name)
    exact = {  # as transformers builds them
        "gpt-oss-120b": 116_829_156_672, "qwen3-next-80b-a3b": 79_674_391_296, "deepseek-v3": 671_026_404_352,
        "mixtral-8x7b": 46_702_792_704,
    }  # fmt: skip
    assert {name: sizes_of(BUILT_IN[name][0]).params for name in exact} == exact
    checks.test_the_right_configuration_beside_it_is_taken()
    checks.test_models_are_known_by_their_layers()


def moments():
    """Figures of one step of Llama-3-8B on 8 ranks, worked out by hand."""
    sizes = sizes_of(BUILT_IN["llama3-8b"][0])
    heads = {heads: AttentionBytes(5_000_000_000, 7_000_000_000) for heads in sizes.attentions}
    found = step_memory(TrainingStep(sizes, 32768, 8, heads, Recipe()))
    by_name = {moment.name: moment for moment in found.moments}
    last = by_name["backward of the last layer"]
    assert checks.line(last, "inputs of layers") == 32 * 32768 * 4096 * 2
    assert checks.line(last, "remote K/V") == 5_000_000_000
    assert checks.line(last, "inside kernels") == 7_000_000_000
    assert checks.line(last, "gathered layers") == 2 * 2 * 218_112_000
    assert checks.line(last, "gradient of a layer") == (2 + 4) * 218_112_000
    assert checks.line(by_name["end of backward"], "gradient") == 6 * (2 * 128256 * 4096 + 4096)
    assert checks.line(by_name["loss"], "gradient of the head") == 6 * 128256 * 4096
    assert found.peak is last
    nothing = {heads: AttentionBytes(0, 0) for heads in sizes.attentions}
    whole, cut = (
        step_memory(TrainingStep(sizes, 32768, 8, nothing, Recipe(mlp_chunks=chunks))).moments[1] for chunks in (1, 8)
    )
    assert checks.line(cut, "one layer") < 0.6 * checks.line(whole, "one layer")
    # attention: its input of 4096 and output projection's, q, k, v and output in bfloat16, lse, a chunk of the norm
    heads = {heads: AttentionBytes(1 << 40, 0) for heads in sizes.attentions}
    tiled = step_memory(TrainingStep(sizes, 32768, 8, heads, Recipe(mlp_chunks=8))).moments[1]
    assert checks.line(tiled, "one layer") == 32768 * (2 * (4096 + 4096 + 10240) + 128) + 4096 * (6 * 4096 + 4)
    # an MLP: what attention keeps, and of its norm and itself one chunk and the inputs
    rows, chunk = 32768 - 4096, 4096 * (6 * 4096 + 4 + 2 * 4096 + 2 * 4 * 14336)
    assert checks.line(cut, "one layer") == checks.line(tiled, "one layer") + chunk + rows * 2 * 2 * 4096
    heads = {heads: AttentionBytes(0, 0, 1 << 40) for heads in sizes.attentions}
    again = step_memory(TrainingStep(sizes, 32768, 8, heads, Recipe())).moments[1]
    assert checks.line(again, "remote K/V") == 1 << 40


CHECKS = (
    kept_as_measured,
    parameters_as_published,
    moments,
    checks.test_state_is_sixteen_bytes_a_parameter_over_all_ranks,
    checks.test_the_peak_is_a_moment_and_not_the_sum_of_all,
    checks.test_whole_logits_are_twelve_bytes_a_number,
    lambda: checks.test_every_switch_saves("qwen3-8b"),
    lambda: checks.test_every_switch_saves("gpt-oss-20b"),
    checks.test_bytes_of_tokens_grow_with_tokens_and_those_of_parameters_with_ranks_only,
    checks.test_what_attention_takes_is_counted_where_it_runs,
    time_checks.test_attention_runs_forward_twice_where_layers_are_computed_again,
    time_checks.test_products_are_six_operations_for_each_token_and_parameter_and_two_more_where_again,
    time_checks.test_what_is_kept_passes_twice_forward_and_three_times_backward,
    time_checks.test_loss_and_optimizer,
    time_checks.test_offload_goes_there_and_back,
    checks.test_adapters_have_state_and_the_frozen_model_has_none,
    lambda: checks.test_adapters_that_peft_makes_differently_are_refused("gpt-oss-20b"),
    checks.test_an_optimizer_on_the_host_leaves_no_state_on_the_device,
    time_checks.test_frozen_weights_have_no_gradient,
    time_checks.test_an_optimizer_on_the_host_makes_the_time_a_lower_bound,
    time_checks.test_fsdp_is_seen_where_it_takes_longer_than_layers,
    time_checks.test_what_comes_from_other_nodes_enters_a_node_once,
    time_checks.test_experts_and_recurrences_are_counted,
    time_checks.test_model_flop_is_counted_as_published_utilisation_is,
    time_checks.test_money,
    time_checks.test_what_a_machine_does_not_say_is_not_guessed,
    *parallel_checks.OF_MUTANTS,
)
MUTANTS = {
    "norms keep no float32": (modules.norm, "size, size + groups, for", "size, groups, for"),
    "wide norms keep one row": (modules.norm, "2 * size + groups", "size + groups"),
    "an MLP forgets what its activation gives": (modules.gated_mlp, "3 * inner", "2 * inner"),
    "attention forgets its output": (modules.core, "0, q + k + v + out, ", "0, q + k + v, "),
    "experts keep one row a token": (modules.experts, "kept = active * (", "kept = ("),
    "a router has no parameters": (modules.experts, "total * (hidden + bias)", "0"),
    "all experts are active": (modules.experts, "active=active * one", "active=total * one"),
    "every linear layer keeps its input": (modules.linear, "n_in * keeps", "n_in"),
    "biases are forgotten": (modules.linear, "n_in * n_out + n_out * bias", "n_in * n_out"),
    "heads' norms are forgotten": (modules.attention, "traits.qk_norm is not None", "False"),
    "a gated attention has no gate": (modules.attention, "2 if traits.gated else 1", "1"),
    "a convolution has no taps": (modules.gated_delta, "channels * width", "0"),
    "a recurrence keeps no queries": (modules.gated_delta, "channels + (", "values + ("),
    "Mamba's groups are one": (modules.mamba2, "sizes.groups * sizes.state", "sizes.state"),
    "windows are full": (families.windows_of, "(layer + 1) % period", "False"),
    "windows are everywhere": (families.windows_of, "(layer + 1) % period", "True"),
    "a delta rule in every layer": (families.qwen_hybrid, "(layer + 1) % period", "True"),
    "first layers have experts too": (
        modules.deepseek_experts, 'layer < reader.count("first_k_dense_replace")', "False"
    ),
    "a shared expert is forgotten": (modules.qwen_experts, 'reader.model_type != "qwen3_moe"', "False"),
    "tied weights are counted twice": (modules.ModelSizes.root_params.fget, "1 if self.tied else 2", "2"),
    "state is on every rank": (memory.TrainingStep.shard, "-(-(count - experts) // self.ranks)", "count"),
    "one moment of Adam": (memory.step_memory, "2 * shard * state_size", "shard * state_size"),
    "offload leaves inputs where they are": (memory.step_memory, "2 * rows", "len(layers) * rows"),
    "checkpoints keep everything": (
        memory.step_memory, "not recipe.checkpointing:\n        size", "True:\n        size"
    ),
    "chunks save nothing": (memory._kept_bytes, "recipe.mlp_chunks > 1", "False"),
    "norms are not in chunks": (memory._kept_bytes, "module.tiled or in_chunks", "in_chunks"),
    "inputs of chunks are free": (memory._kept_bytes, "module.tiled if inputs is None else inputs", "0"),
    "the forward of attention is free": (memory._backward_of_blocks, "attention.forward,", "0,"),
    "a layer that runs again takes nothing": (memory._backward_of_blocks, "if recipe.checkpointing:", "if False:"),
    "kernels allocate nothing": (memory._backward_of_blocks, "attention.workspace or 0", "0"),
    "no layer is gathered ahead": (memory.step_memory, "2 * gathered", "gathered"),
    "gradients are reduced where they are": (
        memory.step_memory, "reduced * (itemsize + state_size)", "reduced * itemsize"
    ),
    "the peak is the smallest moment": (memory.StepMemory.peak.fget, "max(", "min("),
    "logits are two bytes": (memory.loss_lines, "sizes.vocab * WHOLE,", "sizes.vocab * 2,"),
    "logits are whole anyway": (memory.loss_lines, "slab_rows(tokens, sizes.vocab, WIDE)", "tokens"),
    "a head's gradient is narrow": (memory.loss_lines, "(WIDE + recipe.itemsize)", "recipe.itemsize"),
    "a product is one operation": (time._layer, "flop = 2.0 *", "flop = 1.0 *"),
    "every expert computes": (time._layer, "(block.active_params", "(block.params"),
    "recurrences are free": (time._layer, " + block.products", ""),
    "norms are free": (time._layer, "KEPT_FORWARD * moved", "0 * moved"),
    "attention has no forward": (time._layer, "_Parts(times.forward, ", "_Parts(0.0, "),
    "attention has no backward": (time._layer, "_Parts(times.backward, ", "_Parts(0.0, "),
    "backward is as long as forward": (time._layer, "2 * products", "products"),
    "nothing is computed again": (time._layer, "one.times(again)", "one.times(0)"),
    "chunks of an MLP run once": (time._layer, "step.recipe.mlp_chunks > 1", "False"),
    "backward reads no more than forward": (time._layer, "KEPT_BACKWARD / KEPT_FORWARD * ", ""),
    "FSDP hides behind nothing": (time._exposed_seconds, "gather - forward", "gather"),
    "gradients are not reduced": (
        time._exposed_seconds, "max(gather + reduce - backward, 0.0)", "max(gather - backward, 0.0)",
    ),
    "gradients are reduced as they are computed": (
        time._exposed_seconds, "step.recipe.state_size", "step.recipe.itemsize",
    ),
    "embedding and head come for free": (time._exposed_seconds, "return gather + reduce", "return 0.0"),
    "a rank sends itself its own part": (time.gather_seconds, "1 - inner / ranks", "1"),
    "a node has one card": (time.gather_seconds, "(inner * link.bandwidth)", "link.bandwidth"),
    "only the innermost link counts": (time.gather_seconds, "max(slowest, there", "max(0 * slowest, there"),
    "nodes answer at once": (time.gather_seconds, " * link.latency", " * 0.0"),
    "the loss has no backward": (time.step_time, "else 6", "else 2"),
    "logits are not touched": (time.step_time, "LOGIT_BYTES * logits", "0 * logits"),
    "Adam is on every rank": (time.step_time, "shard = step.shard(sizes)", "shard = step.num_trained(sizes)"),
    "Adam's dtype is the model's": (time.step_time, "* recipe.state_size", "* recipe.itemsize"),
    "Adam steps frozen weights": (memory.TrainingStep.num_trained, "if self.recipe.lora", "if False"),
    "frozen weights are nowhere": (memory.TrainingStep.frozen, "if self.recipe.lora", "if False"),
    "frozen weights are kept as state": (memory.step_memory, "frozen * itemsize", "frozen * state_size"),
    "a frozen head has a gradient": (memory.loss_lines, "if recipe.lora:", "if False:"),
    "a frozen embedding has a gradient": (memory.step_memory, "if not recipe.lora:", "if True:"),
    "frozen norms keep their rows": (modules.norm, "for_weight=size", "for_weight=0"),
    "adapters keep nothing": (modules.ModuleSizes.kept_bytes, "lora * (self.adapted > 0) - ", "-"),
    "adapters have one matrix": (modules.linear, "adapted=n_in + n_out", "adapted=n_in"),
    "experts are adapted as layers are": (memory.why_no_lora, '{"experts", "recurrent"}', "set()"),
    "an optimizer on the host is on the device": (memory.step_memory, "if recipe.offload_optimizer:", "if False:"),
    "the host keeps no state": (memory.step_memory, "StepMemory(moments, on_host + ", "StepMemory(moments, "),
    "frozen products have a gradient": (time._layer, " - frozen / rate", ""),
    "adapters compute nothing": (time._layer, " + block.adapters(lora)", ""),
    "a frozen head is multiplied again": (time.step_time, "4 if recipe.lora", "6 if recipe.lora"),
    "frozen weights are reduced": (
        time.step_time, "params = step.num_trained(layer) + step.frozen(layer), step.num_trained(layer),",
        "params = step.num_trained(layer) + step.frozen(layer), step.num_trained(layer) + step.frozen(layer),",
    ),
    "shards go to the device once": (time.step_time, "3 * shard", "2 * shard"),
    "an optimizer on the host is as fast": (time.step_time, "recipe.offload_optimizer)", "False)"),
    "offload goes there only": (time.step_time, "2 * len", "len"),
    "offload is forgotten": (time.step_time, "if recipe.offload:", "if False:"),
    "a rate that is not known is 0": (time.why_no_time, "not machine.matmul_share", "False"),
    "float32 is as fast": (time.why_no_time, "step.recipe.itemsize != 2", "False"),
    "utilisation forgets attention": (time.model_flop, "3.0 * attention", "0.0 * attention"),
    "utilisation is of one rank": (time.model_flop, "attention * ranks", "attention"),
    "money for one GPU": (time.StepCost.per_billion, "self.gpus * price", "price"),
    "a price may be nothing": (time.StepCost.per_billion, "price <= 0", "price < 0"),
    "key/value heads are replicated": (parallel._divided_keys, ', "key/value heads": heads.kv_heads', ""),
    "inner sizes are rounded": (parallel._divided_keys, "if config.get(key)}\n    for", "if False}\n    for"),
    "MLPs are whole": (parallel._divided_keys, "(*HEADS, *INNER)", "HEADS"),
    "the vocabulary is whole": (parallel._divided_keys, "-(-sizes.vocab // tp)", "sizes.vocab"),
    "heads grow as they are fewer": (parallel._divided_keys, ": heads.head_dim, ", ": tp * heads.head_dim, "),
    "norms run on all rows": (parallel._block, 'old.name == "norm"', "False"),
    "experts are split by tp beside ep": (parallel._block, "ep > 1 and whole.kind", "False and whole.kind"),
    "a shared expert keeps nothing": (parallel._block, "not gathers and tp > 1", "False"),
    "blocks of experts always gather": (parallel._block, "gathers = ep == 1 or ", "gathers = True or "),
    "every rank has all experts": (parallel._experts, "module.params // ep", "module.params"),
    "rows of ep take no memory": (parallel._experts, "on_rows.working + sent", "on_rows.working"),
    "experts need not divide": (parallel.split_model, "if total % ep:", "if False:"),
    "recurrences are split": (parallel.why_no_tp, '{"recurrent", "convolution"}', "set()"),
    "norms over all heads are split": (parallel.why_no_tp, '("olmo2", "olmo3")', "()"),
    "nodes are as large for every axis": (parallel.axis_machine, "machine if stride == 1 else", "machine if True else"),
    "any stride": (parallel.axis_machine, "if link.ranks % stride and stride % link.ranks:", "if False:"),
    "experts are sharded like the rest": (
        memory.TrainingStep.expert_ranks.fget, "self.ranks * self.sizes.tp // self.sizes.ep", "self.ranks"
    ),
    "adapters are split": (memory.TrainingStep.__post_init__, "sizes.tp > 1 and recipe.lora", "False"),
    "chunks are split": (memory.TrainingStep.__post_init__, "sizes.tp > 1 and recipe.mlp_chunks > 1", "False"),
    "ranks of ep need not divide": (
        memory.TrainingStep.__post_init__, "self.ranks * sizes.tp % sizes.ep", "False"
    ),
    "rows between blocks are whole": (modules.ModelSizes.row.fget, "-(-self.hidden // self.tp)", "self.hidden"),
    "no gradient is gathered": (memory._backward_of_blocks, "step.sizes.tp > 1 and block.gathers", "False"),
    "the head has a part of the rows": (
        memory.step_memory, "size = last + step.tokens * sizes.hidden * itemsize", "size = last + rows"
    ),
    "blocks gather and do not reduce": (time._layer, "2 * gather_seconds", "gather_seconds"),
    "blocks gather though they do not": (time._layer, " * block.gathers", ""),
    "backward gathers nothing": (time._layer, "*back, tensor, expert)", "*back)"),
    "rows do not come back": (time._layer, "2 * exchange_seconds", "exchange_seconds"),
    "embedding and head gather nothing": (time.step_time, "total.tensor + 4 *", "total.tensor + 0 *"),
    "a rank sends itself its own rows": (time.exchange_seconds, "1 - inner / ranks", "1"),
    "experts are gathered over all": (time._exposed_seconds, "experts if sizes.ep > 1 else 0", "0"),
    "FSDP does not see tp": (time._exposed_seconds, "axis_machine(machine, sizes.tp)", "machine"),
    "utilisation is of a rank's part": (time.model_flop, "(sizes.whole or sizes)", "sizes"),
    "any price will do": (time.StepCost.per_billion, "not math.isfinite(price) or ", ""),
}  # fmt: skip


def rewritten(function, old, new):
    """The function's code with one place of its text changed."""
    text = textwrap.dedent(inspect.getsource(function)).removeprefix("@property\n")
    assert text.count(old) == 1, f"{function.__name__} has {old!r} {text.count(old)} times"
    names = dict(function.__globals__)
    exec(compile(text.replace(old, new), "<mutant>", "exec", __future__.annotations.compiler_flag), names)
    return names[function.__name__].__code__


def noticed():
    """Whether a check fails."""
    for check in CHECKS:
        try:
            check()
        except (AssertionError, pytest.fail.Exception, KeyError, TypeError, ZeroDivisionError):
            return True
    return False


def test_the_checks_pass_as_it_is():
    for check in CHECKS:
        check()


@pytest.mark.share(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(monkeypatch, name):
    function, old, new = MUTANTS[name]
    monkeypatch.setattr(function, "__code__", rewritten(function, old, new))
    assert noticed(), f"{name}: nobody noticed"
