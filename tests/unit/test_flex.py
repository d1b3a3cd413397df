"""flex_attention by PyTorch's signature, against PyTorch's own, and mistakes that were once made."""

import gc
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import longspan as ls
from longspan import layouts, masks
from longspan.errors import LongspanError
from longspan.scores import RelativeBias
from longspan.scoring.biases import Extras
from longspan.testing import run_loopback

F64 = torch.float64


def tensors(*shapes):
    return [torch.randn(shape, dtype=F64) for shape in shapes]


def close(a, b):
    assert a.shape == b.shape
    assert torch.equal(a.isneginf(), b.isneginf())
    assert (a - b).nan_to_num().abs().max() <= 1e-12


CASES = {
    "plain": ({}, None, None),
    "causal": ({}, lambda b, h, i, j: i >= j, None),
    "blind rows": ({}, lambda b, h, i, j: (i >= j) & (i % 5 != 0), None),
    "rows and heads differ": ({"heads": 4}, lambda b, h, i, j: i + h >= j + b, None),
    "score": ({}, lambda b, h, i, j: i >= j, lambda s, b, h, i, j: torch.tanh(s) - h * (i - j) * 0.1 + b),
    "grouped": ({"groups": 2}, lambda b, h, i, j: i >= j, lambda s, b, h, i, j: s * (h + 1)),
    "more keys": ({"keys": 70}, lambda b, h, i, j: i + 20 >= j, lambda s, b, h, i, j: s + j * 0.01),
    "more queries": ({"keys": 25}, lambda b, h, i, j: i >= j, None),
    "narrow values": ({"v_dim": 6}, lambda b, h, i, j: i >= j, None),
    "one batch of keys": ({"key_batch": 1}, lambda b, h, i, j: i >= j + b, None),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", CASES)
def test_equals_pytorch(name):
    sizes, mod, score = CASES[name]
    batch, heads, length, dim = 2, 4, 50, 8
    keys, groups, v_dim = sizes.get("keys", length), sizes.get("groups", heads), sizes.get("v_dim", dim)
    key_batch = sizes.get("key_batch", batch)
    torch.manual_seed(1)
    q, k, v, dout, dlse = tensors(
        (batch, heads, length, dim), (key_batch, groups, keys, dim), (key_batch, groups, keys, v_dim),
        (batch, heads, length, v_dim), (batch, heads, length),
    )  # fmt: skip
    block = None if mod is None else create_block_mask(mod, batch, heads, length, keys, device="cpu", BLOCK_SIZE=16)
    found = ls.flex_attention(q, k, v, score, block, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True))
    wanted, aux = torch_flex(q, k, v, score, block, enable_gqa=True, return_aux=AuxRequest(lse=True))
    close(found[0], wanted)
    close(found[1].lse, aux.lse)
    # gradients, which PyTorch refuses on CPUs, from a dense computation
    ours, dense = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    out, lse = ls.flex_attention(*ours, score, block, enable_gqa=True, return_lse=True)
    expected, expected_lse, top = dense_flex(*dense, mod, score)
    close(found[1].max_scores, top)
    seen = ~lse.isneginf()
    gradients = torch.autograd.grad((out, lse[seen]), ours, (dout, dlse[seen]))
    for a, b in zip(
        gradients, torch.autograd.grad((expected, expected_lse[seen]), dense, (dout, dlse[seen])), strict=True
    ):
        close(a, b)


def dense_flex(q, k, v, mod, score):
    batch, heads, length, _ = q.shape
    k, v = (t.expand(batch, -1, -1, -1).repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    index = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, length, k.shape[2])), indexing="ij")
    scores = q @ k.mT / q.shape[3] ** 0.5
    scores = scores if score is None else score(scores, *index)
    scores = scores if mod is None else scores.masked_fill(~mod(*index), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()
    return p @ v, lse, scores.detach().amax(-1)


def test_the_result_has_pytorchs_shape():
    q, k, v = tensors(*[(1, 2, 8, 4)] * 3)
    assert isinstance(ls.flex_attention(q, k, v), torch.Tensor)
    assert len(ls.flex_attention(q, k, v, return_lse=True)) == 2
    assert ls.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))[1].max_scores is None
    assert ls.flex_attention(q, k, v, return_aux=AuxRequest())[1].lse is None


def test_under_a_plan():
    q, k, v = tensors(*[(1, 2, 24, 4)] * 3)
    plan = ls.plan(masks.causal(), layouts.contiguous(24, 1), q_heads=2, kv_heads=2, head_dim=4, dtype=F64)
    score = lambda s, b, h, i, j: s - (i - j) * 0.1  # noqa: E731
    close(ls.flex_attention(q, k, v, score, plan=plan), ls.flex_attention(q, k, v, score, masks.causal()))


