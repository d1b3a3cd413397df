"""A mask as a FlexAttention function of one rank's local rows.

Whatever bands a mask has, one query row sees a few spans of keys: tables of them by local row are the function. Its
code never changes and all that a batch changes is in tensors, so compilers need not look at it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from longspan.errors import MaskError
from longspan.masks import Mask, Plane
from longspan.masks import bands as bd
from longspan.masks.functions.predicate import Function, MaskMod
from longspan.masks.plane import Both, Either, Neither
from longspan.span import Ints

Bools = NDArray[np.bool_]

Spans = tuple[Ints, Ints, Ints]
"""Local row, first key and the key after the last one, of everything that rows see: by row, then by key."""

Tables = tuple[tuple[Tensor, Tensor], ...]
"""For k = 0, 1, ...: where the k-th span of keys starts and stops, by plane and local row."""

Decide = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(number of the plane, b, h, local query row, position of the key) -> may attend."""


def row_spans(bands: Ints, rows: Ints) -> Spans:
    """The spans of keys that each row (a position, or -1) sees; neighbours that touch are one span."""
    if not len(bands):
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing
    slabs = bd.slabs_of(bands)
    band, first, count = bd.by_slab(bands, slabs)
    slab = np.clip(np.searchsorted(slabs[:, 0], rows, side="right") - 1, 0, None)
    many = np.where((rows >= slabs[slab, 0]) & (rows < slabs[slab, 1]), count[slab], 0)
    row = np.repeat(np.arange(len(rows), dtype=np.int64), many)
    mine = bands[band[first[slab[row]] + steps_within(many)]]
    start = np.maximum(mine[:, bd.K0], rows[row] - mine[:, bd.HI])
    stop = np.minimum(mine[:, bd.K1], rows[row] - mine[:, bd.LO] + 1)
    keep = stop > start
    row, start, stop = row[keep], start[keep], stop[keep]
    order = np.lexsort((start, row))
    row, start, stop = row[order], start[order], stop[order]
    touching = (row[1:] == row[:-1]) & (start[1:] == stop[:-1])
    begins = np.concatenate(([True], ~touching))[: len(row)]
    ends = np.concatenate((~touching, [True]))[: len(row)]
    return row[begins], start[begins], stop[ends]


def steps_within(counts: Ints) -> Ints:
    """0, 1, ... within each of the groups of these sizes."""
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True)
class _Member:
    """A plane, and the only batch row and head that use it (None: several do)."""

    plane: Plane
    row: int | None = None
    head: int | None = None


