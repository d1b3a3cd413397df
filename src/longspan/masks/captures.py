"""Snapshots of what a user's function reads, to notice changes.

Results that were computed for a mask with functions (plans, tile classes) are cached with a snapshot of what the
functions read, and dropped when a new snapshot differs. Backward calls functions again, so it compares snapshots too.

A snapshot is the trace of one call on one pair: the operations, with their numbers, and the tensors that come from
outside. Python code runs the same for all pairs, so whatever it reads (globals, attributes, entries, properties) shows
up in the trace if it has an effect:

    q - kv < self.width             sub(0, 1), lt(2, width = 3)
    ids[q] == ids[kv]               getitem(ids: identity and in-place version, 0), getitem(ids, 1), eq(2, 3)

A function that looks at values of tensors (`int(q)`, numpy) may take another path for the next pair, and tensors may be
created without an operation (`torch.from_numpy`, a compiled helper). For such functions, and for those that fail on a
single pair, variables and attributes that the code names are compared as well.
"""

from __future__ import annotations

import dis
import zlib
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar, cast
from weakref import ReferenceType, ref

import numpy as np

# -- Values in a snapshot, which keeps nothing alive -------------------------------------------------------------------

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic)


class TensorVersion(NamedTuple):
    """A tensor: a weak reference and PyTorch's count of in-place changes, or None and a checksum of its values."""

    tensor: ReferenceType[Any] | None
    version: int
    shape: tuple[int, ...]


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    checksum: int


class _Identity(NamedTuple):
    """An object of which only the identity is compared; a number where there can be no weak reference."""

    kind: str
    at: Any


def tensor_version(tensor: Any, by_value: bool = False) -> TensorVersion:
    if not by_value and not tensor.is_inference():
        return TensorVersion(ref(tensor), tensor._version, tuple(tensor.shape))
    import torch

    # Tensors of inference mode do not count their changes: compare their values, where that is cheap.
    version = 0
    if tensor.device.type == "cpu":
        version = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return TensorVersion(None if by_value else ref(tensor), version, tuple(tensor.shape))


def _array(array: Any) -> _Array:
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return _Array(array.shape, str(array.dtype), zlib.crc32(flat.view(np.uint8)) if array.dtype.kind != "O" else 0)


def _identity(value: Any) -> _Identity:
    try:
        return _Identity(type(value).__name__, ref(value))
    except TypeError:
        return _Identity(type(value).__name__, id(value))


def same(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, TensorVersion):
        if old.tensor is None or new.tensor is None:
            return old == new
        return old.tensor() is new.tensor() is not None and old.version == new.version
    if isinstance(old, _Identity) and callable(old.at) and callable(new.at):
        return old.at() is new.at() is not None
    if isinstance(old, tuple):
        items = cast("tuple[Any, ...]", old)
        return len(items) == len(new) and all(map(same, items, new))
    return bool(old == new) or (old != old and new != new)  # nan


def _describe_change(old: Any, new: Any) -> str:
    """
    >>> _describe_change(("lt", (0, 3)), ("lt", (0, 4)))
    '`lt` was called with 3 and is now called with 4'
    """
    (name, args), (new_name, new_args) = old, new
    if name != new_name or len(args) != len(new_args):
        return f"`{name}` was called where `{new_name}` is called now"
    before, now = next(pair for pair in zip(args, new_args, strict=True) if not same(*pair))
    if isinstance(before, TensorVersion) and isinstance(now, TensorVersion):
        is_same = before.tensor is not None and now.tensor is not None and before.tensor() is now.tensor() is not None
        if is_same or (before.tensor is None and before.shape == now.shape):
            return f"a tensor of shape {now.shape} was changed in place"
        return f"a tensor of shape {before.shape} is another one, of shape {now.shape}, now"
    if isinstance(before, _PLAIN) and isinstance(now, _PLAIN) and len(f"{before!r}{now!r}") < 80:
        return f"`{name}` was called with {before!r} and is now called with {now!r}"
    return f"an argument of `{name}` has changed"


# -- Traces: one call on one pair --------------------------------------------------------------------------------------

_METADATA = frozenset(
    ("__get__", "__len__", "dim", "ndimension", "numel", "nelement", "size", "stride", "is_floating_point",
     "is_complex", "is_contiguous", "element_size", "device", "get_device")
)  # fmt: skip
"""Operations without a tensor as a result that do not depend on values of tensors."""


class Trace(NamedTuple):
    """The operations of one call, each a name and its flattened arguments."""

    operations: tuple[tuple[str, tuple[Any, ...]], ...]
    tensors: tuple[TensorVersion, ...]
    """Tensors from outside, by first use."""
    looks_at_values: bool
    fails: bool


