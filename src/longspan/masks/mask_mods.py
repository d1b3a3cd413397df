"""Masks as FlexAttention mask functions. Torch is imported on first use, not with the package.

With any bands, one query row sees a few spans of keys, so tables of spans by row define the function. It only indexes
and compares tensors, so it can be traced, vmapped and compiled. Everything that changes with a batch is in tensors, so
new batches do not cause recompilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.functions import Function, MaskMod
from longspan.masks.plane import Bools, Combined, Plane, Predicate
from longspan.masks.tiles import key_spans, most_spans, span_table
from longspan.spans import Ints

if TYPE_CHECKING:
    from torch import Tensor

    Tables = tuple[tuple[Tensor, Tensor], ...]
    """For k = 0, 1, ...: where the k-th span of keys starts and stops, by plane and row; for one plane only by row."""

    Decide = Callable[[Tensor | None, Tensor, Tensor, Tensor, Tensor], Tensor]
    """(number of the plane or None for the only one, b, h, query row, position of the key) -> may attend."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What row and key numbers mean: positions in the whole sequence, on any device, or rows of one rank."""

    seq_len: int
    rows: Ints | None = None
    """The positions of a rank's query rows, -1 for padding."""
    columns: Ints | None = None
    """The positions of its keys, -1 for padding; None: all keys in order."""
    device: Any = "cpu"
    least: int = 1
    """The least number of planes in tables, so that batch rows that happen to agree do not change their shape."""

    def tensor(self, array: ArrayLike) -> Tensor:
        import torch

        return torch.tensor(array, device=self.device)  # a copy: tensors that share memory look different to compilers

    def room(self, count: int, least: int = 1) -> int:
        """Return a table size; a rank's are powers of two, because new shapes mean compiling."""
        return count if self.rows is None else 1 << (max(count, least) - 1).bit_length()

    def is_for_one(self, num_planes: int) -> bool:
        """Return whether planes need no numbers. A rank's always have them: the next batch may have more planes."""
        return self.rows is None and num_planes == 1


@dataclass(frozen=True, slots=True)
class _Member:
    """A plane, and the only batch row and head that use it (None: several do)."""

    plane: Plane
    row: int | None = None
    head: int | None = None


_NOTHING = _Member(Plane(bd.empty()))


def number_planes(grid: Sequence[Sequence[Plane]]) -> tuple[tuple[Plane, ...], Ints]:
    """Return every plane of a grid once, and the number of the plane of each batch row and head."""
    planes = {id(plane): plane for line in grid for plane in line}
    number = {name: i for i, name in enumerate(planes)}
    return tuple(planes.values()), np.array([[number[id(plane)] for plane in line] for line in grid])


def to_mask_mod(grid: Sequence[Sequence[Plane]], place: Place) -> MaskMod:
    """Return the function (b, h, query row, column) of a grid with a plane for every batch row and head."""
    planes, which = number_planes(grid)
    members = [_Member(plane, *_only(which == i)) for i, plane in enumerate(planes)]
    decide, numbers = _decider(members, place), place.tensor(which.squeeze())
    many_rows, many_heads = len(which) > 1, len(which[0]) > 1
    positions = None if place.columns is None else place.tensor(place.columns)
    alone = place.is_for_one(len(planes))

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        key = kv_idx if positions is None else positions[kv_idx]
        at = (*((b,) if many_rows else ()), *((h,) if many_heads else ()))  # a side of 1 serves all
        plane = _on_device_of(numbers, q_idx)[at] if at else _on_device_of(numbers, q_idx)
        return decide(None if alone else plane, b, h, q_idx, key)

    return mask_mod


def predicate_mod(predicate: Predicate, seq_len: int) -> Decide:
    """Return a predicate of the whole sequence as a function of (None, b, h, q_idx, kv_idx)."""
    anywhere = np.zeros((1, 6), dtype=np.int64)  # the bands are not used
    return _predicate_mod([_Member(Plane(bd.empty(), anywhere, predicate))], Place(seq_len))


def _on_device_of(table: Tensor, q: Tensor) -> Tensor:
    """Return the table on the device of `q`, without an operation that compilers would see if it is there."""
    return table if table.device == q.device else table.to(q.device)


def _only(used: Bools) -> tuple[int | None, int | None]:
    """Return the only batch row and the only head that are used, each None if the grid has one or uses several."""
    lines = np.flatnonzero(used.any(axis=1)), np.flatnonzero(used.any(axis=0))
    row, head = (
        int(line[0]) if size > 1 and len(line) == 1 else None for line, size in zip(lines, used.shape, strict=True)
    )
    return row, head


