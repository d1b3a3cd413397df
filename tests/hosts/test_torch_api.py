"""PyTorch's words for context parallelism: its own matrix of tests, and what it cannot do, on real Gloo processes."""

import pytest

from benchmarks import lightness
from tests.hosts import torch_api_work as work
from tests.pool import pool

TIMEOUT = 200.0
pytestmark = pytest.mark.timeout(240)


def run(function, *args, world=2):
    return pool(world).run(function, *args, timeout=TIMEOUT)


def assert_exact(ranks):
    for rank, found in enumerate(ranks):
        assert found
        for what, error, limit in found:
            assert error <= limit, f"rank {rank} is off by {error:.2e}: {what}"


@pytest.mark.share(3)
@pytest.mark.parametrize(("world", "tokens"), [(2, 32), (2, 37), (4, 37)])
@pytest.mark.parametrize("way", work.WAYS)
def test_the_matrix_of_pytorch(way, world, tokens):
    """Causal or not x balance x rotation x forward only; PyTorch itself takes 32 tokens of these, and no causal CPU."""
    assert_exact(run(work.matrix, way, tokens, world=world))


@pytest.mark.share(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", work.WAYS)
def test_masks_pytorch_cannot_say(way, world):
    assert_exact(run(work.masks_and_balancers, way, world=world))


def test_a_warm_step_makes_few_calls():
    for found in run(lightness.context_parallel_step):
        assert found["calls"] <= 600, found


def test_rotate_method_names_the_schedule():
    for names in run(work.rotations):
        assert names == ["all_gather", "ring", "ring"]


@pytest.mark.parametrize("world", [2, 4])
def test_buffers_are_shards_inside_and_themselves_after(world):
    assert run(work.buffers, world=world) == ["done"] * world


def test_contexts_nest_and_threads_have_their_own():
    for errors in run(work.nested):
        assert max(errors) < 1e-12


def test_inner_contexts_and_modules_inherit():
    for errors in run(work.inherited):
        assert max(errors) < 1e-12


def test_a_context_that_ran_backward_and_routed_no_attention_raises():
    for found in run(work.unseen):
        for name in ("in_a_thread", "eager"):
            assert found.pop(name).startswith(
                "PlanError: backward ran in a context of Longspan that routed no attention"
            )
        assert set(found.values()) == {"not refused"}, found


@pytest.mark.parametrize("world", [2, 4])
def test_layouts_are_those_of_balancers_contexts_and_options(world):
    for found in run(work.layouts, world=world):
        for name, ended, expected in found:
            assert ended is expected or (ended is not True and isinstance(expected, str) and expected in str(ended)), (
                f"{name}: {ended}"
            )


def test_what_else_may_happen_in_a_context():
    for errors in run(work.beside):
        assert max(errors) < 2e-5


@pytest.mark.parametrize("world", [2, 4])
def test_flex_attention_in_wrapped_modules(world):
    assert_exact(run(work.flex, world, world=world))


@pytest.mark.parametrize("how", ["plain", "checkpointed", "reentrant", "compiled"])
def test_layers_in_a_context(how):
    """Checkpoints run forward again in backward; that must be routed, or fail where the context is over."""
    for errors, late in run(work.layers, how):
        assert max(errors) < 1e-12
        assert how != "checkpointed" or "different number of tensors" in late


def test_checkpoints_are_wrong_or_raise_where_backward_has_no_mode():
    """What `Router._differentiate` is for: reentrant checkpoints recompute local attention and say nothing."""
    for found in run(work.without_differentiate):
        assert found[True] > 1e-2
        assert "CheckpointError" in found[False]


def test_gradients_of_what_scores_captured():
    for errors in run(work.learned):
        assert max(errors) < 1e-12


def test_gradients_may_be_asked_for_in_every_way():
    for found in run(work.gradients):
        assert len(found) == 9
        assert all(found)


def test_dtensors_copies_and_shards_of_any_length():
    for errors in run(work.dtensors_and_copies):
        assert max(errors) < 1e-12


SAYS = {
    "mesh": "Pass one, as in mesh['cp']",
    "dims": "Pass one dim for each",
    "twice": "List it once",
    "lengths": "Cut all to one length",
    "grad": "Shard it with context_parallel_shard",
    "subset": "List the same tensor objects",
    "mask": "Make them for the same sequence",
    "kind of mask": "in global positions",
    "balancer": "must be Contiguous(), HeadTail()",
    "documents": "load_balancer has 7",
    "padding": "has padding",
    "padding of labels": "has padding",
    "dims by name": "`seq_dims` must be a list of dims",
    "rotation": "must be 'allgather' or 'alltoall'",
    "type": "must be 'sdpa' or 'flex'",
    "no attention": "Apply it to the module that calls attention",
    "unshard": "Pass the load_balancer= and seq_len= by which they were sharded",
    "placement": "Redistribute it",
    "attn_mask": "context_parallel(..., mask=)",
    "dropout": "drops by global positions",
    "heads": "Pass enable_gqa=True",
    "tokens": "Shard inputs as the context shards its buffers",
    "cross": "Call cross attention outside the context",
    "dims of q": "(batch, heads, tokens, features)",
    "multihead": "in a module of your own",
    "varlen": "mask=longspan.masks.documents(...)",
    "flex": "for the whole sequence",
    "local blocks": "for the whole sequence",
    "kernel": "none of these can run",
}


def test_refusals_say_what_to_do():
    for found in run(work.refusals):
        assert found.pop("math") < 1e-5
        assert found.keys() == SAYS.keys()
        for name, message in found.items():
            assert SAYS[name] in message, f"{name}: {message}"
