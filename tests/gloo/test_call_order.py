"""Ranks that make the same calls in the same order get right results; in another order they wait, and no message is
taken for one of another call."""

from dataclasses import replace

import pytest
import torch

from longspan.run.group import MAX_STEP, Call
from tests.gloo import order_work
from tests.pool import end_all, pool

SCHEMES = ("ring", "all_gather", "exchange", "all_to_all", "hybrid(2)")


@pytest.fixture(autouse=True, scope="module")
def _fresh_ranks():
    """Calls that were refused leave messages under way that nobody finishes."""
    yield
    end_all()


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_order_that_all_ranks_share_is_right(scheme):
    world = 4 if "hybrid" in scheme else 2
    for seed in range(2):
        found = pool(world).run(order_work.right_orders, scheme, seed)
        assert all(right for right, _ in found)
        assert min(count for _, count in found) >= 10


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("how", ["plans", "backward", "names"])
def test_messages_of_different_calls_never_match(how, scheme):
    """Some rank waits until the timeout of the group, and no rank has a wrong result."""
    found = pool(4 if "hybrid" in scheme else 2).run(order_work.swapped, how, scheme)
    end_all()
    assert any("Timed out" in text for _, text in found), found
    for errors, text in found:
        assert text
        assert all(error < order_work.LIMIT for error in errors)


def test_calls_of_one_plan_without_names_cannot_be_told_apart():
    """The reverse, and what docs/limits.md says: nothing raises, and the results are those of other calls."""
    for errors, text in pool(2).run(order_work.swapped, "nothing", "ring"):
        assert not text
        assert min(errors) > 0.01


def test_sums_over_ranks_in_one_order_are_right():
    assert all(pool(3).run(order_work.summed_twice))


CALL = Call("ab" * 32, "forward", torch.device("cpu"))
CHANGES = {"fingerprint": "ac" * 32, "direction": "backward", "forward": 4, "name": "text"}


def tags(call, number=7):
    return [call.tag(number) | step for step in range(MAX_STEP + 1)]


@pytest.mark.parametrize("field", CHANGES)
def test_tags_tell_calls_apart(field):
    mine, others = tags(CALL), tags(replace(CALL, **{field: CHANGES[field]}))
    assert not {*mine} & {*others}
    assert all(0 <= tag < 1 << 31 for tag in (*mine, *others))


def test_tags_of_neighbours_differ():
    found = [tag for number in range(100) for tag in tags(CALL, number)]
    assert len(set(found)) == len(found)
    assert tags(replace(CALL)) == tags(CALL)
