"""Compiled calls: one graph for all masks and plans, any length, and what a graph refers to lives as long as needed."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan._compile import lookup_value
from longspan.errors import PlanError
from longspan.run import ops
from longspan.testing.oracle import dense_attention, dense_gradients
from tests.gloo import compiled_work
from tests.gloo.compiled_work import Counting
from tests.pool import pool

pytestmark = [  # PyTorch's compiler uses what PyTorch warns of
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
D = 16
LIMIT = 1e-12
"""float64, sums of at most a hundred terms of size 1."""


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(length, seed=0, batch=1, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    q, k, v, dout = torch.randn(4, batch, 2, length, D, generator=draw, dtype=torch.float64).to(dtype)
    return [t.requires_grad_() for t in (q, k, v)], dout


def worst_error(out, inputs, dout, mask):
    """Of the output and of all gradients, against every pair written out."""
    found = out.detach(), *torch.autograd.grad(out, inputs, dout)
    expected = dense_gradients(*inputs, mask, D**-0.5, dout)
    return max(float((a - b).abs().max()) for a, b in zip(found, (expected[0], *expected[2:]), strict=True))


def attend(q, k, v, mask):
    return ls.attention(q, k, v, mask)


def documents(n, length=64):
    return ls.masks.documents([n, length - n]) & ls.masks.causal()


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_all_masks_of_a_size(backend):
    compiler = Counting(backend)
    call = torch.compile(attend, backend=compiler, fullgraph=True)
    for n in range(1, 41):
        inputs, dout = tensors(64, n)
        mask = documents(n)
        out = call(*inputs, mask)
        truth = documents(n)
        del mask
        gc.collect()
        assert worst_error(out, inputs, dout, truth) < LIMIT
    assert compiler.made == 1


def test_functions_and_closed_forms_share_a_graph():
    compiler = Counting()
    call = torch.compile(attend, backend=compiler, fullgraph=True)
    for n in (7, 20, 41):
        ids = torch.arange(64) // n
        for mask in (
            ls.masks.from_mask_mod(lambda b, h, q, kv, ids=ids: ids[q] == ids[kv], 64),
            ls.masks.per_head(ls.masks.causal(), ls.masks.sliding_window(n)),
        ):
            inputs, dout = tensors(64, n)
            assert worst_error(call(*inputs, mask), inputs, dout, mask) < LIMIT
    assert compiler.made == 1


def test_a_new_mask_is_never_taken_for_a_dead_one():
    """Masks are made and let go until addresses come again."""
    call = torch.compile(attend, backend="eager")
    (q, k, v), _ = tensors(48)
    addresses, again = set(), 0
    for n in range(300):
        mask = ls.masks.per_head(ls.masks.causal(), ls.masks.sliding_window(n % 40))
        again += id(mask) in addresses
        addresses.add(id(mask))
        with torch.no_grad():
            assert float((call(q, k, v, mask) - dense_attention(q, k, v, mask, D**-0.5)[0]).abs().max()) < LIMIT
        del mask
    assert again > 0


def test_a_fixed_mask_outlives_thousands_of_others():
    fixed = ls.masks.causal()
    compiler = Counting()
    call = torch.compile(lambda q, k, v: ls.attention(q, k, v, fixed), backend=compiler, fullgraph=True)
    inputs, dout = tensors(64)
    assert worst_error(call(*inputs), inputs, dout, fixed) < LIMIT
    early = call(*inputs)
    with torch.no_grad():
        for n in range(300):
            ls.attention(*inputs, documents(1 + n % 62) & ls.masks.sliding_window(n))
    for n in range(3000):
        ls.masks.sliding_window(n)
    assert worst_error(call(*inputs), inputs, dout, fixed) < LIMIT
    assert worst_error(early, inputs, dout, fixed) < LIMIT
    assert compiler.made == 1


LENGTHS = (64, 80, 96, 33, 65, 48, 72, 17, 50, 90, 3, 2, 1, 64)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("backend", "dynamic", "most"),
    [("aot_eager", True, 3), ("aot_eager", None, 4), ("aot_eager", False, 13), ("inductor", True, 3)],
)
def test_lengths_may_change(backend, dynamic, most):
    """Lengths 1 and, on their way to a general graph, the first are compiled for themselves, as PyTorch has it."""
    compiler = Counting(backend)
    mask = ls.masks.causal()
    call = torch.compile(lambda q, k, v: attend(q, k, v, mask) * 1.0, backend=compiler, fullgraph=True, dynamic=dynamic)
    with torch._dynamo.config.patch(recompile_limit=32 if dynamic is False else 8):
        for length in LENGTHS:
            inputs, dout = tensors(length, length)
            assert worst_error(call(*inputs), inputs, dout, mask) < LIMIT
    assert compiler.made <= most


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_strides_of_a_model_are_taken(backend):
    """Heads that come from one projection, as models have them, lie side by side in every token."""
    mask = documents(20)

    def block(x):
        q, k, v = x.unflatten(-1, (3, 2, D)).permute(2, 0, 3, 1, 4)
        return ls.attention(q, k, v, mask).transpose(1, 2).flatten(2)

    call = torch.compile(block, backend=backend, fullgraph=True)
    x = torch.randn(1, 64, 6 * D, dtype=torch.float64).requires_grad_()
    dout = torch.randn(1, 64, 2 * D, dtype=torch.float64)
    found, expected = (torch.autograd.grad(run(x), x, dout)[0] for run in (call, block))
    assert float((found - expected).abs().max()) < LIMIT


def test_batches_and_lengths_may_change():
    mask = ls.masks.sliding_window(9)
    call = torch.compile(lambda q, k, v: attend(q, k, v, mask), backend="aot_eager")
    for batch, length in ((1, 64), (2, 80), (3, 96), (1, 33), (2, 1), (4, 64), (5, 65), (6, 66)):
        inputs, dout = tensors(length, length, batch)
        assert worst_error(call(*inputs), inputs, dout, mask) < LIMIT


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = ls.masks.causal()

    def forward(self, q, k, v):
        return ls.attention(q, k, v, self.mask)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_scale_of_numpy_and_flex_attention_without_a_mask(fullgraph):
    (q, k, v), dout = tensors(13)
    mask = ls.masks.full()

    def call(q, k, v):
        scaled = ls.attention(q, k, v, mask, scale=1 / np.sqrt(q.shape[-1]))
        return scaled + ls.flex_attention(q, k, v)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
    for found, expected in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v), dout),
        torch.autograd.grad(2 * ls.attention(q, k, v, mask), (q, k, v), dout),
        strict=True,
    ):
        assert (found - expected).abs().max() <= LIMIT


def test_a_mask_that_a_module_holds_may_be_exchanged():
    compiler = Counting()
    block = Block()
    call = torch.compile(block, backend=compiler, fullgraph=True)
    for n in (5, 9, 44):
        block.mask = documents(n)
        inputs, dout = tensors(64, n)
        assert worst_error(call(*inputs), inputs, dout, block.mask) < LIMIT
    assert compiler.made == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_masks_made_inside_break_the_graph_and_are_right(dynamic):
    def inside(q, k, v, n):
        mask = ls.masks.documents([n, q.shape[2] - n]) & ls.masks.causal() | ~ls.masks.full()
        return ls.attention(q.sin(), k, v, mask) * 2

    call = torch.compile(inside, backend="aot_eager", dynamic=dynamic)
    for n in (5, 9, 44, 9):
        inputs, dout = tensors(64, n)
        expected = torch.autograd.grad(inside(*inputs, n), inputs, dout)
        found = torch.autograd.grad(call(*inputs, n), inputs, dout)
        assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < LIMIT


def test_a_mask_made_before_torch_was_loaded_is_taken():
    code = (
        "import longspan as ls; mask = ls.masks.causal(); import torch\n"
        "assert mask.handle is None\n"
        "q, k, v = torch.randn(3, 1, 2, 8, 16)\n"
        "call = torch.compile(lambda q, k, v: ls.attention(q, k, v, mask), backend='eager')\n"
        "for _ in range(2): assert torch.equal(call(q, k, v), ls.attention(q, k, v, ls.masks.causal()))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_sinks_lse_and_their_gradients():
    compiler = Counting()
    call = torch.compile(
        lambda q, k, v, sinks, mask: ls.attention(q, k, v, mask, sinks=sinks, return_lse=True),
        backend=compiler, fullgraph=True,
    )  # fmt: skip
    for n in (3, 30):
        inputs, dout = tensors(64, n)
        inputs.append(torch.randn(2, dtype=torch.float64).requires_grad_())
        dlse = torch.randn(1, 2, 64, dtype=torch.float64)
        found, expected = (
            torch.autograd.grad(run(*inputs, documents(n)), inputs, (dout, dlse))
            for run in (call, lambda q, k, v, s, m: ls.attention(q, k, v, m, sinks=s, return_lse=True))
        )
        assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < LIMIT
    assert compiler.made == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks(reentrant):
    def block(q, k, v, mask):
        return checkpoint(attend, q.sin(), k, v, mask, use_reentrant=reentrant)

    call = block if reentrant else torch.compile(block, backend="aot_eager")
    for n in (3, 30):
        inputs, dout = tensors(64, n)
        found = torch.autograd.grad(call(*inputs, documents(n)), inputs, dout) if not reentrant else None
        if reentrant:
            call(*inputs, documents(n)).backward(dout)
            found = [t.grad for t in inputs]
        expected = torch.autograd.grad(attend(inputs[0].sin(), *inputs[1:], documents(n)), inputs, dout)
        assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < LIMIT


def test_autocast_and_modes_without_gradients():
    mask = documents(20)
    call = torch.compile(lambda q, k, v: attend(q @ q.new_ones(D, D), k, v, mask), backend="aot_eager")
    (q, k, v), _ = tensors(64, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = k.bfloat16(), v.bfloat16()
        assert torch.equal(call(q, *low), attend(q @ q.new_ones(D, D), *low, mask))
    expected = attend(q @ q.new_ones(D, D), k, v, mask).detach()
    with torch.no_grad():
        assert torch.equal(call(q, k, v), expected)
    with torch.inference_mode():
        inside = documents(20)
        assert torch.equal(call(q.detach(), k.detach(), v.detach()), expected)
    assert not inside.handle.is_inference()


def test_hooks_that_copy_saved_tensors():
    """Run eagerly, copies serve as well; compiled code, whose ticket is the only way back, is refused."""
    inputs, dout = tensors(64)
    mask = documents(9)
    with torch.autograd.graph.save_on_cpu():
        assert worst_error(attend(*inputs, mask), inputs, dout, mask) < LIMIT


def test_numbers_are_not_used_again():
    """What is gone is refused, and never mistaken for something else."""
    (q, k, v), dout = tensors(8)
    mask = ls.masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 8)
    handle = mask.handle
    del mask
    others = [ls.masks.sliding_window(n) for n in range(100)]
    with pytest.raises(PlanError, match="mask or plan of this call"):
        ops.attention(q, k, v, [], None, handle, "", "auto", None, 0, True, True, False, "", ops.FORM)
    assert lookup_value(int(handle)) is None
    out, lse, ticket = ops.attention(
        q, k, v, [], None, others[50].handle, "", "auto", None, 0, True, True, False, "", ops.FORM
    )
    assert len(ops.attention_backward(dout, None, q, k, v, [], None, out, lse, ticket, [], False)) == 4
    copied = ticket.clone()
    out, lse = out.detach(), lse.detach()  # their graph holds the pass, too
    del ticket
    gc.collect()
    with pytest.raises(PlanError, match="forward pass"):
        ops.attention_backward(dout, None, q, k, v, [], None, out, lse, copied, [], False)


def test_what_does_not_fit_is_refused_from_compiled_code():
    layout = ls.layouts.contiguous(64, 1)
    plan = ls.plan(ls.masks.causal(), layout, q_heads=2, kv_heads=2, head_dim=D, dtype="float64")
    call = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    inputs, dout = tensors(64)
    assert worst_error(call(*inputs, plan), inputs, dout, plan.mask) < LIMIT
    with pytest.raises(PlanError, match=r"q must have shape .* but got \(1, 2, 63, 16\)"):
        call(*tensors(63)[0], plan)
    with pytest.raises(PlanError, match=r"dtype float64, but got torch.float32"):
        call(*tensors(64, dtype=torch.float32)[0], plan)
    assert worst_error(call(*inputs, plan), inputs, dout, plan.mask) < LIMIT


def test_operators_hold_on_to_nothing():
    """After forward and backward, compiled or not, a function mask and what it captured are let go."""
    from longspan.masks import builders
    from longspan.planning.plan import _build_plan

    (q, k, v), dout = tensors(64)
    call = torch.compile(attend, backend="aot_eager", fullgraph=True)
    gone = []
    for run in (attend, call, call):
        dense = torch.rand(64, 64) > 0.1
        mask = ls.masks.from_mask_mod(lambda b, h, i, j, dense=dense: dense[i, j], 64)
        out = run(q, k, v, mask)
        gone.append(weakref.ref(dense))
        torch.autograd.grad(out, (q, k, v), dout)
        del mask, dense, out
    _build_plan.cache_clear()
    for memory in ("_classifier",):
        if hasattr(builders, memory):
            getattr(builders, memory).cache_clear()
    gc.collect()
    assert [found() for found in gone] == [None] * 3


def test_modules_may_be_imported_again():
    """As notebooks do it: reloaded one by one, or all of them forgotten and imported anew."""
    code = """
