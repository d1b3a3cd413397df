"""plan(): named schemes obeyed or refused, auto tells, figures are those of the schedule, values stay values."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

import longspan as ls
from longspan.planning import MACHINES, Link, simulate, validate
from longspan.testing import run_loopback

MASK = ls.masks.documents([1500, 2000, 596]) & ls.masks.causal()
LAYOUT = ls.layouts.balanced(MASK, world_size=8)
SHAPE = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}


def test_auto_compares_every_scheme_and_takes_the_quickest():
    plan = ls.plan(MASK, LAYOUT, **SHAPE, machine="cpu")
    names = [reason.scheme for reason in plan.reasons]
    assert {"ring", "all_gather", "exchange", "all_to_all", "hybrid(2,ring)", "hybrid(2,exchange)"} <= set(names)
    assert [reason.chosen for reason in plan.reasons] == [True] + [False] * (len(names) - 1)
    assert plan.scheme.name == names[0]
    assert plan.predicted_seconds == min(reason.seconds for reason in plan.reasons if not reason.at_least)
    text = str(plan)
    assert all(name in text for name in names)
    assert "simulated" in text
    assert "assumed" not in text
    assert "assumed" in str(ls.plan(MASK, LAYOUT, **SHAPE, scheme="ring"))


@pytest.mark.parametrize("name", ["ring", "all_gather", "exchange", "all_to_all", "hybrid(4, exchange)", "hybrid(2)"])
def test_a_named_scheme_is_obeyed_and_its_figures_are_its_own(name):
    plan = ls.plan(MASK, LAYOUT, **SHAPE, scheme=name)
    assert plan.scheme.name == name.replace(" ", "")
    for direction in ("forward", "backward"):
        schedule = plan.schedule(direction)
        validate(schedule, MASK)
        seen = simulate(schedule, plan.machine)
        assert [plan.bytes_received(r, direction) for r in range(8)] == list(seen.bytes_received)
        assert all(plan.peak_bytes(r) >= seen.peak_bytes[r] for r in range(8))
    work = np.zeros(8)
    for rank, steps in enumerate(plan.schedule().ranks):
        work[rank] = sum(b.area * len(c.q.heads) for s in steps for c in s.computes for b in c.bands)
    assert plan.imbalance == pytest.approx(work.max() / work.mean())
    assert work.sum() == MASK.area() * 8


def test_keeping_costs_memory_and_saves_bytes():
    kept, again = (ls.plan(MASK, LAYOUT, **SHAPE, scheme="exchange", keep=keep) for keep in (True, False))
    assert kept.bytes_received(3, "backward") < again.bytes_received(3, "backward")
    assert kept.kept(3)
    assert not again.kept(3)
    assert kept.fingerprint != again.fingerprint


def test_equal_arguments_give_the_same_plan_and_fingerprint():
    make = [ls.masks.documents([1500, 2000, 596]) & ls.masks.causal() for _ in range(2)]
    one, two = (ls.plan(mask, LAYOUT, **SHAPE, scheme="exchange") for mask in make)
    assert one is two
    assert one.fingerprint == ls.plan(MASK, LAYOUT, **SHAPE, scheme="exchange", machine=MACHINES["h100"]).fingerprint
    others = [
        ls.plan(MASK, LAYOUT, **SHAPE, scheme="ring"),
        ls.plan(MASK, ls.layouts.zigzag(4096, 8), **SHAPE, scheme="exchange"),
        ls.plan(MASK, LAYOUT, **{**SHAPE, "dtype": "float16"}, scheme="exchange"),
        ls.plan(MASK, LAYOUT, **SHAPE, v_head_dim=32, scheme="exchange"),
        ls.plan(MASK, LAYOUT, **SHAPE, batch=2, scheme="exchange"),
        ls.plan(MASK, LAYOUT, **SHAPE, scheme="exchange", fetch_bytes=1 << 18),
        ls.plan(MASK | ls.masks.global_prefix(1), LAYOUT, **SHAPE, scheme="exchange"),
    ]
    assert len({plan.fingerprint for plan in [one, *others]}) == len(others) + 1


def test_dtypes_may_be_torch_dtypes():
    torch = pytest.importorskip("torch")
    by_name = ls.plan(MASK, LAYOUT, **SHAPE, scheme="ring")
    assert ls.plan(MASK, LAYOUT, **{**SHAPE, "dtype": torch.bfloat16}, scheme="ring") is by_name


def test_a_machine_of_ones_own():
    slow = dataclasses.replace(MACHINES["cpu"], name="slow", links=(Link(1 << 30, 1e6, 1e-3),))
    plan = ls.plan(MASK, LAYOUT, **SHAPE, scheme="all_gather", machine=slow)
    assert plan.predicted_seconds > ls.plan(MASK, LAYOUT, **SHAPE, scheme="all_gather", machine="cpu").predicted_seconds


def test_several_masks_share_one_layout():
    window = MASK & ls.masks.sliding_window(256)
    layout = ls.layouts.balanced(MASK, window, world_size=8)
    for mask in (MASK, window):
        plan = ls.plan(mask, layout, **SHAPE, scheme="exchange")
        validate(plan.schedule(), mask)
        assert plan.imbalance < 1.2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scheme": "Ring"}, "must be one of ring"),
        ({"scheme": "hybrid(3)"}, "divisor of 8"),
        ({"scheme": "hybrid(2, tree)"}, "must be one of ring"),
        ({"machine": "h300"}, "must be a Machine or one of h100"),
        ({"dtype": "int8"}, "must be one of float64"),
        ({"kv_heads": 3}, "leaves 2 over"),
        ({"head_dim": 0}, "at least 1"),
        ({"fetch_bytes": 100}, "fetch_bytes must be at least"),
        ({"fetch_bytes": 1 << 20, "scheme": "ring"}, "fetch_bytes must be None with scheme 'ring'"),
    ],
)
def test_refusals(change, words):
    with pytest.raises(ls.LongspanError, match=words):
        ls.plan(MASK, LAYOUT, **{**SHAPE, **change}).reasons  # noqa: B018


@pytest.mark.parametrize("scheme", ["exchange", "staged", "hybrid(2,exchange)", "auto"])
def test_schemes_with_stages_take_a_limit_of_remote_keys(scheme):
    ls.plan(MASK, LAYOUT, **SHAPE, fetch_bytes=1 << 20, scheme=scheme)


def test_work_of_more_pairs_than_63_bits_is_counted():
    heads, seq_len, ranks = 512, 1 << 31, 8
    plan = ls.plan(
        ls.masks.full(seq_len), ls.layouts.zigzag(seq_len, ranks), q_heads=heads, kv_heads=heads, head_dim=8,
        dtype="bfloat16", scheme="exchange",
    )  # fmt: skip
    assert plan.scheme.work.tolist() == [heads * (seq_len // ranks) * float(seq_len)] * ranks
    with pytest.raises(ls.PlanError, match="at most 3,000,000,000 tokens, but got 4,000,000,000"):
        ls.plan(ls.masks.causal(), ls.layouts.contiguous(4_000_000_000, 8), **SHAPE)


def test_wrong_kinds_of_arguments_are_named():
    with pytest.raises(ls.PlanError, match="Layout and Mask"):
        ls.plan(LAYOUT, MASK, **SHAPE)
    with pytest.raises(ls.MaskError, match="is for 4096 tokens"):
        ls.plan(MASK, ls.layouts.zigzag(100, 8), **SHAPE)
    with pytest.raises(ls.PlanError, match="no rank 8"):
        ls.plan(MASK, LAYOUT, **SHAPE, scheme="ring").steps(8)
    with pytest.raises(ls.PlanError, match="'forward' or 'backward'"):
        ls.plan(MASK, LAYOUT, **SHAPE, scheme="ring").steps(0, "sideways")


@pytest.mark.parametrize("scheme", ["auto", "ring", "exchange", "all_gather", "all_to_all"])
@pytest.mark.parametrize("seq_len", [0, 1])
def test_sequences_of_no_and_of_one_token(scheme, seq_len):
    for layout in (ls.layouts.zigzag, ls.layouts.contiguous, ls.layouts.striped):
        plan = ls.plan(
            ls.masks.causal(), layout(seq_len, 2), q_heads=2, kv_heads=1, head_dim=4, dtype="float32", scheme=scheme
        )
        assert f"{seq_len} tokens on 2 ranks" in str(plan)
        tensors = [torch.randn(1, heads, seq_len, 4, requires_grad=True) for heads in (2, 1, 1)]
        out = ls.attention(*tensors, ls.masks.causal())
        dout = torch.randn_like(out)
        out.backward(dout)
        with torch.no_grad():
            over, _, *gradients = run_loopback(plan, *tensors, dout)
        assert torch.allclose(over, out, atol=1e-6)
        assert all(torch.allclose(grad, t.grad, atol=1e-6) for grad, t in zip(gradients, tensors, strict=True))


def test_functions_are_not_asked_about_sequences_of_no_tokens():
    q, k, v = (torch.randn(1, 2, 0, 4, requires_grad=True) for _ in range(3))
    table = torch.randn(1, 0)
    out = ls.attention(q, k, v, ls.masks.causal(), score_mod=lambda s, b, h, i, j: s + table[b, i])
    out.sum().backward()
    assert out.shape == q.grad.shape == (1, 2, 0, 4)
    with pytest.raises(ls.KernelError, match="needs a seed"):
        ls.attention(q, k, v, ls.masks.causal(), dropout=0.5)


def test_plans_of_equal_masks_have_their_own_fingerprints():
    """Documents of one token each, under a causal mask and under a window: the same pairs in other bands. A rank whose
    cache still holds a plan of one must not use it for the other, which ranks with another cache would refuse."""
    alone = ls.masks.documents([1] * 37)
    pair = [(alone & other).resized(37) for other in (ls.masks.causal(), ls.masks.sliding_window(8))]
    assert pair[0] == pair[1]
    assert pair[0].fingerprint != pair[1].fingerprint
    sizes = {"q_heads": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    layout = ls.layouts.zigzag(37, 2)
    plans = [ls.plan(mask, layout, **sizes) for mask in pair]
    assert [plan.mask.fingerprint for plan in plans] == [mask.fingerprint for mask in pair]
    assert ls.plan(pair[0], layout, **sizes) is plans[0]


# -- plans that travel: through a DataLoader's workers, in a copy ------------------------------------------------------


def every_third(b, h, q, kv):
    return (kv <= q) & ((q - kv) % 3 == 0)


TRAVELLERS = {
    "documents": ls.masks.documents([150, 90, 16]) & ls.masks.causal(),
    "per head": ls.masks.per_head(*[ls.masks.sliding_window(n, 256) for n in (3, 40, 40, 90)]),
    "per row": ls.masks.per_row(ls.masks.causal(256), ls.masks.documents([150, 106])),
    "function": ls.masks.from_mask_mod(every_third, 256),
}
SCHEMES = [
    "ring",
    "exchange",
    "all_gather",
    "staged",
    "all_to_all",
    "hybrid(2,ring)",
    "hybrid(2,exchange)",
    "hybrid(2,staged)",
    "auto",
]


def copies_of(value):
    return [pickle.loads(pickle.dumps(value)), copy.deepcopy(value)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", TRAVELLERS)
def test_copied_plans_are_equal_and_compute_the_same(name, scheme):
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "batch": 2, "dtype": "float64"}
    plan = ls.plan(TRAVELLERS[name], ls.layouts.zigzag(256, 4), scheme=scheme, **sizes)
    copies = copies_of(plan)
    text = str(plan)  # prices the plan, without the steps of most ranks
    copies += copies_of(plan)
    generator = torch.Generator().manual_seed(5)
    q, dout = torch.randn(2, 2, 4, 256, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 256, 8, generator=generator, dtype=torch.float64)
    expected = run_loopback(plan, q, k, v, dout)
    for other in [*copies, *copies_of(plan), *copies_of(copies[0])]:
        assert other is not plan
        assert all(map(torch.equal, run_loopback(other, q, k, v, dout), expected))
        assert (str(other), other.fingerprint) == (text, plan.fingerprint)
        for direction in ("forward", "backward"):
            assert other.schedule(direction).text() == plan.schedule(direction).text()
