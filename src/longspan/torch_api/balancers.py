"""Load balancers of PyTorch's context parallelism as layouts, and how a sequence is cut over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longspan._torch import cp_options
from longspan.errors import LayoutError, NotSupportedError
from longspan.layouts import Layout, balanced, per_document, round_robin_by_work, zigzag
from longspan.layouts.layout import other_tokens
from longspan.masks import Mask
from longspan.spans import Ints


class Balancer(Protocol):
    """Any object with this method is a balancer; a `Layout` and the load balancers of PyTorch are accepted as well."""

    def layout(self, seq_len: int, world_size: int) -> Layout: ...


@dataclass(frozen=True, slots=True)
class Contiguous:
    """No rearrangement: rank r holds the r-th stretch, cut where `torch.chunk` and DTensor cut.

    >>> Contiguous().layout(5, 2).positions(0).tolist()
    [0, 1, 2]
    """

    def layout(self, seq_len: int, world_size: int) -> Layout:
        size = -(-seq_len // world_size)
        edges = [min(rank * size, seq_len) for rank in range(world_size + 1)]
        return self.of_lengths([stop - start for start, stop in pairwise(edges)])

    @staticmethod
    def of_lengths(lengths: Sequence[int]) -> Layout:
        """Stretches of these lengths, one after another: shards need not be equal."""
        edges = [sum(lengths[:rank]) for rank in range(len(lengths) + 1)]
        spans = [[span] for span in pairwise(edges)]
        return Layout.from_spans(edges[-1], spans, name="contiguous")


@dataclass(frozen=True, slots=True)
class HeadTail:
    """One early and one late chunk per rank, which is equal work under a causal mask; any length.

    >>> HeadTail().layout(8, 2).positions(0).tolist()
    [0, 1, 6, 7]
    """

    def layout(self, seq_len: int, world_size: int) -> Layout:
        return _head_tail(seq_len, world_size)


_head_tail = lru_cache(zigzag)


@dataclass(frozen=True, slots=True)
class PerDocument:
    """Every packed document folded over all ranks, head and tail together.

    >>> PerDocument([8, 4]).layout(12, 2).positions(1).tolist()
    [2, 3, 4, 5, 8, 11]
    """

    lengths: Sequence[int] | Sequence[Sequence[int]]
    """One list for all batch rows, or one list per row."""

    @property
    def rows(self) -> list[Sequence[int]]:
        """The document lengths of every batch row; one row if all rows have the same."""
        if any(isinstance(x, Sequence) for x in self.lengths):
            return list(self.lengths)  # type: ignore[arg-type]
        return [self.lengths]  # type: ignore[list-item]

    @property
    def seq_len(self) -> int:
        return int(sum(self.rows[0]))

    def layout(self, seq_len: int, world_size: int) -> Layout:
        order = self.row_order(seq_len, world_size)
        if order is None:
            return per_document(self.rows[0], world_size)
        return Contiguous.of_lengths(slots(per_document(self.rows[0], world_size)))

    def row_order(self, seq_len: int, world_size: int) -> Ints | None:
        """Return which token of each batch row is at which place, rank after rank; None if all rows have the same."""
        layouts = [per_document(row, world_size) for row in self.rows]
        lengths = {layout.seq_len for layout in layouts}
        if lengths != {seq_len}:
            raise LayoutError(
                f"PerDocument must have documents of {seq_len} tokens per row, like the sequence, but got"
                f" {sorted(lengths)}. Pass the length of every document, padding included."
            )
        if all(layout == layouts[0] for layout in layouts):
            return None
        sizes = [slots(layout) for layout in layouts]
        if any(size != sizes[0] for size in sizes):
            other = next(row for row, size in enumerate(sizes) if size != sizes[0])
            raise LayoutError(
                f"PerDocument must give a rank as many tokens of every batch row, but ranks get {sizes[0]} of row 0 and"
                f" {sizes[other]} of row {other}. Pad documents to a multiple of {2 * world_size} tokens, or use"
                f" HeadTail() or Balanced(mask)."
            )
        return np.stack([np.concatenate([layout.positions(rank) for rank in range(world_size)]) for layout in layouts])


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Blocks of rows sorted by their work under `mask` and dealt out in turns.

    >>> RoundRobin(masks.causal(), block=2).layout(8, 2).positions(0).tolist()
    [0, 1, 6, 7]
    """

    mask: Mask
    block: int = 128

    @property
    def seq_len(self) -> int | None:
        return self.mask.seq_len

    def layout(self, seq_len: int, world_size: int) -> Layout:
        return round_robin_by_work(self.mask, world_size, seq_len=seq_len, block=self.block)


class Balanced:
    """Equal work under every mask, and few rows to send: `longspan.layouts.balanced`."""

    def __init__(self, *masks: Mask) -> None:
        self.masks = masks

    @property
    def seq_len(self) -> int | None:
        return next((mask.seq_len for mask in self.masks if mask.seq_len is not None), None)

    def layout(self, seq_len: int, world_size: int) -> Layout:
        return balanced(*self.masks, world_size=world_size, seq_len=seq_len)


