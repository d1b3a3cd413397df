"""`flash`, `varlen`, `fa3`, `fa4`, `cudnn_varlen`: one launch per tile, or for many tiles. Not run on a GPU.

No GPU was available: calls are checked with fake `cuda` tensors (signatures, shapes, dtypes), semantics and memory
layouts with a model that reads by address. Shapes: see contract.py; T counts the packed rows of many slices.

The operator aligns its diagonal to the bottom-right corner and takes a window (left, right) around it. A tight tile of
`rows` x `cols` is such a window: row i sees columns i - hi to i - lo, and with `shift = cols - rows` that is left =
hi + shift and right = -lo - shift, neither of which can be negative when no row and no column is without a partner.
FA2 closes an open side at `cols`, which is wrong for more rows than keys + 1: such tiles go in parts (`fa2_parts`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.attention
from numpy.typing import NDArray
from torch import Tensor

from longspan import _torch
from longspan.kernels.contract import AMPERE, Group, TileWork, Upstream, gpu_refusal, pad_last_dim
from longspan.tile import PLAIN, Features, Tile, cached
from longspan.versions import minor

_log = logging.getLogger("longspan")
MULTIPLE = 8

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
class Version:
    """Limits of a version of flash attention, from its sources."""

    majors: tuple[int, ...] | None
    """First numbers of the compute capabilities that it runs on; None for all from 8.0."""
    takes: str
    """Head dims, in words."""
    widths: Callable[[int, int], tuple[int, int] | None]
    """Dims of q and k, and of v, that tensors of these dims are padded to; None if it takes neither."""
    deterministic: int = 256
    """Largest head dim of backward with `torch.use_deterministic_algorithms`."""
    groups_since: tuple[int, int] = (0, 0)
    """The version of PyTorch from which several query heads may share a key head."""


def _fa2_widths(d: int, e: int) -> tuple[int, int] | None:
    width = -(-max(d, e) // MULTIPLE) * MULTIPLE
    return (width, width) if width <= 256 else None


def _fa3_widths(d: int, e: int) -> tuple[int, int] | None:
    narrow = 128 < d <= 192 and 96 < e <= 128  # the only unequal dims that it has kernels for
    return (-(-d // MULTIPLE) * MULTIPLE, -(-e // MULTIPLE) * MULTIPLE) if narrow else _fa2_widths(d, e)


def _fa4_widths(d: int, e: int) -> tuple[int, int] | None:
    """Others up to 128 are accepted, but its tests have these alone, and a backward of 16 has failed to compile."""
    if 128 < d <= 192 and e <= 128:
        return 192, 128
    return next(((width, width) for width in (64, 96, 128) if max(d, e) <= width), None)


def _cudnn_widths(d: int, e: int) -> tuple[int, int] | None:
    return _fa2_widths(d, e) if max(d, e) <= 128 else None


VERSIONS = {
    "FA2": Version(None, "up to 256", _fa2_widths),
    "FA3": Version((9,), "up to 256", _fa3_widths, deterministic=192),
    "FA4": Version((9, 10), "up to 128, or 192 with values of 128", _fa4_widths),
    "cuDNN": Version((9, 10), "up to 128", _cudnn_widths, groups_since=(2, 15)),
}


@dataclass(frozen=True)
class Flash:
    """CUDA flash attention; `grouped` runs tiles of one window in one launch. Not run on a GPU.

    `package` is FA3, FA4 or cuDNN, called directly; without one, PyTorch's operator runs what `implementation` returns.
    """

    name: str = "varlen"
    grouped: bool = True
    op: FlashOp = _torch.flash
    backward_op: FlashBackwardOp = _torch.flash_backward
    honours: Features = PLAIN
    package: str | None = None
    packs: bool = False
    """Whether single tiles are packed, too."""

    @property
    def version(self) -> Version:
        return VERSIONS.get(self.package or implementation(), VERSIONS["FA2"])

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:
        if (why := gpu_refusal(q_BHQD, AMPERE)) is not None:
            return why
        if q_BHQD.dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, and the tensors are {q_BHQD.dtype}"
        dims, majors = (q_BHQD.shape[3], v_BGKE.shape[3]), self.version.majors
        if majors is not None:
            capability = _torch.capability(q_BHQD.device)
            if capability is None or capability[0] not in majors:
                need = " or ".join(f"{major}.x" for major in majors)
                have = "not known" if capability is None else "{}.{}".format(*capability)
                return f"it needs compute capability {need}, and that of {q_BHQD.device} is {have}"
        if self.version.widths(*dims) is None:
            return f"it takes head dims {self.version.takes}, and the largest here is {max(dims)}"
        if max(dims) > self.version.deterministic and torch.are_deterministic_algorithms_enabled():
            return f"its backward is deterministic up to head dim {self.version.deterministic}, and here is {max(dims)}"
        heads, since = (q_BHQD.shape[1], k_BGKD.shape[1]), self.version.groups_since
        if heads[0] != heads[1] and minor(torch.__version__) < since:
            need = "{}.{}".format(*since)
            return f"it takes groups of heads from PyTorch {need} on, and there are {heads[0]} on {heads[1]}"
        package = None if self.package is None else _torch.flash_package(self.package)
        return package if isinstance(package, str) else None

    def groups(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> Sequence[Group]:
        return [tuple(launch.tiles) for launch in self._launches(tiles, num_q, num_k)]

    def forward(self, work: TileWork) -> Iterator[tuple[Tensor, Tensor]]:
        b, e, (q, k, v), _ = work.q_BHQD.shape[0], work.v_BGKE.shape[3], *self._pad_head_dims(work)
        for launch in self._launches(work.tiles, q.shape[2], k.shape[2]):
            index = work.index
            operands = launch.queries(q, index), launch.keys(k, index), launch.keys(v, index)
            out, lse = self.op(*operands, *launch.starts(q, index), launch.longest, launch.window, work.scale)
            yield launch.unpack(out, b, e), launch.unpack_lse(lse, b)

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        dtype, b, d, e = work.q_BHQD.dtype, work.q_BHQD.shape[0], work.q_BHQD.shape[3], work.v_BGKE.shape[3]
        (q, k, v), width = self._pad_head_dims(work)
        dout, out = (pad_last_dim(x.to(dtype), width, MULTIPLE) for x in (upstream.dout_BHQE, upstream.out_BHQE))
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
            yield launch.unpack(dq, b, d), launch.unpack(dk, b, d), launch.unpack(dv, b, e)

    def _pad_head_dims(self, work: TileWork) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        """Return q, k and v with head dims that the kernel takes, and that of v."""
        d, e = work.q_BHQD.shape[3], work.v_BGKE.shape[3]
        widths = self.version.widths(d, e)
        assert widths is not None, f"head dims {d} and {e} were not refused"
        q, k = (pad_last_dim(x, widths[0], MULTIPLE) for x in (work.q_BHQD, work.k_BGKD))
        return (q, k, pad_last_dim(work.v_BGKE, widths[1], MULTIPLE)), widths[1]

    def index_arrays(
        self, tiles: Sequence[Tile], num_q: int, num_k: int, batch: int
    ) -> dict[object, NDArray[np.int32]]:
        """Return the index arrays of all launches, which do not depend on values, by their names."""
        launches = self._launches(tiles, num_q, num_k)
        return {name: array for launch in launches for name, array in launch.index_arrays(batch)}

    def _launches(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> list[Launch]:
        room = (num_q, num_k) if self.grouped else (0, 0)
        # what is activated in PyTorch may change after a plan was recorded, so its operator counts as FA2
        return cached(tiles, launches, *room, self.packs, self.package not in ("FA3", "FA4"))


@dataclass(eq=False)
class Launch:
    """Tight tiles of one window, packed batch row by batch row; a single tile keeps its batch dim, if not `packs`.

    Index tensors are computed once: nothing is copied to a GPU in a warm call.
    """

    window: Window
    tiles: list[Tile]
    packs: bool = False
    number: int = 0
    """Its place among the launches of the same tiles."""
    known: dict[object, Tensor] = field(default_factory=dict)
    """Index tensors that a plan has not copied to the device, by name and device."""

    @cached_property
    def is_dense(self) -> bool:
        return len(self.tiles) == 1 and not self.packs

    @cached_property
    def longest(self) -> tuple[int, int]:
        return self.rows.longest, self.cols.longest

    @cached_property
    def is_square(self) -> bool:
        return self.rows.sizes == self.cols.sizes

    @cached_property
    def rows(self) -> Side:
        return Side("rows", [tile.q0 for tile in self.tiles], [tile.rows for tile in self.tiles])

    @cached_property
    def cols(self) -> Side:
        return Side("cols", [tile.k0 for tile in self.tiles], [tile.cols for tile in self.tiles])

    def queries(self, x_BHQD: Tensor, index: Index | None = None) -> Tensor:
        return self._pack_rows(x_BHQD, self.rows, index)

    def keys(self, x_BGKD: Tensor, index: Index | None = None) -> Tensor:
        return self._pack_rows(x_BGKD, self.cols, index)

    def lse(self, x_BHQ: Tensor, index: Index | None = None) -> Tensor:
        """Return (B, H, q) for one tile, (H, T) for many."""
        picked = self._pick_rows(x_BHQ, 2, self.rows, index)
        return (picked if self.is_dense else picked.transpose(0, 1).flatten(1)).contiguous()

    def _pack_rows(self, x_BHTD: Tensor, side: Side, index: Index | None = None) -> Tensor:
        """Return (B, t, H, D) for one tile, (T, H, D) for many. Rows are packed token by token, with all heads of a
        token together, so that a copy has the right layout at once."""
        picked = self._pick_rows(x_BHTD.transpose(1, 2), 1, side, index)
        return picked if self.is_dense else picked.flatten(0, 1)

    def _pick_rows(self, x: Tensor, dim: int, side: Side, index: Index | None = None) -> Tensor:
        """Return the rows of all tiles, one tile after the other."""
        if side.is_one_run:  # neighbours in memory: nothing to copy
            return x if side.total == x.shape[dim] else x.narrow(dim, side.firsts[0], side.total)
        return x.index_select(dim, self._index(side, None, x.device, index))

    def starts(self, like_BHQD: Tensor, index: Index | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Return where each slice starts among the packed queries and keys, and where the last one ends: the same
        tensor for both if every slice is a square."""
        if self.is_dense:
            return None, None
        b, device = like_BHQD.shape[0], like_BHQD.device
        rows = self._index(self.rows, b, device, index)
        return rows, rows if self.is_square else self._index(self.cols, b, device, index)

    def index_arrays(self, batch: int) -> Iterator[tuple[object, NDArray[np.int32]]]:
        """Yield the names and values of the index tensors."""
        for side in (self.rows, self.cols):
            if not side.is_one_run:
                yield (self.number, side.name, None), side.tokens()
            if not self.is_dense:
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

    def unpack(self, x: Tensor, b: int, dim: int) -> Tensor:
        """Return a result as (B, H, t, dim)."""
        x = (x if x.dim() == 4 else _unflatten(x, 0, b)).transpose(1, 2)
        return x if x.shape[3] == dim else x.narrow(3, 0, dim)

    def unpack_lse(self, lse: Tensor, b: int) -> Tensor:
        return lse if lse.dim() == 3 else _unflatten(lse, 1, b).transpose(0, 1)


