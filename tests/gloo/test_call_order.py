"""Ranks that make the same calls in the same order get right answers; in another order they are told, and none is mixed
up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longspan.run.group import COMPARED, ROWS, TABLE, VERDICT, Call, Running, Safety
from tests.gloo import order_work
from tests.pool import end_all, pool

SCHEMES = ("ring", "all_gather", "exchange", "all_to_all", "hybrid(2)")


@pytest.fixture(autouse=True, scope="module")
def _fresh_ranks():
    """Calls that were refused leave messages under way that nobody finishes."""
    yield
    end_all()


def refused(found, *says):
    """All ranks were told, within 3 seconds. Two that find out at once name each other."""
    for kind, text, seconds in found:
        assert kind == "RankError", (kind, text)
        assert all(word in text for word in says), text
        assert seconds < 3.0, (seconds, text)


@pytest.mark.share(3)
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


CALL = Call("ab" * 32, "forward", 3, torch.float32, torch.device("cpu"), Safety())
CHANGES = {"fingerprint": "ac" * 32, "direction": "backward", "forward": 4, "name": "text"}


def tags(call, number=7, training_step=3):
    running = Running(SimpleNamespace(training_step=training_step), call, number, None)
    return [running.tag(step) for step in range(COMPARED)], [running.tag(step) for step in (ROWS, VERDICT, TABLE)]


@pytest.mark.parametrize("field", CHANGES)
def test_tags_tell_calls_apart(field):
    """Whatever differs, no two tags are the same; what is compared before a plan is agreed on has the same ones."""
    mine, compared = tags(CALL)
    others, alike = tags(replace(CALL, **{field: CHANGES[field]}))
    assert not {*mine, *compared} & {*others}
    assert compared == alike
    assert all(0 <= tag < 1 << 31 for tag in (*mine, *others, *alike))


def test_tags_of_neighbours_differ():
    found = [tag for number in range(100) for part in tags(CALL, number) for tag in part]
    found += [tag for step in range(10) for part in tags(CALL, 200, step) for tag in part]
    assert len(set(found)) == len(found)
    same = tags(replace(CALL))
    assert same == tags(CALL)
