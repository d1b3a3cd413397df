"""Placement of documents over many ranks: whole on one rank where possible, otherwise on neighbours in one node.

Ranks are divided into groups, and documents among the groups, so that every group gets its share of tokens and of work.
A group is a node, or as many nodes as a long document needs. A group whose documents divide evenly is halved, again and
again; no document is cut between halves. The others deal their documents to ranks as `balanced` does, but in runs: what
one rank leaves of a document goes to the next. So only the ranks of one group exchange keys, and few of them.

Two documents on two nodes of two ranks: both are cut, but inside a node.

>>> whole_documents([16, 16], world_size=4, ranks_per_node=2).text().splitlines()[1:]
['0: 0:4 12:16', '1: 4:12', '2: 16:20 28:32', '3: 20:28']
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import LayoutError
from longspan.layouts.balance import GRID, Cut, Dealer, Ordered
from longspan.layouts.layout import Layout, check_sizes
from longspan.layouts.profile import Profile, profile_of
from longspan.masks import bands as bd
from longspan.masks.document_rows import document_edges
from longspan.spans import Ints, check_int

Floats = NDArray[np.float64]

GROUP_TOLERANCE = (0.004, 0.004)
"""Limits on a group's tokens and work, as shares above or below the mean: ranks add their own to it."""
HALF_TOLERANCE = (0.012, 0.010)
"""The same for all halvings of a group together."""
EVEN = 1.014
"""Work of the busiest rank / mean up to which a group's first deal is kept; otherwise the best of several is."""
MOST_ERROR = 2.5
"""Limit on a group's error in units of GROUP_TOLERANCE; beyond it, groups are made larger."""
RICH = (0.8, 0.5, 0.3)
"""Limits to try on the work of the lightest documents, as a share of the work that the groups of long ones lack."""
REDEALT = 40
"""How many ranks are dealt to in all ways."""
NEIGHBOURS, MINE, THEIRS = 6, 24, 128
"""How many other groups, own and other documents a step of `divide` looks at."""
STEPS, HOPELESS = 12, 40.0
"""Limit on the steps of `divide` per group, and the error from which it stops at once."""
BUNDLE = 32
"""Short documents are divided in bundles of 1 / BUNDLE of a rank's tokens."""


def whole_documents(lengths: ArrayLike, *, world_size: int, ranks_per_node: int = 8, causal: bool = True) -> Layout:
    """Return a layout that keeps documents whole on one rank, and cuts those with more than a rank's share of tokens or
    work over neighbouring ranks, of one node where it can. For batches of many documents on many ranks: tokens and work
    are about as even as with `balanced`, every rank exchanges keys with few others, and hardly any keys cross nodes.

    `lengths` are those of the documents in order; `causal=False` if tokens attend to all of their document.

    >>> whole_documents([6, 2, 2, 6], world_size=2).text().splitlines()[1:]
    ['0: 0:8', '1: 8:16']
    """
    edges = document_edges(lengths)
    seq_len, world_size = check_sizes(int(edges[-1]), world_size, "whole_documents")
    node = check_int(ranks_per_node, "ranks_per_node", "whole_documents()", LayoutError, low=1)
    table = _Placement(edges, world_size, node, causal).rows()
    table = table[np.lexsort((table[:, 0], table[:, 2]))]
    return Layout.from_table(seq_len, world_size, table, "whole_documents")


