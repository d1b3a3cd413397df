"""No NaN on any finite input, no harm from garbage in padding, and a merge that holds for every pair of partials.

Tolerances: four roundings of everything that is summed, and of the scores, whose errors exp() magnifies (see `Oracle`).
A partial result carries its lse in float32, a number of the size of the scores, so it is in that budget. For bfloat16
and float16 PyTorch's CPU kernel uses a faster exponential, measured to be off by up to 4e-5; lse shows it.
"""

import numpy as np
import pytest
import torch

import longspan
from longspan import layouts, masks
from longspan.kernels import choose_kernel, kernel_named
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.run.passes import Backward, Forward, Saved, stand_in
from longspan.run.transports import Loopback
from longspan.run.walk import Job
from longspan.testing import run_loopback
from tests.exact_cases import NAMES, Oracle, unit
from tests.flat_rows import Accumulator, Sum

S, DIM, WORLD = 192, 16, 4
SCHEMES = ("ring", "exchange", "all_gather", "all_to_all", "hybrid(2)", "hybrid(2,exchange)", "staged")
KERNELS = ("reference", "auto")
DTYPES = (torch.float32, torch.bfloat16)
FAST_EXP = 5e-5
HEADS = (4, 2, 2, 4)  # of q, k, v and the gradient of the output


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _ordinary():
    return [_randn(1, heads, S, DIM, seed=seed) for seed, heads in enumerate(HEADS)]


def _large_logits():
    q, k, v, dout = _ordinary()
    return q * 60, k * 60, v, dout


