"""Masks given as a function, in FlexAttention's form mask_mod(b, h, q_idx, kv_idx).

Nothing is known about such a mask until it is called, so it is called late and only where asked: on single pairs, or
tile by tile through `classify`, which remembers what it has seen. The function always gets global positions.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.causal import full
from longspan.masks.elementwise import check_signature, elementwise
from longspan.masks.frozen import frozen
from longspan.masks.keys import This
from longspan.masks.mask import Mask
from longspan.masks.plane import Bools, Both, Either, Neither, Plane, Predicate
from longspan.masks.reads import Reads, given, tried
from longspan.span import Ints, Span, union, whole

MaskMod = Callable[[Any, Any, Any, Any], Any]

EMPTY, PARTIAL, FULL = 0, 1, 2
MAX_PLANES = 1 << 20
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
        given(finder, *arguments)
        with finder:
            self.call(*arguments)

    def _device(self) -> Any:
        import torch

        cpu = torch.device("cpu")
        found, fails = tried(lambda finder: self._run(finder, cpu))
        tensors = [tensor for noted in found if (tensor := noted.tensor()) is not None]
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

        made: list[str] = []
        for i, noted in enumerate(tried(self._run)[0]):
            tensor = noted.tensor()
            if tensor is None or tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta":
                made.append(f"{i}")  # made inside, of an array say, or perhaps of another rank's own numbers
                continue
            flat = tensor.detach().flatten()
            flat = flat[:: -(-flat.numel() // CONTENTS)] if flat.numel() > CONTENTS else flat
            raw = flat.cpu().contiguous().view(torch.uint8).numpy()
            made.append(f"{i} {tuple(tensor.shape)} {zlib.crc32(raw)}")
        return " ".join(made)


def readers_of(planes: Iterable[Plane]) -> tuple[Reader, ...]:
    """Of every function that decides in some plane, once, whatever the batch row and head."""
    found: dict[int, Reader] = {}
    for plane in planes:
        for function in _functions(plane.predicate):
            found.setdefault(id(function.mask_mod), function.reader)
    return tuple(found.values())


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
        found = elementwise(self.mask_mod, self.call)(*arguments)
        kind: str = type(cast(object, found)).__name__
        if isinstance(found, tuple | list | dict | None):
            raise MaskError(
                f"mask_mod must return booleans (True: may attend), but it returned {kind}. Return one"
                f" boolean tensor with an answer for every pair."
            )
        found = np.asarray(found.cpu() if isinstance(found, torch.Tensor) else found)
        if found.dtype != np.bool_:
            raise MaskError(
                f"mask_mod must return booleans (True: may attend), but it returned {found.dtype}. Compare the scores"
                f" it computes with a threshold, or use a score function for a bias."
            )
        try:
            return np.broadcast_to(found, shape)
        except ValueError as error:
            raise MaskError(
                f"mask_mod was given q_idx of shape {q.shape} and kv_idx of shape {kv.shape} and returned shape"
                f" {found.shape}. It must work element by element and return shape {shape}."
            ) from error

    def key(self) -> str:
        """What ranks can compare without asking it about pairs: the code, the batch row and the head, and what is in
        tensors of whole numbers and booleans that it reads."""
        digest = hashlib.sha256(f"{self.row} {self.head} {self.reader.contents()}".encode())
        code = getattr(self.mask_mod, "__code__", None)
        if isinstance(code, CodeType):
            digest.update(code.co_code)
        return digest.hexdigest()[:32]


def from_mask_mod(
    mask_mod: MaskMod,
    seq_len: int | None = None,
    *,
    within: Mask | None = None,
    rows: int | None = None,
    heads: int | None = None,
    name: str | None = None,
) -> Mask:
    """The mask that a function decides; pairs outside `within` are hidden without asking it.

    A function that uses `b` needs `rows` (the batch size), one that uses `h` needs `heads`.

    >>> mask = from_mask_mod(lambda b, h, q, kv: (q - kv) % 2 == 0, within=causal())
    >>> mask.allows([4, 4, 2], [2, 3, 4]).tolist()
    [True, False, False]
    """
    if not callable(mask_mod):
        raise MaskError(
            f"from_mask_mod takes a function (b, h, q_idx, kv_idx), but {type(mask_mod).__name__} was given."
        )
    check_signature(mask_mod, ("b", "h", "q_idx", "kv_idx"), "mask_mod", MaskError)
    if within is not None and not isinstance(within, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MaskError(f"within is a mask, as in within=masks.causal(), but {type(within).__name__} was given.")
    within = full(seq_len) if within is None else within
    if seq_len is not None:
        within = within.resized(seq_len)
    if not within.is_structured or within.num_heads * within.num_rows != 1:
        raise MaskError(f"within={within} must be one structured plane. Combine other masks with & afterwards.")
    region = within.plane().sure
    grid = tuple(
        tuple(Plane(bd.empty(), region, Function(mask_mod, row, head)) for head in _indices(heads, "heads"))
        for row in _indices(rows, "rows")
    )
    return Mask(grid, within.seq_len, name or getattr(mask_mod, "__name__", type(mask_mod).__name__))


def _indices(count: int | None, name: str) -> list[int | None]:
    if count is None:
        return [None]
    return list(range(whole(count, name, "from_mask_mod()", MaskError, low=1, high=MAX_PLANES)))


def classifier(plane: Plane, seq_len: int, tile: int, known: dict[Any, Any]) -> Classifier:
    """The classifier of a plane, remembered in `known`, which belongs to its mask and ends with it."""
    key = (This(plane), seq_len, tile)
    if key not in known:
        known[key] = Classifier(plane, seq_len, tile)
    return known[key]


class Classifier:
    """Which tiles of a plane are empty, partial or full, asked lazily and remembered.

    >>> classifier = Classifier(from_mask_mod(lambda b, h, q, kv: q >= kv).plane(), seq_len=6, tile=2)
    >>> classifier.classify(Span(2, 6), Span(0, 6)).tolist()
    [[2, 1, 0], [2, 2, 1]]
    """

    def __init__(self, plane: Plane, seq_len: int, tile: int = 128) -> None:
        tile = whole(tile, "tile", "classify()", MaskError, low=1)
        self.plane = plane
        self.seq_len = seq_len
        self.num_evaluated = 0
        self.tile = tile
        self._seen: dict[int, NDArray[np.int8]] = {}  # by tile row; -1 is not yet known

    def classify(self, q: Span, kv: Span) -> NDArray[np.int8]:
        """EMPTY, PARTIAL or FULL for every tile that the two spans touch; tiles lie on a global grid."""
        tile = self.tile
        stop = min(q.stop, self.seq_len), min(kv.stop, self.seq_len)
        first, last = kv.start // tile, -(-stop[1] // tile)
        rows = [self._tile_row(row, first, last) for row in range(q.start // tile, -(-stop[0] // tile))]
        return np.stack(rows) if rows else np.empty((0, max(last - first, 0)), dtype=np.int8)

    def _tile_row(self, row: int, first: int, last: int) -> NDArray[np.int8]:
        tile = self.tile
        known = self._seen.get(row)
        if known is None:
            known = self._seen[row] = np.full(-(-self.seq_len // tile), -1, dtype=np.int8)
        unknown = known[first:last] < 0
        if unknown.any():
            q = row * tile, min((row + 1) * tile, self.seq_len)
            region = bd.tighten(bd.cut(self.plane.region, q, (first * tile, min(last * tile, self.seq_len))))
            touched = np.zeros_like(unknown)
            for start, stop in union(region[:, 2:4]).tolist():
                touched[start // tile - first : -(-stop // tile) - first] = True
            known[first:last][unknown & ~touched] = EMPTY
            for start, stop in runs_of(unknown & touched):
                self._evaluate(q, first + start, first + stop, known)
        return known[first:last].copy()

    def _evaluate(self, rows: tuple[int, int], first: int, last: int, known: NDArray[np.int8]) -> None:
        tile = self.tile
        q = np.arange(*rows, dtype=np.int64)
        for start in range(first, last, 64):  # 64 tiles at a time keeps the temporary at one megabyte
            stop = min(start + 64, last)
            kv = np.arange(start * tile, min(stop * tile, self.seq_len), dtype=np.int64)
            allowed = self._allowed(q, kv)
            self.num_evaluated += stop - start
            edges = np.arange(0, len(kv), tile)
            some = np.logical_or.reduceat(allowed.any(axis=0), edges)
            every = np.logical_and.reduceat(allowed.all(axis=0), edges)
            known[start:stop] = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))

    def _allowed(self, q: Ints, kv: Ints) -> Bools:
        """The pairs of a rectangle. Where the function alone decides, it alone is asked: bands cost ten times more."""
        plane = self.plane
        sides = (int(q[0]), int(q[-1]) + 1), (int(kv[0]), int(kv[-1]) + 1)
        if plane.predicate is not None and _fills(bd.cut(plane.maybe, *sides), q, kv):
            return plane.predicate.allows(q[:, None], kv[None, :])
        return plane.allows(q[:, None], kv[None, :])


def _fills(bands: Ints, q: Ints, kv: Ints) -> bool:
    """Whether one band holds every pair of a rectangle."""
    if len(bands) != 1:
        return False
    q0, q1, k0, k1, lo, hi = bands[0].tolist()
    rows, cols = (int(q[0]), int(q[-1]) + 1), (int(kv[0]), int(kv[-1]) + 1)
    return (q0, q1, k0, k1) == (*rows, *cols) and lo <= rows[0] - cols[1] + 1 and hi >= rows[1] - 1 - cols[0]


def runs_of(flags: Bools) -> list[tuple[int, int]]:
    """(start, stop) of every run of true flags.

    >>> runs_of(np.array([True, False, True, True]))
    [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
