"""A user's mask function as the predicate of a plane: how to call it on tiles, and on which device."""

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
from longspan.masks.captures import Reads, exclude_arguments, frozen, tried
from longspan.masks.plane import Bools, Both, Either, Neither, Plane, Predicate
from longspan.spans import Ints

# -- Calling functions of single pairs on whole tiles ------------------------------------------------------------------
# FlexAttention's functions are written for one pair, `f(b, h, q_idx, kv_idx)`. Most give the same results on arrays
# that broadcast, which is fast. Some do not: `(q_idx >= starts).sum()` sums over the tile. So a function is called on
# tiles only if it uses only operations that are known to be elementwise and a sample of single pairs gives the same
# results. Any other function is mapped over single pairs with `torch.vmap`.


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
bucketize searchsorted
"""
PLAIN = frozenset(_PLAIN.split())
"""Operations that work element by element, by name without underscores; `max` and `min` only of two (shapes tell)."""
LOOKUPS = frozenset({"bucketize", "searchsorted"})
"""Those that may take a whole tensor from outside: where a value lies in it."""

_verdicts: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Which functions take tiles. A cache: it changes no result, and keeps no function alive."""


def elementwise(function: Callable[..., Any], call: Callable[..., Any] | None = None) -> Elementwise:
    """The function, callable on tiles; what was found out about it is remembered. `call` is called in its place."""
    return Elementwise(function, call)


