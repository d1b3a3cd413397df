"""The validator proves that a schedule computes exactly the pairs that a mask allows, and that it can run.

It follows the meaning of the instructions and does not depend on planners. It proves that sends and receives are the
same lists; that nothing is used before it arrives or after it is released; that every allowed pair is computed exactly
once; that results and gradients reach the rank that owns them, each contribution once; and that batches stay small.

**Weights.** How does it know that each contribution to a gradient arrives once, without running anything? Every compute
gets its own number, its weight. Wherever a real run would add the compute's gradient to a row, the proof adds the
weight, and transfers move sums of weights as they would move gradients. Say computes with weights 13, 29 and 74 all use
key row 5, which rank 0 owns. At the end rank 0 must have 13 + 29 + 74 = 116 there, and all other ranks nothing::

    one lost                  13 + 29           =  42
    one counted twice         13 + 29 + 74 + 74 = 190
    one lost, one twice       13 + 29 + 29      =  71      counting to three would have missed this one
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from longspan.errors import ScheduleError
from longspan.masks import Mask
from longspan.masks import bands as bd
from longspan.planning.steps import GRADIENT, MAX_BATCH, Compute, Piece, Role, Schedule, Step, Transfer
from longspan.planning.text import table
from longspan.spans import Ints, Span, as_table, union

# -- Board: which rank holds which rows --------------------------------------------------------------------------------
# Positions are cut at every edge that occurs, so that all rows between two neighbouring edges are treated equally;
# heads and batch rows likewise. A proof then works on a few thousand cells for any length of the sequence.


Key = tuple[int, int]
"""Head atom and batch-row atom."""


class Board:
    """Cells of positions, heads and batch rows that a schedule never cuts."""

    def __init__(self, schedule: Schedule) -> None:
        pieces = list(_pieces(schedule))
        sizes = schedule.sizes
        spans = [span for piece in pieces for span in piece.spans] + [
            span for c in _computes(schedule) for band in (*c.bands, *c.maybe) for span in (band.q, band.kv)
        ]
        ends = [value for span in spans for value in (span.start, span.stop)]
        self.edges = np.unique(np.array([0, schedule.layout.seq_len, *schedule.layout.table[:, 0], *ends]))
        self.num_cells = len(self.edges) - 1
        self.sizes = np.diff(self.edges)
        self._q = _edges((p.heads for p in pieces if p.role not in (Role.KV, Role.DKV)), sizes.q_heads)
        self._kv = _edges((p.heads for p in pieces if p.role in (Role.KV, Role.DKV)), sizes.kv_heads)
        self._rows = _edges((p.batch for p in pieces if p.batch is not None), sizes.batch)
        self._seen: dict[Piece, tuple[Ints, list[Key]]] = {}

    def cells(self, spans: tuple[Span, ...]) -> Ints:
        """The numbers of the cells that the spans cover."""
        if not spans:
            return np.empty(0, dtype=np.int64)
        ends = np.searchsorted(self.edges, as_table(spans))
        return np.concatenate([np.arange(low, high, dtype=np.int64) for low, high in ends.tolist()])

    def place(self, piece: Piece) -> tuple[Ints, list[Key]]:
        """Cells and (head, batch row) atoms of a piece."""
        if piece not in self._seen:
            heads = self._kv if piece.role in (Role.KV, Role.DKV) else self._q
            self._seen[piece] = (
                self.cells(piece.spans),
                [(h, b) for h in _atoms(heads, piece.heads) for b in _atoms(self._rows, piece.batch)],
            )
        return self._seen[piece]

    def head_atoms(self) -> Iterator[tuple[int, int]]:
        """(atom, a query head in it)."""
        return ((atom, int(head)) for atom, head in enumerate(self._q[:-1]))

    def row_atoms(self) -> Iterator[tuple[int, int]]:
        """(atom, a batch row in it)."""
        return ((atom, int(row)) for atom, row in enumerate(self._rows[:-1]))


def _edges(spans: Iterator[Span], size: int) -> Ints:
    return np.unique(np.array([0, size, *(value for span in spans for value in (span.start, span.stop))]))


def _atoms(edges: Ints, span: Span | None) -> range:
    if span is None:
        return range(len(edges) - 1)
    low, high = np.searchsorted(edges, [span.start, span.stop]).tolist()
    return range(low, high)


def _computes(schedule: Schedule) -> Iterator[Compute]:
    return (compute for steps in schedule.ranks for step in steps for compute in step.computes)


def _pieces(schedule: Schedule) -> Iterator[Piece]:
    for compute in _computes(schedule):
        yield from (compute.q, compute.kv)
    yield from (transfer.piece for _, transfer in schedule.transfers())
    yield from (piece for pieces in schedule.kept for piece in pieces)


# -- The proof ---------------------------------------------------------------------------------------------------------


Term = tuple[int, int, *tuple[Span, ...]]
"""A board's key, and the queries that are added up apart, if any are."""
Store = dict[tuple[int, Role, Term], Ints]


