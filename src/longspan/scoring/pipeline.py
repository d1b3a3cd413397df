"""Changes to scores between the product and the softmax, and to probabilities after it.

A score goes through the soft cap, then ALiBi, the relative bias and the bias tensor, then `score_mod`; the mask hides
pairs after that, and dropout acts on probabilities at the end. All of them get global positions. Tensors that score
functions capture get gradients (`find_captured`, `Totals`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longspan import _torch
from longspan._torch import tree_map
from longspan.derivatives import check_derivatives
from longspan.errors import KernelError
from longspan.layouts.layout import to_device
from longspan.masks import Predicate
from longspan.masks.captures import CaptureSnapshot, difference, frozen, tracer_class
from longspan.masks.functions import Elementwise, check_signature
from longspan.spans import Ints, Span
from longspan.tile import Features, Tile, accumulation_dtype

# -- Captured tensors: find them, and give them gradients --------------------------------------------------------------
# A tensor that a function uses, that needs a gradient and that was not created inside the call is captured, wherever it
# is stored (closure, global, module). When tiles run, a mode replaces captured tensors by leaves, so that no tile's
# graph reaches outside its own call.


def find_captured(call: Callable[[TorchFunctionMode], object]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the tensors from outside that a call under a mode uses and that need a gradient, by first use; and all.

    >>> slopes, table = torch.ones(3, requires_grad=True), torch.ones(3)
    >>> def call(mode):
    ...     with mode:
    ...         return slopes[0] * table[1] + slopes.sum()
    >>> [t is slopes for t in find_captured(call)[0]]
    [True]
    """
    tracer = tracer_class()(())
    with torch.enable_grad():
        call(tracer)
    used = [tensor for noted in tracer.tensors if (tensor := noted.tensor()) is not None]
    return tuple(tensor for tensor in used if tensor.requires_grad), used


def check_captured(tensors: Iterable[Tensor]) -> None:
    """Raise for tensors whose gradients are not computed."""
    for tensor in tensors:
        if tensor.is_complex():
            raise KernelError(
                f"a tensor that changes scores and needs a gradient must be real, but got {tensor.dtype}. Pass the"
                f" tensor of torch.view_as_real, which has a gradient."
            )


class Swap(TorchFunctionMode):
    """Runs functions with leaves in place of the captured tensors.

    Elements taken out of a captured tensor by integer indices become leaves too: their gradient is added to the total
    element by element, where autograd would allocate a zero tensor of full size for every tile.
    """

    def __init__(self, captured: Sequence[Tensor], values: Sequence[Tensor], *, by_element: bool) -> None:
        super().__init__()
        self._leaves = {id(old): new.detach().requires_grad_() for old, new in zip(captured, values, strict=True)}
        self._number = {id(old): number for number, old in enumerate(captured)}
        self._by_element = by_element
        self.taken: list[tuple[int, Index | None, Tensor]] = [
            (number, None, self._leaves[key]) for key, number in self._number.items()
        ]
        """(number of the captured tensor, index or None for all of it, leaf)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        element = self._by_element and func is Tensor.__getitem__ and torch.is_grad_enabled()
        if element and id(args[0]) in self._leaves:
            index = _integers(args[1], args[0].ndim)
            if index is not None:
                leaf = self._leaves[id(args[0])].detach()[index].requires_grad_()
                self.taken.append((self._number[id(args[0])], index, leaf))
                return leaf
        args = [self._swap(value) for value in args]
        return func(*args, **{name: self._swap(value) for name, value in (kwargs or {}).items()})

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._leaves.get(id(value), value)
        return tree_map(self._swap, value) if isinstance(value, tuple | list | dict) else value


Index = tuple[Tensor, ...]


def _integers(index: Any, ndim: int) -> Index | None:
    """Return an index of integers and integer tensors as tensors; None for any other index."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, int | Tensor) and not isinstance(i, bool) for i in parts) or len(parts) > ndim:
        return None
    if any(isinstance(i, Tensor) and (i.is_floating_point() or i.dtype == torch.bool) for i in parts):
        return None
    device = next((i.device for i in parts if isinstance(i, Tensor)), None)
    return tuple(torch.as_tensor(i, device=device) for i in parts)


