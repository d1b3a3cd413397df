"""Attention under transforms of PyTorch: fake tensors, and masks without a length in compiled code."""

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
def test_a_mask_without_a_length_in_one_graph(call):
    mask = ls.masks.causal()
    compiled = torch.compile(lambda *x: CALLS[call](*x, mask), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*(x := drawn())), CALLS[call](*x, mask))
