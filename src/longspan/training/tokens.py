"""Per-token and per-sequence tensors over ranks: shard, gather, relayout, reduce per sequence and expand per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.derivatives import FirstDerivative, check_derivatives
from longspan.layouts import Layout
from longspan.layouts.layout import to_device
from longspan.masks.document_rows import Documents
from longspan.run.relayout import Relayout
from longspan.run.simulated import SimulatedRank
from longspan.spans import Ints, check_int
from longspan.tile import accumulation_dtype
from longspan.training.batch import BatchCut, Like, as_bool, check_rows, cut_of, shift_within_documents
from longspan.training.groups import (
    BatchError,
    all_gathered,
    all_summed,
    check_gradients,
    check_layout,
    process_group,
)
from longspan.training.loss_without_logits import sum_gradients
from longspan.validate import Group, check_sharding

# -- Per-token tensors that are not inputs of the model ----------------------------------------------------------------
# Examples are advantages, log-probabilities of other models, and values. They are sharded as the batch was, and
# gathered where a loss needs whole sequences. Index t of a rank predicts token t + 1, and `shift_labels` has that
# token's label there. Values of the *token* (its advantage, its reward, its log-probability from a sampler) are shifted
# with it: `shift=1`. Values of the *index* (the value of a state, anything that a model computed there and
# `gather_tokens` returned) are not: `shift=0`.
#
# Shapes: B batch rows, S tokens of the whole sequence.


def shard_like(
    values: Tensor,
    like: Like,
    rank: int | None = None,
    *,
    shift: int,
    dim: int = -1,
    fill: float = 0,
    documents: Documents = None,
) -> Tensor:
    """Return the rank's part of a whole tensor, sharded as a batch was; differentiable.

    Args:
        values: values of all tokens. Tokens are along `dim`, batch rows along the dim before it, if there is one.
        like: the batch from `shard_batch`; or a layout or a plan, with `rank` and, for packed tokens, `documents`.
        rank: this rank, with a layout or a plan.
        shift: 0 for values of the position itself; 1 for values of the token that is predicted there, like labels; n
            for values of the token n positions later. Across the end of a document there is `fill`.
        dim: the dim of tokens.
        fill: the value in padding slots and in positions without such a token.
        documents: lengths, lengths per batch row, or a mask of documents; with a layout or a plan.

    >>> tens = torch.arange(8) * 10  # the first of two ranks holds the positions 0, 1, 6 and 7
    >>> shard_like(tens, zigzag(8, 2), 0, shift=0, documents=[6, 2]).tolist()
    [0, 10, 60, 70]
    >>> shard_like(tens, zigzag(8, 2), 0, shift=1, documents=[6, 2], fill=-1).tolist()  # no token follows the last
    [10, 20, 70, -1]
    """
    cut = cut_of(like, "shard_like")
    if cut.rank is None:
        if rank is None:
            raise BatchError(f"shard_like got {cut.layout} without a rank. Pass rank=, or the batch that was sharded.")
        cut = BatchCut(cut.layout, rank, documents)
    elif rank is not None or documents is not None:
        raise BatchError(
            "shard_like takes no rank or documents with a batch, which has its own. Leave them out, or pass the layout"
            " instead of the batch."
        )
    if not isinstance(values, Tensor):
        raise BatchError(f"values must be a tensor, but got {type(values).__name__}. Convert it first.")
    shift = check_int(shift, "shift", "shard_like()", BatchError, low=0)
    layout = cut.layout
    layout._check_size(values, dim, layout.seq_len, "the whole sequence")
    assert cut.rank is not None
    axis = dim % values.ndim
    if shift and axis:
        moved = shift_within_documents(values.movedim((axis - 1, axis), (-2, -1)), shift, cut.numbers, fill)
        values = moved.movedim((-2, -1), (axis - 1, axis))
    elif shift:
        if len(cut.numbers) > 1:
            raise BatchError(
                f"documents are for {len(cut.numbers)} batch rows, but a tensor of shape {tuple(values.shape)} with"
                f" tokens along dim 0 has one. Pass tensors (batch, tokens, ...), and dim=1."
            )
        values = shift_within_documents(values.movedim(0, -1), shift, cut.numbers, fill).movedim(-1, 0)
    return layout.shard(values, cut.rank, dim, fill)


@torch.compiler.disable()
def gather_tokens(values: Tensor, like: Like, group: Group, dim: int = -1, *, gradients: str | None = None) -> Tensor:
    """Return the whole tensor in global order, without padding, on every rank, from each rank's part; differentiable.

    For a loss that every rank computes in the same way on whole sequences. Each rank's backward returns the gradient of
    its own tokens, and gradients of parameters must be summed over the ranks: pass `gradients="sum"` if they are, or
    "average" if they are averaged over the group, as FSDP and DDP do; then each rank's gradient is multiplied by the
    group's size. It may be None if no gradient is required. Nothing is sent in the backward pass.

    `like` is the layout, or the batch or plan that has it; `group` is that of the sequence. This is a graph break under
    torch.compile. With two ranks that hold the tokens 0, 3 and 1, 2::

        rank 0 has a, d.  rank 1 has b, c.  Both get a, b, c, d and compute f(a, b, c, d).
        rank 0 gets the gradients df/da, df/dd, and rank 1 gets df/db, df/dc.
    """
    members, layout = group_and_layout(values, like, group, dim, "gather_tokens")
    factor = share_factor(gradients, members, "gather_tokens", values)
    if not values.requires_grad or not torch.is_grad_enabled():
        gathered = whole_rows(values, layout, members, dim)
        assert gathered is not None
        return gathered
    return Gathered.apply(values, layout, members, dim % values.ndim, factor)  # type: ignore[return-value]


class Gathered(FirstDerivative):
    """Gather whole sequences; each rank gets the gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, group: dist.ProcessGroup, dim: int, factor: int) -> Tensor:
        ctx.back = layout, group.rank(), dim, factor
        gathered = whole_rows(x, layout, group, dim)
        assert gathered is not None
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout, rank, dim, factor = ctx.back
        return layout.shard(grads[0], rank, dim) * factor, None, None, None, None


