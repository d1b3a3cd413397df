"""Load balancers of PyTorch's context parallelism as layouts, and the layout of shards without a balancer argument."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longspan._torch import cp_options, version
from longspan.errors import LayoutError, NotSupportedError
from longspan.layouts import Layout, balanced, per_document, round_robin_by_work, zigzag
from longspan.layouts.layout import carried_layout_of, other_tokens
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
        return zigzag(seq_len, world_size)


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


def row_order(balancer: Balancer, seq_len: int, world_size: int) -> Ints | None:
    """Return which token of each batch row is at which place, rank after rank; None if all rows have one layout."""
    order: Callable[[int, int], Ints | None] | None = getattr(balancer, "row_order", None)
    return None if order is None else order(seq_len, world_size)


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


def default_balancer() -> Balancer:
    """Return the balancer that PyTorch's `_cp_options.enable_load_balance` selects."""
    return HeadTail() if cp_options().enable_load_balance else Contiguous()


class LayoutRecord:
    """The layouts that cut sequences over one list of ranks; equal on all ranks, which make the same calls.

    Old layouts are dropped, since every batch may have its own. Digests are kept, one for each list of lengths.
    """

    def __init__(self) -> None:
        self.digests: dict[tuple[int, ...], int | None] = {}
        """By tokens per rank; None where two layouts have as many."""
        self.by_lengths: dict[tuple[int, ...], set[int]] = {}
        """The digests of all layouts with as many tokens per rank."""
        self.row_ordered: set[tuple[int, ...]] = set()
        """Tokens per rank of which the latest shards were in an order for each batch row."""
        self.layouts: dict[int, Layout] = {}
        self.latest: Layout | None = None
        self.fitting_defaults = set(_DEFAULTS)
        """Balancers that would have cut every recorded sequence as it was cut."""

    def add(self, layout: Layout) -> None:
        if layout is self.latest:
            return
        if self.row_ordered:
            self.row_ordered.discard(tuple(slots(layout)))
        digest, self.latest = digest_of(layout), layout
        if digest in self.layouts:
            return
        lengths = tuple(slots(layout))
        self.by_lengths.setdefault(lengths, set()).add(digest)
        is_known = self.digests.get(lengths, digest) == digest
        self.digests[lengths] = digest if is_known else None
        self.layouts[digest] = layout
        if len(self.layouts) > _MAX_LAYOUTS:
            del self.layouts[next(iter(self.layouts))]
        self.fitting_defaults = {balancer for balancer in self.fitting_defaults if _would_cut(balancer, layout)}

    def add_row_order(self, lengths: list[int]) -> None:
        """Record that a sequence was cut by a balancer with an order for each batch row, which is no layout."""
        self.digests[tuple(lengths)] = None
        self.row_ordered.add(tuple(lengths))
        self.latest, self.fitting_defaults = None, set()

    def find(self, lengths: list[int], preferred: Balancer | None = None) -> Layout | None:
        """Return the one layout with these tokens per rank, or None if no sequence was cut so. If there are several,
        return that of `preferred`, if it is one of them."""
        if tuple(lengths) not in self.digests:
            return None
        digest = self.digests[tuple(lengths)]
        if digest is None and preferred is not None and tuple(lengths) not in self.row_ordered:
            layout = preferred.layout(sum(lengths), len(lengths))
            if digest_of(layout) in self.by_lengths.get(tuple(lengths), ()):
                return layout
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


def digest_of(layout: Layout, order: Ints | None = None) -> int:
    """Return a positive number that depends on what every slot holds and not on names, to compare over ranks."""
    head = f"{layout.seq_len} {slots(layout)} ".encode()
    content = head + layout.table.tobytes() + (b"" if order is None else order.tobytes())
    return 1 + int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


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
    `default` would not have cut it. With `follow_options`, `_cp_options.enable_load_balance` of PyTorch decides between
    two recorded layouts, and it is the default.
    """

    def __init__(self, mesh: DeviceMesh, default: Balancer | None, follow_options: bool = False) -> None:
        self.mesh, self._default, self.follow_options = mesh, default, follow_options

    @property
    def default(self) -> Balancer | None:
        return default_balancer() if self.follow_options and self._default is not None else self._default

    def layout(self, seq_len: int, world_size: int) -> Layout:
        """Return the layout of the default (or of `Contiguous()`), for callers that only need shard lengths."""
        return (self.default or Contiguous()).layout(seq_len, world_size)

    def of_shard(self, tensor: Tensor, dim: int, lengths: list[int], seq_len: int | None = None) -> Layout:
        """Return the layout of a shard along `dim`, where ranks have these numbers of tokens."""
        record = layout_record(self.mesh)
        preferred = default_balancer() if self.follow_options else None
        layout = carried_layout(tensor, dim, lengths) or record.find(lengths, preferred)
        if layout is not None:
            if seq_len not in (None, layout.seq_len):
                raise LayoutError(
                    f"`seq_len` must be {layout.seq_len}, since {layout} has these {lengths} tokens per rank, but got"
                    f" {seq_len}. Pass that length, or the balancer that cut these tensors."
                )
            return layout
        default = Contiguous() if len(lengths) == 1 else self.default  # one rank has all tokens in order
        if default is not None and isinstance(tensor, DTensor) and not self.follow_options:
            default = Contiguous()  # that is what its placement says
        if default is not None and (self.follow_options or default in record.fitting_defaults):
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
    known = carried_layout_of(tensor)
    if known is None or known.dim != dim % tensor.ndim or known.version != version(tensor):
        return None
    return known.layout if slots(known.layout) == lengths else None
