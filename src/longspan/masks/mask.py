"""Mask: which query position may attend to which key position.

A mask is a grid of planes (batch rows x heads; a side of length 1 holds for all). A plane is two disjoint lists of
bands, `sure` and `maybe`, and a predicate that decides the pairs inside `maybe`. A structured mask has no `maybe`; an
opaque one has no `sure`; `&`, `|` and `~` mix the two and keep closed form wherever closed form decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan._compile import Handled, opaque, run_eagerly
from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.bands import LIMIT, Band
from longspan.masks.functions import Reader, readers_of
from longspan.masks.plane import Bools, ByIdentity, Plane
from longspan.masks.tiles import classifier, tile_pairs
from longspan.spans import Ints, Span, check_int

_MAX_DRAWN = 4096
"""Tokens up to which a mask with a function is drawn."""


def draw(plane: Plane, seq_len: int, width: int) -> str:
    """Return one character per square of pairs: all, some or none allowed. Queries go down, keys go right."""
    width = check_int(width, "width", "draw()", MaskError, low=1, high=4096)
    edges = np.linspace(0, seq_len, min(width, max(seq_len, 1)) + 1).astype(np.int64)
    sizes = np.diff(edges)
    if plane.predicate is not None and seq_len > _MAX_DRAWN:
        raise MaskError(
            f"drawing an opaque mask calls its function for every pair, and {seq_len} tokens are more than"
            f" {_MAX_DRAWN}. Draw a shorter stretch, or classify() the tiles you want to see."
        )
    counts = tile_pairs(plane, edges, edges)
    cells = np.where(counts == 0, "·", np.where(counts == sizes[:, None] * sizes, "█", "▒"))
    return "\n".join("".join(line) for line in cells.tolist())


# -- Mask --------------------------------------------------------------------------------------------------------------


Grid = tuple[tuple["Plane", ...], ...]


@opaque
@dataclass(frozen=True, eq=False, repr=False)
class Mask(Handled):
    """What may attend to what. Combine with `&`, `|` and `~`; make one with the functions of `longspan.masks`."""

    grid: Grid
    seq_len: int | None
    name: str
    _hash: list[int] = field(default_factory=list[int], init=False)
    """The hash, once computed: a cache of plans needs it in every call."""
    known: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False)
    """Results that depend on the mask; they end with it."""
    plans: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False)
    """Plans for this mask object, if it has functions."""

    @staticmethod
    def of_bands(rows: Ints, seq_len: int | None, name: str) -> Mask:
        """Return the structured mask of disjoint bands."""
        return Mask(((Plane(bd.drop_empty(rows)),),), seq_len, name)

    # -- Shape ---------------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """The number of batch rows that differ; 1: one plane serves every row."""
        return len(self.grid)

    @property
    def num_heads(self) -> int:
        """The number of heads that differ; 1: one plane serves every head."""
        return len(self.grid[0])

    @property
    def is_structured(self) -> bool:
        """Whether closed form decides every pair."""
        return all(plane.predicate is None for plane in self._planes())

    def _planes(self) -> Iterator[Plane]:
        return (plane for row in self.grid for plane in row)

    def plane(self, row: int = 0, head: int = 0) -> Plane:
        """Return the plane of one batch row and head."""
        for axis, index, size in (("row", row, self.num_rows), ("head", head, self.num_heads)):
            if size > 1 and not (type(index) is int and 0 <= index < size):
                check_int(index, axis, f"{self}", MaskError, -LIMIT)  # numpy's numbers pass, but not outside the range
            if size > 1 and not 0 <= index < size:
                raise MaskError(f"{axis} of {self} must be in [0, {size}), but got {index}.")
        return self.grid[row if self.num_rows > 1 else 0][head if self.num_heads > 1 else 0]

    def distinct_planes(self) -> tuple[Plane, ...]:
        """Return every plane once, in the order of first appearance."""
        by_id: dict[int, Plane] = {id(plane): plane for plane in self._planes()}
        return tuple(by_id.values())

    def length(self, seq_len: int | None = None) -> int:
        """Return the sequence length, from the mask or the argument; raise if there is none or they differ."""
        if seq_len is not None and not (type(seq_len) is int and 0 <= seq_len <= LIMIT):
            seq_len = check_int(seq_len, "seq_len", f"{self}", MaskError)
        if self.seq_len is not None and seq_len is not None and seq_len != self.seq_len:
            raise MaskError(
                f"{self} is for {self.seq_len} tokens, but seq_len = {seq_len}. Build the mask for the length you use,"
                f" or leave seq_len out."
            )
        length = self.seq_len if self.seq_len is not None else seq_len
        if length is None:
            raise MaskError(
                f"{self} has no length of its own, but one is needed here. Pass seq_len=, or combine it with a mask"
                f" that has a length, as in masks.documents(lengths) & masks.causal()."
            )
        return length

    # -- Queries -------------------------------------------------------------------------------------------------------

    def allows(self, q: ArrayLike, kv: ArrayLike, *, row: int = 0, head: int = 0) -> Bools:
        """Return whether query position `q` may attend to key position `kv`; arrays broadcast.

        >>> from longspan import masks
        >>> masks.causal().allows([0, 5], [3, 3]).tolist()
        [False, True]
        """
        return self.plane(row, head).allows(bd.as_positions(q, "q"), bd.as_positions(kv, "kv"))

    def bands(self, seq_len: int | None = None, *, row: int = 0, head: int = 0) -> tuple[Band, ...]:
        """Return the disjoint bands of one plane; raises for an opaque mask, which has none."""
        plane, length = self.plane(row, head), self.length(seq_len)
        if plane.predicate is not None:
            raise MaskError(
                f"{self} decides pairs with a function, so it is not a list of bands. Ask plane(row, head) for its"
                f" `sure` and `maybe` bands, or classify() for its tiles."
            )
        return bd.as_bands(bd.tighten(bd.cut(plane.sure, (0, length), (0, length))))

    def regions(self, seq_len: int | None = None) -> list[Ints]:
        """Return, for each distinct plane, the `(n, 6)` array of bands that hold all allowed pairs."""
        length = self.length(seq_len)
        return [bd.cut(plane.region, (0, length), (0, length)) for plane in self.distinct_planes()]

    def area(self, seq_len: int | None = None, *, row: int = 0, head: int = 0) -> int:
        """Return how many pairs one plane allows.

        >>> from longspan import masks
        >>> masks.causal().area(10_000_000)
        50000005000000
        """
        plane, length = self.plane(row, head), self.length(seq_len)
        if plane.predicate is not None:
            raise MaskError(
                f"the area of {self} has no closed form, because a function decides its pairs. Sum allows() over the"
                f" tiles you need, or classify() them."
            )
        return int(bd.area(bd.cut(plane.sure, (0, length), (0, length))).sum())

    def classify(
        self, q: Span, kv: Span, *, tile: int = 128, seq_len: int | None = None, row: int = 0, head: int = 0
    ) -> NDArray[np.int8]:
        """Return 0 (empty), 1 (partial) or 2 (full) for every tile that two spans touch, on a global grid of tiles.

        Only these tiles are evaluated, and the results are cached.

        >>> from longspan import masks, Span
        >>> masks.causal(6).classify(Span(2, 6), Span(0, 6), tile=2).tolist()
        [[2, 1, 0], [2, 2, 1]]
        """
        self.check_unchanged()
        return classifier(self.plane(row, head), self.length(seq_len), tile, self.known).classify(q, kv)

    def resized(self, seq_len: int) -> Mask:
        """Return the mask for a sequence of this length; raises if the mask has another length."""
        if self.length(seq_len) == self.seq_len:
            return self
        seq_len = check_int(seq_len, "seq_len", "resized()", MaskError)
        square = ((0, seq_len), (0, seq_len))
        return self._map(lambda plane: plane.cut(*square), seq_len, self.name)

    # -- Tensors that functions read -----------------------------------------------------------------------------------

    @cached_property
    def _readers(self) -> tuple[Reader, ...]:
        return readers_of(self.distinct_planes())

    def check_unchanged(self) -> None:
        """Raise if a tensor that a function reads was changed since its first call."""
        for reader in self._readers:
            reader.check_unchanged()

    def twin(self) -> Mask:
        """Return an equal mask that shares cached results, but not plans: a plan that holds it does not hold itself."""
        twin = Mask(self.grid, self.seq_len, self.name)
        object.__setattr__(twin, "known", self.known)
        return twin

    # -- Algebra -------------------------------------------------------------------------------------------------------

    def __and__(self, other: Mask) -> Mask:
        return self._combine(other, "&")

    def __or__(self, other: Mask) -> Mask:
        return self._combine(other, "|")

    @run_eagerly
    def __invert__(self) -> Mask:
        side = LIMIT if self.seq_len is None else self.seq_len
        domain = bd.rectangles(0, side, 0, side)
        return self._map(lambda plane: plane.minus_from(domain), self.seq_len, f"~{self.name}")

    def _map(self, change: Callable[[Plane], Plane], seq_len: int | None, name: str) -> Mask:
        changed = {id(plane): change(plane) for plane in self.distinct_planes()}
        return Mask(tuple(tuple(changed[id(plane)] for plane in row) for row in self.grid), seq_len, name)

    @run_eagerly
    def _combine(self, other: object, sign: str) -> Mask:
        if not isinstance(other, Mask):
            raise MaskError(
                f"{sign} joins two masks, but got {self} {sign} {type(other).__name__}. Wrap a function mask_mod(b, h,"
                f" q, kv) with masks.from_mask_mod first, a table with masks.from_dense."
            )
        # Masks with functions are not cached: they may hold large tensors.
        combine = _combine if self.is_structured and other.is_structured else _combine.__wrapped__
        return combine(ByIdentity(self), ByIdentity(other), sign)

    # -- Equality and hash ---------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise MaskError(
            f"{self} has no truth value. `and`, `or` and `not` do not combine masks: write &, | and ~ instead (with"
            f" brackets), or ask mask.area() == 0."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        shape = (self.seq_len, self.num_rows, self.num_heads)
        if shape != (other.seq_len, other.num_rows, other.num_heads):
            return False
        return all(a == b for a, b in zip(self._planes(), other._planes(), strict=True))

    def __hash__(self) -> int:
        # From numbers that do not depend on how the mask is cut into bands: pairs, and keys of a few fixed rows.
        if self._hash:
            return self._hash[0]
        probes = np.arange(1, 5, dtype=np.int64) * 0x9E3779B1 % (self.seq_len or 4096)
        rows = [tuple(bd.row_counts(plane.sure, probes).tolist()) for plane in self.distinct_planes()]
        self._hash.append(hash((self.seq_len, self.num_rows, self.num_heads, *self._planes(), *rows)))
        return self._hash[0]

    @property
    def fingerprint(self) -> str:
        """A hex digest for ranks to compare: equal bands and functions give equal digests in every process."""
        if "fingerprint" not in self.known:
            # Samples come first: functions are called, which finds the tensors that keys are of.
            keys = {id(plane): plane.sample(self.seq_len) + plane.key() for plane in self.distinct_planes()}
            text = f"mask {self.seq_len} {self.num_rows}x{self.num_heads} "
            text += " ".join(keys[id(plane)] for plane in self._planes())
            self.known["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
        return self.known["fingerprint"]

    def __repr__(self) -> str:
        name = self.name[1:-1] if self.name.startswith("(") else self.name
        return f"<mask {name}>" if self.seq_len is None else f"<mask {name}, {self.seq_len} tokens>"

    # -- Conversions ---------------------------------------------------------------------------------------------------

    def draw(self, seq_len: int | None = None, *, width: int = 32, row: int = 0, head: int = 0) -> str:
        """Return a text picture: one character per square of pairs, filled, partly filled or empty."""
        return draw(self.plane(row, head), self.length(seq_len), width)

    def to_mask_mod(self, seq_len: int | None = None) -> Callable[[object, object, object, object], object]:
        """Return a function (b, h, q_idx, kv_idx) on torch tensors, as FlexAttention takes it."""
        from longspan.masks.mask_mods import Place, to_mask_mod  # planning does not need it

        mask = self.resized(self.length(seq_len))
        return to_mask_mod(mask.grid, Place(mask.length()))


@lru_cache(maxsize=256)
def _combine(these: ByIdentity[Mask], those: ByIdentity[Mask], sign: str) -> Mask:
    """Combine two masks plane by plane; a side of length 1 serves all. The same two objects give the same object."""
    a, b = these.value, those.value
    lengths = {length for length in (a.seq_len, b.seq_len) if length is not None}
    if len(lengths) > 1:
        raise MaskError(
            f"{a} is for {a.seq_len} tokens and {b} for {b.seq_len}. Masks that are combined"
            f" describe one sequence: build both for the same length."
        )
    name, length = f"({a.name} {sign} {b.name})", next(iter(lengths), None)
    if length is not None:
        a, b = a.resized(length), b.resized(length)
    for axis, size_a, size_b in (("row", a.num_rows, b.num_rows), ("head", a.num_heads, b.num_heads)):
        if size_a != size_b and 1 not in (size_a, size_b):
            raise MaskError(
                f"{a} differs over {size_a} {axis}s and {b} over {size_b}. Give both the same number of {axis}s, or"
                f" let one of them serve all."
            )
    combine = Plane.__and__ if sign == "&" else Plane.__or__
    planes: dict[tuple[int, int], Plane] = {}
    grid: list[list[Plane]] = []
    for row in range(max(a.num_rows, b.num_rows)):
        grid.append([])
        for head in range(max(a.num_heads, b.num_heads)):
            pair = a.plane(row, head), b.plane(row, head)
            key = id(pair[0]), id(pair[1])
            if key not in planes:
                planes[key] = combine(*pair)
            grid[-1].append(planes[key])
    return Mask(tuple(map(tuple, grid)), length, name)


# -- Masks as cache keys -----------------------------------------------------------------------------------------------


class MaskKey:
    """A mask as a cache key: by its bands if it is structured, by identity if it has functions, which do not compare.

    Equal masks that are cut into other bands are different keys: ranks compare fingerprints, which depend on bands,
    and caches of two ranks may hold different masks.

    >>> from longspan.masks import causal, from_mask_mod
    >>> MaskKey(causal(8)) == MaskKey(causal().resized(8))
    True
    >>> def function(b, h, q, kv): return q >= kv
    >>> MaskKey(from_mask_mod(function, 8)) == MaskKey(from_mask_mod(function, 8))
    False
    """

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.by_value = mask.is_structured

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskKey):
            return NotImplemented
        return self.mask is other.mask or (
            self.by_value and other.by_value and self.mask.fingerprint == other.mask.fingerprint
        )

    def __hash__(self) -> int:
        return hash(self.mask.fingerprint) if self.by_value else id(self.mask)
