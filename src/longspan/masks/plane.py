"""Plane: the allowed pairs of one head of one batch row, and the predicates that decide its open pairs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from longspan.masks import bands as bd
from longspan.spans import Ints

Bools = NDArray[np.bool_]
T = TypeVar("T")


class ByIdentity(Generic[T]):
    """A dictionary key that compares an object by identity."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return id(self.value)


class Predicate(Protocol):
    """Decides the pairs that closed form leaves open."""

    def allows(self, q: Ints, kv: Ints) -> Bools: ...
    def key(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Combined:
    """The predicate of planes that were combined by `&` or `|`, or inverted by `~` (then `b` is `a`)."""

    sign: str
    a: Plane
    b: Plane

    def allows(self, q: Ints, kv: Ints) -> Bools:
        a = self.a.allows(q, kv)
        if self.sign == "~":
            return ~a
        return a & self.b.allows(q, kv) if self.sign == "&" else a | self.b.allows(q, kv)

    def key(self) -> str:
        return f"~{self.a.key()}" if self.sign == "~" else f"({self.a.key()}{self.sign}{self.b.key()})"


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One head of one batch row: `sure` pairs, and `maybe` pairs on which `predicate` decides."""

    sure: Ints
    maybe: Ints = field(default_factory=bd.empty)
    predicate: Predicate | None = None
    is_blocks: bool = False
    """Whether `maybe` lists blocks that all hold an allowed pair, as a BlockMask does: kernels compute all of it."""
    measured: list[Any] = field(default_factory=list[Any], init=False, repr=False)
    """What `masks.work` has found out about it."""

    def __post_init__(self) -> None:
        if not len(self.maybe):
            object.__setattr__(self, "predicate", None)
        for rows in (self.sure, self.maybe):
            rows.flags.writeable = False

    @property
    def region(self) -> Ints:
        """Return bands that hold all allowed pairs; exactly these if the mask is structured."""
        return np.concatenate((self.sure, self.maybe)) if len(self.maybe) else self.sure

    def allows(self, q: Ints, kv: Ints) -> Bools:
        """Return whether each pair is allowed; `q` and `kv` broadcast against each other."""
        if self.predicate is not None and self._is_open(q, kv):
            allowed = self.predicate.allows(q, kv)
            return allowed if allowed.flags.writeable else allowed.copy()
        wide_q, wide_kv = np.broadcast_arrays(q, kv)
        allowed = bd.contains(self.sure, wide_q, wide_kv)
        if self.predicate is not None:
            # Clip positions to the function's bands: its tables may end there.
            low, high = self.maybe[:, [bd.Q0, bd.K0]].min(axis=0), self.maybe[:, [bd.Q1, bd.K1]].max(axis=0) - 1
            near = np.clip(q, low[0], high[0]), np.clip(kv, low[1], high[1])
            allowed |= bd.contains(self.maybe, wide_q, wide_kv) & self.predicate.allows(*near)
        return allowed

    def _is_open(self, q: Ints, kv: Ints) -> bool:
        """Return whether one band of `maybe` holds all of these pairs, so that the function alone decides on them.

        Looking the pairs up in bands takes ten times longer than most functions.
        """
        if not q.size or not kv.size:
            return False
        first, last, start, stop = q.min(), q.max(), kv.min(), kv.max()
        q0, q1, k0, k1, lo, hi = self.maybe.T
        inside = (q0 <= first) & (last < q1) & (k0 <= start) & (stop < k1)
        return bool((inside & (lo <= first - stop) & (last - start <= hi)).any())

    def cut(self, q: tuple[int, int], kv: tuple[int, int]) -> Plane:
        return Plane(bd.cut(self.sure, q, kv), bd.cut(self.maybe, q, kv), self.predicate, self.is_blocks)

    def key(self) -> str:
        """Return a digest of the bands and of the predicate's key."""
        digest = hashlib.sha256(bd.coalesce(self.sure).tobytes() + b"?" + bd.coalesce(self.maybe).tobytes())
        if self.predicate is not None:
            digest.update(self.predicate.key().encode())
        return digest.hexdigest()[:32]

    def sample(self, seq_len: int | None) -> str:
        """Return a digest of an opaque plane's answers for fixed pairs, which differ between functions."""
        side = 4096 if seq_len is None else seq_len
        if self.predicate is None or side == 0:
            return ""
        step = np.arange(512, dtype=np.int64)
        q = step * 0x9E3779B1 % side
        answers = np.packbits(self.allows(q, np.maximum(q - step * 7919 % side, 0))).tobytes()
        return hashlib.sha256(answers).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        # Same pairs, however they are cut into bands; opaque parts must be the same functions over the same pairs.
        if not isinstance(other, Plane):
            return NotImplemented
        if self is other:
            return True
        if self.predicate != other.predicate:
            return False
        return _same_pairs(self.sure, other.sure) and _same_pairs(self.maybe, other.maybe)

    def __hash__(self) -> int:
        return int(bd.area(self.sure).sum())  # does not depend on how pairs are cut into bands

    def __and__(self, other: Plane) -> Plane:
        sure = bd.intersect(self.sure, other.sure)
        if self.predicate is None and other.predicate is None:
            return Plane(sure)
        maybe = bd.subtract(bd.intersect(self.region, other.region), sure)
        return Plane(sure, maybe, self._predicate_with(other, "&"))

    def __or__(self, other: Plane) -> Plane:
        sure = bd.unite(self.sure, other.sure)
        if self.predicate is None and other.predicate is None:
            return Plane(sure)
        maybe = bd.subtract(bd.unite(self.maybe, other.maybe), sure)
        return Plane(sure, maybe, self._predicate_with(other, "|"))

    def _predicate_with(self, other: Plane, sign: str) -> Predicate | None:
        """Return what decides on the open pairs of two planes: beside bands, the function of the other plane."""
        if self.predicate is None or other.predicate is None:
            return self.predicate or other.predicate
        return Combined(sign, self, other)

    def minus_from(self, domain: Ints) -> Plane:
        sure = bd.subtract(domain, self.region)
        return Plane(sure, self.maybe, None if self.predicate is None else Combined("~", self, self))


def _same_pairs(a: Ints, b: Ints) -> bool:
    if a.shape == b.shape and np.array_equal(a, b):
        return True
    return not len(bd.subtract(a, b)) and not len(bd.subtract(b, a))
