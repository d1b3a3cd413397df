"""Bad calls: each is refused with an error of ours that says what was asked, what was found and what to do.

The tables are in bad_inputs_*.py. Whatever a row calls must raise exactly the named error with every named fragment in
its message. Nothing may be let through, and no error of torch, numpy or Python itself may reach the user.
"""

import importlib

import numpy as np
import pytest
import torch

import longspan
from longspan import LongspanError, layouts, masks

TABLES = ("masks", "layouts", "plans", "calls", "convolutions", "training", "torch", "text")
ROWS = [
    (table, row) for table in TABLES for row in importlib.import_module(f"tests.refusals.bad_inputs_{table}").rows()
]


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[f"{table}-{row.name}" for table, row in ROWS])
def test_bad_input(table, row):
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the lines below say which
        row.call()
    message, error = str(caught.value), caught.value
    assert isinstance(error, row.error), f"{type(error).__name__}, not {row.error.__name__}: {message}"
    assert isinstance(error, LongspanError), f"{type(error).__name__} is none of ours: {message}"
    for fragment in row.says:
        assert fragment in message, f"{fragment!r} is missing in: {message}"
    assert " at 0x" not in message, f"an address says nothing: {message}"
    assert message.rstrip("\n").endswith(".") or "\n" in message, f"not a sentence: {message}"


def test_there_are_many_and_each_once():
    assert len(ROWS) >= 300
    names = [f"{table}-{row.name}" for table, row in ROWS]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})


# -- what looks odd and is right ---------------------------------------------------------------------------------------


def tensors(*shape):
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3)]


STRIDES = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "features first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "an offset": lambda t: torch.cat((t.new_zeros(3), t.flatten()))[3:].view(t.shape),
    "reversed": lambda t: t.flip(2).flip(2),
}


@pytest.mark.parametrize("kind", STRIDES)
def test_any_stride_gives_the_same_numbers(kind):
    q, k, v = tensors(2, 4, 9, 6)
    mask = masks.documents([5, 4]) & masks.causal()
    expected = longspan.attention(q, k, v, mask)
    odd = [STRIDES[kind](t).detach().requires_grad_() for t in (q, k, v)]
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    assert torch.equal(longspan.attention(*odd, mask), expected)
    for run in (odd, plain):
        longspan.attention(*run, mask).square().sum().backward()
    for a, b in zip(odd, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", STRIDES)
def test_any_stride_convolves_the_same_numbers(kind):
    x, dout, _ = (t[0] for t in tensors(1, 2, 9, 6))
    weight = torch.linspace(-1.0, 2.0, 18, dtype=torch.float64).view(6, 3)
    odd = STRIDES[kind](x[None])[0].detach().requires_grad_()
    plain = x.clone().requires_grad_()
    outs = [longspan.causal_conv1d(t, weight, documents=[5, 4]) for t in (odd, plain)]
    torch.testing.assert_close(*outs, rtol=1e-14, atol=1e-14)
    for out in outs:
        out.backward(STRIDES[kind](dout[None])[0])
    torch.testing.assert_close(odd.grad, plain.grad, rtol=1e-13, atol=1e-13)


def test_one_row_for_all_heads_works():
    q, k, v = tensors(1, 1, 9, 6)
    wide = [t.expand(2, 3, 9, 6) for t in (q, k, v)]
    out = longspan.attention(*wide, masks.causal())
    torch.testing.assert_close(out[1, 2:3], longspan.attention(q, k, v, masks.causal())[0])


@pytest.mark.parametrize("where", ["bias", "sinks", "alibi", "score_mod", "q", "v"])
def test_nan_is_never_hidden(where):
    """What is not a number in an input that counts is not a number in the output; nothing replaces it."""
    q, k, v = tensors(1, 2, 8, 4)
    nan = float("nan")
    extra = {
        "bias": {"bias": torch.full((1, 1, 8, 8), nan)},
        "sinks": {"sinks": torch.full((2,), nan)},
        "alibi": {"alibi": torch.full((2,), nan)},
        "score_mod": {"score_mod": lambda s, b, h, i, j: s * nan},
    }.get(where, {})
    (q if where == "q" else v if where == "v" else torch.zeros(1)).fill_(nan)
    assert longspan.attention(q, k, v, masks.causal(), **extra).isnan().all()


def test_a_function_that_raises_is_heard_as_it_is():
    q, k, v = tensors(1, 2, 8, 4)

    class MissingError(Exception):
        pass

    def fails(*_):
        raise MissingError("the table is missing")

    with pytest.raises(MissingError, match="the table is missing"):
        longspan.attention(q, k, v, masks.causal(), score_mod=fails)
    with pytest.raises(MissingError, match="the table is missing"):
        longspan.attention(q, k, v, masks.from_mask_mod(lambda b, h, i, j: fails(), 8))


def test_numbers_of_other_libraries_count_as_numbers():
    assert masks.causal(np.int32(8)) == masks.causal(torch.tensor(8)) == masks.causal(8)
    assert layouts.zigzag(np.int64(8), np.uint8(2)) == layouts.zigzag(8, 2)
    assert longspan.Span(np.int64(1), torch.tensor(3)) == longspan.Span(1, 3)
    assert masks.documents(torch.tensor([3, 5])) == masks.documents(np.array([3, 5], dtype=np.uint8))
    assert masks.causal(0).area() == 0
