"""What functions read may change: read anew where a mask is given again, refused where backward would differ from its
forward. And the other side: what has not changed is neither refused nor worked out again, and nothing is kept alive."""

import functools
import gc
import pickle
import time
import weakref

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import longspan as ls
from longspan.errors import KernelError, LongspanError, MaskError
from longspan.masks import functions
from longspan.masks.captures import CaptureSnapshot
from longspan.masks.functions import Reader
from longspan.testing import run_loopback

S = 192
FIRST, SECOND = torch.arange(S) // 64, torch.arange(S) // 23
TABLE = FIRST.clone()
LIMIT = 20


def inputs(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, S, 8, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def truth(tensors, ids):
    """Causal attention inside of documents with these numbers."""
    position = torch.arange(S)
    seen = (ids[:, None] == ids[None]) & (position[:, None] >= position)
    q, k, v = tensors
    scores = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


class Holder:
    def __init__(self, ids):
        self.ids = ids

    def sees(self, b, h, i, j):
        return self.ids[i] == self.ids[j]

    @property
    def numbers(self):
        return self.ids

    def by_property(self, b, h, i, j):
        return self.numbers[i] == self.numbers[j]

    def __call__(self, b, h, i, j):
        return self.ids[i] == self.ids[j]


def by_global(b, h, i, j):
    return TABLE[i] == TABLE[j]


def helped(b, h, i, j):
    return by_global(b, h, i, j)


def rebind_global(ids):
    global TABLE
    TABLE = ids


def _buffer():
    ids = FIRST.clone()
    return lambda b, h, i, j: ids[i] == ids[j], ids.copy_


def _array():
    ids = FIRST.numpy().copy()
    return lambda b, h, i, j: torch.from_numpy(ids)[i] == torch.from_numpy(ids)[j], lambda new: np.copyto(ids, new)


def _method():
    held = Holder(FIRST)
    return held.sees, lambda new: setattr(held, "ids", new)


def _property():
    held = Holder(FIRST)
    return held.by_property, lambda new: setattr(held, "ids", new)


def _callable():
    held = Holder(FIRST)
    return held, lambda new: setattr(held, "ids", new)


def _closed_over():
    held = Holder(FIRST)
    return lambda b, h, i, j: held.ids[i] == held.ids[j], lambda new: setattr(held, "ids", new)


def _named():
    held = Holder(FIRST)
    return lambda b, h, i, j: getattr(held, "i" + "ds")[i] == held.sees.__self__.ids[j], lambda n: setattr(
        held, "ids", n
    )


def _entry():
    held = {"ids": FIRST, "other": 1}
    return lambda b, h, i, j: held["ids"][i] == held["ids"][j], lambda new: held.update(ids=new)


def _list():
    held = [FIRST, 3]
    return lambda b, h, i, j: held[0][i] == held[0][j], lambda new: held.__setitem__(0, new)


def _module():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", FIRST.clone())

        def sees(self, b, h, i, j):
            return self.ids[i] == self.ids[j]

    model = Model()
    return model.sees, model.ids.copy_


def _partial():
    held = Holder(FIRST)
    return functools.partial(lambda held, b, h, i, j: held.ids[i] == held.ids[j], held), lambda n: setattr(
        held, "ids", n
    )


def _global():
    rebind_global(FIRST)
    return by_global, rebind_global


def _helper():
    rebind_global(FIRST)
    return helped, rebind_global


def _numbers():
    """A number that stands for the documents: their length."""
    held = Holder(None)
    held.size = 64
    return lambda b, h, i, j: i // held.size == j // held.size, lambda new: setattr(held, "size", 23)


def _numbers_in_a_list():
    held = [1, 64]
    return lambda b, h, i, j: i // held[1] == j // held[1], lambda new: held.__setitem__(1, 23)


def _numpy_lookup():
    """A function that looks at values of positions: what its code names is compared."""
    ids = FIRST.numpy().copy()
    return lambda b, h, i, j: torch.as_tensor(ids[i.numpy()] == ids[j.numpy()]), lambda new: np.copyto(ids, new)


def _numpy_lookup_of_attribute():
    held = Holder(FIRST.numpy())
    return lambda b, h, i, j: torch.as_tensor(held.numbers[i] == held.numbers[j]), lambda new: setattr(
        held, "ids", new.numpy()
    )


def _numpy_number():
    held = Holder([1, {"size": 64}])

    def document(i):
        return i.numpy() // held.ids[1]["size"]

    return lambda b, h, i, j: torch.as_tensor(document(i) == document(j)), lambda new: held.ids[1].update(size=23)


def _result_of_flag():
    """A function whose result is a captured tensor, without an operation."""
    held = Holder(None)
    held.choose = by_first
    return lambda b, h, i, j: held.choose(i, j), lambda new: setattr(held, "choose", by_second)


def by_first(i, j):
    return FIRST[i] == FIRST[j]


def by_second(i, j):
    return SECOND[i] == SECOND[j]


WAYS = {
    made.__name__.strip("_"): made
    for made in (
        _buffer, _array, _method, _property, _callable, _closed_over, _named, _entry, _list, _module, _partial, _global,
        _helper, _numbers, _numbers_in_a_list, _numpy_lookup, _numpy_lookup_of_attribute, _numpy_number,
        _result_of_flag,
    )
}  # fmt: skip


def causal_mask(function):
    return ls.masks.from_mask_mod(function, S, within=ls.masks.causal())


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", list(WAYS))
def test_a_mask_that_is_given_again_is_read_anew(way):
    function, change = WAYS[way]()
    tensors, mask = inputs(), causal_mask(function)
    layout = ls.layouts.zigzag(S, 3)
    plan = ls.plan(mask, layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float64")
    whole = [t.detach() for t in tensors]
    dout = torch.randn(1, 2, S, 8, dtype=torch.float64)
    marks = []
    for ids in (FIRST, SECOND):
        for _ in range(2):
            want = truth(tensors, ids)
            out = ls.attention(*tensors, mask)
            assert torch.allclose(out, want, atol=1e-12)
            found, wanted = (torch.autograd.grad(x, tensors, dout) for x in (out, want))
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, wanted, strict=True))
            over_ranks = run_loopback(plan, *whole, dout)
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(over_ranks[2:5], wanted, strict=True))
        kinds = mask.classify(ls.Span(0, S), ls.Span(0, S), tile=32)
        marks.append((plan.fingerprint, kinds.tobytes()))
        change(SECOND)
    assert marks[0][0] != marks[1][0]
    assert marks[0][1] != marks[1][1]


