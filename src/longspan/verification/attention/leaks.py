"""The leak probe: tokens change that some rows cannot see, and nothing of these rows may change.

It needs no reference, so it also finds what the reference has wrong, too, and pairs too light to show in a norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.verification.reference import Inputs

LOUD = 16.0
"""By how much changed tokens are larger than the others: even a faint look at them shows."""


@dataclass(frozen=True, eq=False)
class Probe:
    """Which token changes, and which rows (B, H or kv heads, S) it must leave alone."""

    position: int
    still: dict[str, Tensor]


def make_probes(seen: Tensor, kv_heads: int, count: int, draw: torch.Generator) -> list[Probe]:
    """Probes of tokens that most rows after them, before them, and anywhere must not see."""
    size = seen.shape[2]
    if not size or not count:
        return []
    at = torch.arange(size)
    hidden = (~seen).sum((0, 1))  # (S, S): how many planes hide the pair
    after = torch.where(at[:, None] > at, hidden, 0).sum(0)
    before = torch.where(at[:, None] < at, hidden, 0).sum(0)
    chosen = [int(counts.argmax()) for counts in (after, before) if counts.any()]
    weights = (after + before).double()
    while len(chosen) < count and weights.any():
        chosen.append(int(torch.multinomial(weights, 1, generator=draw)))
        weights[chosen[-1]] = 0
    return [_probe(seen, kv_heads, position) for position in dict.fromkeys(chosen[:count])]


def _probe(seen: Tensor, kv_heads: int, position: int) -> Probe:
    """A row moves if it is the token or sees it; a key's gradient moves if any row that sees the key does."""
    moves = seen[..., position].clone()
    moves[..., position] = True
    keys = (seen & moves[..., None]).any(2)
    keys = keys.unflatten(1, (kv_heads, -1)).any(2)
    keys[..., position] = True
    return Probe(position, {"out": ~moves, "dq": ~moves, "dk": ~keys, "dv": ~keys})


def changed(tensors: Inputs, position: int, draw: torch.Generator) -> Inputs:
    """Whole q, k, v and dout with one token made loud: its q and k only a little, so that nothing overflows."""
    loud: list[Tensor] = []
    for tensor, size in zip(tensors, (2.0, 2.0, LOUD, LOUD), strict=True):
        tensor = tensor.clone()
        row = tensor[:, :, position]
        noise = torch.randn(row.shape, generator=draw, dtype=torch.float64).to(row.device)
        tensor[:, :, position] = (size * noise).to(row.dtype)
        loud.append(tensor)
    q, k, v, dout = loud
    return q, k, v, dout


def moved(probe: Probe, name: str, before: Tensor, after: Tensor, rows: Tensor) -> tuple[Tensor, float, float]:
    """Positions that moved though the token is hidden from them, the largest change, and the budget there.

    Right code does not change a bit; other tile orders may round differently, so half a row's budget is left.
    """
    still = probe.still[name].to(before.device)
    difference = torch.where(before == after, torch.zeros_like(before), before - after).double()
    norms = (difference.square().sum(-1) * still).nan_to_num(torch.inf, posinf=torch.inf).sum((0, 1)).sqrt()
    budget = rows.to(norms.device) / 2
    wrong = (norms > budget).nonzero().flatten()
    if not len(wrong):
        return wrong, 0.0, 0.0
    worst = int((norms / budget).argmax())
    order = torch.cat((torch.tensor([worst], device=wrong.device), wrong[wrong != worst]))
    return order.cpu(), float(norms[worst]), float(budget[worst])
