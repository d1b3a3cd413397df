"""The balanced layout: equal tokens, equal work under every mask, and few keys that must travel.

`segments` says what masks cost in closed form, `dealing` hands segments to ranks; here three ways of dealing are tried
and the best is kept. The answer depends on nothing but the arguments, so every rank finds the same one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longspan.errors import LayoutError
from longspan.layouts.balance.dealing import Dealer
from longspan.layouts.balance.segments import Cuts, Profile, profile_of, remote_rows, segments_of
from longspan.layouts.layout import Layout, check_masks, check_sizes
from longspan.masks import Mask
from longspan.masks import bands as bd
from longspan.span import Ints, whole

BALANCED = 1.015
"""Imbalance (largest rank / mean) up to which fewer remote keys decide; above it, balance does."""
WHOLE_FIRST = (1, 2)
"""How many ranks are filled with whole segments before any long one is cut: these are tried beside 0 and the best is
kept, for no rule foretells it. Over 60 random packs of documents, one of the three alone has 2 to 4% more remote keys
on average and up to 49% more; of the workloads of `benchmarks.layouts`, longtail-1M-8 needs 2 and mixed-1M-8 has 20%
fewer remote keys with 0. Varying the dealer's constants as well brought 0.1%."""
MANY = 64
"""Ranks from which 0 is enough if it comes out even: the others bring 1% there, and take three times as long."""
UNEVEN = 0.005
"""Imbalance beyond BALANCED from which the others are tried on many ranks as well."""
ROUGH = 0.3
"""Imbalance beyond BALANCED from which dealing slices by their work alone, whatever travels, is tried too."""


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


def balanced(
    *masks: Mask, world_size: int, seq_len: int | None = None, equal_tokens: bool = False, span_keys: int = 0
) -> Layout:
    """The layout with equal tokens and equal work per rank, under each of the masks, and few remote keys.

    Tokens per rank differ by about a percent where that saves cuts; with `equal_tokens` every rank has the same number
    of slots, and those that no token fills are padding. `span_keys` is what a span costs, in remote keys: recurrences
    hand a state from span to span, which weighs as much as some thousand keys.

    >>> from longspan.masks import causal, documents
    >>> balanced(causal(16), world_size=2, equal_tokens=True).spans(0)
    (0:4, 12:16)
    >>> balanced(documents([4, 4]) & causal(), world_size=2).spans(0)
    (0:4,)
    """
    length = _length_of(masks, seq_len)
    check_sizes(length, world_size, "balanced")
    span_keys = whole(span_keys, "span_keys", "balanced()", LayoutError)
    return solved(masks, length, world_size, equal_tokens, span_keys)


@lru_cache(maxsize=32)
def solved(masks: tuple[Mask, ...], length: int, world_size: int, equal_tokens: bool, span_keys: int = 0) -> Layout:
    """`balanced` with its arguments checked; equal masks give the same layout without solving again."""
    rows = solve([View.of(mask, length) for mask in masks], length, world_size, equal_tokens, span_keys)
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


def solve(views: list[View], seq_len: int, world_size: int, equal_tokens: bool = False, span_keys: int = 0) -> Ints:
    """(start, stop, rank) rows, by rank and then position, that hold each of `seq_len` positions once."""
    if world_size == 1 or seq_len == 0:
        return np.array([[0, seq_len, 0]], dtype=np.int64)[: int(seq_len > 0)]
    views = list({(view.bands.tobytes(), view.weights.tobytes()): view for view in views}.values())
    problem = _Problem.of(views, seq_len, world_size, equal_tokens, span_keys)
    if problem.rises():
        rows = _best(problem)
    else:  # dealing wants heavy rows last
        mirrored = [view.mirrored(seq_len) for view in views]
        rows = _best(_Problem.of(mirrored, seq_len, world_size, equal_tokens, span_keys))
        rows[:, :2] = seq_len - rows[:, 1::-1]
    rows[:, 2] = problem.renumbered(rows)[rows[:, 2]]
    return rows[np.lexsort((rows[:, 0], rows[:, 2]))]


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is to be dealt."""

    views: list[View]
    profiles: list[Profile]
    segments: Cuts
    seq_len: int
    world_size: int
    exact: bool
    span_keys: int = 0

    @staticmethod
    def of(views: list[View], seq_len: int, world_size: int, exact: bool, span_keys: int = 0) -> _Problem:
        profiles = [profile_of(view.bands, seq_len, view.weights) for view in views]
        # The mask with most pairs leads: its work is met exactly, that of the others by sorting segments into strata.
        order = sorted(range(len(views)), key=lambda i: (-profiles[i].whole, i))
        grain = max(1, seq_len // (16 * world_size))
        segments = segments_of(np.concatenate([view.bands for view in views]), seq_len, grain)
        by_work = [views[i] for i in order], [profiles[i] for i in order]
        return _Problem(*by_work, segments, seq_len, world_size, exact, span_keys)

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
        """What is to be small: imbalance beyond BALANCED, and remote keys over all masks, with the price of spans."""
        worst, remote = 1.0, self.span_keys * len(rows)
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
    best = _deal(problem, strata, 0)
    # One segment alone cannot be dealt whole, and of many ranks it hardly matters how the first are filled.
    if len(problem.segments.deep) > 1 and (problem.world_size < MANY or problem.quality(best)[0] > UNEVEN):
        best = min(best, *(_deal(problem, strata, ranks) for ranks in WHOLE_FIRST), key=problem.quality)
    if problem.exact or problem.seq_len < 1600 * problem.world_size or problem.quality(best)[0] <= ROUGH:
        return best
    return min(best, _snake(problem), key=problem.quality)


def _deal(problem: _Problem, strata: list[Ints], whole_first: int) -> Ints:
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
        what = problem.profiles[0], spans[group], deep[group].tolist(), quota.tolist()
        dealer = Dealer(*what, problem.exact, whole_first)
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
