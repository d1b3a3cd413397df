"""Users' functions of one pair: what they read, copies for later calls, and a mask function as a plane's predicate.

FlexAttention's functions are written for one pair, `f(b, h, q_idx, kv_idx)`, and `torch.vmap` runs them on many, as in
PyTorch's `create_block_mask`. They are pure: tensors that they read must not change while a mask is in use.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import numpy as np

from longspan.errors import KernelError, LongspanError, MaskError
from longspan.masks.plane import Bools, Combined, Plane, Predicate
from longspan.spans import Ints

MaskMod = Callable[[Any, Any, Any, Any], Any]


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


# -- Copies of functions -----------------------------------------------------------------------------------------------


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


# -- Tensors that a function reads -------------------------------------------------------------------------------------

NO_VALUES = frozenset(
    ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "full_like",
     "empty_like", "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "get_device")
)  # fmt: skip
"""Operations that do not read the values of their first tensor."""


@cache
def recorder_class() -> Any:
    """Return the torch-function mode that lists tensors from outside; torch is imported when first used."""
    import torch
    from torch.overrides import TorchFunctionMode

    from longspan._torch import unmapped, vmap_level

    def tensors(value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list | dict):
            for part in cast("Any", value.values() if isinstance(value, dict) else value):
                yield from tensors(part)

    class Recorder(TorchFunctionMode):
        """Lists the tensors that a call uses and that it did not get or create, by first use.

        `unused` are indices that a call must not use, with the error if it does.
        """

        def __init__(self, unused: Sequence[tuple[Any, str]] = ()) -> None:
            super().__init__()
            self.tensors: list[Any] = []
            self._known: dict[int, Any] = {}  # holds tensors, so that no id is used again
            self._unused = unused
            self._outside = self._inside = vmap_level()

        def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
            self._known.update((id(tensor), tensor) for tensor in arguments)
            self._inside = vmap_level()
            with self:
                result = function(*arguments)
            self._note(result)  # which may be a tensor from outside
            return result

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self._note(args)
            if kwargs:
                self._note(kwargs)
            result = func(*args, **(kwargs or {}))
            self._known.update((id(tensor), tensor) for tensor in tensors(result))
            if self._unused:
                self._check(getattr(func, "__name__", ""), args, kwargs, result)
            return result

        def _note(self, value: Any) -> None:
            for tensor in tensors(value):
                given = tensor
                while id(tensor) not in self._known and vmap_level(tensor) > self._inside:  # by the function's own vmap
                    tensor = unmapped(tensor)
                if id(tensor) not in self._known and vmap_level(tensor) <= self._outside:  # not computed from indices
                    self.tensors.append(tensor)
                    self._known[id(tensor)] = tensor
                if tensor is not given and tensor.requires_grad and any(tensor is known for known in self.tensors):
                    raise KernelError(
                        "score_mod must not map a tensor that needs a gradient by torch.vmap, but it does. Use"
                        " broadcasting, or detach the tensor."
                    )

        def _check(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
            if name == "__get__" and not isinstance(result, torch.Tensor):
                return  # its shape, dtype or device
            used = args[1:] if name in NO_VALUES else args[:1] if name in ("to", "type_as") else args
            for index, text in self._unused:
                if any(tensor is index for tensor in tensors((used, kwargs))):
                    raise MaskError(text)

    return Recorder


@contextmanager
def explained(name: str) -> Generator[None]:
    """Add to PyTorch's errors how a user's function is called."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        error.add_note(
            f"{name} is called on many pairs at once by torch.vmap, as in create_block_mask. Write it with tensor"
            f" operations, without .item(), numpy and `if` on values."
        )
        raise


# -- Functions as predicates -------------------------------------------------------------------------------------------

ROWS = "rows=<batch size> to masks.from_mask_mod, or B=<batch size> to create_block_mask"
HEADS = "heads=<number of query heads> to masks.from_mask_mod, or H=<number of query heads> to create_block_mask"

CONTENTS = 1 << 20
"""Elements of a tensor that ranks compare."""


