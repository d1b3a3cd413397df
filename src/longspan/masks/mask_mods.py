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
from longspan.masks.plane import Bools, Both, Either, Neither, Plane, Predicate
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
    """What a function counts: the whole sequence, asked about on any device, or the rows of one rank."""

    seq_len: int
    rows: Ints | None = None
    """The positions of a rank's query rows, -1 for padding."""
    columns: Ints | None = None
    """The positions of its keys, -1 for padding; None: all keys in order."""
    device: Any = "cpu"
    least: int = 1
    """Room for at least this many planes: batch rows that happen to agree this time must not make tables of another
    shape."""

    def tensor(self, array: ArrayLike) -> Tensor:
        import torch

        return torch.tensor(array, device=self.device)  # a copy: tensors that share memory look different to compilers

    def room(self, count: int, least: int = 1) -> int:
        """Sizes of a rank's tables are powers of two, 1 or more: new shapes mean compiling."""
        return count if self.rows is None else 1 << (max(count, least) - 1).bit_length()

    def is_for_one(self, num_planes: int) -> bool:
        """Whether planes need no numbers. For a rank they always have them: the next batch may have more of them."""
        return self.rows is None and num_planes == 1


@dataclass(frozen=True, slots=True)
class _Member:
    """A plane, and the only batch row and head that use it (None: several do)."""

    plane: Plane
    row: int | None = None
    head: int | None = None


_NOTHING = _Member(Plane(bd.empty()))


def numbered(grid: Sequence[Sequence[Plane]]) -> tuple[tuple[Plane, ...], Ints]:
    """Every plane of a grid once, and the number of the plane that each batch row and head has."""
    planes = {id(plane): plane for line in grid for plane in line}
    number = {name: i for i, name in enumerate(planes)}
    return tuple(planes.values()), np.array([[number[id(plane)] for plane in line] for line in grid])


def to_mask_mod(grid: Sequence[Sequence[Plane]], place: Place) -> MaskMod:
    """The function (b, h, query row, column) of a grid with a plane for every batch row and head that differ."""
    planes, which = numbered(grid)
    members = [_Member(plane, *_only(which == i)) for i, plane in enumerate(planes)]
    decide, numbers = _decider(members, place), place.tensor(which.squeeze())
    many_rows, many_heads = len(which) > 1, len(which[0]) > 1
    positions = None if place.columns is None else place.tensor(place.columns)
    alone = place.is_for_one(len(planes))

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        key = kv_idx if positions is None else positions[kv_idx]
        at = (*((b,) if many_rows else ()), *((h,) if many_heads else ()))  # a side of 1 serves all: not looked at
        plane = _beside(numbers, q_idx)[at] if at else _beside(numbers, q_idx)
        return decide(None if alone else plane, b, h, q_idx, key)

    return mask_mod


def predicate_mod(predicate: Predicate, seq_len: int) -> Decide:
    """What a predicate says of the whole sequence, as a function of (None, b, h, q_idx, kv_idx)."""
    anywhere = np.zeros((1, 6), dtype=np.int64)  # where it is asked is not looked at
    return _predicate_mod([_Member(Plane(bd.empty(), anywhere, predicate))], Place(seq_len))


def _beside(table: Tensor, q: Tensor) -> Tensor:
    """The table on the device of the indices; where it is there already, nothing that compilers would see."""
    return table if table.device == q.device else table.to(q.device)


def _only(used: Bools) -> tuple[int | None, int | None]:
    """The one batch row and the one head of a grid that are used, where the grid has several of them."""
    lines = np.flatnonzero(used.any(axis=1)), np.flatnonzero(used.any(axis=0))
    row, head = (
        int(line[0]) if size > 1 and len(line) == 1 else None for line, size in zip(lines, used.shape, strict=True)
    )
    return row, head