@pytest.mark.parametrize("way", list(WAYS))
def test_backward_of_a_mask_that_reads_other_data_is_refused(way):
    function, change = WAYS[way]()
    tensors, mask = inputs(), causal_mask(function) & ls.masks.full(S)
    out = ls.attention(*tensors, mask)
    change(SECOND)
    with pytest.raises(MaskError, match=r"between forward and backward"):
        out.sum().backward()
    out = ls.attention(*tensors, mask)  # given again, it is read anew
    want = torch.autograd.grad(truth(tensors, SECOND).sum(), tensors)
    assert all(torch.allclose(a, b) for a, b in zip(torch.autograd.grad(out.sum(), tensors), want, strict=True))


def test_backward_of_the_first_of_two_forwards_is_refused_and_of_the_second_is_not():
    ids = FIRST.clone()
    tensors, mask = inputs(), causal_mask(lambda b, h, i, j: ids[i] == ids[j])
    first = ls.attention(*tensors, mask)
    ids.copy_(SECOND)
    second = ls.attention(*tensors, mask)
    want = torch.autograd.grad(truth(tensors, SECOND).sum(), tensors)
    found = torch.autograd.grad(second.sum(), tensors)
    assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))
    with pytest.raises(MaskError, match=r"\(192,\)"):
        first.sum().backward()


def test_what_is_bound_back_before_backward_is_as_it_was():
    held = Holder(FIRST)
    tensors, mask = inputs(), causal_mask(held.sees)
    out = ls.attention(*tensors, mask)
    held.ids = SECOND
    with torch.no_grad():
        assert torch.allclose(ls.attention(*tensors, mask), truth(tensors, SECOND))
    held.ids = FIRST
    want = torch.autograd.grad(truth(tensors, FIRST).sum(), tensors)
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))


def test_a_checkpoint_recomputes_with_what_is_there_now_and_is_refused():
    ids = FIRST.clone()
    tensors, mask = inputs(), causal_mask(lambda b, h, i, j: ids[i] == ids[j])

    def run(*tensors):
        return ls.attention(*tensors, mask)

    out = torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False)
    want = torch.autograd.grad(truth(tensors, FIRST).sum(), tensors)
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))


