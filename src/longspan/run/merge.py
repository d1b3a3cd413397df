"""Merge contributions to the same rows in float32, in an order that does not depend on arrival.

Results merge by a guarded running maximum and sum: a partial is `(out, lse)`, normalized output and natural log of the
sum of exponentials; the state is (accumulator, maximum, sum), divided once at the end. A row without keys is
`(0, -inf)` and changes nothing. Gradients merge by addition.

Most rows get one contribution (a document on one rank) and have no float32 state: the contribution is kept as it is
until a second one arrives. Rows with several contributions have their state in a separate buffer, in the order of their
second contributions.

All of this is decided when a plan is recorded, on rows without data; `merge` does the arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from longspan.run.recorder import Buffer, Kind, Recorder, Rows, Run
from longspan.spans import Span
from longspan.tile import accumulation_dtype

Several = tuple[Rows, ...]
Key = tuple[Span, Span]
"""Heads and batch rows."""


@dataclass(slots=True, eq=False)
class Stretch:
    """Rows start to stop (dim 2 of every tensor): one contribution, or the state of several."""

    start: int
    stop: int
    tensors: Several
    is_state: bool = False

    def part(self, start: int, stop: int) -> Stretch:
        """Return rows start to stop of the stretch."""
        if (start, stop) == (self.start, self.stop):
            return self
        first, last = start - self.start, stop - self.start
        return Stretch(start, stop, tuple([t.part(first, last) for t in self.tensors]), self.is_state)

    def with_next(self, other: Stretch) -> Stretch | None:
        """Return both as one stretch if the other follows, in memory, too; else None."""
        if self.stop != other.start or self.is_state != other.is_state:
            return None
        pairs = list(zip(self.tensors, other.tensors, strict=True))
        for a, b in pairs:
            if not b.follows(a):
                return None
        tensors = tuple([a.with_next(b) for a, b in pairs])
        return Stretch(self.start, other.stop, tensors, self.is_state)


class ByRows(ABC):
    """Contributions to stretches of rows. Contributions are never written to, unless they are states."""

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []  # disjoint, sorted

    def add(self, start: int, stop: int, *part: Rows) -> None:
        """Add a contribution to local rows start to stop."""
        self.take(Stretch(start, stop, part))

    def take(self, new: Stretch) -> None:
        """Add a contribution, or a state, which may be written to from now on."""
        start, stop = new.start, new.stop
        first = last = bisect_right(self._stretches, start, key=_stop_of)
        merged: list[Stretch] = []
        while last < len(self._stretches) and self._stretches[last].start < stop:
            held = self._stretches[last]
            low, high = max(start, held.start), min(stop, held.stop)
            if start < low:
                merged.append(new.part(start, low))
            if held.is_state:
                self._absorb(held.part(low, high).tensors, new.part(low, high).tensors)
                merged.append(held)
            else:
                merged += [held.part(held.start, low)] if held.start < low else []
                both, part = held.part(low, high), new.part(low, high)
                if part.is_state:
                    self._absorb(part.tensors, both.tensors)
                    merged.append(part)
                else:
                    merged.append(Stretch(low, high, self._merge_first_two(both.tensors, part.tensors), is_state=True))
                merged += [held.part(high, held.stop)] if high < held.stop else []
            start = high
            last += 1
        if start < stop:
            merged.append(new.part(start, stop))
        # Join stretches that are neighbours in memory, too, such as consecutive documents of one result.
        near = slice(max(0, first - 1), last + 1)
        joined: list[Stretch] = []
        for stretch in (*self._stretches[near.start : first], *merged, *self._stretches[last : last + 1]):
            pair = joined[-1].with_next(stretch) if joined else None
            if pair is None:
                joined.append(stretch)
            else:
                joined[-1] = pair
        self._stretches[near] = joined

    def any(self) -> bool:
        """Return whether anything was added."""
        return bool(self._stretches)

    @abstractmethod
    def _merge_first_two(self, held: Several, part: Several) -> Several:
        """Return the state of rows after their first two contributions."""

    @abstractmethod
    def _absorb(self, state: Several, part: Several) -> None:
        """Merge one more contribution into the state."""

    def _whole(self, num_rows: int) -> Stretch | None:
        """Return the only stretch if it has all rows."""
        alone = len(self._stretches) == 1 and (self._stretches[0].start, self._stretches[0].stop) == (0, num_rows)
        return self._stretches[0] if alone else None

    def _gaps(self, num_rows: int) -> Iterator[slice]:
        """Yield rows without a contribution."""
        at = 0
        for stretch in self._stretches:
            if at < stretch.start:
                yield slice(at, stretch.start)
            at = stretch.stop
        if at < num_rows:
            yield slice(at, num_rows)


def _stop_of(stretch: Stretch) -> int:
    return stretch.stop


class _States:
    """Buffers that grow by the rows that need a state."""

    def __init__(self, recorder: Recorder, shape: tuple[int, ...], *dims: int, dtype: torch.dtype) -> None:
        self._recorder, self._shape, self._dims, self._dtype = recorder, shape[:2], dims, dtype
        self._buffers: list[Buffer] = []

    def more(self, num: int) -> Several:
        if not self._buffers:
            self._buffers = [self._recorder.buffer((*self._shape, 0, dim), self._dtype) for dim in self._dims]
        return tuple(self._recorder.grow(buffer, num) for buffer in self._buffers)

    def begin_at(self, number: int, value: float) -> None:
        """Set the initial value of one of the buffers."""
        if self._buffers:
            self._buffers[number].initial = value


class Accumulator(ByRows):
    """The running result of `(B, H, T, E)` query rows."""

    def __init__(self, like: Rows, v_head_dim: int) -> None:
        super().__init__()
        assert like.dtype is not None
        self._recorder, self._shape, self._dtype = like.recorder, (*like.shape[:3], v_head_dim), like.dtype
        self._states = _States(like.recorder, like.shape, v_head_dim, 1, 1, dtype=accumulation_dtype(like.dtype))
        self._result: tuple[Rows, Rows] | None = None

    def take(self, new: Stretch) -> None:
        self._result = None
        super().take(new)

    def _merge_first_two(self, held: Several, part: Several) -> Several:
        acc, top, num = state = self._states.more(held[0].shape[2])
        # One contribution has weight 1. The weight of a row without keys does not matter, because its top is -inf.
        self._states.begin_at(2, 1.0)
        acc.copy_(held[0])
        top.copy_(held[1])
        self._absorb((acc, top, num), part)
        return state

    def _absorb(self, state: Several, part: Several) -> None:
        self._recorder.note(Kind.MERGE, *state, *part)

    def result(self) -> tuple[Rows, Rows]:
        """Return output, in the inputs' dtype or a kernel's own, and lse; rows without keys are (0, -inf)."""
        if self._result is not None:
            return self._result
        num_rows = self._shape[2]
        if (whole := self._whole(num_rows)) is not None and not whole.is_state:
            out, lse = whole.tensors
            self._result = out, lse
            return self._result
        out = self._recorder.new(self._shape, self._dtype)
        lse = self._recorder.new((*self._shape[:3], 1), accumulation_dtype(self._dtype))
        for stretch in self._stretches:
            at = slice(stretch.start, stretch.stop)
            if stretch.is_state:
                self._recorder.note(Kind.FINISH, out[:, :, at], lse[:, :, at], *stretch.tensors)
            else:
                out[:, :, at].copy_(stretch.tensors[0])
                lse[:, :, at].copy_(stretch.tensors[1])
        for gap in self._gaps(num_rows):
            out[:, :, gap].fill_(0.0)
            lse[:, :, gap].fill_(-torch.inf)
        self._result = out, lse
        return self._result


def finished_rows(acc: Tensor, top: Tensor, num: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse of a state; all have four dims."""
    # lse is -inf for rows without keys: -inf + log(0)
    return acc / num.clamp(min=torch.finfo(num.dtype).tiny), top + num.log()


