"""What a user's function reads besides its arguments, and whether it has changed since.

Results that were computed for a mask with functions (plans, tile classes) are cached with a snapshot of what the
functions read. They are dropped when the snapshot no longer matches.
"""

from __future__ import annotations

import builtins
import dis
import zlib
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar, cast
from weakref import ReferenceType, ref

import numpy as np

# -- Values that a function's code names -------------------------------------------------------------------------------
# These are closure variables, globals, and attributes and entries of them. A snapshot keeps nothing alive: it stores
# tensors by identity and by PyTorch's count of in-place changes, arrays by checksum, and numbers and strings by value.


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


# -- Reads: the tensors and values of one moment -----------------------------------------------------------------------
# Two methods are combined. The function runs on one pair under a torch-function mode that records which tensors it uses
# and how often each was changed in place. And the values that its code names are looked up. Values that neither method
# reaches (a number behind `getattr` of a computed name, a file, the clock) are not seen.


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


# -- Functions with frozen closures ------------------------------------------------------------------------------------
# Closure variables that a loop rebinds later do not change the function.


def frozen(function: Any, within: tuple[int, ...] = ()) -> Any:
    """A copy of a function with its own variables, for a call that comes later; other callables as they are.

    Backward calls a function again after forward, and by then a loop over layers has gone on:

    >>> functions = [lambda: width for width in (1, 2)]
    >>> [function() for function in functions]
    [2, 2]
    >>> [frozen(lambda: width)() for width in (1, 2)]
    [1, 2]

    A function that writes to its variables is left alone: others may read them.
    """
    if not isinstance(function, FunctionType) or not function.__closure__ or _writes(function.__code__):
        return function
    cells = tuple(_cell(cell, (*within, id(function))) for cell in function.__closure__)
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


def _cell(cell: CellType, within: tuple[int, ...]) -> CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # not bound yet
        return cell
    if isinstance(value, FunctionType):
        return cell if id(value) in within else CellType(frozen(value, within))  # one that calls itself, or another
    return CellType(value)


@lru_cache(maxsize=256)
def _writes(code: CodeType) -> bool:
    """Whether the code binds a variable of the function around it."""
    return any(i.opname == "STORE_DEREF" and i.argval in code.co_freevars for i in dis.get_instructions(code))


# -- Caches that are valid as long as the reads are unchanged ----------------------------------------------------------


T = TypeVar("T")
PAST = 8
"""How many past readings are remembered."""


class Knowledge:
    """What a mask's functions read when they were last looked at, and what was worked out from that."""

    def __init__(self) -> None:
        self.readers: tuple[Any, ...] | None = None
        """How its functions are called, each once; none for a structured mask. None: not looked for yet."""
        self.reads: tuple[Reads, ...] = ()
        self.known: dict[Any, Any] = {}
        self.past: list[tuple[Reads, ...]] = []

    def read_anew(self) -> tuple[Reads, ...]:
        """What functions read now: the same object as before if nothing changed; else all that is known is dropped."""
        now = self._now(self.reads)
        if not self.reads or difference(self.reads, now) is not None:
            self._take(now)
        self._note()
        return self.reads

    def settled(self) -> tuple[Reads, ...]:
        """What was read, after a pass in which functions ran; see `Reads.settled`."""
        after = tuple(reads.settled(reader.call) for reads, reader in zip(self.reads, self.readers or (), strict=False))
        if any(a is not b for a, b in zip(after, self.reads, strict=False)):
            self.reads = after
            self._note()
        return self.reads

    def _note(self) -> None:
        if not any(reads is self.reads for reads in self.past):
            self.past = [*self.past[1 - PAST :], self.reads]

    def change_since(self, reads: tuple[Reads, ...] | None) -> str | None:
        """What differs now from what was read then (None: in any forward pass of late), in words."""
        if not self.readers:
            return None
        change, now = None, self._now(self.reads)
        for then in self.past[::-1] if reads is None else (reads,):
            change = difference(then, now)
            if change is None:
                if then is not self.reads:
                    self._take(then)
                return None
        return change

    def _now(self, before: tuple[Reads, ...]) -> tuple[Reads, ...]:
        readers = self.readers or ()
        befores = before or (None,) * len(readers)
        return tuple(reader.reads(known) for reader, known in zip(readers, befores, strict=True))

    def _take(self, reads: tuple[Reads, ...]) -> None:
        self.reads = reads
        self.known.clear()
        for reader in self.readers or ():
            reader.device = None


class Memo:
    """A mask's own: copies of the mask in its plans share the state, but not the plans, which would keep themselves
    alive. It stays behind when a mask is copied or sent elsewhere."""

    def __init__(self) -> None:
        self.plans: dict[Any, Any] = {}
        self.state = Knowledge()

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()


def difference(then: tuple[Reads, ...], now: tuple[Reads, ...]) -> str | None:
    """What has changed, in words; None if nothing has."""
    if then is now:
        return None
    return next((change for a, b in zip(then, now, strict=True) if (change := a.difference(b)) is not None), None)


class ByIdentity(Generic[T]):
    """An object as a key: this one, not an equal one, so that looking it up costs nothing."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return id(self.value)
