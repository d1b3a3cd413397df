"""For the table of refusals: attention with every score written out, and the same by all ranks of a plan."""

import torch

import longspan as ls
from longspan.scoring.biases import Extras
from longspan.testing import run_loopback

LIMIT = 1e-11
TOKENS = 23  # no number of ranks divides it


def inputs(tokens=TOKENS, q_heads=4, kv_heads=2, dim=8, v_dim=8, batch=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((q_heads, dim), (kv_heads, dim), (kv_heads, v_dim), (q_heads, v_dim))
    return [torch.randn(batch, h, tokens, d, generator=draw, dtype=torch.float64) for h, d in shapes]


def dense(tensors, seen, score=lambda s: s, sinks=None, keep=None):
    """Output from q, k, v; `seen` is a boolean (batch, head, query, key), rows that see nothing are zero."""
    q, k, v = tensors
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = score(q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : q.shape[2]]
    return (weights if keep is None else weights * keep) @ v


def expected(tensors, seen, *learned, **options):
    """Output, and gradients of q, k, v and what was learned."""
    *leaves, dout = tensors
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = dense(leaves, seen, **options)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *learned], dout)]


def dense_mask(mask, tokens=TOKENS, batch=2, heads=4):
    place = torch.arange(tokens).numpy()
    planes = [
        [mask.resized(tokens).allows(place[:, None], place, row=b, head=h) for h in range(heads)] for b in range(batch)
    ]
    return torch.stack([torch.stack([torch.as_tensor(plane) for plane in row]) for row in planes])


def by_ranks(tensors, mask, layout, scheme="exchange", sinks=None, **extras):
    """The same by all ranks of a plan: output, gradients; and the lse."""
    q, k, v, _ = tensors
    plan = ls.plan(
        mask, layout, q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3], v_head_dim=v.shape[3],
        batch=q.shape[0], dtype=q.dtype, scheme=scheme,
    )  # fmt: skip
    out, lse, *gradients = run_loopback(plan, *tensors, sinks=sinks, extras=Extras(**extras) if extras else None)
    return [out, *gradients], lse


def assert_same(found, right, limit=LIMIT):
    for number, (a, b) in enumerate(zip(found, right, strict=True)):
        assert a.isfinite().all(), f"tensor {number} is not finite"
        error = float((a - b).abs().max()) if a.numel() else 0.0
        assert error <= limit, f"tensor {number} is off by {error:.1e}"


def assert_exact(mask, layout, scheme="exchange", seed=0, **shape):
    tensors = inputs(layout.seq_len, seed=seed, **shape)
    seen = dense_mask(mask, layout.seq_len, heads=tensors[0].shape[1])
    assert_same(by_ranks(tensors, mask, layout, scheme)[0], expected(tensors, seen))