def _decider(members: Sequence[_Member], place: Place) -> Decide:
    """Decides for the i-th of these planes. Planes that ask the same function share one call of it."""
    sure = _tables([member.plane.sure for member in members], place)
    groups: dict[object, list[int]] = {}
    for i, member in enumerate(members):
        if member.plane.predicate is not None:
            groups.setdefault(_question(member), []).append(i)
    asked: list[tuple[Tensor, Tables, Decide]] = []
    for group in groups.values():
        others = [_NOTHING] * (len(group) < len(members))  # number 0 stands for all planes outside the group
        askers = [*others, *(members[i] for i in group)]
        slot = np.zeros(place.room(len(members), place.least), dtype=np.int64)
        slot[group] = np.arange(len(others), len(askers))
        maybe = _tables([member.plane.maybe for member in askers], place)
        asked.append((place.tensor(slot), maybe, _predicate_mod(askers, place)))
    open_questions = tuple(asked)

    def decide(plane: Tensor | None, b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        allowed = _seen(sure, plane, q, key)
        for slot, maybe, predicate in open_questions:
            inner = None if plane is None else _beside(slot, q)[plane]
            allowed = allowed | (_seen(maybe, inner, q, key) & predicate(inner, b, h, q, key))
        return allowed

    return decide


def _seen(tables: Tables, plane: Tensor | None, q: Tensor, key: Tensor) -> Tensor:
    at = q if plane is None else (plane, q)
    spans = [(key >= _beside(start, q)[at]) & (key < _beside(stop, q)[at]) for start, stop in tables]
    inside = spans[0] if spans else (q < 0) & (key < 0)  # nothing: rows are counted from 0
    for span in spans[1:]:
        inside = inside | span
    return inside


def _tables(bands: Sequence[Ints], place: Place) -> Tables:
    """Every plane's spans by row."""
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


def _question(member: _Member) -> object:
    """What planes must agree on to be decided by one call: the kind of predicate, or the function and what it is given.

    A function gets the b and h that the kernel has, unless its plane serves others than the row and head it is for.
    """
    predicate = member.plane.predicate
    if not isinstance(predicate, Function):
        return type(predicate)
    return id(predicate.mask_mod), *_fixed(member, predicate)


def _fixed(member: _Member, predicate: Function) -> tuple[int | None, int | None]:
    row = None if predicate.row == member.row else predicate.row
    return row, None if predicate.head == member.head else predicate.head


def _predicate_mod(members: Sequence[_Member], place: Place) -> Decide:
    """Decides by the predicates of planes which all ask the same question; what it says of no plane is ignored."""
    predicate = members[-1].plane.predicate
    if isinstance(predicate, Function):
        return _function_mod(predicate.call, *_fixed(members[-1], predicate), place)
    if isinstance(predicate, Neither):
        inner = _decider(_inside(members, "a"), place)
        return lambda i, b, h, q, key: ~inner(i, b, h, q, key)
    if isinstance(predicate, Both | Either):
        one, other = _decider(_inside(members, "a"), place), _decider(_inside(members, "b"), place)
        if isinstance(predicate, Both):
            return lambda i, b, h, q, key: one(i, b, h, q, key) & other(i, b, h, q, key)
        return lambda i, b, h, q, key: one(i, b, h, q, key) | other(i, b, h, q, key)
    raise MaskError(
        f"a predicate of type {type(predicate).__name__} has no mask function. Give it one in masks/mask_mods.py."
    )


def _inside(members: Sequence[_Member], side: str) -> list[_Member]:
    return [m if m is _NOTHING else _Member(getattr(m.plane.predicate, side), m.row, m.head) for m in members]


def _function_mod(mask_mod: MaskMod, row: int | None, head: int | None, place: Place) -> Decide:
    # Padding is asked about at position 0 and its answer is not used, so that no function reads outside its tensors.
    positions = None if place.rows is None else place.tensor(np.maximum(place.rows, 0))
    only_b, only_h = (None if fixed is None else place.tensor(fixed) for fixed in (row, head))
    padded = place.columns is not None

    def ask(_: Tensor | None, b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        b, h = b if only_b is None else _beside(only_b, q), h if only_h is None else _beside(only_h, q)
        return mask_mod(b, h, q if positions is None else positions[q], key.clamp(min=0) if padded else key)

    return ask
