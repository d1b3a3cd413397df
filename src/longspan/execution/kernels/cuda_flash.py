"""`flash` and `varlen`: CUDA flash attention, one launch per tile or one launch for many. Not run on a GPU.

Where this was written there is none: calls are checked with fake `cuda` tensors (signatures, shapes, dtypes), meaning
and layouts with a model that reads by address. Shapes: see contract.py; T counts the packed rows of many slices.

The operator aligns its diagonal to the bottom-right corner and takes a window (left, right) beside it. A tight tile of
`rows` x `cols` is such a window: row i sees columns i - hi to i - lo, and with `shift = cols - rows` that is left =
hi + shift and right = -lo - shift, neither of which can be negative when no row and no column is without a partner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.attention
from torch import Tensor

from longspan.execution import _torch
from longspan.execution.kernels.contract import AMPERE, TileWork, Upstream, gpu_refusal, in_vectors
from longspan.execution.tile import PLAIN, Features, Tile, once

MULTIPLE = 8
WIDEST = 256

Window = tuple[int, int]


def implementation() -> str:
    """Whose flash attention PyTorch's operator runs on GPUs: its own FA2, or what the user has activated by
    `torch.nn.attention.activate_flash_attention_impl`, which takes the operator's place.

    >>> implementation()
    'FA2'
    """
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # not in older versions of PyTorch
    return (current and current()) or "FA2"


class FlashOp(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor | None,
        starts_k: Tensor | None,
        longest: tuple[int, int],
        window: Window,
        scale: float,
        /,
    ) -> tuple[Tensor, Tensor]: ...


class FlashBackwardOp(Protocol):
    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        starts_q: Tensor | None,
        starts_k: Tensor | None,
        longest: tuple[int, int],
        window: Window,
        scale: float,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class Flash:
    """CUDA flash attention; `grouped` runs tiles of one window in one launch. Not run on a GPU."""

    name: str = "varlen"
    grouped: bool = True
    op: FlashOp = _torch.flash
    backward_op: FlashBackwardOp = _torch.flash_backward
    honours: Features = PLAIN

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:  # noqa: ARG002
        widest = max(q_BHQD.shape[3], v_BGKE.shape[3])
        if (why := gpu_refusal(q_BHQD, AMPERE)) is not None:
            return why
        if q_BHQD.dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, and the tensors are {q_BHQD.dtype}"
        if widest > WIDEST:
            return f"it takes head dims up to {WIDEST}, and one here is {widest}"
        return None

    def forward(self, work: TileWork) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        width = _width(work)
        q, k, v = (in_vectors(x, width, MULTIPLE) for x in (work.q_BHQD, work.k_BGKD, work.v_BGKE))
        done: dict[int, tuple[Tensor, Tensor]] = {}
        launches = self._launches(q, k, work.tiles)
        for index, tile in enumerate(work.tiles):
            if index not in done:
                launch = launches[index]
                out, lse = self.op(
                    launch.queries(q),
                    launch.keys(k),
                    launch.keys(v),
                    *launch.starts(q),
                    launch.longest,
                    launch.window,
                    work.scale,
                )
                parts = zip(launch.split_queries(out), launch.split_lse(lse), strict=True)
                done.update(zip(launch.members, parts, strict=True))
            out, lse = done.pop(index)
            tight = _tight(tile)
            at = tight.q0 - tile.q0, tile.q1 - tight.q1
            out = out.narrow(3, 0, work.v_BGKE.shape[3])
            yield tile, _with_rows(out, at, 2, 0.0), _with_rows(lse, at, 2, -torch.inf)

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
        width, dtype = _width(work), work.q_BHQD.dtype
        dout, out = (in_vectors(x.to(dtype), width, MULTIPLE) for x in (upstream.dout_BHQE, upstream.out_BHQE))
        q, k, v = (in_vectors(x, width, MULTIPLE) for x in (work.q_BHQD, work.k_BGKD, work.v_BGKE))
        # +inf is what the operator itself writes into rows that are not there: they add exact zeros
        lse = upstream.lse_BHQ.float().masked_fill(upstream.lse_BHQ.isneginf(), torch.inf)
        done: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        launches = self._launches(q, k, work.tiles)
        for index, tile in enumerate(work.tiles):
            if index not in done:
                launch = launches[index]
                dq, dk, dv = self.backward_op(
                    launch.queries(dout),
                    launch.queries(q),
                    launch.keys(k),
                    launch.keys(v),
                    launch.queries(out),
                    launch.lse(lse),
                    *launch.starts(q),
                    launch.longest,
                    launch.window,
                    work.scale,
                )
                parts = zip(launch.split_queries(dq), launch.split_keys(dk), launch.split_keys(dv), strict=True)
                done.update(zip(launch.members, parts, strict=True))
            dq, dk, dv = done.pop(index)
            tight = _tight(tile)
            rows, cols = (tight.q0 - tile.q0, tile.q1 - tight.q1), (tight.k0 - tile.k0, tile.k1 - tight.k1)
            d, e = work.q_BHQD.shape[3], work.v_BGKE.shape[3]
            yield (
                tile,
                _with_rows(dq.narrow(3, 0, d), rows, 2, 0.0),
                _with_rows(dk.narrow(3, 0, d), cols, 2, 0.0),
                _with_rows(dv.narrow(3, 0, e), cols, 2, 0.0),
            )

    def _launches(self, q: Tensor, k: Tensor, tiles: Sequence[Tile]) -> dict[int, Launch]:
        """The launch each tile belongs to, by the tile's number."""
        room = (q.shape[2], k.shape[2]) if self.grouped else (0, 0)

        def made() -> dict[int, Launch]:
            return {i: launch for launch in launches(tiles, *room) for i in launch.members}

        return once(tiles, ("launches", room), made)


