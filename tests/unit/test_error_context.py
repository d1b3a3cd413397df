"""Errors say once, at the boundary, in which call they were raised: shapes, mask, layout and rank."""

import pickle

import pytest
import torch

import longspan as ls
from longspan.errors import AgreementError, LongspanError, PlanError, in_context

MASK = ls.masks.documents([5, 3]) & ls.masks.causal()
SHAPES = "q (1, 4, 8, 16), k (1, 2, 8, 16), v (1, 2, 8, 12)"


def tensors(**options):
    return [torch.randn(1, heads, 8, dim, **options) for heads, dim in ((4, 16), (2, 16), (2, 12))]


def test_a_call_with_a_mask_says_shapes_and_mask():
    with pytest.raises(LongspanError, match="kernel") as caught:
        ls.attention(*tensors(), MASK, kernel="nonsense")
    message = str(caught.value)
    assert message.endswith(f"The call: attention of {SHAPES}, under {MASK!r}.")
    assert message.count("The call: ") == 1


def test_a_call_with_a_plan_says_scheme_and_layout_too():
    layout = ls.layouts.zigzag(8, 2)
    plan = ls.plan(MASK, layout, q_heads=4, kv_heads=2, head_dim=16, v_head_dim=12, dtype="float32", scheme="ring")
    with pytest.raises(PlanError, match="group") as caught:
        ls.attention(*tensors(), plan)
    assert str(caught.value).endswith(f"The call: attention of {SHAPES}, by ring of {MASK!r} over {layout!r}.")


def test_what_a_function_does_deep_inside_is_told_with_the_call():
    def wrong(score, b, h, q_idx, kv_idx):
        return score > 0

    with pytest.raises(LongspanError, match="score_mod") as caught:
        ls.flex_attention(*tensors(), wrong, MASK, enable_gqa=True)
    assert f"The call: flex_attention of {SHAPES}, under {MASK!r}." in str(caught.value)


def test_plan_says_mask_and_layout():
    layout = ls.layouts.contiguous(8, 2)
    with pytest.raises(LongspanError, match="leaves 1 over") as caught:
        ls.plan(MASK, layout, q_heads=3, kv_heads=2, head_dim=16, dtype="float32")
    assert str(caught.value).endswith(f"The call: plan of {MASK!r} over {layout!r}.")


def test_arguments_that_are_nothing_of_the_kind_are_left_out():
    with pytest.raises(LongspanError) as caught:
        ls.attention(None, *tensors()[1:], "causal")
    assert str(caught.value).endswith("The call: attention of k (1, 2, 8, 16), v (1, 2, 8, 12).")
    with pytest.raises(LongspanError) as caught:
        ls.attention(None, None, None, None)
    assert str(caught.value).endswith("The call: attention.")


def test_the_inner_call_is_named_and_other_errors_stay_as_they_are():
    inner, outer = (in_context(lambda name=name: f"The call: {name}.") for name in ("inner", "outer"))
    with pytest.raises(LongspanError, match=r"^wrong\. The call: inner\.$") as caught, outer, inner:
        raise PlanError("wrong.")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(KeyError) as other, in_context(lambda: pytest.fail("described")):
        raise KeyError("wrong.")
    assert other.value.args == ("wrong.",)


def test_a_call_that_is_right_is_never_described():
    with in_context(lambda: pytest.fail("described")):
        assert ls.attention(*tensors(), MASK).shape == (1, 4, 8, 12)


def test_errors_about_all_ranks_are_the_same_on_each():
    with pytest.raises(AgreementError, match=r"^ranks differ\.$"), in_context(lambda: pytest.fail("described")):
        raise AgreementError("ranks differ.")
