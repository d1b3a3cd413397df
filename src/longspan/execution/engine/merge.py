"""Merge: contributions to the same rows become one, in float32, in an order that does not depend on arrival.

Results merge by a guarded running maximum and sum: a partial is `(out, lse)`, normalised output and natural-log sum of
exponentials; the state is (accumulator, maximum, sum), divided once at the end. A row that saw nothing is `(0, -inf)`
and changes nothing. Gradients merge by addition.

Most rows get one contribution only (a document that lies on one rank), and for those no float32 state is made: the
contribution is kept as it came until a second one meets it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.execution.fused import pieces
from longspan.execution.tile import wide
from longspan.span import Span

Tensors = tuple[Tensor, ...]
Key = tuple[Span, Span]
"""Heads and batch rows."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows start to stop (dim 2 of every tensor): one contribution as it came, or the state of several."""

    start: int
    stop: int
    tensors: Tensors
    is_state: bool = False

    def part(self, start: int, stop: int) -> Stretch:
        """The rows of it between two others, start and stop included in its own."""
        if (start, stop) == (self.start, self.stop):
            return self
        tensors = tuple(t[:, :, start - self.start : stop - self.start] for t in self.tensors)
        return Stretch(start, stop, tensors, self.is_state)


class ByRows(ABC):
    """Contributions to rows, each over a stretch of them. They are read, never written to, unless they are states."""

    def __init__(self) -> None:
        self._found: list[Stretch] = []  # disjoint, sorted

    def add(self, start: int, stop: int, *part: Tensor) -> None:
        """Takes up a contribution to local rows start to stop."""
        self.take(Stretch(start, stop, part))

    def take(self, new: Stretch) -> None:
        """Takes up a contribution, or a state, which is given away."""
        start, stop = new.start, new.stop
        first = last = bisect_right(self._found, start, key=_stop_of)
        made: list[Stretch] = []
        while last < len(self._found) and self._found[last].start < stop:
            held = self._found[last]
            low, high = max(start, held.start), min(stop, held.stop)
            if start < low:
                made.append(new.part(start, low))
            if held.is_state:
                self._absorb(held.part(low, high).tensors, new.part(low, high).tensors)
                made.append(held)
            else:
                made += [held.part(held.start, low)] if held.start < low else []
                made.append(self._both(held.part(low, high), new.part(low, high)))
                made += [held.part(high, held.stop)] if high < held.stop else []
            start = high
            last += 1
        if start < stop:
            made.append(new.part(start, stop))
        self._found[first:last] = made

    def _both(self, held: Stretch, new: Stretch) -> Stretch:
        if new.is_state:
            self._absorb(new.tensors, held.tensors)
            return new
        return Stretch(held.start, held.stop, self._met(held.tensors, new.tensors), is_state=True)

    def any(self) -> bool:
        """Whether anything was added."""
        return bool(self._found)

    @abstractmethod
    def _met(self, held: Tensors, part: Tensors) -> Tensors:
        """The state of rows after their first two contributions."""

    @abstractmethod
    def _absorb(self, state: Tensors, part: Tensors) -> None:
        """Takes one more contribution up into the state."""

    def _gaps(self, num_rows: int) -> Iterator[slice]:
        """Rows that got no contribution."""
        at = 0
        for stretch in self._found:
            if at < stretch.start:
                yield slice(at, stretch.start)
            at = stretch.stop
        if at < num_rows:
            yield slice(at, num_rows)


def _stop_of(stretch: Stretch) -> int:
    return stretch.stop