Q = torch.zeros(1, 2, 8, 4)
PLAN = ls.plan(masks.causal(), layouts.contiguous(8, 1), q_heads=2, kv_heads=2, head_dim=4, dtype=torch.float32)
REFUSED = {
    "3 dims": (lambda: ls.flex_attention(Q[0], Q, Q), "4 dims"),
    "heads differ": (lambda: ls.flex_attention(Q, Q[:, :1], Q[:, :1]), "enable_gqa=True"),
    "two ways to ask": (lambda: ls.flex_attention(Q, Q, Q, return_lse=True, return_aux=AuxRequest()), "return_lse"),
    "kernel options": (lambda: ls.flex_attention(Q, Q, Q, kernel_options={"BLOCK_M": 64}), "BLOCK_M"),
    "a function as mask": (lambda: ls.flex_attention(Q, Q, Q, None, lambda b, h, i, j: i >= j), "from_mask_mod"),
    "another length": (
        lambda: ls.flex_attention(
            Q, Q, Q, None, create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, "cpu")
        ),
        "got 16 and 16",
    ),
    "plan and mask": (lambda: ls.flex_attention(Q, Q, Q, None, masks.full(8), plan=PLAN), "block_mask"),
    "maxima under a plan": (
        lambda: ls.flex_attention(Q, Q, Q, plan=PLAN, return_aux=AuxRequest(max_scores=True)),
        "not sent between ranks",
    ),
    "batch sizes": (lambda: ls.flex_attention(Q.expand(3, -1, -1, -1), Q.expand(2, -1, -1, -1), Q), "batch rows"),
    "a bias that is no number": (
        lambda: ls.attention(Q, Q, Q, masks.causal(), bias=torch.ones(1, 1, 8, 8, dtype=torch.bool)),
        "To hide pairs",
    ),
    "a fraction as seed": (lambda: ls.attention(Q, Q, Q, masks.causal(), dropout=0.1, seed=1.5), "seed = 1.5"),
    "too few buckets": (lambda: RelativeBias(torch.zeros(3, 2)), "2 buckets or more"),
    "too short a distance": (lambda: RelativeBias(torch.zeros(32, 2), max_distance=8), "max_distance=8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(LongspanError, match=words.replace("(", r"\(")):
        call()


def test_masks_that_differ_in_few_pairs_are_not_taken_for_each_other():
    length = 4096
    q, k, v = tensors(*[(1, 1, length, 8)] * 3)
    for edge in (2000, 2001):
        ids = (torch.arange(length) >= edge).long()
        opaque = masks.from_mask_mod(lambda b, h, i, j, ids=ids: ids[i] == ids[j], within=masks.causal(length))
        close(
            ls.attention(q, k, v, opaque),
            ls.attention(q, k, v, masks.documents([edge, length - edge]) & masks.causal()),
        )


def test_a_tensor_filled_anew_is_read_anew_by_a_new_mask():
    q, k, v = tensors(*[(1, 1, 300, 8)] * 3)
    ids = torch.zeros(300, dtype=torch.long)
    function = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731
    for edge in (100, 170):
        ids.copy_(torch.arange(300) >= edge)
        close(
            ls.attention(q, k, v, masks.from_mask_mod(function, 300)),
            ls.attention(q, k, v, masks.documents([edge, 300 - edge])),
        )


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x, one: torch.einsum("...i,i->...", x, one),
        torch.inner,
        lambda x, one: x.nansum(-1),
        lambda x, one: x.log().logsumexp(-1).exp(),
        lambda x, one: x.unbind(-1)[0] + x.unbind(-1)[1],
        lambda x, one: x[..., 0] + x[..., 1],
    ],
)
def test_functions_that_mix_are_never_misread_on_tiles(reduce):
    q, k, v = tensors(*[(1, 2, 16, 8)] * 3)
    starts, one, table = (torch.tensor(t, dtype=F64) for t in ([6.0, 9.0], [1.0, 1.0], [0.0, 3.0, -3.0]))
    plan = ls.plan(
        masks.full(16), layouts.contiguous(16, 4), q_heads=2, kv_heads=2, head_dim=8, dtype=F64, scheme="ring"
    )
    number = torch.tensor([int((i >= starts).sum()) for i in range(16)])
    mixing = lambda s, b, h, i, j: s + table[reduce((i >= starts).to(F64), one).round().long()] * (i - j)  # noqa: E731
    plain = lambda s, b, h, i, j: s + table[number[i]] * (i - j)  # noqa: E731
    found, wanted = (run_loopback(plan, q, k, v, q, extras=Extras(score_mod=f))[0] for f in (mixing, plain))
    close(found, wanted)


def test_score_functions_are_let_go():
    q, k, v = tensors(*[(1, 2, 16, 8)] * 3)
    slopes = torch.randn(2, dtype=F64, requires_grad=True)

    def step():
        function = lambda s, b, h, i, j: s * slopes[h]  # noqa: E731
        ls.attention(q, k, v, masks.causal(16), score_mod=function).sum().backward()
        return weakref.ref(function)

    left = step()
    gc.collect()
    assert left() is None


def test_a_sink_of_minus_infinity_on_a_row_that_sees_nothing():
    q, k, v = tensors(*[(1, 2, 16, 8)] * 3)
    sinks = torch.tensor([-torch.inf, 0.0], dtype=F64, requires_grad=True)
    out = ls.attention(q, k, v, ~masks.full(16), sinks=sinks)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(sinks.grad, torch.zeros(2, dtype=F64))


def test_autocast_narrows_nothing_inside():
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    score = lambda s, b, h, i, j: s - (i - j) * 0.1  # noqa: E731
    plain = ls.attention(q, k, v, masks.causal(), score_mod=score)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ls.attention(q, k, v, masks.causal(), score_mod=score), plain)