def _key_outlier():
    q, k, v, dout = _ordinary()
    k[:, :, S // 3] *= 500
    return q, k, v, dout


def _value_outlier():
    q, k, v, dout = _ordinary()
    v[:, :, S // 3] = 3e4
    return q, k, v, dout


def _all_far_below():
    q, k, v, dout = _ordinary()
    return 40 + q / 4, -40 + k / 4, v, dout


def _without_rows(start, stop):
    """Causal, but these rows see nothing."""
    return masks.causal(S) & ~Mask.of_bands(np.array([[start, stop, 0, S, -S, S]]), S, f"rows {start}:{stop}")


RAGGED = Layout.from_spans(S, [[(150, 192), (3, 4)], [], [(0, 3), (4, 149)], [(149, 150)]], name="ragged")
FUTURE_FIRST = Layout.from_spans(S, [[(144, 192)], [(96, 144)], [(48, 96)], [(0, 48)]], name="future_first")
WINDOWS = masks.documents([70, 1, 60, 61]) & masks.sliding_window(20, 3)

HARD = {
    "logits of 1e4": (_large_logits, masks.causal(S), layouts.zigzag(S, WORLD), 5e3),
    "a third of the rows masked": (_ordinary, _without_rows(S // 3, 2 * S // 3), layouts.zigzag(S, WORLD), 2),
    "future chunks first": (_ordinary, masks.causal(S), FUTURE_FIRST, 2),
    "windows, future chunks first": (_ordinary, WINDOWS, FUTURE_FIRST, 2),
    "a key outlier": (_key_outlier, masks.full(S), layouts.contiguous(S, WORLD), 1e3),
    "ragged and empty shards": (_ordinary, masks.causal(S), RAGGED, 2),
    "ragged and empty shards, windows": (_ordinary, WINDOWS, RAGGED, 2),
    "a value outlier": (_value_outlier, masks.causal(S), layouts.striped(S, WORLD, stripe=16), 2),
    "all logits near -6400": (_all_far_below, masks.full(S), layouts.zigzag(S, WORLD), 6e3),
    "all together": (_large_logits, WINDOWS & _without_rows(100, 130), RAGGED, 5e3),
}


def _plan(mask, layout, scheme, dtype, **options):
    sizes = {"q_heads": HEADS[0], "kv_heads": HEADS[1], "head_dim": DIM, "dtype": dtype}
    return longspan.plan(mask, layout, scheme=scheme, **sizes, **options)


def _assert_near(oracle, found, dtype, what):
    for name, tensor in zip(NAMES, found, strict=True):
        assert not tensor.isnan().any(), f"{name} has nan: {what}"
        assert name == "lse" or tensor.isfinite().all(), f"{name} is not finite: {what}"
    fast = FAST_EXP if dtype.itemsize < 4 else 0.0
    for name, tensor, error, rounding in zip(NAMES, found, oracle.errors(found), oracle.roundings(dtype), strict=True):
        limit = 4 * rounding + (fast * tensor.numel() ** 0.5 if name == "lse" else 0.0)
        assert error <= limit, f"{name} is off by {error:.2e}, limit {limit:.2e}: {what}"


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", HARD)
def test_no_nan_on_finite_inputs(which, dtype):
    make, mask, layout, logits = HARD[which]
    q, k, v, dout = (t.to(dtype) for t in make())
    scale = DIM**-0.5
    oracle = Oracle.of(q, k, v, dout, mask, scale)
    assert oracle.largest >= logits, "the input is not as hard as it says"
    for scheme in SCHEMES:
        plan = _plan(mask, layout, scheme, dtype)
        for kernel in KERNELS:
            found = run_loopback(plan, q, k, v, dout, kernel=kernel, scale=scale)
            _assert_near(oracle, found, dtype, f"{which}, {scheme}, {kernel}")


# -- padding -----------------------------------------------------------------------------------------------------------


def _run_shards(plan, shards, kernel, scale):
    """Every rank's (out, lse, dq, dk, dv), padding and all, from every rank's (q, k, v, dout)."""
    chosen = kernel_named(choose_kernel(kernel, *shards[0][:3]))
    jobs = [Job(plan, rank, chosen, scale, shards[0][0].dtype) for rank in range(len(shards))]
    pairs = list(zip(jobs, shards, strict=True))
    forward = Loopback().run([Forward(job, *own[:3]).program(saves=True) for job, own in pairs])
    programs = [
        Backward(job, Saved(*own[:3], out, lse, kept), own[3]).program()
        for (job, own), (out, lse, kept) in zip(pairs, forward, strict=True)
    ]
    gradients = Loopback().run(programs)
    return [(out, lse, *found) for (out, lse, _), found in zip(forward, gradients, strict=True)]


@pytest.mark.share(5)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_garbage_in_padding_goes_nowhere(scheme, dtype, garbage):
    tokens = S - 3
    q, k, v, dout = (t[:, :, :tokens].to(dtype) for t in _ordinary())
    mask = masks.documents([70, 1, tokens - 71]) & masks.sliding_window(20, 3) | masks.global_prefix(5)
    oracle = Oracle.of(q, k, v, dout, mask, DIM**-0.5)
    for layout in (
        layouts.contiguous(tokens, WORLD, equal_tokens=True),
        layouts.zigzag(tokens, WORLD, equal_tokens=True),
        layouts.per_document([70, tokens - 70], WORLD, equal_tokens=True),
        Layout.from_spans(tokens, [[(0, 90)], [], [(90, 91)], [(91, tokens)]], local_len=100),
    ):
        assert sum(layout.num_padding(rank) for rank in range(WORLD)) >= 3
        plan = _plan(mask, layout, scheme, dtype)
        for kernel in KERNELS:
            runs = []
            for fill in (garbage, 0.0):
                ranks = range(WORLD)
                shards = [[layout.shard(t, rank, dim=2, fill=fill) for t in (q, k, v, dout)] for rank in ranks]
                runs.append(_run_shards(plan, shards, kernel, DIM**-0.5))
            found, clean = ([layout.unshard(part, dim=2) for part in zip(*run, strict=True)] for run in runs)
            what = f"{scheme}, {kernel}, {layout}"
            _assert_near(oracle, found, dtype, what)
            for name, a, b in zip(NAMES, found, clean, strict=True):
                assert torch.equal(a, b), f"{name} of real rows depends on what padding holds: {what}"
            for rank, five in enumerate(runs[0]):  # padding rows are rows that see nothing and are seen by nobody
                for name, tensor in zip(NAMES, five, strict=True):
                    padding = tensor[:, :, int(layout.num_tokens[rank]) :]
                    assert padding.shape[2] == layout.num_padding(rank)
                    expected = -torch.inf if name == "lse" else 0.0
                    assert (padding == expected).all(), f"{name} of padding on rank {rank}: {what}"


# -- merge -------------------------------------------------------------------------------------------------------------


def _partials(count, rows, dtype, seed=0, spread=1.0):
    """(out, lse) of `count` groups of keys, some of which some rows do not see, and the whole in float64."""
    scores = _randn(1, 2, rows, count, 5, seed=seed).double() * spread
    scores[:, :, ::3, 0] = -torch.inf
    scores[:, :, ::4] = -torch.inf  # these rows see nothing at all
    values = _randn(1, 2, 1, count, 5, 3, seed=seed + 1).double()
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
    outs = (weights.unsqueeze(-1) * values).sum(-2)
    whole = scores.flatten(3).logsumexp(-1)
    weights = torch.exp(scores.flatten(3) - whole.masked_fill(whole.isneginf(), 0.0).unsqueeze(-1))
    out = (weights.unsqueeze(-1) * values.flatten(3, 4)).sum(-2)
    return [(outs[..., i, :].to(dtype), lse[..., i].to(dtype)) for i in range(count)], out, whole


@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_merge_equals_one_softmax_in_any_order_and_grouping(dtype, spread):
    rows, count = 12, 7
    partials, out, lse = _partials(count, rows, dtype, spread=spread)
    nothing = lse.isneginf()
    assert nothing.any()
    assert not nothing.all()
    like = torch.zeros(1, 2, rows, 3, dtype=dtype)
    # a partial's lse is one number rounded to |lse| * unit, and that is the relative error of its weight
    weight = (8 + 4 * float(lse[~nothing].abs().max())) * unit(dtype)
    for order in (range(count), reversed(range(count)), (3, 0, 6, 1, 5, 2, 4)):
        order = list(order)
        flat, inner, outer = (Accumulator(like, 3) for _ in range(3))
        for i in order:
            flat.add(0, rows, *partials[i])
        for i in order[:4]:
            inner.add(0, rows, *partials[i])
        outer.add(0, rows, *inner.result())
        for i in order[4:]:
            outer.add(0, rows, *partials[i])
        for accumulator in (flat, outer):
            found, stat = accumulator.result()
            assert found.dtype == stat.dtype == dtype
            assert torch.equal(stat.isneginf(), nothing)
            assert not found[nothing].any()
            assert (found - out).abs().max() <= weight * out.abs().max()
            assert (stat - lse)[~nothing].abs().max() <= weight


def test_merge_of_far_apart_partials_overflows_nowhere():
    like = torch.zeros(1, 1, 4, 1)
    ones = torch.ones(1, 1, 4, 1)
    far = torch.tensor([3e38, -3e38, 1e4, -torch.inf]).view(1, 1, 4)
    near = torch.tensor([-3e38, 3e38, -1e4, -torch.inf]).view(1, 1, 4)
    for first, second in ((far, near), (near, far)):
        accumulator = Accumulator(like, 1)
        accumulator.add(0, 4, ones * first.sign().unsqueeze(-1), first)
        accumulator.add(0, 4, ones * second.sign().unsqueeze(-1), second)
        accumulator.add(0, 4, torch.zeros_like(ones), torch.full_like(far, -torch.inf))  # changes nothing
        out, lse = accumulator.result()
        assert torch.equal(lse, torch.maximum(far, near))
        assert out.flatten().tolist()[:3] == [1.0, 1.0, 1.0]
        assert torch.equal(out[..., 3, :], torch.zeros(1, 1, 1))


def test_nothing_comes_first_or_last_or_alone():
    like = torch.zeros(1, 1, 3, 2)
    some = (_randn(1, 1, 3, 2), _randn(1, 1, 3, seed=1))
    nothing = (torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), -torch.inf))
    for parts, expected in (
        ((), nothing),
        ((nothing,), nothing),
        ((nothing, nothing, nothing), nothing),
        ((some,), some),
        ((nothing, some), some),
        ((some, nothing), some),
        ((nothing, nothing, some, nothing), some),
    ):
        accumulator = Accumulator(like, 2)
        for part in parts:
            accumulator.add(0, 3, *part)
        assert accumulator.any() == bool(parts)
        for found, wanted in zip(accumulator.result(), expected, strict=True):
            assert torch.equal(found, wanted)


def test_a_row_depends_on_its_own_contributions_alone():
    """Stretches overlap in every way, and every row has the bits it would have by itself."""
    rows, like = 20, torch.zeros(1, 1, 20, 2, dtype=torch.bfloat16)
    stretches = [(0, 5), (5, 9), (3, 7), (12, 13), (12, 13), (14, 20), (16, 17), (0, 1)]
    made, alone = Accumulator(like, 2), [Accumulator(like[:, :, :1], 2) for _ in range(rows)]
    for i, (start, stop) in enumerate(stretches):
        part = _randn(1, 1, stop - start, 2, seed=i), _randn(1, 1, stop - start, seed=50 + i)
        made.add(start, stop, *part)
        for row in range(start, stop):
            alone[row].add(0, 1, *(t[:, :, row - start : row - start + 1] for t in part))
    out, lse = made.result()
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    for row in range(rows):
        one, stat = alone[row].result()
        assert torch.equal(out[:, :, row : row + 1], one), row
        assert torch.equal(lse[:, :, row : row + 1], stat), row
    assert lse[0, 0, 9:12].isneginf().all()
    assert not out[0, 0, 9:12].any()


STRETCHES = [(0, 2), (3, 4), (1, 4), (5, 6), *[(1, 3)] * 300]


def test_sums_of_gradients_are_float32_and_rounded_once():
    like = (torch.zeros(1, 1, 7, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 7, 3, dtype=torch.bfloat16))
    made, expected = Sum(like, torch.float32), [torch.zeros(t.shape, dtype=torch.float64) for t in like]
    assert not made.any()
    size = sum(1 for _ in STRETCHES) ** 0.5 * unit(torch.float32)
    for i, (start, stop) in enumerate(STRETCHES):
        parts = [_randn(1, 1, stop - start, t.shape[3], seed=i) for t in like]
        copies = [part.clone() for part in parts]
        made.add(start, stop, *parts)
        assert all(torch.equal(a, b) for a, b in zip(parts, copies, strict=True)), "a contribution was written to"
        for total, part in zip(expected, parts, strict=True):
            total[:, :, start:stop] += part
    assert made.any()
    for found, total in zip(made.result(torch.float32), expected, strict=True):
        assert (found - total).abs().max() <= size * total.abs().max()
        assert not found[:, :, [4, 6]].any()
    for narrow, wide in zip(made.result(torch.bfloat16), made.result(torch.float32), strict=True):
        assert torch.equal(narrow, wide.bfloat16())


def test_contributions_are_never_written_to():
    """They may be views of a message, or of a kernel's buffer that another stretch uses too."""
    out, lse = _randn(1, 1, 6, 2), _randn(1, 1, 6, seed=1)
    before = out.clone(), lse.clone()
    results, sums = Accumulator(torch.zeros(1, 1, 6, 2), 2), Sum((torch.zeros(1, 1, 6, 2),), torch.float32)
    for start, stop in ((0, 6), (2, 4), (0, 6), (3, 5)):
        results.add(start, stop, out[:, :, start:stop], lse[:, :, start:stop])
        sums.add(start, stop, out[:, :, start:stop])
        results.result()
        sums.result(torch.float32)
        assert torch.equal(out, before[0])
        assert torch.equal(lse, before[1])


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES, torch.float16], ids=str)
def test_the_stand_in_for_an_output_has_its_row_sums(dtype):
    dout, out = _randn(1, 2, 50, 8).to(dtype), _randn(1, 2, 50, 8, seed=1).to(dtype)
    dout[:, :, 0] = 0
    dout[:, :, 1] *= 1e-4
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    delta = (dout.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    made = stand_in(dout, delta)
    assert made.isfinite().all()
    assert (made.double().norm(dim=-1) <= out.double().norm(dim=-1) * (1 + 4 * unit(dtype))).all()
    found = (dout.double() * made.double()).sum(-1, keepdim=True)
    size = (dout.double() * made.double()).abs().sum(-1, keepdim=True)
    assert ((found - delta.double()).abs() <= 8 * unit(made.dtype) * size + 1e-12).all()
