"""What a function reads beside its arguments, and whether that has changed since.

Two ways together. The function is run on one pair under a torch-function mode that notes which tensors it uses,
wherever they are kept, and how often each was changed in place. And what its code names is looked up: variables around
it, globals, attributes and entries of what these hold; numbers are compared by value, numpy arrays by a checksum. What
is reached by neither (a number behind `getattr` of a computed name, a file, the clock) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

from longspan.masks.functions.values import GONE, Noted, noted, same, told, values_of

Run = Callable[[Any], object]
"""Runs the function on one pair under the given mode."""


class Reads:
    """What a function read at one moment. Holds no tensor and no array.

    >>> class Model: width = 3
    >>> model = Model()
    >>> before = Reads.of(lambda b, h, q, kv: q - kv < model.width)
    >>> model.width = 4
    >>> before.difference(Reads.of(lambda b, h, q, kv: q - kv < model.width))
    'model.width was 3 and is 4'
    """

    def __init__(
        self,
        tensors: tuple[Noted, ...] | None,
        values: dict[str, Any],
        fresh: frozenset[int] = frozenset(),
        own: tuple[str, ...] = (),
    ) -> None:
        self.tensors, self.values = tensors, values
        self.fresh, self.own = fresh, own
        """Which tensors every run makes anew, and how paths to what every run changes, a counter say, begin."""

    @staticmethod
    def of(function: Any, run: Run | None = None, before: Reads | None = None) -> Reads:
        """What it reads now. What it makes anew or changes itself in every run is told apart by running it once more,
        the first time."""
        if run is None:
            return Reads(None, values_of(function, with_tensors=True))
        tensors = tensors_of(run)
        values = values_of(function, with_tensors=tensors is None)
        if before is not None or tensors is None:
            fresh, own = (before.fresh, before.own) if before is not None else (frozenset[int](), ())
            return Reads(tensors, values, fresh, own)
        again = tensors_of(run) or ()
        pairs = enumerate(zip(tensors, again, strict=False))
        fresh = frozenset(i for i, (a, b) in pairs if a.tensor() is None or a.tensor() is not b.tensor())
        later = values_of(function, with_tensors=False)
        return Reads(tensors, later, fresh, _changed(values, later))

    def settled(self, function: Any) -> Reads:
        """The same after a pass in which the function ran: what has changed meanwhile, a list of what it has seen say,
        it changed itself, and backward may do so as well.

        >>> seen = []
        >>> def counts(b, h, q, kv): return seen.append(q) is None
        >>> before = Reads.of(counts, lambda finder: None)
        >>> counts(0, 0, 1, 1)
        True
        >>> now = Reads.of(counts, lambda finder: None)
        >>> before.difference(now), before.settled(counts).difference(now)
        ('seen has changed', None)
        """
        if self.tensors is None:
            return self
        later = values_of(function, with_tensors=False)
        new = tuple(path for path in _changed(self.values, later) if not path.startswith(self.own))
        return Reads(self.tensors, later, self.fresh, self.own + new) if new else self

    def difference(self, now: Reads) -> str | None:
        """What has changed, in words; None if nothing has."""
        if self is now:
            return None
        return self._of_tensors(now) or self._of_values(now)

    def _of_tensors(self, now: Reads) -> str | None:
        if self.tensors is None or now.tensors is None:
            return None
        if len(self.tensors) != len(now.tensors):
            return f"it used {len(self.tensors)} tensors and uses {len(now.tensors)}"
        for i, (old, new) in enumerate(zip(self.tensors, now.tensors, strict=True)):
            if i in self.fresh:
                continue
            if old.tensor() is not new.tensor() or old.tensor() is None:
                return f"a tensor of shape {old.shape} is another one, of shape {new.shape}, now"
            if old.version != new.version:
                return f"a tensor of shape {new.shape} was changed in place"
        return None

    def _of_values(self, now: Reads) -> str | None:
        for path in {**self.values, **now.values}:
            old, new = self.values.get(path, GONE), now.values.get(path, GONE)
            if not same(old, new) and not path.startswith(self.own):
                return f"{path} was not there" if old is GONE else f"{path} {told(old, new)}"
        return None


def _changed(values: dict[str, Any], later: dict[str, Any]) -> tuple[str, ...]:
    """How paths to values that differ later begin."""
    paths = (path for path in {**values, **later} if not same(values.get(path), later.get(path)))
    return tuple(path.removesuffix("len]") for path in paths)


def same_tensors(then: tuple[Noted, ...], now: tuple[Noted, ...]) -> bool:
    """Whether these are the same tensors, unchanged."""
    return len(then) == len(now) and all(map(same, then, now))


def tensors_of(run: Run) -> tuple[Noted, ...] | None:
    """The tensors that a run uses and did not make, by first use; None if it fails."""
    tensors, fails = tried(run)
    return None if fails else tensors


def tried(run: Run) -> tuple[tuple[Noted, ...], bool]:
    """The tensors that a run uses and did not make, by first use, and whether it fails."""
    import torch

    finder, fails = _finder()(), False
    try:
        with torch.no_grad():
            run(finder)
    except Exception:  # whatever a user's function raises on one pair; whoever calls it for its answers meets it again
        fails = True
    return tuple(finder.found), fails


@cache
def _finder() -> Any:
    """Torch is imported when first used."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Finder(TorchFunctionMode):
        """Notes tensors that come from outside."""

        def __init__(self) -> None:
            super().__init__()
            self.found: list[Noted] = []
            self._known: dict[int, Any] = {}  # kept, so that an id is not used again

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for value in _flat((args, kwargs or {})):
                if id(value) not in self._known:
                    self._known[id(value)] = value
                    self.found.append(noted(value))
            result = call_on_pair(func, args, kwargs)
            for value in _flat(result):
                self._known[id(value)] = value
            return result

    def _flat(value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            for item in cast("list[Any]", value):
                yield from _flat(item)
        elif isinstance(value, dict):
            yield from _flat(list(cast("dict[str, Any]", value).values()))

    return Finder


def call_on_pair(func: Any, args: Any, kwargs: Any) -> Any:
    """Return func(*args, **kwargs) without making the host wait for a device.

    Functions are tried on one pair, whose indices are tensors without dims. PyTorch fetches such an index from its
    device when it indexes another tensor, and does not do so for an index of one element.
    """
    import torch

    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(i, torch.Tensor) and i.device.type != "cpu" for i in index) and all(map(_is_number, index)):
            return args[0][tuple(i.reshape(1) if isinstance(i, torch.Tensor) else i for i in index)].squeeze(0)
    return func(*args, **(kwargs or {}))


def _is_number(index: Any) -> bool:
    """Whether an index is one whole number: an int, or a tensor without dims."""
    import torch

    if isinstance(index, torch.Tensor):
        return not index.ndim and index.dtype in (torch.int64, torch.int32)
    return isinstance(index, int) and not isinstance(index, bool)


def exclude_arguments(finder: Any, *arguments: Any) -> None:
    """Tells a finder the function's arguments, which do not count as read."""
    import torch

    for value in arguments:
        if isinstance(value, torch.Tensor):
            finder._known[id(value)] = value
