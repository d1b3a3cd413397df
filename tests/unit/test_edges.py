"""The edges of the range: scales that are not above 0, huge scores, numbers that are not finite, forward-mode
derivatives."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

import longspan as ls
from longspan.errors import LongspanError, PlanError
from longspan.kernels import kernel_named
from longspan.testing import allowed, dense_attention, run_loopback
from longspan.torch_api.api import flex_attention as flex_in_context
from longspan.training import gather_outputs, relayout, token_loss

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
@pytest.mark.parametrize("scale", [-0.7, 0.0, -0.0, 1e-30])
def test_any_finite_scale_is_right(scale, kernel):
    tensors, dout = inputs()
    for name, mask in MASKS.items():
        found = gradients(lambda q, k, v: ls.attention(q, k, v, mask, scale=scale, kernel=kernel), tensors, dout)  # noqa: B023
        truth = gradients(lambda q, k, v: dense_attention(q, k, v, mask, scale)[0], tensors, dout)  # noqa: B023
        for a, b in zip(found, truth, strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=1e-10), (name, (a - b).abs().max())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_any_finite_scale_is_right_over_ranks_and_with_functions(scale, ranks):
    tensors, dout = inputs()
    for name in ("window", "function"):
        plan = ls.plan(MASKS[name], ls.layouts.contiguous(S, ranks), q_heads=4, kv_heads=2, head_dim=8, dtype="float64")
        found = run_loopback(plan, *tensors, dout, scale=scale)
        truth = gradients(lambda q, k, v: dense_attention(q, k, v, MASKS[name], scale)[0], tensors, dout)  # noqa: B023
        for a, b in zip((found[0], *found[2:]), truth, strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=1e-10), (name, (a - b).abs().max())
    found = gradients(lambda q, k, v: ls.attention(q, k, v, ls.masks.causal(), scale=scale, softcap=2.0), tensors, dout)
    want = gradients(
        lambda q, k, v: ls.attention(q * scale, k, v, ls.masks.causal(), scale=1.0, softcap=2.0), tensors, dout
    )
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_finite_number_is_refused_however_it_is_given(scale):
    (q, k, v), _ = inputs()
    for given in (scale, torch.tensor(scale), np.float32(scale), np.float64(scale)):
        with pytest.raises(PlanError, match="scale"):
            ls.attention(q, k, v, ls.masks.causal(), scale=given)
        with pytest.raises(PlanError, match="scale"):
            ls.flex_attention(q, k, v, None, ls.masks.causal(), scale=given, enable_gqa=True)


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


# -- not finite --------------------------------------------------------------------------------------------------------


def by_rows(q, k, v, mask, scale):
    """Dense attention in which no row so much as touches what it does not see: rows are gathered one by one."""
    seen, rows = allowed(mask, 1, q.shape[1], S)[0], []
    for h in range(q.shape[1]):
        for i in range(S):
            at = torch.as_tensor(seen[h, i]).nonzero()[:, 0]
            keys, values = (x[0, h * k.shape[1] // q.shape[1]][at] for x in (k, v))
            rows.append((q[0, h, i] @ keys.mT * scale).softmax(-1) @ values)
    return torch.stack(rows).view(1, q.shape[1], S, -1)


PLACES = [(None, "one device"), (1, "exchange"), (2, "ring"), (3, "exchange"), (4, "all_gather"), (2, "all_to_all")]


def run_at(place, mask, tensors, dout, kernel):
    ranks, scheme = place
    if ranks is None:
        return gradients(lambda q, k, v: ls.attention(q, k, v, mask, kernel=kernel, scale=0.5), tensors, dout)
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": str(dout.dtype)[6:]}
    plan = ls.plan(mask, ls.layouts.zigzag(S, ranks), scheme=scheme, **sizes)
    out, _, *rest = run_loopback(plan, *tensors, dout, kernel=kernel, scale=0.5)
    return out, *rest


@pytest.mark.share(3)
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", list(MASKS))
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(name, which):
    mask = MASKS[name]
    for value, token in ((math.nan, 20), (math.inf, 5), (-math.inf, 47)):
        tensors, dout = inputs(dtype=torch.float32)
        dict(zip("qkv", tensors, strict=True), dout=dout)[which][:, :, token] = value
        truth = gradients(lambda *t: by_rows(*t, mask, 0.5), [t.double() for t in tensors], dout.double())
        for place in PLACES:
            for kernel in ("auto", "reference"):
                found = run_at(place, mask, tensors, dout, kernel)
                for what, a, b in zip(("out", "dq", "dk", "dv"), found, truth, strict=True):
                    assert torch.equal(a.isfinite(), b.isfinite()), (place, kernel, what, value)
                    fine = b.isfinite()
                    assert torch.allclose(a[fine].double(), b[fine], atol=1e-5, rtol=1e-4), (place, kernel, what, value)


def test_what_is_not_finite_and_hidden_does_not_reach_tensors_of_score_functions():
    tensors, dout = inputs(dtype=torch.float32)
    tensors[1][:, :, 40:] = math.nan
    tensors[2][:, :, 40:] = math.inf
    table = torch.randn(S, requires_grad=True)
    mask = ls.masks.documents([40, 8])

    def biased(score, b, h, i, j):
        return score * table[(i - j).abs()]

    def run(call):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = call(*leaves)[:, :, :40]
        return torch.autograd.grad(out, (*leaves, table), dout[:, :, :40])

    found = run(lambda q, k, v: ls.attention(q, k, v, mask, score_mod=biased))
    want = run(
        lambda q, k, v: ls.attention(q[:, :, :40], k[:, :, :40], v[:, :, :40], ls.masks.full(), score_mod=biased)
    )
    assert torch.allclose(found[3][8:], want[3][8:], atol=1e-4, rtol=1e-4)  # up to 7 apart, the second document is met
    for a, b in zip(found[:3], want[:3], strict=True):
        assert torch.allclose(a[:, :, :40], b[:, :, :40], atol=1e-5, rtol=1e-4)


def test_finite_numbers_are_not_computed_twice(monkeypatch):
    """The other side: large and even overflowing sums of finite results are no reason for the slow path."""
    tensors, _ = inputs(dtype=torch.float32)
    monkeypatch.setattr(type(kernel_named("reference")), "forward", lambda *_: pytest.fail("the slow path"))
    tensors[2][:] = 1e37  # all values: sums of the outputs overflow, the outputs do not
    assert ls.attention(*tensors, MASKS["window"]).isfinite().all()


# -- forward-mode derivatives ------------------------------------------------------------------------------------------

CALLS = {
    "attention": lambda q: ls.attention(q, q, q, ls.masks.causal()),
    "softcap": lambda q: ls.attention(q, q, q, ls.masks.causal(), softcap=5.0),
    "flex": lambda q: ls.flex_attention(q, q, q, None, ls.masks.causal()),
    "torch_api": lambda q: flex_in_context(q, q, q, None, ls.masks.causal()),
    "value": lambda q: ls.attention(q.detach(), q.detach(), q, ls.masks.causal()),
    "sinks": lambda q: ls.attention(q.detach(), q.detach(), q.detach(), ls.masks.causal(), sinks=q[0, :, 0, 0]),
    "captured": lambda q: ls.attention(
        q.detach(), q.detach(), q.detach(), ls.masks.causal(), score_mod=lambda s, b, h, i, j: s + q[0, 0, 0, 0]
    ),
    "bias": lambda q: ls.attention(
        q.detach(), q.detach(), q.detach(), ls.masks.causal(), bias=q[..., :1] * torch.ones(8)
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # PyTorch loads its own rules by it
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", list(CALLS))
def test_forward_mode_derivatives_are_refused(name, grad):
    q, tangent = torch.randn(2, 1, 2, 8, 4)
    q.requires_grad_(grad)
    call = CALLS[name]
    with pytest.raises(PlanError, match="forward-mode derivative"):
        torch.func.jvp(call, (q,), (tangent,))
    with pytest.raises((PlanError, RuntimeError), match=r"forward-mode derivative|tracing tensor"):
        torch.func.linearize(call, q.detach())
    with forward_ad.dual_level(), pytest.raises(PlanError, match="forward-mode derivative"):
        call(forward_ad.make_dual(q, tangent))
    with forward_ad.dual_level():  # nothing in here depends on a dual number
        assert torch.equal(call(q), call(q.detach()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_training_helpers_refuse_forward_mode_derivatives():
    logits, tangent = torch.randn(2, 8, 5)
    labels = torch.randint(0, 5, (8,))
    layout = ls.layouts.contiguous(8, 1)
    calls = (
        lambda x: token_loss(x, labels, group=None, gradients="sum"),
        lambda x: relayout(x, layout, layout, None, 0),
        lambda x: gather_outputs(x, layout, None, 0),
    )
    for call in calls:
        with pytest.raises(PlanError, match="forward-mode derivative"):
            torch.func.jvp(call, (logits,), (tangent,))
        with forward_ad.dual_level(), pytest.raises(PlanError, match="forward-mode derivative"):
            call(forward_ad.make_dual(logits, tangent))
    assert token_loss(logits, labels, group=None, gradients="sum").isfinite()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_jacobians_are_refused_one_way_or_another():
    q = torch.randn(1, 2, 4, 4)
    for take in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises((PlanError, RuntimeError)):
            take(CALLS["attention"])(q)
