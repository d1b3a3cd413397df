"""What the runner asks of a kernel: tiles in, one (out, lse) per tile out, and back from the global out and lse.

Shapes: B batch, H query heads, G key/value heads (H % G == 0), Q query rows, K key rows, D qk dim, E v dim; a small
q or k counts the rows of one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from longspan.span import Span

if TYPE_CHECKING:
    from longspan.execution.captured import Totals
    from longspan.execution.pairs import Where
    from longspan.execution.scores import Scoring
    from longspan.masks import Predicate


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows q0:q1 against key rows k0:k1 of the given tensors; row i and column j, counted inside the tile, may
    meet iff `lo <= i - j <= hi` (None: open) and, where the tile `asks`, the mask's function agrees.

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
        """The pairs inside a rectangle (same coordinates as q0..k1), tight; None where there is no pair.

        >>> Tile(0, 8, 0, 8, lo=0).part(4, 8, 0, 8)
        Tile(q0=4, q1=8, k0=0, k1=8, lo=-4, hi=None, asks=False)
        """
        shift = (q0 - self.q0) - (k0 - self.k0)
        lo = None if self.lo is None else self.lo - shift
        hi = None if self.hi is None else self.hi - shift
        return replace(self, q0=q0, q1=q1, k0=k0, k1=k1, lo=lo, hi=hi).tight()

    def tight(self) -> Tile | None:
        """The same pairs without rows and columns that meet nothing and without bounds that exclude nothing.

        Rows that see nothing come first (i < lo) or last (i > cols - 1 + hi), never in between, and so do columns:
        a tight tile has no row and no column without a partner, and `lo <= 0`.

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
        return replace(self, q0=q0, q1=q1, k0=k0, k1=k1, lo=lo, hi=hi)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a kernel beside plain attention over bands."""

    mask_function: bool = False
    """Some tiles ask: a function decides on their pairs."""
    score_function: bool = False
    """Scores are changed before the softmax, or probabilities after it."""
    dropout: bool = False
    """Probabilities are struck out after the softmax."""
    chunks: bool = False
    """A tile's bits must not depend on what lies beside it, or on the run."""

    def beyond(self, honoured: Asked) -> str | None:
        """What of this a kernel that honours so much does not do, or None."""
        if self.score_function and not honoured.score_function:
            return "it changes no scores, and a score function, a bias, a soft cap or dropout was given"
        if self.mask_function and not honoured.mask_function:
            return "it knows bands only, and the mask is decided by a function"
        if self.dropout and not honoured.dropout:
            return "it has no place for factors after the softmax, and dropout was given"
        if self.chunks and not honoured.chunks:
            return "nothing shows that its bits depend on the tile alone, which the plan's chunks promise"
        return None


PLAIN = Asked()
MASKS = Asked(mask_function=True)
MASKS_IN_CHUNKS = Asked(mask_function=True, chunks=True)
ALL = Asked(True, True, True, True)


class Pairs(Protocol):
    """The pairs of one compute, for kernels that honour functions of positions; q and k count the rows of a tile.

    `where`, `scoring`, `predicate`, `totals` and `known` are for kernels that take functions themselves instead of
    asking here.
    """

    @property
    def asked(self) -> Asked: ...

    @property
    def where(self) -> Where:
        """Batch rows, heads and positions that local numbers stand for."""
        ...

    @property
    def scoring(self) -> Scoring | None:
        """What happens to scores."""
        ...

    @property
    def predicate(self) -> Predicate | None:
        """What decides on the pairs of tiles that ask."""
        ...

    @property
    def totals(self) -> Totals:
        """Values of captured tensors, and where their gradients are summed up."""
        ...

    @property
    def known(self) -> dict[Any, Any]:
        """What was worked out from the mask's functions, and is kept as long as they read the same."""
        ...

    def part(self, rows: Span, heads: Span) -> Pairs:
        """Those of some batch rows and heads, counted from the first."""
        ...

    def allowed(self, tile: Tile) -> Tensor:
        """(q, k) booleans: what the mask's function says about a tile that asks; bands are not in it."""
        ...

    def change(self, scores_BHqk: Tensor, tile: Tile) -> Tensor:
        """Scaled scores after the score function."""
        ...

    def pull(self, scores_BHqk: Tensor, tile: Tile) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """`change`, and what turns a gradient of its result into one of the scores, summing up those of captured
        tensors on the way."""
        ...

    def factor(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """(B, H, q, k) factors of probabilities: dropout. None where there is none."""
        ...


class Kernel(Protocol):
    """Attention of many tiles on one device. Tensors may be strided views; q, k and v share a dtype."""

    @property
    def name(self) -> str: ...

    @property
    def honours(self) -> Asked:
        """What it can do beside plain attention over bands."""
        ...

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:
        """Why it cannot take these tensors, or None."""
        ...

    def forward(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        tiles: Sequence[Tile],
        scale: float,
        pairs: Pairs | None = None,
    ) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        """(tile, out_BHqE, lse_BHq) in the order given.

        `out` is normalised within the tile, in the inputs' dtype or a wider one. `lse` is a natural logarithm in
        float32 (float64 for float64), -inf exactly where the tile's geometry, or the mask's function, leaves a row
        without a key; `out` is 0 there. `pairs` is None where nothing but bands matters.
        """
        ...

    def backward(
        self,
        dout_BHQE: Tensor,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        out_BHQE: Tensor,
        lse_BHQ: Tensor,
        tiles: Sequence[Tile],
        scale: float,
        delta_BHQ: Tensor,
        pairs: Pairs | None = None,
    ) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
        """(tile, dq_BHqD, dk_BGkD, dv_BGkE): what each tile adds to the gradients, in the order given.

        `out` and `lse` are global, merged over all tiles and ranks, and `delta = rowsum(dout * out)`. Rows whose
        global lse is -inf add exact zeros.
        """
        ...


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite. A sum that is finite says so; one that is not may have left the range.

    >>> finite(torch.tensor([3e38, 3e38])), finite(torch.tensor([torch.inf, -torch.inf]))
    (True, False)
    """
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())
