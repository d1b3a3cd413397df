"""Causal convolutions on real Gloo processes: exactness, ways to call them, refusals."""

import pytest

from tests.conv_cases import NAMES
from tests.gloo import conv_work
from tests.pool import pool

NUM_CASES = {2: 40, 3: 40, 4: 40}
CHUNK = 20


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("world", "first"), [(world, first) for world, count in NUM_CASES.items() for first in range(0, count, CHUNK)]
)
def test_ranks_compute_what_documents_by_themselves_give(world, first):
    seeds = [10_000 * world + seed for seed in range(first, first + CHUNK)]
    for rank, found in enumerate(pool(world).run(conv_work.run_cases, seeds, world)):
        for seed, case, errors in found:
            for name, error in zip(NAMES, errors, strict=False):
                assert error <= 1e-12, f"{name} on rank {rank}, seed {seed}: {error}, {case}"


@pytest.mark.parametrize("world", [2, 3])
def test_ways_to_call_it(world):
    for found in pool(world).run(conv_work.scenes):
        assert len(found) == 5
        for name, error in found.items():
            assert error <= 1e-12, f"{name}: {error}"


def test_calls_that_do_not_fit_are_refused():
    wanted = {
        "no group": ("the plan is for 2 ranks", "needs group="),
        "no plan": ("group must be None without a plan", "longspan.conv_plan("),
        "tokens": ("x has shape (1, 7, 4)", "layout.shard(x, rank, dim=1)"),
        "dtype": ("x has dtype torch.float64", "Cast x, or plan for it"),
        "size": ("the plan is for 3 ranks, but the group has 2", "Plan for the group's size"),
        "width": ("a width of 2, but the plan is for width 3", "Plan for the width of the weight"),
        "attention's": ("but got Plan, which is a plan of attention", "longspan.conv_plan("),
        "a convolution's": ("plan_or_mask", "ConvPlan"),
        "both": ("documents must be None with a plan",),
        "no group at all": (
            "group must be a process group or a mesh of one axis, but got str",
            "The call: causal_conv1d",
        ),
    }
    for messages in pool(2).run(conv_work.refusals):
        assert messages.keys() == wanted.keys()
        for name, parts in wanted.items():
            assert all(part in messages[name] for part in parts), f"{name}: {messages[name]}"


@pytest.mark.parametrize(
    ("what", "named"),
    [("documents", "mask: "), ("layout", "layout: "), ("width", "scheme: convolution of width 5 on ranks 0, 2")],
)
def test_plans_that_differ_are_refused_by_all(what, named):
    for message in pool(3).run(conv_work.different, what):
        assert message.startswith("AgreementError")
        assert named in message
        assert "no data was sent" in message
    assert pool(3).run(conv_work.different, "nothing") == ["nothing was found"] * 3