class Accumulator(ByRows):
    """The running result of `(B, H, T, E)` query rows."""

    def __init__(self, like: Tensor, v_head_dim: int) -> None:
        super().__init__()
        self._shape = (*like.shape[:3], v_head_dim)
        self._dtype, self._device = like.dtype, like.device
        self._wide = wide(like.dtype)
        self._result: tuple[Tensor, Tensor] | None = None

    def take(self, new: Stretch) -> None:
        self._result = None
        super().take(new)

    def _met(self, held: Tensors, part: Tensors) -> Tensors:
        out, lse = held
        acc, top, num = out.to(self._wide, copy=True), lse.to(self._wide, copy=True), (~lse.isneginf()).to(self._wide)
        merge(acc, top, num, *part)
        return acc, top, num

    def _absorb(self, state: Tensors, part: Tensors) -> None:
        acc, top, num = state
        merge(acc, top, num, *part)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in the inputs' dtype, and lse; rows that saw nothing are (0, -inf)."""
        if self._result is None:
            self._result = self._written_out()
        return self._result

    def _written_out(self) -> tuple[Tensor, Tensor]:
        num_rows = self._shape[2]
        if len(self._found) == 1 and (self._found[0].start, self._found[0].stop) == (0, num_rows):
            out, lse = finished(self._found[0])
            return out.to(self._dtype), lse.to(self._wide)
        out = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        lse = torch.empty(self._shape[:3], dtype=self._wide, device=self._device)
        for stretch in self._found:
            out[:, :, stretch.start : stretch.stop], lse[:, :, stretch.start : stretch.stop] = finished(stretch)
        for gap in self._gaps(num_rows):
            out[:, :, gap] = 0
            lse[:, :, gap] = -torch.inf
        return out, lse


def finished(stretch: Stretch) -> tuple[Tensor, Tensor]:
    """Output and lse of a stretch of results."""
    if not stretch.is_state:
        out, lse = stretch.tensors
        return out, lse
    acc, top, num = stretch.tensors
    # lse is -inf where nothing was seen: -inf + log(0)
    return acc / num.clamp(min=torch.finfo(num.dtype).tiny).unsqueeze(-1), top + num.log()


def merge(acc: Tensor, top: Tensor, num: Tensor, out: Tensor, lse: Tensor) -> None:
    """In place: the state of some rows takes up a partial over keys it has not seen.

    Attention is a mean of values, weighted by exp(score), and `lse` is the logarithm of the sum of weights. So a row
    with output 7 and weight 1 that gets output 5 and weight 3 from other keys must end at (1 * 7 + 3 * 5) / (1 + 3):

    >>> acc, top, num = torch.tensor([[7.0]]), torch.tensor([1.0]).log(), torch.tensor([1.0])
    >>> merge(acc, top, num, torch.tensor([[5.0]]), torch.tensor([3.0]).log())
    >>> round((acc[0] / num).item(), 4), round((top + num.log()).exp().item(), 4)
    (5.5, 4.0)

    Weights are taken relative to the largest lse so far, `top`, so that none overflows, however large scores are.

    `kernels.panels.merge` is the other one: it merges the two or three pieces of one tile into an (out, lse) that is
    handed on, and divides each time. Here hundreds of partials can meet in a row, from all ranks, so the state keeps
    maximum and sum apart and is divided once: no rounding for each partial, and an lse is not rounded in between.
    """
    if pieces.is_fused(acc):
        return pieces.merge(acc, top, num, out, lse)
    high = torch.maximum(top, lse)
    base = high.masked_fill(high.isneginf(), 0.0)  # -inf minus -inf is nan, not "nothing"
    old, new = torch.exp(top - base), torch.exp(lse - base)
    acc.mul_(old.unsqueeze(-1)).addcmul_(out.to(acc.dtype), new.unsqueeze(-1))
    num.mul_(old).add_(new)
    top.copy_(high)
    return None


