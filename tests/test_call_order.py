"""Ranks that make the same calls in the same order get right answers; in another order they are told, and none is mixed
up."""

import order_work
import pytest
from pool import pool

SCHEMES = ("ring", "all_gather", "exchange", "all_to_all", "hybrid(2)")


@pytest.fixture(autouse=True, scope="module")
def _fresh_ranks():
    """Calls that were refused leave messages under way that nobody finishes."""
    yield
    for world in (2, 3, 4):
        pool(world).end()


def refused(found, *says):
    """All ranks were told, within 3 seconds. Two that find out at once name each other."""
    for kind, text, seconds in found:
        assert kind == "RankError", (kind, text)
        assert all(word in text for word in says), text
        assert seconds < 3.0, (seconds, text)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_order_that_all_ranks_share_is_right(scheme):
    world = 4 if "hybrid" in scheme else 2
    for seed in range(2):
        found = pool(world).run(order_work.right_orders, scheme, seed)
        assert all(right for right, _ in found)
        assert min(count for _, count in found) >= 10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plans_in_another_order_are_refused(scheme):
    world = 4 if "hybrid" in scheme else 2
    refused(pool(world).run(order_work.swapped, "plans", scheme), "does something else", "(forward", "plan ")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_backward_passes_in_another_order_are_refused(scheme):
    world = 4 if "hybrid" in scheme else 2
    found = pool(world).run(order_work.swapped, "backward", scheme)
    refused(found, "does something else", "(backward of call 9", "(backward of call 10")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_names_in_another_order_are_refused(scheme):
    world = 4 if "hybrid" in scheme else 2
    refused(pool(world).run(order_work.swapped, "names", scheme), "does something else", "'text'", "'image'")


def test_three_ranks_are_all_told():
    refused(pool(3).run(order_work.swapped, "plans", "ring"), "does something else")


def test_headers_know_the_forward_too():
    refused(pool(2).run(order_work.swapped, "backward", "ring", True), "does something else", "backward of call")


def test_calls_of_one_plan_without_names_cannot_be_told_apart():
    """The reverse, and what docs/trust.md says: nothing is refused, and the answers are those of other calls."""
    for kind, text, _ in pool(2).run(order_work.swapped, "nothing", "ring"):
        assert kind == "none"
        assert min(float(error) for error in text[1:-1].split(",")) > 0.01


def test_a_rank_that_needs_no_messages_and_went_on_is_named():
    found = pool(2).run(order_work.one_is_alone, "messages")
    refused(found, "rank 0 did something else in call 7", "it is in call 9")


def test_sums_over_ranks_of_different_calls_do_not_meet():
    refused(pool(2).run(order_work.one_is_alone, "collective"), "something else", "backward of call")


def test_sums_over_ranks_in_one_order_are_right():
    assert all(pool(3).run(order_work.summed_twice))
