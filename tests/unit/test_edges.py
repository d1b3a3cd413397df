"""The edges of the range: small and refused scales, huge scores, derivatives beyond first ones in reverse mode."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

import longspan as ls
from longspan.errors import LongspanError, PlanError
from longspan.run.simulated import simulate
from longspan.testing import dense_attention, run_loopback
from longspan.torch_api.api import flex_attention as flex_in_context
from longspan.training import gather_outputs, gather_tokens, per_sequence, token_logprobs, token_loss
from longspan.verification import loopback_attention

S = 48
IDS = torch.tensor([0] * 17 + [1] * 20 + [2] * 11)
MASKS = {
    "causal": ls.masks.causal(S),
    "full": ls.masks.full(S),
    "window": ls.masks.sliding_window(9).resized(S),
    "documents": ls.masks.documents([17, 20, 11]) & ls.masks.causal(),
    "prefix": ls.masks.documents([17, 31]),
    "function": ls.masks.from_mask_mod(lambda b, h, i, j: (IDS[i] == IDS[j]) & ((i - j) % 3 != 1), S),
}


def inputs(heads=(4, 2), dim=8, dtype=torch.float64, tokens=S, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], dim), (heads[1], dim), (heads[1], dim))
    made = [torch.randn(1, h, tokens, d, generator=generator, dtype=torch.float64).to(dtype) for h, d in shapes]
    return made, torch.randn(1, heads[0], tokens, dim, generator=generator, dtype=torch.float64).to(dtype)


def gradients(call, tensors, dout):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


# -- scale -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "cpu_flash", "reference", "flex"])
@pytest.mark.parametrize("scale", [1e-30, 3.0])
def test_scales_above_0_are_right(scale, kernel):
    tensors, dout = inputs()
    for name, mask in MASKS.items():
        found = gradients(lambda q, k, v: ls.attention(q, k, v, mask, scale=scale, kernel=kernel), tensors, dout)  # noqa: B023
        truth = gradients(lambda q, k, v: dense_attention(q, k, v, mask, scale)[0], tensors, dout)  # noqa: B023
        for a, b in zip(found, truth, strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=1e-10), (name, (a - b).abs().max())


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.7, math.nan, math.inf, -math.inf])
def test_other_scales_are_refused_however_they_are_given(scale):
    """Fused kernels give wrong numbers for them: some multiply what hides a pair by the scale."""
    (q, k, v), dout = inputs()
    for given in (scale, torch.tensor(scale), np.float32(scale), np.float64(scale)):
        for kernel in ("auto", "cpu_flash", "reference", "flex"):
            with pytest.raises(PlanError, match="scale must be"):
                ls.attention(q, k, v, ls.masks.causal(), scale=given, kernel=kernel)
        with pytest.raises(PlanError, match="scale must be"):
            ls.flex_attention(q, k, v, None, ls.masks.causal(), scale=given, enable_gqa=True)
    plan = ls.plan(ls.masks.causal(), ls.layouts.zigzag(S, 2), q_heads=4, kv_heads=2, head_dim=8, dtype="float64")
    with pytest.raises(PlanError, match="scale must be"):
        run_loopback(plan, q, k, v, dout, scale=scale)


def test_numbers_of_numpy_and_torch_are_numbers():
    (q, k, v), _ = inputs()
    causal = ls.masks.causal()
    want = ls.attention(q, k, v, causal, scale=0.25, dropout=0.25, seed=3, softcap=2.0)
    for kind in (np.float32, np.float64, torch.tensor):
        given = {"scale": kind(0.25), "dropout": 0.25, "seed": 3, "softcap": 2.0}
        assert torch.equal(ls.attention(q, k, v, causal, **given), want)
    for kind in (np.int64, np.uint8):
        given = {"scale": 0.25, "dropout": np.float32(0.25), "seed": kind(3), "softcap": np.float32(2.0)}
        assert torch.equal(ls.attention(q, k, v, causal, **given), want)
    for wrong in (1.0, True, -1, np.float64(3)):
        with pytest.raises(LongspanError, match="whole number from 0"):
            ls.attention(q, k, v, causal, dropout=0.1, seed=wrong)


# -- huge scores -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 300])
@pytest.mark.parametrize("magnitude", [1, 100, 300, 1000, 3000])
def test_gradients_of_huge_scores_are_as_good_as_pytorch_has_them(magnitude, size):
    (q, k, v), dout = inputs((2, 2), 32, tokens=size, seed=1)
    q, k, v, dout = (t.to(torch.bfloat16) for t in (q * magnitude, k * magnitude, v, dout))
    wide = [t.double() for t in (q, k, v)]
    truth = gradients(lambda *t: scaled_dot_product_attention(*t, is_causal=True), wide, dout)
    found = gradients(lambda *t: ls.attention(*t, ls.masks.causal()), (q, k, v), dout)
    torchs = gradients(lambda *t: scaled_dot_product_attention(*t, is_causal=True), (q, k, v), dout)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), found, torchs, truth, strict=True):
        mine, theirs = ((x.double() - c).norm() for x in (a, b))
        assert mine <= 2 * theirs + 2**-9 * c.norm(), (name, mine, theirs)


# -- derivatives that PyTorch would drop: forward mode, and gradients of gradients -------------------------------------

Q, TOKENS, CAUSAL = torch.randn(1, 2, 8, 4), torch.randn(1, 8, 2, 4), ls.masks.causal()
ALONE, LABELS = ls.layouts.contiguous(8, 1), torch.arange(8) % 5
CONV = ls.conv_plan([5, 3], ALONE, channels=8, width=3, dtype="float32")
SCAN = ls.scan_plan([5, 3], ALONE, heads=2, keys=4, values=4, maps="scalar", dtype="float32")
CALLS = {
    "attention": (lambda x: ls.attention(x, x, x, CAUSAL), Q),
    "softcap": (lambda x: ls.attention(x, x, x, CAUSAL, softcap=5.0), Q),
    "flex": (lambda x: ls.flex_attention(x, x, x, None, CAUSAL), Q),
    "torch_api": (lambda x: flex_in_context(x, x, x, None, CAUSAL), Q),
    "loopback": (lambda x: loopback_attention(x, x, x, PLAN), Q),
    "value": (lambda x: ls.attention(Q, Q, x, CAUSAL), Q),
    "sinks": (lambda x: ls.attention(Q, Q, Q, CAUSAL, sinks=x), torch.randn(2)),
    "captured": (lambda x: ls.attention(Q, Q, Q, CAUSAL, score_mod=lambda s, b, h, i, j: s * x[h]), torch.randn(2)),
    "bias": (lambda x: ls.attention(Q, Q, Q, CAUSAL, bias=x), torch.randn(1, 2, 8, 8)),
    "convolution": (lambda x: ls.causal_conv1d(x, torch.ones(8, 3), plan=CONV, activation="silu"), TOKENS.flatten(2)),
    "recurrence": (lambda x: ls.linear_attention(x, x, x, -x[..., 0].abs(), plan=SCAN), TOKENS),
    "loss with a head": (
        lambda x: token_loss(x, LABELS, group=None, gradients="sum", head=torch.ones(5, 4)), TOKENS[0, :, 0]
    ),
    "log-probabilities": (lambda x: token_logprobs(x, LABELS).logprobs, torch.randn(8, 5)),
}  # fmt: skip
PLAN = ls.plan(CAUSAL, ls.layouts.zigzag(8, 2), q_heads=2, kv_heads=2, head_dim=4, dtype="float32")


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # PyTorch loads its own rules by it
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", list(CALLS))
def test_forward_mode_raises(name, grad):
    call, x = CALLS[name]
    tangent, x = torch.randn_like(x), x.clone().requires_grad_(grad)
    for take in (
        lambda: torch.func.jvp(call, (x,), (tangent,)),
        lambda: torch.func.jacfwd(call)(x),
        lambda: torch.func.linearize(call, x.detach())[1](tangent),
    ):
        with pytest.raises((PlanError, RuntimeError)):
            take()
    with forward_ad.dual_level():
        with pytest.raises((PlanError, NotImplementedError), match=r"forward[- ]mode"):
            call(forward_ad.make_dual(x, tangent))
        assert torch.equal(call(x), call(x.detach()))  # nothing here depends on a dual number


@pytest.mark.parametrize("name", list(CALLS))
def test_a_gradient_penalty_raises(name):
    """Also where the incoming gradient is a constant, in which case `once_differentiable` lets it be 0."""
    call, x = CALLS[name]
    for loss in (torch.sum, lambda out: out.square().sum()):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(call(leaf)), leaf, create_graph=True)
        torch.testing.assert_close(gradient, torch.autograd.grad(loss(call(leaf)), leaf)[0])
        with pytest.raises(PlanError, match="must not be differentiated again"):
            (gradient.square().sum() + leaf.sum()).backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", list(CALLS))
def test_transforms_of_torch_func_are_right_or_raise(name):
    call, x = CALLS[name]
    several, dout = torch.stack([x, 2 * x]), torch.randn_like(torch.stack([call(x)] * 2))

    def loop(several):
        return torch.stack([call(x) for x in several])

    found = []
    for run in (loop, torch.vmap(call)):
        leaf = several.clone().requires_grad_()
        try:
            out = run(leaf)
            found.append((out.detach(), *torch.autograd.grad(out, leaf, dout)))
        except (LongspanError, RuntimeError):
            assert run is not loop
    assert all(torch.allclose(a, b) for a, b in zip(found[0], found[-1], strict=True))
    for take in (torch.func.grad, torch.func.jacrev):
        with pytest.raises((PlanError, RuntimeError)):
            take(lambda x: call(x).sum())(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_training_helpers_refuse_forward_mode():
    logits, tangent = torch.randn(2, 8, 5)
    calls = (
        lambda x: token_loss(x, LABELS, group=None, gradients="sum"),
        lambda ranks: lambda x: gather_outputs(x, ALONE, ranks, 0),
        lambda ranks: lambda x: gather_tokens(x, ALONE, ranks, dim=0),
        lambda ranks: lambda x: per_sequence(x[:, 0], ALONE, ranks),
    )

    def work(rank):
        for call in (calls[0], *(make(rank) for make in calls[1:])):
            with pytest.raises((PlanError, RuntimeError)):
                torch.func.jvp(call, (logits,), (tangent,))
            with forward_ad.dual_level(), pytest.raises((PlanError, NotImplementedError), match=r"forward[- ]mode"):
                call(forward_ad.make_dual(logits, tangent))

    simulate(1, work)
