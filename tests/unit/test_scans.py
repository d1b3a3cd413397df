"""Recurrences over ranks against the recurrence token by token: every operator, any documents, layout and scheme."""

from collections import Counter

import pytest
import torch

from longspan.schedules.scans.words import parse_scan
from tests.spread_cases import (
    FORMS,
    LAYOUTS,
    LIMIT,
    SCHEMES,
    asked,
    distances,
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


@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_ranks_compute_what_one_device_would(first):
    """Output and every gradient; and each plan is proven, and read back from its text."""
    for seed in range(first, first + BLOCK):
        p = problem(seed)
        plan = p.plan()
        plan.validate()
        for direction in ("forward", "backward"):
            schedule = plan.schedule(direction)
            assert parse_scan(schedule.text()).text() == schedule.text(), p
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
