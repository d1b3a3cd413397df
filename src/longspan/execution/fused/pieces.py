"""The Triton kernels as functions of tensors, and when they are used."""

from __future__ import annotations

from collections.abc import Sequence
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
    _launch_merge((acc, top, num, out, lse), None, None)


def merge_rows(state: Sequence[Tensor], out: Tensor, lse: Tensor, here: Tensor, there: Tensor) -> None:
    """As `merge`: rows `there` of the state (acc, top, num) take up rows `here` of a partial."""
    _launch_merge((*state, out, lse), here, there)


def _launch_merge(tensors: Sequence[Tensor], here: Tensor | None, there: Tensor | None) -> None:
    from longspan.execution.fused.triton_kernels import merge_kernel

    acc, top, num, out, lse = tensors
    acc, out = _dense(acc), out if out.stride(3) == 1 else out.contiguous()
    batch, heads, rows, dim = acc.shape
    rows = rows if here is None else here.numel()
    strides = [stride for t in (acc, top, num, out, lse) for stride in t.stride()[:3]]
    grid, sizes = _grid(batch * heads, rows, dim)
    tables = (acc, acc) if here is None else (here, there)  # not looked at without tables
    launch: Any = merge_kernel[grid]
    launch(acc, top, num, out, lse, *tables, heads, rows, dim, *strides, BY_ROW=here is not None, **sizes)


Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""A source, a target, and the rows `here` of the one that become, or are added to, rows `there` of the other."""


def move_rows(source: Tensor, target: Tensor, here: Tensor, there: Tensor, *, adds: bool = False) -> None:
    """Rows `here` of a `(B, H, T, D)` tensor become, or are added to, rows `there` of another of the same B, H, D."""
    from longspan.execution.fused.triton_kernels import rows_kernel

    numbers, planes = _numbers((source, target, here, there))
    grid, sizes = _grid(planes, here.numel(), source.shape[3])
    launch: Any = rows_kernel[grid]
    launch(*numbers, ADDS=adds, **sizes)


def move_two(first: Rows, second: Rows, *, adds: bool = False) -> None:
    """Two moves that do not wait for each other in one launch."""
    from longspan.execution.fused.triton_kernels import two_rows_kernel

    both = [_numbers(rows) for rows in (first, second)]
    width = max(first[0].shape[3], second[0].shape[3])
    most = max(first[2].numel(), second[2].numel())
    _, sizes = _grid(1, most, width)
    programs = [
        -(-rows[2].numel() // sizes["ROWS"]) * planes for rows, (_, planes) in zip((first, second), both, strict=True)
    ]
    launch: Any = two_rows_kernel[(sum(programs),)]
    launch(*both[0][0], *both[1][0], programs[0], ADDS=adds, **sizes)


def _numbers(rows: Rows) -> tuple[list[Any], int]:
    """The arguments of one move, and how many batch rows and heads it goes over."""
    source, target, here, there = rows
    source, target = source if source.stride(3) == 1 else source.contiguous(), _dense(target)
    batch, heads, _, dim = source.shape
    strides = [*source.stride()[:3], *target.stride()[:3]]
    return [source, target, here, there, heads, here.numel(), dim, *strides], batch * heads


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
