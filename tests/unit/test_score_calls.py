"""Calls with score functions: what is captured and where it is found, what is refused, and other machinery around."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan import masks
from longspan.scoring.biases import RelativeBias
from tests.score_cases import E, random_inputs

S = 12
MASK = masks.documents([5, 7]) & masks.causal()
IN_MODULE = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)


def make(seed=0):
    q, k, v, dout = random_inputs(torch.Generator().manual_seed(seed), S)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def slopes(seed=1):
    return torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def wanted(values, inputs):
    """Output and gradients with score + values[h] * (q - kv), by `alibi` under a causal mask: |q - kv| = q - kv."""
    q, k, v, dout = inputs
    leaf = values.detach().clone().requires_grad_()
    out = ls.attention(q, k, v, MASK, alibi=-leaf)
    return out, *torch.autograd.grad(out, (q, k, v, leaf), dout)


def same(found, expected):
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(found, expected, strict=True))


# -- where captured tensors are found ----------------------------------------------------------------------------------


class Biased(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        self.table = torch.nn.Parameter(values.detach().clone())

    def score_mod(self, s, b, h, q, kv):
        return s + self.table[h] * (q - kv)

    def forward(self, s, b, h, q, kv):
        return self.score_mod(s, b, h, q, kv)


def from_global(s, b, h, q, kv):
    return s + IN_MODULE[h] * (q - kv)


def from_argument(values, s, b, h, q, kv, *, sign=1.0):
    return s + sign * values[h] * (q - kv)


def found_by(how):
    """(score_mod, the tensor that learns)"""
    values = slopes()
    if how == "closure":
        return (lambda s, b, h, q, kv: s + values[h] * (q - kv)), values
    if how == "nested closure":

        def inner(h):
            return values[h]

        return (lambda s, b, h, q, kv: s + inner(h) * (q - kv)), values
    if how == "global":
        return from_global, IN_MODULE
    if how == "method":
        module = Biased(values)
        return module.score_mod, module.table
    if how == "module":
        module = Biased(values)
        return module, module.table
    if how == "partial":
        return functools.partial(from_argument, values, sign=1.0), values
    if how == "default argument":
        return (lambda s, b, h, q, kv, table=values: s + table[h] * (q - kv)), values
    if how == "list":
        tables = [values, None]
        return (lambda s, b, h, q, kv: s + tables[0][h] * (q - kv)), values
    if how == "embedding":
        return (lambda s, b, h, q, kv: s + torch.nn.functional.embedding(h, values[:, None])[..., 0] * (q - kv)), values
    assert how == "index_select"
    return (lambda s, b, h, q, kv: s + values.index_select(0, h.reshape(-1)).reshape(h.shape) * (q - kv)), values


WAYS = (
    "closure", "nested closure", "global", "method", "module", "partial", "default argument", "list", "embedding",
    "index_select",
)  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_captured_tensors_are_found(how):
    score_mod, learned = found_by(how)
    q, k, v, dout = inputs = make()
    out = ls.attention(q, k, v, MASK, score_mod=score_mod)
    assert same((out, *torch.autograd.grad(out, (q, k, v, learned), dout)), wanted(learned, inputs))


def test_gradients_reach_what_captured_tensors_were_made_from():
    params, inputs = slopes(), make()
    q, k, v, dout = inputs
    made = params.exp()  # not a leaf
    out = ls.attention(q, k, v, MASK, score_mod=lambda s, b, h, q, kv: s + made[h] * (q - kv))
    (found,) = torch.autograd.grad(out, params, dout)
    assert same((found,), (wanted(params.exp(), inputs)[4] * params.exp(),))


def test_a_view_of_a_parameter_is_captured():
    table, inputs = torch.randn(3, 4, dtype=torch.float64).requires_grad_(), make()
    q, k, v, dout = inputs
    row = table[1]
    out = ls.attention(q, k, v, MASK, score_mod=lambda s, b, h, q, kv: s + row[h] * (q - kv))
    (found,) = torch.autograd.grad(out, table, dout)
    assert same((found[1],), (wanted(table[1], inputs)[4],))
    assert not found[[0, 2]].any()


def test_tensors_used_twice_get_one_gradient():
    """In two places of a function, in a function and by name, in a function and as sinks."""
    values, (q, k, v, dout) = slopes(), make()

    def run(first, second, third):
        return ls.attention(
            q, k, v, MASK, alibi=first, sinks=third,
            score_mod=lambda s, b, h, i, j: s * second[h] + torch.tanh(second)[h] * (i + j),
        )  # fmt: skip

    (found,) = torch.autograd.grad(run(values, values, values), values, dout)
    apart = [values.detach().clone().requires_grad_() for _ in range(3)]
    assert same((found,), (sum(torch.autograd.grad(run(*apart), apart, dout)),))


def test_two_calls_in_one_graph_and_two_backward_passes():
    values, (q, k, v, dout) = slopes(), make()

    def score_mod(s, b, h, i, j):
        return s + values[h] * (i - j)

    def run(score_mod):
        inner = ls.attention(q, k, v, MASK, score_mod=score_mod)
        return ls.attention(q + inner.mean(), k, v, MASK, score_mod=score_mod)

    out = run(score_mod)
    first = torch.autograd.grad(out, values, dout, retain_graph=True)
    assert same(torch.autograd.grad(out, values, dout), first)
    step = 1e-6 * torch.ones_like(values)
    with torch.no_grad():
        moved = [run(lambda s, b, h, i, j, t=values + sign * step: s + t[h] * (i - j)) for sign in (1, -1)]
    slope = ((moved[0] - moved[1]) * dout).sum() / 2e-6
    assert slope.item() == pytest.approx(first[0].sum().item(), rel=1e-6)


def test_functions_made_anew_see_their_own_values():
    inputs = make()
    q, k, v, _ = inputs
    for seed in range(3):
        values = slopes(seed)
        out = ls.attention(q, k, v, MASK, score_mod=lambda s, b, h, i, j, t=values: s + t[h] * (i - j))
        assert same((out,), wanted(values, inputs)[:1])


def test_no_gradient_is_made_that_was_not_asked_for():
    values, (q, k, v, dout) = slopes(), make()
    plain = [t.detach() for t in (q, k, v)]

    def score_mod(s, b, h, i, j):
        return s + values[h] * (i - j)

    out = ls.attention(*plain, MASK, score_mod=score_mod)
    assert out.requires_grad  # for the values
    out.backward(dout)
    assert values.grad is not None
    assert ls.attention(*plain, MASK, softcap=2.0).grad_fn is None
    frozen = values.detach()
    out = ls.attention(q, k, v, MASK, score_mod=lambda s, b, h, i, j: s + frozen[h] * (i - j), sinks=frozen)
    out.backward(dout)
    assert q.grad is not None
    assert frozen.grad is None
    with torch.no_grad():
        out = ls.attention(q, k, v, MASK, score_mod=score_mod, sinks=values)
    assert not out.requires_grad


def test_no_grad_gives_the_same_output():
    values, (q, k, v, _) = slopes(), make()
    given = {"score_mod": lambda s, b, h, i, j: s + values[h] * (i - j), "sinks": values, "dropout": 0.2, "seed": 1}
    out = ls.attention(q, k, v, MASK, **given)
    with torch.no_grad():
        assert torch.equal(ls.attention(q, k, v, MASK, **given), out)
    with torch.inference_mode():
        assert torch.equal(ls.attention(q.detach(), k.detach(), v.detach(), MASK, **given), out)


# -- other machinery ---------------------------------------------------------------------------------------------------


def everything(values, table):
    return {
        "score_mod": lambda s, b, h, i, j: s + values[h] * (i - j),
        "sinks": values,
        "relative_bias": RelativeBias(table, max_distance=7),
        "dropout": 0.2,
        "seed": 8,
    }


@pytest.mark.parametrize("mask", [MASK, masks.from_mask_mod(lambda b, h, q, kv: (q + kv) % 3 < 2, S)], ids=str)
def test_checkpointed_equals_plain(mask):
    values, table, (q, k, v, dout) = slopes(), torch.randn(8, 4, dtype=torch.float64).requires_grad_(), make()

    def run(q, k, v):
        return ls.attention(q * 1.0, k, v, mask, **everything(values * 2, table))

    leaves = q, k, v, values, table
    plain, again = run(q, k, v), checkpoint(run, q, k, v, use_reentrant=False)
    expected = torch.autograd.grad(plain, leaves, dout)
    found = torch.autograd.grad(again, leaves, dout)
    assert torch.equal(plain, again)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_compiled_equals_eager():
    values, table, (q, k, v, dout) = slopes(), torch.randn(8, 4, dtype=torch.float64).requires_grad_(), make()

    def run(q, k, v):
        return torch.sin(ls.attention(torch.cos(q), k, v, MASK, **everything(values, table)))

    leaves = q, k, v, values, table
    eager = run(q, k, v)
    compiled = torch.compile(run, backend="aot_eager")(q, k, v)
    assert torch.allclose(compiled, eager, rtol=1e-12, atol=1e-14)
    assert same(torch.autograd.grad(compiled, leaves, dout), torch.autograd.grad(eager, leaves, dout))


# -- refusals ----------------------------------------------------------------------------------------------------------


def keeps(s, b, h, q, kv):
    return s


REFUSED = {
    "dropout without a seed": ({"dropout": 0.1}, "needs a seed.*pass seed=, the same on every rank"),
    "dropout of 1": ({"dropout": 1.0, "seed": 1}, "must be a probability.*got dropout = 1.0"),
    "negative dropout": ({"dropout": -0.1, "seed": 1}, "must be a probability.*got dropout = -0.1"),
    "negative seed": ({"dropout": 0.1, "seed": -1}, "whole number from 0 .* seed = -1"),
    "alibi of another size": ({"alibi": torch.ones(3)}, r"alibi has shape \(3,\), but \(heads = 4\) is needed"),
    "alibi of two dims": ({"alibi": torch.ones(4, 1)}, r"alibi has shape \(4, 1\), but \(heads = 4\) is needed"),
    "alibi as numbers": ({"alibi": [1.0] * 4}, r"alibi must be a floating-point tensor \(heads\), but got list"),
    "sinks of another size": ({"sinks": torch.ones(5)}, r"sinks has shape \(5,\), but \(heads = 4\) is needed"),
    "whole numbers as sinks": ({"sinks": torch.ones(4, dtype=torch.int64)}, "sinks must be a floating-point tensor"),
    "bias of another length": ({"bias": torch.ones(1, 1, S, S - 1)}, r"bias has shape \(1, 1, 12, 11\).*global"),
    "bias of three dims": ({"bias": torch.ones(4, S, S)}, r"bias has shape \(4, 12, 12\).*dims of 1 serve all"),
    "bias of a batch": ({"bias": torch.ones(3, 1, 1, S)}, r"bias has shape \(3, 1, 1, 12\)"),
    "a table without its rule": ({"relative_bias": torch.ones(8, 4)}, "RelativeBias.*but got Tensor"),
    "a table of other heads": (
        {"relative_bias": RelativeBias(torch.ones(8, 3))},
        r"RelativeBias.table has shape \(8, 3\), but \(buckets, heads = 4\) is needed",
    ),
    "softcap of 0": ({"softcap": 0.0}, "softcap must be a number above 0 and below 1e30, but got softcap = 0.0"),
    "negative softcap": ({"softcap": -2.0}, "got softcap = -2.0"),
    "infinite softcap": ({"softcap": float("inf")}, "got softcap = inf"),
    "softcap of nan": ({"softcap": float("nan")}, "got softcap = nan"),
    "no function": (
        {"score_mod": 3},
        r"score_mod must be a function \(score, b, h, q_idx, kv_idx\) -> score, but got int",
    ),
    "booleans": ({"score_mod": lambda s, b, h, q, kv: q >= kv}, "returned torch.bool.*To hide pairs use a mask"),
    "whole numbers": ({"score_mod": lambda s, b, h, q, kv: q - kv}, "returned torch.int64"),
    "nothing": ({"score_mod": lambda s, b, h, q, kv: None}, "must return a floating-point tensor.*returned NoneType"),
    "more dims": ({"score_mod": lambda s, b, h, q, kv: torch.stack((s, s))}, r"returned torch.float64 of shape \(2,\)"),
    "another kernel": ({"softcap": 1.0, "kernel": "cpu_flash"}, "cpu_flash.*score functions"),
    "another kernel for dropout": (
        {"dropout": 0.1, "seed": 1, "kernel": "cpu_flash"},
        "dropout.*'reference'",
    ),
    "a choice of others": ({"score_mod": keeps, "kernel": "sdpa"}, "cpu_flash: .*score functions"),
    "a softcap that float32 does not hold": ({"softcap": 1e300}, "above 0 and below 1e30"),
    "a complex table that learns": (
        {"score_mod": lambda s, b, h, q, kv: s * COMPLEX[h].real},
        "must be real, but got torch.complex128",
    ),
    "an unknown kernel": ({"softcap": 1.0, "kernel": "fast"}, "kernel must be one of .* but got 'fast'"),
    "an unknown way of summing": ({"captured_grads": "mean"}, "captured_grads must be .*'mean'"),
}


COMPLEX = torch.ones(8, dtype=torch.complex128, requires_grad=True)


def test_a_function_that_maps_a_tensor_itself():
    """Its gradient would be lost: refused. A tensor without one is read as it is."""
    q, k, v, _ = make()
    weights = torch.randn(3, dtype=q.dtype)

    def call(weights):
        return ls.attention(
            q, k, v, MASK, score_mod=lambda s, b, h, i, j: s + torch.vmap(lambda w: w * i)(weights).sum()
        )

    expected = ls.attention(q, k, v, MASK, score_mod=lambda s, b, h, i, j: s + weights.sum() * i)
    assert torch.allclose(call(weights), expected)
    with pytest.raises(ls.KernelError, match=r"must not map a tensor that needs a gradient"):
        call(weights.requires_grad_())


def test_vmap_over_a_captured_tensor_is_refused():
    q, k, v, _ = make()

    def call(slope):
        return ls.attention(q, k, v, MASK, score_mod=lambda s, b, h, i, j: s * slope)

    with pytest.raises(ls.PlanError, match=r"not be mapped by torch\.vmap"):
        torch.vmap(call)(torch.tensor([0.5, 2.0], dtype=q.dtype))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, message = REFUSED[name]
    q, k, v, _ = make()
    with pytest.raises(ls.LongspanError, match=message):
        ls.attention(q, k, v, MASK, **arguments)


def test_accepted_beside_what_is_refused():
    q, k, v, _ = make()
    plain = ls.attention(q, k, v, MASK, kernel="reference")
    for given in (
        {"score_mod": keeps},
        {"dropout": 0.0, "seed": 3},
        {"dropout": 0.0},
        {"bias": torch.zeros(1, 1, 1, 1)},
    ):
        assert torch.allclose(ls.attention(q, k, v, MASK, **given), plain, rtol=1e-13)
    assert plain.shape[3] == E


def test_what_the_function_raises_comes_through():
    q, k, v, _ = make()

    def score_mod(s, b, h, q, kv):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ls.attention(q, k, v, MASK, score_mod=score_mod)


LISTED = [0.5 * i for i in range(16)]
ARRAY = np.asarray(LISTED)
CONVERSIONS = {
    "item": lambda s, b, h, i, j: s + i.item(),
    "int": lambda s, b, h, i, j: s + int(i),
    "list": lambda s, b, h, i, j: s + LISTED[i],
    "math": lambda s, b, h, i, j: s + math.sin(i),
    "numpy": lambda s, b, h, i, j: s + ARRAY[i],
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_functions_that_convert_to_numbers_are_refused(name):
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(RuntimeError, match=r"many pairs at once by torch\.vmap"):
        ls.attention(q, q, q, ls.masks.causal(), score_mod=CONVERSIONS[name])


def test_errors_of_the_users_own_are_left_alone():
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(KeyError):
        ls.attention(q, q, q, ls.masks.causal(), score_mod=lambda s, b, h, i, j: s + {}["missing"])
