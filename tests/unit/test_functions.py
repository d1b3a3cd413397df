"""Mask and score functions are values: tensors that they read must not change while they are in use, functions made in
a loop keep their own variables, and nothing that they captured is kept alive."""

import functools
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan.errors import MaskError
from longspan.masks.functions import Reader
from longspan.testing import run_loopback

S = 192
FIRST, SECOND = torch.arange(S) // 64, torch.arange(S) // 23


def inputs(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, S, 8, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def dense(tensors, ids=None, score=None):
    """Causal attention inside of documents with these numbers, with a score function."""
    q, k, v = tensors
    position = torch.arange(S)
    seen = position[:, None] >= position
    seen = seen if ids is None else seen & (ids[:, None] == ids)
    scores = q @ k.mT / 8**0.5
    if score is not None:
        scores = score(scores, 0, torch.arange(2)[:, None, None], position[:, None], position)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def causal_mask(ids):
    return ls.masks.from_mask_mod(lambda b, h, i, j: ids[i] == ids[j], S, within=ls.masks.causal())


def same(found, wanted):
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(found, wanted, strict=True))


# -- masks: a new batch gets a new mask --------------------------------------------------------------------------------


def test_a_new_mask_of_a_refilled_tensor_is_right():
    ids, tensors, dout = FIRST.clone(), inputs(), torch.randn(1, 2, S, 8, dtype=torch.float64)
    prints = []
    for numbers in (FIRST, SECOND):
        ids.copy_(numbers)
        mask, want = causal_mask(ids), dense(tensors, numbers)
        wanted = torch.autograd.grad(want, tensors, dout)
        out = ls.attention(*tensors, mask)
        assert same((out, *torch.autograd.grad(out, tensors, dout)), (want, *wanted))
        plan = ls.plan(mask, ls.layouts.zigzag(S, 3), q_heads=2, kv_heads=2, head_dim=8, dtype="float64")
        assert same(run_loopback(plan, *(t.detach() for t in tensors), dout)[2:5], wanted)
        prints.append(plan.fingerprint)
    assert prints[0] != prints[1]


USES = {
    "attention": lambda mask, plan: ls.attention(*inputs(), mask),
    "combined": lambda mask, plan: ls.attention(*inputs(), mask & ls.masks.full(S)),
    "plan": lambda mask, plan: run_loopback(plan, *(t.detach() for t in inputs()), inputs()[0].detach()),
    "allows": lambda mask, plan: mask.allows(100, 3),
    "classify": lambda mask, plan: mask.classify(ls.Span(0, S), ls.Span(0, S), tile=32),
    "block_mask": lambda mask, plan: ls.block_mask(mask, ls.layouts.contiguous(S, 1), 0),
    "flex": lambda mask, plan: ls.attention(*inputs(), mask, kernel="flex"),
}


@pytest.mark.parametrize("name", USES)
def test_a_mask_whose_tensor_was_refilled_is_refused(name):
    ids = FIRST.clone()
    mask = causal_mask(ids)
    plan = ls.plan(mask, ls.layouts.zigzag(S, 3), q_heads=2, kv_heads=2, head_dim=8, dtype="float64")
    USES[name](mask, plan)
    USES[name](mask, plan)
    ids.copy_(SECOND)
    with pytest.raises(MaskError, match=r"shape \(192,\) was changed in place.*Make a new mask"):
        USES[name](mask, plan)


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_of_a_mask_whose_tensor_was_refilled_is_refused(compiled):
    ids, tensors = FIRST.clone(), inputs()
    mask = causal_mask(ids)

    def call(*tensors):
        return ls.attention(*tensors, mask) * 1.0

    run = torch.compile(call, backend="aot_eager") if compiled else call
    out = run(*tensors)
    assert same(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(dense(tensors, FIRST).sum(), tensors))
    out = run(*tensors)
    ids.copy_(SECOND)
    with pytest.raises(MaskError, match="was changed in place"):
        out.sum().backward()


