"""Recurrences refuse what makes no sense, and say what was asked, what was found and what to do."""

import pytest
import torch

import longspan as ls
from longspan.errors import KernelError, PlanError

B, T, J, H, K, V = 1, 8, 1, 2, 4, 3
ONE = ls.layouts.contiguous(T, 1)
PLAN = ls.scan_plan(None, ONE, heads=H, keys=K, values=V, maps="matrix")
OVER_TWO = ls.scan_plan(None, ls.layouts.contiguous(T, 2), heads=H, keys=K, values=V, maps="matrix")
ATTENTION = ls.plan(ls.masks.causal(T), ONE, q_heads=2, kv_heads=2, head_dim=4, dtype="float32")


def randn(*shape):
    return torch.randn(B, T, *shape)


def delta(change=None, **options):
    given = {
        "q": randn(J, K),
        "k": randn(J, K),
        "v": randn(H, V),
        "g": -torch.rand(B, T, H),
        "beta": torch.rand(B, T, H),
    }
    given = {name: (change or {}).get(name, lambda x: x)(x) for name, x in given.items()}
    return ls.gated_delta_rule(**given, **options)


def every(change):
    return dict.fromkeys(("q", "k", "v", "g", "beta"), change)


def linear(decay):
    return ls.linear_attention(randn(J, K), randn(J, K), randn(H, V), decay)


def ssd(A=True, **options):
    return ls.ssd(randn(H, V), torch.rand(B, T, H), -torch.rand(H) if A else None, randn(J, K), randn(J, K), **options)


def own(tokens=None, **options):
    given = {"local": lambda x, s: (x, s), "summary": lambda x: (torch.ones(1, 1, 1), torch.zeros(1, 1, 1))}
    given |= {"state": (1, 1, 1), "maps": "scalar"} | options
    return ls.scan([randn(1)] if tokens is None else tokens, **given)


