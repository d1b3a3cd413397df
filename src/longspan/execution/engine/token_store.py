"""Token store: tensors whose rows are tokens, found by their global positions. Here a rank's own shard, and what has
arrived from others, wait until they are computed with or sent.

Shapes: B batch rows, H heads, T tokens, D features. Positions are global; indices into a tensor are named `_local`.

Runs are tables of (start, stop, start_local), sorted by position: where each stretch of positions lies in dim 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from longspan.execution.fused import pieces
from longspan.schedules.steps import Piece
from longspan.span import Ints, Span, as_table, by_position, intersect, join, total

T = TypeVar("T")
FEW, LONG = 8, 256
"""So few runs, or rows a run on average, are copied run by run on CPUs, where that is quicker than row by row."""


@dataclass(frozen=True, eq=False)
class RowMoves:
    """Pairs of local rows, of a source and of a target, that hold the same positions; in the order of the target's."""

    pairs: tuple[tuple[slice, slice], ...]
    fills: bool
    """Whether the target's rows are all there, in order: then it is written as a whole."""
    _indices: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows of the source, and those of the target that they become, one by one."""
        if device not in self._indices:
            sides = (
                np.concatenate([np.arange(s.start, s.stop) for s in side]) for side in zip(*self.pairs, strict=True)
            )
            here, there = (torch.as_tensor(rows).to(device) for rows in sides)
            self._indices[device] = here, there
        return self._indices[device]

    @cached_property
    def num_rows(self) -> int:
        return sum(here.stop - here.start for here, _ in self.pairs)

    @property
    def _by_row(self) -> bool:
        """Whether one copy row by row takes a CPU less than a copy for every run."""
        return len(self.pairs) > FEW and self.num_rows < LONG * len(self.pairs)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies `(B, H, T, D)` rows. On GPUs what counts is the number of launches."""
        if len(self.pairs) > 1 and pieces.is_fused(target):
            return pieces.move_rows(source, target, *self.indices(target.device))
        fills = self.fills and target.shape[2] == self.num_rows  # behind a rank's own rows there may be padding
        on_cpu = target.device.type == "cpu"
        if source.dtype == target.dtype and (fills and self._by_row if on_cpu else len(self.pairs) > 2 - fills):
            here, there = self.indices(target.device)
            if fills:
                torch.index_select(source, 2, here, out=target)
            else:
                target.index_copy_(2, there, source.index_select(2, here))
            return None
        for here, there in self.pairs:
            target[:, :, there] = source[:, :, here]
        return None


class RowTables:
    """What a plan fixes about rows, worked out once: nothing of it depends on what is in the tensors.

    A table is found by the very objects it is about (arrays and tuples that live as long as the plan does), not by what
    they hold: a plan of many documents has long ones.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Any, tuple[Any, ...]]] = {}

    def once(self, make: Callable[..., T], *about: Any) -> T:
        """`make(*about)`, from memory if it was asked for these objects before."""
        key = (make.__name__, *(part if isinstance(part, int | str) else id(part) for part in about))
        if key not in self._known:  # what it is about is held, so that no other object gets its id
            self._known.setdefault(key, (make(*about), about))  # two threads may ask, and get the same
        return self._known[key][0]

    def runs(self, piece: Piece) -> Ints:
        """Those of a message or copy that has the piece's rows in its order."""
        return self.once(runs_of, piece.spans)

    def cover(self, runs: Ints, piece: Piece) -> bool:
        """Whether the runs have all positions of the piece."""
        return self.once(have_all, runs, self.runs(piece))

    def moves(self, source: Ints, target: Ints) -> RowMoves:
        """Which local rows of one store are which of another."""
        return self.once(common_rows, source, target)


def runs_of(spans: tuple[Span, ...]) -> Ints:
    """Rows laid out in the order of spans.

    >>> runs_of((Span(6, 8), Span(0, 3))).tolist()
    [[0, 3, 2], [6, 8, 0]]
    """
    return laid_out(as_table(spans))


def laid_out(spans: Ints) -> Ints:
    """The runs of rows in the order of `(start, stop)` spans."""
    sizes = spans[:, 1] - spans[:, 0]
    return by_position(np.column_stack((spans, np.cumsum(sizes) - sizes)))