def trace(function: Any, arguments: tuple[Any, ...], by_value: frozenset[int] = frozenset()) -> Trace:
    """Call a function on one pair and return the trace. `by_value` are numbers of tensors to compare by value."""
    import torch

    tracer, fails = tracer_class()(arguments, by_value), False
    try:
        with torch.no_grad():
            with tracer:
                result = function(*arguments)
            tracer.finish(result)
    except Exception:  # whatever a user's function raises on one pair; the caller that needs its result meets it again
        fails = True
    return Trace(tuple(tracer.operations), tuple(tracer.tensors), tracer.looks_at_values, fails)


@cache
def tracer_class() -> Any:
    """Return the torch-function mode that records a trace; torch is imported when first used."""
    import torch
    from torch.overrides import TorchFunctionMode

    constants = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)

    class Tracer(TorchFunctionMode):
        def __init__(self, arguments: tuple[Any, ...], by_value: frozenset[int] = frozenset()) -> None:
            super().__init__()
            self.operations: list[tuple[str, tuple[Any, ...]]] = []
            self.tensors: list[TensorVersion] = []
            self.looks_at_values = False
            self._by_value = by_value
            self._known: dict[int, tuple[int, Any]] = {}  # holds tensors, so that no id is used again
            self._add(arguments)

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            flat: list[Any] = []
            self._flatten(args, flat)
            if kwargs:
                self._flatten(kwargs, flat)
            self.operations.append((name, tuple(flat)))
            result = call_on_pair(func, args, kwargs)
            if not self._add(result) and name not in _METADATA:
                self.looks_at_values = True
            return result

        def finish(self, result: Any) -> None:
            flat: list[Any] = []
            self._flatten(result, flat)
            self.operations.append(("return", tuple(flat)))

        def _add(self, value: Any) -> bool:
            """Number the tensors in a value; return whether there are any."""
            if isinstance(value, torch.Tensor):
                self._known.setdefault(id(value), (len(self._known), value))
                return True
            items = cast("list[Any]", value) if isinstance(value, tuple | list) else ()
            return sum(map(self._add, items)) > 0

        def _flatten(self, value: Any, flat: list[Any]) -> None:
            if isinstance(value, torch.Tensor):
                known = self._known.get(id(value))
                if known is None:
                    flat.append(tensor_version(value, len(self.tensors) in self._by_value))
                    self.tensors.append(flat[-1])
                    self._add(value)
                else:
                    flat.append(known[0])
            elif isinstance(value, constants):
                flat.append(value)
            elif isinstance(value, slice):
                bounds = cast("slice[Any, Any, Any]", value)
                self._flatten((bounds.start, bounds.stop, bounds.step), flat)
            elif isinstance(value, tuple | list):
                flat.append(len(cast("list[Any]", value)))
                for item in cast("list[Any]", value):
                    self._flatten(item, flat)
            elif isinstance(value, dict):
                self._flatten(list(cast("dict[Any, Any]", value).items()), flat)
            else:
                flat.append(_array(value) if isinstance(value, np.ndarray) else type(value).__name__)

    return Tracer


def call_on_pair(func: Any, args: Any, kwargs: Any) -> Any:
    """Return func(*args, **kwargs) without making the host wait for a device.

    Functions are tried on one pair, whose indices are tensors without dims. PyTorch fetches such an index from its
    device when it indexes another tensor, and does not do so for an index of one element.
    """
    import torch

    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(i, torch.Tensor) and i.device.type != "cpu" for i in index) and all(map(_is_integer, index)):
            return args[0][tuple(i.reshape(1) if isinstance(i, torch.Tensor) else i for i in index)].squeeze(0)
    return func(*args, **(kwargs or {}))


def _is_integer(index: Any) -> bool:
    """Return whether an index is one integer: an int, or a tensor without dims."""
    import torch

    if isinstance(index, torch.Tensor):
        return not index.ndim and index.dtype in (torch.int64, torch.int32)
    return isinstance(index, int) and not isinstance(index, bool)


# -- Values that a function's code names, for functions that a trace does not show -------------------------------------

