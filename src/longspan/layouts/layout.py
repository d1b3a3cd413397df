"""Layout: which rank holds which tokens, and the index maps between global positions and local rows.

A layout is independent of heads, bytes and masks. The local order is the order of a rank's spans. Padding, if a layout
has any, comes last on its rank. Padding positions are numbered from `seq_len` upwards: no mask allows them, and using
one as an index raises an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast
from weakref import ref

import numpy as np
from numpy.typing import ArrayLike

from longspan._compile import opaque
from longspan.errors import LayoutError, LongspanError
from longspan.masks import Mask
from longspan.masks.convert import advice
from longspan.spans import (
    LIMIT,
    Ints,
    Span,
    as_spans,
    check_int,
    run_table,
    truncated_repr,
)

# -- Tensors that remember their layout --------------------------------------------------------------------------------
# A tensor that `Layout.shard` returned has its layout as an attribute: a plan over another layout of the same sequence
# may have the same number of slots, but for other tokens. Tensors computed from it, copied or loaded have no known
# layout.


@dataclass(frozen=True, slots=True)
class Carried:
    """The layout and dim by which a tensor was cut."""

    layout: Any
    dim: int
    version: int
    """The tensor's version counter when it was recorded; later writes may have put other tokens into it."""
    tensor: ref[Any]

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        return set, ()  # `torch.load(weights_only=True)` must load a tensor that was saved with its attributes


def remember(x: Any, layout: Any, dim: int, version: int = 0) -> None:
    """Record the layout of a new tensor on it.

    >>> class Tensor: pass
    >>> x = Tensor()
    >>> remember(x, zigzag(8, 2), 0)
    >>> carried_layout_of(x).layout
    <layout zigzag, 8 tokens on 2 ranks>
    >>> carried_layout_of(Tensor()) is None
    True
    """
    x._longspan_layout = Carried(layout, dim, version, ref(x))


def carried_layout_of(x: Any) -> Carried | None:
    """Return how a tensor was cut, or None if that is not known."""
    known = getattr(x, "_longspan_layout", None)
    return known if isinstance(known, Carried) and known.tensor() is x else None


def other_tokens(one: Any, other: Any) -> bool:
    """Return whether two layouts of one sequence on the same number of ranks put some token in different slots.

    Layouts of other lengths or numbers of ranks are not compared: a shard may be a sequence of its own.

    >>> other_tokens(zigzag(8, 2), contiguous(8, 2)), other_tokens(zigzag(8, 2), zigzag(8, 2))
    (True, False)
    >>> other_tokens(zigzag(8, 2), contiguous(9, 3))
    False
    """
    if one is other or (one.seq_len, one.world_size) != (other.seq_len, other.world_size):
        return False
    return one.table.shape != other.table.shape or bool((one.table != other.table).any())


# -- Layout ------------------------------------------------------------------------------------------------------------


X = TypeVar("X")
"""An array or a tensor."""

MAX_RANKS = 1 << 20


