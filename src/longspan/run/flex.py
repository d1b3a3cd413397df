"""`flex_attention` with PyTorch's signature, on one device or under a plan, and conversion of BlockMasks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.nn.functional import pad

from longspan._compile import run_eagerly
from longspan._torch import is_sliced, version
from longspan.errors import KernelError, LongspanError, MaskError, PlanError
from longspan.kernels import kernel_named
from longspan.kernels.reference import highest
from longspan.layouts import Layout
from longspan.masks import Mask, Plane, full
from longspan.masks import bands as bd
from longspan.masks.bands import rectangles
from longspan.masks.convert import advice
from longspan.masks.functions import Function, Reader
from longspan.masks.mask import MaskKey
from longspan.masks.mask_mods import Place, number_planes, to_mask_mod
from longspan.masks.plane import ByIdentity
from longspan.masks.tiles import EMPTY, FULL, PARTIAL, key_spans, list_chosen_first, pairs_per_block
from longspan.planning.plan import Plan
from longspan.run.call import Request, attention
from longspan.run.passes import Forward
from longspan.run.recorder import Launched
from longspan.run.transports import Loopback
from longspan.run.walk import Job
from longspan.scoring.biases import Extras
from longspan.scoring.pipeline import ScoreMod
from longspan.spans import Ints, check_int, steps_within, true_runs, truncated_repr
from longspan.validate import check_inputs, one_device_plan

# -- BlockMasks from masks, for the rows of one rank -------------------------------------------------------------------
# With bands, a query row sees a few spans of keys. Counts per block separate empty, partial and full blocks at a cost
# that grows with rows and blocks, not with pairs.


Bools = NDArray[np.bool_]

KV = ("global", "local", "gathered")
NO_MASK = full()
"""Compiled code can create no mask."""


def block_mask(
    mask: Mask,
    layout: Layout,
    rank: int,
    *,
    kv: str = "global",
    block_size: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Return the BlockMask of the rank's own query rows, in local order; padding rows see no key.

    Keys are the whole sequence in global order (`kv="global"`), the rank's own rows in local order (`"local"`) or the
    shards of all ranks one after another (`"gathered"`, as an all-gather returns them; without padding). An equal
    mask returns the same object, so do not modify it; a mask with a function returns the same object only for the same
    mask. Code compiled for one batch serves the next as long as the local length
    is the same.

    >>> block_mask(causal(512), zigzag(512, 2), rank=0).kv_num_blocks.tolist()  # partial blocks; others are full
    [[[1, 1]]]
    """
    if not isinstance(mask, Mask) or not isinstance(layout, Layout):
        raise MaskError(
            f"mask and layout must be a mask of longspan.masks and a layout of longspan.layouts, but got"
            f" {type(mask).__name__} and {type(layout).__name__}."
            + ("" if isinstance(mask, Mask) else f" {advice(mask)}")
        )
    if kv not in KV:
        raise MaskError(f"kv must be {' or '.join(map(repr, KV))}, but got {kv!r}.")
    block_size = check_int(block_size, "block_size", "block_mask()", MaskError, low=1)
    if mask.seq_len not in (None, layout.seq_len):
        raise MaskError(
            f"mask and layout must have the same length, but got {mask} of {mask.seq_len} tokens and {layout} of"
            f" {layout.seq_len}."
        )
    layout.span_table(rank)  # raises for a rank that the layout does not have
    try:
        device_name = str(torch.empty(0, device=torch.device(device)).device)  # "cuda" changes with set_device()
    except (RuntimeError, TypeError, AssertionError) as error:
        raise MaskError(f"device must be one that torch can use here, such as 'cpu', but got {device!r}.") from error
    rest = layout, rank, kv, block_size, device_name
    if mask.is_structured:
        return _build_block_mask(MaskKey(mask), *rest)
    mask.check_unchanged()
    key = ("block_mask", *rest)
    if key not in mask.known:
        mask.known[key] = _build_block_mask.__wrapped__(MaskKey(mask), *rest)
    return mask.known[key]


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # training may use it, too
@torch.no_grad()
def _build_block_mask(known: MaskKey, layout: Layout, rank: int, kv: str, block_size: int, device: str) -> BlockMask:
    mask = known.mask.resized(layout.seq_len)
    # The position of every local slot; -1 for padding, which no span holds.
    starts, stops = layout.span_table(rank).T
    sizes = stops - starts
    padding = np.full(layout.num_padding(rank), -1, dtype=np.int64)
    rows = np.concatenate((np.repeat(starts, sizes) + steps_within(sizes), padding))
    keys = np.arange(layout.seq_len, dtype=np.int64) if kv == "global" else rows
    if kv == "gathered":
        keys = np.concatenate([layout.positions(r)[: layout.num_tokens[r]] for r in range(layout.world_size)])
    planes, which = number_planes(mask.grid)
    kinds = np.stack([_kinds(plane, rows, keys, block_size) for plane in planes])[which]
    place = Place(layout.seq_len, rows, None if kv == "global" else keys, torch.device(device), mask.num_rows)
    return BlockMask.from_kv_blocks(
        *_list_chosen_first(kinds == PARTIAL, device),
        *_list_chosen_first(kinds == FULL, device),
        BLOCK_SIZE=block_size,
        mask_mod=to_mask_mod(mask.grid, place),
        seq_lengths=(len(rows), len(keys)),
    )


