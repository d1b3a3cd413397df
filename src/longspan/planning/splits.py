"""Figures of packed causal documents over ranks, and static splits into data-parallel groups to compare them with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longspan.layouts import Layout, balanced
from longspan.layouts.placement import most_received
from longspan.masks import causal, documents
from longspan.spans import Ints, join


@dataclass(frozen=True, slots=True)
class Score:
    """Largest rank / mean of pairs and tokens, most and mean partners, most rows received, ranks the longest needs."""

    pairs: float
    tokens: float
    partners: int
    mean_partners: float
    received: int
    longest_shares: float


def score(lengths: Ints, layout: Layout) -> Score:
    """Return the figures of a layout of causal documents, counted in closed form.

    >>> figures = score(np.array([8, 4, 4]), balanced(documents([8, 4, 4]) & causal(), world_size=2))
    >>> figures.tokens, figures.partners
    (1.0, 1)
    """
    ranks, table = layout.world_size, layout.by_position
    edges = np.concatenate(([0], np.cumsum(lengths)))
    spans = np.stack((edges[:-1], edges[1:]), axis=1)
    i, j = join(spans, table[:, :2])
    start, stop, rank = np.maximum(spans[i, 0], table[j, 0]), np.minimum(spans[i, 1], table[j, 1]), table[j, 2]
    a, b = (start - spans[i, 0]).astype(np.float64), (stop - spans[i, 0]).astype(np.float64)
    work = np.bincount(rank, weights=b * (b + 1) - a * (a + 1), minlength=ranks) / 2
    meets = np.zeros((ranks, ranks), dtype=np.bool_)
    for part in np.split(rank, np.flatnonzero(np.diff(i)) + 1):
        if len(part) > 1:  # causal: of two ranks, the one with the later row needs the other's earlier rows
            meets[np.ix_(part, part)] = True
    np.fill_diagonal(meets, False)
    partners = meets.sum(axis=1)
    received = most_received(np.stack((start, stop, rank), axis=1), spans, ranks, causal=True)
    longest = float(lengths.max())
    return Score(
        float(work.max() / work.mean()),
        float(layout.num_tokens.max() / layout.num_tokens.mean()),
        int(partners.max()),
        float(partners.mean()),
        received,
        longest * (longest + 1) / 2 / float(work.mean()),
    )


def static_groups(lengths: Ints, dp: int, most: int, rule: str) -> list[Ints]:
    """Return the documents of each of `dp` groups, those with most work first. Documents go from the longest to the
    shortest to the group with the fewest "pairs" or "tokens" that has room below `most` tokens.

    >>> [group.tolist() for group in static_groups(np.array([8, 4, 4]), 2, 10, "pairs")]
    [[8], [4, 4]]
    """
    groups: list[list[int]] = [[] for _ in range(dp)]
    tokens, pairs = np.zeros(dp), np.zeros(dp)
    for length in sorted(lengths.tolist(), reverse=True):
        fits = tokens + length <= most
        chosen = int(
            np.where(fits, pairs if rule == "pairs" else tokens, np.inf).argmin() if fits.any() else tokens.argmin()
        )
        groups[chosen].append(length)
        tokens[chosen] += length
        pairs[chosen] += length * (length + 1) / 2
    filled = [np.array(group, dtype=np.int64) for group in groups if group]
    return sorted(filled, key=lambda group: -float((group.astype(np.float64) ** 2).sum()))


def static_layouts(lengths: Ints, dp: int, cp: int, most: int, rule: str) -> Iterator[tuple[Ints, Layout]]:
    """Yield the documents and the layout over `cp` ranks of each static group."""
    for group in static_groups(lengths, dp, most, rule):
        yield group, balanced(documents(group) & causal(), world_size=cp)
