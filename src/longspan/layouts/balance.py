"""The balanced layout: equal tokens and equal work on every rank, and few remote keys.

Segments are assigned to ranks, one rank after another. Cutting a causal segment at row x costs x - start remote keys,
whichever ranks get the parts. So a rank that must take part of a long segment takes its last rows, as many as its work
allows, and fills up its tokens with the lightest rows left: short segments, and the first rows of the same long
segment, whose keys it needs anyway. For a single long document this is the zigzag layout; among short documents it is a
long slice and some short documents.

Eight causal tokens on two ranks. Row x sees x + 1 keys, 36 pairs in all, so a rank should get 4 tokens and 18 pairs::

    keys seen   1 2 3 4 5 6 7 8
    rank        0 0 1 1 1 1 0 0     the two heaviest rows, 7 + 8, are balanced by the two lightest, 1 + 2

>>> balanced(causal(8), world_size=2).spans(0)
(0:2, 6:8)

Documents of 5, 2 and 1 tokens have 15, 3 and 1 pairs, so a rank should get 9 or 10. The long one must be cut: one rank
takes its last row, 5 pairs, and fills up with the short documents, 4 pairs. Only that one row has remote keys.

>>> balanced(documents([5, 2, 1]) & causal(), world_size=2).spans(1)
(4:8,)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longspan.errors import LayoutError
from longspan.layouts.layout import Layout, check_masks, check_sizes
from longspan.layouts.profile import Bools, Profile, View
from longspan.layouts.slices import deal_slices
from longspan.masks import Mask
from longspan.masks import bands as bd
from longspan.spans import Ints, check_int, intersect, join, union

# -- Segments ----------------------------------------------------------------------------------------------------------
# A segment is a run of rows that attend to one another (a document, a chunk, the tokens of a global prefix); a cut
# between two segments costs nothing.


@dataclass(frozen=True, slots=True)
class Cuts:
    """Segments that cover the sequence; `deep` if late rows attend to the beginning of their segment."""

    edges: Ints
    deep: Bools

    @property
    def spans(self) -> Ints:
        return np.stack((self.edges[:-1], self.edges[1:]), axis=1)


def segments_of(bands: Ints, seq_len: int, grain: int) -> Cuts:
    """Return the segments of bands. Neighbours shorter than `grain` tokens are joined, up to about `grain` together.

    A band joins keys to the queries among them. Rows that attend only to distant keys (a global prefix, the root of a
    tree) need those keys wherever they are held, so such bands join nothing.

    >>> segments_of(np.array([[0, 6, 0, 6, 0, 9], [6, 9, 6, 9, 0, 9], [0, 9, 0, 1, 0, 9]]), 9, 1).edges.tolist()
    [0, 6, 9]
    """
    near = bands[np.maximum(bands[:, bd.Q0], bands[:, bd.K0]) < np.minimum(bands[:, bd.Q1], bands[:, bd.K1])]
    links = near[np.argsort(near[:, bd.K0], kind="stable")]
    reach = np.maximum.accumulate(links[:, bd.K1])
    first = np.concatenate(([True], links[1:, bd.K0] >= reach[:-1]))[: len(links)]
    last = np.concatenate((first[1:], [True]))[: len(links)]
    linked = np.stack((links[first, bd.K0], reach[last]), axis=1)
    loose = np.concatenate((bands[:, : bd.K0].ravel(), [0, seq_len]))
    block = np.searchsorted(linked[:, 0], loose, side="right") - 1
    inside = (block >= 0) & (loose < linked[block, 1]) if len(linked) else np.zeros(len(loose), dtype=np.bool_)
    edges = np.unique(np.concatenate((linked.ravel(), loose[~inside], [0, seq_len])))
    if len(edges) > 2:  # drop the edges between short neighbours that begin in the same `grain` of the sequence
        short, bucket = np.diff(edges) < grain, edges[:-1] // max(grain, 1)
        drop = short[1:] & short[:-1] & (bucket[1:] == bucket[:-1])
        edges = edges[np.concatenate(([True], ~drop, [True]))]
    back = np.minimum(near[:, bd.HI], near[:, bd.Q1] - 1 - near[:, bd.K0])
    furthest = np.zeros(len(edges) - 1, dtype=np.int64)
    np.maximum.at(furthest, np.searchsorted(edges, near[:, bd.K0], side="right") - 1, back)
    return Cuts(edges, 2 * furthest + 2 >= np.diff(edges))


def remote_rows(bands: Ints, rows: Ints, world_size: int, seq_len: int) -> Ints:
    """Return how many keys each rank needs and does not hold; `rows` are (start, stop, rank), sorted by position.

    >>> remote_rows(np.array([[0, 8, 0, 8, 0, 8]]), np.array([[0, 3, 0], [3, 5, 1], [5, 8, 0]]), 2, 8).tolist()
    [2, 3]
    """
    band, span = join(bands[:, : bd.K0], rows[:, :2])
    cut, held = bands[band], rows[span]
    first = np.maximum(cut[:, bd.K0], np.maximum(cut[:, bd.Q0], held[:, 0]) - cut[:, bd.HI])
    last = np.minimum(cut[:, bd.K1], np.minimum(cut[:, bd.Q1], held[:, 1]) - cut[:, bd.LO])
    # One number line per rank, so that all ranks are counted at once.
    line = seq_len + 1
    needed = union(np.stack((first, last), axis=1) + held[:, 2:] * line)
    own = rows[np.argsort(rows[:, 2], kind="stable")]
    present = intersect(needed, union(own[:, :2] + own[:, 2:] * line))
    count = np.bincount(needed[:, 0] // line, weights=needed[:, 1] - needed[:, 0], minlength=world_size)
    count -= np.bincount(present[:, 0] // line, weights=present[:, 1] - present[:, 0], minlength=world_size)
    return count.astype(np.int64)


# -- The pool: pieces of segments that no rank has yet, by work and by density -----------------------------------------
# Pieces are numbers, with one list per property: the dealer visits thousands of them per batch, and lists are several
# times faster than objects. Work is twice the number of pairs, as in `Profile`.


LIGHT = 0.2
"""Segments with less work per token than this share of the mean are ordered by position, not by work."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """Pieces in some order, and the tokens and work of the first 0, 1, 2, ... of them."""

    pieces: list[int]
    tokens: list[int]
    works: list[int]


class Pool:
    """The pieces still to be dealt: `by_work` and `by_density` list (key, piece) in ascending order."""

    def __init__(self, profile: Profile, spans: Ints, deep: list[bool]) -> None:
        self.before = profile.reader()
        begin, size = profile.before(spans[:, 0]), spans[:, 1] - spans[:, 0]
        work = profile.before(spans[:, 1]) - begin
        self.start: list[int] = spans[:, 0].tolist()
        self.stop: list[int] = spans[:, 1].tolist()
        self.size: list[int] = size.tolist()
        self.begin: list[int] = begin.tolist()
        """The work before the piece, so that the work of part of it takes one lookup."""
        self.work: list[int] = work.tolist()
        self.base = self.start.copy()
        """The start of the piece's segment."""
        self.deep = deep
        self.tokens_left, self.work_left = int(size.sum()), int(work.sum())
        self.lightest = LIGHT * self.work_left / max(self.tokens_left, 1)
        self.by_work = sorted(zip(self.work, range(len(work)), strict=True))
        density = np.maximum(self.lightest, work / size).tolist()
        self.by_density = sorted(zip(density, range(len(work)), strict=True))

    def drop(self, piece: int) -> None:
        """Remove a piece that was dealt."""
        work, size = self.work[piece], self.size[piece]
        del self.by_work[bisect_left(self.by_work, (work, piece))]
        del self.by_density[bisect_left(self.by_density, (max(self.lightest, work / size), piece))]
        self.tokens_left -= size
        self.work_left -= work

    def leave(self, start: int, stop: int, parent: int) -> None:
        """Add part of a dropped piece as a new piece."""
        piece, size, begin = len(self.start), stop - start, self.before(start)
        work = self.before(stop) - begin
        self.start.append(start)
        self.stop.append(stop)
        self.size.append(size)
        self.begin.append(begin)
        self.work.append(work)
        self.base.append(self.base[parent])
        self.deep.append(self.deep[parent])
        insort(self.by_work, (work, piece))
        insort(self.by_density, (max(self.lightest, work / size), piece))
        self.tokens_left += size
        self.work_left += work

    def run(self, order: Iterable[tuple[float, int]], tokens: int, skip: int = -1) -> Ordered:
        """Return the first pieces in this order that together have this number of tokens."""
        pieces: list[int] = []
        token_sums, work_sums = [0], [0]
        token_sum = work_sum = 0
        for _, piece in order:
            if piece == skip:
                continue
            pieces.append(piece)
            token_sum += self.size[piece]
            work_sum += self.work[piece]
            token_sums.append(token_sum)
            work_sums.append(work_sum)
            if token_sum >= tokens:
                break
        return Ordered(pieces, token_sums, work_sums)

    def first_work(self, run: Ordered, tokens: int) -> int:
        """Return the work of the run's first tokens; of the last piece its first rows."""
        k = bisect_right(run.tokens, tokens) - 1
        work, rest = run.works[k], tokens - run.tokens[k]
        if rest > 0 and k < len(run.pieces):
            piece = run.pieces[k]
            work += self.before(self.start[piece] + rest) - self.begin[piece]
        return work

    def last_work(self, run: Ordered, tokens: int) -> int:
        """Return the work of the run's first tokens; of the last piece its last rows."""
        k = bisect_right(run.tokens, tokens) - 1
        work, rest = run.works[k], tokens - run.tokens[k]
        if rest > 0 and k < len(run.pieces):
            piece = run.pieces[k]
            work += self.begin[piece] + self.work[piece] - self.before(self.stop[piece] - rest)
        return work


