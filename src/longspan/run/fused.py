"""Launch the Triton kernels that move rows, merge partial results and sum products. Used on GPUs with Triton."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

CELLS = 2048
"""Elements per program: twice as many use all registers of a thread."""
KNOWN = 8192
"""Size of the caches of launch arguments: those of a plan are the same in every call."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Words as which rows are copied, by their bytes."""
VECTOR = 16
"""Bytes that a thread reads at once."""
Ints = tuple[int, ...]


@lru_cache(maxsize=64)
def is_fused(device: torch.device) -> bool:
    """Return whether these kernels run on the device: NVIDIA GPUs, with Triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return sys.modules.get("triton", ...) is not None and find_spec("triton") is not None


class Lines(NamedTuple):
    """Lines of a table of runs, for one launch."""

    low: int
    high: int
    """One more than the last line."""
    first: int
    """The first program of the first line."""
    programs: int
    rows: int
    """Rows per program, a power of 2."""
    unit: int
    """Largest power of 2, up to VECTOR, that divides offsets and strides of parts of messages, in bytes."""

    @property
    def steps(self) -> int:
        """Steps of a binary search."""
        return (self.high - self.low - 1).bit_length()


class Place(NamedTuple):
    """A source or a target: a `(B, H, T, D)` tensor, or a message that contains it."""

    tensor: Tensor
    dtype: torch.dtype
    dim: int
    is_message: bool

    @property
    def form(self) -> tuple[torch.dtype, int, Ints | None]:
        return self.dtype, self.dim, None if self.is_message else self.tensor.stride()


Form = tuple[torch.dtype, int, Ints | None]
"""dtype, features, and strides in elements; None for parts of messages, which are contiguous."""


def rows_per_program(dim: int) -> int:
    return max(1, CELLS // _power(dim))


def move_rows(table: Tensor, lines: Lines, moves: Sequence[tuple[Place, Place]], kind: str, value: float = 0.0) -> bool:
    """Copy, add or fill (`kind`) rows between one or two pairs of source and target; for fills, both are the target.

    Return False, without a launch, if two moves convert between different dtypes.
    """
    moves = [(_dense(source), target) for source, target in moves]
    bits = VECTOR
    for move in moves:
        bits |= move[0].tensor.data_ptr() | move[1].tensor.data_ptr()
    forms = tuple(place.form for move in moves for place in move)
    arguments = _move_arguments(forms, gcd(bits, VECTOR, lines.unit), kind, lines.rows)
    if arguments is None:
        return False
    from longspan.run.triton_kernels import rows_kernel

    numbers, types, constants = arguments
    fill = _fill_bits(value, forms[0][0], types[1]) if kind == "fill" else 0
    pointers = [_pointer(place.tensor, dtype) for move in moves for place, dtype in zip(move, types, strict=True)]
    launch: Any = rows_kernel[(lines.programs,)]
    launch(
        table, lines.low, lines.high, lines.steps, lines.first, fill,
        *pointers[:2], *numbers[0], *pointers[-2:], *numbers[-1], **constants,
    )  # fmt: skip
    return True


@lru_cache(maxsize=KNOWN)
def _move_arguments(
    forms: tuple[Form, ...], unit: int, kind: str, rows: int
) -> tuple[list[Ints], tuple[torch.dtype, torch.dtype], dict[str, Any]] | None:
    """Return the numeric arguments of each move, the dtypes as which sources and targets are read and written, and the
    constants; None if dtypes differ between the moves."""
    strides = [_byte_strides(form) for form in forms]
    for each in strides:
        unit = gcd(unit, *each)
    for _, dim, form in forms[1::2]:
        assert dim == 1 or form is None or form[3] == 1, "written rows must be dense"
    chosen = _move_constants(tuple([(dtype, dim) for dtype, dim, _ in forms]), unit, kind, rows)
    if chosen is None:
        return None
    dims, as_types, constants = chosen
    numbers = [(dim, *source, *target) for dim, source, target in zip(dims, strides[::2], strides[1::2], strict=True)]
    return numbers, as_types, constants


@lru_cache(maxsize=KNOWN)
def _move_constants(
    rows_of: tuple[tuple[torch.dtype, int], ...], unit: int, kind: str, rows: int
) -> tuple[list[int], tuple[torch.dtype, torch.dtype], dict[str, Any]] | None:
    """Return what does not depend on the number of tokens: new plans have new strides, but the same constants."""
    moves = list(zip(rows_of[::2], rows_of[1::2], strict=True))
    types = {(source[0], target[0]) for source, target in moves}
    if kind != "add" and all(a == b for a, b in types):
        # Copies of words of any dtype are the same kernel. Rows are whole words, too. Words of fills hold a value.
        widest = max(4, *(source[0].itemsize for source, _ in moves))
        word = gcd(widest, unit, *(source[0].itemsize * source[1] for source, _ in moves))
        dims = [source[0].itemsize * source[1] // word for source, _ in moves]
        as_types = (WORDS[word], WORDS[word])
    elif len(types) == 1:
        dims = [source[1] for source, _ in moves]
        (as_types,) = types
    else:
        return None
    aligned = unit == VECTOR and all(dim % VECTOR == 0 for dim in dims)
    constants = {
        "KIND": {"copy": 0, "add": 1, "fill": 2}[kind], "ROWS": rows, "DIM": _power(max(dims)), "ALIGNED": aligned,
        "enable_fp_fusion": False,
    }  # fmt: skip
    return dims, as_types, constants


@lru_cache(maxsize=64)
def _fill_bits(value: float, dtype: torch.dtype, word: torch.dtype) -> int:
    """Return the value's bits, as often as they fit into a word."""
    assert word.itemsize >= dtype.itemsize, f"a value of {dtype} does not fit into {word}"
    return int(torch.full((8,), value, dtype=dtype).view(word)[0])


