"""Calls of PyTorch's attention inside contexts of Longspan, on real Gloo processes."""

import pytest

from longspan.torch_api import routes
from tests.hosts import torch_routes_work as work
from tests.hosts.test_torch_api import assert_exact, run

pytestmark = pytest.mark.timeout(240)


def test_flex_attention_of_pytorch_is_over_all_ranks():
    assert_exact(run(work.flex_calls))


def test_gathered_keys_are_left_to_pytorch():
    for results in run(work.gathered):
        assert max(results.pop(name) for name in ("eager", "compiled", "longspan")) < 2e-6
        assert "Call cross attention outside the context" in results.pop("cross")
        assert results.keys() == {"score_mod", "mask"}
        for message in results.values():
            assert message.startswith("PlanError: `key` must be a shard")


SAYS = {
    "local": "PlanError: block_mask must be for 64 queries and 64 keys, but got 32 and 32. Create it for the whole",
    "rows of this rank": "PlanError: block_mask must be for 64 queries and 64 keys, but got 32 and 64.",
    "another layout": "LayoutError: `block_mask` must be sharded like query",
    "another length": "LayoutError: `block_mask` must be sharded like query",
    "a table": "PlanError: `block_mask` must be a BlockMask",
    "heads": "PlanError: query has 2 heads and key 1",
    "options": "KernelError: kernel_options must be empty",
    "maxima": "PlanError: max_scores is not supported with a plan",
}


def test_flex_attention_of_pytorch_refuses_in_words():
    for results in run(work.flex_refusals):
        assert results.keys() == SAYS.keys()
        for name, message in results.items():
            assert message.startswith(SAYS[name]), f"{name}: {message}"


def test_flex_attention_of_pytorch_is_itself_outside_and_in_other_threads():
    for errors in run(work.flex_outside):
        assert max(errors) < 2e-6


@pytest.mark.parametrize("tokens", [64, 37])
def test_flex_attention_of_dtensors(tokens):
    assert_exact(run(work.dtensors, tokens))


def test_sdpa_in_one_graph():
    assert_exact(run(work.in_one_graph))


def test_every_function_of_a_name_is_special():
    """Functions that PyTorch passes to modes under the names that the router looks for."""
    from torch.overrides import get_overridable_functions

    names = {"scaled_dot_product_attention", *routes._UNROUTED, "backward"}
    passed = {f for functions in get_overridable_functions().values() for f in functions}
    wanted = {f for f in passed if getattr(f, "__name__", "").partition(".")[0] in names}
    assert len(wanted) >= 3
    assert wanted <= routes._special_functions.keys()
    assert {routes._special_names[f.__name__] for f in wanted} <= names
