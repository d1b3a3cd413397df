"""Groups whose first operation waits for all ranks, as NCCL's does, and plans that leave ranks without one."""

from types import SimpleNamespace

import pytest
import torch

from longspan.run import agreement
from longspan.run import group as groups
from tests.gloo import lazy_group
from tests.pool import pool

WORLD = 4


def test_all_ranks_come_to_the_first_operation():
    for rank, (right, said, done) in enumerate(pool(WORLD).run(lazy_group.first_call, "lazy", timeout=60)):
        assert (right, said) == ([True, True], "")
        assert done[0] == "sum", "before any message"
        assert done.count("sum") == 1, "once for the group, not for every call"
        assert (len(done) == 1) == (rank >= 2), "the plan leaves ranks 2 and 3 without messages"


def test_without_it_ranks_wait_for_ever():
    """As it was once: the two ranks that have messages wait for two that have none and never come."""
    found = pool(WORLD).run(lazy_group.first_call, "lazy", False, timeout=60)
    pool(WORLD).end()
    for rank, (_, said, done) in enumerate(found):
        assert ("2 of 4 ranks came to the first operation" in said) == (rank < 2), said
        assert bool(done) == (rank < 2)


def test_gloo_groups_make_no_such_operation():
    for right, said, sums in pool(WORLD).run(lazy_group.sums_over_gloo, timeout=60):
        assert (right, said, sums) == ([True, True], "", 0)


@pytest.mark.parametrize(
    ("config", "device", "waits"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:3", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cuda:nccl", "cuda:0", True),
        ("cpu:gloo,cuda:gloo", "cuda:0", False),
        ("cpu:gloo,xpu:xccl", "xpu:0", True),
    ],
)
def test_groups_whose_first_operation_waits(config, device, waits, monkeypatch):
    monkeypatch.setattr(groups.dist, "get_backend_config", lambda group: config)
    assert groups.first_waits(_Group(2), torch.device(device)) is waits
    assert not groups.first_waits(_Group(1), torch.device(device)), "alone there is nobody to wait for"


class _Group:
    bound_device_id = None

    def __init__(self, size):
        self.size = lambda: size


@pytest.mark.parametrize(
    ("config", "wanted", "bound", "found"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:3", None, "cpu"),
        ("cuda:nccl", "cuda:3", None, "cuda:3"),
        ("cuda:nccl", None, None, "cuda:5"),
        ("cuda:nccl", None, "cuda:2", "cuda:2"),
        ("cuda:nccl", "cpu", None, "cuda:5"),
        ("cuda:nccl", "cuda", None, "cuda:5"),
    ],
)
def test_messages_go_by_a_device_with_an_index(config, wanted, bound, found, monkeypatch):
    monkeypatch.setattr(groups.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 5)
    group = _Group(2)
    group.bound_device_id = bound and torch.device(bound)
    assert groups.message_device(group, wanted and torch.device(wanted)) == torch.device(found)


@pytest.mark.parametrize(("device", "way"), [("cpu", "messages"), ("cuda:3", "store")])
def test_no_device_takes_part_when_ranks_compare(device, way, monkeypatch):
    """So a rank with tensors of another device is named and not waited for, and no host waits for its device."""
    members = groups.Members(group := _Group(2))
    members.store = SimpleNamespace(gather=lambda row: [row, b"store"])
    monkeypatch.setattr(groups.dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(groups, "message_device", lambda group, wanted: torch.device(device))
    monkeypatch.setattr(agreement, "gather_by_messages", lambda row, group: [row, b"messages"])
    assert members.gather(b"row", torch.device(device)) == [b"row", way.encode()]
    monkeypatch.setattr(groups.dist, "get_backend_config", lambda group: "cpu:fake,cuda:fake")
    assert members.gather(b"row", torch.device(device)) == [b"row"], "ranks that do not exist"
    assert group.size() == 2