import importlib, sys, torch
import longspan as ls
from longspan.run import ops

q = torch.randn(1, 2, 8, 4, requires_grad=True)

def attended(ls):
    out = ls.attention(q, q, q, ls.masks.causal(8))
    return out.detach(), *torch.autograd.grad(out.sum(), q)

first = attended(ls)
for _ in range(2):
    importlib.reload(ops)
    assert all(map(torch.equal, first, attended(ls)))
for name in [name for name in sys.modules if name.startswith("longspan")]:
    del sys.modules[name]
import longspan as again
assert again is not ls
assert all(map(torch.equal, first, attended(again)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr


def test_the_operators_keep_what_they_promise_to_torch():
    (q, k, v), _ = tensors(8, dtype=torch.float32)
    rest = ([], None, documents(3, 8).handle, "", "auto", None, 0, True, True, False, "", ops.FORM)
    mask = documents(3, 8)
    rest = ([], None, mask.handle, *rest[3:])
    torch.library.opcheck(
        ops.attention, (q, k, v, *rest), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.share(2)
@pytest.mark.parametrize("options", [{"fullgraph": True}, {"dynamic": True}])
@pytest.mark.parametrize("scheme", ["auto", "ring"])
def test_packed_batches_over_ranks_compile_once(options, scheme):
    for worst, made, _ in pool(2).run(compiled_work.packed, 12, "aot_eager", options, False, False, scheme):
        assert worst < compiled_work.LIMIT
        assert made == 1


@pytest.mark.nightly
def test_packed_batches_over_ranks_with_inductor():
    for worst, made, _ in pool(2).run(compiled_work.packed, 3, "inductor", {"fullgraph": True}, timeout=300):
        assert worst < compiled_work.LIMIT
        assert made == 1


def test_packed_batches_over_ranks_recomputed():
    for worst, _, _ in pool(2).run(compiled_work.packed, 3, "aot_eager", {}, False, True):
        assert worst < compiled_work.LIMIT


def test_rows_that_a_plan_keeps_are_kept_in_compiled_code():
    kept, fetched = (
        pool(2).run(compiled_work.packed, 3, "aot_eager", {"fullgraph": True}, keep, False, "exchange")
        for keep in (True, False)
    )
    for (worst, made, received), (_, _, again) in zip(kept, fetched, strict=True):
        assert worst < compiled_work.LIMIT
        assert made == 1
        assert received < again  # of backward alone: keys and values did not come a second time
