"""`flex`: PyTorch's flex attention, all tiles of a compute in one block-sparse launch, with functions in the kernel.

Not run on a GPU: there the same graphs go through PyTorch's compiler, once for every set of shapes. So shapes are
rounded up to buckets (`bucket`): packed batches, whose tiles change in every step, share compiled kernels. Rows and
keys of the padding are masked out. The graphs are checked on CPUs, where the operators compute all scores.

With any tiles, a query row sees a few spans of keys, so tables of spans by row are the mask. Users' functions are
traced (see `traced`) and run inside the kernel. Shapes: see contract.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import pad

from longspan import _torch
from longspan.device_tables import keep_recent
from longspan.errors import KernelError
from longspan.kernels.contract import Group, TileWork, Upstream, gpu_refusal
from longspan.layouts.layout import to_device
from longspan.masks import Mask, Predicate
from longspan.masks.functions import device_of
from longspan.masks.mask_mods import predicate_mod
from longspan.masks.plane import ByIdentity
from longspan.masks.tiles import KeySpans, key_spans, list_chosen_first, most_spans, pairs_per_block, span_table
from longspan.scoring.pipeline import Scoring, TilePairs
from longspan.scoring.traced import Program, key_of, program
from longspan.spans import LIMIT
from longspan.tile import Features, Tile
from longspan.tile import accumulation_dtype as widened

BLOCK = _torch.FLEX_BLOCK
LN2 = math.log(2.0)
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_DTYPES = (torch.float64, *GPU_DTYPES)
DIMS = (16, 256)
TRITON = (7, 0)
"""The oldest GPUs that PyTorch compiles for."""
MAX_COMPILED = 256


class Flex:
    """One call for all tiles, with one result over all rows (and keys) from the first to the last."""

    name = "flex"
    honours = Features(mask_function=True, score_function=True)

    def refuses(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str | None:  # noqa: ARG002
        device, dtype = q_BHQD.device.type, q_BHQD.dtype
        if device not in ("cpu", "cuda"):
            return f"it runs on GPUs, and for checks on CPUs, and the tensors are on {q_BHQD.device}"
        known = CPU_DTYPES if device == "cpu" else GPU_DTYPES
        if dtype not in known:
            return f"on {device} it takes {', '.join(str(d)[6:] for d in known)}, and the tensors are {dtype}"
        dims = q_BHQD.shape[3], v_BGKE.shape[3]
        if device == "cuda" and not (DIMS[0] <= min(dims) and max(dims) <= DIMS[1]):
            return f"it takes head dims from {DIMS[0]} to {DIMS[1]}, and those here are {dims[0]} and {dims[1]}"
        if device == "cuda" and not has_triton():
            return "PyTorch compiles it with Triton, and Triton is not installed"
        return gpu_refusal(q_BHQD, TRITON) if device == "cuda" else None

    def groups(self, tiles: Sequence[Tile], num_q: int, num_k: int) -> Sequence[Group]:  # noqa: ARG002
        return [(_cover(tiles),)] if tiles else []

    def forward(self, work: TileWork) -> Iterator[tuple[Tensor, Tensor]]:
        if not work.tiles:
            return
        call = _Call.of(work)
        inputs = [call.rows(work.q_BHQD), call.keys(work.k_BGKD), call.keys(work.v_BGKE)]
        inputs += [*call.blocks.tensors, *call.score_values, *call.mask_values]
        with torch.no_grad():
            out, lse = call.run_forward(inputs)
        cover = call.blocks.cover
        yield out.narrow(2, cover.q0, cover.rows), lse.narrow(2, cover.q0, cover.rows).mul_(LN2)

    def backward(self, work: TileWork, upstream: Upstream) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if not work.tiles:
            return
        call = _Call.of(work)
        dout, lse = call.rows(upstream.dout_BHQE), call.rows(upstream.lse_BHQ, -torch.inf)
        # exp(score - inf) is 0 for a row that saw nothing
        lse = lse.masked_fill(lse.isneginf(), torch.inf).div_(LN2).contiguous()
        # The operator computes rowsum(dout * out) - dlse / log(2). With `out` of zeros, dlse alone gives delta, in full
        # precision and without the output of rows from other ranks.
        nothing, dlse = dout.new_zeros(()).expand(dout.shape), (call.rows(upstream.delta_BHQ) * -LN2).contiguous()
        three = call.rows(work.q_BHQD), call.keys(work.k_BGKD), call.keys(work.v_BGKE)
        buffers = *call.blocks.tensors, *call.score.mark_differentiable(call.score_values), *call.mask_values
        with torch.no_grad():
            inputs = [*three, nothing, lse, dout, dlse, *buffers]
            dq, dk, dv, *rest = call.run_backward(inputs)
        for number, gradient in call.score.captured_gradients(rest):
            assert work.pairs is not None
            totals = work.pairs.totals
            totals.add(number, gradient.view(totals.values[number].shape))
        cover = call.blocks.cover
        dk, dv = (x.narrow(2, cover.k0, cover.cols) for x in (dk, dv))
        yield dq.narrow(2, cover.q0, cover.rows), dk, dv


def why_not_inside(mask: Mask, scoring: Scoring | None, like: Tensor) -> str | None:
    """Return why functions of a call cannot run inside the kernel (the error of tracing them), or None."""
    predicates = [plane.predicate for plane in mask.distinct_planes() if plane.predicate is not None]
    length = mask.length(None)
    try:
        whys = [_asking_program(predicate, (1, 1), length, like.device, mask.known).why_not for predicate in predicates]
    except KernelError as error:
        return str(error)
    if scoring is not None:
        whys.append(_score_program(scoring, like.device, widened(like.dtype)).why_no_gradient)
    return next((why for why in whys if why is not None), None)


def has_triton() -> bool:
    return find_spec("triton") is not None


@dataclass(frozen=True, eq=False)
class _Call:
    """One launch: its pairs, and the programs for scores and the mask."""

    blocks: _Blocks
    scale: float
    score: Program
    score_values: list[Tensor]
    mask: Program
    mask_values: list[Tensor]

    @staticmethod
    def of(work: TileWork) -> _Call:
        like, pairs = work.q_BHQD, work.pairs
        sides = like.shape[2], work.k_BGKD.shape[2]
        blocks, wide = _blocks_of(tuple(work.tiles), sides, like.device), widened(like.dtype)
        scoring = None if pairs is None else pairs.scoring
        predicate = pairs.predicate if pairs is not None and blocks.depths[1] else None
        local = _positions(blocks, pairs, like.device) if scoring is not None or predicate is not None else ()
        score = _UNCHANGED if scoring is None else _score_program(scoring, like.device, wide)
        if predicate is None:
            mask = _bands_program(blocks.depths[0])
        else:
            assert pairs is not None
            mask = _asking_program(predicate, blocks.depths, _length(pairs), like.device, pairs.known)
        values = () if pairs is None else pairs.totals.values
        score_values = score.values(() if scoring is None else local, values)
        mask_values = mask.values((*blocks.tables, *(() if predicate is None else local[2:])), ())
        return _Call(blocks, work.scale, score, score_values, mask, mask_values)

    def run_forward(self, inputs: list[Tensor]) -> Sequence[Any]:
        key, counts = ("forward", self.scale, self.score.key, self.mask.key), self._counts
        return _run(key, lambda: _torch.flex_graph(self.score.graph, self.mask.graph, self.scale, *counts), inputs)

    def run_backward(self, inputs: list[Tensor]) -> Sequence[Any]:
        score, mask, counts = self.score, self.mask, self._counts
        key = "backward", self.scale, score.key, key_of(score.gradient), mask.key
        return _run(
            key,
            lambda: _torch.flex_backward_graph(score.graph, score.gradient, mask.graph, self.scale, *counts),
            inputs,
        )

    @property
    def _counts(self) -> tuple[int, int]:
        return len(self.score_values), len(self.mask_values)

    def rows(self, x: Tensor, value: float = 0.0) -> Tensor:
        return _pad_rows(x, self.blocks.rows, value)

    def keys(self, x: Tensor) -> Tensor:
        return _pad_rows(x, self.blocks.cols, 0.0)


def bucket(size: int) -> int:
    """Round a number of rows or keys up to a power of two, at least a block. It costs memory but no time: empty blocks
    are skipped.

    >>> [bucket(n) for n in (1, 128, 129, 500, 600)]
    [128, 128, 256, 512, 1024]
    """
    return max(BLOCK, 1 << (size - 1).bit_length())


def _pad_rows(x: Tensor, size: int, value: float) -> Tensor:
    """Pad rows with a value up to a size, and make the result contiguous: kernels are compiled for strides, too."""
    more = size - x.shape[2]
    return (pad(x, (0, 0) * (x.ndim - 3) + (0, more), value=value) if more else x).contiguous()


def _positions(blocks: _Blocks, pairs: TilePairs | None, device: torch.device) -> tuple[Tensor, ...]:
    """Return the first batch row, the first head, and the position of every query row and key. Padding has a real
    position, so that functions find it in their tables."""
    assert pairs is not None
    where = pairs.where
    first = (torch.full((), start, device=device) for start in (where.batch.start, where.heads.start))
    lines = ((where.q, blocks.rows), (where.kv, blocks.cols))
    return *first, *(_array_to_device(device, np.pad(line, (0, size - len(line)), mode="edge")) for line, size in lines)


def _array_to_device(device: torch.device, array: NDArray[Any]) -> Tensor:
    return to_device(torch.tensor(array), device)  # a copy: positions are kept elsewhere, too


def _length(pairs: TilePairs) -> int:
    """Return a power of two above all positions: lengths are shapes, and new shapes mean compiling."""
    return 1 << int(max(pairs.where.q.max(), pairs.where.kv.max())).bit_length()


# -- Running graphs: eagerly on CPUs, compiled on GPUs -----------------------------------------------------------------

_compiled: dict[tuple[object, ...], Callable[..., Sequence[Tensor]]] = {}
"""A cache by code and shapes; drops the oldest of more than MAX_COMPILED."""


def _run(key: tuple[object, ...], graph: Callable[[], GraphModule], inputs: list[Tensor]) -> Sequence[Any]:
    if inputs[0].device.type == "cpu":
        return graph()(*inputs)
    key = compile_key(key, inputs)
    if key not in _compiled:
        while len(_compiled) >= MAX_COMPILED:
            del _compiled[next(iter(_compiled))]
        _compiled[key] = _torch.compile_graph(graph(), inputs)
    return _compiled[key](*inputs)


def compile_key(key: tuple[object, ...], inputs: Sequence[Tensor]) -> tuple[object, ...]:
    """Return the key of compiled code: the graph's key, and shape, strides, dtype and device of all tensors."""

    def strides(x: Tensor) -> tuple[int, ...]:  # those of dims of size 1 do not matter
        return tuple(stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True))

    return *key, *((x.shape, strides(x), x.dtype, x.device, x.requires_grad) for x in inputs)


