"""Mutants of the search for a configuration: each breaks one rule, and a check of test_recommend.py must notice it."""

import pytest

from longspan.cli import plan_gpus
from longspan.planning import machine
from longspan.sizing import config, recommend
from tests.mutants.test_sizing_mutants import rewritten
from tests.unit import test_recommend as checks


def memory_to_the_byte():
    with pytest.MonkeyPatch.context() as patch:
        checks.test_memory_is_respected_to_the_byte(patch)


def launches():
    assert plan_gpus.launch_command(8, 8) == "torchrun --nproc-per-node 8 train.py"
    assert plan_gpus.launch_command(12, 8).startswith("torchrun --nnodes 2 --nproc-per-node 6 --rdzv")
    assert plan_gpus.launch_command(1, 8) == "torchrun --nproc-per-node 1 train.py"


CHECKS = (
    checks.test_numbers,
    launches,
    checks.test_every_name_on_the_hub_is_a_model,
    checks.test_every_option_is_tried,
    checks.test_an_unknown_time_comes_last,
    checks.test_edges_of_requests,
    checks.test_requests_that_cannot_be_are_refused,
    checks.test_what_beats_another_in_time_and_memory_stands_alone,
    checks.test_the_kernel_of_pytorch_is_named_beside_one_to_install,
    checks.test_memory_that_a_kernel_does_not_tell_is_marked,
    memory_to_the_byte,
    checks.test_the_best_fit_and_are_sorted,
    checks.test_adapters_are_proposed_where_they_are_what_is_missing,
    checks.test_what_would_fit_is_said_and_fits,
    lambda: checks.test_more_memory_is_never_slower(2, 1 << 16),
    lambda: checks.test_the_lines_name_what_exists(checks.Recipe(offload=True)),
    lambda: checks.test_the_lines_name_what_exists(checks.Recipe(mlp_chunks=8, offload=True)),
    lambda: checks.test_the_lines_name_what_exists(checks.Recipe(offload_optimizer=True)),
    lambda: checks.test_the_lines_name_what_exists(checks.Recipe(lora=16)),
)
MUTANTS = {
    "nothing is set aside": (recommend.Request.room.fget, " - RESERVE", ""),
    "what does not fit is listed": (
        recommend.fitting_configurations, "configuration.memory.peak.size <= request.room", "True"
    ),
    "a bound that is too high leaves out what fits": (
        recommend.Request.least_bytes, "-(-self.seq_len // ranks)", "8 * self.seq_len"
    ),
    "lower bounds of time come first": (recommend.Configuration.order.fget, "self.time.at_least", "False"),
    "slow ones come first": (recommend.Configuration.order.fget, "self.seconds_per_token", "-self.seconds_per_token"),
    "any slower one is listed": (recommend.best_of, "(1 - DIFFERENCE) *", "2 *"),
    "all that fit are listed": (recommend.best_of, "[:NUMBER]", ""),
    "the last divisor is forgotten": (recommend.divisors, "number + 1", "number"),
    "one kernel is tried": (recommend.Request.plans, "in self.machines:", "in self.machines[:1]:"),
    "one scheme is tried": (recommend.Request.plans, "for scheme in SCHEMES]", "for scheme in SCHEMES[:1]]"),
    "a named scheme is ignored": (
        recommend.Request.plans, "[(self.scheme, self.fetch_bytes)]", "[('auto', self.fetch_bytes)]"
    ),
    "equal schemes are tried again": (recommend.Request.plans, "if names not in seen:", "if True:"),
    "the optimizer stays": (recommend.Request.recipes.fget, "(False, True)", "(False,)"),
    "an optimizer on the host may stay": (
        recommend.Request.recipes.fget, "(True,) if self.recipe.offload_optimizer else ", ""
    ),
    "whole logits are tried": (recommend.Request.recipes.fget, "replace(one, logits=self.recipe.logits)", "one"),
    "kernels take any head": (recommend.Request.__post_init__, "self._why_no_kernel(machine) or ", ""),
    "a time that is not known is taken": (recommend.Request.__post_init__, "if None not in whys:", "if False:"),
    "any number of GPUs": (recommend.Request.__post_init__, "self.gpus < 1 or ", ""),
    "PyTorch's kernel is not named": (recommend.recommend, "own if best", "None if best"),
    "memory of cuDNN is known": (recommend.Planned.with_recipe, "is_known = all(", "is_known = True or all("),
    "the one that needs most is the least": (recommend.thriftiest, "min(configurations", "max(configurations"),
    "more GPUs are said without a check": (
        recommend.changes_that_fit, " and smallest.memory.peak.size <= room:", ":"
    ),
    "adapters beside adapters": (recommend.changes_that_fit, "not request.recipe.lora and ", ""),
    "adapters of experts": (recommend.changes_that_fit, " and why_no_lora(request.sizes) is None", ""),
    "cuDNN without its name": (machine.machines_of_gpu, 'if name.startswith("fa")', ""),
    "any GPU": (machine.machines_of_gpu, "gpu not in GPU_MEMORY", "False"),
    "one node": (plan_gpus.launch_command, "if gpus > local", "if False"),
    "offload of inputs is forgotten": (plan_gpus._checkpointing_lines, "if recipe.offload", "if False"),
    "chunks are forgotten": (plan_gpus._loop_lines, "recipe.mlp_chunks > 1", "False"),
    "chunks after sharding": (plan_gpus.config_lines, " and recipe.mlp_chunks == 1", ""),
    "adapters after sharding": (plan_gpus.config_lines, "not recipe.lora and ", ""),
    "the policy of offload is forgotten": (plan_gpus._loop_lines, "if recipe.offload_optimizer", "if False"),
    "letters of a name count": (config.built_in_config, "name.lower()", "name"),
}  # fmt: skip


def noticed():
    """Whether a check fails."""
    for check in CHECKS:
        try:
            check()
        except (Exception, pytest.fail.Exception):
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