REFUSED = {
    "q is a list": (lambda: delta({"q": torch.Tensor.tolist}), PlanError, "q .*must be a torch.Tensor"),
    "whole numbers": (lambda: delta({"q": torch.Tensor.int}), PlanError, "q must be .* but got torch.int32"),
    "a dim too few": (lambda: delta({"k": lambda x: x[0]}), PlanError, "k must be .*but has shape"),
    "other tokens": (lambda: delta({"k": lambda x: x[:, :3]}), PlanError, "has 3 tokens, but the arguments before it"),
    "other heads": (lambda: delta({"g": lambda x: x[..., :1]}), PlanError, "has 1 heads, but the arguments before"),
    "heads that do not fit": (
        lambda: delta({n: lambda x: x.expand(-1, -1, 3, -1) for n in "qk"}), PlanError,
        "heads must be a multiple of key heads",
    ),
    "scale": (lambda: delta(scale="x"), PlanError, "scale must be one finite number or None, but got 'x'"),
    "scale that learns": (
        lambda: delta(scale=torch.tensor(0.5, requires_grad=True)), PlanError, "scale must not require a gradient"
    ),
    "scale nan": (lambda: delta(scale=float("nan")), PlanError, "one finite number or None"),
    "l2norm": (lambda: delta(l2norm="no"), PlanError, "l2norm must be a bool, but got 'no'"),
    "documents": (lambda: delta(documents=[3, 3]), PlanError, "add up to 6, but the sequence has 8 tokens"),
    "documents of rows": (lambda: delta(documents=[[8], [8]]), PlanError, "got 2 lists for 1 batch rows"),
    "kernel": (lambda: delta(kernel="flash"), KernelError, "kernel must be one of"),
    "own kernel": (lambda: delta(kernel="own"), KernelError, "it runs functions of ls.scan only"),
    "name": (lambda: delta(name=3), PlanError, "name must be a str"),
    "a plan of attention": (lambda: delta(plan=ATTENTION), PlanError, "longspan.scan_plan, but got Plan"),
    "no group": (lambda: delta(plan=OVER_TWO), PlanError, "for 2 ranks, but group is None"),
    "plan and documents": (lambda: delta(plan=PLAN, documents=[8]), PlanError, "documents must be None with a plan"),
    "group without plan": (lambda: delta(group="world"), PlanError, "group"),
    "plan of other values": (
        lambda: delta({"v": lambda x: x[..., :1]}, plan=PLAN), PlanError,
        "for states of 2 heads x 4 keys x 3 values in float32, maps='matrix' and batch=1,"
        " but these tensors need states of 2 heads x 4 keys x 1 values",
    ),
    "plan of another dtype": (lambda: delta(every(torch.Tensor.double), plan=PLAN), PlanError, "dtype='float64'"),
    "plan of other tokens": (
        lambda: delta(every(lambda x: x[:, :5]), plan=PLAN), PlanError,
        "5 tokens on rank 0, but the plan's layout has 8 slots",
    ),
    "plan of another batch": (
        lambda: delta(every(lambda x: x.repeat(2, *[1] * (x.ndim - 1))), plan=PLAN), PlanError,
        "batch=2",
    ),
    "decay": (lambda: linear(torch.zeros(3)), PlanError, "has 3 heads, but the arguments before it have 2"),
    "decay as a number": (lambda: linear(-0.5), PlanError, "decay .*must be a torch.Tensor"),
    "no A": (lambda: ssd(A=False), PlanError, "A of ssd must be a torch.Tensor"),
    "D": (lambda: ssd(D=torch.zeros(5)), PlanError, "D of shape .* has 5 heads"),
    "one limit": (lambda: ssd(dt_limit=(0.5,)), PlanError, "dt_limit must be two numbers"),
    "limits turned round": (lambda: ssd(dt_limit=(0.5, 0.1)), PlanError, "dt_limit must be two numbers"),
    "limits that are none": (lambda: ssd(dt_limit="ab"), PlanError, "dt_limit must be"),
    "softplus": (lambda: ssd(dt_softplus=1), PlanError, "dt_softplus must be a bool"),
    "channels": (
        lambda: ls.linear_recurrence(randn(3), randn(4)), PlanError,
        "has 4 channels, but the arguments before it have 3",
    ),
    "no channels": (
        lambda: ls.linear_recurrence(torch.zeros(1, 4), torch.zeros(1, 4)), PlanError,
        r"a must be \(batch, tokens, channels\)",
    ),
    "a tensor for a list": (lambda: own(randn(1)), PlanError, "scan takes a list of tensors"),
    "no function": (lambda: own(local=None), PlanError, "two functions"),
    "maps": (lambda: own(maps="x"), PlanError, "maps='x'"),
    "state": (lambda: own(state=(1, 1)), PlanError, "three numbers"),
    "parameters as a tensor": (lambda: own(parameters=torch.zeros(3)), PlanError, "parameters must be a list"),
    "parameters": (lambda: own(parameters=[3]), PlanError, "parameters must be a list"),
    "output too short": (lambda: own(local=lambda x, s: (x[:2], s)), KernelError, "one row for each token"),
    "no state": (
        lambda: own(local=lambda x, s: x), KernelError,
        "must return output and state, but got Tensor",
    ),
    "another state": (lambda: own(local=lambda x, s: (x, s[0])), KernelError, "must return a state of shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


def test_what_is_right_beside_it_is_computed():
    for options in ({}, {"plan": PLAN}, {"documents": [3, 5]}, {"documents": [[3, 5]]}, {"kernel": "reference"}):
        assert delta(**options).shape == (B, T, H, V)
    assert linear(None).shape == linear(torch.zeros(H)).shape == linear(torch.zeros(B, T, H, K)).shape == (B, T, H, V)
    assert ssd(dt_limit=[0, float("inf")], D=torch.zeros(H, V)).shape == (B, T, H, V)
    assert (
        own(parameters=(torch.zeros(1),)).shape == own(parameters=torch.nn.Linear(1, 1).parameters()).shape == (B, T, 1)
    )
    assert delta(every(lambda x: x[:, :0])).shape == (B, 0, H, V)
    assert delta(every(lambda x: x[:0])).shape == (0, T, H, V)
