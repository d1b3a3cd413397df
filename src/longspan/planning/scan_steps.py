"""Schedules of scans as data: pieces of chains, folds, transfers and steps, with a text form.

`Chains` lists the segments of every document on a layout. `Draft` holds the folds and transfers of all ranks as rows of
numbers while a planner writes them.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

import numpy as np

from longspan.errors import PlanError, ScheduleError
from longspan.layouts import Layout
from longspan.planning.steps import AnySchedule
from longspan.spans import Ints, Span, check_int, run_table

# -- Pieces, folds, transfers and steps --------------------------------------------------------------------------------
# The tokens of a document that lie together on a rank are a *segment*, and the segments of a document in order are its
# *chain*. A segment maps the state that enters it to the one that leaves it, S -> M S + U, and so do several in a row:
#
#     piece [1:3)   what segments 1 and 2 do to a state that enters 1: a map (M, U)
#     piece [0:2)   nothing enters a document, so U alone says what leaves segment 1: a state
#
# A *fold* joins two pieces that meet: [i:k) and [k:j) become [i:j), with M = M_right M_left and U = M_right U_left +
# U_right. A rank computes the pieces [i:i+1) of its own segments; the scan is done when the owner of every segment i >
# 0 has [0:i), the state that enters it.
#
# Four segments on ranks 0 to 3, one after the other:
#
#     step 0   0 ── state[0:1] ──► 1
#     step 1   1 folds state[0:1] map[1:2],  1 ── state[0:2] ──► 2
#     step 2   2 folds state[0:2] map[2:3],  2 ── state[0:3] ──► 3
#
# A step's folds come first; its transfers then carry what is there, and what they bring is usable from the next step
# on.


MAX_FEATURES = 1 << 24


class ScanRole(StrEnum):
    """The contents of a piece of a chain."""

    MAP = "map"  # M and U
    STATE = "state"  # U alone: the piece begins with its document
    DSTATE = "dstate"  # the gradient of U


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of states and maps. A state is (heads, keys, values); M acts on its keys, as a matrix if it is dense."""

    heads: int
    keys: int
    values: int
    map_rows: int
    map_cols: int
    dense: int
    itemsize: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            low = 0 if name == "dense" else 1
            number = check_int(getattr(self, name), name, "scan plan", ScheduleError, low=low, high=MAX_FEATURES)
            object.__setattr__(self, name, number)  # numpy's would overflow
        rows, cols = self.map_rows, self.map_cols
        is_diagonal = rows in (1, self.keys) and cols in (1, self.values)
        if not (rows == cols == self.keys if self.dense else is_diagonal):
            raise ScheduleError(
                f"a map of {rows} x {cols} numbers does not fit a state of {self.keys} x {self.values}. A dense one has"
                f" {self.keys} x {self.keys}; a diagonal one has 1 or {self.keys} rows and 1 or {self.values} columns."
            )

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one batch row."""
        return self.heads * self.keys * self.values * self.itemsize

    @property
    def map_bytes(self) -> int:
        """Bytes of M of one batch row."""
        return self.heads * self.map_rows * self.map_cols * self.itemsize

    def text(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class ChainPiece:
    """The segments start, ..., stop - 1 of a chain, as one map or state.

    >>> ChainPiece(ScanRole.MAP, 4, 1, 3, Span(0, 2))
    map[1:3]c4b0:2
    """

    role: ScanRole
    chain: int
    start: int
    stop: int
    batch: Span

    @staticmethod
    def of(chain: int, start: int, stop: int, batch: Span) -> ChainPiece:
        """Return the piece in forward: a state if it begins with its document, else a map."""
        return ChainPiece(ScanRole.MAP if start else ScanRole.STATE, chain, start, stop, batch)

    def num_bytes(self, sizes: StateSizes) -> int:
        return len(self.batch) * (sizes.state_bytes + (sizes.map_bytes if self.role is ScanRole.MAP else 0))

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key of the pieces of a message, the same at both ends."""
        return (self.role, self.chain, self.start, self.stop)

    def to_gradient(self) -> ChainPiece:
        return ChainPiece(ScanRole.DSTATE, self.chain, self.start, self.stop, self.batch)

    def __repr__(self) -> str:
        return f"{self.role}[{self.start}:{self.stop}]c{self.chain}b{self.batch}"


