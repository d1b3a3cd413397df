"""Random problems for kernels of recurrences, and how far a kernel is from the recurrence token by token."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import normalize

from longspan.mixers.scan_reference import GatedDelta, LinearAttention, LinearRecurrence, ScanWork, Segments, Ssd
from tests.scan_oracle import maps_by_tokens, recurrence_by_tokens

KINDS = ("gated_delta", "kda", "linear_attention", "gla", "ssd", "linear_recurrence")


def random_segments(rng, batch, slots, most=9):
    """Up to so many stretches of the rows, some slots between them in none, in any order."""
    rows = []
    for _ in range(rng.randint(1, most)):
        row, (first, end) = rng.randrange(batch), sorted(rng.choices(range(slots + 1), k=2))
        if first < end and not any(r == row and first < e and f < end for r, f, e in rows):
            rows.append((row, first, end))
    if not rows or rng.random() < 0.3:  # all slots of a row, in one
        row = rng.randrange(batch)
        rows = [(row, 0, slots), *(r for r in rows if r[0] != row)]
    rng.shuffle(rows)
    return Segments(np.array(rows, dtype=np.int64).reshape(-1, 3))


def random_work(kind, rng, segments=None, dtype=torch.float64, slots=None, batch=None, sizes=None, strength=None):
    """A problem of that kind with random sizes: few key heads, odd features, strong and weak decays."""
    batch, slots = batch or rng.choice((1, 1, 2, 3)), slots or rng.choice((1, 2, 7, 33, 64, 65, 150))
    j, r, k, v = sizes or (rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice((1, 3, 8)), rng.choice((1, 4, 7)))
    h, strength = j * r, strength or rng.choice((0.01, 0.3, 3.0))
    randn = lambda *shape: torch.randn(batch, slots, *shape, dtype=torch.float64)  # noqa: E731
    rand = lambda *shape: torch.rand(batch, slots, *shape, dtype=torch.float64)  # noqa: E731
    shared = ()
    if kind in ("gated_delta", "kda"):
        l2norm = rng.random() < 0.5
        q, key = randn(j, k), randn(j, k)
        key = key if l2norm else normalize(key, dim=-1) * rng.choice((0.5, 1.0))
        recurrence = GatedDelta(scale=rng.choice((1.0, 0.3)), l2norm=l2norm)
        g = -strength * (rand(h, k) if kind == "kda" else rand(h))
        tokens = q, key, randn(h, v), g, rand(h)
    elif kind in ("linear_attention", "gla"):
        recurrence = LinearAttention(scale=rng.choice((1.0, 0.3)))
        tokens = randn(j, k), randn(j, k), randn(h, v), -strength * (rand(h, k) if kind == "gla" else rand(h))
    elif kind == "ssd":
        softplus = rng.random() < 0.7
        recurrence = Ssd(softplus=softplus, limits=rng.choice(((0.0, float("inf")), (0.05, 0.6))))
        tokens = randn(h, v), randn(h) if softplus else rand(h), randn(j, k), randn(j, k)
        d = rng.choice((None, torch.randn(h).double(), torch.randn(h, v).double()))
        bias = rng.choice((None, torch.randn(h).double() - 1))
        shared = -strength * torch.rand(h).double(), d, bias
    else:
        recurrence, decays = LinearRecurrence(), 2 * rand(k * v) - 1
        tokens = torch.where(rand(k * v) < 0.1, 0.0, decays), randn(k * v)
    segments = random_segments(rng, batch, slots) if segments is None else segments
    tokens = tuple(x.to(dtype) for x in tokens)
    return ScanWork(recurrence, tokens, tuple(None if x is None else x.to(dtype) for x in shared), segments)


def random_states(work):
    shape = work.recurrence.state_shape(work.tokens)
    return torch.randn(len(work.segments), *shape, dtype=torch.float64).to(work.recurrence.state_dtype(work.tokens))


def widened(work):
    """The same problem in float64."""
    tokens, shared = (tuple(None if x is None else x.double() for x in y) for y in (work.tokens, work.shared))
    return ScanWork(work.recurrence, tokens, shared, work.segments)


def with_leaves(work, states):
    """The same problem with tensors that want gradients, and these tensors."""
    tokens = tuple(x.detach().clone().requires_grad_() for x in work.tokens)
    shared = tuple(None if x is None else x.detach().clone().requires_grad_() for x in work.shared)
    states = states.detach().clone().requires_grad_()
    made = ScanWork(work.recurrence, tokens, shared, work.segments)
    return made, states, [*tokens, *(x for x in shared if x is not None), states]


def results(run, work, states, upstream):
    """Output, leaving states and every gradient of `run(work, states)`, in float64."""
    work, states, leaves = with_leaves(work, states)
    found = run(work, states)
    upstream = [g.to(x.dtype) for g, x in zip(upstream, found, strict=True)]
    gradients = torch.autograd.grad(found, leaves, upstream, materialize_grads=True)
    return [x.detach().double() for x in (*found, *gradients)]


def distance(found, expected):
    """The largest difference, relative to the largest expected number (or 1, whichever is more)."""
    if found.shape != expected.shape:
        return float("inf")
    gap = (found - expected).abs().max() if found.numel() else torch.zeros(())
    scale = expected.abs().max() if found.numel() else gap
    return float(torch.nan_to_num(gap / scale.clamp(min=1.0), nan=torch.inf))


def errors(kernel, work, states):
    """Distances by name: out, leaving states, gradients, and both forms of the map."""
    upstream = torch.randn_like(like_output(work)), torch.randn_like(states)
    expected = results(recurrence_by_tokens, work, states, upstream)
    found = {}
    for at, (mine, other) in enumerate(zip(results(kernel.local, work, states, upstream), expected, strict=True)):
        part = ("out", "states")[at] if at < 2 else f"gradient {at - 2}"
        found[f"local: {part}"] = distance(mine, other)
    (m, u), (m0, u0) = kernel.summary(work), maps_by_tokens(work)
    found |= {"M": distance(m.double(), m0), "U": distance(u.double(), u0)}
    wide = m.double(), u.double(), states.double()
    left = wide[0] @ wide[2] + wide[1] if work.recurrence.is_dense else wide[0] * wide[2] + wide[1]
    found["M S + U"] = distance(left, expected[1])
    return found


def like_output(work):
    return work.tokens[{"ssd": 0, "linear_recurrence": 1}.get(work.recurrence.name, 2)].double()
