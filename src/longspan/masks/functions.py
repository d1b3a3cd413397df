"""Calling a user's function on tiles, and a mask function as the predicate of a plane."""

from __future__ import annotations

import hashlib
import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from longspan.errors import LongspanError, MaskError
from longspan.masks.captures import CaptureSnapshot, frozen, trace
from longspan.masks.plane import Bools, Combined, Plane, Predicate
from longspan.spans import Ints

# -- Calling functions of single pairs on whole tiles ------------------------------------------------------------------
# FlexAttention's functions are written for one pair, `f(b, h, q_idx, kv_idx)`. Most give the same results on arrays
# that broadcast, which is fast. Some do not: `(q_idx >= starts).sum()` sums over the tile. So a function is called on
# tiles only if its operations on them are known to be elementwise and a sample of single pairs gives the same results.
# An argument without dims is the same for all pairs of a tile, so any operation may use it: `ids[b]` reads a row for
# `ids[b][q_idx]`. Any other function is mapped over single pairs with `torch.vmap`, one dim at a time.


_PLAIN = """
add sub rsub mul div truediv floordiv rfloordiv rtruediv rdiv mod rmod remainder fmod floor_divide true_divide divide
multiply subtract radd rmul neg negative pos abs absolute sign sgn square sqrt rsqrt pow rpow reciprocal exp exp2 expm1
log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh sigmoid erf erfc relu gelu silu softplus elu
leaky_relu hardtanh clamp clamp_min clamp_max clip floor ceil round trunc frac lerp addcmul addcdiv hypot where
eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor logical_not
bitwise_and bitwise_or bitwise_xor bitwise_not and or xor invert rand ror rxor lshift rshift rlshift rrshift
maximum minimum fmax fmin max min isnan isinf isfinite isneginf isposinf isclose masked_fill nan_to_num
to type type_as float double half bfloat16 int long short bool detach clone contiguous
zeros_like ones_like full_like empty_like is_floating_point dim ndimension get getitem sinc logit copysign signbit
bucketize searchsorted isin take
"""
PLAIN = frozenset(_PLAIN.split())
"""Elementwise operations, by name without underscores; `max` and `min` only of two tensors (shapes tell)."""
LOOKUPS = frozenset({"bucketize", "searchsorted", "isin", "take"})
"""Of these, the operations that look values up in a whole tensor from outside."""
NEW = frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"})
"""Operations that do not read the values of their tensor; on tiles only for one number, which is the same for all."""

NO, YES, BY_SAMPLE = range(3)
"""Whether a function can be called on tiles. By a sample alone: its operations are not known, since it converts its
arguments to numpy arrays, and every tile is checked."""

_verdicts: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Which functions can be called on tiles, by which arguments have dims, and their operations then; a cache that keeps
no function alive."""


def note_operations(function: Any, snapshot: CaptureSnapshot) -> None:
    """Drop what is known of a function if it calls other operations than before: data may have changed its branch."""
    try:
        known = _verdicts.setdefault(function, {})
    except TypeError:  # neither hashable nor weakly referable: nothing is known
        return
    operations = None if snapshot.trace is None else [name for name, _ in snapshot.trace.operations]
    if "operations" not in known or known["operations"] != operations:
        known.clear()
        known["operations"] = operations


def check_signature(
    function: Callable[..., Any], names: tuple[str, ...], role: str, error: type[LongspanError]
) -> None:
    """Raise unless the function can be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*names)
    except TypeError as mismatch:
        raise error(
            f"{role} is called as {role}({', '.join(names)}), but the function takes {signature}. Give it these"
            f" {len(names)} arguments."
        ) from mismatch


_CONVERSIONS = (
    "vmap over calling .item()",
    "only one element tensors can be converted",
    "only integer tensors of a single element can be converted",
    "data pointer of Tensor that doesn't have storage",
)
"""What PyTorch says where a function converts a tensor of many values, or one of vmap, to a number or an array."""