def _list_chosen_first(chosen: Bools, device: str) -> tuple[Tensor, Tensor]:
    counts, order = list_chosen_first(chosen)
    return torch.as_tensor(counts, device=device), torch.as_tensor(order, device=device)


# -- Empty, partial and full blocks ------------------------------------------------------------------------------------


def _kinds(plane: Plane, rows: Ints, keys: Ints, size: int) -> NDArray[np.int8]:
    """Classify every block as EMPTY, PARTIAL or FULL. Blocks that extend over the end are never full, as in PyTorch."""
    pairs = pairs_per_block(key_spans(plane.sure, rows), len(rows), keys, size)
    if plane.predicate is not None:
        maybe = pairs_per_block(key_spans(plane.maybe, rows), len(rows), keys, size)
        _count_by_function(plane, rows, keys, size, maybe, pairs)
    return np.where(pairs == size * size, FULL, np.where(pairs > 0, PARTIAL, EMPTY)).astype(np.int8)


def _count_by_function(plane: Plane, rows: Ints, keys: Ints, size: int, maybe: Ints, pairs: Ints) -> None:
    """Count the pairs of blocks in which the plane's function decides."""
    assert plane.predicate is not None
    for i in np.flatnonzero(maybe.any(axis=1)).tolist():
        q = rows[i * size : (i + 1) * size]
        q = q[q >= 0][:, None]
        whole = maybe[i] == size * size  # the function alone decides on these blocks
        for chosen, allows in ((whole, plane.predicate.allows), (~whole & (maybe[i] > 0), plane.allows)):
            listed = np.flatnonzero(chosen)
            for first in range(0, len(listed), 64):  # 64 blocks at a time limit temporaries to a few megabytes
                blocks = listed[first : first + 64]
                column = (blocks[:, None] * size + np.arange(size)).ravel()
                column = column[column < len(keys)]
                column = column[keys[column] >= 0]
                seen = allows(q, keys[column][None, :]).sum(axis=0)
                pairs[i, blocks] = np.bincount(column // size, weights=seen, minlength=int(blocks[-1]) + 1)[blocks]


# -- Masks from BlockMasks ---------------------------------------------------------------------------------------------

_converted: WeakKeyDictionary[BlockMask, dict[tuple[bool, bool, Any], tuple[object, Mask]]] = WeakKeyDictionary()
"""Converted BlockMasks: a model uses one in every layer. Its mask_mod may be replaced, and its lists filled anew."""


def check_lengths(block_mask: BlockMask, lengths: tuple[int, int], name: str, error: type[LongspanError]) -> None:
    """Raise if a BlockMask does not have these numbers of queries and keys."""
    if tuple(block_mask.seq_lengths) != lengths:
        raise error(
            f"{name} must be for {lengths[0]} queries and {lengths[1]} keys, but got {block_mask.seq_lengths[0]} and"
            f" {block_mask.seq_lengths[1]}. Create it for the whole sequence, in global positions."
        )


@run_eagerly
def mask_of_block_mask(block_mask: BlockMask, *, batch: int | None = None, heads: int | None = None) -> Mask:
    """Return the mask of a BlockMask, for tensors of this batch size and number of query heads.

    In partial blocks `mask_mod` decides. If the BlockMask has one plane for several rows or heads, a `mask_mod` that
    distinguishes them is refused when it is called. The mask has the length of the longer of queries and keys.

    >>> mask = mask_of_block_mask(block_mask(causal(512), contiguous(512, 1), rank=0))
    >>> mask.allows([300, 300], [200, 301]).tolist()
    [True, False]
    """
    if block_mask.kv_indices.device.type == "meta":
        raise MaskError(
            "block_mask must be on a device with data, but is on the meta device. Create it on another one."
        )
    if is_sliced(block_mask):
        raise MaskError(
            "block_mask must have a mask_mod, but got a slice of a BlockMask, which has none. Set its mask_mod to a"
            " function of the positions of the slice, and its seq_lengths to the lengths of query and key."
        )
    num_rows, num_heads = _dims(block_mask)
    for axis, size, wanted in (("batch rows", num_rows, batch), ("heads", num_heads, heads)):
        if wanted is not None and size not in (1, wanted):
            raise MaskError(
                f"block_mask must have 1 or {wanted} {axis} like the tensors, but got {size}. Create it for {wanted},"
                f" or for None."
            )
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [tensor for name in names if (tensor := getattr(block_mask, name)) is not None]
    state = ByIdentity(block_mask.mask_mod), *((ByIdentity(tensor), version(tensor)) for tensor in lists)
    known, key = _converted.setdefault(block_mask, {}), (batch == 1, heads == 1, block_mask.seq_lengths)
    if key not in known or known[key][0] != state:
        known[key] = state, _read_planes(block_mask, one_row=key[0], one_head=key[1])
    return known[key][1]


def _dims(block_mask: BlockMask) -> tuple[int, int]:
    shapes = [x.shape[:-2] for x in (block_mask.kv_indices, block_mask.full_kv_indices) if x is not None]
    rows, heads = np.broadcast_shapes((1, 1), *(tuple(shape) for shape in shapes))
    return rows, heads


def _read_planes(block_mask: BlockMask, one_row: bool, one_head: bool) -> Mask:
    mask_mod = block_mask.mask_mod
    num_rows, num_heads = _dims(block_mask)
    full = _block_table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask)
    partial = _block_table(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask)
    if (full & partial).any():
        raise MaskError("block_mask must list every block once, but lists one as full and as partial.")
    if mask_mod is noop_mask:
        full, partial = full | partial, np.zeros_like(partial)
    planes: dict[tuple[object, ...], Plane] = {}
    reader = Reader(mask_mod)

    def plane(row: int, head: int) -> Plane:
        sure, maybe = full[row, head], partial[row, head]
        b = row if num_rows > 1 or one_row else None
        h = head if num_heads > 1 or one_head else None
        key = sure.tobytes(), maybe.tobytes(), *((b, h) if maybe.any() else ())
        if key not in planes:
            bands = _bands_of(sure, block_mask), _bands_of(maybe, block_mask)
            planes[key] = Plane(*bands, Function(mask_mod, b, h, reader), is_blocks=True)
        return planes[key]

    grid = tuple(tuple(plane(row, head) for head in range(num_heads)) for row in range(num_rows))
    name = f"block_mask({getattr(mask_mod, '__name__', type(mask_mod).__name__)})"
    return Mask(grid, max(block_mask.seq_lengths), name)