def test_what_a_function_does_not_read_may_change():
    """Counters, other attributes and entries, weights of the same module: no reason to refuse, or to start again."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.ids, self.step, self.parts = torch.nn.Linear(4, 4), FIRST, 0, {"a": 1, "b": 2}

        def sees(self, b, h, i, j):
            return (self.ids[i] == self.ids[j]) & (i - j >= -self.parts["a"])

    model = Model()
    tensors, mask = inputs(), causal_mask(model.sees)
    out = ls.attention(*tensors, mask)
    before = mask.refresh_captures()
    model.step, model.parts["b"], model.new = 7, 3, "new"
    with torch.no_grad():
        model.linear.weight.add_(1)
    want = torch.autograd.grad(truth(tensors, FIRST).sum(), tensors)
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))
    assert mask.refresh_captures() is before


def test_a_repeated_call_asks_about_one_pair_and_no_tile():
    shapes = []

    def sees(b, h, i, j):
        shapes.append(tuple(i.shape))
        return FIRST[i] == FIRST[j]

    tensors, mask = [t.detach() for t in inputs()], causal_mask(sees)
    ls.attention(*tensors, mask)
    shapes.clear()
    kinds = mask.plans[next(iter(mask.plans))].mask.known
    assert any(isinstance(value, ls.masks.Classifier) for value in kinds.values())
    ls.attention(*tensors, mask)
    asked = [shape for shape in shapes if shape != ()]
    assert len(shapes) - len(asked) == 1
    assert len(asked) <= 3, asked  # the few tiles that are asked in every run


def test_functions_that_count_their_own_calls_are_not_refused_for_that():
    class Counting:
        def __init__(self):
            self.calls, self.notes, self.log, self.ids = 0, [], {"n": 0}, FIRST

        def __call__(self, b, h, i, j):
            self.calls += 1
            self.log["n"] += 1
            self.notes.append((i.shape, self.calls))
            return self.ids[i] == self.ids[j]

    held, tensors = Counting(), inputs()
    mask = causal_mask(held)
    out = ls.attention(*tensors, mask)
    want = torch.autograd.grad(truth(tensors, FIRST).sum(), tensors)
    found = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))
    held.ids = SECOND
    with pytest.raises(MaskError, match="is another one"):
        out.sum().backward()


def test_looking_costs_little():
    """Below 0.3 ms for functions, nothing for closed forms; the best of many, on a busy machine."""

    def cost(mask):
        mask.refresh_captures()
        times = []
        for _ in range(50):
            start = time.perf_counter()
            mask.refresh_captures()
            times.append(time.perf_counter() - start)
        return min(times)

    held = Holder(FIRST)
    assert cost(causal_mask(held.sees)) < 300e-6
    assert cost(ls.masks.from_mask_mod(lambda b, h, i, j: FIRST[i] == FIRST[j], S, heads=64)) < 300e-6
    assert cost(ls.masks.documents([3] * 64) & ls.masks.causal()) < 50e-6


def test_masks_are_copied_and_sent_without_what_they_remember():
    held = Holder(FIRST)
    tensors, mask = inputs(), causal_mask(held)
    ls.attention(*tensors, mask)
    again = pickle.loads(pickle.dumps(mask))
    assert not again.known
    assert not again.plans
    assert torch.equal(ls.attention(*tensors, again), ls.attention(*tensors, mask))


def test_block_masks_made_of_masks_are_made_anew():
    function, change = WAYS["buffer"]()
    mask, layout = causal_mask(function), ls.layouts.contiguous(S, 1)
    first = ls.block_mask(mask, layout, 0, block_size=32)
    assert ls.block_mask(mask, layout, 0, block_size=32) is first
    change(SECOND)
    second = ls.block_mask(mask, layout, 0, block_size=32)
    assert second is not first
    assert second.sparsity() != first.sparsity()


@pytest.mark.parametrize("compiled", [False, True])
def test_block_masks_that_are_filled_anew_are_read_anew(compiled):
    ids = FIRST.clone()

    def sees(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j)

    tensors = [t.detach() for t in inputs()]
    static = create_block_mask(sees, None, None, S, S, device="cpu", BLOCK_SIZE=32)
    run = torch.compile(ls.flex_attention, backend="eager") if compiled else ls.flex_attention
    for numbers in (FIRST, SECOND):
        ids.copy_(numbers)
        new = create_block_mask(sees, None, None, S, S, device="cpu", BLOCK_SIZE=32)
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            getattr(static, name).copy_(getattr(new, name))
        assert torch.allclose(run(*tensors, None, static), truth(tensors, numbers), atol=1e-12)


def test_block_masks_whose_function_reads_a_variable_that_is_bound_anew():
    ids = FIRST
    tensors = [t.detach() for t in inputs()]

    def sees(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j)

    static = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu", BLOCK_SIZE=S)
    static.mask_mod = sees
    for numbers in (FIRST, SECOND):
        ids = numbers
        assert torch.allclose(ls.flex_attention(*tensors, None, static), truth(tensors, numbers), atol=1e-12)


def test_compiled_calls_read_anew_and_refuse():
    ids = FIRST.clone()
    tensors, mask = inputs(), causal_mask(lambda b, h, i, j: ids[i] == ids[j])
    run = torch.compile(lambda *t: ls.attention(*t, mask) * 1.0, backend="aot_eager")
    assert torch.allclose(run(*tensors), truth(tensors, FIRST))
    ids.copy_(SECOND)
    out = run(*tensors)
    assert torch.allclose(out, truth(tensors, SECOND))
    want = torch.autograd.grad(truth(tensors, SECOND).sum(), tensors)
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))
    out = run(*tensors)
    ids.copy_(FIRST)
    with pytest.raises(LongspanError, match="between forward and backward"):
        out.sum().backward()


# -- score functions ---------------------------------------------------------------------------------------------------


def dense(tensors, score):
    q, k, v = tensors
    position = torch.arange(S)
    scores = score(q @ k.mT / 8**0.5, 0, torch.arange(2)[:, None, None], position[:, None], position)
    return scores.masked_fill(position[:, None] < position, -torch.inf).softmax(-1) @ v


SCORES = {
    "attribute": lambda held: lambda s, b, h, i, j: s + held.ids[(i - j).abs()],
    "number": lambda held: lambda s, b, h, i, j: s - held.alpha * (i - j),
    "array": lambda held: lambda s, b, h, i, j: s + torch.from_numpy(held.array)[(i - j).abs()],
    "method": lambda held: held.score,
}


class Scores:
    def __init__(self):
        self.ids, self.alpha, self.array = torch.randn(S, dtype=torch.float64), 0.1, np.random.default_rng(0).random(S)
        self.step = 0

    def score(self, s, b, h, i, j):
        return s + self.ids[(i - j).abs()]

    def change(self):
        self.ids, self.alpha = torch.randn(S, dtype=torch.float64), self.alpha * 2
        self.array[:] = self.array[::-1].copy()


@pytest.mark.parametrize("kernel", ["auto", "flex"])
@pytest.mark.parametrize("way", list(SCORES))
def test_backward_of_a_score_function_that_reads_other_data_is_refused(way, kernel):
    held, tensors = Scores(), inputs()
    score = SCORES[way](held)
    if (way, kernel) == ("array", "flex"):
        pytest.skip("arrays cannot be traced")
    for _ in range(2):
        want = torch.autograd.grad(dense(tensors, score).sum(), tensors)
        out = ls.attention(*tensors, ls.masks.causal(), score_mod=score, kernel=kernel)
        held.step += 1  # is not read
        found = torch.autograd.grad(out.sum(), tensors)
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found, want, strict=True))
        held.change()
    out = ls.attention(*tensors, ls.masks.causal(), score_mod=score, kernel=kernel)
    held.change()
    with pytest.raises(KernelError, match=r"between forward and backward"):
        out.sum().backward()


def test_variables_that_a_loop_binds_anew_do_not_reach_score_functions():
    tensors, outs, wants = inputs(), [], []
    for alpha in (0.1, 0.2, 0.3):
        outs.append(ls.attention(*tensors, ls.masks.causal(), score_mod=lambda s, b, h, i, j: s - alpha * (i - j)))  # noqa: B023
        wants.append(torch.autograd.grad(dense(tensors, lambda s, b, h, i, j: s - alpha * (i - j)).sum(), tensors))  # noqa: B023
    for out, want in zip(outs, wants, strict=True):
        found = torch.autograd.grad(out.sum(), tensors)
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found, want, strict=True))


# -- what was read, told -----------------------------------------------------------------------------------------------


def test_reads_say_what_changed():
    held = Holder(FIRST)
    held.alpha = 0.5
    limits = {"a": 3}

    def sees(b, h, i, j):
        return (i - j < LIMIT) & (i - j < limits["a"]) & (i * held.alpha >= 0)

    before = CaptureSnapshot.of(sees)
    assert before.difference(CaptureSnapshot.of(sees)) is None
    held.alpha = float("nan")
    assert before.difference(CaptureSnapshot.of(sees)) == "held.alpha was 0.5 and is nan"
    again = CaptureSnapshot.of(sees)
    assert again.difference(CaptureSnapshot.of(sees)) is None
    limits["a"] = 4
    assert again.difference(CaptureSnapshot.of(sees)) == "limits['a'] was 3 and is 4"


def test_a_snapshot_describes_the_operation_that_changed():
    held, pair = Holder([3]), (torch.tensor(0), torch.tensor(0))

    def sees(i, j):
        return i - j < held.ids[0]

    before = CaptureSnapshot.of(sees, pair)
    assert before.difference(CaptureSnapshot.of(sees, pair, before)) is None
    held.ids[0] = 4
    assert (
        before.difference(CaptureSnapshot.of(sees, pair, before)) == "`lt` was called with 3 and is now called with 4"
    )


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.bool_])
def test_tensors_that_a_call_creates_are_compared_by_value(dtype):
    held, pair = Holder(np.zeros(4, dtype)), (torch.tensor(0), torch.tensor(0))

    def sees(i, j):
        return torch.from_numpy(getattr(held, "i" + "ds"))[i] == j

    before = CaptureSnapshot.of(sees, pair)
    assert before.difference(CaptureSnapshot.of(sees, pair, before)) is None
    held.ids[3] = 1
    assert "was changed in place" in before.difference(CaptureSnapshot.of(sees, pair, before))


def test_numbers_in_helpers_that_leave_no_trace_are_compared():
    """A compiled helper runs no operation that a torch-function mode sees; a legacy constructor stands in for it."""
    held, pair = Holder(3), (torch.tensor(0), torch.tensor(0))

    def sees(i, j):
        return torch.Tensor([held.ids > 2]).bool()[0]

    before = CaptureSnapshot.of(sees, pair)
    held.ids = 4
    assert before.difference(CaptureSnapshot.of(sees, pair, before)).endswith("ids was 3 and is 4")


def test_a_result_without_operations_is_compared():
    held, pair = Holder(torch.tensor(True)), (torch.tensor(0), torch.tensor(0))
    before = CaptureSnapshot.of(lambda i, j: held.ids, pair)
    held.ids = torch.tensor(False)
    assert "is another one" in before.difference(CaptureSnapshot.of(lambda i, j: held.ids, pair, before))
    held.ids = True
    before = CaptureSnapshot.of(lambda i, j: held.ids, pair)
    held.ids = False
    assert before.difference(CaptureSnapshot.of(lambda i, j: held.ids, pair, before)) is not None


# -- devices -----------------------------------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """Stands in for a tensor of a GPU: it says so, and does not mix with arrays of the CPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        flat = [x for arg in args for x in (arg if isinstance(arg, tuple | list) else (arg,))]
        if any(type(x) is torch.Tensor and x.ndim for x in flat):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_mask_functions_get_positions_where_their_tensors_are(monkeypatch):
    real = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}

    def made(name):
        def make(value, *args, device=None, **kwargs):
            if device is not None and torch.device(device).type == "cuda":
                return real[name](value, *args, **kwargs).as_subclass(Elsewhere)
            return real[name](value, *args, device=device, **kwargs)

        return make

    ids = FIRST.clone().as_subclass(Elsewhere)
    for function, kind in (
        (lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), Elsewhere),
        (lambda b, h, i, j: (FIRST[i] == FIRST[j]) & (i >= j), torch.Tensor),
    ):
        seen = []

        def noting(b, h, i, j, function=function, seen=seen):
            seen.append(type(i))
            return function(b, h, i, j)

        mask = ls.masks.from_mask_mod(noting, S)
        functions._verdicts[noting] = {(False, False, True, True): True}  # finding that out would need a device
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(torch, name, made(name))
            position = np.arange(S)
            found = mask.allows(position[:, None], position[None])
        want = (FIRST[:, None] == FIRST) & (torch.arange(S)[:, None] >= torch.arange(S))
        assert np.array_equal(found, want.numpy())
        assert set(seen[1:]) == {kind}


