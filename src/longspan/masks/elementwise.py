"""Functions of single positions, called on whole tiles.

FlexAttention's functions are written for one pair, `f(b, h, q_idx, kv_idx)`. Most of them mean the same when they get
arrays that broadcast, which is fast. Some do not: `(q_idx >= starts).sum()` adds up the tile. So the two readings are
compared once, and where they differ the function is mapped over single pairs with `torch.vmap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary


MIXES = frozenset(
    "sum any all max min mean prod amax amin argmax argmin cumsum cumprod sort argsort topk unique nonzero count_nonzero"
    " matmul stack cat reshape view flatten squeeze unsqueeze permute transpose flip roll size numel norm".split()
)
"""What may mean one thing for a pair and another for a tile. A function that calls one of these is always mapped, even
if the sample agrees: `document(q) == document(kv)` is false nearly everywhere, however it is misread."""

_known: WeakKeyDictionary[Any, Elementwise] = WeakKeyDictionary()
"""What was found out before. A cache: it changes no result."""


def elementwise(function: Callable[..., Any]) -> Elementwise:
    """The function, callable on tiles; asked again, the same object."""
    try:
        return _known.setdefault(function, Elementwise(function))
    except TypeError:  # neither hashable nor weakly referable: find out again
        return Elementwise(function)


class Elementwise:
    """A function of a pair, on arguments that broadcast against each other.

    >>> import torch
    >>> starts = torch.tensor([0, 3, 5])
    >>> document = elementwise(lambda q, kv: (q >= starts).sum() == (kv >= starts).sum())
    >>> document(torch.arange(4)[:, None], torch.arange(4)).int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.broadcasts: bool | None = None
        """Whether arrays may be passed as they are; None until it was tried."""

    def __call__(self, *arguments: Any) -> Any:
        """The function's values, of the shape to which the tensors among the arguments broadcast."""
        if self.broadcasts is None:
            self.broadcasts = self._agrees(*_sampled(arguments))
        return self.function(*arguments) if self.broadcasts else self.mapped(*arguments)

    def mapped(self, *arguments: Any) -> Any:
        """Pair by pair, by way of vmap."""
        try:
            return self._mapped(*arguments)
        except Exception as error:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            error.add_note(
                f"{name} gives other values for arrays of positions than for single ones, so it was mapped over single"
                f" ones with torch.vmap. Write it with operations that work element by element."
            )
            raise

    def _mapped(self, *arguments: Any) -> Any:
        import torch

        shape = _shape(arguments)
        flat = [a.expand(shape).flatten() if _is_tensor(a) else a for a in arguments]
        dims = tuple(0 if _is_tensor(a) else None for a in arguments)
        return torch.vmap(self.function, in_dims=dims)(*flat).unflatten(0, shape)

    def _one_by_one(self, *arguments: Any) -> Any:
        """Pair by pair, in a loop: for functions that vmap cannot map, such as those that read numpy arrays."""
        import torch

        shape = _shape(arguments)
        flat = [a.expand(shape).flatten() if _is_tensor(a) else a for a in arguments]
        found = [self.function(*(a[i] if _is_tensor(a) else a for a in flat)) for i in range(math.prod(shape))]
        return torch.stack([torch.as_tensor(value) for value in found]).view(shape)

    def _agrees(self, *arguments: Any) -> bool:
        """Whether arrays give what single pairs give, as far as a sample tells and no function that is used mixes."""
        import torch

        if 0 in _shape(arguments):
            return True
        try:
            try:
                single = self._mapped(*arguments)
            except Exception:  # whatever the user's function raises inside vmap
                single = self._one_by_one(*arguments)
        except Exception:
            return True  # written for arrays and nothing else: there is no other reading
        called: set[str] = set()
        try:
            with _watch()(called):
                found = torch.as_tensor(self.function(*arguments))
        except (RuntimeError, IndexError):
            return False
        if called & MIXES or found.ndim > single.ndim:
            return False
        wide = found.to(single.device).expand(single.shape)
        return wide.dtype == single.dtype and bool(torch.isclose(wide, single, equal_nan=True).all())


@cache
def _watch() -> Any:
    """A context in which the names of torch functions that are called are noted. Torch is imported when first used."""
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __init__(self, called: set[str]) -> None:
            super().__init__()
            self.called = called

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.called.add(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    return Watch


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _shape(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    import torch

    return torch.broadcast_shapes(*(a.shape for a in arguments if _is_tensor(a)))


def _sampled(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A few indices along every dim: the ends, some in the middle, and neighbours."""
    import torch

    shape = _shape(arguments)
    picks: list[torch.Tensor] = []
    for dim, size in enumerate(shape):
        if dim < len(shape) - 2 and size > 3:  # batch rows and heads: three will do
            picks.append(torch.tensor([0, size // 2, size - 1]))
            continue
        wanted = [0, 1, 2, size // 3, size // 3 + 1, size // 2, size * 3 // 4, size - 2, size - 1]
        picks.append(torch.tensor(sorted({min(max(i, 0), size - 1) for i in wanted}) if size else [], dtype=torch.long))
    made: list[Any] = []
    for argument in arguments:
        if _is_tensor(argument):
            argument = argument.detach()
            for dim in range(argument.ndim):
                pick = picks[len(shape) - argument.ndim + dim]
                if argument.shape[dim] > 1:
                    argument = argument.index_select(dim, pick.to(argument.device))
        made.append(argument)
    return tuple(made)
