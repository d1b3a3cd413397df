"""Recurrences token by token, written as directly as possible; see `longspan.mixers.scan_reference`."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from longspan.mixers.scan_reference import GatedDelta, LinearAttention, LinearRecurrence, Recurrence, ScanWork, Ssd


def recurrence_by_tokens(work: ScanWork, states: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return output (batch, slots, ...) and final states, computed in that dtype, differentiable."""
    tokens = tuple(x.to(dtype) for x in work.tokens)
    shared = tuple(None if x is None else x.to(dtype) for x in work.shared)
    outs: dict[tuple[int, int], Tensor] = {}
    ends = []
    for (row, first, end), state in zip(work.segments.table.tolist(), states.to(dtype), strict=True):
        for slot in range(first, end):
            token = tuple(x[row, slot] for x in tokens)
            outs[row, slot], state = one_token(work.recurrence, token, shared, state)
        ends.append(state)
    batch, slots = tokens[0].shape[:2]
    zero = torch.zeros_like(_like_output(work.recurrence, tokens))
    rows = [torch.stack([outs.get((row, slot), zero) for slot in range(slots)]) for row in range(batch)]
    return torch.stack(rows), torch.stack(ends) if ends else states.to(dtype)


def maps_by_tokens(work: ScanWork) -> tuple[Tensor, Tensor]:
    """Return (M, U) measured on the recurrence: U is the final state for state 0, M's columns for unit ones."""
    heads, rows, columns = work.recurrence.state_shape(work.tokens)
    zero = torch.zeros(len(work.segments), heads, rows, columns, dtype=torch.float64)
    u = recurrence_by_tokens(work, zero)[1]
    m = torch.zeros(len(work.segments), heads, rows, rows, dtype=torch.float64)
    for at in range(rows):
        unit = zero.clone()
        unit[:, :, at] = 1.0
        m[..., at] = (recurrence_by_tokens(work, unit)[1] - u)[..., 0]
    if not work.recurrence.is_dense:
        m = m.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)[:, :, : work.recurrence.map_shape(work.tokens)[1]]
    return m, u


def one_token(
    recurrence: Recurrence, token: tuple[Tensor, ...], shared: tuple[Tensor | None, ...], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a token's output and the state after it, from the state (heads, K, V) before.

    >>> one, two = torch.ones(1, 1), torch.full((1, 1), 2.0)
    >>> token = one, one, 2 * two, torch.zeros(1), torch.full((1,), 0.5)
    >>> out, state = one_token(GatedDelta(scale=1.0, l2norm=False), token, (), two.view(1, 1, 1))
    >>> state.item()
    3.0
    """
    if isinstance(recurrence, LinearRecurrence):
        a, b = token
        state = a[None, :, None] * state + b[None, :, None]
        return state[0, :, 0], state
    if isinstance(recurrence, Ssd):
        x, dt, b, c = token
        a, d, bias = shared
        assert a is not None
        dt = dt if bias is None else dt + bias
        dt = (softplus(dt) if recurrence.softplus else dt).clamp(*recurrence.limits)
        b, c = (y.repeat_interleave(len(x) // len(y), 0) for y in (b, c))
        state = (a * dt).exp()[:, None, None] * state + dt[:, None, None] * b[:, :, None] * x[:, None, :]
        out = (c[:, :, None] * state).sum(1)
        return out if d is None else out + (d[:, None] if d.ndim == 1 else d) * x, state
    assert isinstance(recurrence, GatedDelta | LinearAttention)
    q, k, v, g, *beta = token
    if isinstance(recurrence, GatedDelta) and recurrence.l2norm:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(len(v) // len(y), 0) for y in (q, k))
    state = (g[:, None, None] if g.ndim == 1 else g[:, :, None]).exp() * state
    if beta:
        v = beta[0][:, None] * (v - (k[:, :, None] * state).sum(1))
    state = state + k[:, :, None] * v[:, None, :]
    return recurrence.scale * (q[:, :, None] * state).sum(1), state


def _like_output(recurrence: Recurrence, tokens: tuple[Tensor, ...]) -> Tensor:
    at = {"gated_delta": 2, "linear_attention": 2, "ssd": 0, "linear_recurrence": 1}[recurrence.name]
    return tokens[at].new_zeros(tokens[at].shape[2:])