def test_tensors_without_values_are_refused():
    ids = torch.zeros(S, dtype=torch.long, device="meta")
    where = []

    def sees(b, h, i, j):
        where.append(i.device.type)
        return (ids[i] == ids[j]) & (i >= j)

    with pytest.raises(MaskError, match="meta"):
        ls.attention(*inputs(), ls.masks.from_mask_mod(sees, S))
    assert "meta" in where


# -- ranks that differ, memory -----------------------------------------------------------------------------------------


def test_fingerprints_see_one_token(monkeypatch):
    """Ranks compare what is in the tensors that a function reads, not only answers to a few pairs."""

    def fingerprint(cut, size=4096):
        ids = (torch.arange(size) >= cut).long()
        return ls.masks.from_mask_mod(lambda b, h, i, j: ids[i] == ids[j], size, within=ls.masks.causal()).fingerprint

    assert fingerprint(1000) == fingerprint(1000)
    assert len({fingerprint(cut) for cut in (1000, 1001, 1002, 3999)}) == 4
    monkeypatch.setattr(Reader, "contents", lambda self: "")
    assert len({fingerprint(cut) for cut in (1000, 1001, 1002, 3999)}) < 4  # answers alone do not tell


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


def test_a_list_that_a_function_appends_to_is_not_a_change():
    seen = []

    def sees(b, h, i, j):
        if i.ndim:  # not on the one pair that is tried
            seen.append(1)
        return FIRST[i] == FIRST[j]

    tensors, mask, noted = inputs(), causal_mask(sees), []
    for _ in range(3):
        ls.attention(*tensors, mask).sum().backward()
        noted.append(mask.plans[next(iter(mask.plans))].mask.last_reads)
    assert noted[0] is noted[1] is noted[2]


