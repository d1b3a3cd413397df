"""`flash` and `varlen`: CUDA flash attention, one launch per tile or one launch for many tiles. Not run on a GPU.

No GPU was available: calls are checked with fake `cuda` tensors (signatures, shapes, dtypes), semantics and memory
layouts with a model that reads by address. Shapes: see contract.py; T counts the packed rows of many slices.

The operator aligns its diagonal to the bottom-right corner and takes a window (left, right) around it. A tight tile of
`rows` x `cols` is such a window: row i sees columns i - hi to i - lo, and with `shift = cols - rows` that is left =
hi + shift and right = -lo - shift, neither of which can be negative when no row and no column is without a partner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.nn.attention
from numpy.typing import NDArray
from torch import Tensor

from longspan import _torch
from longspan.kernels.contract import AMPERE, Group, TileWork, Upstream, gpu_refusal, in_vectors
from longspan.tile import PLAIN, Features, Tile, cached

MULTIPLE = 8
WIDEST = 256

Window = tuple[int, int]
Starts = Tensor | None
Index = Mapping[object, Tensor]
"""Index tensors by name: (number of the launch, side, batch rows or None)."""
FlashOp = Callable[
    [Tensor, Tensor, Tensor, Starts, Starts, tuple[int, int], Window, float],
    tuple[Tensor, Tensor],
]
"""(q, k, v, starts_q, starts_k, longest, window, scale) -> (out, lse)."""
FlashBackwardOp = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Starts, Starts, tuple[int, int], Window, float],
    tuple[Tensor, Tensor, Tensor],
]
"""(dout, q, k, v, out, lse, starts_q, starts_k, longest, window, scale) -> (dq, dk, dv)."""


def implementation() -> str:
    """Return which flash attention PyTorch's operator runs on GPUs: its own FA2, or the one activated by
    `torch.nn.attention.activate_flash_attention_impl`, which replaces the operator.

    >>> implementation()
    'FA2'
    """
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # not in older versions of PyTorch
    return (current and current()) or "FA2"


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

    def groups(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> Sequence[Group]:
        return [tuple(launch.tiles) for launch in self._launches(tiles, num_q, num_k)]

    def forward(self, work: TileWork) -> Iterator[tuple[Tensor, Tensor]]:
        width, b, e = _width(work), work.q_BHQD.shape[0], work.v_BGKE.shape[3]
        q, k, v = (in_vectors(x, width, MULTIPLE) for x in (work.q_BHQD, work.k_BGKD, work.v_BGKE))
        for launch in self._launches(work.tiles, q.shape[2], k.shape[2]):
            index = work.index
            operands = launch.queries(q, index), launch.keys(k, index), launch.keys(v, index)
            out, lse = self.op(*operands, *launch.starts(q, index), launch.longest, launch.window, work.scale)
            yield launch.unpacked(out, b, e), launch.unpacked_lse(lse, b)

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        width, dtype, b = _width(work), work.q_BHQD.dtype, work.q_BHQD.shape[0]
        d, e = work.q_BHQD.shape[3], work.v_BGKE.shape[3]
        dout, out = (in_vectors(x.to(dtype), width, MULTIPLE) for x in (upstream.dout_BHQE, upstream.out_BHQE))
        q, k, v = (in_vectors(x, width, MULTIPLE) for x in (work.q_BHQD, work.k_BGKD, work.v_BGKE))
        # the operator itself writes +inf for rows that are not there: they add exact zeros
        lse = upstream.lse_BHQ.float().masked_fill(upstream.lse_BHQ.isneginf(), torch.inf)
        for launch in self._launches(work.tiles, q.shape[2], k.shape[2]):
            index = work.index
            queries = launch.queries(dout, index), launch.queries(q, index)
            operands = *queries, launch.keys(k, index), launch.keys(v, index), launch.queries(out, index)
            starts = launch.starts(q, index)
            dq, dk, dv = self.backward_op(
                *operands, launch.lse(lse, index), *starts, launch.longest, launch.window, work.scale
            )
            yield launch.unpacked(dq, b, d), launch.unpacked(dk, b, d), launch.unpacked(dv, b, e)

    def index_arrays(
        self, tiles: Sequence[Tile], num_q: int, num_k: int, batch: int
    ) -> dict[object, NDArray[np.int32]]:
        """Return the index arrays of all launches, which do not depend on values, by their names."""
        launches = self._launches(tiles, num_q, num_k)
        return {name: array for launch in launches for name, array in launch.index_arrays(batch)}

    def _launches(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> list[Launch]:
        room = (num_q, num_k) if self.grouped else (0, 0)
        return cached(tiles, launches, *room)


@dataclass(eq=False)
class Launch:
    """Tight tiles of one window, packed batch row by batch row; a single tile keeps its batch dim.

    Index tensors are computed once: nothing is copied to a GPU in a warm call.
    """

    window: Window
    tiles: list[Tile]
    number: int = 0
    """Its place among the launches of the same tiles."""
    known: dict[object, Tensor] = field(default_factory=dict)
    """Index tensors that a plan has not copied to the device, by name and device."""

    @cached_property
    def longest(self) -> tuple[int, int]:
        return max(tile.rows for tile in self.tiles), max(tile.cols for tile in self.tiles)

    @cached_property
    def rows(self) -> Side:
        return Side("rows", [(tile.q0, tile.rows) for tile in self.tiles])

    @cached_property
    def cols(self) -> Side:
        return Side("cols", [(tile.k0, tile.cols) for tile in self.tiles])

    def queries(self, x_BHQD: Tensor, index: Index | None = None) -> Tensor:
        return self._packed(x_BHQD, self.rows, index)

    def keys(self, x_BGKD: Tensor, index: Index | None = None) -> Tensor:
        return self._packed(x_BGKD, self.cols, index)

    def lse(self, x_BHQ: Tensor, index: Index | None = None) -> Tensor:
        """Return (B, H, q) for one tile, (H, T) for many."""
        picked = self._picked(x_BHQ, 2, self.rows, index)
        return (picked if len(self.tiles) == 1 else picked.transpose(0, 1).flatten(1)).contiguous()

    def _packed(self, x_BHTD: Tensor, side: Side, index: Index | None = None) -> Tensor:
        """Return (B, t, H, D) for one tile, (T, H, D) for many. Rows are packed token by token, with all heads of a
        token together, so that a copy has the right layout at once."""
        picked = self._picked(x_BHTD.transpose(1, 2), 1, side, index)
        return picked if len(self.tiles) == 1 else picked.flatten(0, 1)

    def _picked(self, x: Tensor, dim: int, side: Side, index: Index | None = None) -> Tensor:
        """Return the rows of all tiles, one tile after the other."""
        if side.is_one_run:  # neighbours in memory: nothing to copy
            return x if side.total == x.shape[dim] else x.narrow(dim, side.runs[0][0], side.total)
        return x.index_select(dim, self._index(side, None, x.device, index))

    def starts(self, like_BHQD: Tensor, index: Index | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Return where each slice starts among the packed queries and keys, and where the last one ends."""
        if len(self.tiles) == 1:
            return None, None
        b, device = like_BHQD.shape[0], like_BHQD.device
        return self._index(self.rows, b, device, index), self._index(self.cols, b, device, index)

    def index_arrays(self, batch: int) -> Iterator[tuple[object, NDArray[np.int32]]]:
        """Yield the names and values of the index tensors."""
        for side in (self.rows, self.cols):
            if not side.is_one_run:
                yield (self.number, side.name, None), side.tokens()
            if len(self.tiles) > 1:
                yield (self.number, side.name, batch), side.starts(batch)

    def _index(self, side: Side, batch: int | None, device: torch.device, index: Index | None) -> Tensor:
        """Return the tokens of a side, or, with `batch`, its starts."""
        name = self.number, side.name, batch
        if index is not None:
            return index[name]
        key = *name, device
        if key not in self.known:
            array = side.tokens() if batch is None else side.starts(batch)
            self.known[key] = torch.from_numpy(array).to(device)
        return self.known[key]

    def unpacked(self, x: Tensor, b: int, dim: int) -> Tensor:
        """Return a result as (B, H, t, dim)."""
        x = (x if x.dim() == 4 else _unflattened(x, 0, b)).transpose(1, 2)
        return x if x.shape[3] == dim else x.narrow(3, 0, dim)

    def unpacked_lse(self, lse: Tensor, b: int) -> Tensor:
        return lse if lse.dim() == 3 else _unflattened(lse, 1, b).transpose(0, 1)


