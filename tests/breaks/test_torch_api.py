"""PyTorch's words for context parallelism: layouts that are not passed, losses that are DTensors, PyTorch's own flex
attention. Each case is right or refused in words, as it was expected to be."""

import pytest

from tests.breaks import torch_api_work as work
from tests.lanes import NIGHTLY
from tests.pool import pool

TIMEOUT = 200.0
SEEDS, STEPS = (range(30), 60) if NIGHTLY else (range(4), 30)
FLEX = [(None, True), (128, False), (256, False)]  # length of a block mask, and whether it was compiled before
FLEX += [(None, False), (128, True), (256, True)] if NIGHTLY else []
pytestmark = pytest.mark.timeout(240)


def run(function, *args, world=2):
    return pool(world).run(function, *args, timeout=TIMEOUT)


def surprises(ranks):
    """The cases that did not end as expected on some rank, and how they did."""
    return [
        f"rank {rank}: {name}: expected {expected}, but {ended}: {why}"
        for rank, cases in enumerate(ranks)
        for name, expected, ended, why in cases
        if ended != expected
    ]


def count(tries, area, ranks):
    assert all(ranks)
    assert not surprises(ranks), "\n".join(surprises(ranks))
    ends = [ended for _, _, ended, _ in ranks[0]]
    tries(area, len(ends), ends.count(work.RIGHT), ends.count(work.REFUSED))


@pytest.mark.parametrize("world", [2, 4])
def test_shards_are_put_together_as_they_were_cut(tries, world):
    count(tries, "layouts", run(work.pairs, world=world))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_jobs_are_right_or_refused(tries, seed):
    count(tries, "layouts", run(work.layouts_of_a_job, seed, STEPS))


def test_layouts_belong_to_the_ranks_of_a_mesh(tries):
    count(tries, "layouts", run(work.meshes, world=4))


@pytest.mark.parametrize("world", [2, 3])
def test_wrapped_modules_and_contexts_without_a_balancer(tries, world):
    count(tries, "layouts", run(work.styles, world=world))


def test_balancers_that_contradict_shards_or_ranks_are_refused(tries):
    count(tries, "layouts", run(work.told))


def test_records_of_layouts_do_not_grow_without_bound():
    for (layouts, digests), latest, oldest in run(work.memory_of_records, 1100):
        assert layouts <= 1024
        assert digests <= 1100 + 4
        assert latest == "zigzag"
        assert "`load_balancer` must be passed" in oldest


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_of_dtensors_are_those_outside_of_a_context(tries, world):
    count(tries, "DTensor losses", run(work.gradients_of_dtensors, world=world))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("how", ["backward", "function", "inputs", "grad"])
def test_tensor_parallelism_with_a_parallel_loss(tries, how, checkpointed):
    ranks = run(work.tensor_parallel, how, checkpointed, world=4)
    for errors in ranks:
        assert max(errors.values()) < 1e-11, errors
    tries("DTensor losses", len(ranks[0]), len(ranks[0]))


def test_flex_attention_of_pytorch_is_routed_in_contexts_only(tries):
    count(tries, "flex attention", run(work.flex_in_contexts, FLEX))


CAUGHT_BY = {
    "the latest layout wins": (work.layouts_of_a_job, 0, 30),
    "the first layout wins": (work.layouts_of_a_job, 0, 30),
    "nothing is recorded": (work.pairs,),
    "shards carry nothing": (work.styles,),
    "unshard reads no marks": (work.told,),
    "the default always fits": (work.styles,),
    "ranks need not agree": (work.told,),
    "edges make the root gradient": (work.gradients_of_dtensors,),
    "plain root gradients": (work.gradients_of_dtensors,),
    "flex keeps its code": (work.flex_in_contexts, FLEX[:1], ["by name", "compiled"]),
    "flex finds no route": (work.flex_in_contexts, FLEX[:1], ["in a compiled function"]),
}


def test_every_mutant_is_tried():
    assert CAUGHT_BY.keys() == work.MUTANTS.keys()


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_mutants_are_caught(name):
    assert surprises(run(work.with_mutant, name, *CAUGHT_BY[name]))