class Branches:
    """Compares positions; packed, it counts starts, which tiles mix up."""

    def __init__(self):
        self.packed, self.starts = False, torch.tensor([50])

    def __call__(self, b, h, i, j):
        return (i >= self.starts).sum() == (j >= self.starts).sum() if self.packed else i == i

    def score(self, s, b, h, i, j):
        return s if not self.packed else s - 2 * ((i >= self.starts).sum() != (j >= self.starts).sum())


def test_another_branch_of_a_function_is_judged_anew():
    tensors, function, causal = inputs(), Branches(), ls.masks.causal(S)
    mask, numbers = ls.masks.from_mask_mod(function, S) & causal, (torch.arange(S) >= 50).int()
    ls.attention(*tensors, mask)
    ls.attention(*tensors, causal, score_mod=function.score)
    function.packed = True
    for other in (mask, ls.masks.from_mask_mod(function, S) & causal):
        assert torch.allclose(ls.attention(*tensors, other), truth(tensors, numbers), atol=1e-12)
    different = Branches()
    different.packed = True
    found, expected = (ls.attention(*tensors, causal, score_mod=each.score) for each in (function, different))
    assert torch.allclose(found, expected, atol=1e-12)
    assert not torch.allclose(found, ls.attention(*tensors, causal), atol=1e-3)