class Elementwise:
    """A function of one pair, callable on arguments that broadcast against each other.

    `call` is called in place of `function`; whether it takes tiles is remembered for `function`.

    >>> import torch
    >>> starts = torch.tensor([0, 3, 5])
    >>> document = Elementwise(lambda q, kv: (q >= starts).sum() == (kv >= starts).sum())
    >>> document(torch.arange(4)[:, None], torch.arange(4)).int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    """

    def __init__(self, function: Any, call: Callable[..., Any] | None = None) -> None:
        self.function: Callable[..., Any] = function if call is None else call
        self._key = function
        self.broadcasts: bool | None = None
        """Whether the function takes tiles such as the last; None until it was tried."""
        self._by_sample = False
        try:
            self._verdicts = _verdicts.setdefault(function, {})
        except TypeError:  # neither hashable nor weakly referable: tried again next time
            self._verdicts: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's values, of the shape to which the tensors among the arguments broadcast."""
        shape = _shape(arguments)
        if math.prod(shape) > 1:
            self.settle(*arguments)
            if not self.broadcasts:
                return self.map_pairs(*arguments)
            try:
                if not self._by_sample:
                    return self.function(*arguments)
                answer = self.function(*(a.clone() if _is_tensor(a) else a for a in arguments))  # it may work in place
                self._check_halves(answer, arguments, shape)
                return answer
            except Exception as error:
                self._check_conversions(error)
                raise
        if 0 in shape:
            return self.function(*arguments)
        answer = self.function(*(a.reshape(()) if _is_tensor(a) else a for a in arguments))
        return answer.reshape(shape) if _is_tensor(answer) and answer.numel() == 1 else answer

    def note_operations(self, snapshot: CaptureSnapshot) -> None:
        """Drop what is known of the function if it calls other operations than before."""
        note_operations(self._key, snapshot)

    def settle(self, *arguments: Any) -> None:
        """Find out whether the function takes tiles, unless that is known or the arguments are one pair."""
        if math.prod(_shape(arguments)) > 1:
            have_dims = tuple(_has_dims(a) for a in arguments)
            if have_dims not in self._verdicts:
                self._verdicts[have_dims] = self._agrees(*_sample(arguments))
            self.broadcasts = self._verdicts[have_dims] != NO
            self._by_sample = self._verdicts[have_dims] == BY_SAMPLE

    def map_pairs(self, *arguments: Any) -> Any:
        """Call the function pair by pair, with vmap."""
        try:
            return self._map_dims(*arguments)
        except Exception as error:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            if "data-dependent control flow" in str(error):
                raise LongspanError(
                    f"{name} decides by `if`, `and`, `or` or `not` on values of positions or scores, but it is called"
                    f" with tensors of many. Write it with tensor operations: torch.where(condition, a, b), &, | and ~."
                ) from error
            self._check_conversions(error)
            error.add_note(
                f"{name} may give other values for arrays of positions than for single ones, so it was mapped over"
                f" single ones with torch.vmap. Write it with elementwise operations."
            )
            raise

    def _check_conversions(self, error: Exception) -> None:
        """Raise if the function converted its arguments to a Python number or a numpy array."""
        if isinstance(error, RuntimeError | TypeError | ValueError) and any(
            text in str(error) for text in _CONVERSIONS
        ):
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise LongspanError(
                f"{name} converts positions or scores to Python numbers or numpy arrays (.item(), int(), an index into"
                f" a list or an array, a function of math), but it is called with tensors of many. Write it with tensor"
                f" operations: table[q_idx] with a torch tensor, torch.sin(q_idx)."
            ) from error

    def _map_dims(self, *arguments: Any) -> Any:
        """Map the function over one dim after the other, so that what depends on the query alone is computed once for
        each query. An operation that changes an index in place may need all pairs in one dim."""
        import torch

        shape = _shape(arguments)
        nested = self.function
        for dim in range(-1, -1 - len(shape), -1):
            if shape[dim] > 1:
                varies = [_has_dims(a) and a.ndim >= -dim and a.shape[dim] > 1 for a in arguments]
                nested = torch.vmap(nested, in_dims=tuple(0 if v else None for v in varies))
        try:
            squeezed = (a.squeeze().clone() if _is_tensor(a) else a for a in arguments)  # it may work in place
            return nested(*squeezed).reshape(shape)
        except Exception:  # whatever the user's function raises; if it does so for all pairs in one dim, it is raised
            _, flat = _flatten(arguments)
            dims = tuple(0 if _is_tensor(a) else None for a in arguments)
            return torch.vmap(self.function, in_dims=dims)(*flat).unflatten(0, shape)

    def _one_by_one(self, *arguments: Any) -> Any:
        """Call the function in a loop, if vmap cannot map it: functions that read numpy arrays, for example."""
        import torch

        shape, flat = _flatten(arguments)
        answers = [self.function(*(a[i] if _is_tensor(a) else a for a in flat)) for i in range(math.prod(shape))]
        return torch.stack([torch.as_tensor(value) for value in answers]).view(shape)

    def _check_halves(self, answer: Any, arguments: Any, shape: tuple[int, ...]) -> None:
        """Raise if the function gives other values for the halves of a tile than for the tile."""
        import torch

        if not isinstance(answer, torch.Tensor | np.ndarray | np.generic | int | float | complex):
            return  # the caller refuses that
        whole = torch.as_tensor(answer).expand(shape)
        for dim, size in enumerate(shape):
            for start, stop in ((0, size // 2), (size // 2, size)) if size > 1 else ():
                axis = dim - len(shape)
                half = [a.clone() if _is_tensor(a) else a for a in arguments]  # it may work in place
                for i, a in enumerate(half):
                    if _is_tensor(a) and a.ndim >= -axis and a.shape[axis] > 1:
                        half[i] = a.narrow(axis, start, stop - start)
                expected = whole.narrow(dim, start, stop - start)
                if not torch.isclose(torch.as_tensor(self.function(*half)), expected, equal_nan=True).all():
                    name = getattr(self.function, "__name__", type(self.function).__name__)
                    raise LongspanError(
                        f"{name} must treat each pair separately, but it gives other values for {shape} pairs than for"
                        f" a half of them: it converts positions or scores to numpy arrays, and combines their values."
                        f" Write it with tensor operations, as in torch.isin(kv_idx, tokens)."
                    )

    def _agrees(self, *arguments: Any) -> int:
        """Return whether arrays give the results of single pairs, judged by a sample and by the operations used."""
        import torch

        if 0 in _shape(arguments):
            return YES
        can_map = True
        try:
            try:
                single = self._map_dims(*arguments)
            except Exception:  # whatever the user's function raises inside vmap
                single, can_map = self._one_by_one(*arguments), False
        except Exception:
            return BY_SAMPLE  # it only works on arrays
        watch = _mixing_mode()(arguments)
        try:
            with watch:
                answer = self.function(*arguments)
            if not isinstance(answer, torch.Tensor | np.ndarray | np.generic | int | float | complex):
                return YES  # the caller refuses that
            answer = torch.as_tensor(answer)
        except (RuntimeError, IndexError):
            return NO
        except (TypeError, ValueError) as error:
            self._check_conversions(error)
            raise
        if (watch.mixes and can_map) or answer.ndim > single.ndim:
            return NO
        answer = answer.to(single.device).expand(single.shape)
        if answer.dtype != single.dtype or not torch.isclose(answer, single, equal_nan=True).all():
            return NO
        return YES if can_map else BY_SAMPLE


@cache
def _mixing_mode() -> Any:
    """Return the mode that notes whether operations may mix elements of a tile; torch is imported when first used."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Mixing(TorchFunctionMode):
        def __init__(self, arguments: tuple[Any, ...]) -> None:
            super().__init__()
            self.mixes = False
            self._tiles = {id(a): a for a in arguments if _has_dims(a)}

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            values = _flat((args, kwargs or {}), torch.Tensor)
            tiles = [value for value in values if id(value) in self._tiles]
            if tiles:
                name = getattr(func, "__name__", "")
                in_place = name.endswith("_") and not name.endswith("__")  # x.add_(1) would change later operations
                self.mixes |= in_place or not self._is_elementwise(name.strip("_"), args, values, tiles, result)
                self._tiles.update((id(r), r) for r in _flat(result, torch.Tensor))
            return result

        def _is_elementwise(self, name: str, args: Any, values: list[Any], tiles: list[Any], result: Any) -> bool:
            if name in NEW:
                return not result.ndim
            if name not in PLAIN or (name in LOOKUPS and len(tiles) > 1):
                return False
            if name == "getitem":
                base, indices = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
                takes_elements = all(isinstance(i, int | torch.Tensor) for i in indices) and len(indices) == base.ndim
                if id(base) in self._tiles or not takes_elements:
                    return False
            elif name not in LOOKUPS and any(v.ndim and id(v) not in self._tiles for v in values):
                return False
            if isinstance(result, torch.Tensor):
                return tuple(result.shape) == np.broadcast_shapes(*(tuple(t.shape) for t in tiles))
            return isinstance(result, torch.Size) or not isinstance(result, tuple | list)

    return Mixing


def _flat(value: Any, kind: type) -> list[Any]:
    """Return the values of one type in nested arguments."""
    if isinstance(value, dict):
        return _flat(list(cast("dict[str, Any]", value).values()), kind)
    if isinstance(value, tuple | list):
        return [part for item in cast("list[Any]", value) for part in _flat(item, kind)]
    return [value] if isinstance(value, kind) else []


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _has_dims(value: Any) -> bool:
    return _is_tensor(value) and value.ndim > 0


def _shape(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(tuple(a.shape) for a in arguments if _is_tensor(a)))


def _flatten(arguments: tuple[Any, ...]) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of all pairs, and the arguments with one element for each of them."""
    shape = _shape(arguments)
    return shape, [a.expand(shape).flatten() if _is_tensor(a) else a for a in arguments]


def _sample(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take a few indices along every dim: the ends, some in the middle, and neighbours."""
    import torch

    shape = _shape(arguments)
    picks: list[Any] = []
    for dim, size in enumerate(shape):
        if dim < len(shape) - 2 and size > 3:  # three batch rows and heads will do
            wanted = [0, size // 2, size - 1]
        else:
            wanted = [0, 1, 2, size // 3, size // 3 + 1, size // 2, size * 3 // 4, size - 2, size - 1]
        picks.append(torch.tensor(sorted({min(max(i, 0), size - 1) for i in wanted}) if size else [], dtype=torch.long))
    samples: list[Any] = []
    for argument in arguments:
        if _is_tensor(argument):
            argument = argument.detach()
            for dim in range(argument.ndim):
                if argument.shape[dim] > 1:
                    pick = picks[len(shape) - argument.ndim + dim]
                    argument = argument.index_select(dim, pick.to(argument.device))
        samples.append(argument)
    return tuple(samples)


# -- Functions as predicates -------------------------------------------------------------------------------------------


MaskMod = Callable[[Any, Any, Any, Any], Any]

ROWS = "rows=<batch size> to masks.from_mask_mod, or B=<batch size> to create_block_mask"
HEADS = "heads=<number of query heads> to masks.from_mask_mod, or H=<number of query heads> to create_block_mask"

CONTENTS = 1 << 20
"""Elements of a tensor that ranks compare."""


LIKE = frozenset({"zeros_like", "ones_like", "full_like", "empty_like"})
"""Operations that do not read the values of their first tensor."""
AS = frozenset({"to", "type_as"})
"""Operations that do not read the values of their second tensor."""
FACTS = NEW | frozenset(
    ("device", "dtype", "shape", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "size", "dim",
     "ndimension", "numel", "nelement", "element_size", "is_floating_point", "get_device")
)  # fmt: skip
"""Attributes of a tensor that do not depend on its values."""


def _zero(device: Any) -> Any:
    """Return a new tensor without dims; traces see that the call has created it."""
    import torch

    return torch.zeros((), dtype=torch.int64, device=device)


class _Unused:
    """Stands in for b or h if the mask was declared not to depend on it; raises when its value is used.

    What does not depend on the value is that of a tensor without dims: PyTorch's `and_masks` calls `b.new_ones(())`.
    """

    def __init__(self, name: str, remedy: str, device: Any) -> None:
        self._device = device
        self._text = f"mask_mod uses {name}, but the mask has one plane for all. {remedy}, so that each gets its own."

    def _refuse(self, *_: object) -> Any:
        raise MaskError(self._text)

    __index__ = __int__ = __float__ = __complex__ = __bool__ = __len__ = __iter__ = __array__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _refuse
    __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __divmod__ = __rdivmod__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __trunc__ = __getitem__ = __contains__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        return getattr(_zero(self._device), name) if name in FACTS else self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name, values = getattr(func, "__name__", ""), list(args)
        at = 0 if name in LIKE else 1 if name in AS else None
        if at is not None and at < len(values) and isinstance(values[at], _Unused):
            values[at] = _zero(values[at]._device)
        for value in _flat((values, kwargs or {}), _Unused):
            value._refuse()
        return func(*values, **(kwargs or {}))


class Reader:
    """A mask's function: how it is called, and what it reads."""

    def __init__(self, call: MaskMod, row: int | None, head: int | None, mask_mod: MaskMod) -> None:
        self.call, self.row, self.head, self.mask_mod = call, row, head, mask_mod
        self.device: Any = None
        """The device of the tensors that it reads, and of the positions it gets; None until known."""

    def arguments(self, q: Any, kv: Any, device: Any = None) -> tuple[Any, Any, Any, Any]:
        """Return (b, h, q_idx, kv_idx) as the function takes them."""
        import torch

        if device is None:
            if self.device is None:
                self.device = self._device()
            device = self.device
        b, h = (
            _Unused(name, f"Pass {remedy}", device) if index is None else torch.tensor(index, device=device)
            for index, name, remedy in ((self.row, "b (the batch row)", ROWS), (self.head, "h (the head)", HEADS))
        )
        return b, h, torch.as_tensor(q, device=device), torch.as_tensor(kv, device=device)

    def _first_pair(self, device: Any = None) -> tuple[Any, Any, Any, Any]:
        """Return the arguments of the first pair, which every table has.

        On other devices than CPUs the positions are arrays of one element: indexing by a single number would make the
        host wait for it.
        """
        b, h, q, kv = self.arguments(0, 0, device)
        return (b, h, q, kv) if q.device.type == "cpu" else (b, h, q.view(1), kv.view(1))

    def _device(self) -> Any:
        import torch

        cpu = torch.device("cpu")
        on_cpu = trace(self.call, self._first_pair(cpu))
        tensors = (noted.tensor() for noted in on_cpu.tensors if noted.tensor is not None)
        other = next((t.device for t in tensors if t is not None and t.device.type != "cpu"), None)
        if other is None:
            return cpu
        # Single numbers on a CPU mix with tensors on any device, so success on one pair says nothing about tiles.
        return cpu if not on_cpu.fails and trace(self.call, self._first_pair(other)).fails else other

    def reads(self, before: CaptureSnapshot | None) -> CaptureSnapshot:
        """Return a snapshot of what the function reads."""
        snapshot = CaptureSnapshot.of(self.call, self._first_pair(), before)
        note_operations(self.mask_mod, snapshot)
        return snapshot

    def contents(self) -> str:
        """Return checksums of the integer and boolean tensors that it reads, which are equal on all ranks; of large
        ones, of a sample."""
        import torch

        checksums: list[str] = []
        for i, noted in enumerate(trace(self.call, self._first_pair()).tensors):
            tensor = None if noted.tensor is None else noted.tensor()
            if tensor is None or tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta":
                checksums.append(f"{i}")  # from the call itself, or perhaps different on each rank
                continue
            flat = tensor.detach().flatten()
            flat = flat[:: -(-flat.numel() // CONTENTS)] if flat.numel() > CONTENTS else flat
            raw = flat.cpu().contiguous().view(torch.uint8).numpy()
            checksums.append(f"{i} {tuple(tensor.shape)} {zlib.crc32(raw)}")
        return " ".join(checksums)


def readers_of(planes: Iterable[Plane]) -> tuple[Reader, ...]:
    """Return one reader for each function of the planes, whatever the batch row and head."""
    readers: dict[int, Reader] = {}
    for plane in planes:
        for function in _functions(plane.predicate):
            readers.setdefault(id(function.mask_mod), function.reader)
    return tuple(readers.values())


def _functions(predicate: Predicate | None) -> Iterator[Function]:
    if isinstance(predicate, Function):
        yield predicate
    elif isinstance(predicate, Combined):
        yield from _functions(predicate.a.predicate)
        yield from _functions(predicate.b.predicate)


def device_of(predicate: Predicate) -> Any:
    """Return the device on which the functions of a predicate get positions."""
    import torch

    for function in _functions(predicate):
        return function.reader.arguments(0, 0)[2].device
    return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Function:
    """The predicate of one plane: mask_mod with its batch row and head (None: it does not depend on them)."""

    mask_mod: MaskMod
    row: int | None
    head: int | None
    call: MaskMod = field(init=False, compare=False, repr=False)
    reader: Reader = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "call", frozen(self.mask_mod))
        object.__setattr__(self, "reader", Reader(self.call, self.row, self.head, self.mask_mod))

    def allows(self, q: Ints, kv: Ints) -> Bools:
        import torch

        shape = np.broadcast_shapes(q.shape, kv.shape)
        arguments = self.reader.arguments(q.copy(), kv.copy())
        if arguments[2].device.type == "meta":
            raise MaskError(
                "mask_mod reads tensors on the meta device, which have no values. Use tensors on another device."
            )
        answer = Elementwise(self.mask_mod, self.call)(*arguments)
        kind: str = type(cast(object, answer)).__name__
        if isinstance(answer, tuple | list | dict | None):
            raise MaskError(
                f"mask_mod must return booleans (True: may attend), but it returned {kind}. Return one"
                f" boolean tensor with an answer for every pair."
            )
        answer = np.asarray(answer.cpu() if isinstance(answer, torch.Tensor) else answer)
        if answer.dtype != np.bool_:
            raise MaskError(
                f"mask_mod must return booleans (True: may attend), but it returned {answer.dtype}. Compare the scores"
                f" it computes with a threshold, or use a score function for a bias."
            )
        try:
            return np.broadcast_to(answer, shape)
        except ValueError as error:
            raise MaskError(
                f"mask_mod must return shape {shape} for q_idx of shape {q.shape} and kv_idx of shape {kv.shape}, but"
                f" it returned shape {answer.shape}. Write it with elementwise operations."
            ) from error

    def key(self) -> str:
        """Return a digest of the code, the batch row, the head, and the contents of integer and boolean tensors that
        it reads, for ranks to compare."""
        digest = hashlib.sha256(f"{self.row} {self.head} {self.reader.contents()}".encode())
        code = getattr(self.mask_mod, "__code__", None)
        if isinstance(code, CodeType):
            digest.update(code.co_code)
        return digest.hexdigest()[:32]
