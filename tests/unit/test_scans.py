"""Recurrences over ranks against the recurrence token by token: every operator, any documents, layout and scheme."""

from collections import Counter

import pytest
import torch

import longspan as ls
from longspan.mixers.scan_run import LocalSegments, RankScan
from tests.rank_threads import MeetingPoint
from tests.spread_cases import (
    FORMS,
    LAYOUTS,
    LIMIT,
    SCHEMES,
    asked,
    distances,
    in_threads,
    leaves,
    loopback,
    one_device,
    problem,
)  # fmt: skip

NUM_CASES, BLOCK = 2028, 52


def checked(p, plan, **more):
    """Raises unless ranks together find what one device does, with the problem's name."""
    found = distances(loopback(p, plan, **more), one_device(p))
    assert max(found.values()) <= LIMIT, f"{p}: {found}"


@pytest.mark.share(5)
@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_ranks_compute_what_one_device_would(first):
    """Output and every gradient; and each plan is proven."""
    for seed in range(first, first + BLOCK):
        p = problem(seed)
        plan = p.plan()
        plan.validate()
        checked(p, plan)


def test_every_kind_comes_up():
    """The cases above are of all kinds, and each kind meets each layout."""
    seen, sizes = Counter(), Counter()
    for seed in range(NUM_CASES // 4):
        p = problem(seed)
        seen.update([(p.form, LAYOUTS[seed // len(FORMS) % len(LAYOUTS)]), p.scheme])
        layout, differ = p.layout, bool(p.documents) and isinstance(p.documents[0], list)
        slots = [layout.num_slots(rank) for rank in range(layout.world_size)]
        sizes.update([f"{layout.world_size} ranks", f"batch {p.batch}"])
        sizes.update(
            {"rows differ": differ, "empty": not layout.num_tokens.all(), "padded": sum(slots) > layout.seq_len}
        )
    assert min(seen[form, kind] for form in FORMS for kind in LAYOUTS) >= 4
    assert min(seen[scheme] for scheme in SCHEMES) >= 50
    for wanted in ("1 ranks", "7 ranks", "8 ranks", "batch 3", "empty", "padded", "rows differ"):
        assert sizes[wanted] >= 25, (wanted, sizes)


@pytest.mark.share(3)
@pytest.mark.parametrize("form", FORMS)
def test_one_device_alone(form):
    """Without a plan: documents are apart all the same."""
    for seed in range(20):
        p = problem(seed, form=form, world=1, layout="contiguous")
        found = leaves(p.tokens | p.shared)
        for where in ({"documents": p.documents}, {"plan": p.plan()}):
            out = asked(p, found, **where)
            gradients = torch.autograd.grad(out, list(found.values()), p.dout, materialize_grads=True)
            got = {"out": out.detach(), **dict(zip(found, gradients, strict=True))}
            assert max(distances(got, one_device(p)).values()) <= LIMIT, p


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_some_tensors_only(form):
    """Whichever of them gradients are asked for, all ranks take part, also those without tokens."""
    drawn = (problem(seed, form=form, world=4, layout="scattered", total=11) for seed in range(100))
    p = next(p for p in drawn if not p.layout.num_tokens.all())
    for name in p.tokens | p.shared:
        checked(p, p.plan(), wanted=lambda other, name=name: other == name)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    p = problem(5, form=form, world=1, layout="contiguous", total=7, batch=2, documents=[4, 3])
    found = leaves(p.tokens | p.shared)
    if "dt_limit" in p.options:  # a clamp has corners
        p.options["dt_limit"] = (0.0, float("inf"))

    def call(*values):
        return asked(p, dict(zip(found, values, strict=True)), documents=p.documents)

    assert torch.autograd.gradcheck(call, tuple(found.values()), fast_mode=True)


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("own")])
def test_narrow_tokens(form, dtype):
    """Twice what one device is off in the same dtype, and some roundings of numbers of size one."""
    for seed in range(8):
        p = problem(seed, form=form, layout=LAYOUTS[seed], total=30)
        expected = one_device(p)
        found = leaves({name: t.to(dtype) for name, t in (p.tokens | p.shared).items()})
        out = asked(p, found, documents=p.documents)
        gradients = torch.autograd.grad(out, list(found.values()), p.dout.to(dtype), materialize_grads=True)
        alone = distances({"out": out.detach(), **dict(zip(found, gradients, strict=True))}, expected)
        got = distances(loopback(p, p.plan(dtype="float32"), dtype=dtype), expected)
        for name, error in got.items():
            allowed = 2 * alone[name] + 8 * torch.finfo(dtype).eps
            assert error <= allowed, f"{name} of {p}: {error} > {allowed}"


@pytest.mark.parametrize("form", ["delta", "ssd", "elements", "own matrix"])
def test_tokens_that_are_changed_after_the_call(form):
    """As by any operator of PyTorch: gradients are those of what forward saw, or it says that they cannot be."""
    p = problem(1, form=form, world=1, layout="contiguous", total=9)
    found = leaves(p.tokens | p.shared)
    given = {name: t * 1.0 for name, t in found.items()}
    with in_threads():
        out = asked(p, given, plan=alone(p.plan()))
    with torch.no_grad():
        for t in given.values():
            t.add_(1.0)
    try:
        gradients = torch.autograd.grad(out, list(found.values()), p.dout, materialize_grads=True)
    except RuntimeError as error:
        assert "inplace" in str(error)  # noqa: PT017
    else:
        got = {"out": out.detach(), **dict(zip(found, gradients, strict=True))}
        assert max(distances(got, one_device(p)).values()) <= LIMIT


def test_what_backward_needs_is_watched():
    x = torch.randn(1, 6, 1, 1, 1, dtype=torch.float64)
    given = x.clone().requires_grad_() * 1.0
    plan = ls.scan_plan(None, ls.layouts.contiguous(6, 1), heads=1, keys=1, values=1, maps="scalar", dtype="float64")
    functions = {"local": lambda x, state: (x * x, state + x.sum(0)), "summary": lambda x: (x[0], x[0])}
    with in_threads():
        out = ls.scan([given], **functions, state=(1, 1, 1), maps="scalar", plan=alone(plan))
    with torch.no_grad():
        given.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def alone(plan):
    """The only rank's share of a plan."""
    return RankScan(plan, 0, LocalSegments.of(plan, 0), MeetingPoint(1).carrier(0))


def test_backward_twice_needs_retain_graph():
    p = problem(1, form="delta", world=1, layout="contiguous", total=9)
    found = leaves(p.tokens)
    with in_threads():
        out = asked(p, found, plan=alone(p.plan()))
    out.backward(p.dout)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward(p.dout)


def test_functions_of_users_may_read_what_they_saved_twice():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]

    p = problem(1, form="own elements", world=1, layout="contiguous", total=9, documents=None, batch=1)
    found, h = leaves(p.tokens), p.sizes["heads"]

    def local(a, b, state):
        outs = []
        for a_t, b_t in zip(a, b, strict=True):
            state = Twice.apply(a_t, state) + b_t
            outs.append(state)
        return torch.stack(outs), state

    def summary(a, b):
        raise AssertionError("one segment needs no summary")

    sizes = {"state": (h, p.sizes["keys"], p.sizes["values"]), "maps": "elements"}
    with in_threads():
        out = ls.scan(list(found.values()), local=local, summary=summary, plan=alone(p.plan()), **sizes)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), list(found.values())))