def group_and_layout(values: Any, like: Any, group: Group, dim: int, caller: str) -> tuple[dist.ProcessGroup, Layout]:
    """Return the group and the layout of a rank's part, after checking that they fit."""
    layout = cut_of(like, caller).layout
    check_derivatives(values)
    members = process_group(group, caller)
    check_size(layout, members, caller)
    rank = members.rank()
    layout._check_size(values, dim, layout.num_slots(rank), f"the shard of rank {rank}")
    check_sharding(layout, dim % values.ndim, values=values)
    return members, layout


def share_factor(gradients: str | None, group: dist.ProcessGroup | None, caller: str, values: Tensor) -> int:
    """Return the factor of a rank's share of the gradient, for how gradients of parameters are reduced."""
    if gradients is not None:
        check_gradients(gradients)
    elif values.requires_grad and torch.is_grad_enabled():
        raise BatchError(
            f"{caller} needs gradients= for a tensor that requires gradients: 'sum' if gradients of parameters are"
            f" summed over the group after backward, 'average' if they are averaged (FSDP and DDP do that). Or call it"
            f" under torch.no_grad(), or on values.detach()."
        )
    return 1 if group is None or gradients != "average" else group.size()


def check_size(layout: Layout, group: dist.ProcessGroup | None, caller: str) -> None:
    """Check that the group has the layout's size."""
    size = 1 if group is None else group.size()
    if size != layout.world_size:
        raise BatchError(
            f"{caller} got {layout} and a group of {size} ranks. Make the layout for the group that holds the sequence,"
            f" or pass that group."
        )


def whole_rows(x: Tensor, layout: Layout, group: dist.ProcessGroup, dim: int, to: int | None = None) -> Tensor | None:
    """Gather the whole tensor from every rank's part, without gradients: on every rank, or on rank `to` alone."""
    rank, size = group.rank(), group.size()
    if isinstance(group, SimulatedRank):
        parts = lambda parts: [layout.unshard(parts, dim).contiguous()] * size  # noqa: E731
        gathered = group.meet("a gather of tokens", x.detach(), parts)
        return gathered.clone() if to in (None, rank) else None
    rows = x.detach().movedim(dim, 0)
    most = max(layout.num_slots(r) for r in range(size))
    message = rows.new_zeros((most, *rows.shape[1:]))  # collectives need one size; values beyond a shard are not read
    message[: len(rows)] = rows
    if to is None:
        parts = all_gathered(message, group)
    else:
        parts = [torch.empty_like(message) for _ in range(size)] if to == rank else None
        dist.gather(message, parts, group=group, group_dst=to)
    if parts is None:
        return None
    gathered = layout.unshard([part[: layout.num_slots(r)] for r, part in enumerate(parts)])
    return gathered.movedim(0, dim).contiguous()


# -- Relayout, and whole sequences -------------------------------------------------------------------------------------
# Attention needs tokens balanced by work; a layer that scans the sequence needs them contiguous. Only rows whose owner
# changes travel, one message per pair of ranks.