def test_block_masks_that_are_filled_anew_get_a_new_mask():
    ids = FIRST.clone()

    def sees(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j)

    tensors = [t.detach() for t in inputs()]
    static = create_block_mask(sees, None, None, S, S, device="cpu", BLOCK_SIZE=32)
    for numbers in (FIRST, SECOND):
        ids.copy_(numbers)
        new = create_block_mask(sees, None, None, S, S, device="cpu", BLOCK_SIZE=32)
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            getattr(static, name).copy_(getattr(new, name))
        assert torch.allclose(ls.flex_attention(*tensors, None, static), dense(tensors, numbers), atol=1e-12)
    ids.copy_(FIRST)  # without new lists of blocks
    with pytest.raises(MaskError, match="was changed in place"):
        ls.flex_attention(*tensors, None, static)


def test_the_mask_mod_of_a_block_mask_may_be_replaced():
    tensors = [t.detach() for t in inputs()]
    static = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu", BLOCK_SIZE=S)
    for ids in (FIRST, SECOND):
        static.mask_mod = lambda b, h, i, j, ids=ids: (ids[i] == ids[j]) & (i >= j)
        assert torch.allclose(ls.flex_attention(*tensors, None, static), dense(tensors, ids), atol=1e-12)


def test_what_a_function_does_not_read_may_change():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.ids = torch.nn.Linear(4, 4), FIRST

        def sees(self, b, h, i, j):
            return self.ids[i] == self.ids[j]

    model, tensors = Model(), inputs()
    mask = ls.masks.from_mask_mod(model.sees, S, within=ls.masks.causal())
    out = ls.attention(*tensors, mask)
    with torch.no_grad():
        model.linear.weight.add_(1)
    assert same(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(dense(tensors, FIRST).sum(), tensors))


def test_a_repeated_call_asks_nothing():
    calls = []

    def sees(b, h, i, j):
        calls.append(1)
        return FIRST[i] == FIRST[j]

    tensors = inputs()
    mask = ls.masks.from_mask_mod(sees, S, within=ls.masks.causal())
    ls.attention(*tensors, mask).sum().backward()
    calls.clear()
    for _ in range(2):
        out = ls.attention(*tensors, mask)
        found = torch.autograd.grad(out.sum(), tensors)
    assert not calls
    assert same(found, torch.autograd.grad(dense(tensors, FIRST).sum(), tensors))


def test_masks_are_copied_and_sent_without_what_they_remember():
    class Sees:
        def __init__(self):
            self.ids = FIRST.clone()

        def __call__(self, b, h, i, j):
            return self.ids[i] == self.ids[j]

    globals()["Sees"], Sees.__qualname__ = Sees, "Sees"  # so that it can be pickled
    tensors, mask = inputs(), ls.masks.from_mask_mod(Sees(), S)
    mask.plane().predicate.mask_mod.ids.add_(0)  # another version than that of a copy
    ls.attention(*tensors, mask)
    again = pickle.loads(pickle.dumps(mask))
    assert not again.known
    assert not again.plans
    assert torch.equal(ls.attention(*tensors, again), ls.attention(*tensors, mask))


def test_a_checkpoint_of_a_mask_function():
    tensors, mask = inputs(), causal_mask(FIRST)
    out = checkpoint(lambda *t: ls.attention(*t, mask), *tensors, use_reentrant=False)
    assert same(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(dense(tensors, FIRST).sum(), tensors))


def test_positions_are_on_the_device_of_the_tensors():
    """The meta device stands for one that is not the CPU."""
    where, ids = [], torch.zeros(S, dtype=torch.long, device="meta")

    def sees(b, h, i, j):
        where.append((b.device.type, i.device.type, j.device.type))
        return torch.searchsorted(ids, i) == torch.searchsorted(ids, j)  # refuses a number of another device

    with pytest.raises(NotImplementedError, match="meta"):
        ls.masks.from_mask_mod(sees, S).allows(np.arange(S)[:, None], np.arange(S))
    assert where[-1] == ("meta", "meta", "meta")


