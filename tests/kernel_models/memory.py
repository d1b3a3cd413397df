"""Tensors as GPU kernels see them: a pointer and the strides that a kernel uses, which need not be the tensor's own.

An operand's memory here has the tensor's own numbers where they lie, and NaN everywhere else: before it, after it, and
in between where it is a slice of something wider. A kernel that computes addresses in another way than the tensor is
laid out reads NaN, or numbers of other rows, or beyond the end, which is an error. What a kernel writes lands in memory
of NaN as well, and must be all of the result, once, and nothing else.
"""

from dataclasses import dataclass

import numpy as np
import torch

GUARD = 96
"""Numbers of NaN before and after."""
VECTOR = 16
"""Bytes that kernels read at once: pointers and strides must be multiples."""


class AddressError(AssertionError):
    """A kernel would read or write where it must not, or was given what it cannot read in vectors."""


@dataclass(frozen=True)
class Reads:
    """How a kernel finds the numbers of an operand, dim by dim.

    `strides` has a letter for each dim: `t`, taken from the tensor; `d`, taken for dense (the product of the sizes of
    all later dims), whatever the tensor says. `copied`: the operator makes the tensor contiguous first. `vectors`: read
    16 bytes at a time. `run`: rows are read in whole runs of so many numbers, which may reach behind the tensor, into
    memory that was allocated with it.
    """

    strides: str
    copied: bool = False
    vectors: bool = True
    run: int = 1


def _span(shape, strides):
    """Numbers from the first to the last, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _used(name, x, reads):
    assert len(reads.strides) == x.dim(), f"{name} has {x.dim()} dims"
    dense = [int(np.prod(x.shape[i + 1 :], dtype=np.int64)) for i in range(x.dim())]
    return tuple(dense[i] if how == "d" else x.stride(i) for i, how in enumerate(reads.strides))


def read(name, x, reads):
    """The numbers of an operand in float64, from the addresses that the kernel would read."""
    if reads.copied:
        x = x.contiguous()
    if not x.numel():
        raise AddressError(f"{name} is empty")
    strides = _used(name, x, reads)
    if reads.vectors:
        _check_vectors(name, x, strides)
    if reads.run > 1:
        _check_runs(name, x, reads.run)
    own = _span(x.shape, x.stride())
    memory = np.full(GUARD + own + GUARD, np.nan)
    _view(memory, GUARD, x.shape, x.stride())[...] = x.detach().double().numpy()
    last = GUARD + _span(x.shape, strides)
    if last > memory.size:
        raise AddressError(f"{name}: {last - GUARD - own} numbers beyond the end: {tuple(x.shape)} by {strides}")
    return _view(memory, GUARD, x.shape, strides).copy()


def _view(memory, start, shape, strides):
    size = memory.itemsize
    return np.lib.stride_tricks.as_strided(memory[start:], tuple(shape), tuple(size * stride for stride in strides))


def _check_vectors(name, x, strides):
    begins = (x.storage_offset(), *(stride for stride, n in zip(strides[:-1], x.shape[:-1], strict=True) if n > 1))
    if any(begin * x.element_size() % VECTOR for begin in begins):
        raise AddressError(f"{name}: rows begin at {begins}, which vectors of {VECTOR} bytes do not reach")


def _check_runs(name, x, run):
    """Rows are read to the end of their last run: that must lie in what was allocated."""
    last = x.storage_offset() + _span(x.shape[:-1], x.stride()[:-1]) - 1 + -(-x.shape[-1] // run) * run
    if last * x.element_size() > x.untyped_storage().nbytes():
        raise AddressError(f"{name}: runs of {run} reach beyond what was allocated")


def written(name, values, like, order=None, strides=None):
    """A tensor with these values, written by the kernel into memory of NaN.

    It is allocated dense, its dims in this order (the last varies fastest; dims as they are, if not given), and written
    by these strides, which are its own unless the kernel takes others for granted.
    """
    order = tuple(range(values.ndim)) if order is None else order
    own, step = [0] * values.ndim, 1
    for dim in reversed(order):
        own[dim], step = step, step * values.shape[dim]
    times = np.zeros(GUARD + step + GUARD, dtype=np.int64)
    np.add.at(times, _addresses(values.shape, strides or own).ravel() + GUARD, 1)
    if not (times[GUARD:-GUARD] == 1).all() or times[:GUARD].any() or times[-GUARD:].any():
        raise AddressError(f"{name}: {tuple(values.shape)} is not written once and whole by {strides or own}")
    memory = torch.full((GUARD + step + GUARD,), torch.nan, dtype=like)
    found = memory.as_strided(values.shape, own, GUARD)
    found.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return found


def _addresses(shape, strides):
    found = np.zeros(shape, dtype=np.int64)
    for dim, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        found += (np.arange(n) * stride).reshape([n if i == dim else 1 for i in range(len(shape))])
    return found


def like_input(x):
    """The order of dims in which `empty_like` lays out a tensor: that of the input's strides, largest first."""
    return tuple(sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), dim)))
