"""Causal convolutions: all ranks in one process against each document by itself, in float64."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan import layouts, masks
from longspan.planning.validator import validate
from tests.conv_cases import KINDS, NAMES, conv_case, expected, run_conv_loopback, worst

COUNT, CHUNK = 600, 50


@pytest.mark.share(3)
@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_ranks_compute_what_documents_by_themselves_give(first):
    for seed in range(first, first + CHUNK):
        case = conv_case(seed)
        x, weight, bias, dout = case.tensors
        found = run_conv_loopback(case.plan, x, weight, bias, dout, activation=case.activation)
        for name, error in zip(NAMES, worst(found, expected(case)), strict=False):
            assert error <= 1e-12, f"{name}, seed {seed}: {error}, {case}"


def test_cases_are_of_every_kind():
    made = [conv_case(seed) for seed in range(COUNT)]
    assert len({case.layout.name for case in made}) >= 7
    assert any(case.layout.world_size > 1 and not case.layout.num_tokens.all() for case in made)
    assert any(case.layout.num_padding(0) for case in made)
    assert any(len(case.documents) and isinstance(case.documents[0], list) for case in made)
    widths = {case.tensors[1].shape[1] for case in made}
    assert {1, 64} < widths
    # halos that come from several ranks
    plans = [case.plan.halo for case in made if case.layout.world_size > 2]
    sources = [{t.src for s in plan.steps(0) for t in s.transfers if t.dst == 0} for plan in plans]
    assert max(map(len, sources)) >= 3
    assert len(KINDS) == 10


@pytest.mark.parametrize("seed", range(0, 200, 7))
def test_one_device_is_the_same(seed):
    case = conv_case(seed)
    x, weight, bias, dout = (None if t is None else t.clone().requires_grad_() for t in case.tensors)
    out = ls.causal_conv1d(x, weight, bias, documents=case.documents, activation=case.activation)
    found = out, *torch.autograd.grad(out, [t for t in (x, weight, bias) if t is not None], dout)
    assert max(worst(found, expected(case))) <= 1e-12


@pytest.mark.parametrize("seed", range(0, 120, 11))
def test_only_halos_travel_and_the_exchange_is_proved(seed):
    case = conv_case(seed)
    plan, layout = case.plan, case.layout
    for direction, itemsize in (("forward", 8), ("backward", 8)):
        sent = [0] * layout.world_size
        for rank in range(layout.world_size):
            rows = set()
            for row, lengths in enumerate(case.lengths):
                starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
                own = layout.positions(rank)[: int(layout.num_tokens[rank])].tolist()
                for at in own:
                    begin = max(start for start in starts if start <= at)
                    rows |= {(row, p) for p in range(max(begin, at - plan.width + 1), at) if p not in own}
            for _, at in rows:
                sent[int(layout.owner(at))] += 1
            if direction == "forward":
                assert plan.bytes_received(rank) == len(rows) * plan.channels * itemsize
        if direction == "backward":
            received = [plan.bytes_received(rank, "backward") for rank in range(layout.world_size)]
            assert received == [n * plan.channels * itemsize for n in sent]
    validate(plan.halo.schedule(), plan.halo.mask)


def test_gradients_by_differences():
    draw = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in ((2, 7, 2), (2, 3), (2,))
    )
    for options in ({}, {"documents": [3, 4]}, {"documents": [[3, 4], [7]], "activation": "silu"}):
        assert torch.autograd.gradcheck(lambda *t, o=options: ls.causal_conv1d(*t, **o), (x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(0, 60, 13))
def test_narrow_dtypes_are_as_exact_as_one_device(dtype, seed):
    case = conv_case(seed, dtype=dtype)
    x, weight, bias, dout = case.tensors
    found = run_conv_loopback(case.plan, x, weight, bias, dout, activation=case.activation)
    assert {t.dtype for t in found} == {dtype}
    # a sum of `width` products, rounded, and its gradients, which are sums over all tokens, rounded on each rank
    allowed = 8 * torch.finfo(dtype).eps * (2 + weight.shape[1] ** 0.5)
    assert max(worst(found, expected(case))) <= allowed


def test_a_halos_gradient_is_added_in_float32():
    # rank 1's token 1 adds 2**-9 of row 0 to rank 0's 1: lost in bfloat16 unless both are added before rounding
    layout = layouts.contiguous(4, 4)
    plan = ls.conv_plan(None, layout, channels=1, width=4, dtype="bfloat16")
    assert plan.bytes_received(0, "backward") == 3 * 4
    x = torch.zeros(1, 4, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[2.0**-9, 2.0**-9, 2.0**-9, 1.0]], dtype=torch.bfloat16)
    _, dx, _ = run_conv_loopback(plan, x, weight, None, torch.ones_like(x))
    assert dx[0, 0, 0].double() == torch.tensor(1 + 3 * 2.0**-9, dtype=torch.float64).bfloat16().double()
    assert dx[0, 0, 0] > 1


def test_checkpointing_and_autocast():
    draw = torch.Generator().manual_seed(5)
    x, weight, bias, dout = (torch.randn(s, generator=draw) for s in ((2, 12, 3), (3, 4), (3,), (2, 12, 3)))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def run(*tensors):
        return ls.causal_conv1d(*tensors, documents=[5, 7], activation="silu")

    wanted = torch.autograd.grad(run(*leaves), leaves, dout)
    found = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False), leaves, dout)
    assert all(map(torch.equal, found, wanted))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(*leaves)
        assert out.dtype == torch.bfloat16
        found = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert [t.dtype for t in found] == [torch.float32] * 3
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 0.05 * float(b.abs().max())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch, where a graph ends
def test_compiled_code_is_the_same():
    draw = torch.Generator().manual_seed(6)
    x, weight, dout = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((1, 12, 3), (3, 4), (1, 12, 3)))
    leaves = [t.requires_grad_() for t in (x, weight)]

    def run(x, weight, documents):
        return ls.causal_conv1d(x.sin(), weight, documents=documents).cos()

    compiled = torch.compile(run, backend="aot_eager")
    for documents in ([5, 7], [12], [1, 1, 10]):
        out, again = run(*leaves, documents), compiled(*leaves, documents)
        assert torch.allclose(out, again, atol=1e-14)
        for a, b in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(again, leaves, dout), strict=True):
            assert torch.allclose(a, b, atol=1e-13)


def test_masks_say_documents_too():
    x, weight = torch.randn(1, 9, 2), torch.randn(2, 3)
    wanted = ls.causal_conv1d(x, weight, documents=[4, 5])
    assert torch.equal(ls.causal_conv1d(x, weight, documents=masks.documents([4, 5]) & masks.causal()), wanted)
    assert torch.equal(wanted[:, 4:], ls.causal_conv1d(x[:, 4:], weight))
    whole = functional.conv1d(functional.pad(x.mT, (2, 0)), weight[:, None], groups=2).mT
    assert torch.allclose(ls.causal_conv1d(x, weight), whole, atol=1e-6)
    assert not torch.allclose(wanted, whole, atol=1e-6)


def test_plans_are_values():
    size = {"channels": 4, "width": 3, "dtype": "float32"}
    layout = layouts.zigzag(16, 2)
    assert ls.conv_plan([8, 8], layout, **size) is ls.conv_plan(masks.documents([8, 8]), layout, **size)
    assert ls.conv_plan([[8, 8]] * 2, layout, batch=2, **size) is ls.conv_plan([8, 8], layout, batch=2, **size)
    different = [
        ls.conv_plan([8, 8], layout, **size),
        ls.conv_plan([7, 9], layout, **size),
        ls.conv_plan([8, 8], layout, **{**size, "width": 4}),
        ls.conv_plan([8, 8], layouts.contiguous(16, 2), **size),
        ls.conv_plan([8, 8], layout, **{**size, "dtype": "bfloat16"}),
    ]
    assert len({plan.fingerprint for plan in different}) == 5
    assert "width 3" in repr(different[0])


def test_a_plan_serves_widths_beyond_its_documents():
    # documents of 2: widths 5 and 9 see the same pairs, and one exchange serves both
    layout = layouts.striped(8, 2, stripe=1)
    for width in (5, 9):
        case_x = torch.randn(1, 8, 1, dtype=torch.float64)
        weight = torch.randn(1, width, dtype=torch.float64)
        plan = ls.conv_plan([2] * 4, layout, channels=1, width=width, dtype="float64")
        found, *_ = run_conv_loopback(plan, case_x, weight, None, torch.ones_like(case_x))
        assert torch.allclose(found, ls.causal_conv1d(case_x, weight, documents=[2] * 4))
