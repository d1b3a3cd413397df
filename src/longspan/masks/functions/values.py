"""Values that a function's code names: variables around it, globals, attributes and entries of what these hold.

Noted so that two moments can be compared, and without keeping anything alive: tensors by identity and by PyTorch's
count of changes in place, arrays by a checksum, numbers and texts by value.
"""

from __future__ import annotations

import builtins
import dis
import zlib
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import numpy as np

DEPTH = 6
"""Steps from the function to what is looked at."""
MANY = 64
"""Entries of a list or dict that are followed one by one."""
LIBRARIES = frozenset(("torch", "numpy", "math", "operator", "functools", "itertools", "typing"))
_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic)


class Noted(NamedTuple):
    """A tensor that was used."""

    tensor: ReferenceType[Any]
    version: int
    shape: tuple[int, ...]


class _Gone:
    def __repr__(self) -> str:
        return "gone"


GONE = _Gone()


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


def same(old: Any, new: Any) -> bool:
    if isinstance(old, Noted) and isinstance(new, Noted):
        return old.tensor() is new.tensor() is not None and old.version == new.version
    if type(old) is not type(new):
        return False
    if isinstance(old, _Object) and callable(old.at) and callable(new.at):
        return old.at() is new.at() is not None
    return bool(old == new) or (old != old and new != new)  # nan


def told(old: Any, new: Any) -> str:
    plain = all(isinstance(value, _PLAIN) for value in (old, new))
    if plain and len(repr(old)) + len(repr(new)) < 80:
        return f"was {old!r} and is {new!r}"
    return "is gone" if new is GONE else "has changed"


def values_of(function: Any, *, with_tensors: bool) -> dict[str, Any]:
    """What a function's code names, by path."""
    walk = _Walk(with_tensors)
    walk.function(function, "", 0)
    return walk.found


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
    """A checksum of all that is in an array."""
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return zlib.crc32(flat)


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
            names = _names(inner)
            variables |= names.variables
            attributes |= names.attributes
            keys |= names.keys
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
            wrapped = cast("partial[Any]", function)
            self.function(wrapped.func, path, depth)
            self.value(list(wrapped.args), f"{path}()", depth)
            self.value(wrapped.keywords, f"{path}()", depth)
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
            array: Any = cast(Any, value)
            self.found[path] = _Array(array.shape, str(array.dtype), checksum(array) if array.dtype.kind != "O" else 0)
        elif depth <= DEPTH and (id(value), id(self._names)) not in self._seen:
            self._seen.add((id(value), id(self._names)))
            self._parts(value, path, depth)

    def _parts(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, FunctionType | MethodType | partial):
            known = cast(Any, value)
            code: Any = getattr(getattr(known, "__func__", known), "__code__", None)
            self.found[path] = None if code is None else _identity(code)
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
            ordered = isinstance(value, list | tuple)
            self.found[path] = (tuple if ordered else frozenset)(cast("list[Any]", value))
            return
        self.found[f"{path}[len]"] = len(value)
        for number, item in enumerate(cast("list[Any]", value)):
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
        attributes: dict[str, Any] = dict(getattr(value, "__dict__", {}))
        self._attributes(attributes, path, depth)
        if not isinstance(value, type):  # a module of PyTorch keeps its tensors and parts in three dicts
            for name in ("_parameters", "_buffers", "_modules"):
                self._attributes(attributes.get(name) or {}, path, depth)
        hidden = set(attributes)
        kinds: tuple[type, ...] = type(cast(object, value)).__mro__
        for kind in kinds[:-1]:
            if getattr(builtins, kind.__name__, None) is not kind and not _of_library(kind.__module__):
                self._class(value, kind, hidden, path, depth)
            hidden |= set(vars(kind))
        if len(self.found) == size:
            self.found[path] = _identity(value)

    def _attributes(self, place: Any, path: str, depth: int) -> None:
        for name in sorted(self._names.attributes):
            if name in place:
                self.value(place[name], f"{path}.{name}", depth + 1)

    def _class(self, owner: Any, kind: type, hidden: set[str], path: str, depth: int) -> None:
        """What a class has for the object, but for names that the object, or a class before, has itself."""
        for name in sorted(self._names.attributes - hidden):
            attribute = vars(kind).get(name, GONE)
            if attribute is GONE:
                continue
            method = attribute.fget if isinstance(attribute, property) else attribute
            if isinstance(method, FunctionType):
                self._code(method, depth + 1)
                self._inside(method, owner, path, depth + 1)
            elif type(attribute).__name__ == "member_descriptor":  # a slot
                self.value(getattr(owner, name, None), f"{path}.{name}", depth + 1)
            else:
                self.value(attribute, f"{path}.{name}", depth + 1)


def _of_library(module: Any) -> bool:
    return isinstance(module, str) and module.split(".", 1)[0] in LIBRARIES


def _identity(value: Any) -> _Object:
    try:
        return _Object(type(value).__name__, ref(value))
    except TypeError:
        return _Object(type(value).__name__, id(value))