@dataclass(frozen=True, slots=True)
class Fold:
    """One rank joins two pieces that meet. In backward the same fold splits the gradient of the whole: the left part
    gets M_right^T times it, the right part gets it unchanged."""

    rank: int
    left: ChainPiece
    right: ChainPiece

    @property
    def whole(self) -> ChainPiece:
        return ChainPiece.of(self.left.chain, self.left.start, self.right.stop, self.left.batch)

    def __repr__(self) -> str:
        return f"fold {self.left!r} {self.right!r}"


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """One piece goes from one rank to another."""

    src: int
    dst: int
    piece: ChainPiece
    until: int
    """The last step in which it may be used."""

    @property
    def early(self) -> int:
        """Messages of scans are waited for in their own step."""
        return 0

    def __repr__(self) -> str:
        return f"{self.src}>{self.dst} {self.piece!r}"


@dataclass(frozen=True, slots=True)
class ScanStep:
    """One rank's part of a step: it folds, then sends what it has; what arrives is usable from the next step on."""

    transfers: tuple[StateTransfer, ...] = ()
    computes: tuple[Fold, ...] = ()


@dataclass(frozen=True)
class ScanSchedule(AnySchedule):
    """The schedule of a scan. All ranks have the same number of steps."""

    sizes: StateSizes
    ranks: tuple[tuple[ScanStep, ...], ...]
    kind: ClassVar[str] = "scan"


# -- Chains: the segments of every document in order, and the ranks that hold them -------------------------------------
# Every layout has chains. Two documents of 5 and 3 tokens, and ranks that hold 0:3 6:8 and 3:6:
#
#     rank      0 0 0 1 1 1 0 0
#     document  a a a a a b b b        chain a: 0:3 on rank 0, 3:5 on rank 1;  chain b: 5:6 on rank 1, 6:8 on rank 0


CHAIN, PLACE, START, STOP, RANK = range(5)


@dataclass(frozen=True, eq=False)
class Chains:
    """The segments of all documents of a batch. Consecutive batch rows with the same documents share their chains."""

    layout: Layout
    table: Ints
    """(chain, place in it, start, stop, rank) of every segment, by chain and place."""
    batches: tuple[Span, ...]
    """The batch rows of every chain."""

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of documents and owners, which ranks compare."""
        return hashlib.sha256(repr(self.batches).encode() + self.table.tobytes()).hexdigest()

    @cached_property
    def documents(self) -> str:
        """A hex digest of documents alone, independent of the layout."""
        begin = self.table[self.table[:, PLACE] == 0][:, (CHAIN, START)]
        return hashlib.sha256(repr(self.batches).encode() + begin.tobytes()).hexdigest()

    @property
    def first(self) -> Ints:
        """The row in `table` of every chain's first segment, and the number of segments."""
        return np.searchsorted(self.table[:, CHAIN], np.arange(len(self.batches) + 1, dtype=np.int64))

    @property
    def whole(self) -> Ints:
        """(batch row, start, stop) of every document, sorted."""
        first = self.first
        start, stop = self.table[first[:-1], START], self.table[first[1:] - 1, STOP]
        rows = [
            (row, *ends)
            for rows, *ends in zip(self.batches, start, stop, strict=True)
            for row in range(rows.start, rows.stop)
        ]
        return np.array(sorted(rows), dtype=np.int64).reshape(-1, 3)

    def ranks(self) -> list[list[int]]:
        """Return the ranks that hold the segments of every chain."""
        first = self.first.tolist()
        ranks: list[int] = self.table[:, RANK].tolist()
        return [ranks[start:stop] for start, stop in itertools.pairwise(first)]

    def of_rank(self, rank: int) -> Ints:
        """Return (chain, place, first slot, end slot) of the rank's segments, by slot."""
        mine = self.table[self.table[:, RANK] == rank]
        _, slot = self.layout.locate(mine[:, START])
        local = np.stack((mine[:, CHAIN], mine[:, PLACE], slot, slot + mine[:, STOP] - mine[:, START]), axis=1)
        return local[np.lexsort((local[:, 0], local[:, 2]))]


