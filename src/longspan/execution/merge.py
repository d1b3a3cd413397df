"""Merge: contributions to the same rows become one, in float32, in an order that does not depend on arrival.

Results merge by a guarded running maximum and sum: a partial is `(out, lse)`, normalised output and natural-log sum of
exponentials; the state is (accumulator, maximum, sum), divided once at the end. A row that saw nothing is `(0, -inf)`
and changes nothing. Gradients merge by addition.

Most rows get one contribution only (a document that lies on one rank), and for those no float32 state is made: the
contribution is kept as it came until a second one meets it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longspan.span import Ints

NONE, ONE, MANY = 0, 1, 2


class ByRows:
    """Contributions to `num_rows` rows (dim 2 of every tensor), each over a stretch of them."""

    def __init__(self, num_rows: int) -> None:
        self._seen = np.zeros(num_rows, dtype=np.uint8)
        self._parts: list[tuple[int, int, tuple[Tensor, ...]]] = []

    def add(self, start: int, stop: int, *part: Tensor) -> None:
        """Takes up a contribution to local rows start to stop."""
        if not self._seen[start:stop].any():
            self._parts.append((start, stop, part))
            self._seen[start:stop] = ONE
            return
        if (self._seen[start:stop] == ONE).any():
            meeting = [p for p in self._parts if p[0] < stop and start < p[1]]
            self._parts = [p for p in self._parts if not (p[0] < stop and start < p[1])]
            for begin, end, tensors in meeting:
                self._absorb(begin, end, tensors)
                self._seen[begin:end] = MANY
        self._absorb(start, stop, part)
        self._seen[start:stop] = MANY

    def any(self) -> bool:
        """Whether anything was added."""
        return bool(self._seen.any())

    def _absorb(self, start: int, stop: int, part: tuple[Tensor, ...]) -> None:
        raise NotImplementedError

    def _stretches(self, kind: int) -> Ints:
        """(start, stop) of the rows that got no, one or many contributions."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._seen == kind, [False])).astype(np.int8)))
        return edges.reshape(-1, 2).astype(np.int64)


class Accumulator(ByRows):
    """The running result of `(B, H, T, E)` query rows."""

    def __init__(self, like: Tensor, v_head_dim: int) -> None:
        super().__init__(like.shape[2])
        self._shape = (*like.shape[:3], v_head_dim)
        self._like = like
        self._wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        self._state: tuple[Tensor, Tensor, Tensor] | None = None

    def _absorb(self, start: int, stop: int, part: tuple[Tensor, ...]) -> None:
        if self._state is None:
            new = self._like.new_empty
            self._state = (
                new(self._shape, dtype=self._wide).zero_(),
                new(self._shape[:3], dtype=self._wide).fill_(-torch.inf),
                new(self._shape[:3], dtype=self._wide).zero_(),
            )
        acc, top, num = (state[:, :, start:stop] for state in self._state)
        merge(acc, top, num, *part)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in the inputs' dtype, and lse; rows that saw nothing are (0, -inf)."""
        if len(self._parts) == 1 and self._parts[0][:2] == (0, self._shape[2]):
            out, lse = self._parts[0][2]
            return out.to(self._like.dtype), lse.to(self._wide)
        out = self._like.new_empty(self._shape)
        lse = self._like.new_empty(self._shape[:3], dtype=self._wide)
        for start, stop, (found, stat) in self._parts:
            out[:, :, start:stop] = found
            lse[:, :, start:stop] = stat
        for start, stop in self._stretches(NONE).tolist():
            out[:, :, start:stop] = 0
            lse[:, :, start:stop] = -torch.inf
        for start, stop in self._stretches(MANY).tolist():
            assert self._state is not None
            acc, top, num = (state[:, :, start:stop] for state in self._state)
            lse[:, :, start:stop] = top + num.log()  # -inf where nothing was seen: -inf + log(0)
            out[:, :, start:stop] = acc / num.clamp(min=torch.finfo(num.dtype).tiny).unsqueeze(-1)
        return out, lse


def merge(acc: Tensor, top: Tensor, num: Tensor, out: Tensor, lse: Tensor) -> None:
    """In place: the state of some rows takes up a partial over keys it has not seen."""
    high = torch.maximum(top, lse)
    base = high.masked_fill(high.isneginf(), 0.0)  # -inf minus -inf is nan, not "nothing"
    old, new = torch.exp(top - base), torch.exp(lse - base)
    acc.mul_(old.unsqueeze(-1)).addcmul_(out.to(acc.dtype), new.unsqueeze(-1))
    num.mul_(old).add_(new)
    top.copy_(high)


class Sum(ByRows):
    """The running sum of gradients over rows, one or more tensors shaped like `like`."""

    def __init__(self, like: tuple[Tensor, ...], wide: torch.dtype) -> None:
        super().__init__(like[0].shape[2])
        self._like, self._wide = like, wide
        self._state: tuple[Tensor, ...] | None = None

    def _absorb(self, start: int, stop: int, part: tuple[Tensor, ...]) -> None:
        if self._state is None:
            self._state = tuple(t.new_empty(t.shape, dtype=self._wide).zero_() for t in self._like)
        for state, tensor in zip(self._state, part, strict=True):
            state[:, :, start:stop] += tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All rows written out in float32; what is added to these tensors is added to the sum."""
        parts, self._parts = self._parts, []
        self._absorb(0, 0, tuple(t[:, :, :0] for t in self._like))  # makes the state if there is none
        for start, stop, part in parts:
            self._absorb(start, stop, part)
        self._seen[:] = MANY
        assert self._state is not None
        return self._state

    def result(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The sums, rounded once."""
        if len(self._parts) == 1 and self._parts[0][:2] == (0, len(self._seen)):
            return tuple(t.to(dtype) for t in self._parts[0][2])
        out = tuple(t.new_empty(t.shape, dtype=dtype) for t in self._like)
        for i, tensor in enumerate(out):
            for start, stop, part in self._parts:
                tensor[:, :, start:stop] = part[i]
            for start, stop in self._stretches(NONE).tolist():
                tensor[:, :, start:stop] = 0
            for start, stop in self._stretches(MANY).tolist():
                assert self._state is not None
                tensor[:, :, start:stop] = self._state[i][:, :, start:stop]
        return out
