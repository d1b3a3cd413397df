"""Load balancers as PyTorch's context parallelism knows them: small values that name a layout.

Anything with a method `layout(seq_len, world_size)` that gives a `Layout` is a balancer, and so is a `Layout` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from longspan.errors import LayoutError
from longspan.layouts import Layout, balanced, per_document, round_robin_by_work, zigzag
from longspan.masks import Mask


class Balancer(Protocol):
    """Says who holds which tokens of a sequence."""

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
        return zigzag(seq_len, world_size)


@dataclass(frozen=True, slots=True)
class PerDocument:
    """Every packed document folded over all ranks, head and tail together.

    >>> PerDocument([8, 4]).layout(12, 2).positions(1).tolist()
    [2, 3, 4, 5, 8, 11]
    """

    lengths: Sequence[int]

    @property
    def seq_len(self) -> int:
        return int(sum(self.lengths))

    def layout(self, seq_len: int, world_size: int) -> Layout:
        if seq_len != self.seq_len:
            raise LayoutError(
                f"PerDocument has documents of {self.seq_len} tokens together, but the sequence has {seq_len}. Give the"
                f" length of every document, padding included."
            )
        return per_document(self.lengths, world_size)


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
    """Equal work under every one of the masks, and few rows that travel: `longspan.layouts.balanced`."""

    def __init__(self, *masks: Mask) -> None:
        self.masks = masks

    @property
    def seq_len(self) -> int | None:
        return next((mask.seq_len for mask in self.masks if mask.seq_len is not None), None)

    def layout(self, seq_len: int, world_size: int) -> Layout:
        return balanced(*self.masks, world_size=world_size, seq_len=seq_len)


class _Given:
    """A layout that somebody made."""

    def __init__(self, layout: Layout) -> None:
        self.given, self.seq_len = layout, layout.seq_len

    def layout(self, seq_len: int, world_size: int) -> Layout:
        if (seq_len, world_size) != (self.given.seq_len, self.given.world_size):
            raise LayoutError(
                f"load_balancer is {self.given}, but there are {seq_len} tokens on {world_size} ranks. Make the layout"
                f" for these."
            )
        return self.given


def balancer_of(asked: Any) -> Balancer:
    """What was given as `load_balancer`, as a balancer."""
    if isinstance(asked, Layout):
        return _Given(asked)
    if isinstance(asked, type) or not hasattr(asked, "layout"):
        raise LayoutError(
            f"load_balancer = {asked!r} was given. Use Contiguous(), HeadTail(), PerDocument(lengths),"
            f" RoundRobin(mask) or Balanced(mask) of longspan.integrations.torch_api, or a layout of longspan.layouts."
        )
    return asked


def known_length(balancer: Balancer, mask: Mask | None, asked: int | None = None) -> int | None:
    """The length of the whole sequence, if argument, balancer or mask says it; they must not differ."""
    lengths = {
        "seq_len": asked,
        "load_balancer": getattr(balancer, "seq_len", None),
        "mask": None if mask is None else mask.seq_len,
    }
    known = {name: length for name, length in lengths.items() if length is not None}
    if len(set(known.values())) > 1:
        claims = ", ".join(f"{name} says {length}" for name, length in known.items())
        raise LayoutError(f"the sequence has one length, but {claims} tokens. Make them for the same sequence.")
    return next(iter(known.values()), None)


def slots(layout: Layout) -> list[int]:
    """How long the shard of every rank is."""
    return [layout.num_slots(rank) for rank in range(layout.world_size)]


def layout_of_shards(balancer: Balancer, lengths: list[int], seq_len: int | None) -> Layout:
    """The layout of shards that are this long on each rank; balancers that would have cut otherwise are refused."""
    if isinstance(balancer, Contiguous):
        layout = balancer.of_lengths(lengths)
        if seq_len not in (None, layout.seq_len):
            raise LayoutError(
                f"the sequence must have {layout.seq_len} tokens, since ranks hold {lengths} of them, but got"
                f" {seq_len}. Shard inputs as the context shards its buffers, or pass load_balancer= and seq_len= of"
                f" these shards."
            )
        return layout
    layout = balancer.layout(sum(lengths) if seq_len is None else seq_len, len(lengths))
    if slots(layout) != lengths:
        raise LayoutError(
            f"the ranks hold {lengths} tokens, but {layout} gives them {slots(layout)}. Shard with the same"
            f" load_balancer, or pass load_balancer=Contiguous() if the shards are stretches of the sequence."
        )
    return layout
