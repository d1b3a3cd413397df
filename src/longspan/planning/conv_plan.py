"""Plans of causal convolutions: which rank sends which halo rows (the rows before a segment) to which rank.

A convolution of width K takes every token together with the K - 1 before it in its document. These are the rows that
`documents & sliding_window(K - 1)` lets a token see, so the plan is the exchange of that mask, for rows of one tensor.

A segment is a run of consecutive positions of one document on one rank. Eight tokens in two documents of 5 and 3,
width 3, zigzag on two ranks: rank 0 holds 0:2 and 6:8, its segments are 0:2, which needs nothing, and 6:8, which needs
position 5 of rank 1. Its rows as the convolution takes them, with `.` for rows of zeros::

    . . 0 1 . 5 6 7
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from longspan._compile import Handled, opaque
from longspan.layouts import Layout
from longspan.masks import Mask, documents, per_row, sliding_window
from longspan.planning.machine import CPU
from longspan.planning.plan import Plan, PlanRequest, build_plan
from longspan.planning.steps import Sizes
from longspan.spans import Ints, Span, as_spans, join, run_table, steps_within

MAX_WIDTH = 1 << 16
"""Every segment is preceded by width - 1 rows: more is taken for a number of tokens."""


@dataclass(frozen=True, eq=False)
class Haloed:
    """Some batch rows' segments on one rank, each with the rows before it."""

    batch: Span
    table: Ints
    """(start, stop, reach, place): positions, the number of rows of the document before them, at most width - 1, and
    their first row in the rank's tensor, which always has width - 1 rows before it."""

    @property
    def runs(self) -> Ints:
        """(start, stop, place) of the copies into the tensor: segments, with the rows before them."""
        start, stop, reach, place = self.table.T
        return np.stack((start - reach, stop, place - reach), axis=1)

    def zeros(self, width: int, num_rows: int) -> list[slice]:
        """Return the zero rows of the tensor: before documents, and after the last segment."""
        start, stop, reach, place = self.table.T
        ends = int((place + stop - start).max(initial=0))
        empty = [(a, b) for a, b in zip((place - width + 1).tolist(), (place - reach).tolist(), strict=True) if a < b]
        return [slice(a, b) for a, b in (*empty, (ends, num_rows)) if a < b]

    def places(self) -> Ints:
        """Return the row in the tensor of each of the rank's tokens, in local order."""
        start, stop, _, place = self.table.T
        return np.repeat(place, stop - start) + steps_within(stop - start)


@opaque
@dataclass(frozen=True, eq=False, repr=False)
class ConvPlan(Handled):
    """Documents, layout, width and messages of causal convolutions. Make one with `conv_plan`."""

    halo: Plan
    """The exchange of the rows before segments."""
    edges: tuple[Ints, ...]
    """For each batch row, or once for all, 0 and the end of each document."""
    width: int

    prepare: ClassVar[Callable[..., None]]
    """`plan.prepare(rank, device)`, as that of a plan of attention."""

    @property
    def layout(self) -> Layout:
        return self.halo.layout

    @property
    def batch(self) -> int:
        return self.halo.sizes.batch

    @property
    def channels(self) -> int:
        return self.halo.sizes.head_dim

    @property
    def dtype(self) -> str:
        return self.halo.dtype

    @property
    def fingerprint(self) -> str:
        """A hex digest that ranks compare."""
        return self.halo.fingerprint

    def bytes_received(self, rank: int, direction: str = "forward") -> int:
        """Return the bytes that the rank receives in one pass."""
        return self.halo.bytes_received(rank, direction)

    @cached_property
    def _haloed(self) -> dict[int, tuple[Haloed, ...]]:
        return {}

    def haloed(self, rank: int) -> tuple[Haloed, ...]:
        """Return the rank's segments; once for all batch rows, or for each run of rows with the same documents.

        >>> from longspan import conv_plan
        >>> plan = conv_plan([5, 3], zigzag(8, 2), channels=2, width=3, dtype="float32")
        >>> plan.haloed(0)[0].table.tolist(), plan.num_rows(0)
        ([[0, 2, 0, 2], [6, 8, 1, 6]], 8)
        """
        if rank not in self._haloed:
            self._haloed[rank] = tuple(
                Haloed(batch, segments(self.layout.span_table(rank), self.edges[batch.start], self.width))
                for batch in self._row_groups
            )
        return self._haloed[rank]

    def num_rows(self, rank: int) -> int:
        """Return the rows of the tensor that a rank convolves: at least `width`."""
        tables = [haloed.table for haloed in self.haloed(rank)]
        return max(self.width, *(int((t[:, 3] + t[:, 1] - t[:, 0]).max(initial=0)) for t in tables))

    @cached_property
    def _row_groups(self) -> tuple[Span, ...]:
        """Runs of batch rows with the same documents."""
        if len(self.edges) == 1:
            return (Span(0, self.batch),)
        differs = [not np.array_equal(a, b) for a, b in zip(self.edges[1:], self.edges[:-1], strict=True)]
        return as_spans(run_table(np.array(differs), len(self.edges)))

    def __repr__(self) -> str:
        return f"<convolution plan of width {self.width} over {self.layout}, {self.fingerprint[:12]}>"


def segments(spans: Ints, edges: Ints, width: int) -> Ints:
    """Return the table of `Haloed`: a rank's spans, in local order, cut where documents end.

    >>> segments(np.array([[0, 2], [6, 8]]), np.array([0, 5, 8]), width=3).tolist()
    [[0, 2, 0, 2], [6, 8, 1, 6]]
    """
    own = np.stack((edges[:-1], edges[1:]), axis=1)
    own = own[own[:, 1] > own[:, 0]]
    i, j = join(spans, own)
    start, stop = np.maximum(spans[i, 0], own[j, 0]), np.minimum(spans[i, 1], own[j, 1])
    reach = np.minimum(start - own[j, 0], width - 1)
    sizes = stop - start
    return np.stack((start, stop, reach, np.cumsum(sizes + width - 1) - sizes), axis=1)


def build_conv_plan(numbers: Ints, layout: Layout, width: int, sizes: Sizes, dtype: str) -> ConvPlan:
    """Return the plan for documents as numbers per position, (1 or batch, tokens); equal ones get the same object."""
    if (numbers == numbers[:1]).all():
        numbers = numbers[:1]
    ends = [run_table(row[1:] != row[:-1], len(row))[:, 1] for row in numbers]
    edges = tuple(np.concatenate((np.zeros(1, dtype=np.int64), end)).tobytes() for end in ends)
    return _build_plan(edges, layout, width, sizes, dtype)


@lru_cache(maxsize=64)
def _build_plan(texts: tuple[bytes, ...], layout: Layout, width: int, sizes: Sizes, dtype: str) -> ConvPlan:
    edges = tuple(np.frombuffer(text, dtype=np.int64) for text in texts)
    each = [documents(np.diff(row)) & sliding_window(width - 1) for row in edges]
    mask: Mask = each[0] if len(each) == 1 else per_row(*each)
    # Backward needs gradients only: with `keep` nothing is fetched twice, and runs do not keep the rows.
    request = PlanRequest(layout, sizes, dtype, "exchange", CPU, assumed=True, keep=True)
    return ConvPlan(build_plan(mask, request), edges, width)