class _Placement:
    """Documents, their tokens and work in shares of a rank, and the ranks they go to."""

    def __init__(self, edges: Ints, world_size: int, node: int, causal: bool) -> None:
        spans = np.stack((edges[:-1], edges[1:]), axis=1)
        self.spans = spans[spans[:, 1] > spans[:, 0]]
        self.seq_len, self.world_size, self.node, self.causal = int(edges[-1]), world_size, node, causal
        sizes = (self.spans[:, 1] - self.spans[:, 0]).astype(np.float64)
        works = sizes * (sizes + 1) if causal else 2 * sizes * sizes
        self.tokens: Floats = sizes * (world_size / max(sizes.sum(), 1.0))
        self.works: Floats = works * (world_size / max(works.sum(), 1.0))
        self.shares: Floats = np.maximum(self.tokens, self.works)

    def rows(self) -> Ints:
        """Return (start, stop, rank) rows."""
        first, parts = 0, list[_Part]()
        for size, documents in self.groups():
            parts.extend(self.halves(_Part(first, size, documents), HALF_TOLERANCE))
            first += size
        deals = [self.deal(part, (FOLDED,)) for part in parts]
        # The ranks that receive most determine the time, so that only their groups are dealt in more ways.
        tried, ranks = set[int](), 0
        while deals and ranks < REDEALT:
            worst = max(range(len(deals)), key=lambda i: deals[i].received)
            if worst in tried or not deals[worst].received:
                break
            deals[worst] = self.deal(parts[worst], WAYS, deals[worst])
            tried.add(worst)
            ranks += parts[worst].size
        return np.concatenate([deal.rows for deal in deals])

    def groups(self) -> list[tuple[int, Ints]]:
        """Return the number of ranks of each group, and its documents. Groups are larger if nodes cannot be even."""
        every, node = np.arange(len(self.spans), dtype=np.int64), self.node
        while len(every) and node < self.world_size:
            for rich in RICH:
                sizes = self.group_sizes(node, rich)
                if len(sizes) == 1:
                    break
                group, error = divide(self.tokens, self.works, sizes, GROUP_TOLERANCE)
                if error > MOST_ERROR:
                    group, error = divide(self.tokens, self.works, sizes, GROUP_TOLERANCE, by_size=True)
                if error <= MOST_ERROR:
                    order = np.argsort(group, kind="stable")
                    parts = np.split(every[order], np.searchsorted(group[order], np.arange(1, len(sizes))))
                    return list(zip(sizes.tolist(), parts, strict=True))
                if self.shares.max() <= node:
                    break
            node *= 2
        return [(self.world_size, every)]

    def group_sizes(self, node: int, rich: float) -> Ints:
        """Return the ranks of each group: as many nodes as each document above a node's share needs, and single nodes.

        A long document has much work and few tokens, so that its group is filled up with the lightest documents. If
        these have too much work, the group needs more nodes.
        """
        num_nodes, rest = divmod(self.world_size, node)
        long = np.flatnonzero(self.shares > node)
        nodes = np.ceil(self.shares[long] / (node * (1 + GROUP_TOLERANCE[1])))
        order = np.argsort(self.tokens, kind="stable")
        order = order[~np.isin(order, long)]
        tokens, works = (np.concatenate(([0.0], np.cumsum(x[order]))) for x in (self.tokens, self.works))
        while len(long) and nodes.sum() < num_nodes:
            lacking_tokens, lacking_work = node * nodes - self.tokens[long], node * nodes - self.works[long]
            if np.interp(lacking_tokens.sum(), tokens, works) <= rich * lacking_work.sum():
                break
            nodes[np.argmin(lacking_work / np.maximum(lacking_tokens, 1e-9))] += 1
        if nodes.sum() > num_nodes:
            return np.array([self.world_size], dtype=np.int64)
        single = np.full(num_nodes - int(nodes.sum()), node, dtype=np.int64)
        last = np.array([rest] if rest else [], dtype=np.int64)
        return np.concatenate((nodes.astype(np.int64) * node, single, last))

    def halves(self, part: _Part, allowed: tuple[float, float]) -> Iterator[_Part]:
        """Yield the halves of a group, halved again, if its documents divide evenly; otherwise the group."""
        documents, half = part.documents, part.size // 2
        is_small = part.size % 2 == 0 and part.size <= self.node and len(documents) > 0
        if is_small and self.shares[documents].max() <= half:
            now = allowed if half == 1 else (allowed[0] / 2, allowed[1] / 2)
            sizes = np.array([half, half], dtype=np.int64)
            number, error = divide(self.tokens[documents], self.works[documents], sizes, now)
            if error <= 1:
                left = allowed[0] - error * now[0], allowed[1] - error * now[1]
                for i in range(2):
                    yield from self.halves(_Part(part.first + i * half, half, documents[number == i]), left)
                return
        yield part

    def deal(self, part: _Part, ways: tuple[int, ...], known: _Deal | None = None) -> _Deal:
        """Return the best of several deals of a group's documents to its ranks, and `known`."""
        spans, size = self.spans[part.documents], part.size
        if size == 1 or not len(spans):
            return _Deal(np.column_stack((spans, np.full(len(spans), part.first, dtype=np.int64))), 0.0, 0)
        bands = np.zeros((len(spans), 6), dtype=np.int64)
        bands[:, bd.Q0 : bd.K0] = bands[:, bd.K0 : bd.LO] = spans
        bands[:, bd.LO], bands[:, bd.HI] = 0 if self.causal else -bd.LIMIT, bd.LIMIT
        profile = profile_of(bd.tighten(bands), self.seq_len)
        best = known
        for way in ways:
            pieces = profile, spans, [True] * len(spans)
            if way >= 0 and size > 2 * self.node and best is not None and best.excess == 0:
                continue  # ranks of one document would be far apart
            dealer = Runs(*pieces, size, way == FOLDED) if way < 0 else Dealer(*pieces, [0] * size, False, way)
            shares = [(start, stop, rank) for rank, taken in enumerate(dealer.deal()) for start, stop in taken]
            rows = np.array(shares, dtype=np.int64).reshape(-1, 3)
            work = np.bincount(rows[:, 2], weights=profile.of_spans(rows[:, :2]), minlength=size)
            excess = max(0.0, float(work.max() / work.mean()) - EVEN)
            deal = _Deal(rows, excess, most_received(rows, spans, size, self.causal))
            rows[:, 2] += part.first
            if best is None or (deal.excess, deal.received) < (best.excess, best.received):
                best = deal
        assert best is not None
        return best if best.excess == 0 or len(ways) > 1 else self.deal(part, WAYS, best)