def test_fingerprints_see_one_token(monkeypatch):
    """Ranks compare what is in the tensors that a function reads, not only answers to a few pairs."""

    def fingerprint(cut, size=4096):
        ids = (torch.arange(size) >= cut).long()
        return ls.masks.from_mask_mod(lambda b, h, i, j: ids[i] == ids[j], size, within=ls.masks.causal()).fingerprint

    assert fingerprint(1000) == fingerprint(1000)
    assert len({fingerprint(cut) for cut in (1000, 1001, 1002, 3999)}) == 4
    monkeypatch.setattr(Reader, "contents", lambda self: "")
    assert len({fingerprint(cut) for cut in (1000, 1001, 1002, 3999)}) < 4  # answers alone do not tell


# -- score functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "flex"])
@pytest.mark.parametrize("learned", [False, True])
def test_backward_of_a_score_function_whose_tensor_was_changed_is_refused(kernel, learned):
    tensors, table = inputs(), torch.randn(S, dtype=torch.float64, requires_grad=learned)

    def score(s, b, h, i, j):
        return s + table[(i - j).abs()]

    for _ in range(2):
        wanted = torch.autograd.grad(dense(tensors, score=score).sum(), tensors)
        out = ls.attention(*tensors, ls.masks.causal(), score_mod=score, kernel=kernel)
        assert same(torch.autograd.grad(out.sum(), tensors), wanted)
        with torch.no_grad():
            table.mul_(0.5)
    out = ls.attention(*tensors, ls.masks.causal(), score_mod=score, kernel=kernel)
    with torch.no_grad():
        table.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_functions_made_in_a_loop_keep_their_variables():
    tensors, outs, wanted = inputs(), [], []
    for alpha in (0.1, 0.2, 0.3):
        table = torch.full((2,), alpha, dtype=torch.float64, requires_grad=True)

        def score(s, b, h, i, j):
            return s - alpha * table[h] * (i - j)  # noqa: B023

        outs.append((ls.attention(*tensors, ls.masks.causal(), score_mod=score), table))
        wanted.append(torch.autograd.grad(dense(tensors, score=score).sum(), (*tensors, table)))
    for (out, table), want in zip(outs, wanted, strict=True):
        assert same(torch.autograd.grad(out.sum(), (*tensors, table)), want)


def test_masks_made_in_a_loop_keep_their_variables():
    tensors, made = inputs(), []
    for ids in (FIRST, SECOND):
        made.append(ls.masks.from_mask_mod(lambda b, h, i, j: ids[i] == ids[j], S, within=ls.masks.causal()))  # noqa: B023
    for mask, numbers in zip(made, (FIRST, SECOND), strict=True):
        assert torch.allclose(ls.attention(*tensors, mask), dense(tensors, numbers), atol=1e-12)


def test_what_a_function_computes_once_and_keeps_gets_its_gradient():
    class Slopes:
        def __init__(self, raw):
            self.raw = raw

        @functools.cached_property
        def slopes(self):
            return torch.nn.functional.softplus(self.raw)

        def __call__(self, s, b, h, i, j):
            return s * self.slopes[h]

    raw, tensors = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True), inputs()
    dout = torch.randn(1, 2, S, 8, dtype=torch.float64)
    out = ls.attention(*tensors, ls.masks.causal(S), score_mod=Slopes(raw))
    want = dense(tensors, score=Slopes(raw))
    assert same(torch.autograd.grad(out, (*tensors, raw), dout), torch.autograd.grad(want, (*tensors, raw), dout))