def merge_rows(table: Tensor, lines: Lines, state: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
    """Merge rows of a partial result into the state (acc, top, num), in place. All have four dims."""
    _launch_state(table, lines, state, out if out.stride(3) == 1 else out.contiguous(), lse, finishes=False)


def finish_rows(table: Tensor, lines: Lines, out: Tensor, lse: Tensor, state: Sequence[Tensor]) -> None:
    """Write the output and lse of rows of a state."""
    _launch_state(table, lines, state, out, lse, finishes=True)


def _launch_state(
    table: Tensor, lines: Lines, state: Sequence[Tensor], out: Tensor, lse: Tensor, *, finishes: bool
) -> None:
    from longspan.run.triton_kernels import state_kernel

    acc, top, num = state
    tensors = acc, top, num, out, lse
    forms = tuple((tensor.dtype, tensor.shape[3], tensor.stride()) for tensor in tensors)
    unit = gcd(acc.data_ptr() | out.data_ptr() | VECTOR, VECTOR)
    numbers, constants = _state_arguments(forms, unit, finishes, lines.rows)
    launch: Any = state_kernel[(lines.programs,)]
    launch(table, lines.low, lines.high, lines.steps, *tensors, *numbers, **constants)


@lru_cache(maxsize=KNOWN)
def _state_arguments(forms: tuple[Form, ...], unit: int, finishes: bool, rows: int) -> tuple[Ints, dict[str, Any]]:
    wide, dim, _ = forms[0]
    strides = [_byte_strides(form) for form in forms]
    for dtype, width, form in (forms[0], forms[3]):
        assert width == dim
        assert dim == 1 or (form is not None and form[3] == 1), f"rows of {dtype} must be dense"
    unit = gcd(unit, *strides[0], *strides[3])
    constants = {
        "FINISH": finishes, "TINY": torch.finfo(wide).tiny, "ROWS": rows, "DIM": _power(dim),
        # Round products before they are added, as PyTorch's operators do, whatever Triton's default is.
        "ALIGNED": unit == VECTOR and dim % VECTOR == 0, "enable_fp_fusion": False,
    }  # fmt: skip
    return (dim, *(stride for each in strides for stride in each)), constants


def sum_products(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rowsum(dout * out), (B, H, T, 1), computed in this dtype."""
    from longspan.run.triton_kernels import products_kernel

    dout, out = (x if x.stride(3) == 1 else x.contiguous() for x in (dout, out))
    batch, heads, tokens, dim = dout.shape
    sums = dout.new_empty((batch, heads, tokens, 1), dtype=dtype)
    if sums.numel():
        strides = [stride for x in (dout, out) for stride in _byte_strides((x.dtype, dim, x.stride()))]
        rows, unit = rows_per_program(dim), gcd(dout.data_ptr(), out.data_ptr(), *strides, VECTOR)
        launch: Any = products_kernel[(batch * heads * -(-tokens // rows),)]
        launch(
            dout, out, sums, tokens, heads, dim, *strides, ROWS=rows, DIM=_power(dim),
            ALIGNED=unit == VECTOR and dim % VECTOR == 0, enable_fp_fusion=False,
        )  # fmt: skip
    return sums


def _byte_strides(form: Form) -> Ints:
    """Return the strides of batch rows, heads and tokens in bytes; of parts of messages, only that of tokens."""
    dtype, dim, strides = form
    size = dtype.itemsize
    if strides is None:
        return 0, 0, dim * size
    return strides[0] * size, strides[1] * size, strides[2] * size


def _dense(place: Place) -> Place:
    if place.is_message or place.dim == 1 or place.tensor.stride(3) == 1:
        return place
    return place._replace(tensor=place.tensor.contiguous())


def _power(dim: int) -> int:
    return 1 << (dim - 1).bit_length()


def _pointer(tensor: Tensor, dtype: torch.dtype) -> Any:
    """Return an argument of a kernel that reads or writes the tensor's memory as another dtype."""
    if tensor.dtype == dtype:
        return tensor
    from triton import reinterpret

    return reinterpret(tensor, dtype)
