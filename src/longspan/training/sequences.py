"""Numbers of whole sequences from tokens that are spread over ranks, and back to tokens.

A sequence is a document of a packed batch, or a batch row. Its numbers are the same on every rank, and so is all that
is computed from them, the loss in the end. Tokens are each rank's own, and so are their gradients: every rank's
backward gives its share, and shares are summed (or averaged) with the parameters' gradients.

    tokens, a share on each rank  -- per_sequence -->  numbers that are alike  -- per_token -->  tokens

Shapes: B batch rows, S slots of this rank, N sequences: all of the first row, then those of the second, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.execution.handed import Group
from longspan.execution.inputs import check_carried, check_no_tangent
from longspan.execution.simulated import SimulatedRank
from longspan.execution.tile import wide
from longspan.masks.document_rows import Documents
from longspan.span import Ints
from longspan.training.batch import BatchCut, Like, cut_of
from longspan.training.groups import BatchError, all_summed, process_group
from longspan.training.tokens import check_size, share_factor


@torch.compiler.disable()
def per_sequence(
    values: Tensor,
    like: Like,
    group: Group,
    *,
    reduce: str = "sum",
    mask: Tensor | None = None,
    documents: Documents = None,
    gradients: str | None = None,
) -> Tensor:
    """One number per sequence, (N,), the same on every rank, from each rank's tokens (B, S) or (S,); differentiable.

    One all-reduce, in float64; nothing is sent in the backward pass. A rank without a token takes part. Padding never
    counts, and neither does what `mask` strikes, be it infinite. A sequence without a token that counts has 0.

    Args:
        values: this rank's tokens, floating-point.
        like: the batch that `shard_batch` cut; or a layout or a plan, with `documents` where tokens are packed.
        group: the ranks of the sequence, or None for one process.
        reduce: "sum" over the tokens that count, or their "mean".
        mask: which tokens count, this rank's, 0 and 1 or bool, as in `batch["shift_labels"] != -100`. All, by default.
        documents: lengths, lengths per batch row, or a mask of documents; with a layout or a plan.
        gradients: as in `gather_tokens`: the loss is computed alike on every rank, and parameters' gradients are added
            up over the group ("sum") or averaged ("average"). It may be left out where no gradient is wanted.

    >>> values, counts = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([1, 1, 0, 0, 0])
    >>> per_sequence(values, contiguous(5, 1), None, documents=[3, 2]).tolist()
    [7.0, 24.0]
    >>> per_sequence(values, contiguous(5, 1), None, documents=[3, 2], mask=counts, reduce="mean").tolist()
    [1.5, 0.0]
    """
    cut, members = _place(like, group, documents, "per_sequence")
    rank = 0 if members is None else members.rank()
    _check_values(values, mask, cut, rank, reduce)
    factor = share_factor(gradients, members, "per_sequence", values)
    index, total = _index(cut, rank, 1 if values.ndim < 2 else values.shape[0])
    real = index.shape[1]  # padding comes last
    flat = values[..., :real].reshape(-1).double()
    counts = torch.ones_like(flat, dtype=torch.bool) if mask is None else _as_bool(mask)[..., :real].reshape(-1)
    where = torch.as_tensor(index.reshape(-1), device=values.device)
    terms = torch.stack((flat.masked_fill(~counts, 0.0), counts.double()))
    sums = Summed.apply(terms.new_zeros(2, total).index_add(1, where, terms), members, factor)
    result = sums[0] if reduce == "sum" else sums[0] / sums[1].clamp(min=1.0)  # type: ignore[index]
    return result.to(wide(values.dtype))


@torch.compiler.disable()
def per_token(
    numbers: Tensor,
    like: Like,
    group: Group,
    *,
    documents: Documents = None,
    gradients: str | None = None,
    fill: float = 0,
) -> Tensor:
    """Each sequence's number in all of its tokens: this rank's (B, S), from numbers (N,) that are alike on every rank;
    differentiable. Slots of padding hold `fill`.

    The way back from `per_sequence`, for losses that weigh tokens by what was computed of whole sequences. Losses of
    tokens are shares, so the gradients of all ranks' tokens are added up for the numbers, by one all-reduce in the
    backward pass: every rank must go through it. `gradients` is as in `per_sequence`, and the same in both: with
    "average", the shares that come back were multiplied by the group's size, and are divided by it.

    >>> per_token(torch.tensor([0.5, -1.0]), contiguous(5, 1), None, documents=[3, 2]).tolist()
    [[0.5, 0.5, 0.5, -1.0, -1.0]]
    """
    cut, members = _place(like, group, documents, "per_token")
    if not isinstance(numbers, Tensor) or numbers.ndim != 1:
        given = f"shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise BatchError(f"per_token takes a tensor with one number per sequence, of one dim, but {given} was given.")
    check_no_tangent(numbers=numbers)
    factor = share_factor(gradients, members, "per_token", numbers)
    rank = 0 if members is None else members.rank()
    index, _ = _index(cut, rank, _rows(cut, len(numbers)))
    if members is not None and numbers.requires_grad and torch.is_grad_enabled():
        if isinstance(members, SimulatedRank):
            numbers = members.meet("per_token", numbers, lambda parts: Met.apply(factor, *parts))  # type: ignore[arg-type,return-value]
        else:
            numbers = Alike.apply(numbers, members, factor)  # type: ignore[assignment]
    tokens = numbers[torch.as_tensor(index, device=numbers.device)]
    padding = numbers.new_full((len(index), cut.layout.num_padding(rank)), fill)
    return torch.cat((tokens, padding), dim=1)


class Summed(torch.autograd.Function):
    """The sum over ranks. Every rank computes the same loss of it, so a rank's own part has that loss's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None, factor: int) -> Tensor:
        ctx.factor = factor
        return x.clone() if group is None else all_summed(x.clone(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] * ctx.factor, None, None


class Alike(torch.autograd.Function):
    """Numbers that are alike on every rank, to be used on each rank's own tokens: their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, factor: int) -> Tensor:
        ctx.group, ctx.factor = group, factor
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_summed(grads[0].clone(), ctx.group) / ctx.factor, None, None


class Met(torch.autograd.Function):
    """As `Alike`, of all simulated ranks at once, which share one graph."""

    @staticmethod
    def forward(ctx: Any, factor: int, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.factor = factor
        return tuple(part.clone() for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *[torch.stack(grads).sum(0) / ctx.factor] * len(grads)


def _place(like: Any, group: Any, documents: Documents, what: str) -> tuple[BatchCut, dist.ProcessGroup | None]:
    """How tokens were cut, with their documents, and over whom."""
    cut = cut_of(like, what)
    members = None if group is None else process_group(group, what)
    check_size(cut.layout, members, what)
    if cut.rank is None:
        return BatchCut(cut.layout, documents=documents), members
    if documents is not None:
        raise BatchError(f"{what} was given a batch that knows its documents, and documents beside it. Leave them out.")
    rank = 0 if members is None else members.rank()
    if cut.rank != rank:
        raise BatchError(
            f"{what} was given the batch of rank {cut.rank}, but this is rank {rank} of the group. Cut it for the rank"
            f" in the group of the sequence, as in shard_batch(batch, plan, mesh.cp.get_local_rank())."
        )
    return cut, members


def _check_values(values: Any, mask: Any, cut: BatchCut, rank: int, reduce: str) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        given = str(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        raise BatchError(f"per_sequence takes a floating-point tensor, but {given} was given. Cast it first.")
    if reduce not in ("sum", "mean"):
        raise BatchError(f"reduce = {reduce!r} was asked for. Choose 'sum' or 'mean', over the tokens that count.")
    if values.ndim > 2:
        raise BatchError(
            f"per_sequence takes one number per token, (batch, tokens) or (tokens,), but the tensor has shape"
            f" {tuple(values.shape)}."
        )
    check_no_tangent(values=values)
    cut.layout._check_size(values, -1, cut.layout.num_slots(rank), f"the shard of rank {rank}")
    check_carried(cut.layout, values.ndim - 1, values=values)
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != values.shape):
        given = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"mask says which of this rank's tokens count, so it has their shape, {tuple(values.shape)}, but {given}"
            f" was given. shard_like cuts one of whole sequences; masks of attention go to documents=."
        )


def _as_bool(mask: Tensor) -> Tensor:
    counts = mask != 0
    if not torch.equal(counts.to(mask.dtype), mask):
        raise BatchError(
            "mask must hold 0 and 1 only, but holds other values. If these are weights, multiply values by them."
        )
    return counts


def _rows(cut: BatchCut, num: int) -> int:
    """How many batch rows have that many sequences in all."""
    found = len(cut.counts) if len(cut.counts) > 1 else num // max(cut.counts[0], 1)
    wanted = sum(cut.counts) if len(cut.counts) > 1 else cut.counts[0] * found
    if num != wanted or not found:
        said = f"{wanted}" if len(cut.counts) > 1 else f"a multiple of {cut.counts[0]}, as many in each batch row"
        raise BatchError(f"per_token was given {num} numbers, but the number of sequences is {said}.")
    return found


def _index(cut: BatchCut, rank: int, rows: int) -> tuple[Ints, int]:
    """The sequence that each of the rank's tokens belongs to, (rows, tokens), and how many there are in all."""
    numbers, counts = cut.numbers, cut.counts
    if len(numbers) not in (1, rows):
        raise BatchError(
            f"documents are given for {len(numbers)} batch rows, but the tokens have {rows}. Give one list of lengths"
            f" for all rows, or one per row."
        )
    counts = counts * rows if len(counts) == 1 else counts
    real = cut.layout.positions(rank)[: int(cut.layout.num_tokens[rank])]
    last = np.cumsum(np.array(counts, dtype=np.int64))
    return numbers[:, real] + (last - counts)[:, None], int(last[-1])