def test_numpy_that_combines_positions_is_refused_beside_elementwise_numpy():
    tensors = inputs()
    near = ls.masks.from_mask_mod(lambda b, h, i, j: torch.as_tensor(np.abs(i.numpy() - j.numpy()) < 9), S)
    expected = ls.masks.from_mask_mod(lambda b, h, i, j: (i - j).abs() < 9, S)
    assert torch.equal(ls.attention(*tensors, near), ls.attention(*tensors, expected))
    seen = ls.masks.from_mask_mod(lambda b, h, i, j: ((i - j).abs() < 9) | bool((j.numpy() == 150).any()), S)
    with pytest.raises(LongspanError, match=r"must treat each pair separately.*torch\.isin"):
        ls.attention(*tensors, seen)


def test_what_a_function_computes_once_and_keeps_gets_its_gradient():
    class Slopes:
        def __init__(self, raw):
            self.raw = raw

        @functools.cached_property
        def slopes(self):
            return torch.nn.functional.softplus(self.raw)

        def __call__(self, s, b, h, i, j):
            return s * self.slopes[h]

    raw, mask, tensors = (
        torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True),
        ls.masks.causal(S),
        inputs(),
    )
    dout = torch.randn(1, 2, S, 8, dtype=torch.float64)
    found = torch.autograd.grad(ls.attention(*tensors, mask, score_mod=Slopes(raw)), raw, dout)[0]
    slopes = torch.nn.functional.softplus(raw)
    expected = torch.autograd.grad(
        ls.attention(*tensors, mask, score_mod=lambda s, b, h, i, j: s * slopes[h]), raw, dout
    )[0]
    assert expected.abs().min() > 0
    assert torch.allclose(found, expected, rtol=1e-12)
