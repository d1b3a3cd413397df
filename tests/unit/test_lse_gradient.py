"""A gradient of lse through fused kernels, which compute delta from `out`: against float64, whatever dout is."""

import pytest
import torch

import longspan as ls
from longspan.kernels import kernel_named
from longspan.run import passes
from longspan.run.transports import Loopback
from longspan.run.walk import Job
from longspan.testing.oracle import allowed, dense_attention
from tests.kernel_models.cases import FLOOR, dense, off, one_call
from tests.unit.test_kernel_addresses import KERNELS

S, H, G, D, E = 40, 4, 2, 16, 16
MASKS = {
    "documents": lambda: ls.masks.documents([9, 1, 17, 13]) & ls.masks.causal(),
    "rows without keys": lambda: ls.masks.causal().resized(S) & ~ls.masks.sliding_window(3).resized(S),
}
DOUT = {"random": 1.0, "zero": 0.0, "small": 1e-9, "smaller than any": 1e-42}


def _kernel(name):
    return KERNELS[name] if name in KERNELS else kernel_named(name)


def _gradients(name, dtype, mask, dout_size, world, scheme="ring", seed=0):
    """What all ranks of one process find, float64 gradients, and how far off one fused call without dlse is."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(H, D), (G, D), (G, E), (H, E)]
    q, k, v, dout = (torch.randn(2, h, S, d, generator=draw, dtype=torch.float64).to(dtype) for h, d in shapes)
    dout = dout * dout_size
    dlse = torch.randn(2, H, S, generator=draw, dtype=torch.float64)
    dlse[:, :, ::7] = 0.0
    layout = ls.layouts.zigzag(S, world) if world > 1 else ls.layouts.contiguous(S, 1)
    sizes = {"q_heads": H, "kv_heads": G, "head_dim": D, "v_head_dim": E, "batch": 2}
    plan = ls.plan(mask, layout, dtype=str(dtype).removeprefix("torch."), scheme=scheme, **sizes)
    seen = allowed(plan.mask, 2, H, S)
    dlse = dlse.masked_fill(~seen.any(-1), 0.0)
    leaves = [t.double().clone().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, plan.mask, 0.3)
    kept = lse.masked_fill(lse.isneginf(), 0.0)
    true = torch.autograd.grad((out, kept), leaves, (dout.double(), dlse))
    given = dlse.masked_fill(~seen.any(-1), torch.nan)  # rows without keys have nothing to pass it to

    shards = [[plan.layout.shard(t, rank, 2) for t in (q, k, v, dout, given)] for rank in range(world)]
    jobs = [Job(plan, rank, _kernel(name), 0.3, dtype) for rank in range(world)]
    pairs = list(zip(jobs, shards, strict=True))
    runs = Loopback().run([passes.Forward(job, *own[:3]).program(saves=True) for job, own in pairs])
    programs = [
        passes.Backward(job, passes.Saved(*own[:3], out, lse, kept), *own[3:]).program()
        for (job, own), (out, lse, kept) in zip(pairs, runs, strict=True)
    ]
    results = [plan.layout.unshard(list(parts), 2) for parts in zip(*Loopback().run(programs), strict=True)]
    other = torch.randn(dout.shape, generator=draw, dtype=torch.float64).to(dtype)
    plain = one_call(q, k, v, seen, 0.3, other)[1:]
    usual = [off(x, y) for x, y in zip(plain, dense(q, k, v, seen, 0.3, other)[2:], strict=True)]
    return results, true, usual


def _check(name, dtype, mask, dout_size, world, scheme="ring"):
    """Within twice what one fused call without a gradient of lse is off."""
    results, true, usual = _gradients(name, dtype, MASKS[mask](), DOUT[dout_size], world, scheme)
    for what, mine, exact, error in zip(("dq", "dk", "dv"), results, true, usual, strict=True):
        limit = FLOOR[dtype] + (0 if dtype == torch.float64 else 2 * error)
        assert mine.isfinite().all(), f"{what} of {name} is not finite"
        assert off(mine, exact) <= limit, f"{what} of {name}: {off(mine, exact):.1e} > {limit:.1e}"
    if dout_size == "zero":  # nothing but dout reaches dv
        assert float(results[2].abs().max()) <= 1e-15


@pytest.mark.parametrize("dout", DOUT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_on_cpus(dtype, dout, mask):
    _check("cpu_flash", dtype, mask, dout, 1)
    _check("cpu_flash", dtype, mask, dout, 2)


@pytest.mark.parametrize("scheme", ["exchange", "all_to_all"])
def test_queries_that_travel(scheme):
    """Ranks that only receive delta make up an `out` for it."""
    _check("cpu_flash", torch.float32, "documents", "random", 2, scheme)
    _check("cpu_flash", torch.float32, "documents", "zero", 2, scheme)


@pytest.mark.parametrize("name", ["varlen", "efficient", "cudnn", "fa3"])
def test_by_models_of_gpu_kernels(name):
    for dout in ("random", "zero", "small"):
        _check(name, torch.bfloat16, "documents", dout, 2)


def test_no_slow_kernel_is_used(monkeypatch):
    monkeypatch.setattr(type(kernel_named("reference")), "backward", lambda *_: pytest.fail("reference"))
    q, k, v = (torch.randn(1, 2, 12, 8, requires_grad=True) for _ in range(3))
    out, lse = ls.attention(q, k, v, ls.masks.causal(), return_lse=True)
    (out.sum() + lse.square().sum()).backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("mutant", ["out unchanged", "wrong sign", "zero rows unchanged"])
def test_mistakes_are_caught(mutant, monkeypatch):
    right = passes.with_lse_gradient
    wrong = {
        "out unchanged": lambda dout, out, dlse: (dout, out),
        "wrong sign": lambda dout, out, dlse: right(dout, out, -dlse),
        "zero rows unchanged": lambda dout, out, dlse: (dout, right(dout, out, dlse)[1]),
    }[mutant]
    monkeypatch.setattr(passes, "with_lse_gradient", wrong)
    with pytest.raises(AssertionError):
        _check("cpu_flash", torch.float32, "documents", "zero" if mutant.startswith("zero") else "random", 1)