def chains_of(numbers: Ints, layout: Layout, batch: int) -> Chains:
    """Return the chains of documents given as a number per position, (R, S), with R = 1 if all batch rows are equal.

    >>> layout = Layout.from_spans(8, [[(0, 3), (6, 8)], [(3, 6)]])
    >>> chains_of(np.array([[0, 0, 0, 0, 0, 1, 1, 1]]), layout, 1).table.tolist()
    [[0, 0, 0, 3, 0], [0, 1, 3, 5, 1], [1, 0, 5, 6, 1], [1, 1, 6, 8, 0]]
    """
    if len(numbers) not in (1, batch):
        raise PlanError(f"documents have {len(numbers)} batch rows, but the plan is for batch = {batch}.")
    borders = numbers[:, 1:] != numbers[:, :-1]
    equal_rows = run_table((borders[1:] != borders[:-1]).any(axis=1), len(numbers))
    tables: list[Ints] = []
    batches: list[Span] = []
    for start, stop in equal_rows.tolist():
        edges = np.concatenate(([0], np.flatnonzero(borders[start]) + 1, [layout.seq_len])).astype(np.int64)
        tables.append(_segments(edges, layout, len(batches)))
        rows = Span(0, batch) if len(numbers) == 1 else Span(start, stop)
        batches += [rows] * (len(edges) - 1 if layout.seq_len else 0)
    return Chains(layout, np.concatenate(tables), tuple(batches))


def _segments(edges: Ints, layout: Layout, first: int) -> Ints:
    """Return the segments of documents with these edges; chains are numbered from `first` on."""
    if not layout.seq_len:
        return np.empty((0, 5), dtype=np.int64)
    spans = layout.by_position
    starts = np.union1d(spans[:, 0], edges[:-1])
    stops = np.append(starts[1:], layout.seq_len)
    rank = spans[np.searchsorted(spans[:, 0], starts, side="right") - 1, 2]
    chain = np.searchsorted(edges, starts, side="right") - 1
    place = np.arange(len(starts)) - np.searchsorted(chain, chain)
    return np.stack((chain + first, place, starts, stops, rank), axis=1).astype(np.int64)


# -- Draft: the folds and transfers of all ranks as rows of numbers ----------------------------------------------------
# A plan has thousands. They become objects only for the rank whose steps are needed, and stay arrays for cost
# estimates.


class Draft:
    """The output of scan planners. Pieces that a rank has already are neither sent to it nor folded again."""

    def __init__(self, batches: tuple[Span, ...]) -> None:
        self.batches = batches
        self.sent: list[tuple[int, int, int, int, int, int]] = []  # step, source, target, chain, first, end
        self.folded: list[tuple[int, int, int, int, int, int]] = []  # step, rank, chain, first, middle, end
        self._has: set[tuple[int, int, int, int]] = set()

    def send(self, step: int, ends: tuple[int, int], chain: int, segments: tuple[int, int]) -> None:
        src, dst = ends
        key = (dst, chain, *segments)
        if src != dst and key not in self._has:
            self._has.add(key)
            self.sent.append((step, src, dst, chain, *segments))

    def fold(self, step: int, rank: int, chain: int, joined: tuple[int, int, int]) -> None:
        first, middle, end = joined
        key = (rank, chain, first, end)
        if first < middle and key not in self._has:
            self._has.add(key)
            self.folded.append((step, rank, chain, first, middle, end))

    @cached_property
    def transfers(self) -> Ints:
        return np.array(self.sent, dtype=np.int64).reshape(-1, 6)

    @cached_property
    def folds(self) -> Ints:
        return np.array(self.folded, dtype=np.int64).reshape(-1, 6)

    @cached_property
    def num_steps(self) -> int:
        """Steps up to the last transfer, and one more for folds of what it brought."""
        last = max(int(self.transfers[:, 0].max(initial=-1)) + 1, int(self.folds[:, 0].max(initial=-1)))
        return last + 1 if len(self.transfers) or len(self.folds) else 0

    def steps(self, rank: int) -> tuple[ScanStep, ...]:
        """Return the steps of one rank."""
        transfers: list[list[StateTransfer]] = [[] for _ in range(self.num_steps)]
        folds: list[list[Fold]] = [[] for _ in range(self.num_steps)]
        mine = (self.transfers[:, 1] == rank) | (self.transfers[:, 2] == rank)
        sent: list[list[int]] = self.transfers[mine].tolist()
        for step, src, dst, chain, first, end in sent:
            piece = ChainPiece.of(chain, first, end, self.batches[chain])
            transfers[step].append(StateTransfer(src, dst, piece, self.num_steps))
        folded: list[list[int]] = self.folds[self.folds[:, 1] == rank].tolist()
        for step, _, chain, first, middle, end in folded:
            batch = self.batches[chain]
            left, right = ChainPiece.of(chain, first, middle, batch), ChainPiece.of(chain, middle, end, batch)
            folds[step].append(Fold(rank, left, right))
        return tuple(ScanStep(tuple(moved), tuple(work)) for moved, work in zip(transfers, folds, strict=True))
