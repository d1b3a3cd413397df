"""Bad calls: each is refused with an error of ours that says what was asked, what was found and what to do.

The tables are in bad_inputs_*.py. Each row must raise exactly the named error, with the names and values of its
fragments in the message; the sentences around them are free. Full texts are compared in test_refusal_table.py. Nothing
may be let through, and no error of torch, numpy or Python itself may reach the user.
"""

import importlib

import numpy as np
import pytest
import torch

import longspan
from longspan import LongspanError, layouts, masks

TABLES = ("words", "masks", "layouts", "plans", "calls", "convolutions", "training", "torch")
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


# -- what is taken beside what is refused ------------------------------------------------------------------------------


def dense(mask, tokens):
    at = np.arange(tokens)
    return mask.allows(*np.broadcast_arrays(at[:, None], at))


def test_tables_are_read_exactly():
    draw = np.random.default_rng(0)
    for _ in range(60):
        tokens = int(draw.integers(1, 40))
        cuts = np.sort(draw.integers(0, tokens + 1, size=draw.integers(0, 4)))
        lengths = np.diff(np.concatenate(([0], cuts, [tokens])))
        packed, window = masks.documents(lengths), masks.sliding_window(*(int(n) for n in draw.integers(0, 6, 2)))
        prefixes = [int(draw.integers(0, n + 1)) for n in lengths]
        kinds = (
            masks.causal(), masks.full(), packed, packed & masks.causal(), packed & window, window,
            masks.prefix_lm(prefixes, lengths), (masks.sliding_window(1) | masks.global_prefix(2)) & masks.causal(),
            packed & masks.causal() & ~masks.global_prefix(3),
        )  # fmt: skip
        for mask in kinds:
            table = dense(mask, tokens)
            found = masks.from_dense(table)
            assert found == mask.resized(tokens)
            assert np.array_equal(dense(found, tokens), table)
    small = draw.random((4, 4)) < 0.5  # without structure, but small: exact as well
    assert np.array_equal(dense(masks.from_dense(small), 4), small)


def test_tables_of_heads_and_rows():
    causal, full = masks.causal(6), masks.full(6)
    table = torch.from_numpy(np.stack([dense(causal, 6), dense(full, 6)]))
    assert masks.from_dense(table[None]) == masks.per_head(causal, full)
    assert masks.from_dense(table[:, None]) == masks.per_row(causal, full)
    assert masks.from_dense(table[:1, None].expand(3, 5, -1, -1)) == causal


def test_attention_and_plan_take_small_tables():
    q, k, v = tensors(2, 4, 24, 8)
    table = torch.ones(24, 24, dtype=torch.bool).tril()
    table[20:, :20] = False
    mask = masks.documents([20, 4]) & masks.causal()
    expected = longspan.attention(q, k, v, mask)
    assert torch.equal(longspan.attention(q, k, v, table), expected)
    assert torch.equal(longspan.attention(q, k, v, table.numpy()), expected)
    assert torch.equal(torch.compile(longspan.attention, backend="eager")(q, k, v, table), expected)
    sizes = {"q_heads": 4, "kv_heads": 4, "head_dim": 8, "dtype": "float64", "scheme": "exchange"}
    layout = layouts.zigzag(24, 2)
    assert longspan.plan(table, layout, **sizes).fingerprint == longspan.plan(mask, layout, **sizes).fingerprint


def test_other_orders_that_fit_are_no_mistake():
    """More heads than tokens, and lengths that are the number of heads: nothing tells that the order was another."""
    q, k, v = tensors(1, 24, 4, 8)
    mask = masks.documents([3, 1]) & masks.causal()
    assert longspan.attention(q, k[:, :6], v[:, :6], mask).shape == (1, 24, 4, 8)
    assert longspan.attention(*tensors(1, 4, 4, 8), mask).shape == (1, 4, 4, 8)


def test_misspelt_arguments_are_named():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'sofcap'\. Did you mean softcap\?"):
        longspan.attention(*tensors(1, 2, 4, 8), masks.causal(), sofcap=3.0)
    assert longspan.attention(*tensors(1, 2, 4, 8), masks.causal(), softcap=3.0).shape == (1, 2, 4, 8)


def test_errors_of_ranks_are_at_hand():
    assert "AgreementError" in longspan.__all__
    assert issubclass(longspan.AgreementError, LongspanError)


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
