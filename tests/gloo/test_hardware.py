"""Plans for the devices and hosts of a group, the same on all ranks; nothing changes on CPUs."""

import pytest

import longspan as ls
from longspan.errors import PlanError
from tests.gloo import hardware_work
from tests.pool import pool

WORLD = 4
H100, A100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"


def machines(hosts, gpus, kernels=("FA2",) * WORLD, *, by_store=False):
    results = pool(WORLD).run(hardware_work.machines, tuple(hosts), tuple(gpus), tuple(kernels), by_store, timeout=60)
    for seen, fingerprints, calls, _ in results:
        assert (seen, fingerprints) == results[0][:2], "all ranks plan alike"
        assert calls == 1, "names are exchanged once for the group"
    return results[0][0], [notes for *_, notes in results]


@pytest.mark.parametrize("by_store", [False, True])
def test_ranks_find_their_devices_and_how_many_share_a_host(by_store):
    seen, notes = machines("aabb", [A100] * WORLD, by_store=by_store)
    assert seen == [("a100, 2 a node", 2, False), ("a100-flex, 2 a node", 2, False), ("a100, 2 a node", 2, False)]
    assert notes == [[]] * WORLD


def test_equal_rows_are_those_of_all_ranks():
    assert machines("aaaa", [B200] * WORLD, ["FA4"] * WORLD)[0][0] == ("b200-fa4", 8, False)


def test_the_slowest_of_different_devices_counts_and_hosts_in_turns_share_nothing():
    seen, _ = machines("abab", [H100, H100, A100, H100], ["FA3", "FA3", "FA2", "FA3"])
    assert seen[0] == ("a100, 1 a node", 1 << 30, False)


def test_unknown_devices_are_noted_once_by_one_rank():
    seen, notes = machines("aabb", [H100, "Other GPU", H100, H100])
    assert seen[0] == ("h100, 2 a node", 2, True)
    assert [len(texts) for texts in notes] == [1, 0, 0, 0]
    assert "no figures for Other GPU" in notes[0][0]
    assert "machine=" in notes[0][0]


def test_on_cpus_a_group_plans_for_cpus():
    for is_same, name, is_assumed, exchanged in pool(WORLD).run(hardware_work.on_cpus, timeout=60):
        assert (is_same, name, is_assumed, exchanged) == (False, "cpu", True, False)


def test_what_is_no_group_is_refused():
    with pytest.raises(PlanError, match="group"):
        ls.plan(ls.masks.causal(), ls.layouts.zigzag(64, 2), **hardware_work.SIZES, group=3)
