"""Groups one is not a member of, DTensors where none can be taken or cut elsewhere than the plan cuts."""

import pytest

from tests.gloo import handed_work as work
from tests.pool import pool

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("world", [2, 3])
def test_dtensors_of_any_length_with_a_layout_that_cuts_as_they_do(world):
    lengths = (64, 63, 7, 5, 2)
    for found in pool(world).run(work.dtensors, lengths):
        assert tuple(found) == lengths
        assert max(found.values()) <= 1e-13


MESSAGES = {
    "odd": ("of 7", "layouts.like_dtensor(7, 2)"),
    "sinks": ("sinks must be a plain tensor", "sinks.to_local()"),
    "alibi": ("alibi must be a plain tensor", "alibi.to_local()"),
    "captured": ("score function", "DTensor"),
    "sparse": ("compares dense tensors", "'a' (Tensor of layout torch.sparse_coo)", "Leave them out"),
    "dtensor": ("'a' (DTensor)", "Leave them out"),
    "stranger": ("not a member of it", "on the group's members only"),
    "stranger's batch": ("not a member of it",),
    "number": ("but got int",),
    "members": ("",),
    "dense": ("not refused",),
}


def test_what_is_almost_right_is_named():
    first, second = pool(2).run(work.messages)
    assert second.keys() == MESSAGES.keys()
    assert first["members"] == "not refused"
    for found in (first, second):
        wrong = {name: said for name, said in found.items() if not all(part in said for part in MESSAGES[name])}
        assert not wrong