def _unflattened(x: Tensor, dim: int, b: int) -> Tensor:
    return x.unsqueeze(dim) if b == 1 else x.unflatten(dim, (b, -1))


@dataclass(eq=False)
class Side:
    """The first row and the number of rows of every tile of a launch, among queries or among keys."""

    name: str
    runs: list[tuple[int, int]]

    @cached_property
    def total(self) -> int:
        return sum(n for _, n in self.runs)

    @cached_property
    def is_one_run(self) -> bool:
        return all(a + n == b for (a, n), (b, _) in pairwise(self.runs))

    def tokens(self) -> NDArray[np.int32]:
        """Return all rows, tile by tile."""
        first, num = np.array(self.runs, dtype=np.int32).T
        ends = np.cumsum(num, dtype=np.int32)
        return np.repeat(first - ends + num, num) + np.arange(self.total, dtype=np.int32)

    def starts(self, batch: int) -> NDArray[np.int32]:
        """Return the first row of every tile of every batch row among the packed rows, and their number."""
        return np.cumsum([0, *(n for _, n in self.runs * batch)], dtype=np.int32)


def launches(tiles: Sequence[Tile], max_rows: int, max_cols: int) -> list[Launch]:
    """Group tiles of equal windows, in order. A launch takes no further tile if it would pack more rows or keys than
    there are, so that overlapping tiles cost at most one copy of the tensors."""
    result: list[Launch] = []
    open_at: dict[Window, tuple[Launch, int, int]] = {}
    for tile in tiles:
        window = window_of(tile)
        launch, rows, cols = open_at.get(window, (None, 0, 0))
        rows, cols = rows + tile.rows, cols + tile.cols
        if launch is None or rows > max_rows or cols > max_cols:
            launch, rows, cols = Launch(window, [], len(result)), tile.rows, tile.cols
            result.append(launch)
        launch.tiles.append(tile)
        open_at[window] = launch, rows, cols
    return result


def window_of(tight: Tile) -> Window:
    """Return the number of keys left and right of a diagonal that ends in the bottom-right corner; -1 is open.

    >>> window_of(Tile(0, 4, 0, 6, lo=-2)), window_of(Tile(0, 4, 0, 4, lo=0, hi=1))
    ((-1, 0), (1, 0))
    """
    shift = tight.cols - tight.rows
    left = -1 if tight.hi is None else tight.hi + shift
    right = -1 if tight.lo is None else -tight.lo - shift
    assert left >= -1, f"{tight} is not tight"
    assert right >= -1, f"{tight} is not tight"
    return left, right


def _width(work: TileWork) -> int:
    return -(-max(work.q_BHQD.shape[3], work.v_BGKE.shape[3]) // MULTIPLE) * MULTIPLE
