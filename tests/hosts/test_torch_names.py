"""The 16 names of PyTorch's context parallelism, with PyTorch's arguments alone, on real Gloo processes."""

import inspect

import pytest
from torch.distributed.tensor.experimental import _attention as pytorch

from longspan.torch_api import _attention as names
from tests.hosts import torch_names_work as work
from tests.hosts.test_torch_api import assert_exact, run

pytestmark = pytest.mark.timeout(240)


def test_every_name_is_there_with_pytorchs_arguments():
    assert len(pytorch.__all__) == 16
    assert set(pytorch.__all__) <= set(names.__all__)
    for name in pytorch.__all__:
        theirs, ours = getattr(pytorch, name), getattr(names, name)
        if not inspect.isroutine(theirs):
            continue
        parameters = inspect.signature(theirs).parameters
        assert list(inspect.signature(ours).parameters)[: len(parameters)] == list(parameters), name


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
@pytest.mark.parametrize(("compiled", "world"), [(False, 2), (False, 4), (True, 2)])
def test_scaled_dot_product_attention_in_pytorchs_words(backend, compiled, world):
    ranks = run(work.sdpa_matrix, backend, compiled, world=world)
    assert [len(found) for found in ranks] == [12 if compiled else 24] * world
    assert_exact(ranks)


def test_flex_attention_in_pytorchs_words():
    assert_exact(run(work.flex_matrix))


def test_keys_gathered_by_the_user():
    assert_exact(run(work.gathered_by_hand))


@pytest.mark.parametrize("world", [2, 4])
def test_shard_and_unshard(world):
    assert run(work.shards, world=world) == ["done"] * world


@pytest.mark.parametrize(
    "work_of_rank",
    [work.dispatcher, work.templated_ring, work.short_sequences, work.memory_order, work.dtensors_untold],
)
def test_other_names(work_of_rank):
    assert_exact(run(work_of_rank))


EXPECTED = {
    "rotate": ("NotImplementedError", "`rotate_method` must be 'allgather' or 'alltoall'"),
    "odd": ("NotImplementedError", "HeadTail()"),
    "rows": ("LayoutError", "`load_balancer` has an order"),
    "dim": ("LayoutError", "`load_balancer` has an order"),
    "twice": ("LayoutError", "`load_balancer` must generate"),
    "untold": ("LayoutError", "`load_balancer` must be passed"),
    "keys": ("PlanError", "`seq_dims` must be a dict"),
    "seq_dim": ("PlanError", "`seq_dim` must be 2"),
    "lengths": ("PlanError", "`Q_LEN` and `KV_LEN` must be equal"),
}


def test_what_is_not_exact_is_refused():
    for found in run(work.refusals):
        assert set(found) == set(EXPECTED)
        for name, parts in EXPECTED.items():
            for part in parts:
                assert part in found[name], found[name]