def _zeros(device: torch.device | str, num: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros((), dtype=torch.int64, device=device) for _ in range(num))


def _identity_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
    return score


_UNCHANGED = Program(_identity_score, (torch.zeros(()), *_zeros("cpu", 4)), 0, ())

_scores: WeakKeyDictionary[Scoring, dict[tuple[torch.device, torch.dtype], Program]] = WeakKeyDictionary()
"""Traced programs: a scoring runs in every compute, forward and backward."""


def _score_program(scoring: Scoring, device: torch.device, dtype: torch.dtype) -> Program:
    """Return the program (score, b, h, local row, local key; first batch row, first head, positions)."""
    functions = Scoring(scoring.functions)  # a copy that does not refer to the cache's key

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *where: Tensor) -> Tensor:
        b0, h0, q, kv = where
        return functions.apply(score, b + b0, h + h0, q[i], kv[j])

    known = _scores.setdefault(scoring, {})
    if (device, dtype) not in known:
        numbers = (torch.zeros((), dtype=dtype, device=device), *_zeros(device, 4))
        line = torch.zeros(1, dtype=torch.int64, device=device)
        known[device, dtype] = program(change, numbers, (*_zeros(device, 2), line, line.clone()), scoring.captured)
    return known[device, dtype]


# -- Masks as graphs ---------------------------------------------------------------------------------------------------


