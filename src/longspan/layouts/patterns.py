"""Layouts with a fixed pattern: contiguous, zigzag, striped, per document, round robin by work.

All accept any length and any number of ranks. `balanced` usually gives better plans; these are simple and common in
other systems.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import LayoutError
from longspan.layouts.layout import Layout, check_masks, check_sizes
from longspan.layouts.profile import profile_of_plane
from longspan.masks import Mask
from longspan.masks.document_rows import document_edges
from longspan.spans import Ints, check_int


def slots_for(seq_len: int, world_size: int, equal_tokens: bool) -> int | None:
    """Return the number of slots of every rank, or None if it may differ."""
    return -(-seq_len // world_size) if equal_tokens else None


def contiguous(seq_len: int, world_size: int, *, equal_tokens: bool = False) -> Layout:
    """Rank r holds the r-th stretch of the sequence.

    >>> contiguous(7, 2).spans(1)
    (3:7,)
    """
    seq_len, world_size = check_sizes(seq_len, world_size, "contiguous")
    slots = slots_for(seq_len, world_size, equal_tokens)
    if slots is not None:  # full ranks first, so that the padding is one stretch at the end
        return _stretches(seq_len, world_size, slots, "contiguous", slots)
    edges = np.arange(world_size + 1, dtype=np.int64) * seq_len // world_size
    rows = np.stack((edges[:-1], edges[1:], np.arange(world_size, dtype=np.int64)), axis=1)
    return Layout.from_table(seq_len, world_size, rows, "contiguous")


def _stretches(seq_len: int, world_size: int, size: int, name: str, slots: int | None) -> Layout:
    """Return the layout of stretches of `size` tokens, the last ones shorter or empty."""
    edges = np.minimum(np.arange(world_size + 1, dtype=np.int64) * size, seq_len)
    rows = np.stack((edges[:-1], edges[1:], np.arange(world_size, dtype=np.int64)), axis=1)
    return Layout.from_table(seq_len, world_size, rows, name, slots)


def like_dtensor(seq_len: int, world_size: int) -> Layout:
    """Rank r holds the r-th stretch of the sequence, cut where DTensor and `torch.chunk` cut: all but the last are
    equally long, and for few tokens the last ranks hold none. `contiguous` cuts more evenly.

    >>> like_dtensor(7, 2).spans(0), like_dtensor(5, 4).num_tokens.tolist()
    ((0:4,), [2, 2, 1, 0])
    """
    seq_len, world_size = check_sizes(seq_len, world_size, "like_dtensor")
    return _stretches(seq_len, world_size, -(-seq_len // world_size), "like_dtensor", None)


def zigzag(seq_len: int, world_size: int, *, equal_tokens: bool = False) -> Layout:
    """Rank r holds chunks r and 2 * world_size - 1 - r of 2 * world_size: one early, one late.

    >>> zigzag(8, 2).positions(0).tolist()
    [0, 1, 6, 7]
    """
    seq_len, world_size = check_sizes(seq_len, world_size, "zigzag")
    slots = slots_for(seq_len, world_size, equal_tokens)
    rows = _fold(np.array([0, seq_len], dtype=np.int64), world_size)
    if slots is not None:
        rows = _level(rows, world_size, slots)
    return Layout.from_table(seq_len, world_size, rows, "zigzag", slots)


def _fold(edges: Ints, world_size: int) -> Ints:
    """Return (start, stop, rank) of every document's 2 * world_size chunks, chunk c and its mirror image on one rank.

    Documents start at different ranks, so that the odd tokens of short documents are not all on rank 0.
    """
    num = 2 * world_size
    chunk = np.arange(num, dtype=np.int64)
    starts, sizes = edges[:-1, None], np.diff(edges)[:, None]
    begin = starts + sizes * chunk // num
    end = starts + sizes * (chunk + 1) // num
    folded = np.where(chunk < world_size, chunk, num - 1 - chunk)
    turn = np.arange(len(starts), dtype=np.int64)[:, None]
    rank = (folded + turn) % world_size
    return np.stack((begin.ravel(), end.ravel(), rank.ravel()), axis=1)


def _level(rows: Ints, world_size: int, slots: int) -> Ints:
    """Move tokens from ranks that hold more than `slots` to ranks with room, cutting them off span ends."""
    sizes = np.bincount(rows[:, 2], weights=(rows[:, 1] - rows[:, 0]).astype(np.float64), minlength=world_size)
    excess = sizes.astype(np.int64) - slots
    room = [[rank, -int(extra)] for rank, extra in enumerate(excess.tolist()) if extra < 0]
    out: list[tuple[int, int, int]] = []
    for start, stop, rank in rows.tolist():
        while excess[rank] > 0 and stop > start:
            take = min(int(excess[rank]), stop - start, room[0][1])
            out.append((stop - take, stop, room[0][0]))
            stop -= take
            excess[rank] -= take
            room[0][1] -= take
            if not room[0][1]:
                room.pop(0)
        out.append((start, stop, rank))
    return np.array(sorted(out), dtype=np.int64).reshape(-1, 3)


def striped(seq_len: int, world_size: int, *, stripe: int = 1) -> Layout:
    """Rank r holds every world_size-th stripe of `stripe` tokens.

    >>> striped(8, 2).positions(1).tolist()
    [1, 3, 5, 7]
    """
    seq_len, world_size = check_sizes(seq_len, world_size, "striped")
    stripe = check_int(stripe, "stripe", "striped()", LayoutError, low=1)
    starts = np.arange(0, seq_len, stripe, dtype=np.int64)
    stops = np.minimum(starts + stripe, seq_len)
    rank = np.arange(len(starts), dtype=np.int64) % world_size
    return Layout.from_table(seq_len, world_size, np.stack((starts, stops, rank), axis=1), "striped")


def per_document(lengths: ArrayLike, world_size: int, *, equal_tokens: bool = False) -> Layout:
    """Every document is split over all ranks as zigzag splits a sequence, so each rank gets a share of each.

    >>> per_document([8, 4], 2).spans(0)
    (0:2, 6:8, 9:11)
    """
    edges = document_edges(lengths)
    seq_len, world_size = check_sizes(int(edges[-1]), world_size, "per_document")
    slots = slots_for(seq_len, world_size, equal_tokens)
    rows = _fold(edges, world_size)
    rows = rows[rows[:, 1] > rows[:, 0]]
    if slots is not None:
        rows = _level(rows, world_size, slots)
    return Layout.from_table(seq_len, world_size, rows, "per_document", slots)


def round_robin_by_work(mask: Mask, world_size: int, *, seq_len: int | None = None, block: int = 128) -> Layout:
    """Blocks are sorted by work and dealt forwards, then backwards, so that ranks get equal counts and work.

    >>> round_robin_by_work(causal(8), 2, block=2).spans(0)
    (0:2, 6:8)
    """
    check_masks((mask,), "round_robin_by_work()")
    length = mask.length(seq_len)
    length, world_size = check_sizes(length, world_size, "round_robin_by_work")
    block = check_int(block, "block", "round_robin_by_work()", LayoutError, low=1)
    starts = np.arange(0, length, block, dtype=np.int64)
    stops = np.minimum(starts + block, length)
    blocks = np.stack((starts, stops), axis=1)
    planes = mask.resized(length).distinct_planes()
    work = sum(profile_of_plane(plane, length).of_spans(blocks) for plane in planes)
    order = np.argsort(-work, kind="stable")
    turn = np.arange(len(starts), dtype=np.int64) % (2 * world_size)
    rank = np.empty(len(starts), dtype=np.int64)
    rank[order] = np.where(turn < world_size, turn, 2 * world_size - 1 - turn)
    return Layout.from_table(length, world_size, np.stack((starts, stops, rank), axis=1), "round_robin_by_work")
