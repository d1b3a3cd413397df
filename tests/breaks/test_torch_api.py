"""Losses that are DTensors, and PyTorch's own flex attention, in contexts: right or refused in words, as expected."""

import pytest

from tests.breaks import torch_api_work as work
from tests.lanes import NIGHTLY
from tests.pool import pool

TIMEOUT = 200.0
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