def have_all(runs: Ints, wanted: Ints) -> bool:
    """Whether every position of the wanted runs is in the others.

    >>> have_all(laid_out(np.array([[0, 8]])), laid_out(np.array([[6, 8], [0, 3]])))
    True
    """
    return total(intersect(wanted[:, :2], runs[:, :2])) == total(wanted)


def common_rows(source: Ints, target: Ints) -> RowMoves:
    """Pairs of local slices that hold the same positions in both.

    >>> rows = laid_out(np.array([[6, 8], [0, 3]]))
    >>> common_rows(laid_out(np.array([[0, 8]])), rows)
    RowMoves(pairs=((slice(6, 8, None), slice(0, 2, None)), (slice(0, 3, None), slice(2, 5, None))), fills=True)
    """
    i, j = join(target[:, :2], source[:, :2])
    start = np.maximum(target[i, 0], source[j, 0])
    size = np.minimum(target[i, 1], source[j, 1]) - start
    here, there = source[j, 2] + start - source[j, 0], target[i, 2] + start - target[i, 0]
    table = np.stack((here, here + size, there, there + size), axis=1)[np.argsort(there, kind="stable")]
    follow = np.array_equal(table[:, 2], np.cumsum(table[:, 3] - table[:, 2]) - (table[:, 3] - table[:, 2]))
    pairs = tuple((slice(a, b), slice(c, d)) for a, b, c, d in table.tolist())
    return RowMoves(pairs, follow and int(size.sum()) == total(target))


@dataclass(frozen=True, eq=False)
class TokenStore:
    """`(B, H, T, D)` tensors over the same positions, heads and batch rows."""

    runs: Ints
    heads: Span
    batch: Span
    tensors: tuple[Tensor, ...]

    def part(self, heads: Span, batch: Span) -> tuple[Tensor, ...]:
        """The tensors narrowed to some of their heads and batch rows."""
        if heads == self.heads and batch == self.batch:
            return self.tensors
        h0, b0 = heads.start - self.heads.start, batch.start - self.batch.start
        return tuple(t[b0 : b0 + len(batch), h0 : h0 + len(heads)] for t in self.tensors)

    def positions(self) -> Ints:
        """The global position of every local row."""
        found = np.empty(total(self.runs), dtype=np.int64)
        for start, stop, local in self.runs.tolist():
            found[local : local + stop - start] = np.arange(start, stop)
        return found

    def has(self, heads: Span, batch: Span) -> bool:
        """Whether these heads and batch rows are here."""
        return (
            self.heads.start <= heads.start
            and heads.stop <= self.heads.stop
            and self.batch.start <= batch.start
            and batch.stop <= self.batch.stop
        )

    def copy_to(self, target: TokenStore, moves: RowMoves) -> None:
        """Copies rows to a store of fewer heads or batch rows, or as many."""
        parts = self.part(target.heads, target.batch)
        for tensor, part in zip(target.tensors, parts, strict=True):
            moves.copy(part, tensor)


def gather(stores: Sequence[TokenStore], piece: Piece, batch: Span, tables: RowTables) -> TokenStore:
    """The piece's rows as one store: one that has them all, or a copy put together from several.

    That the rows are there is what the validator proves of every schedule, so a gap here is our own bug.
    """
    stores = [store for store in stores if store.has(piece.heads, batch)]
    for store in stores:
        if tables.cover(store.runs, piece):
            return TokenStore(store.runs, piece.heads, batch, store.part(piece.heads, batch))
    runs = tables.runs(piece)
    is_whole = tables.once(_are_all_held, runs, *(store.runs for store in stores))
    assert is_whole, f"{piece!r} is not all held"
    shape = (len(batch), len(piece.heads), piece.num_tokens)
    made = TokenStore(runs, piece.heads, batch, tuple(t.new_empty((*shape, t.shape[3])) for t in stores[0].tensors))
    for store in stores:
        store.copy_to(made, tables.moves(store.runs, runs))
    return made


def _are_all_held(wanted: Ints, *held: Ints) -> bool:
    found = np.zeros(total(wanted), dtype=np.bool_)
    for runs in held:
        for _, there in common_rows(runs, wanted).pairs:
            found[there] = True
    return bool(found.all())
