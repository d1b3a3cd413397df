"""Attention under transforms of PyTorch: fake tensors, vmap, and masks without a length in compiled code."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import longspan as ls

CALLS = {"attention": ls.attention, "flex": lambda q, k, v, mask: ls.flex_attention(q, k, v, None, mask)}


def drawn(*batch):
    return [torch.randn(*batch, 2, 4, 16, 8) for _ in range(3)]


@pytest.mark.parametrize("call", CALLS)
def test_fake_tensors_have_shapes_and_gradients(call):
    mask, (q, k, v) = ls.masks.causal(), drawn()
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(t).requires_grad_() for t in (q, k, v)]
        out = CALLS[call](*leaves, mask)
        assert isinstance(out, FakeTensor)
        out.sum().backward()
        assert leaves[0].grad.shape == q.shape
        with pytest.raises(ls.MaskError, match="17 tokens"):
            CALLS[call](*leaves, ls.masks.causal(17))
    real = CALLS[call](q, k, v, mask)
    assert (out.shape, out.stride(), out.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("call", CALLS)
def test_vmap_is_refused_in_words(call):
    mask, (q, k, v) = ls.masks.causal(), drawn(3)
    with pytest.raises(ls.PlanError, match=r"torch\.vmap.*batch dim"):
        torch.vmap(lambda q, k, v: CALLS[call](q, k, v, mask))(q, k, v)
    flat = CALLS[call](*(t.flatten(0, 1) for t in (q, k, v)), mask).unflatten(0, (3, 2))
    for i in range(3):
        torch.testing.assert_close(flat[i], CALLS[call](q[i], k[i], v[i], mask))


@pytest.mark.parametrize("call", CALLS)
def test_a_mask_without_a_length_in_one_graph(call):
    mask = ls.masks.causal()
    compiled = torch.compile(lambda *x: CALLS[call](*x, mask), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*(x := drawn())), CALLS[call](*x, mask))


Q, TWO, TOKENS = torch.randn(1, 2, 8, 4), torch.ones(2), torch.randn(1, 8, 2, 4)
CAUSAL = ls.masks.causal()
OPERATORS = {
    "q": (lambda x: ls.attention(x, x, x, CAUSAL), Q),
    "sinks": (lambda x: ls.attention(Q, Q, Q, CAUSAL, sinks=x), TWO),
    "a tensor of shape": (lambda x: ls.attention(Q, Q, Q, CAUSAL, alibi=x), TWO),
    "x": (lambda x: ls.causal_conv1d(x, torch.ones(4, 3)), TOKENS.flatten(2)[..., :4]),
    "queries": (lambda x: ls.linear_attention(x, x, x), TOKENS),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_func_is_refused_in_words(name):
    call, x = OPERATORS[name]
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(ls.PlanError, match=r"must not be differentiated by torch\.func"):
            transform(lambda x: call(x).sum())(x)
    leaf = x.clone().requires_grad_()
    assert torch.autograd.grad(call(leaf).sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("name", ["sinks", "queries"])
def test_vmap_over_other_tensors_is_refused_in_words(name):
    call, x = OPERATORS[name]
    with pytest.raises(ls.PlanError, match=r"must not be mapped by torch\.vmap"):
        torch.vmap(call)(torch.stack([x, x]))