FOLDED, UNFOLDED = -2, -1
WAYS = (UNFOLDED, 0, 1, 2)
"""Ways to deal: in runs, with as many first as last rows of a document on each rank or not; and as `balanced` does, the
first 0 to 2 ranks with whole documents."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Ranks from `first` on and the documents that they share."""

    first: int
    size: int
    documents: Ints


@dataclass(frozen=True, slots=True)
class _Deal:
    """The (start, stop, rank) rows of a group, the work of its busiest rank beyond EVEN, and the most rows received."""

    rows: Ints
    excess: float
    received: int


def most_received(rows: Ints, documents: Ints, size: int, causal: bool) -> int:
    """Return the most rows that one of `size` ranks receives: K/V in both passes, and gradients of those it lent, which
    have twice the bytes of bfloat16. `documents` are spans; rows are in any order.

    >>> most_received(np.array([[0, 3, 0], [3, 5, 1], [5, 8, 0]]), np.array([[0, 8]]), 2, causal=True)
    10
    """
    number = np.searchsorted(documents[:, 0], rows[:, 0], side="right") - 1
    is_cut = rows[:, 1] - rows[:, 0] < (documents[:, 1] - documents[:, 0])[number]
    # A row may hold several documents in turn; then none of them is cut.
    is_cut &= rows[:, 1] <= documents[number, 1]
    order = np.lexsort((rows[:, 0], number))
    order = order[is_cut[order]]
    received = [0] * size
    for cut in np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(order) else []:
        pieces = rows[cut].tolist()
        furthest = {rank: stop if causal else int(documents[number[cut[0]], 1]) for _, stop, rank in pieces}
        for start, stop, rank in pieces:
            for other, end in furthest.items():
                if other != rank and end > start:
                    num = min(end, stop) - start
                    received[other] += 2 * num
                    received[rank] += 2 * num
    return max(received)