class _FixedLayout:
    """A layout as a balancer."""

    def __init__(self, layout: Layout) -> None:
        self.fixed, self.seq_len = layout, layout.seq_len

    def layout(self, seq_len: int, world_size: int) -> Layout:
        if (seq_len, world_size) != (self.fixed.seq_len, self.fixed.world_size):
            raise LayoutError(
                f"load_balancer is {self.fixed}, but there are {seq_len} tokens on {world_size} ranks. Make the layout"
                f" for these."
            )
        return self.fixed


class _RowOrder:
    """A load balancer of PyTorch: `_generate_indices()` lists tokens rank after rank, for all batch rows or for each.

    Ranks take stretches of that list, cut where `Contiguous` cuts. If batch rows have lists of their own, the layout is
    that of the rearranged rows, and `row_order` says which token is where.
    """

    def __init__(self, indices: Ints) -> None:
        self.indices = indices
        self.seq_len = indices.shape[1]

    def layout(self, seq_len: int, world_size: int) -> Layout:
        if seq_len != self.seq_len:
            raise LayoutError(
                f"`load_balancer` must have indices for the {seq_len} tokens of the sequence, but got {self.seq_len}."
                f" Create it for this length."
            )
        cut = Contiguous().layout(seq_len, world_size)
        if len(self.indices) > 1:
            return cut
        edges = np.cumsum([0, *slots(cut)])
        ranks = [_runs(self.indices[0][start:stop]) for start, stop in pairwise(edges)]
        return Layout.from_spans(seq_len, ranks, name="indices")

    def row_order(self, seq_len: int, world_size: int) -> Ints | None:  # noqa: ARG002
        return self.indices if len(self.indices) > 1 else None


def _runs(positions: Ints) -> list[tuple[int, int]]:
    """Return the (start, stop) of consecutive positions, in their order."""
    last = np.flatnonzero(np.append(np.diff(positions) != 1, True))
    stops = positions[last] + 1
    return list(zip((stops - np.diff(last, prepend=-1)).tolist(), stops.tolist(), strict=True))


def _read_indices(load_balancer: Any) -> Balancer:
    """Call `_generate_indices` of a load balancer with PyTorch's interface, and check what it returns."""
    name = type(load_balancer).__name__
    try:
        indices = load_balancer._generate_indices()
    except (AssertionError, NotImplementedError) as error:
        raise NotSupportedError(
            f"`load_balancer` must generate indices for this sequence, but {name} raised {type(error).__name__}"
            f"{f' ({error})' if str(error) else ''}. PyTorch's balancers need lengths that are multiples of 2 x ranks,"
            f" or of 128 x ranks; HeadTail(), PerDocument(lengths) and RoundRobin(mask) of longspan.torch_api take any."
        ) from error
    if indices is None:
        return Contiguous()
    table = indices.detach().cpu().numpy().astype(np.int64) if isinstance(indices, Tensor) else None
    if table is None or table.ndim != 2 or not (np.sort(table, 1) == np.arange(table.shape[1])).all():
        kind = type(indices).__name__ if table is None else f"values {table.tolist()!r:.80} of shape {table.shape}"
        raise LayoutError(
            f"`load_balancer` must generate a tensor (1, tokens) or (batch, tokens) that lists every token of a row"
            f" once, but {name}._generate_indices() returned {kind}."
        )
    return _RowOrder(table[:1] if (table == table[0]).all() else table)


def balancer_of(load_balancer: Any) -> Balancer:
    """Return the argument `load_balancer` as a balancer."""
    if isinstance(load_balancer, Layout):
        return _FixedLayout(load_balancer)
    if not isinstance(load_balancer, type):
        if hasattr(load_balancer, "layout"):
            return load_balancer
        if hasattr(load_balancer, "_generate_indices"):
            return _read_indices(load_balancer)
    raise LayoutError(
        f"`load_balancer` must be Contiguous(), HeadTail(), PerDocument(lengths), RoundRobin(mask) or Balanced(mask) of"
        f" longspan.torch_api, a layout of longspan.layouts, or a load balancer of PyTorch, but got {load_balancer!r}."
    )


def known_length(balancer: Balancer | None, mask: Mask | None, seq_len: int | None = None) -> int | None:
    """Return the length of the whole sequence if it is known; raise if argument, balancer and mask differ."""
    lengths = {
        "seq_len": seq_len,
        "load_balancer": getattr(balancer, "seq_len", None),
        "mask": None if mask is None else mask.seq_len,
    }
    known = {name: length for name, length in lengths.items() if length is not None}
    if len(set(known.values())) > 1:
        claims = ", ".join(f"{name} has {length}" for name, length in known.items())
        raise LayoutError(f"the sequence must have one length, but {claims} tokens. Make them for the same sequence.")
    return next(iter(known.values()), None)


def slots(layout: Layout) -> list[int]:
    """Return the shard length of every rank."""
    return [layout.num_slots(rank) for rank in range(layout.world_size)]