class Totals:
    """The gradients of captured tensors, summed over tiles in float32 (float64 for float64)."""

    def __init__(self, captured: Sequence[Tensor]) -> None:
        self.values = tuple(t.detach() for t in captured)
        self.sums = [
            torch.zeros_like(t, dtype=accumulation_dtype(t.dtype), memory_format=torch.contiguous_format)
            for t in self.values
        ]

    def add(self, number: int, index: Index | None, gradient: Tensor) -> None:
        """Add a gradient of a whole captured tensor, or of the elements taken with an index."""
        total = self.sums[number]
        gradient = gradient.to(total.dtype)
        if index is None:
            total += gradient
            return
        rest = total.shape[len(index) :]
        at = torch.zeros((), dtype=torch.int64, device=total.device)
        for i, size in zip(index, total.shape, strict=False):
            at = at * size + torch.where(i < 0, i + size, i).to(total.device)
        total.view(-1, *rest).index_add_(0, at.flatten(), gradient.reshape(-1, *rest))


NO_TOTALS = Totals(())

# -- Dropout: a hash of (seed, batch row, head, query, key) decides every pair -----------------------------------------
# It does not depend on rank, scheme, tile or order of computation, so one device and a thousand drop the same pairs.


# Multipliers of splitmix64, as signed numbers: torch has no unsigned arithmetic, but signed arithmetic wraps.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = 24


@dataclass(frozen=True)
class Dropout:
    """Every pair is dropped with probability `p`, the others are scaled by 1 / (1 - p)."""

    p: float
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral) or not 0 <= self.seed < 1 << 63:
            raise KernelError(
                f"dropout needs a whole number from 0 to 2**63 - 1 as seed, but got seed = {self.seed!r}."
            )
        if isinstance(self.p, bool) or not isinstance(self.p, Real) or not 0.0 <= self.p < 1.0:
            raise KernelError(f"dropout must be a probability, 0 or more and below 1, but got dropout = {self.p}.")
        object.__setattr__(self, "p", float(self.p))  # numpy's numbers have another repr
        object.__setattr__(self, "seed", int(self.seed))

    def keeps(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return which pairs are kept.

        >>> position = torch.arange(200)
        >>> kept = Dropout(0.25, seed=7).keeps(torch.tensor(0), torch.tensor(3), position[:, None], position)
        >>> 0.73 < kept.float().mean() < 0.77
        tensor(True)
        """
        row = _hash(_hash(_hash(_hash(torch.full_like(b, self.seed)) + b) + h) + q)
        drawn = _hash(row + _hash(kv * 2 + 1)) >> (64 - _BITS)
        return drawn & ((1 << _BITS) - 1) >= round(self.p * (1 << _BITS))

    def factor(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factor of each pair's probability."""
        return self.keeps(b, h, q, kv).to(dtype).div_(1.0 - self.p)


def dropout_of(p: float, seed: int) -> Dropout | None:
    """Return a checked `Dropout`, or None if p is 0."""
    dropout = Dropout(p, seed)
    return None if dropout.p == 0.0 else dropout


def _hash(x: Tensor) -> Tensor:
    """Hash int64 numbers (splitmix64): every bit of the result depends on every bit of the input."""
    x = x + _GOLDEN
    x ^= (x >> 30) & ((1 << 34) - 1)  # >> keeps the sign: cut off what it brings in
    x *= _FIRST
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _SECOND
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


# -- Scoring -----------------------------------------------------------------------------------------------------------


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, b, h, q_idx, kv_idx) -> score."""
PLAIN = nullcontext()


@dataclass(frozen=True, eq=False)
class Scoring:
    """All changes to scores and probabilities in one call."""

    functions: tuple[ScoreMod, ...]
    captured: tuple[Tensor, ...] = ()
    """Tensors that the functions use and that need a gradient, in the order of first use."""
    dropout: Dropout | None = None
    reads: tuple[CaptureSnapshot, ...] = ()
    """Snapshots of what each function reads, taken in forward."""
    like: Tensor | None = None
    """A score."""

    @staticmethod
    def of(functions: Sequence[ScoreMod], dropout: Dropout | None, like: Tensor) -> Scoring | None:
        """Build the scoring of functions in order; None if there is nothing to do."""
        if not functions and dropout is None:
            return None
        score = torch.zeros((), dtype=accumulation_dtype(like.dtype), device=like.device)
        scoring = Scoring(tuple(functions), (), dropout, like=score)

        def find() -> tuple[tuple[Tensor, ...], list[Tensor]]:
            return find_captured(lambda mode: scoring.apply(score, *scoring._pair(), mode))

        try:
            captured, used = find()
        except RuntimeError as error:
            if not _torch.is_from_compiler(error):
                raise
            raise KernelError(
                "score_mod must be made of tensor operations, but it uses torch.cond or another function that PyTorch"
                " compiles. Use torch.where, or decide outside of score_mod."
            ) from error
        reads = scoring._read()
        read = [noted.tensor() for r in reads if r.trace for noted in r.trace.tensors if noted.tensor is not None]
        known = {id(tensor) for tensor in captured}
        if any(tensor is not None and tensor.requires_grad and id(tensor) not in known for tensor in read):
            captured, used = find()  # the first call computed something that the function keeps, and reads from now on
        check_derivatives(*used)
        check_captured(captured)
        return Scoring(scoring.functions, captured, dropout, reads, score)

    def _pair(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (b, h, q_idx, kv_idx) of the first pair."""
        assert self.like is not None
        index = torch.zeros((), dtype=torch.int64, device=self.like.device)
        return index, index, index, index

    def _read(self) -> tuple[CaptureSnapshot, ...]:
        """Take snapshots of what each function reads."""
        assert self.like is not None
        snapshots: list[CaptureSnapshot] = []
        for number, function in enumerate(self.functions):
            call = function.function if isinstance(function, Elementwise) else function
            before, score = self.reads[number] if self.reads else None, self.like.clone()  # it may work in place
            snapshots.append(CaptureSnapshot.of(call, (score, *self._pair()), before))
            if isinstance(function, Elementwise):
                function.note_operations(snapshots[-1])
        return tuple(snapshots)

    def check_unchanged(self) -> None:
        """Raise if what the functions read has changed since forward: backward calls them again."""
        change = difference(self.reads, self._read())
        if change is not None:
            raise KernelError(
                f"what a score function reads has changed between forward and backward, which calls it again: {change}."
                f" Backward would differentiate another attention. Run backward before the change, or give the function"
                f" a copy of what it reads."
            )

    def detect_tile_support(self, score: Tensor, *index: Tensor) -> Scoring:
        """Find out on a tile whether the user's functions take tiles; return self."""
        for function in self.functions:
            if isinstance(function, Elementwise):
                with torch.no_grad():
                    function.settle(score, *index)
        return self

    @property
    def broadcasts(self) -> bool:
        """Whether every function takes tiles."""
        return all(f.broadcasts is not False for f in self.functions if isinstance(f, Elementwise))

    def apply(
        self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, mode: AbstractContextManager[Any] = PLAIN
    ) -> Tensor:
        """Return scores after every function, each called under `mode`."""
        for function in self.functions:
            with mode:
                result = function(score, b, h, q, kv)
            is_tensor = isinstance(result, Tensor)
            dims = zip(reversed(result.shape), reversed(score.shape), strict=False) if is_tensor else ()
            fits = is_tensor and result.ndim <= score.ndim and all(a in (1, b) for a, b in dims)
            if not fits or not result.is_floating_point():
                kind = f"{result.dtype} of shape {tuple(result.shape)}" if is_tensor else type(result).__name__
                raise KernelError(
                    f"score_mod got scores of shape {tuple(score.shape)} and returned {kind}. It must return a"
                    f" floating-point tensor with a score for every pair. To hide pairs use a mask."
                )
            with mode:  # so that the mode knows the result as created inside
                score = result.expand(score.shape).to(score.dtype)
        return score