LEARNED = {
    "all indices": ((2, S), lambda t, s, h, i, j: s + t[h, (i - j).abs()]),
    "two lookups": ((2, S), lambda t, s, h, i, j: s + t[h, i] - t[h, j]),
    "a row": ((2, 3), lambda t, s, h, i, j: s * t[h].sum()),
    "a row and all": ((2, 3), lambda t, s, h, i, j: s * t[h].prod() + t.sum()),
    "negative indices": ((S,), lambda t, s, h, i, j: s + t[j - i]),
    "numbers": ((2, 3), lambda t, s, h, i, j: s * t[1, -1] + t[0][2] * (i - j)),
    "pairs": ((S, S), lambda t, s, h, i, j: s + t[i, j]),
    "a slice": ((2, 3), lambda t, s, h, i, j: s * t[:, 1][h]),
    "no dims": ((), lambda t, s, h, i, j: s * t),
    "transposed": ((S, 2), lambda t, s, h, i, j: s + t.mT[h, j]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_looked_up_elements(name, dtype):
    shape, score = LEARNED[name]
    tensors, dout = inputs(), torch.randn(1, 2, S, 8, dtype=torch.float64)
    table = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def score_mod(s, b, h, i, j):
        return score(table, s, h, i, j)

    def spread(s, b, h, i, j):
        h, i, j = (index.expand(2, S, S) for index in (h, i, j))
        return torch.vmap(functools.partial(score, table))(*(x.flatten() for x in (s[0], h, i, j))).view(1, 2, S, S)

    out, want = ls.attention(*tensors, ls.masks.causal(), score_mod=score_mod), dense(tensors, score=spread)
    found, wanted = (torch.autograd.grad(x, (*tensors, table), dout) for x in (out, want))
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    assert all((a - b).abs().max() <= tolerance * b.abs().max() for a, b in zip(found, wanted, strict=True))


def test_gradients_of_elements_of_a_large_tensor_take_no_tensor_of_its_size():
    """A zero tensor of the table's size for every tile would take seconds and 2 GB."""
    tensors, table = inputs(), torch.zeros(1 << 14, 1 << 14).requires_grad_()  # not written: no memory
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.layout == torch.strided and "zeros" in str(func):
                sizes.append(result.numel())
            return result

    out = ls.attention(*tensors, ls.masks.causal(), score_mod=lambda s, b, h, i, j: s + table[i, j])
    with Watch():
        torch.autograd.grad(out.sum(), table)
    assert sizes.count(table.numel()) <= 1  # the sum


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("way", ["attention", "plan", "flex", "block_mask", "classify", "flex kernel", "BlockMask"])
def test_masks_that_nobody_holds_are_let_go_with_what_they_captured(way):
    tensors = [t.detach() for t in inputs()]
    alive = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            dense = torch.rand(S, S) > 0.1
            dense |= torch.eye(S, dtype=torch.bool)
            alive.append(weakref.ref(dense))
            _use(way, dense, tensors)
            del dense
    finally:
        gc.enable()
    assert sum(ref() is not None for ref in alive) == 0


def _use(way, dense, tensors):
    mask = ls.masks.from_mask_mod(lambda b, h, i, j: dense[i, j], S)
    if way == "attention":
        ls.attention(*tensors, mask)
        ls.attention(*tensors, mask & ls.masks.causal())
    elif way == "plan":
        ls.plan(mask, ls.layouts.zigzag(S, 2), q_heads=2, kv_heads=2, head_dim=8, dtype="float64")
    elif way == "flex":
        ls.flex_attention(*tensors, None, mask)
    elif way == "block_mask":
        ls.block_mask(mask, ls.layouts.contiguous(S, 1), 0)
    elif way == "classify":
        mask.classify(ls.Span(0, S), ls.Span(0, S))
    elif way == "flex kernel":
        ls.attention(*tensors, mask, kernel="flex")
    else:
        block_mask = create_block_mask(lambda b, h, i, j: dense[i, j], None, None, S, S, device="cpu")
        ls.flex_attention(*tensors, None, block_mask)
