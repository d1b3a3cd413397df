"""Tensors that a score function captures: find them, and give them gradients.

The function runs once on one pair under a torch-function mode: a tensor that it uses, that needs a gradient and that
was not created inside the call is captured, wherever it is stored (closure, global, module). When tiles run, a mode
replaces captured tensors by leaves, so that no tile's graph reaches outside its own call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longspan._torch import tree_map
from longspan.masks.captures import tracer_class
from longspan.tile import accumulation_dtype


def find_captured(call: Callable[[TorchFunctionMode], object]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the tensors from outside that a call under a mode uses and that need a gradient, by first use; and all.

    >>> slopes, table = torch.ones(3, requires_grad=True), torch.ones(3)
    >>> def call(mode):
    ...     with mode:
    ...         return slopes[0] * table[1] + slopes.sum()
    >>> [t is slopes for t in find_captured(call)[0]]
    [True]
    """
    tracer = tracer_class()(())
    with torch.enable_grad():
        call(tracer)
    used = [tensor for noted in tracer.tensors if (tensor := noted.tensor()) is not None]
    return tuple(tensor for tensor in used if tensor.requires_grad), used


class Swap(TorchFunctionMode):
    """Runs functions with leaves in place of the captured tensors.

    Elements taken out of a captured tensor by integer indices become leaves too: their gradient is added to the total
    element by element, where autograd would allocate a zero tensor of full size for every tile.
    """

    def __init__(self, captured: Sequence[Tensor], values: Sequence[Tensor], *, by_element: bool) -> None:
        super().__init__()
        self._leaves = {id(old): new.detach().requires_grad_() for old, new in zip(captured, values, strict=True)}
        self._number = {id(old): number for number, old in enumerate(captured)}
        self._by_element = by_element
        self.taken: list[tuple[int, Index | None, Tensor]] = [
            (number, None, self._leaves[key]) for key, number in self._number.items()
        ]
        """(number of the captured tensor, index or None for all of it, leaf)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        element = self._by_element and func is Tensor.__getitem__ and torch.is_grad_enabled()
        if element and id(args[0]) in self._leaves:
            index = _integers(args[1], args[0].ndim)
            if index is not None:
                leaf = self._leaves[id(args[0])].detach()[index].requires_grad_()
                self.taken.append((self._number[id(args[0])], index, leaf))
                return leaf
        args = [self._swapped(value) for value in args]
        return func(*args, **{name: self._swapped(value) for name, value in (kwargs or {}).items()})

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._leaves.get(id(value), value)
        return tree_map(self._swapped, value) if isinstance(value, tuple | list | dict) else value


Index = tuple[Tensor, ...]


def _integers(index: Any, ndim: int) -> Index | None:
    """Return an index of integers and integer tensors as tensors; None for any other index."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, int | Tensor) and not isinstance(i, bool) for i in parts) or len(parts) > ndim:
        return None
    if any(isinstance(i, Tensor) and (i.is_floating_point() or i.dtype == torch.bool) for i in parts):
        return None
    device = next((i.device for i in parts if isinstance(i, Tensor)), None)
    return tuple(torch.as_tensor(i, device=device) for i in parts)


class Totals:
    """The gradients of captured tensors, summed over tiles in float32 (float64 for float64)."""

    def __init__(self, captured: Sequence[Tensor]) -> None:
        self.values = tuple(t.detach() for t in captured)
        self.sums = [
            torch.zeros_like(t, dtype=accumulation_dtype(t.dtype), memory_format=torch.contiguous_format)
            for t in self.values
        ]

    def add(self, number: int, index: Index | None, gradient: Tensor) -> None:
        """Add a gradient of a whole captured tensor, or of the elements taken with an index."""
        total = self.sums[number]
        gradient = gradient.to(total.dtype)
        if index is None:
            total += gradient
            return
        rest = total.shape[len(index) :]
        at = torch.zeros((), dtype=torch.int64, device=total.device)
        for i, size in zip(index, total.shape, strict=False):
            at = at * size + torch.where(i < 0, i + size, i).to(total.device)
        total.view(-1, *rest).index_add_(0, at.flatten(), gradient.reshape(-1, *rest))


NO_TOTALS = Totals(())
