"""Call the Triton kernels on tensors: merging partial results, and moving and adding rows. Used on GPUs with Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

CELLS = 2048
"""Numbers of a tensor that one program works on: twice as many take all registers of a thread."""
KNOWN = 8192
"""So many sets of arguments are remembered: those of a plan are the same in every call."""
Ints = tuple[int, ...]


def is_fused(tensor: Tensor) -> bool:
    """Whether these kernels serve such a tensor: on NVIDIA's GPUs, with Triton."""
    return tensor.device.type == "cuda" and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return torch.version.hip is None and find_spec("triton") is not None


def merge(acc: Tensor, top: Tensor, num: Tensor, out: Tensor, lse: Tensor) -> None:
    """In place: the state of `(B, H, T, E)` rows takes up a partial over keys it has not seen."""
    _launch_merge((acc, top, num, out, lse), None, None)


def merge_rows(state: Sequence[Tensor], out: Tensor, lse: Tensor, here: Tensor, there: Tensor) -> None:
    """As `merge`: rows `there` of the state (acc, top, num) take up rows `here` of a partial."""
    _launch_merge((*state, out, lse), here, there)


def _launch_merge(tensors: Sequence[Tensor], here: Tensor | None, there: Tensor | None) -> None:
    from longspan.run.triton_kernels import merge_kernel

    acc, top, num, out, lse = tensors
    out = out if out.stride(3) == 1 else out.contiguous()
    rows = acc.shape[2] if here is None else here.numel()
    strides = acc.stride(), top.stride(), num.stride(), out.stride(), lse.stride()
    grid, numbers, sizes = _merge_arguments(acc.shape, rows, strides)
    tables = (acc, acc) if here is None else (here, there)  # not looked at without tables
    launch: Any = merge_kernel[grid]
    launch(acc, top, num, out, lse, *tables, *numbers, BY_ROW=here is not None, **sizes)


@lru_cache(maxsize=KNOWN)
def _merge_arguments(shape: Ints, rows: int, strides: tuple[Ints, ...]) -> tuple[tuple[int], Ints, dict[str, Any]]:
    """The grid of a merge, its numbers, and the sizes of a program. Statistics may have a last dim of one number."""
    batch, heads, _, dim = shape
    _check_dense(dim, strides[0])
    grid, sizes = _grid(batch * heads, rows, dim)
    return grid, (heads, rows, dim, *(stride for each in strides for stride in each[:3])), sizes


Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""A source, a target, and the rows `here` of the one that become, or are added to, rows `there` of the other."""


def move_rows(source: Tensor, target: Tensor, here: Tensor, there: Tensor, *, adds: bool = False) -> None:
    """Rows `here` of a `(B, H, T, D)` tensor become, or are added to, rows `there` of another of the same B, H, D."""
    from longspan.run.triton_kernels import rows_kernel

    source = source if source.stride(3) == 1 else source.contiguous()
    grid, numbers, sizes = _move_arguments(_sizes(source, target, here))
    launch: Any = rows_kernel[grid]
    launch(source, target, here, there, *numbers, ADDS=adds, **sizes)


def move_two(first: Rows, second: Rows, *, adds: bool = False) -> None:
    """Two moves that do not wait for each other in one launch."""
    from longspan.run.triton_kernels import two_rows_kernel

    source, target, here, there = first
    source2, target2, here2, there2 = second
    source = source if source.stride(3) == 1 else source.contiguous()
    source2 = source2 if source2.stride(3) == 1 else source2.contiguous()
    sizes_of_both = _sizes(source, target, here), _sizes(source2, target2, here2)
    grid, numbers, numbers2, programs, sizes = _arguments_of_two(*sizes_of_both)
    launch: Any = two_rows_kernel[grid]
    launch(
        source, target, here, there, *numbers, source2, target2, here2, there2, *numbers2, programs, ADDS=adds, **sizes
    )


Sizes = tuple[Ints, Ints, Ints, int]
"""Of a move: the shape and the strides of its source, the strides of its target, and how many rows it is of."""


def _sizes(source: Tensor, target: Tensor, here: Tensor) -> Sizes:
    return source.shape, source.stride(), target.stride(), here.numel()


@lru_cache(maxsize=KNOWN)
def _move_arguments(sizes: Sizes) -> tuple[tuple[int], Ints, dict[str, Any]]:
    (batch, heads, _, dim), source, target, rows = sizes
    _check_dense(dim, target)
    grid, of_program = _grid(batch * heads, rows, dim)
    return grid, (heads, rows, dim, *source[:3], *target[:3]), of_program


@lru_cache(maxsize=KNOWN)
def _arguments_of_two(first: Sizes, second: Sizes) -> tuple[tuple[int], Ints, Ints, int, dict[str, Any]]:
    """The grid, the numbers of either move, how many programs do the first, and the sizes of a program."""
    (_, numbers, _), (_, numbers2, _) = (_move_arguments(sizes) for sizes in (first, second))
    _, sizes = _grid(1, max(first[3], second[3]), max(first[0][3], second[0][3]))
    programs = [-(-rows // sizes["ROWS"]) * shape[0] * shape[1] for shape, _, _, rows in (first, second)]
    return (sum(programs),), numbers, numbers2, programs[0], sizes


def _check_dense(dim: int, strides: Ints) -> None:
    assert dim == 1 or strides[3] == 1, "rows that are written to are dense"  # of one number the stride says nothing


def _grid(planes: int, rows: int, dim: int) -> tuple[tuple[int], dict[str, Any]]:
    """Programs, all on the one axis that has room for billions, and the rows and features of each: powers of two."""
    width = 1 << (dim - 1).bit_length()
    height = max(1, min(CELLS // width, 1 << (max(rows, 1) - 1).bit_length()))
    # Products are rounded before they are added, as PyTorch's operators do it, whatever Triton's default is.
    return (-(-rows // height) * planes,), {"ROWS": height, "DIM": width, "enable_fp_fusion": False}
