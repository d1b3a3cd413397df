"""Calls go past PyTorch's dispatcher where nobody looks on, and through it where somebody does, with the same bits."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._torch import is_unobserved
from longspan.run import ops

OURS = {"longspan::attention", "longspan::attention_backward"}


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def both_ways(q, k, v, dout):
    out = ls.attention(q, k, v, ls.masks.causal(16))
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def inputs():
    return [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)], torch.randn(1, 2, 16, 8)


def test_modes_see_both_operators_and_change_no_bit():
    tensors, dout = inputs()
    assert ops.implementation_of(ops.attention, *tensors) is ops.run_forward
    assert ops.implementation_of(ops.attention_backward, *tensors) is ops.run_backward
    alone = both_ways(*tensors, dout)
    with Seen() as seen:
        assert ops.implementation_of(ops.attention, *tensors) is ops.attention
        watched = both_ways(*tensors, dout)
    assert seen.names >= OURS
    assert all(map(torch.equal, alone, watched))


def test_the_profiler_sees_both_operators():
    tensors, dout = inputs()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        both_ways(*tensors, dout)
    assert {event.key for event in profiler.key_averages()} >= OURS


def test_who_looks_on():
    plain = torch.randn(2, 2)
    assert is_unobserved((plain, None, torch.nn.Parameter(plain), plain.clone().requires_grad_()))
    with torch.inference_mode():
        assert is_unobserved((torch.randn(2),))
    with Seen():
        assert not is_unobserved((plain,))
    with torch.device("cpu"):  # a torch-function mode
        assert not is_unobserved((plain,))
    with profile(activities=[ProfilerActivity.CPU]):
        assert not is_unobserved((plain,))
    found = []
    torch.func.vmap(lambda x: found.append(is_unobserved((plain,))) or x)(plain)
    assert found == [False]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, device="meta"),
        lambda: torch.randn(2, dtype=torch.complex64).conj().imag,
        lambda: torch._efficientzerotensor((2,)),
        lambda: torch.randn(2, 2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.randn(2)], layout=torch.jagged),
    ],
    ids=["meta", "negative", "zero", "sparse", "nested"],
)
def test_tensors_with_a_behaviour_of_their_own(make):
    assert not is_unobserved((torch.randn(2), make()))


def test_a_negative_view_means_what_it_says():
    (_, k, v), dout = inputs()
    q = torch.randn(1, 2, 16, 8, dtype=torch.complex64).conj().imag.detach().requires_grad_()
    assert q.is_neg()
    plain = q.detach().resolve_neg().clone().requires_grad_()
    assert all(map(torch.equal, both_ways(q, k, v, dout), both_ways(plain, k, v, dout)))
