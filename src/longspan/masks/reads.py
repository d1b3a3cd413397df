"""What a function reads beside its arguments, and whether that has changed since.

Two ways together. The function is run on one pair under a torch-function mode that notes which tensors it uses,
wherever they are kept, and how often each was changed in place. And what its code names is looked up: variables around
it, globals, attributes and entries of what these hold; numbers are compared by value, numpy arrays by a checksum. What
is reached by neither (a number behind `getattr` of a computed name, a file, the clock) is not seen.
"""

from __future__ import annotations

import dis
import zlib
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import numpy as np

DEPTH = 6
"""Steps from the function to what is looked at."""
MANY = 64
"""Entries of a list or dict that are followed one by one."""
LIBRARIES = frozenset(("torch", "numpy", "math", "builtins", "operator", "functools", "itertools", "typing"))
_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic)

Run = Callable[[Any], object]
"""Runs the function on one pair under the given mode."""


class Noted(NamedTuple):
    """A tensor that was used."""

    tensor: ReferenceType[Any]
    version: int
    shape: tuple[int, ...]


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
            return Reads(None, _values(function, with_tensors=True))
        tensors = tensors_of(run)
        values = _values(function, with_tensors=tensors is None)
        if before is not None or tensors is None:
            fresh, own = (before.fresh, before.own) if before is not None else (frozenset[int](), ())
            return Reads(tensors, values, fresh, own)
        again = tensors_of(run) or ()
        pairs = enumerate(zip(tensors, again, strict=False))
        fresh = frozenset(i for i, (a, b) in pairs if a.tensor() is None or a.tensor() is not b.tensor())
        later = _values(function, with_tensors=False)
        changed = [path for path in {**values, **later} if not _same(values.get(path), later.get(path))]
        return Reads(tensors, later, fresh, tuple(path.removesuffix("len]") for path in changed))

    def difference(self, now: Reads) -> str | None:
        """What is not as it was, in words; None if nothing is."""
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
            old, new = self.values.get(path, _GONE), now.values.get(path, _GONE)
            if not _same(old, new) and not path.startswith(self.own):
                return f"{path} was not there" if old is _GONE else f"{path} {_told(old, new)}"
        return None


class _Gone:
    def __repr__(self) -> str:
        return "gone"


_GONE = _Gone()


class _Array(NamedTuple):
    """An array: which one, and what is in it."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int


class _Object(NamedTuple):
    """Something of which only the identity is known."""

    kind: str
    at: Any
    """A weak reference where there can be one, else a number."""


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Noted) and isinstance(new, Noted):
        return old.tensor() is new.tensor() is not None and old.version == new.version
    if type(old) is not type(new):
        return False
    if isinstance(old, _Object) and isinstance(old.at, ref) and isinstance(new.at, ref):
        return old.at() is new.at() is not None
    return bool(old == new) or (old != old and new != new)  # nan


def _values(function: Any, *, with_tensors: bool) -> dict[str, Any]:
    """What a function's code names, by path."""
    walk = _Walk(with_tensors)
    walk.function(function, "", 0)
    return walk.found


def same_tensors(then: tuple[Noted, ...], now: tuple[Noted, ...]) -> bool:
    """Whether these are the same tensors, unchanged."""
    return len(then) == len(now) and all(map(_same, then, now))


def _told(old: Any, new: Any) -> str:
    plain = all(isinstance(value, _PLAIN) for value in (old, new))
    if plain and len(repr(old)) + len(repr(new)) < 80:
        return f"was {old!r} and is {new!r}"
    return "is gone" if new is _GONE else "has changed"


def tensors_of(run: Run) -> tuple[Noted, ...] | None:
    """The tensors that a run uses and did not make, by first use; None if it fails."""
    found, fails = tried(run)
    return None if fails else found


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
            result = func(*args, **(kwargs or {}))
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


def given(finder: Any, *arguments: Any) -> None:
    """Tells a finder what the function is called with: that is not read."""
    import torch

    for value in arguments:
        if isinstance(value, torch.Tensor):
            finder._known[id(value)] = value


def noted(tensor: Any) -> Noted:
    # Tensors of inference mode do not count their changes: what is in them is looked at, where that is cheap.
    if not tensor.is_inference():
        version: int = tensor._version
    elif tensor.device.type == "cpu":
        version = checksum(tensor.detach().numpy()) if tensor.dtype.itemsize != 2 else 0
    else:
        version = 0
    return Noted(ref(tensor), version, tuple(tensor.shape))


