"""Ranks with padding behind their tokens, in layouts of many short runs: rows that come home must not be taken for the
whole tensor. (They once were: `index_select(out=)` resized the target, and other heads' rows were overwritten.)"""

import pytest
import torch

import longspan as ls
from longspan.kernels import kernel_named
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Loopback
from longspan.run.walk import Job
from longspan.testing import dense_attention

LIMIT = 1e-12


@pytest.mark.share(2)
@pytest.mark.parametrize("scheme", ["all_to_all", "hybrid(2,ring)", "hybrid(2,exchange)", "exchange", "ring"])
def test_many_runs_and_padding(scheme):
    lengths, world, batch, heads = [23] * 8 + [19], 4, 2, 8
    layout = ls.layouts.per_document(lengths, world, equal_tokens=True)
    assert [layout.num_padding(rank) for rank in range(world)] == [0, 0, 0, 1]
    assert len(layout.spans(3)) > 8
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    plan = ls.plan(mask, layout, q_heads=heads, kv_heads=heads, head_dim=8, batch=batch, dtype="float64", scheme=scheme)
    draw = torch.Generator().manual_seed(5)
    *whole, dout = (torch.randn(batch, heads, sum(lengths), 8, dtype=torch.float64, generator=draw) for _ in range(4))
    parts = [[layout.shard(t, rank, 2) for t in (*whole, dout)] for rank in range(world)]
    jobs = [Job(plan, rank, kernel_named("reference"), 0.3, torch.float64) for rank in range(world)]
    forward = [Forward(job, q, k, v).program(saves=True) for job, (q, k, v, _) in zip(jobs, parts, strict=True)]
    results = Loopback().run(forward)
    backward = [
        Backward(job, Saved(q, k, v, out, lse, kept), from_above).program()
        for job, (q, k, v, from_above), (out, lse, kept) in zip(jobs, parts, results, strict=True)
    ]
    gradients = Loopback().run(backward)
    leaves = [t.requires_grad_() for t in whole]
    true, _ = dense_attention(*leaves, mask, 0.3)
    expected = [true, *torch.autograd.grad(true, leaves, dout)]
    for rank in range(world):
        tokens = int(layout.num_tokens[rank])
        for found, right in zip((results[rank][0], *gradients[rank]), expected, strict=True):
            assert (found[:, :, :tokens] - layout.shard(right.detach(), rank, 2)[:, :, :tokens]).abs().max() < LIMIT
            assert not found[:, :, tokens:].any()
