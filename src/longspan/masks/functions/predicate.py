"""A user's mask function as the predicate of a plane: how it is called, on which device, and what it reads."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, cast

import numpy as np

from longspan.errors import MaskError
from longspan.masks.functions.elementwise import elementwise
from longspan.masks.functions.frozen import frozen
from longspan.masks.functions.reads import Reads, exclude_arguments, tried
from longspan.masks.plane import Bools, Both, Either, Neither, Plane, Predicate
from longspan.span import Ints

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
