"""The pieces of segments that no rank has yet, sorted by work and by density.

Pieces are numbers, with a list for each of their properties: a dealer looks at thousands of them for every batch, and
lists are several times faster than objects. Work is twice the number of pairs, as in `Profile`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from longspan.layouts.balance.segments import Profile
from longspan.span import Ints

LIGHT = 0.2
"""Segments lighter per token than this share of the mean count as equally light and come in order of position."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """Pieces in some order, and the tokens and work of the first 0, 1, 2, ... of them."""

    pieces: list[int]
    tokens: list[int]
    works: list[int]


class Pool:
    """What is still to be dealt: `by_work` and `by_density` list (key, piece) in rising order."""

    def __init__(self, profile: Profile, spans: Ints, deep: list[bool]) -> None:
        self.before = profile.reader()
        begin, size = profile.before(spans[:, 0]), spans[:, 1] - spans[:, 0]
        work = profile.before(spans[:, 1]) - begin
        self.start: list[int] = spans[:, 0].tolist()
        self.stop: list[int] = spans[:, 1].tolist()
        self.size: list[int] = size.tolist()
        self.begin: list[int] = begin.tolist()
        """The work before the piece, so that the work of part of it is one look-up away."""
        self.work: list[int] = work.tolist()
        self.base = self.start.copy()
        """Where the piece's segment begins."""
        self.deep = deep
        self.tokens_left, self.work_left = int(size.sum()), int(work.sum())
        self.lightest = LIGHT * self.work_left / max(self.tokens_left, 1)
        self.by_work = sorted(zip(self.work, range(len(work)), strict=True))
        density = np.maximum(self.lightest, work / size).tolist()
        self.by_density = sorted(zip(density, range(len(work)), strict=True))

    def drop(self, piece: int) -> None:
        """The piece is dealt."""
        work, size = self.work[piece], self.size[piece]
        del self.by_work[bisect_left(self.by_work, (work, piece))]
        del self.by_density[bisect_left(self.by_density, (max(self.lightest, work / size), piece))]
        self.tokens_left -= size
        self.work_left -= work

    def leave(self, start: int, stop: int, parent: int) -> None:
        """A part of a dropped piece stays, as a piece."""
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
        """The first pieces in this order that together have this number of tokens."""
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
        """The work of the run's first tokens; of the last piece its first rows."""
        k = bisect_right(run.tokens, tokens) - 1
        work, rest = run.works[k], tokens - run.tokens[k]
        if rest > 0 and k < len(run.pieces):
            piece = run.pieces[k]
            work += self.before(self.start[piece] + rest) - self.begin[piece]
        return work

    def last_work(self, run: Ordered, tokens: int) -> int:
        """The work of the run's first tokens; of the last piece its last rows."""
        k = bisect_right(run.tokens, tokens) - 1
        work, rest = run.works[k], tokens - run.tokens[k]
        if rest > 0 and k < len(run.pieces):
            piece = run.pieces[k]
            work += self.begin[piece] + self.work[piece] - self.before(self.stop[piece] - rest)
        return work