def _unflatten(x: Tensor, dim: int, b: int) -> Tensor:
    return x.unsqueeze(dim) if b == 1 else x.unflatten(dim, (b, -1))


@dataclass(eq=False)
class Side:
    """The first row and the number of rows of every tile of a launch, among queries or among keys."""

    name: str
    firsts: list[int]
    sizes: list[int]

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)

    @cached_property
    def longest(self) -> int:
        return max(self.sizes)

    @cached_property
    def is_one_run(self) -> bool:
        return list(accumulate(self.sizes, initial=self.firsts[0]))[:-1] == self.firsts

    def tokens(self) -> NDArray[np.int32]:
        """Return all rows, tile by tile."""
        first, num = np.array(self.firsts, dtype=np.int32), np.array(self.sizes, dtype=np.int32)
        ends = np.cumsum(num, dtype=np.int32)
        return np.repeat(first - ends + num, num) + np.arange(self.total, dtype=np.int32)

    def starts(self, batch: int) -> NDArray[np.int32]:
        """Return the first row of every tile of every batch row among the packed rows, and their number."""
        return np.cumsum([0, *self.sizes * batch], dtype=np.int32)


def launches(
    tiles: Sequence[Tile], max_rows: int, max_cols: int, packs: bool = False, for_fa2: bool = False
) -> list[Launch]:
    """Group tiles of equal windows, in order. A launch takes no further tile if it would pack more rows or keys than
    there are, so that overlapping tiles cost at most one copy of the tensors."""
    result: list[Launch] = []
    open_at: dict[Window, tuple[Launch, int, int]] = {}
    for tile in chain.from_iterable(map(fa2_parts, tiles)) if for_fa2 else tiles:
        window = window_of(tile)
        launch, rows, cols = open_at.get(window, (None, 0, 0))
        rows, cols = rows + tile.rows, cols + tile.cols
        if launch is None or rows > max_rows or cols > max_cols:
            launch, rows, cols = Launch(window, [], packs, len(result)), tile.rows, tile.cols
            result.append(launch)
        launch.tiles.append(tile)
        open_at[window] = launch, rows, cols
    return result