def check_signature(
    function: Callable[..., Any], names: tuple[str, ...], role: str, error: type[LongspanError]
) -> None:
    """Raises unless the function can be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*names)
    except TypeError as mismatch:
        raise error(
            f"{role} is called as {role}({', '.join(names)}), but the given function takes {signature}. Give it these"
            f" {len(names)} arguments."
        ) from mismatch


class Elementwise:
    """A function of a pair, on arguments that broadcast against each other.

    >>> import torch
    >>> starts = torch.tensor([0, 3, 5])
    >>> document = elementwise(lambda q, kv: (q >= starts).sum() == (kv >= starts).sum())
    >>> document(torch.arange(4)[:, None], torch.arange(4)).int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    """

    def __init__(self, function: Callable[..., Any], call: Callable[..., Any] | None = None) -> None:
        self.function = function if call is None else call
        self._known_as = function
        self.broadcasts = _verdict(function)
        """Whether arrays may be passed as they are; None until it was tried."""

    def __call__(self, *arguments: Any) -> Any:
        """The function's values, of the shape to which the tensors among the arguments broadcast."""
        if math.prod(_shape(arguments)) <= 1:
            return self._of_one(*arguments)
        self.settle(*arguments)
        return self.function(*arguments) if self.broadcasts else self.mapped(*arguments)

    def _of_one(self, *arguments: Any) -> Any:
        """One pair, as a pair."""
        shape = _shape(arguments)
        if self.broadcasts or 0 in shape:
            return self.function(*arguments)
        single = [a.reshape(()) if _is_tensor(a) else a for a in arguments]
        answer = self.function(*single)
        return answer.reshape(shape) if _is_tensor(answer) and answer.numel() == 1 else answer

    def settle(self, *arguments: Any) -> None:
        """Finds out how to call the function, unless that is known or one pair is all there is to try."""
        if self.broadcasts is None and math.prod(_shape(arguments)) > 1:
            self.broadcasts = self._agrees(*_sampled(arguments))
            try:
                _verdicts[self._known_as] = self.broadcasts
            except TypeError:  # neither hashable nor weakly referable: found out again next time
                return

    def mapped(self, *arguments: Any) -> Any:
        """Pair by pair, by way of vmap."""
        try:
            return self._mapped(*arguments)
        except Exception as error:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            if "data-dependent control flow" in str(error):
                raise LongspanError(
                    f"{name} decides by `if`, `and`, `or` or `not` on values of positions or scores, but it is called"
                    f" with tensors of many. Write it with tensor operations: torch.where(condition, a, b), &, | and ~."
                ) from error
            error.add_note(
                f"{name} may give other values for arrays of positions than for single ones, so it was mapped over"
                f" single ones with torch.vmap. Write it with operations that work element by element."
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
        answers = [self.function(*(a[i] if _is_tensor(a) else a for a in flat)) for i in range(math.prod(shape))]
        return torch.stack([torch.as_tensor(value) for value in answers]).view(shape)

    def _agrees(self, *arguments: Any) -> bool:
        """Whether arrays give what single pairs give: on a sample, and by the operations that were used."""
        import torch

        if 0 in _shape(arguments):
            return True
        can_map = True
        try:
            try:
                single = self._mapped(*arguments)
            except Exception:  # whatever the user's function raises inside vmap
                single, can_map = self._one_by_one(*arguments), False
        except Exception:
            return True  # written for arrays and nothing else: there is no other reading
        watch = _mixing()(arguments)
        try:
            with watch:
                answer = self.function(*arguments)
            if not isinstance(answer, torch.Tensor | np.ndarray | np.generic | int | float | complex):
                return True  # whoever called it refuses that
            answer = torch.as_tensor(answer)
        except (RuntimeError, IndexError):
            return False
        if (watch.mixes and can_map) or answer.ndim > single.ndim:
            return False
        wide = answer.to(single.device).expand(single.shape)
        return wide.dtype == single.dtype and bool(torch.isclose(wide, single, equal_nan=True).all())


def _verdict(function: Callable[..., Any]) -> bool | None:
    try:
        return _verdicts.get(function)
    except TypeError:
        return None


@cache
def _mixing() -> Any:
    """A context that notes whether operations on a tile may mix its elements. Torch is imported when first used."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Mixing(TorchFunctionMode):
        def __init__(self, arguments: tuple[Any, ...]) -> None:
            super().__init__()
            self.mixes = False
            self._tiles = {id(a): a for a in arguments if isinstance(a, torch.Tensor)}

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            values = _flat((args, kwargs or {}))
            tiles = [value for value in values if id(value) in self._tiles]
            if tiles:
                name = getattr(func, "__name__", "")
                inside = name.endswith("_") and not name.endswith("__")  # x.add_(1) would change what comes next
                self.mixes |= inside or not self._is_plain(name.strip("_"), args, values, tiles, result)
                self._tiles.update((id(r), r) for r in _flat(result))
            return result

        def _is_plain(self, name: str, args: Any, values: list[Any], tiles: list[Any], result: Any) -> bool:
            if name not in PLAIN:
                return False
            if name == "getitem":
                base, indices = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
                whole = all(isinstance(i, int | torch.Tensor) for i in indices) and len(indices) == base.ndim
                if id(base) in self._tiles or not whole:
                    return False
            elif name not in LOOKUPS and any(v.ndim and id(v) not in self._tiles for v in values):
                return False
            shape = np.broadcast_shapes(*(tuple(t.shape) for t in tiles))
            return (
                not isinstance(result, torch.Tensor | tuple | list)
                or (isinstance(result, torch.Tensor) and tuple(result.shape) == shape)
                or isinstance(result, torch.Size)
            )

    return Mixing


def _flat(value: Any) -> list[Any]:
    """Tensors in nested arguments."""
    if isinstance(value, dict):
        return _flat(list(cast("dict[str, Any]", value).values()))
    if isinstance(value, tuple | list):
        return [tensor for item in cast("list[Any]", value) for tensor in _flat(item)]
    return [value] if _is_tensor(value) else []


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _shape(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(tuple(a.shape) for a in arguments if _is_tensor(a)))


def _sampled(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A few indices along every dim: the ends, some in the middle, and neighbours."""
    import torch

    shape = _shape(arguments)
    picks: list[Any] = []
    for dim, size in enumerate(shape):
        if dim < len(shape) - 2 and size > 3:  # batch rows and heads: three will do
            picks.append(torch.tensor([0, size // 2, size - 1]))
            continue
        wanted = [0, 1, 2, size // 3, size // 3 + 1, size // 2, size * 3 // 4, size - 2, size - 1]
        picks.append(torch.tensor(sorted({min(max(i, 0), size - 1) for i in wanted}) if size else [], dtype=torch.long))
    samples: list[Any] = []
    for argument in arguments:
        if _is_tensor(argument):
            argument = argument.detach()
            for dim in range(argument.ndim):
                pick = picks[len(shape) - argument.ndim + dim]
                if argument.shape[dim] > 1:
                    argument = argument.index_select(dim, pick.to(argument.device))
        samples.append(argument)
    return tuple(samples)


# -- Functions as predicates -------------------------------------------------------------------------------------------


MaskMod = Callable[[Any, Any, Any, Any], Any]

CONTENTS = 1 << 20
"""Elements of a tensor that ranks compare."""


class _Unasked:
    """Stands in for b or h where the mask was declared not to depend on it; any use is refused."""

    def __init__(self, name: str, remedy: str) -> None:
        self._text = (
            f"mask_mod uses {name}, but the mask was made as if it were the same for all. Pass {remedy} to"
            f" masks.from_mask_mod, so that every one of them gets its own plane."
        )

    def _refuse(self, *_: object) -> Any:
        raise MaskError(self._text)

    __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __array__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = _refuse
    __getitem__ = __getattr__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        for argument in args:
            if isinstance(argument, _Unasked):
                argument._refuse()
            if isinstance(argument, tuple | list):
                cls.__torch_function__(func, types, tuple(cast(Any, argument)))
        return NotImplemented


class Reader:
    """How a mask's function is called, and what it reads."""

    def __init__(self, call: MaskMod, row: int | None, head: int | None) -> None:
        self.call, self.row, self.head = call, row, head
        self.device: Any = None
        """Where it is given positions: on the device of the tensors that it reads. None: not known yet."""

    def arguments(self, q: Any, kv: Any, device: Any = None) -> tuple[Any, Any, Any, Any]:
        """(b, h, q_idx, kv_idx) as the function takes them."""
        import torch

        if device is None:
            if self.device is None:
                self.device = self._device()
            device = self.device
        b = _Unasked("b (the batch row)", "rows=<batch size>") if self.row is None else self.row
        h = _Unasked("h (the head)", "heads=<number of query heads>") if self.head is None else self.head
        b, h = (torch.tensor(index, device=device) if isinstance(index, int) else index for index in (b, h))
        return b, h, torch.as_tensor(q, device=device), torch.as_tensor(kv, device=device)

    def _run(self, finder: Any, device: Any = None) -> None:
        """One pair, at the beginning: every table has one there. On other devices than CPUs in arrays of one, because a
        table is looked up by a single number on the host, which would have to wait for it."""
        b, h, q, kv = self.arguments(0, 0, device)
        arguments = (b, h, q, kv) if q.device.type == "cpu" else (b, h, q.view(1), kv.view(1))
        exclude_arguments(finder, *arguments)
        with finder:
            self.call(*arguments)

    def _device(self) -> Any:
        import torch

        cpu = torch.device("cpu")
        reads, fails = tried(lambda finder: self._run(finder, cpu))
        tensors = [tensor for noted in reads if (tensor := noted.tensor()) is not None]
        other = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if other is None:
            return cpu
        # single numbers of a CPU mix with tensors from anywhere, so that this worked does not say that tiles will
        return cpu if not fails and tried(lambda finder: self._run(finder, other))[1] else other

    def reads(self, before: Reads | None) -> Reads:
        """What it reads now."""
        return Reads.of(self.call, self._run, before)

    def contents(self) -> str:
        """Checksums of the tensors of whole numbers and booleans that it reads: these decide, and are the same on all
        ranks; large ones by a sample."""
        import torch

        checksums: list[str] = []
        for i, noted in enumerate(tried(self._run)[0]):
            tensor = noted.tensor()
            if tensor is None or tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta":
                checksums.append(f"{i}")  # made inside, from an array say, or perhaps from a rank's own numbers
                continue
            flat = tensor.detach().flatten()
            flat = flat[:: -(-flat.numel() // CONTENTS)] if flat.numel() > CONTENTS else flat
            raw = flat.cpu().contiguous().view(torch.uint8).numpy()
            checksums.append(f"{i} {tuple(tensor.shape)} {zlib.crc32(raw)}")
        return " ".join(checksums)


def readers_of(planes: Iterable[Plane]) -> tuple[Reader, ...]:
    """The reader of every function that decides in some plane, once, whatever the batch row and head."""
    readers: dict[int, Reader] = {}
    for plane in planes:
        for function in _functions(plane.predicate):
            readers.setdefault(id(function.mask_mod), function.reader)
    return tuple(readers.values())


def _functions(predicate: Predicate | None) -> Iterator[Function]:
    if isinstance(predicate, Function):
        yield predicate
    elif isinstance(predicate, Neither):
        yield from _functions(predicate.a.predicate)
    elif isinstance(predicate, Both | Either):
        yield from _functions(predicate.a.predicate)
        yield from _functions(predicate.b.predicate)


def device_of(predicate: Predicate) -> Any:
    """Where the functions of a predicate are given positions."""
    import torch

    for function in _functions(predicate):
        return function.reader.arguments(0, 0)[2].device
    return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Function:
    """The predicate of one plane: mask_mod with its batch row and head filled in (None: does not matter)."""

    mask_mod: MaskMod
    row: int | None
    head: int | None
    call: MaskMod = field(init=False, compare=False, repr=False)
    reader: Reader = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "call", frozen(self.mask_mod))
        object.__setattr__(self, "reader", Reader(self.call, self.row, self.head))

    def allows(self, q: Ints, kv: Ints) -> Bools:
        import torch  # the function is written for torch tensors; this is the only place that needs them

        shape = np.broadcast_shapes(q.shape, kv.shape)
        arguments = self.reader.arguments(q.copy(), kv.copy())
        if arguments[2].device.type == "meta":
            raise MaskError("mask_mod reads tensors on the meta device, which have no values. Give it real ones.")
        answer = elementwise(self.mask_mod, self.call)(*arguments)
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
                f"mask_mod was given q_idx of shape {q.shape} and kv_idx of shape {kv.shape} and returned shape"
                f" {answer.shape}. It must work element by element and return shape {shape}."
            ) from error

    def key(self) -> str:
        """What ranks can compare without asking it about pairs: the code, the batch row and the head, and what is in
        tensors of whole numbers and booleans that it reads."""
        digest = hashlib.sha256(f"{self.row} {self.head} {self.reader.contents()}".encode())
        code = getattr(self.mask_mod, "__code__", None)
        if isinstance(code, CodeType):
            digest.update(code.co_code)
        return digest.hexdigest()[:32]