class Runs(Dealer):
    """Fill one rank after another, first with what the rank before left of the documents that it cut."""

    def __init__(self, profile: Profile, spans: Ints, deep: list[bool], world_size: int, folded: bool) -> None:
        self.cut: list[int] = []
        self.folded = folded
        super().__init__(profile, spans, deep, [0] * world_size, False, 0)

    def leave(self, start: int, stop: int, parent: int) -> None:
        """Add part of a dropped piece, which the next rank takes first."""
        self.cut.append(len(self.start))
        super().leave(start, stop, parent)

    def drop(self, piece: int) -> None:
        """Remove a piece that was dealt."""
        super().drop(piece)
        if piece in self.cut:
            self.cut.remove(piece)

    def _density(self, piece: int) -> float:
        return self.work[piece] / self.size[piece]

    def _run_light(self, skip: int = -1) -> Ordered:
        mean = self.mean_work / self.mean_tokens
        first = [(0.0, i) for i in self.cut if self._density(i) <= mean and self.size[i] <= self.mean_tokens]
        if not first:
            return super()._run_light(skip)
        begun = {piece for _, piece in first}
        return self.run([*first, *(entry for entry in self.by_density if entry[1] not in begun)], self.tokens, skip)

    def _fold(self, piece: int) -> Cut:
        """Return a cut of as many first as last rows, and light pieces: then ranks receive and lend equally much."""
        start, stop, tokens, light = self.start[piece], self.stop[piece], self.tokens, self.light
        if not self.folded or (self.work[piece] < 2 * self.need and self.size[piece] < 2 * tokens):
            return super()._fold(piece)  # few remote keys, which matters more if two ranks share the piece
        density = self._density(piece)
        k = bisect_right(
            range(len(light.pieces) + 1), tokens, key=lambda i: light.tokens[i] + (self.need - light.works[i]) / density
        )
        for count in range(min(k, len(light.pieces)), max(k - 3, -1), -1):
            num = tokens - light.tokens[count]
            if not 0 < num < self.size[piece]:
                continue
            # Work is linear in the number of last rows, if the number of all rows stays the same.
            first = self.before(start + num) - self.begin[piece] + light.works[count]
            last = self.begin[piece] + self.work[piece] - self.before(stop - num) + light.works[count]
            rows = round(num * (self.need - first) / (last - first)) if last > first else num
            if 0 <= rows <= num:
                rows = min(max(stop - GRID * round((stop - rows) / GRID), 0), num) if num > 64 * GRID else rows
                return Cut(stop - rows, piece, start + num - rows, stop - rows, light.pieces[:count])
        return super()._fold(piece)

    def _fill(self) -> None:
        self.light, self.dense = self._run_light(), self._run_dense()
        for piece in sorted(self.cut, key=lambda i: (self._density(i), i)):
            if self.tokens <= self.spare:
                return
            if self._fits(piece):
                self._take(piece)
                self.light, self.dense = self._run_light(), self._run_dense()
            elif self.work[piece] > self.need or self.size[piece] > self.tokens:
                self._split([piece])
                return
        if self.tokens > self.spare and self.by_density:
            super()._fill()


# -- Dividing documents among groups -----------------------------------------------------------------------------------