def _in_spans(i: Tensor, j: Tensor, start: Tensor, stop: Tensor, depth: int) -> Tensor:
    """Return whether key j is in one of the `depth` spans of row i."""
    inside = j < 0
    for k in range(depth):
        at = i * depth + k
        inside = inside | ((j >= start[at]) & (j < stop[at]))
    return inside


@cache
def _bands_program(depth: int) -> Program:
    """Return the program (b, h, local row, local key; tables of spans, and of spans that ask, which are empty)."""

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor, start: Tensor, stop: Tensor, *_: Tensor) -> Tensor:  # noqa: ARG001
        return _in_spans(i, j, start, stop, depth)

    lines = tuple(torch.zeros(depth, dtype=torch.int32) for _ in range(4))
    return program(mask, _zeros("cpu", 4), lines)


def _asking_program(
    predicate: Predicate, depths: tuple[int, int], length: int, device: torch.device, known: dict[Any, Any]
) -> Program:
    """Return the program (b, h, local row, local key; the tables, positions); cached with the mask."""
    key = ("flex", ByIdentity(predicate), depths, length, device)
    if key in known:
        return known[key]
    decide = predicate_mod(predicate, length)

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *rest: Tensor) -> Tensor:  # noqa: ARG001
        start, stop, ask_start, ask_stop, q, kv = rest
        maybe = _in_spans(i, j, ask_start, ask_stop, depths[1])
        zero = torch.full_like(i, 0)  # a predicate is for one batch row and head, or does not use them
        return _in_spans(i, j, start, stop, depths[0]) | (maybe & decide(None, zero, zero, q[i], kv[j]))

    def arguments(device: torch.device | str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        lines = [torch.zeros(depth, dtype=torch.int32, device=device) for depth in depths for _ in range(2)]
        positions = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
        return _zeros(device, 4), (*lines, *positions)

    # tried on the device where masks are called otherwise; tensors they use are copied to this one
    numbers, tables = arguments(device_of(predicate))
    known[key] = program(mask, *arguments(device), (), (*numbers, *tables))
    return known[key]


# -- Tiles as tables of spans and as blocks ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Blocks:
    """All tiles of one launch."""

    cover: Tile
    rows: int
    cols: int
    """Rows and keys of the tensors, rounded up to a bucket."""
    depths: tuple[int, int]
    """The largest number of spans of a row, rounded up: of plain spans, and of spans that ask."""
    tables: tuple[Tensor, Tensor, Tensor, Tensor]
    tensors: tuple[Tensor, ...]
    """Partial and full blocks."""


def _cover(tiles: Sequence[Tile]) -> Tile:
    """Return the tile from the first row and the first key of any tile to the last ones."""
    sides = np.array([(t.q0, t.q1, t.k0, t.k1) for t in tiles])
    return Tile(int(sides[:, 0].min()), int(sides[:, 1].max()), int(sides[:, 2].min()), int(sides[:, 3].max()))


@keep_recent(least=16)
def _blocks_of(tiles: tuple[Tile, ...], shape: tuple[int, int], device: torch.device) -> _Blocks:
    """Cached: the same tiles come again in every layer. A block mask of 1M keys and 128k queries has 128 MB."""
    from torch.nn.attention.flex_attention import BlockMask

    cover, rows, cols = _cover(tiles), bucket(shape[0]), bucket(shape[1])
    plain, asking = (_spans([t for t in tiles if t.asks is asks], rows) for asks in (False, True))
    sure, maybe = (pairs_per_block(spans, rows, np.arange(cols), BLOCK) for spans in (plain, asking))
    full = sure == BLOCK * BLOCK
    fields: tuple[Any, ...] = BlockMask.from_kv_blocks(
        *_list_blocks(((sure > 0) | (maybe > 0)) & ~full), *_list_blocks(full), BLOCK_SIZE=BLOCK
    ).as_tuple()
    tables, depths = zip(*(_tables(spans, rows, device) for spans in (plain, asking)), strict=True)
    tensors = tuple(to_device(x, device) for x in fields[2:10])
    return _Blocks(cover, rows, cols, (max(depths[0], 1), depths[1]), (*tables[0], *tables[1]), tensors)


def _spans(tiles: Sequence[Tile], num_rows: int) -> KeySpans:
    """Return the spans that every row sees. Tiles count rows and keys from their own corner, bands from 0."""
    rows: list[tuple[int, ...]] = []
    for t in tiles:
        shift = t.q0 - t.k0
        lo, hi = -LIMIT if t.lo is None else t.lo + shift, LIMIT if t.hi is None else t.hi + shift
        rows.append((t.q0, t.q1, t.k0, t.k1, lo, hi))
    return key_spans(np.array(rows, dtype=np.int64).reshape(-1, 6), np.arange(num_rows))


def _tables(spans: KeySpans, num_rows: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], int]:
    """Return start and stop of the k-th span of row i at i * depth + k, and the depth.

    The depth is 0, 1, 2, 4, ...: it is part of the code, and new code means compiling.
    """
    most = most_spans(spans)
    depth = 1 << (most - 1).bit_length() if most else 0
    start, stop = span_table(spans, max(depth, 1), num_rows).transpose(1, 2, 0).reshape(2, -1).astype(np.int32)
    return (_array_to_device(device, start), _array_to_device(device, stop)), depth


def _list_blocks(blocks: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Return blocks for all batch rows and heads: (1, 1, rows) and (1, 1, rows, columns)."""
    counts, order = list_chosen_first(blocks[None, None])
    return torch.tensor(counts), torch.tensor(order)