def validate(schedule: Schedule, mask: Mask) -> None:
    """Raises ScheduleError, with the rank x step table and the error marked, unless the schedule is right."""
    _Proof(schedule, mask.resized(schedule.layout.seq_len)).run()


class _Proof:
    def __init__(self, schedule: Schedule, mask: Mask) -> None:
        self.schedule, self.mask = schedule, mask
        self.board = Board(schedule)
        self.held: Store = {}
        self.leaving: dict[int, list[tuple[int, Piece]]] = {}
        self.sums: Store = {}  # gradient contributions, as sums of numbers that stand for computes
        self.expected: Store = {}
        self.results: Store = {}  # 1: computed here, 2: sent to its owner
        self.num_computes = 0

    def run(self) -> None:
        self._give_owners()
        for number in range(self.schedule.num_steps):
            self._step(number)
        self._check_results()
        self._check_gradients()
        self._check_coverage()

    def fail(self, rank: int, step: int, what: str) -> NoReturn:
        raise ScheduleError(
            f"{self.schedule.scheme} {self.schedule.direction}: rank {rank}, step {step}: {what}\n"
            + table(self.schedule, mark=(rank, step))
        )

    # -- Walking -------------------------------------------------------------------------------------------------------

    def _give_owners(self) -> None:
        sizes, layout = self.schedule.sizes, self.schedule.layout
        roles = [Role.Q, Role.KV] + ([Role.DOUT] if self.schedule.direction == "backward" else [])
        for rank in range(layout.world_size):
            for role in roles:
                heads = sizes.kv_heads if role is Role.KV else sizes.q_heads
                self._hold(rank, Piece(role, layout.spans(rank), Span(0, heads)), self.schedule.num_steps + 2)
            for piece in self.schedule.kept[rank] if self.schedule.kept else ():
                self._hold(rank, piece, self.schedule.num_steps + 2)

    def _array(self, store: Store, rank: int, role: Role, key: Term) -> Ints:
        if (rank, role, key) not in store:
            store[rank, role, key] = np.zeros(self.board.num_cells, dtype=np.int64)
        return store[rank, role, key]

    def _hold(self, rank: int, piece: Piece, until: int, sign: int = 1) -> None:
        cells, keys = self.board.place(piece)
        for key in keys:
            self._array(self.held, rank, piece.role, key)[cells] += sign
        if sign > 0:
            self.leaving.setdefault(until, []).append((rank, piece))

    def _holds(self, rank: int, piece: Piece) -> bool:
        cells, keys = self.board.place(piece)
        return all(bool((self._array(self.held, rank, piece.role, key)[cells] > 0).all()) for key in keys)

    def _step(self, number: int) -> None:
        steps = {r: s[number] for r, s in enumerate(self.schedule.ranks) if number < len(s)}
        self._check_lists(steps, number)
        sums: list[tuple[Transfer, Ints, Term]] = []
        for rank, step in steps.items():
            for transfer in (t for t in step.transfers if t.src == rank):
                sums += self._send(transfer, number)
        for rank, step in steps.items():
            for compute in step.computes:
                self._compute(compute, rank, number)
        for rank, piece in self.leaving.pop(number, []):
            self._hold(rank, piece, 0, sign=-1)
        for transfer, values, key in sums:
            cells, _ = self.board.place(transfer.piece)
            here = self._array(self.sums, transfer.dst, transfer.piece.role, key)
            if transfer.piece.apart and ((here[cells] != 0) & (values != 0)).any():
                self.fail(transfer.dst, number, f"{transfer!r} brings a second sum of queries that are one branch.")
            here[cells] += values
        for rank, step in steps.items():
            for t in step.transfers:
                if t.dst == rank and t.piece.role in (Role.Q, Role.KV, Role.DOUT):
                    if t.until <= number:
                        self.fail(rank, number, f"{t!r} may be used only until step {t.until}, before it arrives.")
                    self._hold(rank, t.piece, t.until)

    def _check_lists(self, steps: dict[int, Step], number: int) -> None:
        size = self.schedule.world_size
        sent = {t for rank, step in steps.items() for t in step.transfers if t.src == rank}
        received = {t for rank, step in steps.items() for t in step.transfers if t.dst == rank}
        for t in sorted(sent ^ received, key=repr):
            side = (
                ("sent", t.src, "its target does not expect it")
                if t in sent
                else ("expected", t.dst, "its source does not send it")
            )
            self.fail(side[1], number, f"{t!r} is {side[0]} here, but {side[2]}.")
        for rank, step in steps.items():
            if len(set(step.transfers)) != len(step.transfers):
                self.fail(rank, number, "a transfer is listed twice.")
            for t in step.transfers:
                if rank not in (t.src, t.dst) or t.src == t.dst or not (0 <= t.src < size and 0 <= t.dst < size):
                    self.fail(rank, number, f"{t!r} does not join this rank to another of {size} ranks.")
            for batch in step.batches(size):
                peers = {(t.src, t.dst) for t in batch}
                if len(peers) > MAX_BATCH:
                    self.fail(rank, number, f"{len(peers)} operations start in one batch; {MAX_BATCH} is the limit.")

    def _send(self, t: Transfer, number: int) -> list[tuple[Transfer, Ints, Term]]:
        cells, keys = self.board.place(t.piece)
        role = t.piece.role
        if role in (Role.Q, Role.KV, Role.DOUT):
            if not self._holds(t.src, t.piece):
                self.fail(t.src, number, f"{t!r} is sent, but its source does not hold it.")
            return []
        if role is Role.OUT:
            for key in keys:
                results = self._array(self.results, t.src, Role.OUT, key)
                if not (results[cells] == 1).all():
                    self.fail(t.src, number, f"{t!r} sends results that are not computed here, or sent already.")
                results[cells] = 2
            return []
        moved: list[tuple[Transfer, Ints, Term]] = []
        for key in ((*key, *t.piece.apart) for key in keys):
            here = self._array(self.sums, t.src, role, key)
            moved.append((t, here[cells].copy(), key))
            here[cells] = 0
        return moved

    def _compute(self, c: Compute, rank: int, number: int) -> None:
        if c.rank != rank:
            self.fail(rank, number, f"{c!r} belongs to rank {c.rank}.")
        needed = [c.q, c.kv] + ([c.q.to(Role.DOUT)] if self.schedule.direction == "backward" else [])
        for piece in needed:
            if not self._holds(rank, piece):
                self.fail(rank, number, f"{piece!r} is used, but not held.")
        group, q, kv = self.schedule.sizes.group, c.q.heads, c.kv.heads
        aligned = (q.start, q.stop) == (kv.start * group, kv.stop * group)
        if not aligned and not (len(kv) == 1 and kv.start * group <= q.start and q.stop <= kv.stop * group):
            self.fail(rank, number, f"query heads {q} do not use key/value heads {kv} in step.")
        if c.kv.apart and (len(c.kv.apart) > 1 or not _inside(as_table(c.q.spans), as_table(c.kv.apart)).all()):
            self.fail(rank, number, f"{c!r} is not of the queries that are added up apart.")
        bands = bd.as_array((*c.bands, *c.maybe))
        for piece, spans in ((c.q, bands[:, :2]), (c.kv, bands[:, 2:4])):
            reaching = np.flatnonzero(~_inside(spans, union(as_table(piece.spans))))
            if len(reaching):
                band = (*c.bands, *c.maybe)[int(reaching[0])]
                self.fail(rank, number, f"band {band!r} reaches outside {piece!r}.")
        self._note(c, rank, number)

    def _note(self, c: Compute, rank: int, number: int) -> None:
        self.num_computes += 1
        weight = weight_of(self.num_computes)
        for piece in (c.q, c.kv):
            cells, keys = self.board.place(piece)
            for key in keys:
                self._array(self.sums, rank, GRADIENT[piece.role], (*key, *piece.apart))[cells] += weight
                self._array(self.expected, 0, GRADIENT[piece.role], key)[cells] += weight
        cells, keys = self.board.place(c.q)
        for key in keys:
            results = self._array(self.results, rank, Role.OUT, key)
            if (results[cells] == 2).any():
                self.fail(rank, number, f"{c.q!r} is computed again after its result was sent.")
            results[cells] = 1

    # -- Final checks --------------------------------------------------------------------------------------------------

    def _owned(self, rank: int) -> Ints:
        owned = np.zeros(self.board.num_cells, dtype=np.int64)
        owned[self.board.cells(self.schedule.layout.spans(rank))] = 1
        return owned

    def _check_results(self) -> None:
        """Forward: results of rows that belong to others were sent, to their owners."""
        if self.schedule.direction == "backward":
            return
        for (rank, _, _), results in self.results.items():
            if ((results == 1) & (self._owned(rank) == 0)).any():
                self.fail(rank, self.schedule.num_steps - 1, "results of other ranks' rows stay here at the end.")
        for number, t in self.schedule.transfers():
            cells, _ = self.board.place(t.piece)
            if t.piece.role is Role.OUT and not self._owned(t.dst)[cells].all():
                self.fail(t.dst, number, f"{t!r} brings results to a rank that does not own the rows.")

    def _check_gradients(self) -> None:
        """Backward: what computes contributed lies with the owners, each contribution once."""
        if self.schedule.direction == "forward":
            return
        arrived: Store = {}
        for (rank, role, key), sums in self.sums.items():
            if (sums * (1 - self._owned(rank))).any():
                self.fail(rank, self.schedule.num_steps - 1, f"{role} contributions to other ranks' rows stay here.")
            self._array(arrived, 0, role, key[:2])[:] += sums
        for (_, role, key), total in self.expected.items():
            if not np.array_equal(self._array(arrived, 0, role, key), total):
                self.fail(0, self.schedule.num_steps - 1, f"some {role} contributions are lost or counted twice.")

    def _check_coverage(self) -> None:
        """Every allowed pair of every head and batch row once: same union, same number of pairs."""
        computes_of: dict[Key, list[Compute]] = {}
        for steps in self.schedule.ranks:
            for c in (c for step in steps for c in step.computes):
                for key in self.board.place(c.q)[1]:
                    computes_of.setdefault(key, []).append(c)
        proved: dict[tuple[int, tuple[int, ...]], bool] = {}
        length = self.mask.length()
        for h, head in self.board.head_atoms():
            for b, row in self.board.row_atoms():
                plane = self.mask.plane(row, head)
                computes = computes_of.get((h, b), [])
                once = (id(plane), tuple(id(c) for c in computes))
                if once in proved:
                    continue
                proved[once] = True
                for what, part in (("sure", plane.sure), ("maybe", plane.maybe)):
                    wanted = bd.cut(part, (0, length), (0, length))
                    bands = [b for c in computes for b in (c.bands if what == "sure" else c.maybe)]
                    self._check_pairs(wanted, bd.as_array(tuple(bands)), computes, head)

    def _check_pairs(self, wanted: Ints, rows: Ints, computes: list[Compute], head: int) -> None:
        missing, extra = bd.subtract(wanted, rows), bd.subtract(rows, wanted)
        where = (computes[0].rank if computes else 0), self.schedule.num_steps - 1
        if len(missing):
            band = bd.as_bands(bd.tighten(missing[:1]))[0]
            rank = int(self.schedule.layout.owner(band.q.start))
            self.fail(rank, where[1], f"head {head}: allowed pairs {band!r} are never computed.")
        if len(extra):
            self.fail(*where, f"head {head}: {bd.as_bands(bd.tighten(extra[:1]))[0]!r} is computed, but hidden.")
        if int(bd.area(rows).sum()) != int(bd.area(wanted).sum()):
            self.fail(*where, f"head {head}: some allowed pairs are computed twice.")


def weight_of(number: int) -> int:
    """The weight of the n-th compute: a power of a large number modulo a prime, which is as good as 40 random bits.

    So different computes do not add up to the same sum by accident. Multiples of a large number would: what holds for
    1 + 3 = 2 + 2 holds for multiples as well, and computes 1 and 3 could be lost if compute 2 was counted twice.

    >>> weight_of(1) + weight_of(3) == 2 * weight_of(2)
    False
    """
    return pow(0x9E3779B97F, number, (1 << 40) - 87)


def _inside(spans: Ints, rows: Ints) -> NDArray[np.bool_]:
    """Whether each span lies within one of the sorted, disjoint rows."""
    if not len(rows):
        return spans[:, 0] >= spans[:, 1]
    at = np.clip(np.searchsorted(rows[:, 0], spans[:, 0], side="right") - 1, 0, None)
    return (spans[:, 0] >= rows[at, 0]) & (spans[:, 1] <= rows[at, 1])
