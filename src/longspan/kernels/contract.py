"""The interface of a kernel: (out, lse) for groups of tiles, and gradients from the global out and lse.

Shapes: B batch, H query heads, G key/value heads (H % G == 0), Q query rows, K key rows, D qk dim, E v dim; a small
q or k counts the rows of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from longspan import _torch
from longspan.tile import Features, Tile

if TYPE_CHECKING:
    from longspan.scoring.pipeline import TilePairs


AMPERE = (8, 0)
"""The compute capability from which GPUs have bfloat16, and flash attention."""


@dataclass(eq=False, slots=True)  # frozen ones take three times as long to make
class TileWork:
    """Input of a kernel: tight tiles, and the tensors whose rows they count."""

    q_BHQD: Tensor
    k_BGKD: Tensor
    v_BGKE: Tensor
    tiles: Sequence[Tile]
    scale: float
    pairs: TilePairs | None = None
    """None if there are only bands."""
    index: Mapping[object, Tensor] | None = None
    """The kernel's `index_arrays` on the device, by their names; None: the kernel copies them itself."""


@dataclass(eq=False, slots=True)
class Upstream:
    """Input of backward. `out` and `lse` are global, merged over all tiles and ranks."""

    dout_BHQE: Tensor
    out_BHQE: Tensor
    lse_BHQ: Tensor
    delta_BHQ: Tensor
    """rowsum(dout * out)."""


Group = tuple[Tile, ...]
"""Tiles whose results a kernel returns as one: the rows of the first, then those of the second, and so on."""


class Kernel(Protocol):
    """Attention of many tiles on one device. Tensors may be strided views; q, k and v share a dtype.

    A kernel may have `index_arrays(tiles, num_q, num_k, batch)`: int32 arrays by name that depend only on tiles. A plan
    copies them to the device with its own tables.
    """

    @property
    def name(self) -> str: ...

    @property
    def honours(self) -> Features:
        """Features beyond plain attention over bands."""
        ...

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:
        """Return why the kernel cannot take these tensors, or None."""
        ...

    def groups(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> Sequence[Group]:
        """Return the groups of these tiles, which do not depend on values: a plan computes once where rows go."""
        ...

    def forward(self, work: TileWork) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (out_BHqE, lse_BHq) of every group.

        `out` is normalised within the tile, in the inputs' dtype or a wider one. `lse` is a natural logarithm in
        float32 (float64 for float64), -inf exactly where the tile's geometry, or the mask's function, leaves a row
        without a key; `out` is 0 there.
        """
        ...

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (dq_BHqD, dk_BGkD, dv_BGkE) of every group, to be added to the gradients.

        Rows whose global lse is -inf add exact zeros.
        """
        ...


def one_by_one(tiles: Sequence[Tile]) -> Sequence[Group]:
    """Return one group for each tile."""
    return [(tile,) for tile in tiles]


def gpu_refusal(like: Tensor, least: tuple[int, int]) -> str | None:
    """Return why a kernel that needs an NVIDIA GPU of this compute capability cannot run on the tensor's device."""
    if like.device.type != "cuda":
        return f"it runs on GPUs, and the tensors are on {like.device}"
    if (rocm := _torch.rocm()) is not None:
        return f"it was written for CUDA, and this PyTorch is built for ROCm {rocm}, which is untested"
    capability = _torch.capability(like.device)
    if capability is not None and capability < least:
        have, need = ("{}.{}".format(*pair) for pair in (capability, least))
        return f"it needs a GPU of compute capability {need} or more, and that of {like.device} is {have}"
    return None


def pad_last_dim(x: Tensor, width: int, multiple: int) -> Tensor:
    """Pad the last dim with zeros to `width`, a multiple of `multiple`; the result has a contiguous last dim, and every
    row begins at a multiple of `multiple` numbers. Operators that read that many at once assume this unchecked.

    >>> pad_last_dim(torch.ones(1, 1, 4, 6), 8, 8).stride()
    (32, 32, 8, 1)
    >>> rows = torch.ones(1, 1, 4, 9)[..., 1:]
    >>> rows.stride(), pad_last_dim(rows, 8, 8).stride(), pad_last_dim(rows, 8, 1) is rows
    ((36, 36, 9, 1), (32, 32, 8, 1), True)
    """
    if x.shape[-1] < width:
        return torch.nn.functional.pad(x, (0, width - x.shape[-1])).contiguous()  # pad alone may keep heads innermost
    strides = x.stride()
    if strides[-1] == 1 and (multiple == 1 or _begin_at(x.storage_offset(), strides, x.shape, multiple)):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() would keep an unaligned start


@lru_cache(maxsize=4096)
def _begin_at(offset: int, strides: tuple[int, ...], shape: tuple[int, ...], multiple: int) -> bool:
    begins = offset, *(stride for stride, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1)
    return all(begin % multiple == 0 for begin in begins)