def _block_table(counts: Tensor | None, indices: Tensor | None, block_mask: BlockMask) -> Bools:
    """Return the listed blocks as a table: (batch rows, heads, block rows, block columns)."""
    width = max(block_mask.kv_indices.shape[-1], -(-block_mask.seq_lengths[1] // _sizes(block_mask)[1]))
    shape = (*_dims(block_mask), block_mask.kv_indices.shape[-2], width)
    if counts is None or indices is None:
        return np.zeros(shape, dtype=np.bool_)
    blocks, counts_of = indices.detach().cpu().numpy(), counts.detach().cpu().numpy()
    valid = np.arange(blocks.shape[-1]) < counts_of[..., None]
    if blocks[valid].size and not 0 <= int(blocks[valid].min()) <= int(blocks[valid].max()) < width:
        raise MaskError(f"block_mask must list blocks of keys in [0, {width}), but lists another one.")
    listed = np.zeros((*blocks.shape[:-1], width + 1), dtype=np.bool_)
    np.put_along_axis(
        listed, np.where(valid, blocks, width).astype(np.int64), True, axis=-1
    )  # the last column: unlisted
    listed = listed[..., :width]
    if int(listed.sum()) != int(valid.sum()):
        raise MaskError("block_mask must list every block once, but lists a block of keys twice in one row.")
    return np.broadcast_to(listed, shape)


def _sizes(block_mask: BlockMask) -> tuple[int, int]:
    size: int | tuple[int, int] = block_mask.BLOCK_SIZE
    return (size, size) if isinstance(size, int) else size


def _bands_of(listed: Bools, block_mask: BlockMask) -> Ints:
    """Convert blocks to bands: join neighbouring columns, then equal neighbouring rows, and cut at the lengths."""
    size_q, size_k = _sizes(block_mask)
    row, start, stop = true_runs(listed).T
    bands = bd.rectangles(row * size_q, (row + 1) * size_q, start * size_k, stop * size_k)
    q_len, kv_len = block_mask.seq_lengths
    return bd.cut(bd.coalesce(bands), (0, q_len), (0, kv_len))


# -- flex_attention ----------------------------------------------------------------------------------------------------


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    plan: Plan | None = None,
    group: Any = None,
    captured_grads: str = "sum",
    name: str = "",
) -> Any:
    """See `longspan.flex_attention`."""
    check_inputs(query, key, value, scale, name=name)
    if return_aux is not None and not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise PlanError(
            f"return_aux must be None or a torch.nn.attention.flex_attention.AuxRequest, but got"
            f" {truncated_repr(return_aux)}."
        )
    if any(t.ndim != 4 for t in (query, key, value)):
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise PlanError(f"query, key and value must have 4 dims (batch, heads, tokens, features), but got {shapes}.")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise PlanError(
            f"key must have the {query.shape[1]} heads of query, but got {key.shape[1]}. Pass enable_gqa=True if query"
            f" heads share key/value heads."
        )
    if return_lse and return_aux is not None:
        raise PlanError("return_lse must be False with return_aux. Use return_aux=AuxRequest(lse=True) alone.")
    if kernel_options:
        raise KernelError(
            f"kernel_options must be empty, but got {kernel_options}. They tune PyTorch's Triton kernels, which this"
            f" call does not launch by itself. To select a kernel use longspan.attention(..., kernel=...)."
        )
    wants_max = return_aux is not None and return_aux.max_scores
    if plan is None:
        q, k, v, plan_or_mask = _pad_to_one_length(query, key, value, block_mask)
    else:
        if not isinstance(plan, Plan):
            raise PlanError(
                f"plan must be created by longspan.plan(mask, layout, ...), but got {truncated_repr(plan)}."
            )
        if block_mask is not None and block_mask != plan.mask:
            raise PlanError(
                f"block_mask must be None or the plan's mask, {plan.mask}, but got another. Omit it, or plan for it."
            )
        if wants_max:
            raise PlanError(
                "max_scores is not supported with a plan: maxima are not sent between ranks. Request lse, or omit plan."
            )
        q, k, v, plan_or_mask = query, key, value, plan
    extras = None if score_mod is None else Extras(score_mod)
    request = Request(plan_or_mask, group, scale, True, extras=extras, captured_grads=captured_grads, name=name)
    out, lse = attention(q, k, v, request)
    if q is not query:  # padded to one length
        out, lse = (t.narrow(2, 0, query.shape[2]).contiguous() for t in (out, lse))
    out = match_memory_order(query, out)
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    top = None
    if wants_max:
        assert isinstance(plan_or_mask, Mask)
        top = _max_scores(q, k, v, plan_or_mask, scale, extras).narrow(2, 0, query.shape[2])
    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=top)


