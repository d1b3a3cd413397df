"""Load balancers of PyTorch's context parallelism as layouts, and the layout of shards without a balancer argument."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longspan._torch import version
from longspan.errors import LayoutError
from longspan.layouts import Layout, balanced, per_document, round_robin_by_work, zigzag
from longspan.layouts.layout import carried, other_tokens
from longspan.masks import Mask


class Balancer(Protocol):
    """Any object with this method is a balancer; a `Layout` is accepted as one."""

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
    """Equal work under every mask, and few rows to send: `longspan.layouts.balanced`."""

    def __init__(self, *masks: Mask) -> None:
        self.masks = masks

    @property
    def seq_len(self) -> int | None:
        return next((mask.seq_len for mask in self.masks if mask.seq_len is not None), None)

    def layout(self, seq_len: int, world_size: int) -> Layout:
        return balanced(*self.masks, world_size=world_size, seq_len=seq_len)


class _Fixed:
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


def balancer_of(load_balancer: Any) -> Balancer:
    """Return the argument `load_balancer` as a balancer."""
    if isinstance(load_balancer, Layout):
        return _Fixed(load_balancer)
    if isinstance(load_balancer, type) or not hasattr(load_balancer, "layout"):
        raise LayoutError(
            f"`load_balancer` must be Contiguous(), HeadTail(), PerDocument(lengths), RoundRobin(mask) or"
            f" Balanced(mask) of longspan.torch_api, or a layout of longspan.layouts, but got {load_balancer!r}."
        )
    return load_balancer


def known_length(balancer: Balancer, mask: Mask | None, seq_len: int | None = None) -> int | None:
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


def layout_of_shards(balancer: Balancer, lengths: list[int], seq_len: int | None) -> Layout:
    """Return the layout of shards of these lengths; raise if the balancer does not give such lengths."""
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


# -- The layout of shards whose balancer was not passed ----------------------------------------------------------------
# PyTorch keeps one switch per process (`_cp_options.enable_load_balance`), which the latest shard sets. Here every
# layout that sharded a sequence is recorded for the ranks of its mesh, and the layout of a tensor is looked up by the
# number of tokens on each rank. Tensors that are computed from shards do not carry their layout, and an earlier shard
# may still be in use, so the latest layout is not assumed: if two layouts fit, the call is refused.


_MAX_LAYOUTS = 1024
_DEFAULTS = (Contiguous(), HeadTail())


class LayoutRecord:
    """The layouts that cut sequences over one list of ranks; equal on all ranks, which make the same calls.

    Old layouts are dropped, since every batch may have its own. Digests are kept, one for each list of lengths.
    """

    def __init__(self) -> None:
        self.digests: dict[tuple[int, ...], int | None] = {}
        """By tokens per rank; None where two layouts have as many."""
        self.layouts: dict[int, Layout] = {}
        self.latest: Layout | None = None
        self.fitting_defaults = set(_DEFAULTS)
        """Balancers that would have cut every recorded sequence as it was cut."""

    def add(self, layout: Layout) -> None:
        if layout is self.latest:
            return
        digest, self.latest = digest_of(layout), layout
        if digest in self.layouts:
            return
        lengths = tuple(slots(layout))
        is_known = self.digests.get(lengths, digest) == digest
        self.digests[lengths] = digest if is_known else None
        self.layouts[digest] = layout
        if len(self.layouts) > _MAX_LAYOUTS:
            del self.layouts[next(iter(self.layouts))]
        self.fitting_defaults = {balancer for balancer in self.fitting_defaults if _would_cut(balancer, layout)}

    def find(self, lengths: list[int]) -> Layout | None:
        """Return the one layout with these tokens per rank, or None if no sequence was cut so."""
        if tuple(lengths) not in self.digests:
            return None
        digest = self.digests[tuple(lengths)]
        if digest is None:
            raise LayoutError(
                f"`load_balancer` must be passed: on this mesh, sequences of {lengths} tokens per rank were cut by two"
                f" different layouts, and tensors that were computed from shards do not carry theirs. Pass the balancer"
                f" that cut these tensors, or compute inside context_parallel(mesh, load_balancer=...)."
            )
        if digest not in self.layouts:
            raise LayoutError(
                f"`load_balancer` must be passed: more than {_MAX_LAYOUTS} layouts were used on this mesh since a"
                f" sequence of {lengths} tokens per rank was cut. Pass the balancer that cut these tensors."
            )
        return self.layouts[digest]


def digest_of(layout: Layout) -> int:
    """Return a positive number that depends on what every slot holds and not on names, to compare over ranks."""
    head = f"{layout.seq_len} {slots(layout)} "
    return 1 + int.from_bytes(hashlib.sha256(head.encode() + layout.table.tobytes()).digest()[:7], "big")


def _would_cut(balancer: Balancer, layout: Layout) -> bool:
    """Whether the balancer puts every token where the layout has it."""
    try:
        return not other_tokens(layout_of_shards(balancer, slots(layout), layout.seq_len), layout)
    except LayoutError:
        return False


_records: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], LayoutRecord]] = WeakKeyDictionary()
"""By the job's group, which ends with `destroy_process_group`, and by the ranks of a mesh: two meshes, or two slices of
one, may have groups of their own for the same ranks."""


def layout_record(mesh: DeviceMesh) -> LayoutRecord:
    group = mesh.get_group()
    ranks = tuple(dist.get_process_group_ranks(group))
    return _records.setdefault(dist.group.WORLD or group, {}).setdefault(ranks, LayoutRecord())


class Inferred:
    """Stands in for a balancer that was not passed.

    The layout is the one that the tensor carries, if it came straight from a shard; else the one recorded on the mesh
    for shards of these lengths; else that of `default`, unless a sequence of another length was cut on the mesh as
    `default` would not have cut it.
    """

    def __init__(self, mesh: DeviceMesh, default: Balancer | None) -> None:
        self.mesh, self.default = mesh, default

    def layout(self, seq_len: int, world_size: int) -> Layout:
        """Return the layout of the default (or of `Contiguous()`), for callers that only need shard lengths."""
        return (self.default or Contiguous()).layout(seq_len, world_size)

    def of_shard(self, tensor: Tensor, dim: int, lengths: list[int], seq_len: int | None = None) -> Layout:
        """Return the layout of a shard along `dim`, where ranks have these numbers of tokens."""
        record = layout_record(self.mesh)
        layout = carried_layout(tensor, dim, lengths) or record.find(lengths)
        if layout is not None:
            if seq_len not in (None, layout.seq_len):
                raise LayoutError(
                    f"`seq_len` must be {layout.seq_len}, since {layout} has these {lengths} tokens per rank, but got"
                    f" {seq_len}. Pass that length, or the balancer that cut these tensors."
                )
            return layout
        default = Contiguous() if len(lengths) == 1 else self.default  # one rank has all tokens in order
        if default is not None and default in record.fitting_defaults:
            if seq_len not in (None, sum(lengths)):
                return default.layout(seq_len, len(lengths))  # callers check that it fits
            return layout_of_shards(default, lengths, seq_len)
        others = "" if default is None else f" Others were not cut by {default}, which is the default here."
        raise LayoutError(
            f"`load_balancer` must be passed: no sequence of {lengths} tokens per rank was cut on this mesh by this"
            f" process.{others} Pass the balancer that cut these tensors; Contiguous() if they are stretches of the"
            f" sequence."
        )


def carried_layout(tensor: Tensor, dim: int, lengths: list[int]) -> Layout | None:
    """Return the layout that cut a tensor along `dim`, if it came straight from a shard and was not written to."""
    known = carried(tensor)
    if known is None or known.dim != dim % tensor.ndim or known.version != version(tensor):
        return None
    return known.layout if slots(known.layout) == lengths else None
