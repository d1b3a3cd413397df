"""The layout of shards whose balancer was not passed.

PyTorch keeps one switch per process (`_cp_options.enable_load_balance`), which the latest shard sets. Here every layout
that cut a sequence is recorded for the ranks of its mesh, and the layout of a tensor is looked up by the number of
tokens on each rank. Tensors that are computed from shards do not carry their layout, and one that was cut earlier may
still be in use, so the latest layout is not taken for granted: if two layouts fit, the call is refused.
"""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longspan.errors import LayoutError
from longspan.execution._torch import version
from longspan.integrations.pytorch.balancers import Balancer, Contiguous, HeadTail, layout_of_shards, slots
from longspan.layouts import Layout
from longspan.layouts.carried import carried, other_tokens

_MAX_LAYOUTS = 1024
_DEFAULTS = (Contiguous(), HeadTail())


class LayoutRecord:
    """The layouts that cut sequences over one list of ranks. All ranks make the same calls, so theirs are equal.

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


def record_of(mesh: DeviceMesh) -> LayoutRecord:
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
        """Return the layout of the default (or of `Contiguous()`), for callers that only ask how long shards are."""
        return (self.default or Contiguous()).layout(seq_len, world_size)

    def of_shard(self, tensor: Tensor, dim: int, lengths: list[int], seq_len: int | None = None) -> Layout:
        """Return the layout of a shard along `dim`, where ranks have these numbers of tokens."""
        record = record_of(self.mesh)
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
