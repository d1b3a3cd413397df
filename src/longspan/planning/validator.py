"""The validator proves that a schedule computes exactly the pairs that a mask allows, and that it can run.

It follows the meaning of the instructions and does not depend on planners. It proves that sends and receives are the
same lists; that both ends wait for every message; that nothing is used before it arrives or after it is released; that
every allowed pair is computed exactly once; that results and gradients reach the rank that owns them, each contribution
once; and that batches stay small. `validate_scan` does the same for schedules of scans.

**Weights.** How does it know that each contribution to a gradient arrives once, without running anything? Every compute
gets its own number, its weight. Wherever a real run would add the compute's gradient to a row, the proof adds the
weight, and transfers move sums of weights as they would move gradients. Say computes with weights 13, 29 and 74 all use
key row 5, which rank 0 owns. At the end rank 0 must have 13 + 29 + 74 = 116 there, and all other ranks nothing::

    one lost                  13 + 29           =  42
    one counted twice         13 + 29 + 74 + 74 = 190
    one lost, one twice       13 + 29 + 29      =  71      counting to three would have missed this one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from longspan.errors import ScheduleError
from longspan.masks import Mask
from longspan.masks import bands as bd
from longspan.planning.scan_steps import CHAIN, PLACE, RANK, ChainPiece, Chains, Fold, ScanSchedule, StateTransfer
from longspan.planning.steps import GRADIENT, MAX_BATCH, AnySchedule, Compute, Piece, Role, Schedule, Transfer, table
from longspan.spans import Ints, Span, as_table, union


def _fail(schedule: AnySchedule, rank: int, step: int, problem: str) -> NoReturn:
    raise ScheduleError(
        f"{schedule.scheme} {schedule.direction}: rank {rank}, step {step}: {problem}\n"
        + table(schedule, mark=(rank, step))
    )


def _check_lists(schedule: AnySchedule, number: int) -> None:
    """Check that both ends of every transfer of a step list it, once, and that no other rank does."""
    size = schedule.world_size
    steps = {rank: steps[number] for rank, steps in enumerate(schedule.ranks) if number < len(steps)}
    sent = {t for rank, step in steps.items() for t in step.transfers if t.src == rank}
    received = {t for rank, step in steps.items() for t in step.transfers if t.dst == rank}
    for t in sorted(sent ^ received, key=repr):
        if t in sent:
            _fail(schedule, t.src, number, f"{t!r} is sent here, but its target does not expect it.")
        _fail(schedule, t.dst, number, f"{t!r} is expected here, but its source does not send it.")
    for rank, step in steps.items():
        if len(set(step.transfers)) != len(step.transfers):
            _fail(schedule, rank, number, "a transfer is listed twice.")
        for t in step.transfers:
            if rank not in (t.src, t.dst) or t.src == t.dst or not (0 <= t.src < size and 0 <= t.dst < size):
                _fail(schedule, rank, number, f"{t!r} does not connect this rank to another of {size} ranks.")
            if not number <= number + t.early < len(schedule.ranks[rank]):
                _fail(
                    schedule, rank, number, f"{t!r} is due in step {number + t.early}, which this rank does not have."
                )


# -- Board: which rank holds which rows --------------------------------------------------------------------------------
# Positions are cut at every edge that occurs, so that all rows between two neighbouring edges are treated equally;
# heads and batch rows likewise. A proof then works on a few thousand cells for any length of the sequence.


Key = tuple[int, int]
"""Head atom and batch-row atom."""


class Board:
    """Cells of positions, heads and batch rows that a schedule never cuts."""

    def __init__(self, schedule: Schedule) -> None:
        computes = list(_computes(schedule))
        pieces = [piece for c in computes for piece in (c.q, c.kv)]
        pieces += [t.piece for _, t in schedule.transfers()]
        pieces += [piece for kept in schedule.kept for piece in kept]
        spans = [span for piece in pieces for span in piece.spans]
        spans += [span for c in computes for band in (*c.bands, *c.maybe) for span in (band.q, band.kv)]
        sizes = schedule.sizes
        self.edges = np.union1d(_edges(spans, schedule.layout.seq_len), schedule.layout.table[:, 0])
        self.num_cells = len(self.edges) - 1
        self.q_edges = _edges((p.heads for p in pieces if p.role not in (Role.KV, Role.DKV)), sizes.q_heads)
        self.kv_edges = _edges((p.heads for p in pieces if p.role in (Role.KV, Role.DKV)), sizes.kv_heads)
        self.batch_edges = _edges((p.batch for p in pieces if p.batch is not None), sizes.batch)
        self._placed: dict[Piece, tuple[Ints, list[Key]]] = {}

    def cells(self, spans: tuple[Span, ...]) -> Ints:
        """Return the numbers of the cells that the spans cover."""
        if not spans:
            return np.empty(0, dtype=np.int64)
        ends = np.searchsorted(self.edges, as_table(spans))
        return np.concatenate([np.arange(low, high, dtype=np.int64) for low, high in ends.tolist()])

    def place(self, piece: Piece) -> tuple[Ints, list[Key]]:
        """Return the cells and the (head, batch row) atoms of a piece."""
        if piece not in self._placed:
            heads = self.kv_edges if piece.role in (Role.KV, Role.DKV) else self.q_edges
            keys = [(h, b) for h in _atoms(heads, piece.heads) for b in _atoms(self.batch_edges, piece.batch)]
            self._placed[piece] = self.cells(piece.spans), keys
        return self._placed[piece]


def _edges(spans: Iterable[Span], size: int) -> Ints:
    return np.unique(np.array([0, size, *(value for span in spans for value in (span.start, span.stop))]))


def _atoms(edges: Ints, span: Span | None) -> range:
    if span is None:
        return range(len(edges) - 1)
    low, high = np.searchsorted(edges, [span.start, span.stop]).tolist()
    return range(low, high)


def _computes(schedule: Schedule) -> Iterator[Compute]:
    return (compute for steps in schedule.ranks for step in steps for compute in step.computes)


# -- Attention ---------------------------------------------------------------------------------------------------------


Store = dict[tuple[int, Role, Key], Ints]


def validate(schedule: Schedule, mask: Mask) -> None:
    """Raise ScheduleError, with a rank x step table in which the error is marked, unless the schedule is correct."""
    _Proof(schedule, mask.resized(schedule.layout.seq_len)).run()


class _Proof:
    def __init__(self, schedule: Schedule, mask: Mask) -> None:
        self.schedule, self.mask = schedule, mask
        self.board = Board(schedule)
        self.held: Store = {}
        self.leaving: dict[int, list[tuple[int, Piece]]] = {}  # by the last step of their use
        self.arriving: dict[int, list[tuple[Transfer, list[tuple[Ints, Key]]]]] = {}  # by the step that waits for them
        self.sums: Store = {}  # gradient contributions, as sums of the weights of computes
        self.expected: Store = {}
        self.results: Store = {}  # 1: computed here, 2: sent to its owner
        self.num_computes = 0

    def run(self) -> None:
        schedule, sizes, layout = self.schedule, self.schedule.sizes, self.schedule.layout
        roles = [Role.Q, Role.KV] + ([Role.DOUT] if schedule.direction == "backward" else [])
        for rank in range(layout.world_size):
            for role in roles:
                heads = sizes.kv_heads if role is Role.KV else sizes.q_heads
                self._hold(rank, Piece(role, layout.spans(rank), Span(0, heads)), schedule.num_steps + 2)
            for piece in schedule.kept[rank] if schedule.kept else ():
                self._hold(rank, piece, schedule.num_steps + 2)
        for number in range(schedule.num_steps):
            self._step(number)
        if schedule.direction == "forward":
            self._check_results()
        else:
            self._check_gradients()
        self._check_coverage()

    def fail(self, rank: int, step: int, problem: str) -> NoReturn:
        _fail(self.schedule, rank, step, problem)

    def _array(self, store: Store, rank: int, role: Role, key: Key) -> Ints:
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
        _check_lists(self.schedule, number)
        for rank, step in steps.items():
            for batch in step.batches(self.schedule.world_size):
                peers = {(t.src, t.dst) for t in batch}
                if len(peers) > MAX_BATCH:
                    self.fail(rank, number, f"{len(peers)} operations start in one batch; {MAX_BATCH} is the limit.")
            for t in (t for t in step.transfers if t.src == rank):
                self.arriving.setdefault(number + t.early, []).append((t, self._send(t, number)))
        for rank, step in steps.items():
            for compute in step.computes:
                self._compute(compute, rank, number)
        for rank, piece in self.leaving.pop(number, []):
            self._hold(rank, piece, 0, sign=-1)
        for t, moved in self.arriving.pop(number, []):
            cells, _ = self.board.place(t.piece)
            for values, key in moved:
                self._array(self.sums, t.dst, t.piece.role, key)[cells] += values
            if t.piece.role in (Role.Q, Role.KV, Role.DOUT):
                if t.until <= number:
                    self.fail(t.dst, number, f"{t!r} may be used only until step {t.until}, before it arrives.")
                self._hold(t.dst, t.piece, t.until)

    def _send(self, t: Transfer, number: int) -> list[tuple[Ints, Key]]:
        """Check a transfer at its source, and return the gradient sums that it moves."""
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
        moved: list[tuple[Ints, Key]] = []
        for key in keys:
            here = self._array(self.sums, t.src, role, key)
            moved.append((here[cells].copy(), key))
            here[cells] = 0
        return moved

    def _compute(self, c: Compute, rank: int, number: int) -> None:
        if c.rank != rank:
            self.fail(rank, number, f"{c!r} belongs to rank {c.rank}.")
        for piece in [c.q, c.kv] + ([c.q.to(Role.DOUT)] if self.schedule.direction == "backward" else []):
            if not self._holds(rank, piece):
                self.fail(rank, number, f"{piece!r} is used, but not held.")
        group, q, kv = self.schedule.sizes.group, c.q.heads, c.kv.heads
        is_aligned = (q.start, q.stop) == (kv.start * group, kv.stop * group)
        if not is_aligned and not (len(kv) == 1 and kv.start * group <= q.start and q.stop <= kv.stop * group):
            self.fail(rank, number, f"query heads {q} do not use key/value heads {kv} in step.")
        bands = bd.as_array((*c.bands, *c.maybe))
        for piece, spans in ((c.q, bands[:, :2]), (c.kv, bands[:, 2:4])):
            outside = np.flatnonzero(~_inside(spans, union(as_table(piece.spans))))
            if len(outside):
                band = (*c.bands, *c.maybe)[int(outside[0])]
                self.fail(rank, number, f"band {band!r} reaches outside {piece!r}.")
        # Enter its contributions and results.
        self.num_computes += 1
        weight = weight_of(self.num_computes)
        for piece in (c.q, c.kv):
            cells, keys = self.board.place(piece)
            for key in keys:
                self._array(self.sums, rank, GRADIENT[piece.role], key)[cells] += weight
                self._array(self.expected, 0, GRADIENT[piece.role], key)[cells] += weight
        cells, keys = self.board.place(c.q)
        for key in keys:
            results = self._array(self.results, rank, Role.OUT, key)
            if (results[cells] == 2).any():
                self.fail(rank, number, f"{c.q!r} is computed again after its result was sent.")
            results[cells] = 1

    def _owned_rows(self, rank: int) -> Ints:
        owned = np.zeros(self.board.num_cells, dtype=np.int64)
        owned[self.board.cells(self.schedule.layout.spans(rank))] = 1
        return owned

    def _check_results(self) -> None:
        """Forward: results of rows that belong to others were sent, to their owners."""
        for (rank, _, _), results in self.results.items():
            if ((results == 1) & (self._owned_rows(rank) == 0)).any():
                self.fail(rank, self.schedule.num_steps - 1, "results of other ranks' rows stay here at the end.")
        for number, t in self.schedule.transfers():
            cells, _ = self.board.place(t.piece)
            if t.piece.role is Role.OUT and not self._owned_rows(t.dst)[cells].all():
                self.fail(t.dst, number, f"{t!r} brings results to a rank that does not own the rows.")

    def _check_gradients(self) -> None:
        """Backward: the contributions of computes are with the owners, each once."""
        arrived: Store = {}
        for (rank, role, key), sums in self.sums.items():
            if (sums * (1 - self._owned_rows(rank))).any():
                self.fail(rank, self.schedule.num_steps - 1, f"{role} contributions to other ranks' rows stay here.")
            self._array(arrived, 0, role, key)[:] += sums
        for (_, role, key), total in self.expected.items():
            if not np.array_equal(self._array(arrived, 0, role, key), total):
                self.fail(0, self.schedule.num_steps - 1, f"some {role} contributions are lost or counted twice.")

    def _check_coverage(self) -> None:
        """Every allowed pair of every head and batch row once: same union, same number of pairs."""
        computes_of: dict[Key, list[Compute]] = {}
        for c in _computes(self.schedule):
            for key in self.board.place(c.q)[1]:
                computes_of.setdefault(key, []).append(c)
        proved: set[tuple[int, tuple[int, ...]]] = set()
        length, last = self.mask.length(), self.schedule.num_steps - 1
        for h, head in enumerate(self.board.q_edges[:-1].tolist()):
            for b, row in enumerate(self.board.batch_edges[:-1].tolist()):
                plane, computes = self.mask.plane(row, head), computes_of.get((h, b), [])
                case = (id(plane), tuple(id(c) for c in computes))
                if case in proved:
                    continue
                proved.add(case)
                sure = [band for c in computes for band in c.bands]
                maybe = [band for c in computes for band in c.maybe]
                for part, bands in ((plane.sure, sure), (plane.maybe, maybe)):
                    allowed, computed = bd.cut(part, (0, length), (0, length)), bd.as_array(tuple(bands))
                    missing, extra = bd.subtract(allowed, computed), bd.subtract(computed, allowed)
                    rank = computes[0].rank if computes else 0
                    if len(missing):
                        band = bd.as_bands(bd.tighten(missing[:1]))[0]
                        rank = int(self.schedule.layout.owner(band.q.start))
                        self.fail(rank, last, f"head {head}: allowed pairs {band!r} are never computed.")
                    if len(extra):
                        band = bd.as_bands(bd.tighten(extra[:1]))[0]
                        self.fail(rank, last, f"head {head}: {band!r} is computed, but hidden.")
                    if int(bd.area(computed).sum()) != int(bd.area(allowed).sum()):
                        self.fail(rank, last, f"head {head}: some allowed pairs are computed twice.")


def weight_of(number: int) -> int:
    """Return the weight of the n-th compute: a power of a large number modulo a prime, as good as 40 random bits.

    So different computes do not add up to the same sum by accident. Multiples of a large number would: 1 + 3 = 2 + 2
    holds for multiples as well, and computes 1 and 3 could be lost if compute 2 was counted twice.

    >>> weight_of(1) + weight_of(3) == 2 * weight_of(2)
    False
    """
    return pow(0x9E3779B97F, number, (1 << 40) - 87)


def _inside(spans: Ints, rows: Ints) -> NDArray[np.bool_]:
    """Return whether each span lies within one of the sorted, disjoint rows."""
    if not len(rows):
        return spans[:, 0] >= spans[:, 1]
    at = np.clip(np.searchsorted(rows[:, 0], spans[:, 0], side="right") - 1, 0, None)
    return (spans[:, 0] >= rows[at, 0]) & (spans[:, 1] <= rows[at, 1])


# -- Scans -------------------------------------------------------------------------------------------------------------
# The proof tracks intervals of segments. Forward: a rank has the pieces [i:i+1) of its own segments; it sends what it
# has, and folds adjacent pieces. At the end the owner of segment i > 0 has [0:i). Backward: the gradient of a piece
# [i:j) is a set of segments m >= j, those whose entering states depend on it; sets that are added must not overlap, and
# the gradient of [i:i+1) ends as {i+1, i+2, ...}.
#
#     chain of 3, doubling    forward   rank 2 ends with [0:2) = [0:1) + [1:2)
#                             backward  [1:2) starts with {}, gets {2} from [0:2), and that is all of it


Place = tuple[int, int, int]
"""Chain, first segment, end."""
Segments = frozenset[int]


def validate_scan(forward: ScanSchedule, backward: ScanSchedule, chains: Chains) -> None:
    """Raise ScheduleError unless every segment gets the state that enters it, and every state its whole gradient."""
    for schedule, direction in ((forward, "forward"), (backward, "backward")):
        if schedule.direction != direction or schedule.layout != chains.layout:
            raise ScheduleError(
                f"a {direction} schedule over {chains.layout} was expected, but got a {schedule.direction} one over"
                f" {schedule.layout}."
            )
    owners = {(row[CHAIN], row[PLACE]): row[RANK] for row in chains.table.tolist()}
    _check_states(forward, chains, owners)
    _check_state_gradients(backward, chains, owners)
    for rank, (steps, back) in enumerate(zip(forward.ranks, backward.ranks, strict=True)):
        kept = {fold.right for step in steps for fold in step.computes}
        for fold in (fold for step in back for fold in step.computes):
            if fold.right not in kept:
                raise ScheduleError(f"rank {rank} needs M of {fold.right!r} in backward, which it did not fold before.")


def _walk(
    schedule: ScanSchedule,
    chains: Chains,
    fold: Callable[[Fold, int], None],
    send: Callable[[StateTransfer, int], Segments],
    arrive: Callable[[StateTransfer, Segments, int], None],
) -> None:
    """Go through the steps of all ranks: folds first, then transfers, which arrive after all were sent."""

    def check_piece(piece: ChainPiece, within: object, rank: int, number: int, *, gradient: bool = False) -> None:
        if piece.chain >= len(chains.batches) or not piece.start < piece.stop:
            count = len(chains.batches)
            _fail(schedule, rank, number, f"{within!r} names {piece!r}, but none of {count} chains has such a piece.")
        expected = ChainPiece.of(*_place(piece), chains.batches[piece.chain])
        expected = expected.to_gradient() if gradient else expected
        if piece != expected:
            _fail(schedule, rank, number, f"{within!r} names {piece!r} where {expected!r} is expected.")

    by_step: dict[int, list[StateTransfer]] = {}
    for number, t in schedule.transfers():
        by_step.setdefault(number, []).append(t)
    for number in range(schedule.num_steps):
        _check_lists(schedule, number)
        for rank, steps in enumerate(schedule.ranks):
            for item in steps[number].computes if number < len(steps) else ():
                left, right = item.left, item.right
                if item.rank != rank:
                    _fail(schedule, rank, number, f"{item!r} belongs to rank {item.rank}.")
                meets = left.stop == right.start and left.chain == right.chain and left.batch == right.batch
                if not meets or not left.start < left.stop < right.stop:
                    _fail(schedule, rank, number, f"{item!r} joins pieces that do not meet.")
                check_piece(left, item, rank, number)
                check_piece(right, item, rank, number)
                fold(item, number)
        sent: list[tuple[StateTransfer, Segments]] = []
        for t in by_step.get(number, []):
            check_piece(t.piece, t, t.src, number, gradient=schedule.direction == "backward")
            sent.append((t, send(t, number)))
        for t, segments in sent:
            arrive(t, segments, number)


def _place(piece: ChainPiece) -> Place:
    return piece.chain, piece.start, piece.stop


def _check_states(schedule: ScanSchedule, chains: Chains, owners: dict[tuple[int, int], int]) -> None:
    has: set[tuple[int, Place]] = {(rank, (chain, i, i + 1)) for (chain, i), rank in owners.items()}

    def fold(item: Fold, number: int) -> None:
        for piece in (item.left, item.right):
            if (item.rank, _place(piece)) not in has:
                fault = f"rank {item.rank} folds {piece!r} in step {number} without having it."
                _fail(schedule, item.rank, number, fault)
        if (item.rank, _place(item.whole)) in has:
            _fail(schedule, item.rank, number, f"rank {item.rank} folds {item.whole!r}, which it has already.")
        has.add((item.rank, _place(item.whole)))

    def send(t: StateTransfer, number: int) -> Segments:
        if (t.src, _place(t.piece)) not in has:
            _fail(schedule, t.src, number, f"rank {t.src} sends {t.piece!r} without having it.")
        if (t.dst, _place(t.piece)) in has:
            _fail(schedule, t.dst, number, f"rank {t.dst} receives {t.piece!r}, which it has already.")
        return frozenset()

    _walk(schedule, chains, fold, send, lambda t, _, __: has.add((t.dst, _place(t.piece))))
    for (chain, place), rank in owners.items():
        if place and (rank, (chain, 0, place)) not in has:
            raise ScheduleError(
                f"rank {rank} holds segment {place} of chain {chain}, but never gets the state [0:{place}) that"
                f" enters it."
            )


def _check_state_gradients(schedule: ScanSchedule, chains: Chains, owners: dict[tuple[int, int], int]) -> None:
    gradients: dict[tuple[int, Place], Segments] = {
        (rank, (chain, 0, place)): frozenset({place}) for (chain, place), rank in owners.items() if place
    }

    def add(rank: int, piece: ChainPiece, segments: Segments, number: int) -> None:
        before = gradients.get((rank, _place(piece)), frozenset[int]())
        if before & segments:
            twice = sorted(before & segments)
            _fail(schedule, rank, number, f"rank {rank} adds the gradients of segments {twice} to {piece!r} twice.")
        gradients[rank, _place(piece)] = before | segments

    def take(rank: int, piece: ChainPiece, number: int) -> Segments:
        segments = gradients.pop((rank, _place(piece)), None)
        if segments is None:
            _fail(schedule, rank, number, f"rank {rank} has no gradient of {piece!r}.")
        return segments

    def fold(item: Fold, number: int) -> None:
        segments = take(item.rank, item.whole, number)
        for piece in (item.left, item.right):
            add(item.rank, piece, segments, number)

    _walk(
        schedule,
        chains,
        fold,
        lambda t, number: take(t.src, t.piece, number),
        lambda t, segments, number: add(t.dst, t.piece, segments, number),
    )
    lengths = Counter(chain for chain, _ in owners)
    for (chain, place), rank in owners.items():
        segments = gradients.pop((rank, (chain, place, place + 1)), frozenset[int]())
        expected = range(place + 1, lengths[chain])
        if segments != frozenset(expected):
            raise ScheduleError(
                f"the state that leaves segment {place} of chain {chain} gets gradients of segments"
                f" {sorted(segments)}, and should get those of {list(expected)}."
            )
    for (rank, (chain, start, stop)), lost in gradients.items():
        raise ScheduleError(
            f"rank {rank} ends with gradients of segments {sorted(lost)} for [{start}:{stop}) of chain {chain},"
            f" which belong to others."
        )
