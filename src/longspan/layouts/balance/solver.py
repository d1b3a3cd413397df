"""The balanced layout: equal tokens, equal work under every mask, and few keys that must travel.

`segments` says what masks cost in closed form, `dealing` hands segments to ranks; here a few ways of dealing are tried
and the best is kept. The answer depends on nothing but the arguments, so every rank finds the same one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longspan.errors import LayoutError
from longspan.layouts.balance.dealing import Dealer, Tuning
from longspan.layouts.balance.segments import Profile, Segments, profile_of, remote_rows, segments_of
from longspan.layouts.layout import Layout, check_masks, check_sizes
from longspan.masks import Mask
from longspan.masks import bands as bd
from longspan.span import Ints

BALANCED = 1.015
"""Imbalance (largest rank / mean) up to which fewer remote keys decide; above it, balance does."""
TUNINGS = (
    Tuning(),
    Tuning(whole_first=2, slack=0.014),
    Tuning(whole_first=1),
    Tuning(whole_first=1, rounding=1.0, shortfall=0.02),
    Tuning(rounding=1.0),
    Tuning(rounding=0.2, shortfall=0.0),
)
EFFORT = 1500
"""A budget for trying tunings: segments dealt, a rank counting as twelve; then the best so far is good enough."""
ROUGH = 0.3
"""Where imbalance exceeds BALANCED by more than this, `_snake` is tried too, which ignores communication."""
FEW = 0.002
"""With fewer remote keys per rank than this share of the sequence, no other tuning is tried."""


@dataclass(frozen=True, slots=True)
class View:
    """One mask as a layout sees it: bands, and how many heads and batch rows each of them serves."""

    bands: Ints
    weights: Ints

    @staticmethod
    def of(mask: Mask, seq_len: int) -> View:
        served = Counter(id(plane) for row in mask.grid for plane in row)
        count = [served[id(plane)] for plane in mask.distinct_planes()]
        regions = [bd.tighten(region) for region in mask.regions(seq_len)]
        weights = np.repeat(np.array(count, dtype=np.int64), [len(region) for region in regions])
        return View(np.concatenate(regions), weights)

    def mirrored(self, seq_len: int) -> View:
        """The same pairs with positions counted from the end."""
        q0, q1, k0, k1, lo, hi = self.bands.T
        turned = (seq_len - q1, seq_len - q0, seq_len - k1, seq_len - k0, -hi, -lo)
        return View(np.stack(turned, axis=1), self.weights)


def balanced(*masks: Mask, world_size: int, seq_len: int | None = None, equal_tokens: bool = False) -> Layout:
    """The layout with equal tokens and equal work per rank, under each of the masks, and few remote keys.

    Tokens per rank differ by about a percent where that saves cuts; with `equal_tokens` every rank has the same number
    of slots, and those that no token fills are padding.

    >>> from longspan.masks import causal, documents
    >>> balanced(causal(16), world_size=2, equal_tokens=True).spans(0)
    (0:4, 12:16)
    >>> balanced(documents([4, 4]) & causal(), world_size=2).spans(0)
    (0:4,)
    """
    length = _length_of(masks, seq_len)
    check_sizes(length, world_size, "balanced")
    return solved(masks, length, world_size, equal_tokens)


@lru_cache(maxsize=32)
def solved(masks: tuple[Mask, ...], length: int, world_size: int, equal_tokens: bool) -> Layout:
    """`balanced` with its arguments checked; equal masks give the same layout without solving again."""
    rows = solve([View.of(mask, length) for mask in masks], length, world_size, equal_tokens)
    slots = -(-length // world_size) if equal_tokens else None
    return Layout.from_table(length, world_size, rows, "balanced", slots)


def _length_of(masks: tuple[Mask, ...], seq_len: int | None) -> int:
    """The one length of all masks and the argument."""
    if not masks:
        raise LayoutError("balanced() was given no mask. Pass every mask the model uses, as in balanced(causal(4096)).")
    check_masks(masks, "balanced()")
    known = [mask.seq_len for mask in masks if mask.seq_len is not None]
    length = masks[0].length(known[0] if seq_len is None and known else seq_len)
    for mask in masks[1:]:
        mask.length(length)  # refuses if it has another
    return length


def solve(views: list[View], seq_len: int, world_size: int, equal_tokens: bool = False) -> Ints:
    """(start, stop, rank) rows, by rank and then position, that hold each of `seq_len` positions once."""
    if world_size == 1 or seq_len == 0:
        return np.array([[0, seq_len, 0]], dtype=np.int64)[: int(seq_len > 0)]
    views = list({(view.bands.tobytes(), view.weights.tobytes()): view for view in views}.values())
    problem = _Problem.of(views, seq_len, world_size, equal_tokens)
    if problem.rises():
        rows = _best(problem)
    else:  # dealing wants heavy rows last
        rows = _best(_Problem.of([view.mirrored(seq_len) for view in views], seq_len, world_size, equal_tokens))
        rows[:, :2] = seq_len - rows[:, 1::-1]
    rows[:, 2] = problem.renumbered(rows)[rows[:, 2]]
    return rows[np.lexsort((rows[:, 0], rows[:, 2]))]


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is to be dealt."""

    views: list[View]
    profiles: list[Profile]
    segments: Segments
    seq_len: int
    world_size: int
    exact: bool

    @staticmethod
    def of(views: list[View], seq_len: int, world_size: int, exact: bool) -> _Problem:
        profiles = [profile_of(view.bands, seq_len, view.weights) for view in views]
        # The mask with most pairs leads: its work is met exactly, that of the others by sorting segments into strata.
        order = sorted(range(len(views)), key=lambda i: (-profiles[i].whole, i))
        grain = max(1, seq_len // (16 * world_size))
        segments = segments_of(np.concatenate([view.bands for view in views]), seq_len, grain)
        return _Problem([views[i] for i in order], [profiles[i] for i in order], segments, seq_len, world_size, exact)

    def rises(self) -> bool:
        """Whether late rows of segments have at least about as much work as early ones."""
        spans = self.segments.spans
        middle = spans.sum(axis=1) // 2
        early = self.profiles[0].of_spans(np.stack((spans[:, 0], middle), axis=1)).sum()
        late = self.profiles[0].of_spans(np.stack((middle, spans[:, 1]), axis=1)).sum()
        return bool(late >= 0.9 * early)

    def strata(self) -> list[Ints]:
        """Segment indices in groups of about equal work per token under all masks but the leading one."""
        spans = self.segments.spans
        index = np.arange(len(spans), dtype=np.int64)
        if len(self.views) == 1:
            return [index]
        size = spans[:, 1] - spans[:, 0]
        level = np.zeros(len(spans), dtype=np.int64)
        for profile in self.profiles[1:]:
            density = profile.of_spans(spans) / size
            level += np.round(2 * np.log2(np.maximum(density, 1))).astype(np.int64)
        groups: list[Ints] = []
        held, least = 0, max(self.seq_len // 10, 64 * self.world_size)
        for value in np.unique(level):
            group = index[level == value]
            if groups and held < least:
                group, held = np.sort(np.concatenate((groups.pop(), group))), held + int(size[group].sum())
            else:
                held = int(size[group].sum())
            groups.append(group)
        if len(groups) > 1 and held < least:
            last = groups.pop()
            groups.append(np.sort(np.concatenate((groups.pop(), last))))
        return groups[::-1]  # the strata with most work first, so that later ones can make up for them

    def quality(self, rows: Ints) -> tuple[float, int]:
        """What is to be small: imbalance beyond BALANCED, and remote keys over all masks."""
        worst, remote = 1.0, 0
        by_position = rows[np.argsort(rows[:, 0], kind="stable")]
        for view, profile in zip(self.views, self.profiles, strict=True):
            work = np.bincount(rows[:, 2], weights=profile.of_spans(rows[:, :2]), minlength=self.world_size)
            worst = max(worst, float(work.max() / max(work.mean(), 1)))
            remote += int(remote_rows(view.bands, by_position, self.world_size, self.seq_len).sum())
        return max(0.0, worst - BALANCED), remote

    def renumbered(self, rows: Ints) -> Ints:
        """New rank numbers by position, ranks that share a long segment side by side: they talk to each other most."""
        rows = rows[np.lexsort((self.profiles[0].of_spans(rows[:, :2]), rows[:, 2]))]
        last = np.concatenate((rows[1:, 2] != rows[:-1, 2], [True]))
        home = np.full(self.world_size, self.seq_len, dtype=np.int64)
        home[rows[last, 2]] = np.searchsorted(self.segments.edges, rows[last, 0], side="right")
        first = np.full(self.world_size, self.seq_len, dtype=np.int64)
        np.minimum.at(first, rows[:, 2], rows[:, 0])
        number = np.empty(self.world_size, dtype=np.int64)
        number[np.lexsort((first, home))] = np.arange(self.world_size, dtype=np.int64)
        return number


def _best(problem: _Problem) -> Ints:
    """The best of a few ways of dealing, as unsorted (start, stop, rank) rows."""
    strata = problem.strata()
    cost = len(problem.segments.deep) + 12 * problem.world_size * len(strata)
    tries = EFFORT // cost if len(problem.segments.deep) > 1 else 1
    most = max(tries, min(3, 4 * EFFORT // cost))
    best = _deal(problem, strata, TUNINGS[0])
    least = problem.quality(best)
    for number, tuning in enumerate(TUNINGS[1:], start=1):
        enough = number >= tries or least[1] <= FEW * problem.seq_len * problem.world_size
        if number >= most or (enough and least[0] == 0):
            break
        rows = _deal(problem, strata, tuning)
        quality = problem.quality(rows)
        if quality < least:
            best, least = rows, quality
    if least[0] > ROUGH and not problem.exact and problem.seq_len >= 1600 * problem.world_size:
        rows = _snake(problem)
        best = rows if problem.quality(rows) < least else best
    return best


def _deal(problem: _Problem, strata: list[Ints], tuning: Tuning) -> Ints:
    """Every stratum dealt into equal shares, and the shares given to ranks so that the other masks come out even."""
    spans, deep = problem.segments.spans, problem.segments.deep
    world, before = problem.world_size, 0
    ranks = np.arange(world + 1, dtype=np.int64)
    dealt: list[Ints] = []
    for group in strata:
        size = int((spans[group, 1] - spans[group, 0]).sum())
        # Quotas of all strata together differ by at most one token between ranks.
        quota = np.diff(ranks * (before + size) // world) - np.diff(ranks * before // world)
        before += size
        dealer = Dealer(problem.profiles[0], spans[group], deep[group].tolist(), quota.tolist(), problem.exact, tuning)
        shares = [(start, stop, share) for share, taken in enumerate(dealer.deal()) for start, stop in taken]
        rows = np.array(shares, dtype=np.int64).reshape(-1, 3)
        if dealt:
            rows[:, 2] = _matched(problem, np.concatenate(dealt), rows, quota)[rows[:, 2]]
        dealt.append(rows)
    return np.concatenate(dealt)


def _matched(problem: _Problem, held: Ints, shares: Ints, quota: Ints) -> Ints:
    """The rank for each share: the share with most work under the other masks goes to the rank that has least."""
    load, extra = np.zeros(problem.world_size), np.zeros(problem.world_size)
    for profile in problem.profiles[1:]:
        for rows, sums in ((held, load), (shares, extra)):
            sums += np.bincount(rows[:, 2], weights=profile.of_spans(rows[:, :2]), minlength=problem.world_size)
    kind = quota if problem.exact else np.zeros_like(quota)  # exact quotas belong to ranks
    rank = np.empty(problem.world_size, dtype=np.int64)
    rank[np.lexsort((-extra, kind))] = np.lexsort((load, kind))
    return rank


def _snake(problem: _Problem) -> Ints:
    """Slices of equal length, sorted by work and dealt forwards and backwards: for masks whose work follows no rule."""
    world = problem.world_size
    edges = np.unique(np.arange(16 * world + 1, dtype=np.int64) * problem.seq_len // (16 * world))
    slices = np.stack((edges[:-1], edges[1:]), axis=1)
    order = np.argsort(-problem.profiles[0].of_spans(slices), kind="stable")
    turn = np.arange(len(slices), dtype=np.int64) % (2 * world)
    rank = np.empty(len(slices), dtype=np.int64)
    rank[order] = np.minimum(turn, 2 * world - 1 - turn)
    return np.concatenate((slices, rank[:, None]), axis=1)