class Sum(ByRows):
    """The running sum of gradients over rows, one or more tensors shaped like `like`."""

    def __init__(self, like: Tensors, wide: torch.dtype) -> None:
        super().__init__()
        self._shapes, self._device, self._wide = [t.shape for t in like], like[0].device, wide

    def _met(self, held: Tensors, part: Tensors) -> Tensors:
        def added(a: Tensor, b: Tensor) -> Tensor:
            return a + b if a.dtype == self._wide else a.to(self._wide).add_(b)

        return tuple(map(added, held, part))

    def _absorb(self, state: Tensors, part: Tensors) -> None:
        for tensor, more in zip(state, part, strict=True):
            tensor.add_(more)

    def plus(self, other: Sum) -> None:
        """Adds all of another sum of the same rows, which is given away."""
        for stretch in other._found:
            self.take(stretch)

    def within(self, start: int, stop: int) -> Iterator[Stretch]:
        """What was added to local rows start to stop."""
        for at in range(bisect_right(self._found, start, key=_stop_of), len(self._found)):
            found = self._found[at]
            if found.start >= stop:
                return
            yield found.part(max(found.start, start), min(found.stop, stop))

    def drop(self, start: int, stop: int) -> None:
        """Forgets what was added to local rows start to stop."""
        first = last = bisect_right(self._found, start, key=_stop_of)
        kept: list[Stretch] = []
        while last < len(self._found) and self._found[last].start < stop:
            found = self._found[last]
            kept += [found.part(found.start, start)] if found.start < start else []
            kept += [found.part(stop, found.stop)] if found.stop > stop else []
            last += 1
        self._found[first:last] = kept

    def write(self, targets: Sequence[Tensor]) -> None:
        """Puts the sums, rounded once, into tensors of the same rows."""
        for i, target in enumerate(targets):
            for stretch in self._found:
                target[:, :, stretch.start : stretch.stop] = stretch.tensors[i]
            for gap in self._gaps(target.shape[2]):
                target[:, :, gap] = 0

    def begin_with(self, tensors: Tensors) -> None:
        """Sums in these float32 tensors, in place, what they hold and what is added from now on."""
        self._found = [Stretch(0, tensors[0].shape[2], tensors, is_state=True)]

    def result(self, dtype: torch.dtype) -> Tensors:
        """The sums, rounded once."""
        if len(self._found) == 1 and (self._found[0].start, self._found[0].stop) == (0, self._shapes[0][2]):
            return tuple(t.to(dtype) for t in self._found[0].tensors)
        out = self._empty(dtype)
        self.write(out)
        return out

    def _empty(self, dtype: torch.dtype) -> Tensors:
        return tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape in self._shapes)


class SumByHeads:
    """The running sum of gradients whose contributions come for some heads and batch rows each."""

    def __init__(self, like: Tensors, heads: Span, rows: Span, wide: torch.dtype) -> None:
        self._like, self._whole, self._wide = like, (heads, rows), wide
        self._sums: dict[Key, Sum] = {}

    def of(self, key: Key) -> Sum:
        """The sum for these heads and batch rows, to be added to."""
        if key not in self._sums:
            self._sums[key] = Sum(self._part(self._like, key), self._wide)
        return self._sums[key]

    def _part(self, tensors: Tensors, key: Key) -> Tensors:
        (heads, rows), (all_heads, all_rows) = key, self._whole
        h0, b0 = heads.start - all_heads.start, rows.start - all_rows.start
        return tuple(t[b0 : b0 + len(rows), h0 : h0 + len(heads)] for t in tensors)

    def result(self, dtype: torch.dtype) -> Tensors:
        """The sums, rounded once."""
        if set(self._sums) <= {self._whole}:
            return self.of(self._whole).result(dtype)
        size = len(self._whole[0]) * len(self._whole[1])
        apart = not any(_overlap(a, b) for a in self._sums for b in self._sums if a is not b)
        if apart and sum(len(heads) * len(rows) for heads, rows in self._sums) == size:
            out = tuple(t.new_empty(t.shape, dtype=dtype) for t in self._like)
            for key, sums in self._sums.items():
                sums.write(self._part(out, key))
            return out
        total = tuple(t.new_zeros(t.shape, dtype=self._wide) for t in self._like)
        for key, sums in self._sums.items():
            for target, tensor in zip(self._part(total, key), sums.result(self._wide), strict=True):
                target += tensor
        return tuple(t.to(dtype) for t in total)


def _overlap(a: Key, b: Key) -> bool:
    return all(x.start < y.stop and y.start < x.stop for x, y in zip(a, b, strict=True))
