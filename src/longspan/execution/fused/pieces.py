"""The Triton kernels as functions of tensors, and when they are used."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

CELLS = 2048
"""Numbers of a tensor that one program works on: twice as many take all registers of a thread."""


def is_fused(tensor: Tensor) -> bool:
    """Whether these kernels serve such a tensor: on NVIDIA's GPUs, with Triton."""
    return tensor.device.type == "cuda" and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return torch.version.hip is None and find_spec("triton") is not None


def merge(acc: Tensor, top: Tensor, num: Tensor, out: Tensor, lse: Tensor) -> None:
    """In place: the state of `(B, H, T, E)` rows takes up a partial over keys it has not seen."""
    from longspan.execution.fused.triton_kernels import merge_kernel

    acc, out = _dense(acc), out if out.stride(3) == 1 else out.contiguous()
    batch, heads, rows, dim = acc.shape
    strides = [stride for t in (acc, top, num, out, lse) for stride in t.stride()[:3]]
    grid, sizes = _grid(batch * heads, rows, dim)
    launch: Any = merge_kernel[grid]
    launch(acc, top, num, out, lse, heads, rows, dim, *strides, **sizes)


def move_rows(source: Tensor, target: Tensor, here: Tensor, there: Tensor, *, adds: bool = False) -> None:
    """Rows `here` of a `(B, H, T, D)` tensor become, or are added to, rows `there` of another of the same B, H, D."""
    from longspan.execution.fused.triton_kernels import rows_kernel

    source, target = source if source.stride(3) == 1 else source.contiguous(), _dense(target)
    batch, heads, _, dim = source.shape
    strides = [stride for t in (source, target) for stride in t.stride()[:3]]
    grid, sizes = _grid(batch * heads, here.numel(), dim)
    launch: Any = rows_kernel[grid]
    launch(source, target, here, there, heads, here.numel(), dim, *strides, ADDS=adds, **sizes)


def _dense(tensor: Tensor) -> Tensor:
    last = tensor.stride(3) if tensor.shape[3] > 1 else 1  # of a single number the stride says nothing
    assert last == 1, "rows that are written to are dense"
    return tensor


def _grid(planes: int, rows: int, dim: int) -> tuple[tuple[int], dict[str, Any]]:
    """Programs, all on the one axis that has room for billions, and the rows and features of each: powers of two."""
    width = 1 << (dim - 1).bit_length()
    height = max(1, min(CELLS // width, 1 << (max(rows, 1) - 1).bit_length()))
    # Products are rounded before they are added, as PyTorch's operators do it, whatever Triton's default is.
    return (-(-rows // height) * planes,), {"ROWS": height, "DIM": width, "enable_fp_fusion": False}
