"""Tile: a rectangle of local rows with a band, and the features that a kernel may have to support for it.

`KnownTiles` caches values computed for the tiles of a plan. `wide` returns the dtype of accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows q0:q1 and key rows k0:k1. Row i may attend to column j, both counted inside the tile, iff
    `lo <= i - j <= hi` (None: unbounded) and, if the tile `asks`, the mask's function allows it.

    >>> Tile(0, 4, 8, 12, lo=0).rows
    4
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int | None = None
    hi: int | None = None
    asks: bool = False

    @property
    def rows(self) -> int:
        return self.q1 - self.q0

    @property
    def cols(self) -> int:
        return self.k1 - self.k0

    def part(self, q0: int, q1: int, k0: int, k1: int) -> Tile | None:
        """Return the tile inside a rectangle (in coordinates of q0..k1), tightened; None if it has no pair.

        >>> Tile(0, 8, 0, 8, lo=0).part(4, 8, 0, 8)
        Tile(q0=4, q1=8, k0=0, k1=8, lo=-4, hi=None, asks=False)
        """
        shift = (q0 - self.q0) - (k0 - self.k0)
        lo = None if self.lo is None else self.lo - shift
        hi = None if self.hi is None else self.hi - shift
        return replace(self, q0=q0, q1=q1, k0=k0, k1=k1, lo=lo, hi=hi).tight()

    def tight(self) -> Tile | None:
        """Return the same pairs without empty rows and columns and without bounds that exclude nothing.

        Empty rows come first (i < lo) or last (i > cols - 1 + hi), never in between, and so do columns: every row and
        column of a tight tile has a pair, and `lo <= 0`.

        >>> Tile(0, 8, 0, 8, lo=2, hi=99).tight()
        Tile(q0=2, q1=8, k0=0, k1=6, lo=0, hi=None, asks=False)
        """
        q0, q1, k0, k1, lo, hi = self.q0, self.q1, self.k0, self.k1, self.lo, self.hi
        if lo is None and hi is None:
            return self if q1 > q0 and k1 > k0 else None
        if lo is not None and hi is not None and lo > hi:
            return None
        origin = q0 - k0
        if lo is not None:
            q0, k1 = max(q0, self.q0 + lo), min(k1, k0 + q1 - self.q0 - lo)
        if hi is not None:
            k0, q1 = max(k0, self.k0 + q0 - self.q0 - hi), min(q1, self.q0 + k1 - self.k0 + hi)
        if q1 <= q0 or k1 <= k0:
            return None
        shift = q0 - k0 - origin
        if lo is not None:
            lo = lo - shift if lo - shift > k0 - k1 + 1 else None
        if hi is not None:
            hi = hi - shift if hi - shift < q1 - q0 - 1 else None
        if (q0, q1, k0, k1, lo, hi) == (self.q0, self.q1, self.k0, self.k1, self.lo, self.hi):
            return self
        return replace(self, q0=q0, q1=q1, k0=k0, k1=k1, lo=lo, hi=hi)


class KnownTiles(tuple[Tile, ...]):
    """The tiles of one compute of a plan, the same in every call, and a cache of values computed from them."""

    known: dict[object, Any]

    def __new__(cls, tiles: Iterable[Tile]) -> KnownTiles:
        self = super().__new__(cls, tiles)
        self.known = {}
        return self


def cached(tiles: Sequence[Tile], make: Callable[..., T], *args: Any) -> T:
    """Return `make(tiles, *args)`, cached with the tiles."""
    if not isinstance(tiles, KnownTiles):
        return make(tiles, *args)
    key = make, *args
    if key not in tiles.known:
        tiles.known[key] = make(tiles, *args)
    return tiles.known[key]


class Features(NamedTuple):
    """Features of a kernel beyond plain attention over bands."""

    mask_function: bool = False
    """A function decides on pairs of some tiles."""
    score_function: bool = False
    """Scores are changed before the softmax, or probabilities after it."""
    dropout: bool = False
    """Probabilities are dropped after the softmax."""

    def beyond(self, supported: Features) -> str | None:
        """Return which of these features a kernel with the `supported` ones lacks, or None."""
        if self.score_function and not supported.score_function:
            return "it does not support score functions, biases, soft caps and dropout"
        if self.mask_function and not supported.mask_function:
            return "it supports only masks of bands, but the mask has a function"
        if self.dropout and not supported.dropout:
            return "it does not support dropout"
        return None


PLAIN = Features()
MASKS = Features(mask_function=True)
ALL = Features(True, True, True)


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in a dtype. `Tensor.to` takes a microsecond even if there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulation: float64 for float64, else float32.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