def test_loops_that_rebind_a_variable_do_not_reach_back():
    q, k, v = tensors(*[(1, 2, 150, 8)] * 3)
    found, wanted = [], []
    for gather, fresh in ((found, False), (wanted, True)):
        x, biases = (
            q.clone().requires_grad_(),
            [torch.full((2,), float(n), dtype=F64, requires_grad=True) for n in (1, 2)],
        )
        out = x
        for bias, width in zip(biases, (5, 50), strict=True):
            score = lambda s, b, h, i, j: s * (1 + bias[h])  # noqa: B023, E731
            near = lambda b, h, i, j: (i - j).abs() < width  # noqa: B023, E731
            if fresh:
                score = lambda s, b, h, i, j, bias=bias: s * (1 + bias[h])  # noqa: E731
                near = lambda b, h, i, j, width=width: (i - j).abs() < width  # noqa: E731
            out = ls.flex_attention(out, k, v, score, masks.from_mask_mod(near, 150))
        gather += torch.autograd.grad(out.square().sum(), (x, *biases))
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


def test_a_tensor_changed_between_forward_and_backward_is_refused():
    q, k, v = (t.requires_grad_() for t in tensors(*[(1, 2, 16, 8)] * 3))
    bias = torch.randn(1, 1, 16, 16, dtype=F64)
    out = ls.attention(q, k, v, masks.causal(), bias=bias)
    bias.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_slopes_in_bfloat16_do_not_round_distances():
    q, k, v = (torch.randn(1, 2, 600, 8) for _ in range(3))
    slopes = torch.tensor([0.25, 0.5])
    narrow = ls.attention(q, k, v, ~masks.causal(600), alibi=-slopes.bfloat16())
    assert torch.equal(narrow, ls.attention(q, k, v, ~masks.causal(600), alibi=-slopes))


def test_functions_are_not_asked_beyond_their_tables():
    q, k, v = tensors((1, 2, 100, 8), (1, 2, 300, 8), (1, 2, 300, 8))
    rows, keys = torch.arange(100) % 3, torch.arange(300) % 3
    mod = lambda b, h, i, j: rows[i] == keys[j]  # noqa: E731
    block = create_block_mask(mod, None, None, 100, 300, device="cpu")
    expected, _, _ = dense_flex(q, k, v, mod, None)
    close(ls.flex_attention(q, k, v, None, block), expected)


def test_functions_in_place_and_of_vectors():
    q, k, v = (t.requires_grad_() for t in tensors(*[(1, 1, 5, 8)] * 3))
    x = torch.randn(5, 3, dtype=F64)
    mask = masks.documents([4, 1])
    pairs = [
        (lambda s, b, h, i, j: s.mul(2), lambda s, b, h, i, j: s.mul_(2)),
        (lambda s, b, h, i, j: s + (x[i] * x[j]).sum(-1), lambda s, b, h, i, j: s + torch.dot(x[i], x[j])),
    ]
    for plain, other in pairs:
        results = []
        for score in (plain, other):
            out = ls.flex_attention(q, k, v, score, mask)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for a, b in zip(*results, strict=True):
            close(a, b)


def test_a_scale_that_wants_a_gradient_is_refused():
    with pytest.raises(LongspanError, match="Multiply q by it"):
        ls.attention(Q, Q, Q, masks.causal(), scale=torch.ones((), requires_grad=True))
