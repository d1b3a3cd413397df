"""Masks as FlexAttention mask functions. Torch is imported when asked for, never with the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.functions.predicate import Function, MaskMod
from longspan.masks.plane import Both, Either, Neither, Plane
from longspan.span import Ints

if TYPE_CHECKING:
    import torch

PlaneMod = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def to_mask_mod(grid: Sequence[Sequence[Plane]], planes: Sequence[Plane], seq_len: int) -> MaskMod:
    """A function (b, h, q_idx, kv_idx) that only indexes and compares tensors, so it traces, vmaps and compiles.

    `grid` has a plane for every batch row and head that differ, `planes` each of them once.
    """
    import torch

    mods = [_plane_mod(plane, seq_len) for plane in planes]
    if len(mods) == 1:
        return mods[0]
    number = {id(plane): i for i, plane in enumerate(planes)}
    table = torch.tensor([[number[id(plane)] for plane in row] for row in grid])
    many_rows, many_heads = len(grid) > 1, len(grid[0]) > 1

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        which = table.to(q_idx.device)[b if many_rows else 0, h if many_heads else 0]
        found = (which == 0) & mods[0](b, h, q_idx, kv_idx)
        for i, mod in enumerate(mods[1:], start=1):
            found = found | ((which == i) & mod(b, h, q_idx, kv_idx))
        return found

    return mask_mod


def _plane_mod(plane: Plane, seq_len: int) -> PlaneMod:
    sure = _bands_mod(plane.sure, seq_len)
    if plane.predicate is None:
        return sure
    maybe, decide = _bands_mod(plane.maybe, seq_len), _predicate_mod(plane.predicate, seq_len)
    return lambda b, h, q, kv: sure(b, h, q, kv) | (maybe(b, h, q, kv) & decide(b, h, q, kv))


def _predicate_mod(predicate: object, seq_len: int) -> PlaneMod:
    if isinstance(predicate, Function):
        return _function_mod(predicate)
    if isinstance(predicate, Neither):
        inner = _plane_mod(predicate.a, seq_len)
        return lambda b, h, q, kv: ~inner(b, h, q, kv)
    if isinstance(predicate, Both | Either):
        a, other = _plane_mod(predicate.a, seq_len), _plane_mod(predicate.b, seq_len)
        if isinstance(predicate, Both):
            return lambda b, h, q, kv: a(b, h, q, kv) & other(b, h, q, kv)
        return lambda b, h, q, kv: a(b, h, q, kv) | other(b, h, q, kv)
    raise MaskError(
        f"a predicate of type {type(predicate).__name__} has no mask_mod. Give it one in masks/mask_mods.py."
    )


def _function_mod(predicate: Function) -> PlaneMod:
    """The function with the batch row and head of its plane, which need not be where the plane is used."""
    row, head = predicate.row, predicate.head

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        b = b if row is None else q_idx.new_full((), row)
        return predicate.call(b, h if head is None else q_idx.new_full((), head), q_idx, kv_idx)

    return mask_mod


def _bands_mod(rows: Ints, seq_len: int) -> PlaneMod:
    """Looks up the query's slab, then compares against the few bands that cross it."""
    import torch

    rows = bd.cut(rows, (0, seq_len), (0, seq_len))
    if not len(rows):
        return lambda _b, _h, q, kv: (q < 0) & (kv < 0)
    slabs = bd.slabs_of(rows)
    band, first, count = bd.by_slab(rows, slabs)
    depth = int(count.max())
    # Unused places hold an empty key span, so that they allow nothing.
    bounds = np.zeros((depth, len(slabs) + 1, 4), dtype=np.int64)
    for k in range(depth):
        at = np.flatnonzero(count > k)
        bounds[k, at] = rows[band[first[at] + k]][:, [bd.K0, bd.K1, bd.LO, bd.HI]]
    slab_of = np.full(seq_len, len(slabs), dtype=np.int64)
    for i, (start, stop) in enumerate(slabs.tolist()):
        if count[i]:
            slab_of[start:stop] = i
    lookup, table = torch.as_tensor(slab_of), torch.as_tensor(bounds)

    def mask_mod(_b: Any, _h: Any, q_idx: Any, kv_idx: Any) -> Any:
        slab = lookup.to(q_idx.device)[q_idx]
        found = q_idx < 0
        for k in range(depth):
            k0, k1, lo, hi = table.to(q_idx.device)[k, slab].unbind(-1)
            difference = q_idx - kv_idx
            found = found | ((kv_idx >= k0) & (kv_idx < k1) & (difference >= lo) & (difference <= hi))
        return found

    return mask_mod