# -- Dealing segments to ranks -----------------------------------------------------------------------------------------


Spans = list[tuple[int, int]]

WORK_TOLERANCE = 0.005
TOKEN_TOLERANCE = 0.005
MOST_TOKENS = 0.008
"""Limit on the tokens of any rank above the mean."""
SLICE_TOLERANCE = 0.009
"""Limit on work above the mean where rows attend to a window: every cut there costs a window of keys."""
GRID = 128
"""Cuts are rounded to multiples of this, the tile of attention kernels, if the work hardly changes."""
ROUNDING = 0.1
"""Limit, as a share of a rank's tokens, on first rows of a long segment that replace a cut light segment."""
SHORTFALL = 0.06
"""Limit on work below the mean if that saves a cut."""
SLACK = (0.010, 0.012, 0.014)
"""Limit on how far such ranks may push later ranks above the mean, by `whole_first`."""
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank takes [start, head) and [tail, stop) of a piece, and fills up with light pieces."""

    cost: int
    piece: int
    head: int
    tail: int
    light: list[int]


def largest(work: Callable[[int], int], low: int, high: int, target: int, ends: tuple[int, int], near: int) -> int:
    """Return the largest x in [low, high] with work(x) <= target, or one whose work is below it by at most `near`.

    `work` rises; `ends` is its value at `low` and at `high`.

    >>> largest(lambda x: x * x, 0, 100, 1000, (0, 10_000), near=0)
    31
    """
    below, above = float(ends[0] - target), float(ends[1] - target)
    if above <= 0:
        return high
    last = 0
    while high - low > 1 and below < 0:
        x = min(max(low + int((high - low) * (below / (below - above))), low + 1), high - 1)
        off = work(x) - target
        if off <= 0:
            if -off <= near:
                return x
            low, below = x, float(off)
            above = above / 2 if last < 0 else above  # the Illinois rule: an end that stays put loses weight
            last = -1
        else:
            high, above = x, float(off)
            below = below / 2 if last > 0 else below
            last = 1
    return low


class Dealer(Pool):
    """Fill one rank after another, the first `whole_first` of them with whole segments before any long one is cut.

    `tokens` and `need` are the tokens and the work that the current rank still lacks.
    """

    def __init__(
        self, profile: Profile, spans: Ints, deep: list[bool], quota: list[int], exact: bool, whole_first: int
    ) -> None:
        super().__init__(profile, spans, deep)
        self.quota, self.exact, self.whole_first = quota, exact, whole_first
        self.mean_work = self.work_left / len(quota)
        self.mean_tokens = self.tokens_left / len(quota)
        self.work_slip = int(WORK_TOLERANCE * self.mean_work)
        self.near = int(1e-4 * self.mean_work)
        self.token_slip = 0 if exact else int(TOKEN_TOLERANCE * self.mean_tokens)
        self.most_tokens = max(int((1 + MOST_TOKENS) * self.mean_tokens), -(-self.tokens_left // len(quota)))

    def deal(self) -> list[Spans]:
        """Return every rank's spans."""
        dealt: list[Spans] = []
        for rank in range(len(self.quota) - 1):
            left = len(self.quota) - rank
            self.taken: Spans = []
            self.is_early = rank < self.whole_first
            self.tokens = self.quota[rank] if self.exact else self.tokens_left // left
            self.need = work = self.work_left // left
            # A rank below the mean pushes later ranks up, at most by `slack`; a rank above it is the imbalance.
            free = work - self.work_left + int(self.mean_work * (1 + SLACK[self.whole_first])) * (left - 1)
            self.under = max(self.work_slip, min(free, int(SHORTFALL * self.mean_work)))
            self.over = max(self.work_slip, int(self.mean_work * (1 + SLICE_TOLERANCE)) - work)
            self.extra = min(self.token_slip, self.most_tokens - self.tokens)
            self.spare = min(self.token_slip, self.tokens - self.tokens_left + self.most_tokens * (left - 1))
            if self.tokens > 0:
                self._fill()
            dealt.append(self.taken)
        dealt.append([(self.start[i], self.stop[i]) for _, i in self.by_density])
        return dealt

    def _take(self, piece: int) -> None:
        self.drop(piece)
        self.taken.append((self.start[piece], self.stop[piece]))
        self.tokens -= self.size[piece]
        self.need -= self.work[piece]

    def _take_ends(self, piece: int, head: int, tail: int) -> None:
        """Take [start, head) and [tail, stop) of a piece, and leave the rows between in the pool."""
        self.drop(piece)
        for first, last in ((self.start[piece], head), (tail, self.stop[piece])):
            if last > first:
                self.taken.append((first, last))
                self.tokens -= last - first
                self.need -= self.before(last) - self.before(first)
        if tail > head:
            self.leave(head, tail, piece)

    def _run_light(self, skip: int = -1) -> Ordered:
        """Return the lightest pieces with the tokens that the rank lacks."""
        return self.run(self.by_density, self.tokens, skip)

    def _run_dense(self) -> Ordered:
        """Return the densest pieces with the tokens that the rank lacks."""
        dense: Iterable[tuple[float, int]] = reversed(self.by_density)
        if self.is_early:  # long pieces are for later ranks
            dense = [e for e in dense if self.work[e[1]] <= self.mean_work and self.size[e[1]] <= self.mean_tokens]
        return self.run(dense, self.tokens)

    def _least(self, tokens: int) -> int:
        return self.first_work(self.light, tokens)

    # -- Filling one rank ----------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        self.light, self.dense = self._run_light(), self._run_dense()
        densest = self.by_density[-1][1]
        if not self.is_early and not self._fits(densest):
            self._split([densest])
            return
        self._take_whole()
        if self.tokens <= self.spare or not self.by_density:
            return
        lacking = self.need - self._least(self.tokens)
        candidates = self._too_heavy(lacking) if lacking > self.under else []
        if candidates:
            self._split(candidates)
        else:
            self._fill_light(self.light.pieces)

    def _fits(self, piece: int) -> bool:
        """Return whether the rank can take the whole piece and still meet its tokens and work with other pieces."""
        rest, work = self.tokens - self.size[piece], self.work[piece]
        if rest <= self.spare:
            return rest >= -self.extra and self.need - self.under <= work <= self.need + self.work_slip
        if work + self._least(rest) > self.need + self.work_slip:
            return False
        return work + self.last_work(self.dense, rest) >= self.need - self.under

    def _take_whole(self) -> None:
        """Take the heaviest piece that fits, again and again, until light pieces suffice."""
        end = len(self.by_work)
        while self.by_work and self.tokens > self.spare:
            if self.taken and self._least(self.tokens) + self.work_slip >= self.need:
                return
            k = bisect_right(self.by_work, (self.need + self.work_slip, NEVER), 0, min(end, len(self.by_work))) - 1
            step = 8
            while k >= 0 and not self._fits(self.by_work[k][1]):
                k -= step >> 3  # pieces that fit are common near the first try; far from it, take larger steps
                step += 1
            if k < 0:
                return
            end, piece = k, self.by_work[k][1]
            self._take(piece)
            if piece in self.light.pieces:
                self.light = self._run_light()
            if piece in self.dense.pieces:
                self.dense = self._run_dense()

    def _too_heavy(self, lacking: int) -> list[int]:
        """Return the lightest few pieces of which a part, with light pieces, gives the rank its work."""
        candidates: list[int] = []
        k, step = bisect_right(self.by_work, (lacking, 0)), 8
        while k < len(self.by_work) and len(candidates) < 2:
            piece = self.by_work[k][1]
            size = min(self.tokens, self.size[piece])
            last_rows = self.begin[piece] + self.work[piece] - self.before(self.stop[piece] - size)
            if last_rows + self._least(self.tokens - size) > self.need - self.under:
                candidates.append(piece)
            k += step >> 3
            step += 1
        return candidates

    def _split(self, candidates: list[int]) -> None:
        """Cut the candidate whose cut costs least, and fill up with light pieces."""
        best: Cut | None = None
        for piece in candidates:
            light = self.light
            if piece in light.pieces:
                self.light = self._run_light(skip=piece)
            cut = self._fold(piece) if self.deep[piece] else self._slice(piece)
            if best is None or (cut.cost, cut.piece) < (best.cost, best.piece):
                best = cut
            self.light = light
        assert best is not None
        start = self.start[best.piece]
        is_crumb = best.head - start <= min(self.spare, GRID)  # not worth a span of its own
        self._take_ends(best.piece, start if is_crumb else best.head, best.tail)
        self._fill_light(best.light)

    def _slice(self, piece: int) -> Cut:
        """Return a cut of a piece whose rows attend to a window: its last rows, and light pieces."""
        start, stop, tokens = self.start[piece], self.stop[piece], self.tokens
        begin, size, num_light = self.begin[piece], self.size[piece], self.light.tokens[-1]
        end = begin + self.work[piece]

        def work(x: int) -> int:
            head = max(0, tokens - x - num_light)
            own = self.before(start + head) - begin
            return end - self.before(stop - x) + own + self._least(tokens - x - head)

        low, high = max(0, tokens - num_light - size), min(tokens, size)
        ends = work(low), work(high)
        # Such rows have about equal work, so that ranks with slices alone are nearly even: a little more is fine.
        x = high if ends[1] <= self.need + self.over else largest(work, low, high, self.need, ends, self.near)
        head = max(0, tokens - x - num_light)
        return Cut(stop - x - self.base[piece], piece, start + head, stop - x, self.light.pieces)

    def _fold(self, piece: int) -> Cut:
        """Return a cut of a deep piece: its last rows, light pieces, and first rows that are lighter than those."""
        start, stop, tokens, size = self.start[piece], self.stop[piece], self.tokens, self.size[piece]
        begin, num_light = self.begin[piece], self.light.tokens[-1]
        end = begin + self.work[piece]
        # For each light piece, how many first rows of `piece` are lighter than it (work grows as in a causal one).
        first = self.before(start + 1) - begin
        lighter = [(self.work[i] // self.size[i] - first) // 2 for i in self.light.pieces]
        own = [min(size, max(0, rows)) for rows in lighter]
        both = [a + b for a, b in zip(self.light.tokens, own, strict=False)]

        def head(x: int) -> int:
            lacking, room = tokens - x, size - x
            k = bisect_right(both, lacking) - 1
            rows = lacking if k < 0 else max(own[k], lacking - self.light.tokens[k + 1])
            return min(rows, room, lacking)

        def work(x: int) -> int:
            rows = head(x)
            return end - self.before(stop - x) + self.before(start + rows) - begin + self._least(tokens - x - rows)

        low, high = max(0, tokens - num_light - size), min(tokens, size)
        least = work(low)
        if least > self.need:  # its first rows are too heavy after all
            own, both = [0] * len(own), self.light.tokens[:-1]
            least = work(low)
        x = largest(work, low, high, self.need, (least, work(high)), 10 * self.near)  # the rounded fold is exact
        rows = head(x)
        if rows + x < size:
            cut = self._fold_whole_pieces(piece, tokens - x - rows, rows)
            if cut is not None:
                return cut
        return Cut(stop - x - self.base[piece], piece, start + rows, stop - x, self.light.pieces)

    def _fold_whole_pieces(self, piece: int, light_tokens: int, rows: int) -> Cut | None:
        """Return the fold with whole light pieces only: the piece's first rows make up the difference."""
        run = self.light
        k = bisect_right(run.tokens, light_tokens) - 1
        light, tokens, works = run.pieces[:k], run.tokens[k], run.works[k]
        gap = light_tokens - tokens
        if gap and k < len(run.pieces):
            fitting = [i for i in self._about(k, gap, piece) if self.size[i] <= gap + rows]
            best = min(fitting, key=lambda i: (abs(self.size[i] - gap), i), default=-1)
            if best >= 0 and abs(self.size[best] - gap) < gap:
                light, tokens, works = [*light, best], tokens + self.size[best], works + self.work[best]
        rest = self.tokens - tokens
        if abs(tokens - light_tokens) > ROUNDING * self.mean_tokens or not 0 <= rest <= self.size[piece]:
            return None
        start, stop = self.start[piece], self.stop[piece]
        fixed = self.work[piece] + works

        def work(x: int) -> int:
            return fixed - self.before(stop - x) + self.before(start + rest - x)

        ends = work(0), work(rest)
        if not ends[0] <= self.need <= ends[1]:
            return None
        x = largest(work, 0, rest, self.need, ends, self.near)
        # Move the cut to a multiple of GRID if the work hardly changes.
        moved, fold = stop - GRID * round((stop - x) / GRID), start + rest
        if 0 < moved < rest:
            change = self.before(stop - moved) - self.before(stop - x)
            change += self.before(fold - x) - self.before(fold - moved)
            x = moved if abs(change) <= 3e-4 * self.mean_work else x
        return Cut(stop - x - self.base[piece], piece, start + rest - x, stop - x, light)

    def _about(self, k: int, gap: int, skip: int) -> list[int]:
        """Return pieces of about `gap` tokens, not much denser than the k-th light piece, and that piece itself."""
        model = self.light.pieces[k]
        start = self.start[model]
        work = self.before(start + min(gap, self.size[model])) - self.begin[model]
        j = bisect_right(self.by_work, (work, 0))
        limit = 1.1 * max(self.work[model] / self.size[model], self.lightest)
        taken = self.light.pieces[:k]
        near = [i for _, i in self.by_work[max(0, j - 4) : j + 4] if i != skip and i != model]
        return [model, *(i for i in near if self.work[i] <= limit * self.size[i] and i not in taken)]

    def _fill_light(self, light: list[int]) -> None:
        """Take light pieces until the rank has its tokens; cut the last one only if no other has the right size."""
        for piece in light:
            if self.tokens <= self.spare:
                return
            over = self.size[piece] - self.tokens
            if over <= 0 or (over <= self.extra and self.work[piece] <= self.need + self.work_slip):
                self._take(piece)
                continue
            start = self.start[piece]
            work = self.before(start + self.tokens) - self.begin[piece]
            j = bisect_right(self.by_work, (work, 0))
            for work, other in self.by_work[max(0, j - 5) : j + 3]:
                is_close = -self.spare <= self.size[other] - self.tokens <= self.extra
                if is_close and abs(work - self.need) <= self.work_slip:
                    self._take(other)
                    return
            self._take_ends(piece, start + self.tokens, self.stop[piece])
            return


# -- Choosing the best of three deals ----------------------------------------------------------------------------------
# The result depends only on the arguments, so every rank computes the same layout.


BALANCED = 1.015
"""Imbalance (largest rank / mean) up to which fewer remote keys decide; above it, balance does."""
WHOLE_FIRST = (1, 2)
"""Values of `whole_first` tried in addition to 0; the best is kept, since no rule predicts it. Over 60 random packs
of documents, one of the three alone has 2 to 4% more remote keys on average and up to 49% more; of the workloads of
`benchmarks.layouts`, longtail-1M-8 needs 2 and mixed-1M-8 has 20% fewer remote keys with 0. Varying the dealer's
constants as well gained 0.1%."""
MANY = 64
"""Ranks from which only 0 is tried if it is balanced: the others gain 1% there, and take three times as long."""
UNEVEN = 0.005
"""Imbalance beyond BALANCED from which the others are tried on many ranks too."""
ROUGH = 0.3
"""Imbalance beyond BALANCED from which dealing slices by work alone, ignoring remote keys, is tried too."""
LOCAL = 0.03
"""The same for masks with functions, whose work rarely rises along a segment."""


def balanced(
    *masks: Mask, world_size: int, seq_len: int | None = None, equal_tokens: bool = False, span_keys: int = 0
) -> Layout:
    """Return a layout with equal tokens and equal work per rank, under each of the masks, and few remote keys.

    Tokens per rank differ by about a percent if that saves cuts; with `equal_tokens` every rank has the same number of
    slots, the last of which may be padding. `span_keys` is the cost of a span in remote keys: recurrences pass a state
    from span to span, which costs as much as some thousand keys. The functions of masks are called on all pairs of up
    to 4,096 tokens, and on as many of longer sequences, to find the blocks that kernels compute.

    >>> from longspan.masks import causal, documents
    >>> balanced(causal(16), world_size=2, equal_tokens=True).spans(0)
    (0:4, 12:16)
    >>> balanced(documents([4, 4]) & causal(), world_size=2).spans(0)
    (0:4,)
    """
    if not masks:
        raise LayoutError(
            "balanced() needs every mask the model uses, but got none. Pass them, as in balanced(causal(4096))."
        )
    check_masks(masks, "balanced()")
    known = [mask.seq_len for mask in masks if mask.seq_len is not None]
    length = masks[0].length(known[0] if seq_len is None and known else seq_len)
    for mask in masks[1:]:
        mask.length(length)  # raises if it has another
    length, world_size = check_sizes(length, world_size, "balanced")
    span_keys = check_int(span_keys, "span_keys", "balanced()", LayoutError)
    # Masks with functions are not cached: they may hold large tensors, which may change.
    solve = solve_cached if all(mask.is_structured for mask in masks) else solve_cached.__wrapped__
    return solve(masks, length, world_size, equal_tokens, span_keys)


@lru_cache(maxsize=32)
def solve_cached(
    masks: tuple[Mask, ...], length: int, world_size: int, equal_tokens: bool, span_keys: int = 0
) -> Layout:
    """Return the layout of `balanced` for checked arguments; results are cached by mask."""
    rows = solve([View.of(mask, length) for mask in masks], length, world_size, equal_tokens, span_keys)
    slots = -(-length // world_size) if equal_tokens else None
    return Layout.from_table(length, world_size, rows, "balanced", slots)


def solve(views: list[View], seq_len: int, world_size: int, equal_tokens: bool = False, span_keys: int = 0) -> Ints:
    """Return (start, stop, rank) rows, by rank and then position, with each of `seq_len` positions once."""
    if world_size == 1 or seq_len == 0:
        return np.array([[0, seq_len, 0]], dtype=np.int64)[: int(seq_len > 0)]
    views = list({tuple(part.tobytes() for part in (v.bands, v.weights, v.rows)): v for v in views}.values())
    problem = _Problem.of(views, seq_len, world_size, equal_tokens, span_keys)
    has_functions = any(len(view.rows) for view in views)
    if has_functions and len(problem.segments.deep) == 1:  # every cut costs the same
        rows = deal_slices(problem.profiles, seq_len, world_size)
    elif problem.rises():
        rows = _best(problem)
    else:  # dealing wants heavy rows last
        mirrored = [view.mirror(seq_len) for view in views]
        rows = _best(_Problem.of(mirrored, seq_len, world_size, equal_tokens, span_keys))
        rows[:, :2] = seq_len - rows[:, 1::-1]
    if has_functions and problem.quality(rows)[0] > LOCAL:
        rows = min(rows, deal_slices(problem.profiles, seq_len, world_size), key=problem.quality)
    rows[:, 2] = problem.renumber(rows)[rows[:, 2]]
    return rows[np.lexsort((rows[:, 0], rows[:, 2]))]


@dataclass(frozen=True, slots=True)
class _Problem:
    """The input of the dealer."""

    views: list[View]
    profiles: list[Profile]
    segments: Cuts
    seq_len: int
    world_size: int
    exact: bool
    span_keys: int = 0

    @staticmethod
    def of(views: list[View], seq_len: int, world_size: int, exact: bool, span_keys: int = 0) -> _Problem:
        profiles = [view.profile(seq_len) for view in views]
        # The mask with most pairs leads: its work is balanced exactly, that of the others by strata of segments.
        order = sorted(range(len(views)), key=lambda i: (-profiles[i].whole, i))
        grain = max(1, seq_len // (16 * world_size))
        segments = segments_of(np.concatenate([view.bands for view in views]), seq_len, grain)
        by_work = [views[i] for i in order], [profiles[i] for i in order]
        return _Problem(*by_work, segments, seq_len, world_size, exact, span_keys)

    def rises(self) -> bool:
        """Return whether late rows of segments have at least about as much work as early ones."""
        spans = self.segments.spans
        middle = spans.sum(axis=1) // 2
        early = self.profiles[0].of_spans(np.stack((spans[:, 0], middle), axis=1)).sum()
        late = self.profiles[0].of_spans(np.stack((middle, spans[:, 1]), axis=1)).sum()
        return bool(late >= 0.9 * early)

    def strata(self) -> list[Ints]:
        """Return segment indices in groups of about equal work per token under all masks but the leading one."""
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
        """Return the cost to minimise: imbalance beyond BALANCED, then remote keys over all masks and span costs."""
        worst, remote = 1.0, self.span_keys * len(rows)
        by_position = rows[np.argsort(rows[:, 0], kind="stable")]
        for view, profile in zip(self.views, self.profiles, strict=True):
            work = np.bincount(rows[:, 2], weights=profile.of_spans(rows[:, :2]), minlength=self.world_size)
            worst = max(worst, float(work.max() / max(work.mean(), 1)))
            remote += int(remote_rows(view.bands, by_position, self.world_size, self.seq_len).sum())
        return max(0.0, worst - BALANCED), remote

    def renumber(self, rows: Ints) -> Ints:
        """Return new rank numbers by position, with ranks that share a long segment next to each other."""
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
    """Return the best of a few deals, as unsorted (start, stop, rank) rows."""
    strata = problem.strata()
    best = _deal(problem, strata, 0)
    # A single segment cannot be dealt whole, and with many ranks it hardly matters how the first are filled.
    if len(problem.segments.deep) > 1 and (problem.world_size < MANY or problem.quality(best)[0] > UNEVEN):
        best = min(best, *(_deal(problem, strata, ranks) for ranks in WHOLE_FIRST), key=problem.quality)
    if problem.exact or problem.seq_len < 1600 * problem.world_size or problem.quality(best)[0] <= ROUGH:
        return best
    return min(best, _snake(problem), key=problem.quality)


def _deal(problem: _Problem, strata: list[Ints], whole_first: int) -> Ints:
    """Deal every stratum into equal shares, and assign shares to ranks so that the other masks are balanced."""
    spans, deep = problem.segments.spans, problem.segments.deep
    world, before = problem.world_size, 0
    ranks = np.arange(world + 1, dtype=np.int64)
    dealt: list[Ints] = []
    for group in strata:
        size = int((spans[group, 1] - spans[group, 0]).sum())
        # Quotas of all strata together differ by at most one token between ranks.
        quota = np.diff(ranks * (before + size) // world) - np.diff(ranks * before // world)
        before += size
        pieces = problem.profiles[0], spans[group], deep[group].tolist()
        dealer = Dealer(*pieces, quota.tolist(), problem.exact, whole_first)
        shares = [(start, stop, share) for share, taken in enumerate(dealer.deal()) for start, stop in taken]
        rows = np.array(shares, dtype=np.int64).reshape(-1, 3)
        if dealt:
            rows[:, 2] = _match_shares(problem, np.concatenate(dealt), rows, quota)[rows[:, 2]]
        dealt.append(rows)
    return np.concatenate(dealt)


def _match_shares(problem: _Problem, held: Ints, shares: Ints, quota: Ints) -> Ints:
    """Return the rank for each share: the share with most work under the other masks goes to the rank with least."""
    load, extra = np.zeros(problem.world_size), np.zeros(problem.world_size)
    for profile in problem.profiles[1:]:
        for rows, sums in ((held, load), (shares, extra)):
            sums += np.bincount(rows[:, 2], weights=profile.of_spans(rows[:, :2]), minlength=problem.world_size)
    kind = quota if problem.exact else np.zeros_like(quota)  # exact quotas belong to ranks
    rank = np.empty(problem.world_size, dtype=np.int64)
    rank[np.lexsort((-extra, kind))] = np.lexsort((load, kind))
    return rank


def _snake(problem: _Problem) -> Ints:
    """Deal slices of equal length, sorted by work, forwards and backwards: for masks whose work follows no rule."""
    world = problem.world_size
    edges = np.unique(np.arange(16 * world + 1, dtype=np.int64) * problem.seq_len // (16 * world))
    slices = np.stack((edges[:-1], edges[1:]), axis=1)
    order = np.argsort(-problem.profiles[0].of_spans(slices), kind="stable")
    turn = np.arange(len(slices), dtype=np.int64) % (2 * world)
    rank = np.empty(len(slices), dtype=np.int64)
    rank[order] = np.minimum(turn, 2 * world - 1 - turn)
    return np.concatenate((slices, rank[:, None]), axis=1)