@opaque
@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Which rank holds which tokens. Make one with the functions of `longspan.layouts`."""

    seq_len: int
    world_size: int
    name: str
    table: Ints
    """(start, stop, rank) of every span, by rank and then in local order; together each position exactly once."""
    local_len: int | None = None
    """The number of slots every rank has, when all have the same (the rest is padding); None when lengths differ."""

    def __post_init__(self) -> None:
        self.table.flags.writeable = False
        starts, stops = self.by_position[:, 0], self.by_position[:, 1]
        expected, actual = np.concatenate(([0], stops)), np.concatenate((starts, [self.seq_len]))
        if not np.array_equal(expected, actual):
            wrong = int(np.flatnonzero(expected != actual)[0])
            start, end = int(actual[wrong]), int(expected[wrong])
            fault = "no rank holds" if start > end else "two ranks hold"
            raise LayoutError(
                f"layout {self.name} must assign each of {self.seq_len} positions to exactly one of {self.world_size}"
                f" ranks, but {fault} position {min(start, end)}. Make the spans meet without gap or overlap."
            )
        if self.local_len is not None and self.seq_len and int(self.num_tokens.max()) > self.local_len:
            rank = int(self.num_tokens.argmax())
            raise LayoutError(
                f"layout {self.name} has local_len = {self.local_len} slots per rank, but rank {rank} holds"
                f" {int(self.num_tokens[rank])} tokens. Use local_len >= {int(self.num_tokens[rank])}."
            )

    @staticmethod
    def from_spans(
        seq_len: int,
        rank_spans: Iterable[Iterable[Span | tuple[int, int]]],
        *,
        name: str = "custom",
        local_len: int | None = None,
    ) -> Layout:
        """Return the layout in which rank r holds `rank_spans[r]`, in that local order.

        >>> Layout.from_spans(6, [[(0, 2), (4, 6)], [(2, 4)]]).positions(0).tolist()
        [0, 1, 4, 5]
        """
        rows: list[tuple[int, int, int]] = []
        rank = -1
        for rank, spans in enumerate(_to_list(rank_spans, f"layout {name}")):
            for span in _to_list(spans, f"rank {rank} of layout {name}"):
                start, stop = (span.start, span.stop) if isinstance(span, Span) else _ends(span, rank, name)
                if stop > start:
                    rows.append((start, stop, rank))
        return Layout.from_table(seq_len, rank + 1, np.array(rows, dtype=np.int64).reshape(-1, 3), name, local_len)

    @staticmethod
    def from_table(seq_len: int, world_size: int, table: Ints, name: str, local_len: int | None = None) -> Layout:
        """Return the layout of (start, stop, rank) rows in any rank order; neighbours on one rank become one span."""
        seq_len, world_size = check_sizes(seq_len, world_size, name)
        if local_len is not None:
            local_len = check_int(local_len, "local_len", f"layout {name}", LayoutError)
        if len(table) and (int(table[:, 2].min()) < 0 or int(table[:, 2].max()) >= world_size):
            raise LayoutError(
                f"layout {name} names ranks {int(table[:, 2].min())} to {int(table[:, 2].max())}, but there are"
                f" {world_size} ranks: 0 to {world_size - 1}."
            )
        table = table[table[:, 1] > table[:, 0]]
        table = table[np.argsort(table[:, 2], kind="stable")]
        touching = (table[1:, 0] == table[:-1, 1]) & (table[1:, 2] == table[:-1, 2])
        first, after = run_table(~touching, len(table)).T
        merged = table[first]
        merged[:, 1] = table[after - 1, 1]
        return Layout(seq_len, world_size, name, merged, local_len)

    # -- Spans and counts ----------------------------------------------------------------------------------------------

    @cached_property
    def _first(self) -> Ints:
        return np.searchsorted(self.table[:, 2], np.arange(self.world_size + 1, dtype=np.int64))

    @cached_property
    def num_tokens(self) -> Ints:
        """How many real tokens each rank holds."""
        sizes = (self.table[:, 1] - self.table[:, 0]).astype(np.float64)
        return np.bincount(self.table[:, 2], weights=sizes, minlength=self.world_size).astype(np.int64)

    @cached_property
    def by_position(self) -> Ints:
        """(start, stop, rank) of every span, sorted by position."""
        table = self.table[np.argsort(self.table[:, 0], kind="stable")]
        table.flags.writeable = False
        return table

    def span_table(self, rank: int) -> Ints:
        """Return the rank's spans as (start, stop) rows, in local order."""
        self._check_rank(rank)
        return self.table[self._first[rank] : self._first[rank + 1], :2]

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the rank's spans, in local order.

        >>> zigzag(8, 2).spans(0)
        (0:2, 6:8)
        """
        return as_spans(self.span_table(rank))

    def num_padding(self, rank: int) -> int:
        """Return the number of padding slots of the rank."""
        return self.num_slots(rank) - int(self.num_tokens[rank])

    @property
    def has_padding(self) -> bool:
        """Whether some rank has padding slots.

        >>> contiguous(7, 2, equal_tokens=True).has_padding, contiguous(7, 2).has_padding
        (True, False)
        """
        return self.local_len is not None and self.local_len * self.world_size != self.seq_len

    def num_slots(self, rank: int) -> int:
        """Return the number of slots of the rank: its tokens, and padding after them.

        >>> contiguous(7, 2, equal_tokens=True).num_slots(1)
        4
        """
        self._check_rank(rank)
        return int(self.num_tokens[rank]) if self.local_len is None else self.local_len

    def positions(self, rank: int) -> Ints:
        """Return the global position of every local slot, for rotary embeddings; padding is `seq_len` and up.

        >>> zigzag(8, 2).positions(0).tolist()
        [0, 1, 6, 7]
        """
        spans = self.span_table(rank)
        parts = [np.arange(start, stop, dtype=np.int64) for start, stop in spans.tolist()]
        if self.local_len is not None:
            before = rank * self.local_len - int(self.num_tokens[:rank].sum())
            parts.append(self.seq_len + before + np.arange(self.num_padding(rank), dtype=np.int64))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def owner(self, position: ArrayLike) -> Any:
        """Return the rank that holds each position.

        >>> zigzag(8, 2).owner([0, 3, 7]).tolist()
        [0, 1, 0]
        """
        return self.locate(position)[0]

    def locate(self, position: ArrayLike) -> tuple[Ints, Ints]:
        """Return the rank that holds each position, and its slot there."""
        positions = np.asarray(position)
        if positions.size and not np.issubdtype(positions.dtype, np.integer):
            raise LayoutError(f"positions must be integers, but got {truncated_repr(position)}.")
        positions = positions.astype(np.int64)
        if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= self.seq_len):
            raise LayoutError(
                f"positions of {self} must be in [0, {self.seq_len}), but got {int(positions.min())} to"
                f" {int(positions.max())}."
            )
        order = np.argsort(self.table[:, 0], kind="stable")
        sizes = self.table[:, 1] - self.table[:, 0]
        before = np.cumsum(sizes) - sizes
        slot = before - (np.cumsum(self.num_tokens) - self.num_tokens)[self.table[:, 2]]
        row = order[np.searchsorted(self.table[order, 0], positions, side="right") - 1]
        return self.table[row, 2], slot[row] + positions - self.table[row, 0]

    # -- Index maps ----------------------------------------------------------------------------------------------------

    def shard(self, x: X, rank: int, dim: int = 0, fill: float = 0) -> X:
        """Return the rank's shard of an array or tensor along `dim`; padding slots hold `fill`.

        >>> zigzag(8, 2).shard(np.arange(8) * 10, rank=1).tolist()
        [20, 30, 40, 50]
        """
        self._check_size(x, dim, self.seq_len, "the whole sequence")
        check_fill(x, fill, "fill", LayoutError)
        slots, size = self.positions(rank), int(self.num_tokens[rank])
        part = _take(x, slots[:size], dim, len(slots) - size, fill)
        if _is_torch(x) and not _is_compiling():
            remember(part, self, dim % part.ndim)  # a plan over another layout raises for it
        return part

    def unshard(self, shards: Sequence[X], dim: int = 0) -> X:
        """Return the whole array or tensor from every rank's shard; padding is dropped.

        >>> layout = zigzag(8, 2)
        >>> layout.unshard([layout.shard(np.arange(8), rank) for rank in range(2)]).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
        """
        if len(shards) != self.world_size:
            raise LayoutError(f"unshard needs the shards of all {self.world_size} ranks, but got {len(shards)}.")
        for rank, shard in enumerate(shards):
            self._check_size(shard, dim, self.num_slots(rank), f"the shard of rank {rank}")
        rank, slot = self.locate(np.arange(self.seq_len, dtype=np.int64))
        slots = np.array([self.num_slots(rank) for rank in range(self.world_size)], dtype=np.int64)
        return _take(_concatenate(shards, dim), (np.cumsum(slots) - slots)[rank] + slot, dim, 0, 0)

    # -- Checks and identity -------------------------------------------------------------------------------------------

    def _check_rank(self, rank: int) -> None:
        if type(rank) is int and 0 <= rank < self.world_size:
            return
        if not 0 <= check_int(rank, "rank", f"{self}", LayoutError, -MAX_RANKS) < self.world_size:
            raise LayoutError(f"rank must be in [0, {self.world_size}), but got {rank}.")

    def _check_size(self, x: Any, dim: int, expected: int, name: str) -> None:
        if not hasattr(x, "shape"):
            raise LayoutError(f"{name} must be an array or tensor, but got {type(x).__name__}. Convert it first.")
        shape = tuple(x.shape)
        if type(dim) is not int:
            dim = check_int(dim, "dim", f"{self}", LayoutError, -LIMIT)
        if not -len(shape) <= dim < len(shape) or shape[dim] != expected:
            raise LayoutError(
                f"{name} must have {expected} slots in {self}, but got a tensor of shape {shape} with dim = {dim}. Pass"
                f" the dim of the tokens, or build the layout for this length."
            )

    def text(self) -> str:
        """Return the layout as text: a line for each rank.

        >>> print(zigzag(8, 2).text())
        layout zigzag seq_len=8 world_size=2
        0: 0:2 6:8
        1: 2:6
        """
        slots = "" if self.local_len is None else f" local_len={self.local_len}"
        lines = [f"layout {self.name} seq_len={self.seq_len} world_size={self.world_size}{slots}"]
        lines += [f"{rank}: {' '.join(map(repr, self.spans(rank)))}".rstrip() for rank in range(self.world_size)]
        return "\n".join(lines)

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest that ranks compare."""
        head = f"layout {self.seq_len} {self.world_size} {self.local_len} "
        return hashlib.sha256(head.encode() + self.table.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        mine = (self.seq_len, self.world_size, self.local_len)
        return mine == (other.seq_len, other.world_size, other.local_len) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"<layout {self.name}, {self.seq_len} tokens on {self.world_size} ranks>"


def _to_list(spans: Any, where: str) -> Sequence[Any]:
    if not isinstance(spans, Iterable) or isinstance(spans, str | bytes):
        raise LayoutError(
            f"{where}: spans must be a list, but got {truncated_repr(spans)}. Pass a list of spans for every rank, as"
            f" in [[(0, 4)], [(4, 8)]]."
        )
    return list(cast(Iterable[Any], spans))


def _ends(span: Any, rank: int, name: str) -> tuple[int, int]:
    """Return start and stop of a user's span, or raise."""
    where = f"rank {rank} of layout {name}"
    ends = _to_list(span, where)
    if len(ends) == 2:
        start, stop = (check_int(end, "an end of a span", where, LayoutError) for end in ends)
        if start <= stop:
            return start, stop
    raise LayoutError(f"{where}: a span must be (start, stop) with start <= stop, but got {truncated_repr(span)}.")


def check_masks(masks: Sequence[object], where: str) -> None:
    """Raise unless each of them is a mask."""
    for mask in masks:
        if not isinstance(mask, Mask):
            raise LayoutError(f"{where} takes masks, but got {type(mask).__name__}. {advice(mask)}")


def check_sizes(seq_len: int, world_size: int, name: str) -> tuple[int, int]:
    """Return seq_len and world_size as ints, or raise if one is invalid."""
    size = check_int(world_size, "world_size", f"layout {name}", LayoutError, low=1, high=MAX_RANKS)
    return check_int(seq_len, "seq_len", f"layout {name}", LayoutError), size


# -- Operations that numpy and torch name differently ------------------------------------------------------------------


def _is_torch(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "torch" or hasattr(x, "index_select")


def _is_compiling() -> bool:
    import torch

    return torch.compiler.is_compiling()


def check_fill(x: Any, fill: float, name: str, error: type[LongspanError]) -> None:
    """Raise if an integer or bool dtype cannot hold `fill`: -100 would become 156 in uint8, a valid token."""
    dtype = str(x.dtype).removeprefix("torch.")
    if fill == 0 or not dtype.startswith(("int", "uint", "bool")):
        return
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not (low <= fill <= high and fill == int(fill)):
        raise error(
            f"{name} must be an integer from {low} to {high}, which {dtype} can hold, but got {fill}. Cast the tensor"
            f" to int64 first, or choose another {name}."
        )


def to_device(table: Any, device: Any) -> Any:
    """Return a CPU tensor on a device, through pinned memory where the device has it: the host does not wait then."""
    import torch

    if device.type in ("cpu", "meta", "mps") or table.device.type != "cpu" or _is_compiling():
        return table.to(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_fake = accelerator is None or accelerator.type != device.type or type(table) is not torch.Tensor
    if is_fake:  # fake tensors have no pinned memory
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def _take(x: Any, index: Ints, dim: int, padding: int, fill: float) -> Any:
    part: Any
    if _is_torch(x):
        import torch

        part = x.index_select(dim, to_device(torch.as_tensor(index.copy(), device="cpu"), x.device))
    else:
        part = np.take(x, index, axis=dim)
    if not padding:
        return part
    shape = list(part.shape)
    shape[dim] = padding
    filler = part.new_full(shape, fill) if _is_torch(part) else np.full(shape, fill, dtype=part.dtype)
    return _concatenate([part, filler], dim)


def _concatenate(parts: Sequence[Any], dim: int) -> Any:
    if _is_torch(parts[0]):
        import torch

        return torch.cat(list(parts), dim=dim)
    return np.concatenate(list(parts), axis=dim)