@torch.compiler.disable()
def relayout(x_local: Tensor, source: Layout, target: Layout, group: Group, dim: int) -> Tensor:
    """Return this rank's rows in `target`, from its rows in `source`, along `dim`; differentiable.

    Shards may differ in length. Padding of `target` holds zeros; padding of `source` is dropped and gets no gradient.
    This is a graph break under torch.compile.
    """
    for layout in (source, target):
        check_layout(layout, "relayout")
    members = process_group(group, "relayout")
    if (source.seq_len, source.world_size) != (target.seq_len, target.world_size):
        raise BatchError(f"relayout from {source} to {target}: both must be of one sequence on the same ranks.")
    check_size(source, members, "relayout")
    source._check_size(x_local, dim, source.num_slots(members.rank()), f"the shard of rank {members.rank()}")
    check_sharding(source, dim % x_local.ndim, x_local=x_local)
    if source == target and not source.has_padding:
        return x_local
    if isinstance(members, SimulatedRank):
        return members.meet("relayout", x_local, lambda parts: _shards(source.unshard(parts, dim), target, dim))
    return Relayout.apply(x_local, source, target, members, dim % x_local.ndim)  # type: ignore[return-value]


@torch.compiler.disable()
def gather_outputs(x_local: Tensor, layout: Layout, group: Group, dim: int, *, to: int | None = None) -> Tensor | None:
    """Gather logits, hidden states or losses of the whole sequence in global order, without padding: on every rank, or
    on group rank `to` alone (None on the others). For evaluation, without gradients; `gather_tokens` has them.
    """
    members, layout = group_and_layout(x_local, layout, group, dim, "gather_outputs")
    if x_local.requires_grad and torch.is_grad_enabled():
        raise BatchError(
            "gather_outputs is for evaluation, but this tensor requires gradients, which would be lost. Call it under"
            " torch.no_grad(); for a loss of whole sequences use gather_tokens, to train on other rows relayout."
        )
    size = members.size()
    if to is not None and not 0 <= to < size:
        raise BatchError(f"`to` must be a rank in [0, {size}), but got {to}.")
    return whole_rows(x_local, layout, members, dim, to)


def _shards(whole: Tensor, layout: Layout, dim: int) -> list[Tensor]:
    return [layout.shard(whole, rank, dim) for rank in range(layout.world_size)]


# -- Numbers per sequence, and back to tokens --------------------------------------------------------------------------
# A sequence is a document of a packed batch, or a batch row. Its numbers are the same on every rank, and so is
# everything computed from them, such as the loss. Tokens and their gradients belong to one rank: every rank's backward
# computes its share, and shares are summed (or averaged) with the parameters' gradients.
#
#     tokens, a share on each rank  -- per_sequence -->  equal numbers  -- per_token -->  tokens
#
# Shapes: B batch rows, S slots of this rank, N sequences: all of the first row, then those of the second, and so on.


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
    """Reduce tokens (B, S) or (S,) of each rank to one number per sequence, (N,), equal on all ranks; differentiable.

    One all-reduce, in float64; nothing is sent in the backward pass. A rank without tokens takes part. Padding and
    tokens that `mask` excludes do not count, even infinite ones. A sequence without a token that counts has 0.

    Args:
        values: this rank's tokens, floating-point.
        like: the batch from `shard_batch`; or a layout or a plan, with `documents` if tokens are packed.
        group: the ranks of the sequence, or None for one process.
        reduce: "sum" over the tokens that count, or their "mean".
        mask: which tokens count, this rank's, 0 and 1 or bool, as in `batch["shift_labels"] != -100`. All, by default.
        documents: lengths, lengths per batch row, or a mask of documents; with a layout or a plan.
        gradients: as in `gather_tokens`: every rank computes the same loss, and gradients of parameters are summed over
            the group ("sum") or averaged ("average"). It may be None if no gradient is required.

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
    counts = torch.ones_like(flat, dtype=torch.bool)
    if mask is not None:
        counts = as_bool(mask, "mask", "If these are weights, multiply values by them.")[..., :real].reshape(-1)
    where = to_device(torch.from_numpy(index.reshape(-1)), values.device)
    terms = torch.stack((flat.masked_fill(~counts, 0.0), counts.double()))
    sums = Summed.apply(terms.new_zeros(2, total).index_add(1, where, terms), members, factor)
    result = sums[0] if reduce == "sum" else sums[0] / sums[1].clamp(min=1.0)  # type: ignore[index]
    return result.to(accumulation_dtype(values.dtype))


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
    """Expand numbers per sequence, (N,) and equal on all ranks, to this rank's tokens (B, S); differentiable. Padding
    slots hold `fill`.

    The reverse of `per_sequence`, for losses that weight tokens by values of whole sequences. Losses of tokens are
    shares, so gradients of all ranks' tokens are summed, by one all-reduce in the backward pass: every rank must run
    it. `gradients` is as in `per_sequence`, and the same in both: with "average", gradients of tokens were multiplied
    by the group's size, and are divided by it.

    >>> per_token(torch.tensor([0.5, -1.0]), contiguous(5, 1), None, documents=[3, 2]).tolist()
    [[0.5, 0.5, 0.5, -1.0, -1.0]]
    """
    cut, members = _place(like, group, documents, "per_token")
    if not isinstance(numbers, Tensor) or numbers.ndim != 1:
        got = f"shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise BatchError(f"numbers must be a tensor with one number per sequence, of one dim, but got {got}.")
    factor = share_factor(gradients, members, "per_token", numbers)
    rank = 0 if members is None else members.rank()
    index, _ = _index(cut, rank, _rows(cut, len(numbers)))
    numbers = sum_gradients(numbers, members, "per_token", factor)
    tokens = numbers[to_device(torch.from_numpy(index), numbers.device)]
    padding = numbers.new_full((len(index), cut.layout.num_padding(rank)), fill)
    return torch.cat((tokens, padding), dim=1)


class Summed(FirstDerivative):
    """Sum over ranks. Every rank computes the same loss from it, so each rank's part has the gradient of that loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None, factor: int) -> Tensor:
        ctx.factor = factor
        return x.clone() if group is None else all_summed(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] * ctx.factor, None, None


