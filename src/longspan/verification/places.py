"""Where each token lies, as tensors; and masks that people end up with by mistake, in global positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspan.layouts import Layout


@dataclass(frozen=True, eq=False)
class Places:
    """For every global position: its rank, its slot there, and its place when shards are laid end to end."""

    owner: Tensor
    slot: Tensor
    joined: Tensor
    counts: tuple[int, ...]

    @staticmethod
    def of(layout: Layout) -> Places:
        rank, slot = layout.locate(np.arange(layout.seq_len, dtype=np.int64))
        before = np.cumsum(layout.num_tokens) - layout.num_tokens
        owner, at, joined = (torch.as_tensor(np.ascontiguousarray(x)) for x in (rank, slot, before[rank] + slot))
        return Places(owner, at, joined, tuple(layout.num_tokens.tolist()))

    @property
    def size(self) -> int:
        return len(self.counts)

    @property
    def remote(self) -> Tensor:
        """Pairs (S, S) whose two sides lie on different ranks."""
        return self.owner[:, None] != self.owner

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold the same number of tokens."""
        return len(set(self.counts)) == 1

    def neighbour(self, shift: int) -> Tensor:
        """The position in the same slot of the rank `shift` after each position's own (equal shards)."""
        at = torch.empty(self.size, max(self.counts), dtype=torch.int64)
        at[self.owner, self.slot] = torch.arange(len(self.owner))
        return at[(self.owner + shift) % self.size, self.slot]


WrongMask = tuple[str, str, Tensor]
"""Cause, evidence, and which pairs (B, H, S, S) attend."""


def mask_mistakes(seen: Tensor, places: Places) -> Iterator[WrongMask]:
    """Masks that a broken integration may have used in place of `seen`, the likeliest first."""
    at = torch.arange(seen.shape[2])
    causal = (at[:, None] >= at).expand_as(seen)
    is_causal = bool((seen <= causal).all())
    joined = _same_component(seen)
    yield (
        "window dropped",
        "The result is that of the same documents without a window: every token sees all it is connected with.",
        joined & causal if is_causal else joined,
    )
    yield "mask replaced by plain causal", "The result is that of a plain causal mask.", causal
    yield "documents leak", "The result is that of the same offsets without documents.", _same_offsets(seen)
    if is_causal:
        yield "the future is seen", "The result is that of a mask which also shows later tokens.", seen | seen.mT
    else:
        yield "mask made causal", "The result is that of the mask without the pairs that look ahead.", seen & causal
    yield "mask dropped", "The result is that of no mask: every token sees every token.", torch.ones_like(seen)
    yield from _of_ranks(seen, causal, places)
    if seen.shape[1] > 1:
        first = seen[:, :1].expand_as(seen)
        yield "one head's mask used for all", "The result is that of head 0's mask for every head.", first
    if seen.shape[0] > 1:
        yield (
            "one row's mask used for all",
            "The result is that of batch row 0's mask for every row.",
            seen[:1].expand_as(seen),
        )


def _of_ranks(seen: Tensor, causal: Tensor, places: Places) -> Iterator[WrongMask]:
    """Mistakes that come from shards."""
    if places.size < 2:
        return
    near, slot, joined = ~places.remote, places.slot, places.joined
    alone = "no exchange between ranks"
    yield alone, "The result is that of ranks which see their own tokens only, under the right mask.", seen & near
    yield alone, "The result is that of plain causal attention over each rank's own shard.", causal & near
    local = (slot[:, None] >= slot) & near
    yield (
        alone,
        "The result is that of causal attention in local order over each rank's own shard.",
        local.expand_as(seen),
    )
    yield alone, "The result is that of full attention over each rank's own shard.", near.expand_as(seen)
    shuffled = "K/V in wrong order"
    yield shuffled, "The result is that of the mask over keys in rank order, not in global order.", seen[..., joined]
    yield shuffled, "The result is that of a causal mask over keys in rank order.", causal[..., joined]
    by_slot = "mask sees local positions"
    text = "The result is that of the mask asked about each query's place in its shard"
    yield by_slot, f"{text}, and keys in rank order.", seen[:, :, slot][..., joined]
    yield by_slot, f"{text}, and keys in global order.", seen[:, :, slot]
    yield (
        by_slot,
        "The result is that of a causal mask that starts at every shard's first row.",
        causal[:, :, slot][..., joined],
    )
    last = slot + len(slot) - torch.tensor(places.counts)[places.owner]
    yield (
        by_slot,
        "The result is that of a causal mask that ends at every shard's last row.",
        causal[:, :, last][..., joined],
    )
    for shift in range(1, places.size):
        hop = places.owner != (places.owner[:, None] + shift) % places.size
        yield (
            "keys of some ranks missing",
            f"The result is that of ranks which never see the keys of the rank {shift} after them.",
            seen & hop,
        )


def _same_component(seen: Tensor) -> Tensor:
    """Pairs of tokens that are connected through any number of allowed pairs, row by batch row."""
    linked = (seen | seen.mT).any(1)
    size = linked.shape[-1]
    label = torch.arange(size).expand(linked.shape[:2]).clone()
    while True:
        reached = torch.where(linked, label[:, None, :], size).amin(-1)
        new = torch.minimum(label, reached)
        if torch.equal(new, label):
            return (label[:, :, None] == label[:, None, :])[:, None].expand_as(seen)
        label = new


def _same_offsets(seen: Tensor) -> Tensor:
    """Pairs whose distance is allowed anywhere."""
    size = seen.shape[-1]
    diagonals = [seen.diagonal(-d, 2, 3).any(-1) for d in range(1 - size, size)]
    at = torch.arange(size)
    return torch.stack(diagonals, -1)[:, :, at[:, None] - at + size - 1]