def divide(
    tokens: Floats, works: Floats, sizes: Ints, allowed: tuple[float, float], *, by_size: bool = False
) -> tuple[Ints, float]:
    """Return the group of each document, and the largest error of a group's tokens or work as a share of `allowed`.

    A group of `size` ranks should get `size` shares of both. Documents go to groups from the longest to the shortest,
    each to the group that lacks tokens and work in the document's proportion, or most of them (`by_size`); then single
    documents are moved or swapped.

    >>> divide(np.array([2.0, 1.0, 1.0]), np.array([2.5, 0.8, 0.7]), np.array([2, 2]), (0.1, 0.3))
    (array([0, 1, 1]), 0.8333333333333334)
    """
    order = np.argsort(-tokens, kind="stable")
    total = float(sizes.sum())
    tokens, works = tokens[order] * (total / tokens.sum()), works[order] * (total / works.sum())
    bundle = _bundles(tokens)
    num = int(bundle[-1]) + 1
    n, w = (np.bincount(bundle, x, num).astype(np.float64) for x in (tokens, works))
    few, much = sizes.astype(np.float64), sizes.astype(np.float64)  # what groups lack: tokens and work
    slip_few, slip_much = few * allowed[0], much * allowed[1]
    room_few, room_much = few + slip_few, much + slip_much
    group = np.empty(num, dtype=np.int64)
    for i, (a, b) in enumerate(zip(n.tolist(), w.tolist(), strict=True)):
        score = a * few + b * much
        if not by_size:
            score /= np.sqrt(few * few + much * much + 1e-9)
        score[(room_few < a) | (room_much < b)] -= 1e9
        chosen = int(score.argmax())
        if score[chosen] < -1e8:
            chosen = int(np.minimum(few / slip_few, much / slip_much).argmax())
        group[i] = chosen
        few[chosen] -= a
        much[chosen] -= b
        room_few[chosen] -= a
        room_much[chosen] -= b
    error = _improve(n, w, group, np.stack((few, much)), np.stack((slip_few, slip_much)))
    out = np.empty(len(tokens), dtype=np.int64)
    out[order] = group[bundle]
    return out, error


def _bundles(tokens: Floats) -> Ints:
    """Return the number of each document's bundle; `tokens` are shares of a rank in descending order."""
    short = tokens * BUNDLE < 0.5
    first = int(np.argmax(short)) if short.any() else len(tokens)
    rest = np.cumsum(tokens[first:]) * BUNDLE
    whole = np.arange(first, dtype=np.int64)
    return np.concatenate((whole, first + np.unique(rest.astype(np.int64), return_inverse=True)[1]))


def _improve(n: Floats, w: Floats, group: Ints, lack: Floats, limit: Floats) -> float:
    """Move or swap documents between the group with the largest error and others; return the largest error left."""
    num = lack.shape[1]
    lack /= limit  # in units of the limits
    per_token, per_work = 1 / limit
    square = (lack**2).sum(axis=0)
    is_stuck = np.zeros(num, dtype=np.bool_)
    for _ in range(STEPS * num):
        error = np.where(is_stuck, -1.0, np.abs(lack).max(axis=0))
        a = int(error.argmax())
        if error[a] <= 1 or error[a] > HOPELESS:
            break
        overlap = lack[0, a] * lack[0] + lack[1, a] * lack[1]
        overlap[a] = np.inf
        near = np.argsort(overlap, kind="stable")[: min(NEIGHBOURS, num - 1)]
        is_near = np.zeros(num, dtype=np.bool_)
        is_near[near] = True
        mine, theirs = np.flatnonzero(group == a), np.flatnonzero(is_near[group])
        mine, theirs = mine[:: len(mine) // MINE + 1], theirs[:: len(theirs) // THEIRS + 1]
        other = np.concatenate((group[theirs], near))
        nothing = np.zeros(len(near))
        few = np.append(n[mine], 0.0)[:, None] - np.concatenate((n[theirs], nothing))
        much = np.append(w[mine], 0.0)[:, None] - np.concatenate((w[theirs], nothing))
        new = (lack[0, a] + few * per_token[a]) ** 2
        new += (lack[1, a] + much * per_work[a]) ** 2
        new += (lack[0, other] - few * per_token[other]) ** 2
        new += (lack[1, other] - much * per_work[other]) ** 2
        new -= square[other]
        i, j = divmod(int(new.argmin()), new.shape[1])
        if new[i, j] >= 0.999 * square[a]:
            is_stuck[a] = True
            continue
        b = int(other[j])
        for x, sign in ((a, 1), (b, -1)):
            lack[0, x] += sign * few[i, j] * per_token[x]
            lack[1, x] += sign * much[i, j] * per_work[x]
            square[x] = lack[0, x] ** 2 + lack[1, x] ** 2
        if i < len(mine):
            group[mine[i]] = b
        if j < len(theirs):
            group[theirs[j]] = a
        is_stuck[:] = False
    return float(np.abs(lack).max())