def checksum(array: Any) -> int:
    """Of all that is in an array."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


class _Names(NamedTuple):
    """What code names: globals, attributes, and texts and numbers that may be keys."""

    variables: frozenset[str]
    attributes: frozenset[str]
    keys: frozenset[Any]


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> _Names:
    variables: set[str] = set()
    attributes: set[str] = set()
    keys: set[Any] = {const for const in code.co_consts if isinstance(const, str | int)}
    for line in dis.get_instructions(code):
        if line.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(line.argval)
        elif line.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(line.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = _names(inner)
            variables |= found.variables
            attributes |= found.attributes
            keys |= found.keys
    return _Names(frozenset(variables), frozenset(attributes), frozenset(keys))


class _Walk:
    """Looks up what functions name, and notes values by the path to them."""

    def __init__(self, with_tensors: bool) -> None:
        import torch

        self.found: dict[str, Any] = {}
        self._tensor: Any = torch.Tensor
        self._with_tensors = with_tensors
        self._seen: set[tuple[int, int]] = set()
        self._names = _Names(frozenset(), frozenset(), frozenset())

    def function(self, function: Any, path: str, depth: int) -> None:
        """What a callable reads. Functions of libraries are left out: they read nothing of the user's."""
        if isinstance(function, MethodType):
            self.function(function.__func__, path, depth)
            self._inside(function.__func__, function.__self__, "self", depth)
        elif isinstance(function, partial):
            made = cast("partial[Any]", function)
            self.function(made.func, path, depth)
            self.value(list(made.args), f"{path}()", depth)
            self.value(made.keywords, f"{path}()", depth)
        elif isinstance(function, FunctionType):
            self._code(function, depth)
        elif callable(function) and not isinstance(function, BuiltinFunctionType | type):
            call = type(function).__call__
            if isinstance(call, FunctionType) and not _of_library(call.__module__):
                self._code(call, depth)
                self._inside(call, function, "self", depth)
            else:
                self.found[path or type(function).__name__] = _identity(function)

    def _code(self, function: FunctionType, depth: int) -> None:
        if depth > DEPTH or _of_library(function.__module__) or (id(function), 0) in self._seen:
            return
        self._seen.add((id(function), 0))
        outer, self._names = self._names, _names(function.__code__)
        try:
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                try:
                    self.value(cell.cell_contents, name, depth + 1)
                except ValueError:  # not bound yet
                    continue
            for number, value in enumerate(function.__defaults__ or ()):
                self.value(value, f"default {number} of {function.__name__}", depth + 1)
            for name, value in (function.__kwdefaults__ or {}).items():
                self.value(value, name, depth + 1)
            for name in sorted(self._names.variables):
                if name in function.__globals__:
                    self.value(function.__globals__[name], name, depth + 1)
        finally:
            self._names = outer

    def _inside(self, function: FunctionType, owner: object, path: str, depth: int) -> None:
        """What a method's code names of its owner."""
        if _of_library(function.__module__):
            return
        outer, self._names = self._names, _names(function.__code__)
        try:
            self.value(owner, path, depth + 1)
        finally:
            self._names = outer

    def value(self, value: Any, path: str, depth: int) -> None:
        """A value that is reached by a path."""
        if isinstance(value, _PLAIN):
            self.found[path] = value
        elif isinstance(value, self._tensor):
            if self._with_tensors:
                self.found[path] = noted(value)
        elif isinstance(value, np.ndarray):
            self.found[path] = _Array(value.shape, str(value.dtype), checksum(value) if value.dtype.kind != "O" else 0)
        elif depth <= DEPTH and (id(value), id(self._names)) not in self._seen:
            self._seen.add((id(value), id(self._names)))
            self._parts(value, path, depth)

    def _parts(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, FunctionType | MethodType | partial):
            self.found[path] = _identity(getattr(value, "__func__", value).__code__) if _has_code(value) else None
            self.function(value, path, depth)
        elif isinstance(value, list | tuple | set | frozenset):
            self._list(cast("list[Any]", value), path, depth)
        elif isinstance(value, dict):
            self._dict(cast("dict[Any, Any]", value), path, depth)
        elif isinstance(value, ModuleType):
            if not _of_library(value.__name__):
                self._attributes(vars(value), path, depth)
        else:
            self._object(value, path, depth)

    def _list(self, value: Any, path: str, depth: int) -> None:
        if all(isinstance(item, _PLAIN) for item in value):
            self.found[path] = tuple(value) if isinstance(value, list | tuple) else frozenset(value)
            return
        self.found[f"{path}[len]"] = len(value)
        for number, item in enumerate(value):
            if number == MANY:
                return
            self.value(item, f"{path}[{number}]", depth + 1)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> None:
        named = [key for key in value if isinstance(key, str | int) and key in self._names.keys]
        for key in named or list(value)[:MANY]:
            self.value(value[key], f"{path}[{key!r}]", depth + 1)

    def _object(self, value: Any, path: str, depth: int) -> None:
        """Attributes that the code names, of the object or of its class; of an object without any, which one it is."""
        size = len(self.found)
        places = [vars(value)] if hasattr(value, "__dict__") else []
        if not isinstance(value, type):
            # a module of PyTorch keeps its tensors and parts in three dicts
            places += [
                held for name in ("_parameters", "_buffers", "_modules") if (held := places and places[0].get(name))
            ]
        for place in places:
            self._attributes(place, path, depth)
        for kind in type(value).__mro__[:-1]:
            if not _of_library(kind.__module__):
                self._class(value, kind, path, depth)
        if len(self.found) == size:
            self.found[path] = _identity(value)

    def _attributes(self, place: Any, path: str, depth: int) -> None:
        for name in sorted(self._names.attributes):
            if name in place:
                self.value(place[name], f"{path}.{name}", depth + 1)

    def _class(self, owner: Any, kind: type, path: str, depth: int) -> None:
        for name in sorted(self._names.attributes):
            held = vars(kind).get(name, _GONE)
            if held is _GONE:
                continue
            method = held.fget if isinstance(held, property) else held
            if isinstance(method, FunctionType):
                self._code(method, depth + 1)
                self._inside(method, owner, path, depth + 1)
            elif type(held).__name__ == "member_descriptor":  # a slot
                self.value(getattr(owner, name, None), f"{path}.{name}", depth + 1)
            else:
                self.value(held, f"{path}.{name}", depth + 1)


def _has_code(value: Any) -> bool:
    return isinstance(getattr(value, "__func__", value), FunctionType)


def _of_library(module: Any) -> bool:
    return isinstance(module, str) and module.split(".", 1)[0] in LIBRARIES


def _identity(value: Any) -> _Object:
    try:
        return _Object(type(value).__name__, ref(value))
    except TypeError:
        return _Object(type(value).__name__, id(value))