@dataclass(eq=False)
class Launch:
    """Tight tiles of one window, packed batch row by batch row; alone, a tile keeps its batch dim.

    What a launch needs to know beside the tensors is worked out once: nothing is copied to a GPU in a warm call.
    """

    window: Window
    tiles: list[Tile]
    members: list[int]
    known: dict[object, Tensor] = field(default_factory=dict)

    @cached_property
    def longest(self) -> tuple[int, int]:
        return max(tile.rows for tile in self.tiles), max(tile.cols for tile in self.tiles)

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        return [(tile.q0, tile.rows) for tile in self.tiles]

    @cached_property
    def cols(self) -> list[tuple[int, int]]:
        return [(tile.k0, tile.cols) for tile in self.tiles]

    def queries(self, x_BHQD: Tensor) -> Tensor:
        return self._packed(x_BHQD.transpose(1, 2), "rows")

    def keys(self, x_BGKD: Tensor) -> Tensor:
        return self._packed(x_BGKD.transpose(1, 2), "cols")

    def lse(self, x_BHQ: Tensor) -> Tensor:
        """(B, H, q) for a tile alone, (H, T) for many."""
        return self._packed(x_BHQ.transpose(1, 2), "rows").transpose(-1, -2).contiguous()

    def _packed(self, x_BTHD: Tensor, side: str) -> Tensor:
        runs: list[tuple[int, int]] = getattr(self, side)
        first, num = runs[0]
        if len(runs) == 1:
            return x_BTHD.narrow(1, first, num)
        if x_BTHD.shape[0] > 1:
            return torch.cat([x_BTHD.narrow(1, a, n).flatten(0, 1) for a, n in runs])
        if all(a + n == b for (a, n), (b, _) in pairwise(runs)):  # neighbours in memory: nothing to copy
            return x_BTHD.select(0, 0).narrow(0, first, sum(n for _, n in runs))
        return x_BTHD.select(0, 0).index_select(0, self._indices(side, x_BTHD.device))

    def _indices(self, side: str, device: torch.device) -> Tensor:
        """The rows that are packed, one by one."""
        if (side, device) not in self.known:
            runs: list[tuple[int, int]] = getattr(self, side)
            self.known[side, device] = torch.cat([torch.arange(a, a + n) for a, n in runs]).to(device)
        return self.known[side, device]

    def starts(self, like_BHQD: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Where each slice starts among the packed queries and keys, and where the last one ends."""
        if len(self.tiles) == 1:
            return None, None
        b, device = like_BHQD.shape[0], like_BHQD.device
        for side, runs in (("rows", self.rows), ("cols", self.cols)):
            if (side, b, device) not in self.known:
                ends = torch.tensor([0, *(n for _, n in runs for _ in range(b))]).cumsum(0)
                self.known[side, b, device] = ends.to(device=device, dtype=torch.int32)
        return self.known["rows", b, device], self.known["cols", b, device]

    def split_queries(self, x: Tensor) -> Iterator[Tensor]:
        return self._split(x, [tile.rows for tile in self.tiles])

    def split_keys(self, x: Tensor) -> Iterator[Tensor]:
        return self._split(x, [tile.cols for tile in self.tiles])

    def split_lse(self, lse: Tensor) -> Iterator[Tensor]:
        return (part.transpose(1, 2) for part in self._split_rows(lse.transpose(-1, -2), [t.rows for t in self.tiles]))

    def _split(self, x: Tensor, sizes: list[int]) -> Iterator[Tensor]:
        return (part.transpose(1, 2) for part in self._split_rows(x, sizes))

    def _split_rows(self, x: Tensor, sizes: list[int]) -> Iterator[Tensor]:
        """(B, rows, H, ...) of each tile."""
        if len(sizes) == 1:
            yield x
            return
        b, first = x.shape[0] // sum(sizes), 0
        for num in sizes:
            yield x.narrow(0, first, b * num).unflatten(0, (b, num))
            first += b * num


def launches(tiles: Sequence[Tile], max_rows: int, max_cols: int) -> list[Launch]:
    """Tiles of equal windows put together, in order; a launch takes no further tile when it would pack more rows or
    keys than there are, so that overlapping tiles cost at most one copy of the tensors."""
    made: list[Launch] = []
    open_at: dict[Window, tuple[Launch, int, int]] = {}
    for index, tile in enumerate(tiles):
        tight = _tight(tile)
        window = window_of(tight)
        launch, rows, cols = open_at.get(window, (None, 0, 0))
        rows, cols = rows + tight.rows, cols + tight.cols
        if launch is None or rows > max_rows or cols > max_cols:
            launch, rows, cols = Launch(window, [], []), tight.rows, tight.cols
            made.append(launch)
        launch.tiles.append(tight)
        launch.members.append(index)
        open_at[window] = launch, rows, cols
    return made


def window_of(tight: Tile) -> Window:
    """Keys left and right of a diagonal that ends in the bottom-right corner; -1 is open.

    >>> window_of(Tile(0, 4, 0, 6, lo=-2)), window_of(Tile(0, 4, 0, 4, lo=0, hi=1))
    ((-1, 0), (1, 0))
    """
    shift = tight.cols - tight.rows
    left = -1 if tight.hi is None else tight.hi + shift
    right = -1 if tight.lo is None else -tight.lo - shift
    assert left >= -1, f"{tight} is not tight"
    assert right >= -1, f"{tight} is not tight"
    return left, right


def _tight(tile: Tile) -> Tile:
    tight = tile.tight()
    assert tight is not None, f"{tile} has no pair"
    return tight


def _width(work: TileWork) -> int:
    return -(-max(work.q_BHQD.shape[3], work.v_BGKE.shape[3]) // MULTIPLE) * MULTIPLE


def _with_rows(x: Tensor, around: tuple[int, int], dim: int, value: float) -> Tensor:
    """Rows that no pair of the tile touches, put back before and after."""
    if around == (0, 0):
        return x
    before, after = around
    shape = list(x.shape)
    shape[dim] += before + after
    full = x.new_full(shape, value)
    full.narrow(dim, before, x.shape[dim]).copy_(x)
    return full