# -- Cuts --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """Which rank has which tokens: a layout, and the order of tokens in each batch row if rows differ."""

    layout: Layout
    order: Ints | None = None
    """Which token of each batch row is at which place, rank after rank; the layout is then that of the places."""

    @classmethod
    def by(cls, balancer: Balancer, seq_len: int, world_size: int) -> Cut:
        order: Callable[[int, int], Ints | None] | None = getattr(balancer, "row_order", None)
        return cls(balancer.layout(seq_len, world_size), None if order is None else order(seq_len, world_size))

    @classmethod
    def of_shards(cls, balancer: Balancer | None, lengths: list[int], seq_len: int | None = None) -> Cut:
        """Return how the balancer cut shards of these lengths, or, without one, the balancer that PyTorch's options
        name; raise if it does not give such lengths."""
        balancer = balancer_in_use(sum(lengths), len(lengths)) if balancer is None else balancer
        length = sum(lengths) if seq_len is None else seq_len
        if isinstance(balancer, Contiguous) and length == sum(lengths):
            return cls(balancer.of_lengths(lengths))
        cut = cls.by(balancer, length, len(lengths))
        if slots(cut.layout) != lengths:
            raise LayoutError(
                f"the ranks hold {lengths} tokens, but {cut.layout} gives them {slots(cut.layout)}. Pass the"
                f" load_balancer= and seq_len= by which they were sharded."
            )
        return cut

    @property
    def is_contiguous(self) -> bool:
        return self.order is None and bool((np.diff(self.layout.table[:, 0]) >= 0).all())

    def differs(self, other: Cut) -> bool:
        """Return whether a rank has other tokens by the other cut."""
        one, two = self.layout, other.layout
        is_same_size = (one.seq_len, one.world_size) == (two.seq_len, two.world_size)
        orders: list[Any] = [self.order, other.order]
        return not is_same_size or other_tokens(one, two) or not np.array_equal(*orders)

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):  # 0 is a label
            check_no_padding(self.layout)
        if self.order is None:
            return self.layout.shard(x, rank, dim)
        start = sum(slots(self.layout)[:rank])
        return rearrange(x, self.order, dim).narrow(dim, start, self.layout.num_slots(rank)).contiguous()

    def unshard(self, shards: list[Tensor], dim: int) -> Tensor:
        whole = self.layout.unshard(shards, dim)
        return whole if self.order is None else rearrange(whole, self.order, dim, restore=True)


def check_no_padding(layout: Layout) -> None:
    if layout.has_padding:
        raise LayoutError(
            f"{layout} has padding, and the fill value for labels or masks is not known here. Use a layout without"
            f" equal_tokens (shards need not be equally long), or shard by layout.shard(x, rank, dim, fill=...)."
        )


def rearrange(x: Tensor, order: Ints, dim: int, *, restore: bool = False) -> Tensor:
    """Move the tokens of every batch row (dim 0) to the places of `order` along `dim`, or back.

    >>> rearrange(torch.tensor([[10, 11, 12], [20, 21, 22]]), np.array([[2, 0, 1], [0, 1, 2]]), 1).tolist()
    [[12, 10, 11], [20, 21, 22]]
    """
    dim %= x.ndim
    if dim == 0 or x.shape[0] != len(order):
        raise LayoutError(
            f"`load_balancer` has an order for each of {len(order)} batch rows, so a buffer must have"
            f" {len(order)} rows in dim 0 and its sequence in another dim, but got shape {tuple(x.shape)} and sequence"
            f" dim {dim}. Use a balancer with one order for all rows, or expand the buffer."
        )
    index = torch.as_tensor(np.argsort(order, 1) if restore else order, device=x.device)
    index = index.view(len(order), *(1,) * (dim - 1), -1, *(1,) * (x.ndim - dim - 1))
    return torch.gather(x, dim, index.expand(x.shape))


# -- PyTorch's option --------------------------------------------------------------------------------------------------
# PyTorch has one switch for the process, `_cp_options.enable_load_balance`: the latest shard sets it, and what is
# called without a balancer follows it. True is head-tail.


def default_balancer(seq_len: int, world_size: int) -> Balancer:
    """Return the balancer of a sequence that is to be cut. As in PyTorch, one with less than two tokens per rank is not
    balanced."""
    return HeadTail() if cp_options().enable_load_balance and seq_len >= 2 * world_size else Contiguous()


def set_option(cut: Cut) -> None:
    """Set the option to whether tokens were rearranged; to the cut itself, which is true, if it is neither contiguous
    nor head-tail, so that it is not taken for head-tail later."""
    layout, option = cut.layout, cp_options()
    if cut.is_contiguous and not layout.has_padding:
        option.enable_load_balance = False
    else:
        head_tail = Cut(HeadTail().layout(layout.seq_len, layout.world_size))
        option.enable_load_balance = cut if layout.has_padding or cut.differs(head_tail) else True


def balancer_in_use(seq_len: int, world_size: int) -> Balancer:
    """Return the balancer of shards that were made without one, or of which the caller does not know it."""
    latest = cp_options().enable_load_balance
    if isinstance(latest, Cut):
        raise LayoutError(
            f"`load_balancer` must be passed, since the latest shards were made by {latest.layout}, which"
            f" _cp_options.enable_load_balance cannot name. Pass the balancer that made these."
        )
    return default_balancer(seq_len, world_size)
