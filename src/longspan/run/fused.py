"""Launch the Triton kernels that merge partial results and copy or add rows. Used on GPUs with Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

CELLS = 2048
"""Elements per program: twice as many use all registers of a thread."""
KNOWN = 8192
"""Size of the caches of launch arguments: those of a plan are the same in every call."""
Ints = tuple[int, ...]


def is_fused(tensor: Tensor) -> bool:
    """Return whether these kernels support the tensor: on NVIDIA GPUs, with Triton."""
    return tensor.device.type == "cuda" and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return torch.version.hip is None and find_spec("triton") is not None


def merge(acc: Tensor, top: Tensor, num: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a partial result into the state of `(B, H, T, E)` rows, in place."""
    _launch_merge((acc, top, num, out, lse), None, None)


def merge_rows(state: Sequence[Tensor], out: Tensor, lse: Tensor, src_rows: Tensor, dst_rows: Tensor) -> None:
    """Merge rows `src_rows` of a partial result into rows `dst_rows` of the state (acc, top, num), in place."""
    _launch_merge((*state, out, lse), src_rows, dst_rows)


def _launch_merge(tensors: Sequence[Tensor], src_rows: Tensor | None, dst_rows: Tensor | None) -> None:
    from longspan.run.triton_kernels import merge_kernel

    acc, top, num, out, lse = tensors
    out = out if out.stride(3) == 1 else out.contiguous()
    rows = acc.shape[2] if src_rows is None else src_rows.numel()
    strides = acc.stride(), top.stride(), num.stride(), out.stride(), lse.stride()
    grid, numbers, sizes = _merge_arguments(acc.shape, rows, strides)
    tables = (acc, acc) if src_rows is None else (src_rows, dst_rows)  # unused without tables
    launch: Any = merge_kernel[grid]
    launch(acc, top, num, out, lse, *tables, *numbers, BY_ROW=src_rows is not None, **sizes)


@lru_cache(maxsize=KNOWN)
def _merge_arguments(shape: Ints, rows: int, strides: tuple[Ints, ...]) -> tuple[tuple[int], Ints, dict[str, Any]]:
    """Return the grid, the numeric arguments and the constants of a merge. Statistics may have a last dim of 1."""
    batch, heads, _, dim = shape
    _check_dense(dim, strides[0])
    grid, sizes = _grid(batch * heads, rows, dim)
    return grid, (heads, rows, dim, *(stride for each in strides for stride in each[:3])), sizes


Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""A source, a target, and the row numbers in each."""


def move_rows(source: Tensor, target: Tensor, src_rows: Tensor, dst_rows: Tensor, *, adds: bool = False) -> None:
    """Copy or add rows `src_rows` of a `(B, H, T, D)` tensor to rows `dst_rows` of another of the same B, H, D."""
    from longspan.run.triton_kernels import rows_kernel

    source = source if source.stride(3) == 1 else source.contiguous()
    grid, numbers, sizes = _move_arguments(_sizes(source, target, src_rows))
    launch: Any = rows_kernel[grid]
    launch(source, target, src_rows, dst_rows, *numbers, ADDS=adds, **sizes)


def move_two(first: Rows, second: Rows, *, adds: bool = False) -> None:
    """Run two independent moves in one launch."""
    from longspan.run.triton_kernels import two_rows_kernel

    source, target, src, dst = first
    source2, target2, src2, dst2 = second
    source = source if source.stride(3) == 1 else source.contiguous()
    source2 = source2 if source2.stride(3) == 1 else source2.contiguous()
    both = _sizes(source, target, src), _sizes(source2, target2, src2)
    grid, numbers, numbers2, programs, sizes = _arguments_of_two(*both)
    launch: Any = two_rows_kernel[grid]
    launch(source, target, src, dst, *numbers, source2, target2, src2, dst2, *numbers2, programs, ADDS=adds, **sizes)


Sizes = tuple[Ints, Ints, Ints, int]
"""Shape and strides of a move's source, strides of its target, and its number of rows."""


def _sizes(source: Tensor, target: Tensor, src_rows: Tensor) -> Sizes:
    return source.shape, source.stride(), target.stride(), src_rows.numel()


@lru_cache(maxsize=KNOWN)
def _move_arguments(sizes: Sizes) -> tuple[tuple[int], Ints, dict[str, Any]]:
    (batch, heads, _, dim), source, target, rows = sizes
    _check_dense(dim, target)
    grid, of_program = _grid(batch * heads, rows, dim)
    return grid, (heads, rows, dim, *source[:3], *target[:3]), of_program


@lru_cache(maxsize=KNOWN)
def _arguments_of_two(first: Sizes, second: Sizes) -> tuple[tuple[int], Ints, Ints, int, dict[str, Any]]:
    """Return the grid, the numeric arguments of both moves, the number of programs of the first, and constants."""
    (_, numbers, _), (_, numbers2, _) = (_move_arguments(sizes) for sizes in (first, second))
    _, sizes = _grid(1, max(first[3], second[3]), max(first[0][3], second[0][3]))
    programs = [-(-rows // sizes["ROWS"]) * shape[0] * shape[1] for shape, _, _, rows in (first, second)]
    return (sum(programs),), numbers, numbers2, programs[0], sizes


def _check_dense(dim: int, strides: Ints) -> None:
    assert dim == 1 or strides[3] == 1, "written rows must be dense"


def _grid(planes: int, rows: int, dim: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return a one-axis grid, which allows billions of programs, and rows and features per program (powers of 2)."""
    width = 1 << (dim - 1).bit_length()
    height = max(1, min(CELLS // width, 1 << (max(rows, 1) - 1).bit_length()))
    # Round products before they are added, as PyTorch's operators do, whatever Triton's default is.
    return (-(-rows // height) * planes,), {"ROWS": height, "DIM": width, "enable_fp_fusion": False}