class Reader:
    """A mask's function, and the tensors that it reads: found at its first call, and the same from then on."""

    def __init__(self, mask_mod: MaskMod) -> None:
        self.mask_mod, self.call = mask_mod, frozen(mask_mod)
        self.versions: list[tuple[Any, int]] | None = None
        """Each tensor with its version counter; None: not looked for yet."""
        self.device: Any = "cpu"
        """Where the tensors are, and the positions that the function gets."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self.mask_mod,)

    def indices(self, row: int | None, head: int | None) -> tuple[Any, Any]:
        """Return (b, h) as the function takes them; 0 stands for indices that it does not use."""
        import torch

        return torch.tensor(row or 0, device=self.device), torch.tensor(head or 0, device=self.device)

    def record(self, row: int | None, head: int | None, q: int, kv: int) -> None:
        """Find the tensors that the function reads by a call on one pair; return at once if they are known."""
        import torch

        for attempt in range(0 if self.versions is not None else 2):  # the first finds their device
            b, h = self.indices(row, head)
            unused = [(b, _uses("b (the batch row)", ROWS))] * (row is None)
            unused += [(h, _uses("h (the head)", HEADS))] * (head is None)
            recorder = recorder_class()(unused)
            try:
                _check_answer(recorder.run(self.call, b, h, *(torch.tensor(i, device=self.device) for i in (q, kv))))
            except RuntimeError:
                if attempt or all(tensor.device.type == "cpu" for tensor in recorder.tensors):
                    raise
            self.device = next((t.device for t in recorder.tensors if t.device.type != "cpu"), "cpu")
            self.versions = [(tensor, _version(tensor)) for tensor in recorder.tensors]

    def check_unchanged(self) -> None:
        """Raise if a tensor that the function reads was changed in place since the first call."""
        for tensor, version in self.versions or ():
            if _version(tensor) != version:
                raise MaskError(
                    f"tensors that a mask function reads must stay as they are, but one of shape"
                    f" {tuple(tensor.shape)} was changed in place after the mask was first used. Make a new mask for"
                    f" new data."
                )

    def contents(self) -> str:
        """Return checksums of the integer and boolean tensors that it reads, which are equal on all ranks; of large
        ones, of a sample."""
        import torch

        checksums: list[str] = []
        for i, (tensor, _) in enumerate(self.versions or ()):
            if tensor.is_floating_point() or tensor.is_complex():
                checksums.append(f"{i}")  # perhaps different on each rank
                continue
            flat = tensor.detach().flatten()
            flat = flat[:: -(-flat.numel() // CONTENTS)] if flat.numel() > CONTENTS else flat
            raw = flat.cpu().contiguous().view(torch.uint8).numpy()
            checksums.append(f"{i} {tuple(tensor.shape)} {zlib.crc32(raw)}")
        return " ".join(checksums)


def _check_answer(answer: Any) -> None:
    import torch

    is_tensor = isinstance(answer, torch.Tensor)
    if not is_tensor or answer.dtype != torch.bool or answer.ndim:
        kind = f"{answer.dtype} of shape {tuple(answer.shape)}" if is_tensor else type(answer).__name__
        raise MaskError(
            f"mask_mod must return one boolean tensor for a pair (True: may attend), but it returned {kind}. Compare"
            f" scores with a threshold."
        )


def _uses(index: str, remedy: str) -> str:
    return f"mask_mod uses {index}, but the mask has one plane for all. Pass {remedy}, so that each gets its own."


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version  # which those of inference mode do not have


def readers_of(planes: Iterable[Plane]) -> tuple[Reader, ...]:
    """Return the reader of each function of the planes once."""
    readers = {id(function.reader): function.reader for p in planes for function in _functions(p.predicate)}
    return tuple(readers.values())


def _functions(predicate: Predicate | None) -> Iterator[Function]:
    if isinstance(predicate, Function):
        yield predicate
    elif isinstance(predicate, Combined):
        yield from _functions(predicate.a.predicate)
        yield from _functions(predicate.b.predicate)


def device_of(predicate: Predicate) -> Any:
    """Return the device on which the functions of a predicate get positions."""
    for function in _functions(predicate):
        function.reader.record(function.row, function.head, 0, 0)
        return function.reader.device
    return "cpu"


@dataclass(frozen=True, slots=True)
class Function:
    """The predicate of one plane: mask_mod with its batch row and head (None: it does not depend on them)."""

    mask_mod: MaskMod
    row: int | None
    head: int | None
    reader: Reader = field(compare=False, repr=False)
    """The same for all planes of a mask."""

    def allows(self, q: Ints, kv: Ints) -> Bools:
        import torch

        from longspan import _torch

        shape = np.broadcast_shapes(q.shape, kv.shape)
        if 0 in shape:
            return np.zeros(shape, dtype=np.bool_)
        reader = self.reader
        reader.record(self.row, self.head, int(q.flat[0]), int(kv.flat[0]))
        reader.check_unchanged()
        b, h = reader.indices(self.row, self.head)

        padded = (x.reshape((1,) * (len(shape) - x.ndim) + x.shape) for x in (q, kv))
        positions = (torch.tensor(x, device=reader.device) for x in padded)
        with explained("mask_mod"):
            answer = _torch.map_pairs(partial(reader.call, b, h), *positions)
        return answer.cpu().numpy()

    def key(self) -> str:
        """Return a digest of the code, the batch row, the head, and the contents of integer and boolean tensors that
        it reads, for ranks to compare."""
        digest = hashlib.sha256(f"{self.row} {self.head} {self.reader.contents()}".encode())
        code = getattr(self.mask_mod, "__code__", None)
        if isinstance(code, CodeType):
            digest.update(code.co_code)
        return digest.hexdigest()[:32]