def _place(like: Any, group: Any, documents: Documents, caller: str) -> tuple[BatchCut, dist.ProcessGroup | None]:
    """Return how tokens were sharded, with their documents, and the process group."""
    cut = cut_of(like, caller)
    members = None if group is None else process_group(group, caller)
    check_size(cut.layout, members, caller)
    if cut.rank is None:
        return BatchCut(cut.layout, documents=documents), members
    if documents is not None:
        raise BatchError(f"{caller} takes no documents with a batch, which has its own. Leave them out.")
    rank = 0 if members is None else members.rank()
    if cut.rank != rank:
        raise BatchError(
            f"{caller} got the batch of rank {cut.rank}, but this is rank {rank} of the group. Shard it for the rank in"
            f" the group of the sequence, as in shard_batch(batch, plan, mesh.cp.get_local_rank())."
        )
    return cut, members


def _check_values(values: Any, mask: Any, cut: BatchCut, rank: int, reduce: str) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        got = str(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        raise BatchError(f"values must be a floating-point tensor, but got {got}. Cast it first.")
    if reduce not in ("sum", "mean"):
        raise BatchError(f"reduce must be 'sum' or 'mean' (over the tokens that count), but got {reduce!r}.")
    if values.ndim > 2:
        raise BatchError(
            f"per_sequence takes one number per token, (batch, tokens) or (tokens,), but the tensor has shape"
            f" {tuple(values.shape)}."
        )
    cut.layout._check_size(values, -1, cut.layout.num_slots(rank), f"the shard of rank {rank}")
    check_sharding(cut.layout, values.ndim - 1, values=values)
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != values.shape):
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"mask must have the shape of this rank's tokens, {tuple(values.shape)}, but got {got}. Shard a mask of"
            f" whole sequences with shard_like; pass masks of attention as documents=."
        )


def _rows(cut: BatchCut, num: int) -> int:
    """Return the number of batch rows that have that many sequences in all."""
    rows = len(cut.counts) if len(cut.counts) > 1 else num // max(cut.counts[0], 1)
    expected = sum(cut.counts) if len(cut.counts) > 1 else cut.counts[0] * rows
    if num != expected or not rows:
        size = f"{expected}" if len(cut.counts) > 1 else f"a multiple of {cut.counts[0]}, as many in each batch row"
        raise BatchError(f"per_token got {num} numbers, but the number of sequences is {size}.")
    return rows


def _index(cut: BatchCut, rank: int, rows: int) -> tuple[Ints, int]:
    """Return the sequence of each of the rank's tokens, (rows, tokens), and the number of sequences."""
    numbers, counts = cut.numbers, cut.counts
    check_rows(numbers, rows)
    counts = counts * rows if len(counts) == 1 else counts
    real = cut.layout.positions(rank)[: int(cut.layout.num_tokens[rank])]
    last = np.cumsum(np.array(counts, dtype=np.int64))
    return numbers[:, real] + (last - counts)[:, None], int(last[-1])