def score_function(function: Any) -> Elementwise:
    """Return a user's score_mod, callable on tiles; raise if it is no function of a score and a pair."""
    if not callable(function):
        raise KernelError(
            f"score_mod must be a function (score, b, h, q_idx, kv_idx) -> score, but got {type(function).__name__}."
        )
    check_signature(function, ("score", "b", "h", "q_idx", "kv_idx"), "score_mod", KernelError)
    return Elementwise(function, frozen(function))


# -- The pairs of one compute: mask function, score function, dropout --------------------------------------------------
# Kernels count local rows; here they become global positions.


MAX_CACHED = 32
"""Cached results of a mask's function: a kernel needs the same tiles again for the next heads."""


@dataclass(frozen=True, eq=False)
class TilePositions:
    """Global batch rows, heads and positions of the rows and columns that a compute's tiles count."""

    batch: Span
    heads: Span
    q: Ints
    kv: Ints
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """b, h, q and kv as tensors of four dims that broadcast."""

    @staticmethod
    def of(batch: Span, heads: Span, q: Ints, kv: Ints, device: torch.device) -> TilePositions:
        rows, columns = (np.arange(span.start, span.stop, dtype=np.int64) for span in (batch, heads))
        b, h, q_idx, kv_idx = (to_device(torch.from_numpy(n), device) for n in (rows, columns, q, kv))
        tensors = b[:, None, None, None], h[None, :, None, None], q_idx[None, None, :, None], kv_idx[None, None, None]
        return TilePositions(batch, heads, q, kv, tensors)

    def part(self, batch: Span, heads: Span) -> TilePositions:
        """Return the positions of some batch rows and heads, counted from the first."""
        b, h, q, kv = self.tensors
        tensors = b[batch.start : batch.stop], h[:, heads.start : heads.stop], q, kv
        rows = Span(self.batch.start + batch.start, self.batch.start + batch.stop)
        columns = Span(self.heads.start + heads.start, self.heads.start + heads.stop)
        return TilePositions(rows, columns, self.q, self.kv, tensors)

    def index(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (b, h, q_idx, kv_idx) of a tile's pairs, each of four dims that broadcast."""
        b, h, q, kv = self.tensors
        return b, h, q[:, :, tile.q0 : tile.q1], kv[..., tile.k0 : tile.k1]


class TilePairs:
    """The pairs of one compute, for kernels that honour functions of positions.

    Most kernels call `allowed_pairs`, `change`, `pull` and `factor`; `flex` runs the functions itself. `known` holds
    results that depend on the mask's functions.
    """

    def __init__(
        self,
        where: TilePositions,
        scoring: Scoring | None,
        predicate: Predicate | None,
        totals: Totals,
        known: dict[Any, Any] | None = None,
    ) -> None:
        self.where, self.scoring, self.predicate, self.totals = where, scoring, predicate, totals
        self.known: dict[Any, Any] = {} if known is None else known
        dropout = scoring is not None and scoring.dropout is not None
        self.features = Features(predicate is not None, scoring is not None, dropout)
        self._allowed: dict[Tile, Tensor] = {}

    def part(self, batch: Span, heads: Span) -> TilePairs:
        part = TilePairs(self.where.part(batch, heads), self.scoring, self.predicate, self.totals, self.known)
        part._allowed = self._allowed  # of one plane, for all heads
        return part

    def allowed_pairs(self, tile: Tile) -> Tensor:
        """Return (q, k) booleans: the result of the mask's function for a tile that asks, without bands."""
        assert self.predicate is not None, "only tiles of an opaque plane ask"
        if tile not in self._allowed:
            q, kv = self.where.q[tile.q0 : tile.q1], self.where.kv[tile.k0 : tile.k1]
            allowed = torch.from_numpy(np.array(self.predicate.allows(q[:, None], kv[None, :])))
            if len(self._allowed) >= MAX_CACHED:
                self._allowed.pop(next(iter(self._allowed)))
            self._allowed[tile] = to_device(allowed, self.where.tensors[0].device)
        return self._allowed[tile]

    def change(self, scores_BHqk: Tensor, tile: Tile) -> Tensor:
        """Return scaled scores after the score functions."""
        assert self.scoring is not None
        index = self.where.index(tile)
        scoring = self.scoring.detect_tile_support(scores_BHqk, *index)
        with torch.no_grad():
            return scoring.apply(scores_BHqk, *index)

    def pull(self, scores_BHqk: Tensor, tile: Tile) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the result of `change` and its backward, which also adds gradients of captured tensors to `totals`."""
        assert self.scoring is not None
        index = self.where.index(tile)
        scoring = self.scoring.detect_tile_support(scores_BHqk, *index)
        swap = Swap(scoring.captured, self.totals.values, by_element=scoring.broadcasts)
        with _torch.recording():
            leaf = scores_BHqk.detach().requires_grad_()
            changed = scoring.apply(leaf.clone(), *index, swap)  # a function may work in place

        def pulled(gradient: Tensor) -> Tensor:
            if not changed.requires_grad:
                return torch.zeros_like(gradient)
            leaves = [leaf, *(taken for _, _, taken in swap.taken)]
            with _torch.recording():
                first, *rest = torch.autograd.grad(changed, leaves, gradient, allow_unused=True)
            for (number, at, _), grad in zip(swap.taken, rest, strict=True):
                if grad is not None:
                    self.totals.add(number, at, grad)
            return torch.zeros_like(gradient) if first is None else first

        return changed, pulled

    def factor(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """Return (B, H, q, k) factors of probabilities for dropout, or None."""
        dropout = None if self.scoring is None else self.scoring.dropout
        return None if dropout is None else dropout.factor(*self.where.index(tile), dtype)
