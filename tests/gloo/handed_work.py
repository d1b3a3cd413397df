"""What ranks do in tests/gloo/test_handed.py; importable by name, as worker processes need it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import longspan as ls
from longspan.training import check_same

MASK = ls.masks.causal()


def _plan(layout):
    return ls.plan(MASK, layout, q_heads=4, kv_heads=2, head_dim=8, dtype="float64")


def _tensors(tokens):
    torch.manual_seed(tokens)
    return [torch.randn(1, heads, tokens, 8, dtype=torch.float64) for heads in (4, 2, 2)]


def dtensors(lengths):
    """For DTensors of each length: errors of output and gradients with a layout that cuts as they do."""
    world = dist.get_world_size()
    mesh, found = init_device_mesh("cpu", (world,)), {}
    for tokens in lengths:
        whole = [t.requires_grad_() for t in _tensors(tokens)]
        out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        weights = torch.randn_like(out)
        expected = [out, *torch.autograd.grad(out, whole, weights)]
        placed = [distribute_tensor(t.detach(), mesh, [Shard(2)]).requires_grad_() for t in whole]
        made = ls.attention(*placed, _plan(ls.layouts.like_dtensor(tokens, world)))
        grads = torch.autograd.grad(made, placed, distribute_tensor(weights, mesh, [Shard(2)]))
        found[tokens] = max(
            (a.full_tensor() - b).abs().max().item() for a, b in zip((made, *grads), expected, strict=True)
        )
    return found


def _message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def messages():
    """Messages of calls with groups and tensors that are almost right."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh, plan = init_device_mesh("cpu", (world,)), _plan(ls.layouts.contiguous(7, world))
    alone = dist.new_group([0])
    even = _plan(ls.layouts.contiguous(8, world))
    plain = [even.layout.shard(t, rank, 2) for t in _tensors(8)]
    heads = distribute_tensor(torch.randn(4, dtype=torch.float64), mesh, [Replicate()])
    odd = [distribute_tensor(t, mesh, [Shard(2)]) for t in _tensors(7)]
    learned = heads.detach().requires_grad_()
    tries = {
        "odd": lambda: ls.attention(*odd, plan),
        "sinks": lambda: ls.attention(*plain, even, group=mesh, sinks=heads),
        "alibi": lambda: ls.attention(*plain, even, group=mesh, alibi=heads),
        "captured": lambda: ls.attention(*plain, even, group=mesh, score_mod=lambda s, b, h, i, j: s + learned.sum()),
        "sparse": lambda: check_same({"a": torch.eye(2).to_sparse(), "b": torch.ones(2)}, dist.group.WORLD),
        "dtensor": lambda: check_same({"a": heads}, dist.group.WORLD),
    }
    if rank == 1:
        tries["stranger"] = lambda: ls.attention(*plain, even, group=alone)
        tries["stranger's batch"] = lambda: check_same({"a": 1}, alone)
        tries["number"] = lambda: ls.attention(*plain, even, group=3)
    found = {name: _message(function) for name, function in tries.items()}
    found["members"] = "" if rank else _message(lambda: check_same({"a": 1}, alone))
    found["dense"] = _message(lambda: check_same({"a": torch.eye(2)}, dist.group.WORLD))
    return found