def merge(acc: Tensor, top: Tensor, num: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a partial result over other keys into the state of some rows, in place.

    Attention is a mean of values weighted by exp(score), and `lse` is the logarithm of the sum of weights. So a row
    with output 7 and weight 1 that gets output 5 and weight 3 from other keys becomes (1 * 7 + 3 * 5) / (1 + 3):

    >>> acc, top, num = torch.tensor([[7.0]]), torch.tensor([1.0]).log(), torch.tensor([1.0])
    >>> merge(acc, top, num, torch.tensor([[5.0]]), torch.tensor([3.0]).log())
    >>> round((acc[0] / num).item(), 4), round((top + num.log()).exp().item(), 4)
    (5.5, 4.0)

    Weights are relative to the largest lse so far, `top`, so that none overflows.

    Hundreds of partials may merge into a row, so the state keeps maximum and sum and is divided once.
    `kernels.panels.merge` merges the two or three parts of one tile and divides each time.
    """
    high = torch.maximum(top, lse)
    base = high.masked_fill(high.isneginf(), 0.0)  # -inf minus -inf is nan
    old, new = torch.exp(top - base), torch.exp(lse - base)
    acc.mul_(old.unsqueeze(-1)).addcmul_(out.to(acc.dtype), new.unsqueeze(-1))
    num.mul_(old).add_(new)
    top.copy_(high)


class Sum(ByRows):
    """The running sum of gradients over rows, one or more tensors shaped like `like`."""

    def __init__(self, like: Several, wide: torch.dtype) -> None:
        super().__init__()
        self._recorder, self._shapes = like[0].recorder, [t.shape for t in like]
        self._states = _States(self._recorder, like[0].shape, *(t.shape[3] for t in like), dtype=wide)

    def _merge_first_two(self, held: Several, part: Several) -> Several:
        state = self._states.more(held[0].shape[2])
        for tensor, first in zip(state, held, strict=True):
            tensor.copy_(first)
        self._absorb(state, part)
        return state

    def _absorb(self, state: Several, part: Several) -> None:
        for tensor, more in zip(state, part, strict=True):
            tensor.add_(more)

    def within(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield what was added to local rows start to stop."""
        for at in range(bisect_right(self._stretches, start, key=_stop_of), len(self._stretches)):
            stretch = self._stretches[at]
            if stretch.start >= stop:
                return
            yield stretch.part(max(stretch.start, start), min(stretch.stop, stop))

    def copy_to(self, targets: Several, runs: Sequence[Run], part: Callable[[Several], Several]) -> list[Run]:
        """Copy runs of rows to other tensors, one operation for each stretch; `part` narrows tensors to the targets'
        heads. Return the runs that were added to; others are not written."""
        copies: dict[int, list[Run]] = {}
        for there, here, num in runs:
            at = bisect_right(self._stretches, here, key=_stop_of)
            while at < len(self._stretches) and (stretch := self._stretches[at]).start < here + num:
                low, high = max(here, stretch.start), min(here + num, stretch.stop)
                copies.setdefault(at, []).append((there + low - here, low - stretch.start, high - low))
                at += 1
        for at, parts in copies.items():
            for target, source in zip(targets, part(self._stretches[at].tensors), strict=True):
                self._recorder.copy_runs(target, source, parts)
        return [run for parts in copies.values() for run in parts]

    def drop(self, spans: Iterable[tuple[int, int]]) -> None:
        """Forget what was added to local rows start to stop of each of the spans, which are disjoint."""
        kept: list[Stretch] = []
        ordered = sorted(spans)
        at = 0
        for stretch in self._stretches:
            while at < len(ordered) and ordered[at][1] <= stretch.start:
                at += 1
            begin, number = stretch.start, at
            while number < len(ordered) and ordered[number][0] < stretch.stop:
                start, stop = ordered[number]
                if begin < start:
                    kept.append(stretch.part(begin, start))
                begin = max(begin, stop)
                number += 1
            if begin < stretch.stop:
                kept.append(stretch.part(begin, stretch.stop))
        self._stretches = kept

    def write(self, targets: Sequence[Rows]) -> None:
        """Write the sums, rounded once, into tensors of the same rows."""
        for i, target in enumerate(targets):
            for stretch in self._stretches:
                target.part(stretch.start, stretch.stop).copy_(stretch.tensors[i])
            for gap in self._gaps(target.shape[2]):
                target[:, :, gap].fill_(0.0)

    def begin_with(self, tensors: Several) -> None:
        """Use these float32 tensors as the sum, in place."""
        self._stretches = [Stretch(0, tensors[0].shape[2], tensors, is_state=True)]

    def result(self, dtype: torch.dtype) -> Several:
        """Return the sums, rounded once, or the only contribution unchanged."""
        if (whole := self._whole(self._shapes[0][2])) is not None:
            return whole.tensors
        out = tuple(self._recorder.new(shape, dtype) for shape in self._shapes)
        self.write(out)
        return out


class SumInto(Sum):
    """The sum of gradients over rows of a message, in the message: the first contribution is copied there."""

    def __init__(self, targets: Several, wide: torch.dtype) -> None:
        super().__init__(targets, wide)
        self._targets = targets

    def take(self, new: Stretch) -> None:
        at = new.start
        for held in list(self.within(new.start, new.stop)):
            if at < held.start:
                self._begin(new.part(at, held.start))
            self._absorb(held.tensors, new.part(held.start, held.stop).tensors)
            at = held.stop
        if at < new.stop:
            self._begin(new.part(at, new.stop))

    def _begin(self, new: Stretch) -> None:
        mine = tuple([target.part(new.start, new.stop) for target in self._targets])
        for target, first in zip(mine, new.tensors, strict=True):
            target.copy_(first)
        super().take(Stretch(new.start, new.stop, mine, is_state=True))

    def finish(self) -> None:
        """Fill rows without a contribution with zeros."""
        for gap in self._gaps(self._shapes[0][2]):
            for target in self._targets:
                target[:, :, gap].fill_(0.0)


class SumByHeads:
    """The running sum of gradients whose contributions are for some heads and batch rows each."""

    def __init__(self, like: Several, heads: Span, rows: Span, wide: torch.dtype) -> None:
        self._like, self._whole, self._wide = like, (heads, rows), wide
        self._sums: dict[Key, Sum] = {}

    def of(self, key: Key) -> Sum:
        """Return the running sum for these heads and batch rows."""
        if key not in self._sums:
            self._sums[key] = Sum(self._part(self._like, key), self._wide)
        return self._sums[key]

    def _part(self, tensors: Several, key: Key) -> Several:
        (heads, rows), (all_heads, all_rows) = key, self._whole
        h0, b0 = heads.start - all_heads.start, rows.start - all_rows.start
        return tuple(t[b0 : b0 + len(rows), h0 : h0 + len(heads)] for t in tensors)

    def result(self, dtype: torch.dtype) -> Several:
        """Return the sums, rounded once, or the only contribution unchanged."""
        if set(self._sums) <= {self._whole}:
            return self.of(self._whole).result(dtype)
        size = len(self._whole[0]) * len(self._whole[1])
        recorder = self._like[0].recorder
        if are_disjoint(self._sums) and sum(len(heads) * len(rows) for heads, rows in self._sums) == size:
            out = tuple(recorder.new(t.shape, dtype) for t in self._like)
            for key, sums in self._sums.items():
                sums.write(self._part(out, key))
            return out
        total = tuple(recorder.new(t.shape, self._wide, initial=0.0) for t in self._like)
        for key, sums in self._sums.items():
            for target, tensor in zip(self._part(total, key), sums.result(self._wide), strict=True):
                target.add_(tensor)
        return total


def are_disjoint(keys: Iterable[Key]) -> bool:
    """Return whether no two of the keys share a head of a batch row."""
    for (heads, batch), (others, rows) in combinations(keys, 2):
        if (
            heads.start < others.stop
            and others.start < heads.stop
            and batch.start < rows.stop
            and rows.start < batch.stop
        ):
            return False
    return True
