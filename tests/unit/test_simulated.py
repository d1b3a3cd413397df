"""Ranks in threads of one process: they meet, share a graph, and do not hang."""

import threading

import numpy as np
import pytest
import torch

from longspan import attention, causal_conv1d, conv_plan, layouts, masks, plan
from longspan.recurrences import gated_delta_rule, scan_plan
from longspan.run.simulated import ApartError, simulate
from longspan.training import token_loss
from tests.score_cases import any_layout

pytestmark = pytest.mark.timeout(60)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("seed", range(4))
def test_operators_of_simulated_ranks_are_those_of_one_device(seed):
    lengths = [[37], [11, 26], [1, 35, 1], [9, 9, 19]][seed]
    mask = masks.documents(lengths) & masks.causal()
    layout = any_layout(np.random.default_rng(seed), mask, 37, 2 + seed % 3)
    made = plan(mask, layout, q_heads=4, kv_heads=2, head_dim=8, dtype="float64", batch=2)
    convolved = conv_plan(lengths, layout, channels=5, width=4, dtype="float64", batch=2)
    scanned = scan_plan(lengths, layout, heads=2, keys=4, values=4, maps="matrix", dtype="float64", batch=2)
    q, k, v = drawn(2, 4, 37, 8, seed=1), drawn(2, 2, 37, 8, seed=2), drawn(2, 2, 37, 8, seed=3)
    x, weight = drawn(2, 37, 5, seed=4), drawn(5, 4, seed=5)
    tokens = [drawn(2, 37, 2, 4, seed=6 + n) for n in range(3)] + [drawn(2, 37, 2, seed=9 + n) for n in range(2)]
    leaves = [q, k, v, x, weight, *tokens]

    def total(attend, convolve, scan):
        outs = attend(q, k, v), convolve(x), scan(tokens)
        return sum((out * torch.randn(out.shape, generator=torch.Generator().manual_seed(7))).sum() for out in outs)

    def delta(parts, **where):
        g, beta = -parts[3].abs(), parts[4].sigmoid()
        return gated_delta_rule(*parts[:3], g, beta, l2norm=True, **where)

    def over(function, dim):
        return lambda *whole: layout.unshard(simulate(layout.world_size, lambda rank: function(rank, *whole)), dim)

    def part(rank, tensors, dim):
        return [layout.shard(t, rank.rank(), dim) for t in tensors]

    found = total(
        over(lambda rank, *qkv: attention(*part(rank, qkv, 2), made, group=rank), 2),
        over(lambda rank, x: causal_conv1d(*part(rank, [x], 1), weight, plan=convolved, group=rank), 1),
        over(lambda rank, ts: delta(part(rank, ts, 1), plan=scanned, group=rank), 1),
    )
    right = total(
        lambda *qkv: attention(*qkv, mask),
        lambda x: causal_conv1d(x, weight, documents=lengths),
        lambda ts: delta(ts, documents=lengths),
    )
    assert (found - right).detach().abs() <= 1e-12 * right.detach().abs()
    for mine, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(right, leaves), strict=True):
        assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def test_losses_meet_too():
    logits, labels = drawn(1, 10, 6, seed=1), torch.arange(10)[None] % 6
    layout = layouts.zigzag(10, 2)

    def work(rank):
        mine = layout.shard(logits, rank.rank(), 1)
        return token_loss(mine, layout.shard(labels, rank.rank(), 1, -100), group=rank, gradients="sum")

    right = token_loss(logits, labels, group=None, gradients="sum")
    found = simulate(2, work)
    assert all((loss - right).detach().abs() <= 1e-14 for loss in found)
    grads = torch.autograd.grad(found[0] + found[1], logits)[0]
    assert (grads - torch.autograd.grad(right, logits)[0]).abs().max() <= 1e-15


def test_ranks_that_do_not_do_the_same_are_told_so():
    with pytest.raises(ApartError, match=r"rank 1 .*sum.*rank 0"):
        simulate(2, lambda rank: rank.summed(1) if rank.rank() else None)
    with pytest.raises(ApartError, match=r"rank 0 .*sum.*rank 1 .*tea"):
        simulate(2, lambda rank: rank.meet("tea", 1, list) if rank.rank() else rank.summed(1))
    with pytest.raises(ZeroDivisionError):
        simulate(3, lambda rank: 1 / 0 if rank.rank() == 1 else rank.summed(1))
    with pytest.raises(ZeroDivisionError):  # where they meet
        simulate(3, lambda rank: rank.meet("division", 0, lambda parts: [1 / parts[0]] * 3))


def test_one_runs_at_a_time_and_none_is_left():
    running, most, before = [], [], threading.active_count()

    def work(rank):
        for _ in range(20):
            running.append(rank)
            most.append(len(running))
            running.pop()
            rank.summed(1)

    simulate(4, work)
    assert max(most) == 1
    assert threading.active_count() == before
