"""BlockMasks of one rank, as PyTorch's context parallelism shards them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Mask, from_mask_mod
from longspan.run.flex import block_mask
from longspan.spans import Ints


def block_mask_length(whole: BlockMask) -> int:
    """Return the length of the sequence that a BlockMask is for."""
    queries, keys = whole.seq_lengths
    if queries != keys:
        raise PlanError(
            f"a BlockMask must be for one sequence, with as many queries as keys, but got {queries} queries and {keys}"
            f" keys. Create it for the whole sequence, before it is sharded."
        )
    return queries


def shard_block_mask(
    mask: Mask,
    layout: Layout,
    order: Ints | None,
    rank: int,
    device: torch.device | str,
    block_size: int | tuple[int, int],
) -> BlockMask:
    """Return the BlockMask of this rank's queries and of all ranks' keys, in the order in which shards are gathered.

    `longspan_shard` of the result holds what attention over ranks needs: the mask in global positions, the layout, and
    the order of each batch row, if rows differ.
    """
    if not isinstance(block_size, int):
        if len(set(block_size)) != 1:
            raise PlanError(
                f"a BlockMask must have blocks of as many queries as keys to be sharded, but got {tuple(block_size)}."
                f" Create it with BLOCK_SIZE={max(block_size)}."
            )
        block_size = block_size[0]
    places = mask if order is None else rearranged_mask(mask, order)
    local = block_mask(places, layout, rank, kv="gathered", block_size=block_size, device=device)
    local.longspan_shard = mask, layout, order  # type: ignore[attr-defined]
    return local


def rearranged_mask(mask: Mask, order: Ints) -> Mask:
    """Return the mask over places, where place p of batch row b holds token `order[b, p]`."""
    tokens, mask_mod = torch.as_tensor(order), mask.to_mask_mod(order.shape[1])

    def rearranged(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row = tokens.to(q_idx.device)[b]
        return mask_mod(b, h, row[q_idx], row[kv_idx])

    heads = None if mask.num_heads == 1 else mask.num_heads
    return from_mask_mod(rearranged, order.shape[1], rows=len(order), heads=heads, name=f"rearranged {mask.name}")


def rearranged_score(score_mod: Any, order: Ints) -> Any:
    """Return the score function over places, where place p of batch row b holds token `order[b, p]`."""
    tokens = torch.as_tensor(order)

    def rearranged(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row = tokens.to(q_idx.device)[b]
        return score_mod(score, b, h, row[q_idx], row[kv_idx])

    return rearranged