def _decider(members: Sequence[_Member], place: Place) -> Decide:
    """Return a function that decides for the i-th plane. Planes with the same function share one call of it."""
    sure = _tables([member.plane.sure for member in members], place)
    groups: dict[object, list[int]] = {}
    for i, member in enumerate(members):
        if member.plane.predicate is not None:
            groups.setdefault(_group_key(member), []).append(i)
    opaque: list[tuple[Tensor, Tables, Decide]] = []
    for group in groups.values():
        others = [_NOTHING] * (len(group) < len(members))  # number 0 stands for all planes outside the group
        users = [*others, *(members[i] for i in group)]
        slot = np.zeros(place.room(len(members), place.least), dtype=np.int64)
        slot[group] = np.arange(len(others), len(users))
        maybe = _tables([member.plane.maybe for member in users], place)
        opaque.append((place.tensor(slot), maybe, _predicate_mod(users, place)))

    def decide(plane: Tensor | None, b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        allowed = _in_spans(sure, plane, q, key)
        for slot, maybe, predicate in opaque:
            inner = None if plane is None else _on_device_of(slot, q)[plane]
            allowed = allowed | (_in_spans(maybe, inner, q, key) & predicate(inner, b, h, q, key))
        return allowed

    return decide


def _in_spans(tables: Tables, plane: Tensor | None, q: Tensor, key: Tensor) -> Tensor:
    at = q if plane is None else (plane, q)
    spans = [(key >= _on_device_of(start, q)[at]) & (key < _on_device_of(stop, q)[at]) for start, stop in tables]
    inside = spans[0] if spans else (q < 0) & (key < 0)  # nothing: rows are counted from 0
    for span in spans[1:]:
        inside = inside | span
    return inside


def _tables(bands: Sequence[Ints], place: Place) -> Tables:
    rows, whole = np.arange(place.seq_len) if place.rows is None else place.rows, (0, place.seq_len)
    spans = [key_spans(bd.cut(plane_bands, whole, whole), rows) for plane_bands in bands]
    depth = place.room(max(map(most_spans, spans)))
    dtype = np.int32 if place.seq_len < 1 << 31 else np.int64
    tables = np.zeros((depth, 2, place.room(len(bands), place.least), len(rows)), dtype=dtype)
    for i, plane_spans in enumerate(spans):
        tables[:, :, i] = span_table(plane_spans, depth, len(rows))
    if place.is_for_one(len(bands)):
        tables = tables[:, :, 0]
    return tuple((place.tensor(start), place.tensor(stop)) for start, stop in tables)


def _group_key(member: _Member) -> object:
    """Return a key that is equal for planes that one call decides: the operation, or the function and its b and h.

    A function gets the b and h of the kernel, unless its plane serves others than the row and head it is for.
    """
    predicate = member.plane.predicate
    if not isinstance(predicate, Function):
        return getattr(predicate, "sign", type(predicate))
    return id(predicate.mask_mod), *_fixed_indices(member, predicate)


def _fixed_indices(member: _Member, predicate: Function) -> tuple[int | None, int | None]:
    row = None if predicate.row == member.row else predicate.row
    return row, None if predicate.head == member.head else predicate.head


def _predicate_mod(members: Sequence[_Member], place: Place) -> Decide:
    """Return the function of planes with equal group keys; its result for number 0, no plane, is ignored."""
    predicate = members[-1].plane.predicate
    if isinstance(predicate, Function):
        return _function_mod(predicate.reader.call, *_fixed_indices(members[-1], predicate), place)
    if not isinstance(predicate, Combined):
        raise MaskError(
            f"a predicate of type {type(predicate).__name__} has no mask function. Give it one in masks/mask_mods.py."
        )

    def decider(side: str) -> Decide:
        inner = [m if m is _NOTHING else _Member(getattr(m.plane.predicate, side), m.row, m.head) for m in members]
        return _decider(inner, place)

    one = decider("a")
    if predicate.sign == "~":
        return lambda i, b, h, q, key: ~one(i, b, h, q, key)
    other = decider("b")
    if predicate.sign == "&":
        return lambda i, b, h, q, key: one(i, b, h, q, key) & other(i, b, h, q, key)
    return lambda i, b, h, q, key: one(i, b, h, q, key) | other(i, b, h, q, key)


def _function_mod(mask_mod: MaskMod, row: int | None, head: int | None, place: Place) -> Decide:
    # Padding gets position 0, so that no function reads outside its tensors; the result is not used.
    positions = None if place.rows is None else place.tensor(np.maximum(place.rows, 0))
    only_b, only_h = (None if fixed is None else place.tensor(fixed) for fixed in (row, head))
    padded = place.columns is not None

    def call(_: Tensor | None, b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        b, h = b if only_b is None else _on_device_of(only_b, q), h if only_h is None else _on_device_of(only_h, q)
        return mask_mod(b, h, q if positions is None else positions[q], key.clamp(min=0) if padded else key)

    return call