_NOTHING = _Member(Plane(bd.empty()))


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Local query rows (positions, -1 for padding) and the device that asks about them."""

    rows: Ints
    device: torch.device
    least: int
    """So many planes have room: batch rows that happen to agree this time must not make tables of another shape."""

    def tensor(self, array: ArrayLike) -> Tensor:
        return torch.tensor(array, device=self.device)  # a copy: tensors that share memory look different to compilers

    def room(self, num_planes: int) -> int:
        return _rounded(max(num_planes, self.least))


def local_mask_mod(mask: Mask, which: Ints, rows: Ints, columns: Ints | None, device: torch.device) -> MaskMod:
    """The function (b, h, local query row, column); `columns` are the positions of keys that are not all in order."""
    place = _Place(rows, device, mask.num_rows)
    members = [_Member(plane, *_only(which == i)) for i, plane in enumerate(mask.distinct_planes())]
    decide, grid, zero = _decider(members, place), place.tensor(which), place.tensor(0)
    positions = None if columns is None else place.tensor(columns)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key = kv_idx if positions is None else positions[kv_idx]
        row = b if grid.shape[0] > 1 else zero  # a side of 1 serves all, and b or h is not so much as looked at
        head = h if grid.shape[1] > 1 else zero
        return decide(grid[row, head], b, h, q_idx, key)

    return mask_mod


def _only(used: Bools) -> tuple[int | None, int | None]:
    """The one batch row and the one head of a grid that are used, where the grid has several of them."""
    lines = np.flatnonzero(used.any(axis=1)), np.flatnonzero(used.any(axis=0))
    row, head = (
        int(line[0]) if size > 1 and len(line) == 1 else None for line, size in zip(lines, used.shape, strict=True)
    )
    return row, head


def _decider(members: list[_Member], place: _Place) -> Decide:
    """Decides for the i-th of these planes. Planes that ask the same function share one call of it."""
    sure = _tables([member.plane.sure for member in members], place)
    groups: dict[object, list[int]] = {}
    for i, member in enumerate(members):
        if member.plane.predicate is not None:
            groups.setdefault(_question(member), []).append(i)
    asked: list[tuple[Tensor, Tables, Decide]] = []
    for group in groups.values():
        some = [_NOTHING, *(members[i] for i in group)]  # number 0 stands for all planes outside the group
        slot = np.zeros(place.room(len(members)), dtype=np.int64)
        slot[group] = np.arange(1, len(some))
        maybe = _tables([member.plane.maybe for member in some], place)
        asked.append((place.tensor(slot), maybe, _predicate_mod(some, place)))
    open_questions = tuple(asked)

    def decide(plane: Tensor, b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        found = _seen(sure, plane, q, key)
        for slot, maybe, predicate in open_questions:
            inner = slot[plane]
            found = found | (_seen(maybe, inner, q, key) & predicate(inner, b, h, q, key))
        return found

    return decide


def _seen(tables: Tables, plane: Tensor, q: Tensor, key: Tensor) -> Tensor:
    found = torch.zeros_like(key, dtype=torch.bool)
    for start, stop in tables:
        found = found | ((key >= start[plane, q]) & (key < stop[plane, q]))
    return found


def _tables(bands: list[Ints], place: _Place) -> Tables:
    """Every plane's spans by local row. Planes and spans are filled up to powers of two: new shapes mean compiling."""
    spans = [row_spans(rows, place.rows) for rows in bands]
    counts = [np.bincount(row, minlength=len(place.rows)) for row, _, _ in spans]
    depth = _rounded(max(int(count.max(initial=0)) for count in counts))
    dtype = np.int32 if all(not len(rows) or int(rows[:, bd.K1].max()) < 1 << 31 for rows in bands) else np.int64
    tables = np.zeros((depth, 2, place.room(len(bands)), len(place.rows)), dtype=dtype)
    for i, ((row, start, stop), count) in enumerate(zip(spans, counts, strict=True)):
        k = steps_within(count)
        tables[k, 0, i, row] = start
        tables[k, 1, i, row] = stop
    return tuple((place.tensor(start), place.tensor(stop)) for start, stop in tables)


def _rounded(count: int) -> int:
    """The next power of two, 1 or more."""
    return 1 << max(count - 1, 0).bit_length()


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


def _predicate_mod(members: list[_Member], place: _Place) -> Decide:
    """Decides by the predicates of planes 1, 2, ..., which all ask the same question; what it says of 0 is ignored."""
    predicate = members[1].plane.predicate
    if isinstance(predicate, Function):
        return _function_mod(predicate.mask_mod, *_fixed(members[1], predicate), place)
    if isinstance(predicate, Neither):
        inner = _decider(_inside(members, "a"), place)
        return lambda *pair: ~inner(*pair)
    if isinstance(predicate, Both | Either):
        one, other = _decider(_inside(members, "a"), place), _decider(_inside(members, "b"), place)
        if isinstance(predicate, Both):
            return lambda *pair: one(*pair) & other(*pair)
        return lambda *pair: one(*pair) | other(*pair)
    raise MaskError(
        f"a predicate of type {type(predicate).__name__} has no mask function. Give it one in"
        f" execution/flex/row_tables.py."
    )


def _inside(members: list[_Member], side: str) -> list[_Member]:
    planes = [getattr(member.plane.predicate, side) for member in members[1:]]
    return [_NOTHING, *(_Member(plane, m.row, m.head) for plane, m in zip(planes, members[1:], strict=True))]


def _function_mod(mask_mod: MaskMod, row: int | None, head: int | None, place: _Place) -> Decide:
    # Padding is asked about at position 0 and its answer is not used, so that no function reads outside its tensors.
    positions = place.tensor(np.maximum(place.rows, 0))
    only_b, only_h = (None if fixed is None else place.tensor(fixed) for fixed in (row, head))

    def ask(_: Tensor, b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        b, h = b if only_b is None else only_b, h if only_h is None else only_h
        return mask_mod(b, h, positions[q], key.clamp(min=0))

    return ask