def match_memory_order(query: Tensor, out: Tensor) -> Tensor:
    """Return the output with batch rows, heads and tokens in memory in the order that the query has, as in PyTorch.

    >>> query, out = torch.zeros(2, 5, 3, 4).transpose(1, 2), torch.zeros(2, 3, 5, 4)
    >>> match_memory_order(query, out).transpose(1, 2).is_contiguous()
    True
    """
    if query.is_contiguous():
        return out
    order = sorted(range(3), key=query.stride, reverse=True)
    return out.permute(*order, 3).contiguous().permute(*(order.index(dim) for dim in range(3)), 3)


def _pad_to_one_length(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> tuple[Tensor, Tensor, Tensor, Mask]:
    """Return tensors of one batch size and one length, and a mask that excludes the padding."""
    (batch, heads, num_q), num_kv = q.shape[:3], k.shape[2]
    if k.shape[0] not in (1, batch):
        raise PlanError(f"key must have the {batch} batch rows of query, or 1, but got {k.shape[0]}.")
    if k.shape[:3] != v.shape[:3]:
        raise PlanError(
            f"value must have the batch rows, heads and tokens of key, {tuple(k.shape[:3])}, but got"
            f" {tuple(v.shape[:3])}."
        )
    if k.shape[0] != batch:
        k, v = (t.expand(batch, -1, -1, -1) for t in (k, v))
    length = max(num_q, num_kv)
    if block_mask is None:
        mask = NO_MASK if num_q == num_kv else full(length)
    elif isinstance(block_mask, Mask):  # compiled code can build no mask
        mask = block_mask if block_mask.seq_len is None and num_q == num_kv else block_mask.resized(length)
    elif isinstance(block_mask, BlockMask):
        if not is_sliced(block_mask):  # the lengths of a slice are those of the whole
            check_lengths(block_mask, (num_q, num_kv), "block_mask", PlanError)
        mask = mask_of_block_mask(block_mask, batch=batch, heads=heads)
    else:
        raise PlanError(
            f"block_mask must be a BlockMask of PyTorch or a mask of longspan.masks, but got"
            f" {type(block_mask).__name__}. Convert a function with masks.from_mask_mod or create_block_mask, a table"
            f" with masks.from_dense."
        )
    if num_q != num_kv:
        mask = mask & Mask.of_bands(rectangles(0, num_q, 0, num_kv), length, f"{num_q} x {num_kv}")
        q = pad(q, (0, 0, 0, length - num_q))
        k, v = (pad(t, (0, 0, 0, length - num_kv)) for t in (k, v))
    return q, k, v, mask


class _MaxScores(Forward):
    """A run on one device that keeps only the maximum score of every row."""

    def __init__(self, job: Job, q: Tensor, k: Tensor, v: Tensor, captured: Any) -> None:
        super().__init__(job, q, k, v, captured)
        self.top = torch.full(q.shape[:3], -torch.inf, dtype=job.format.wide, device=q.device)

    def attend(self, launch: Launched, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        work, (batch, heads) = self.work(launch, tensors), (launch.batch, launch.heads)
        part = self.top[batch.start : batch.stop, heads.start : heads.stop]
        for tile in work.tiles:
            at = part[:, :, tile.q0 : tile.q1]
            at.copy_(torch.maximum(at, highest(replace(work, tiles=[tile]))))
            yield at.new_zeros((*at.shape, work.v_BGKE.shape[3])), at  # unused


def _max_scores(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, extras: Extras | None) -> Tensor:
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    plan = one_device_plan(*shapes, q.dtype, mask)
    scoring = None if extras is None else extras.scoring(q, plan)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    job = Job(plan, 0, kernel_named("reference"), scale, q.dtype, scoring)
    with torch.no_grad():
        run = _MaxScores(job, q.detach(), k.detach(), v.detach(), () if scoring is None else scoring.captured)
        Loopback().run([run.program(saves=False)])
    return run.top
