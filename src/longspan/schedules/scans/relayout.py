"""Moving tokens to a contiguous layout and back, instead of states between the many spans that a rank holds.

A layout that is good for attention may cut every document into pieces for all ranks (striped, zigzag per document), and
then chains are long. Moved once, the tokens of a rank are one stretch: what travels is all that changes its owner, in
forward what goes in and what comes out, in backward their gradients.
"""

from __future__ import annotations

import numpy as np

from longspan.layouts import Layout
from longspan.schedules.cost.machine import Floats, Machine
from longspan.span import Ints


def moved_tokens(source: Layout, target: Layout) -> Ints:
    """(source rank, target rank, tokens) of what changes its owner.

    >>> from longspan.layouts import contiguous, zigzag
    >>> moved_tokens(zigzag(8, 2), contiguous(8, 2)).tolist()
    [[0, 1, 2], [1, 0, 2]]
    """
    starts = np.union1d(source.by_position[:, 0], target.by_position[:, 0])
    lengths = np.diff(np.append(starts, source.seq_len))
    ends = [
        layout.by_position[np.searchsorted(layout.by_position[:, 0], starts, side="right") - 1, 2]
        for layout in (source, target)
    ]
    pair = ends[0] * source.world_size + ends[1]
    tokens = np.bincount(pair, lengths, source.world_size**2).astype(np.int64)
    found = np.flatnonzero(tokens)
    table = np.stack((found // source.world_size, found % source.world_size, tokens[found]), axis=1)
    return table[table[:, 0] != table[:, 1]]


def relayout_price(source: Layout, target: Layout, token_bytes: int, machine: Machine) -> tuple[float, Ints]:
    """Seconds of one pass, and the bytes that every rank receives in it: `token_bytes` are those of all that goes there
    and comes back."""
    moved = moved_tokens(source, target)
    weights = moved[:, 2] * token_bytes
    size = source.world_size
    ports: Floats = np.zeros((len(machine.links), 2, size))
    levels = machine.levels(moved[:, 0], moved[:, 1])
    for way in range(2):
        np.add.at(ports, (levels, np.full(len(moved), way, dtype=np.int64), moved[:, way]), weights)
    bandwidth = np.array([link.bandwidth for link in machine.links])
    latency = np.array([link.latency for link in machine.links])
    busiest = ports.max(axis=(1, 2))
    seconds = float(np.where(busiest > 0, 2 * latency + busiest / bandwidth, 0.0).max(initial=0.0))
    copied = 2.0 * float(source.num_tokens.max(initial=0)) * token_bytes / machine.copy_bandwidth
    return seconds + copied, np.bincount(moved[:, 1], weights, size).astype(np.int64)