def fa2_parts(tight: Tile) -> Sequence[Tile]:
    """Return parts of a tile whose windows mean the same to FA2 (see the top of this file): a part has no more rows
    than keys + 1, or no bound. Rows up to `hi` are not bounded by it, nor rows from `cols - 1 + lo` by `lo`.

    >>> [(part.q0, part.q1, part.k0, part.k1) for part in fa2_parts(Tile(0, 8, 0, 4, lo=0, hi=4))]
    [(0, 3, 0, 3), (3, 5, 0, 4), (5, 8, 1, 4)]
    """
    lo, hi, rows = tight.lo, tight.hi, tight.rows
    if rows <= tight.cols + 1 or lo is hi is None:
        return (tight,)
    cuts = {0, rows, rows if hi is None else min(hi + 1, rows), 0 if lo is None else max(tight.cols - 1 + lo, 0)}
    parts = (tight.part(tight.q0 + a, tight.q0 + b, tight.k0, tight.k1) for a, b in pairwise(sorted(cuts)))
    return [part for part in parts if part is not None]


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


def package(name: str) -> Flash:
    """Return the kernel that calls an installed FA3 or FA4 directly, and leaves PyTorch's operators as they are."""

    def forward(*operands: Any) -> tuple[Tensor, Tensor]:
        return _torch.flash(*operands, run=_torch.flash_package(name)[0])  # type: ignore[arg-type]

    def backward(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _torch.flash_backward(*operands, run=_torch.flash_package(name)[1])  # type: ignore[arg-type]

    return Flash(name.lower(), True, forward, backward, package=name)


CUDNN_ROWS = 128  # PyTorch leaves slices that are all shorter to flash attention
CUDNN_NUMBERS = 1 << 31  # cuDNN finds slices by offsets of 32 bits
CUDNN_GRAPHS = 64
"""Most graphs of cuDNN, each for one shape and direction. PyTorch takes 40 ms for one and never frees it, and packed
batches have new shapes in every step: beyond these, they run on flash attention."""


def cudnn_varlen(
    cudnn: tuple[FlashOp, FlashBackwardOp] = (_torch.cudnn_packed, _torch.cudnn_packed_backward),
    flash: tuple[FlashOp, FlashBackwardOp] = (_torch.flash, _torch.flash_backward),
) -> Flash:
    """Return the kernel that runs packed slices on cuDNN, and launches that it does not take on flash attention.

    cuDNN has no windows here, and its causal diagonal begins in the top-left corner: where flash attention's does, too,
    if a slice is a square.
    """
    graphs: set[object] = set()
    told = False

    def takes(q: Tensor, k: Tensor, v: Tensor, *rest: Any, backward: bool = False) -> bool:
        nonlocal told
        starts_q, starts_k, longest, window, _ = rest
        if window != (-1, -1) and (window != (-1, 0) or starts_q is not starts_k):
            return False
        if min(longest) <= CUDNN_ROWS or max(x.numel() for x in (q, k, v)) >= CUDNN_NUMBERS:
            return False
        key = q.device, q.dtype, q.shape, k.shape, v.shape, starts_q.shape, longest, window, backward
        if key not in graphs and len(graphs) < CUDNN_GRAPHS:
            graphs.add(key)
        if key not in graphs and not told:
            told = True
            _log.warning(
                "cuDNN has graphs for %d shapes, the most that it gets. Launches of other shapes run on PyTorch's flash"
                " attention, with other speed and rounding. Pass kernel='varlen' to run all of them on it.",
                CUDNN_GRAPHS,
            )
        return key in graphs

    def forward(*operands: Any) -> tuple[Tensor, Tensor]:
        if not takes(*operands):
            return flash[0](*operands)
        return cudnn[0](*(x.contiguous() for x in operands[:3]), *operands[3:])

    def backward(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        if not takes(*operands[1:4], *operands[6:], backward=True):
            return flash[1](*operands)
        return cudnn[1](*(x.contiguous() for x in operands[:6]), *operands[6:])

    return Flash("cudnn_varlen", True, forward, backward, package="cuDNN", packs=True)
