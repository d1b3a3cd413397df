"""The interface of a kernel: (out, lse) for groups of tiles, and gradients from the global out and lse.

Shapes: B batch, H query heads, G key/value heads (H % G == 0), Q query rows, K key rows, D qk dim, E v dim; a small
q or k counts the rows of one tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from longspan import _torch
from longspan.spans import Span
from longspan.tile import Features, Tile

if TYPE_CHECKING:
    from longspan.masks import Predicate
    from longspan.scoring.captured import Totals
    from longspan.scoring.pipeline import Scoring, TilePositions


AMPERE = (8, 0)
"""The compute capability from which GPUs have bfloat16, and flash attention."""


class Pairs(Protocol):
    """The pairs of one compute, for kernels that honour functions of positions; q and k count the rows of a tile.

    `where`, `scoring`, `predicate`, `totals` and `known` are for kernels that take functions themselves instead of
    asking here.
    """

    @property
    def features(self) -> Features: ...

    @property
    def where(self) -> TilePositions:
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

    def part(self, batch: Span, heads: Span) -> Pairs:
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


@dataclass(eq=False, slots=True)  # frozen ones take three times as long to make
class TileWork:
    """What a kernel is given: tight tiles, and the tensors whose rows they count."""

    q_BHQD: Tensor
    k_BGKD: Tensor
    v_BGKE: Tensor
    tiles: Sequence[Tile]
    scale: float
    pairs: Pairs | None = None
    """None where nothing but bands matters."""


@dataclass(eq=False, slots=True)
class Upstream:
    """What backward begins with. `out` and `lse` are global, merged over all tiles and ranks."""

    dout_BHQE: Tensor
    out_BHQE: Tensor
    lse_BHQ: Tensor
    delta_BHQ: Tensor
    """rowsum(dout * out)."""


Group = tuple[Tile, ...]
"""Tiles whose results a kernel gives as one: the rows of the first, then those of the second, and so on."""


class Kernel(Protocol):
    """Attention of many tiles on one device. Tensors may be strided views; q, k and v share a dtype."""

    @property
    def name(self) -> str: ...

    @property
    def honours(self) -> Features:
        """What it can do beside plain attention over bands."""
        ...

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:
        """Why it cannot take these tensors, or None."""
        ...

    def groups(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> Sequence[Group]:
        """What the results of these tiles will be, for as many query and key rows. Known before anything is computed:
        where rows end up is worked out once for a plan, not in every call."""
        ...

    def forward(self, work: TileWork) -> Iterator[tuple[Tensor, Tensor]]:
        """(out_BHqE, lse_BHq) of every group.

        `out` is normalised within the tile, in the inputs' dtype or a wider one. `lse` is a natural logarithm in
        float32 (float64 for float64), -inf exactly where the tile's geometry, or the mask's function, leaves a row
        without a key; `out` is 0 there.
        """
        ...

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(dq_BHqD, dk_BGkD, dv_BGkE) of every group: what its tiles add to the gradients.

        Rows whose global lse is -inf add exact zeros.
        """
        ...


def one_by_one(tiles: Sequence[Tile]) -> Sequence[Group]:
    """Groups of a kernel that gives a result for each tile."""
    return [(tile,) for tile in tiles]


def gpu_refusal(like: Tensor, least: tuple[int, int]) -> str | None:
    """Why a kernel that needs an NVIDIA GPU of at least this compute capability cannot run where the tensor is."""
    if like.device.type != "cuda":
        return f"it runs on GPUs, and the tensors are on {like.device}"
    if (rocm := _torch.rocm()) is not None:
        return f"it was written for CUDA, and this PyTorch is built for ROCm {rocm}, on which nobody has tried it"
    capability = _torch.capability(like.device)
    if capability is not None and capability < least:
        have, need = ("{}.{}".format(*pair) for pair in (capability, least))
        return f"it needs a GPU of compute capability {need} or more, and that of {like.device} is {have}"
    return None


def in_vectors(x: Tensor, width: int, multiple: int) -> Tensor:
    """Last dim padded with zeros to `width`, which is a multiple of `multiple`, and contiguous; every row begins at a
    multiple of `multiple` numbers. Operators that read that many at once take all this for granted without looking.

    >>> in_vectors(torch.ones(1, 1, 4, 6), 8, 8).stride()
    (32, 32, 8, 1)
    >>> rows = torch.ones(1, 1, 4, 9)[..., 1:]
    >>> rows.stride(), in_vectors(rows, 8, 8).stride(), in_vectors(rows, 8, 1) is rows
    ((36, 36, 9, 1), (32, 32, 8, 1), True)
    """
    if x.shape[-1] < width:
        return torch.nn.functional.pad(x, (0, width - x.shape[-1])).contiguous()  # alone, it may keep heads innermost
    strides = x.stride()
    if strides[-1] == 1 and (multiple == 1 or _begin_at(x.storage_offset(), strides, x.shape, multiple)):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() would leave one that begins at an odd place


@lru_cache(maxsize=4096)
def _begin_at(offset: int, strides: tuple[int, ...], shape: tuple[int, ...], multiple: int) -> bool:
    begins = offset, *(stride for stride, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1)
    return all(begin % multiple == 0 for begin in begins)


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite. A sum that is finite says so; one that is not may have left the range.

    >>> finite(torch.tensor([3e38, 3e38])), finite(torch.tensor([torch.inf, -torch.inf]))
    (True, False)
    """
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())