DEPTH = 4
"""Steps from the function to what is compared."""
MANY = 64
"""Entries of a list or dict that are compared one by one."""
LIBRARIES = frozenset(("torch", "numpy", "math", "operator", "functools", "itertools", "typing", "builtins"))


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that code names, inner functions included."""
    return frozenset(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def values_of(function: Any) -> dict[str, Any]:
    """Return closure variables, defaults, globals and attributes that a function's code names, by path.

    >>> class Model: width = 3
    >>> model = Model()
    >>> values_of(lambda q: q < model.width)['model.width']
    3
    """
    import torch

    values: dict[str, Any] = {}
    seen: set[tuple[int, int]] = set()

    def visit(value: Any, path: str, names: frozenset[str], depth: int) -> None:
        if isinstance(value, _PLAIN):
            values[path] = value
        elif isinstance(value, torch.Tensor):
            values[path] = tensor_version(value)
        elif isinstance(value, np.ndarray):
            values[path] = _array(value)
        elif depth <= DEPTH and (id(value), id(names)) not in seen and not isinstance(value, BuiltinFunctionType):
            seen.add((id(value), id(names)))
            for part, part_path, part_names in parts(value, path, names):
                visit(part, part_path, part_names, depth + 1)

    def parts(value: Any, path: str, names: frozenset[str]) -> Iterator[tuple[Any, str, frozenset[str]]]:
        if isinstance(value, MethodType):
            yield value.__func__, path, names
            yield value.__self__, "self", _names_of(value)
        elif isinstance(value, partial):
            wrapped = cast("partial[Any]", value)
            yield wrapped.func, path, names
            yield [wrapped.args, wrapped.keywords], f"{path}()", _names_of(wrapped.func)
        elif isinstance(value, FunctionType):
            if not _is_library(value.__module__):
                values[f"{path}()"] = _identity(value.__code__)
                code, cells, names = value.__code__, value.__closure__ or (), _names_of(value)
                variables = {name: value.__globals__[name] for name in sorted(names & value.__globals__.keys())}
                variables |= {f"default {i}": item for i, item in enumerate(value.__defaults__ or ())}
                variables |= value.__kwdefaults__ or {}
                bound = zip(code.co_freevars, cells, strict=True)
                variables |= {name: cell.cell_contents for name, cell in bound if cell != CellType()}  # () is unbound
                yield from ((item, name, names) for name, item in variables.items())
        elif isinstance(value, list | tuple | set | frozenset):
            items = list(cast("list[Any]", value))
            if all(isinstance(item, _PLAIN) for item in items):
                values[path] = tuple(items) if isinstance(value, list | tuple) else frozenset(items)
            else:
                values[f"{path}[len]"] = len(items)
                yield from ((item, f"{path}[{number}]", names) for number, item in enumerate(items[:MANY]))
        elif isinstance(value, dict):
            items = list(cast("dict[Any, Any]", value).items())
            yield from ((item, f"{path}[{key!r}]", names) for key, item in items[:MANY])
        elif not _is_library(value.__name__ if isinstance(value, ModuleType) else type(value).__module__):
            size = len(values)
            call = None if isinstance(value, type | ModuleType) else getattr(value, "__call__", None)  # noqa: B004
            if isinstance(call, MethodType):
                yield call, path, names
            for name in sorted(names):
                try:
                    yield getattr(value, name), f"{path}.{name}", names
                except Exception:  # noqa: S112  # no such attribute, or a property that raises
                    continue
            if len(values) == size:
                values[path] = _identity(value)

    visit(function, "", frozenset(), 0)
    return values


def _names_of(function: Any) -> frozenset[str]:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return _names(code) if isinstance(code, CodeType) else frozenset()


def _is_library(module: Any) -> bool:
    return isinstance(module, str) and module.split(".", 1)[0] in LIBRARIES


# -- Snapshots ---------------------------------------------------------------------------------------------------------


class CaptureSnapshot:
    """A snapshot of what a function reads; holds no tensor and no array.

    >>> import torch
    >>> class Model: width = 3
    >>> model, pair = Model(), (torch.tensor(0), torch.tensor(0))
    >>> before = CaptureSnapshot.of(lambda q, kv: q - kv < model.width, pair)
    >>> model.width = 4
    >>> before.difference(CaptureSnapshot.of(lambda q, kv: q - kv < model.width, pair))
    '`lt` was called with 3 and is now called with 4'
    """

    def __init__(self, trace: Trace | None, values: dict[str, Any], ignored: frozenset[str] = frozenset()) -> None:
        self.trace, self.values, self.ignored = trace, values, ignored
        self.by_value = frozenset(() if trace is None else (i for i, t in enumerate(trace.tensors) if t.tensor is None))

    @staticmethod
    def of(
        function: Any, arguments: tuple[Any, ...] | None = None, before: CaptureSnapshot | None = None
    ) -> CaptureSnapshot:
        """Take a snapshot by a call with these arguments, or only of the values that the code names."""
        if arguments is None:
            return CaptureSnapshot(None, values_of(function))
        by_value = frozenset[int]() if before is None else before.by_value
        now = trace(function, arguments, by_value)
        # A tensor from outside that is already gone came from the call itself, by torch.from_numpy for example.
        gone = {i for i, t in enumerate(now.tensors) if t.tensor is not None and t.tensor() is None}
        if gone:
            now = trace(function, arguments, by_value | gone)
        if not (now.fails or now.looks_at_values or any(t.tensor is None for t in now.tensors)):
            return CaptureSnapshot(now, {})
        values = values_of(function)
        if before is not None:
            return CaptureSnapshot(now, values, before.ignored)
        trace(function, arguments)
        later = values_of(function)  # ignore what every call changes, such as a counter
        changed = (path for path in values | later if not same(values.get(path), later.get(path)))
        return CaptureSnapshot(now, later, frozenset(changed))

    def difference(self, now: CaptureSnapshot) -> str | None:
        """Return a description of what has changed, or None."""
        if self is now:
            return None
        if self.trace is not None and now.trace is not None and not (self.trace.fails and now.trace.fails):
            old_calls, calls = self.trace.operations, now.trace.operations
            for old, new in zip(old_calls, calls, strict=False):
                if not same(old, new):
                    return _describe_change(old, new)
            if len(old_calls) != len(calls):
                return f"it called {len(old_calls) - 1} operations and calls {len(calls) - 1} now"
        for path in self.values | now.values:
            if path in self.ignored or same(self.values.get(path, _GONE), now.values.get(path, _GONE)):
                continue
            old, new = self.values.get(path, _GONE), now.values.get(path, _GONE)
            if isinstance(old, _PLAIN) and isinstance(new, _PLAIN) and len(f"{old!r}{new!r}") < 80:
                return f"{path} was {old!r} and is {new!r}"
            return f"{path} was not there" if old is _GONE else f"{path} {'is gone' if new is _GONE else 'has changed'}"
        return None


_GONE = ()


# -- Functions with frozen closures ------------------------------------------------------------------------------------
# Closure variables that a loop rebinds later do not change the function.


def frozen(function: Any, within: tuple[int, ...] = ()) -> Any:
    """Return a copy of a function with its own closure variables; other callables as they are.

    Backward calls a function again after forward, and by then a loop over layers has gone on:

    >>> functions = [lambda: width for width in (1, 2)]
    >>> [function() for function in functions]
    [2, 2]
    >>> [frozen(lambda: width)() for width in (1, 2)]
    [1, 2]

    A function that assigns to its closure variables is not copied: others may read them.
    """
    if not isinstance(function, FunctionType) or not function.__closure__ or _writes(function.__code__):
        return function
    within = (*within, id(function))
    cells = [
        cell  # not bound yet, or a recursive function, which keeps its own
        if cell == CellType() or id(cell.cell_contents) in within
        else CellType(frozen(cell.cell_contents, within))
        for cell in function.__closure__
    ]
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


@lru_cache(maxsize=256)
def _writes(code: CodeType) -> bool:
    """Return whether the code binds a variable of the function around it."""
    return any(i.opname == "STORE_DEREF" and i.argval in code.co_freevars for i in dis.get_instructions(code))


# -- Caches that are valid as long as the snapshots are unchanged ------------------------------------------------------

T = TypeVar("T")


class Knowledge:
    """The last snapshots of a mask's functions, and what was computed since."""

    def __init__(self) -> None:
        self.readers: tuple[Any, ...] | None = None
        """Each function of the mask once, as a `functions.Reader`; None: not looked up yet."""
        self.reads: tuple[CaptureSnapshot, ...] = ()
        self.known: dict[Any, Any] = {}

    def refresh_captures(self) -> tuple[CaptureSnapshot, ...]:
        """Return snapshots of now: the same object if nothing changed; otherwise what is known is dropped."""
        now = self._read()
        if not self.reads or difference(self.reads, now) is not None:
            self._replace(now)
        return self.reads

    def change_since(self, reads: tuple[CaptureSnapshot, ...]) -> str | None:
        """Return what differs now from these snapshots, or None."""
        change = difference(reads, self._read()) if self.readers else None
        if change is None and reads is not self.reads:
            self._replace(reads)
        return change

    def _read(self) -> tuple[CaptureSnapshot, ...]:
        readers = self.readers or ()
        befores = self.reads or (None,) * len(readers)
        return tuple(reader.reads(before) for reader, before in zip(readers, befores, strict=True))

    def _replace(self, reads: tuple[CaptureSnapshot, ...]) -> None:
        self.reads = reads
        self.known.clear()
        for reader in self.readers or ():
            reader.device = None


class Memo:
    """Caches of one mask. Copies of the mask inside its plans share `state` but not `plans`, which would keep
    themselves alive. Not pickled with the mask."""

    def __init__(self) -> None:
        self.plans: dict[Any, Any] = {}
        self.state = Knowledge()

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()


def difference(then: tuple[CaptureSnapshot, ...], now: tuple[CaptureSnapshot, ...]) -> str | None:
    """Return a description of what has changed, or None."""
    if then is now:
        return None
    return next((change for a, b in zip(then, now, strict=True) if (change := a.difference(b)) is not None), None)


class ByIdentity(Generic[T]):
    """A dictionary key that compares an object by identity."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return id(self.value)
