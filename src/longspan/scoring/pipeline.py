"""Changes to scores between the product and the softmax, and to probabilities after it.

A score goes through the soft cap, then ALiBi, the relative bias and the bias tensor, then `score_mod`; the mask hides
pairs after that, and dropout acts on probabilities at the end. All of them get global positions. Tensors that score
functions capture get gradients (`Scoring.of`, `Swap`, `Totals`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from longspan.masks.functions import check_signature, explained, frozen, recorder_class
from longspan.masks.plane import Bools, ByIdentity
from longspan.spans import Ints, Span
from longspan.tile import Features, Tile, accumulation_dtype

# -- Captured tensors: their gradients ---------------------------------------------------------------------------------
# A tensor that a function uses, that needs a gradient and that was not created inside the call is captured, wherever it
# is stored (closure, global, module). When tiles run, a mode replaces captured tensors by leaves, so that no tile's
# graph reaches outside its own call.


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

    With `totals`, gradients of elements that are taken by integer indices are added there, as they come. Autograd would
    allocate a zero tensor of full size for every tile.
    """

    def __init__(self, captured: Sequence[Tensor], values: Sequence[Tensor], totals: Totals | None = None) -> None:
        super().__init__()
        self._number = {id(tensor): number for number, tensor in enumerate(captured)}
        self._totals = totals
        self.leaves = [value.detach().requires_grad_() for value in values]

    def run(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        with self:
            return function(*arguments)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and id(args[0]) in self._number and self._totals is not None:
            number, index = self._number[id(args[0])], _integers(args[1], args[0])
            if index is not None and args[0].numel():
                return _take(self.leaves[number], index, partial(self._totals.add_rows, number))
        args = [self._swap(value) for value in args]
        return func(*args, **{name: self._swap(value) for name, value in (kwargs or {}).items()})

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.leaves[self._number[id(value)]] if id(value) in self._number else value
        return tree_map(self._swap, value) if isinstance(value, tuple | list | dict) else value


Index = tuple[Tensor, ...]


def _integers(index: Any, table: Tensor) -> Index | None:
    """Return an index of integers and integer tensors as tensors; None for any other index."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, int | Tensor) and not isinstance(i, bool) for i in parts) or len(parts) > table.ndim:
        return None
    if any(isinstance(i, Tensor) and (i.is_floating_point() or i.dtype == torch.bool) for i in parts):
        return None
    return tuple(torch.as_tensor(i, device=table.device) for i in parts)


def _take(leaf: Tensor, index: Index, add: AddRows) -> Tensor:
    """Return the elements of a leaf at an index into its first dims."""
    at = torch.zeros((), dtype=torch.int64, device=leaf.device)
    for i, size in zip(index, leaf.shape, strict=False):
        at = at * size + torch.where(i < 0, i + size, i)
    rows = leaf.reshape(math.prod(leaf.shape[: len(index)]), -1)
    return _TakeRows.apply(rows, at, add).reshape((*at.shape, *leaf.shape[len(index) :]))


AddRows = Callable[[Tensor, Tensor], None]
"""(rows, their gradients)"""


class _TakeRows(torch.autograd.Function):
    """Rows of a matrix, whose gradients are passed to a function and not to autograd."""

    @staticmethod
    def forward(rows: Tensor, at: Tensor, add: AddRows) -> Tensor:  # noqa: ARG004
        return rows[at]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004
        _, at, ctx.add = inputs
        ctx.save_for_backward(at)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (at,) = ctx.saved_tensors
        ctx.add(at.flatten(), gradient.reshape(at.numel(), -1))
        return None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:  # type: ignore[override]  # noqa: ARG004
        rows, at, add = args
        return _TakeRows.apply(rows, at.movedim(in_dims[1], 0), add), 0


class Totals:
    """The gradients of captured tensors, summed over tiles in float32 (float64 for float64)."""

    def __init__(self, captured: Sequence[Tensor]) -> None:
        self.values = tuple(t.detach() for t in captured)
        self.sums = [
            torch.zeros_like(t, dtype=accumulation_dtype(t.dtype), memory_format=torch.contiguous_format)
            for t in self.values
        ]

    def add(self, number: int, gradient: Tensor) -> None:
        """Add a gradient of a captured tensor."""
        total = self.sums[number]
        total += gradient.to(total.dtype)

    def add_rows(self, number: int, rows: Tensor, gradients: Tensor) -> None:
        """Add gradients of some of the rows that the tensor's elements form, which may be listed twice."""
        total = self.sums[number]
        total.view(-1, gradients.shape[1]).index_add_(0, rows, gradients.to(total.dtype))


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
Call = Callable[..., Tensor]
"""(function, *arguments) -> result."""


def call_plainly(function: ScoreMod, *arguments: Tensor) -> Tensor:
    return function(*arguments)


@dataclass(frozen=True, eq=False)
class Scoring:
    """All changes to scores and probabilities in one call."""

    functions: tuple[ScoreMod, ...]
    captured: tuple[Tensor, ...] = ()
    """Tensors that the functions use and that need a gradient, in the order of first use."""
    dropout: Dropout | None = None
    constants: tuple[Tensor, ...] = ()
    """Other tensors that they use, saved for backward so that autograd notices changes."""
    like: Tensor | None = None
    """A score."""
    is_mapped: bool = False
    """Whether they are functions of single pairs, which `torch.vmap` runs on tiles."""

    @staticmethod
    def of(functions: Sequence[ScoreMod], dropout: Dropout | None, like: Tensor, *, is_mapped: bool) -> Scoring | None:
        """Build the scoring of functions in order; None if there is nothing to do."""
        if not functions and dropout is None:
            return None
        # One pair, with one dim: a GPU's index without dims would be fetched.
        score = torch.zeros(1, dtype=accumulation_dtype(like.dtype), device=like.device)
        index = torch.zeros(1, dtype=torch.int64, device=like.device)
        scoring, used = Scoring(tuple(functions), (), dropout, (), score, is_mapped), list[Tensor]()
        for _ in range(2):
            recorder = recorder_class()()
            scoring.on_tile(score, (index,) * 4, recorder.run)
            used = recorder.tensors
            if not any(tensor.requires_grad for tensor in used):
                break  # else again: the first call may have computed what the function keeps, and reads from now on
        check_derivatives(*used)
        captured = tuple(tensor for tensor in used if tensor.requires_grad)
        check_captured(captured)
        constants = tuple(tensor for tensor in used if not tensor.requires_grad and not tensor.is_inference())
        return replace(scoring, captured=captured, constants=constants)

    def on_tile(self, score: Tensor, index: Index, call: Call = call_plainly) -> Tensor:
        """Return the scores of a tile after every function; `call` calls them."""
        if not self.is_mapped:
            return self.apply(score, *index, call=call)

        def run(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return self.apply(score, b, h, q, kv, call)

        with explained("score_mod"):
            return _torch.map_pairs(run, score, *index)

    def apply(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, call: Call = call_plainly) -> Tensor:
        """Return scores after every function."""
        for function in self.functions:
            result = call(function, score, b, h, q, kv)
            is_tensor = isinstance(result, Tensor)
            dims = zip(reversed(result.shape), reversed(score.shape), strict=False) if is_tensor else ()
            fits = is_tensor and result.ndim <= score.ndim and all(a in (1, b) for a, b in dims)
            if not fits or not result.is_floating_point():
                kind = f"{result.dtype} of shape {tuple(result.shape)}" if is_tensor else type(result).__name__
                raise KernelError(
                    f"score_mod must return a floating-point tensor with one score for a pair, but it returned {kind}."
                    f" To hide pairs use a mask."
                )
            score = result.expand(score.shape).to(score.dtype)
        return score


def score_function(function: Any) -> ScoreMod:
    """Return a copy of a user's score_mod; raise if it is no function of a score and a pair."""
    if not callable(function):
        raise KernelError(
            f"score_mod must be a function (score, b, h, q_idx, kv_idx) -> score, but got {type(function).__name__}."
        )
    check_signature(function, ("score", "b", "h", "q_idx", "kv_idx"), "score_mod", KernelError)
    return frozen(function)


# -- The pairs of one compute: mask function, score function, dropout --------------------------------------------------
# Kernels count local rows; here they become global positions.


MAX_CACHED = 32
"""Results of a mask's function on a device: a kernel needs the same tiles again for the next heads."""
MAX_ANSWERS = 1024
"""Results of a mask's functions on the host."""


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
        if tile not in self._allowed:
            allowed = torch.from_numpy(self._answers(self.where.q[tile.q0 : tile.q1], self.where.kv[tile.k0 : tile.k1]))
            if len(self._allowed) >= MAX_CACHED:
                self._allowed.pop(next(iter(self._allowed)))
            self._allowed[tile] = to_device(allowed, self.where.tensors[0].device)
        return self._allowed[tile]

    def _answers(self, q: Ints, kv: Ints) -> Bools:
        """Call the mask's function on rows and columns. Its answers are kept as bits: every layer needs them."""
        assert self.predicate is not None, "only tiles of an opaque plane ask"
        kept: dict[Any, Any] = self.known.setdefault("answers", {})
        key = ByIdentity(self.predicate), q.tobytes(), kv.tobytes()
        if key not in kept:
            if len(kept) >= MAX_ANSWERS:
                kept.pop(next(iter(kept)))
            kept[key] = np.packbits(self.predicate.allows(q[:, None], kv[None, :]))
        return np.unpackbits(kept[key], count=len(q) * len(kv)).view(np.bool_).reshape(len(q), len(kv))

    def change(self, scores_BHqk: Tensor, tile: Tile) -> Tensor:
        """Return scaled scores after the score functions."""
        assert self.scoring is not None
        with torch.no_grad():
            return self.scoring.on_tile(scores_BHqk, self.where.index(tile))

    def pull(self, scores_BHqk: Tensor, tile: Tile) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the result of `change` and its backward, which also adds gradients of captured tensors to `totals`."""
        assert self.scoring is not None
        swap = Swap(self.scoring.captured, self.totals.values, self.totals)
        with _torch.recording():
            leaf = scores_BHqk.detach().requires_grad_()
            scores = leaf.clone()  # a function may work in place
            changed = self.scoring.on_tile(scores, self.where.index(tile), swap.run)

        def pulled(gradient: Tensor) -> Tensor:
            if not changed.requires_grad:
                return torch.zeros_like(gradient)
            with _torch.recording():
                first, *rest = torch.autograd.grad(changed, [leaf, *swap.leaves], gradient, allow_unused=True)
            for number, grad in enumerate(rest):
                if grad is not None:
                    self.totals.add(number, grad)
            return torch.zeros_like(gradient) if first is None else first

        return changed, pulled

    def factor(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """Return (B, H, q, k) factors of probabilities for dropout, or None."""
        dropout = None if self.scoring is None else self.scoring.dropout
        return None if dropout is None else dropout.factor(*self.where.index(tile), dtype)
