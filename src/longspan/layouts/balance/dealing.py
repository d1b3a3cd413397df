"""Dealing segments to ranks, one rank after the other, so that each gets its tokens, its work and few remote keys.

Cutting a causal segment at row x costs x - start remote keys, wherever it is and whoever gets which part. So a rank
that must take part of a long segment takes its last rows, as many as its work allows, and fills up its tokens with the
lightest rows there are: short segments, and the first rows of that same long segment, whose keys it needs anyhow. For a
single long document this is the zigzag fold; among short ones it is a long slice with short documents beside it.

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

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from longspan.layouts.balance.pool import Ordered, Pool
from longspan.layouts.balance.segments import Profile
from longspan.span import Ints

Spans = list[tuple[int, int]]

WORK_TOLERANCE = 0.005
TOKEN_TOLERANCE = 0.005
MOST_TOKENS = 0.008
"""How far above the mean the tokens of any rank may be."""
SLICE_TOLERANCE = 0.009
"""Work may be off by this much where rows look back only a little (windows): every cut there costs a window of keys."""
GRID = 128
"""Cuts fall on multiples of this, the tile of attention kernels, where the work hardly changes by it."""
ROUNDING = 0.1
"""How far, in shares of a rank's tokens, a long segment's first rows may stand in for a cut light segment."""
SHORTFALL = 0.06
"""How far below its share of work a rank may end if that saves a cut."""
SLACK = (0.010, 0.012, 0.014)
"""How far above the mean such ranks may push those still to come, by how many were filled with whole segments first."""
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
    """The largest x in [low, high] with work(x) <= target, or one whose work is below it by at most `near`.

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
    """Fills one rank after the other, the first `whole_first` of them with whole segments before any long one is cut.
    `tokens` and `need` are what the rank being filled still lacks."""

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
        """Every rank's spans."""
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
        """Takes [start, head) and [tail, stop) of a piece; what is between stays to be dealt."""
        self.drop(piece)
        for first, last in ((self.start[piece], head), (tail, self.stop[piece])):
            if last > first:
                self.taken.append((first, last))
                self.tokens -= last - first
                self.need -= self.before(last) - self.before(first)
        if tail > head:
            self.leave(head, tail, piece)

    def _run_light(self, skip: int = -1) -> Ordered:
        """The lightest pieces with the tokens that the rank lacks."""
        return self.run(self.by_density, self.tokens, skip)

    def _run_dense(self) -> Ordered:
        """The densest pieces with the tokens that the rank lacks."""
        dense: Iterable[tuple[float, int]] = reversed(self.by_density)
        if self.is_early:  # long pieces are for later ranks
            dense = [e for e in dense if self.work[e[1]] <= self.mean_work and self.size[e[1]] <= self.mean_tokens]
        return self.run(dense, self.tokens)

    def _least(self, tokens: int) -> int:
        return self.first_work(self.light, tokens)

    # -- filling one rank ---------------------------------------------------------------------------------------------

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
        """Whether the rank can take the whole piece and still meet its tokens and its work with other pieces."""
        rest, work = self.tokens - self.size[piece], self.work[piece]
        if rest <= self.spare:
            return rest >= -self.extra and self.need - self.under <= work <= self.need + self.work_slip
        if work + self._least(rest) > self.need + self.work_slip:
            return False
        return work + self.last_work(self.dense, rest) >= self.need - self.under

    def _take_whole(self) -> None:
        """Takes the heaviest piece that fits, and again, until light pieces would do."""
        end = len(self.by_work)
        while self.by_work and self.tokens > self.spare:
            if self.taken and self._least(self.tokens) + self.work_slip >= self.need:
                return
            k = bisect_right(self.by_work, (self.need + self.work_slip, NEVER), 0, min(end, len(self.by_work))) - 1
            step = 8
            while k >= 0 and not self._fits(self.by_work[k][1]):
                k -= step >> 3  # what fits is dense near the first try; far from it, look less closely
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
        """The lightest few pieces of which a part, with light pieces, gives the rank its work."""
        candidates: list[int] = []
        k, step = bisect_right(self.by_work, (lacking, 0)), 8
        while k < len(self.by_work) and len(candidates) < 2:
            piece = self.by_work[k][1]
            size, stop = min(self.tokens, self.size[piece]), self.stop[piece]
            if (
                self.begin[piece] + self.work[piece] - self.before(stop - size) + self._least(self.tokens - size)
                > self.need - self.under
            ):
                candidates.append(piece)
            k += step >> 3
            step += 1
        return candidates

    def _split(self, candidates: list[int]) -> None:
        """Cuts the candidate whose cut costs least, and fills up with light pieces."""
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
        """Where rows look back only a little: the last rows of the piece, and light pieces."""
        start, stop, tokens = self.start[piece], self.stop[piece], self.tokens
        begin, size, there = self.begin[piece], self.size[piece], self.light.tokens[-1]
        end = begin + self.work[piece]

        def work(x: int) -> int:
            head = max(0, tokens - x - there)
            own = self.before(start + head) - begin
            return end - self.before(stop - x) + own + self._least(tokens - x - head)

        low, high = max(0, tokens - there - size), min(tokens, size)
        ends = work(low), work(high)
        # Such rows are about equally heavy, so that ranks of slices alone are nearly even: a little more is fine.
        x = high if ends[1] <= self.need + self.over else largest(work, low, high, self.need, ends, self.near)
        head = max(0, tokens - x - there)
        return Cut(stop - x - self.base[piece], piece, start + head, stop - x, self.light.pieces)

    def _fold(self, piece: int) -> Cut:
        """The last rows of a piece, light pieces, and its first rows as far as they are lighter than those."""
        start, stop, tokens, size = self.start[piece], self.stop[piece], self.tokens, self.size[piece]
        begin, there = self.begin[piece], self.light.tokens[-1]
        end = begin + self.work[piece]
        own = self._own_rows(piece)
        both = [a + b for a, b in zip(self.light.tokens, own, strict=False)]

        def head(x: int) -> int:
            wanted, room = tokens - x, size - x
            k = bisect_right(both, wanted) - 1
            rows = wanted if k < 0 else max(own[k], wanted - self.light.tokens[k + 1])
            return min(rows, room, wanted)

        def work(x: int) -> int:
            rows = head(x)
            return end - self.before(stop - x) + self.before(start + rows) - begin + self._least(tokens - x - rows)

        low, high = max(0, tokens - there - size), min(tokens, size)
        least = work(low)
        if least > self.need:  # its first rows are too heavy after all
            own, both = [0] * len(own), self.light.tokens[:-1]
            least = work(low)
        x = largest(work, low, high, self.need, (least, work(high)), 10 * self.near)  # the rounded fold is exact
        rows = head(x)
        if rows + x < size:
            cut = self._rounded(piece, tokens - x - rows, rows)
            if cut is not None:
                return cut
        return Cut(stop - x - self.base[piece], piece, start + rows, stop - x, self.light.pieces)

    def _own_rows(self, piece: int) -> list[int]:
        """For each light piece, how many first rows of `piece` are lighter than it (work grows as in a causal one)."""
        size, start = self.size[piece], self.start[piece]
        first = self.before(start + 1) - self.begin[piece]
        lighter = [(self.work[i] // self.size[i] - first) // 2 for i in self.light.pieces]
        return [min(size, max(0, rows)) for rows in lighter]

    def _rounded(self, piece: int, light_tokens: int, rows: int) -> Cut | None:
        """The fold with whole light pieces only: the piece's first rows make up for the difference."""
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
        x = self._on_grid(x, rest, stop, start + rest)
        return Cut(stop - x - self.base[piece], piece, start + rest - x, stop - x, light)

    def _about(self, k: int, gap: int, skip: int) -> list[int]:
        """Pieces of about `gap` tokens, not much denser than the k-th light piece, and that piece itself."""
        model = self.light.pieces[k]
        start = self.start[model]
        wanted = self.before(start + min(gap, self.size[model])) - self.begin[model]
        j = bisect_right(self.by_work, (wanted, 0))
        limit = 1.1 * max(self.work[model] / self.size[model], self.lightest)
        taken = self.light.pieces[:k]
        near = [i for _, i in self.by_work[max(0, j - 4) : j + 4] if i != skip and i != model]
        return [model, *(i for i in near if self.work[i] <= limit * self.size[i] and i not in taken)]

    def _on_grid(self, x: int, most: int, stop: int, fold: int) -> int:
        """`x` such that the cut at stop - x is a multiple of GRID, where the work hardly changes by it."""
        moved = stop - GRID * round((stop - x) / GRID)
        if not 0 < moved < most:
            return x
        change = self.before(stop - moved) - self.before(stop - x) + self.before(fold - x) - self.before(fold - moved)
        return moved if abs(change) <= 3e-4 * self.mean_work else x

    def _fill_light(self, light: list[int]) -> None:
        """Takes light pieces until the rank has its tokens; cuts the last one only if no other has the right size."""
        for piece in light:
            if self.tokens <= self.spare:
                return
            over = self.size[piece] - self.tokens
            if over <= 0 or (over <= self.extra and self.work[piece] <= self.need + self.work_slip):
                self._take(piece)
                continue
            start = self.start[piece]
            wanted = self.before(start + self.tokens) - self.begin[piece]
            j = bisect_right(self.by_work, (wanted, 0))
            for work, other in self.by_work[max(0, j - 5) : j + 3]:
                close = -self.spare <= self.size[other] - self.tokens <= self.extra
                if close and abs(work - self.need) <= self.work_slip:
                    self._take(other)
                    return
            self._take_ends(piece, start + self.tokens, self.stop[piece])
            return
