"""Per-token and per-sequence tensors over ranks: shard, gather, relayout, reduce per sequence and expand per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.layouts import Layout
from longspan.masks.document_rows import Documents
from longspan.run.relayout import Relayout
from longspan.run.simulated import SimulatedRank
from longspan.spans import Ints, whole
from longspan.tile import wide
from longspan.training.batch import BatchCut, Like, cut_of, shifted
from longspan.training.groups import BatchError, all_gathered, all_summed, check_layout, process_group, run_collective
from longspan.validate import Group, check_carried, check_no_tangent

# -- Per-token tensors that are not inputs of the model ----------------------------------------------------------------
# Examples are advantages, log-probabilities of other models, and values. They are sharded as the batch was, and
# gathered where a loss needs whole sequences. Index t of a rank predicts token t + 1, and `shift_labels` has that
# token's label there. What is known of the *token* (its advantage, its reward, its log-probability from a sampler) must
# move along: `shift=1`. What belongs to the *index* (the value of a state, anything that a model computed there and
# `gather_tokens` returned) stays: `shift=0`.
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
    """The rank's part of a whole tensor, cut as a batch was; differentiable.

    Args:
        values: numbers of all tokens. Tokens are along `dim`, batch rows along the dim before it, if there is one.
        like: the batch that `shard_batch` cut; or a layout or a plan, with `rank` and, where tokens are packed,
            `documents`.
        rank: this rank, with a layout or a plan.
        shift: 0 for what belongs to the place itself; 1 for what belongs to the token that is predicted there, as
            labels do; n for what belongs to the token n places later. Across the end of a document there is `fill`.
        dim: where tokens are.
        fill: what slots of padding and places without such a token hold.
        documents: lengths, lengths per batch row, or a mask of documents; with a layout or a plan.

    >>> tens = torch.arange(8) * 10  # the first of two ranks holds the places 0, 1, 6 and 7
    >>> shard_like(tens, zigzag(8, 2), 0, shift=0, documents=[6, 2]).tolist()
    [0, 10, 60, 70]
    >>> shard_like(tens, zigzag(8, 2), 0, shift=1, documents=[6, 2], fill=-1).tolist()  # nothing follows the last token
    [10, 20, 70, -1]
    """
    cut = _known(like, rank, documents, "shard_like")
    if not isinstance(values, Tensor):
        raise BatchError(f"shard_like takes a tensor, but {type(values).__name__} was given. Convert it first.")
    shift = whole(shift, "shift", "shard_like()", BatchError, low=0)
    cut.layout._check_size(values, dim, cut.layout.seq_len, "the whole sequence")
    assert cut.rank is not None
    if shift:
        values = _moved(values, shift, dim % values.ndim, cut, fill)
    return cut.layout.shard(values, cut.rank, dim, fill)


def _known(like: Any, rank: int | None, documents: Documents, what: str) -> BatchCut:
    """How to cut, with all that has to be known for it, said once."""
    cut = cut_of(like, what)
    if cut.rank is not None:
        if rank is not None or documents is not None:
            raise BatchError(
                f"{what} was given a batch that knows its rank and documents, and rank or documents beside it. Leave"
                f" them out, or give the layout instead of the batch."
            )
        return cut
    if rank is None:
        raise BatchError(f"{what} was given {cut.layout} without a rank. Say rank=, or give the batch that was cut.")
    return BatchCut(cut.layout, rank, documents)


def _moved(values: Tensor, shift: int, dim: int, cut: BatchCut, fill: float) -> Tensor:
    """The tokens `shift` places later, with batch rows and tokens in their places."""
    numbers = cut.numbers
    if not dim:
        if len(numbers) > 1:
            raise BatchError(
                f"documents are given for {len(numbers)} batch rows, but a tensor of shape {tuple(values.shape)} with"
                f" tokens along dim 0 has one. Give tensors (batch, tokens, ...), and dim=1."
            )
        return shifted(values.movedim(0, -1), shift, numbers, fill).movedim(-1, 0)
    return shifted(values.movedim((dim - 1, dim), (-2, -1)), shift, numbers, fill).movedim((-2, -1), (dim - 1, dim))


@torch.compiler.disable()
def gather_tokens(values: Tensor, like: Like, group: Group, dim: int = -1, *, gradients: str | None = None) -> Tensor:
    """The whole tensor in global order, without padding, on every rank, from each rank's part; differentiable.

    For a loss that every rank computes alike on whole sequences. Each rank's backward gives the gradient of its own
    tokens, and parameters have to be summed over the ranks: `gradients="sum"` says that they are, `"average"` that they
    are averaged over the group, as FSDP and DDP do; then each rank's gradient is multiplied by the group's size. It may
    be left out where no gradient is wanted. Nothing is sent in the backward pass.

    `like` is the layout, or the batch or plan that has it; `group` is that of the sequence. Compiled code stops before
    and goes on after. With two ranks that hold the tokens 0, 3 and 1, 2::

        rank 0 brings a, d.  rank 1 brings b, c.  Both get a, b, c, d and compute f(a, b, c, d).
        rank 0 gets df/da, df/dd back, and rank 1 gets df/db, df/dc.
    """
    members, layout = group_and_layout(values, like, group, dim, "gather_tokens")
    factor = share_factor(gradients, members, "gather_tokens", values)
    if not values.requires_grad or not torch.is_grad_enabled():
        gathered = whole_rows(values, layout, members, dim)
        assert gathered is not None
        return gathered
    return Gathered.apply(values, layout, members, dim % values.ndim, factor)  # type: ignore[return-value]


class Gathered(torch.autograd.Function):
    """Whole sequences, of which each rank gets the gradient of its own tokens. A gradient of that gradient would need
    what other ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, group: dist.ProcessGroup, dim: int, factor: int) -> Tensor:
        ctx.back = layout, group.rank(), dim, factor
        gathered = whole_rows(x, layout, group, dim)
        assert gathered is not None
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout, rank, dim, factor = ctx.back
        return layout.shard(grads[0], rank, dim) * factor, None, None, None, None


def group_and_layout(values: Any, like: Any, group: Group, dim: int, what: str) -> tuple[dist.ProcessGroup, Layout]:
    """The group and the layout of a rank's part, which fits them."""
    layout = cut_of(like, what).layout
    check_no_tangent(values=values)
    members = process_group(group, what)
    check_size(layout, members, what)
    rank = members.rank()
    layout._check_size(values, dim, layout.num_slots(rank), f"the shard of rank {rank}")
    check_carried(layout, dim % values.ndim, values=values)
    return members, layout


def share_factor(gradients: str | None, group: dist.ProcessGroup | None, what: str, values: Tensor) -> int:
    """What a rank's share of the gradient is multiplied by, so that it is right after what happens to parameters."""
    if gradients is None and values.requires_grad and torch.is_grad_enabled():
        raise BatchError(
            f"{what} was given a tensor that wants gradients, but not what happens to them. Say gradients='sum' if"
            f" parameters' gradients are added up over the group after backward, 'average' if they are averaged (FSDP"
            f" and DDP do that); or call it under torch.no_grad(), or on values.detach()."
        )
    if gradients not in (None, "sum", "average"):
        raise BatchError(
            f"gradients = {gradients!r} was asked for. Say what happens to gradients over the group after backward:"
            f" 'sum' if they are added up, 'average' if they are averaged (FSDP and DDP do that)."
        )
    return 1 if group is None or gradients != "average" else group.size()


def check_size(layout: Layout, group: dist.ProcessGroup | None, what: str) -> None:
    """Refuses a group of another size than the layout's."""
    size = 1 if group is None else group.size()
    if size != layout.world_size:
        raise BatchError(
            f"{what} got {layout} and a group of {size} ranks. Make the layout for the group that holds the"
            f" sequence, or pass that group."
        )


def whole_rows(x: Tensor, layout: Layout, group: dist.ProcessGroup, dim: int, to: int | None = None) -> Tensor | None:
    """The whole tensor from every rank's part, without gradients: on every rank, or on rank `to` alone."""
    rank, size = group.rank(), group.size()
    if isinstance(group, SimulatedRank):
        parts = lambda parts: [layout.unshard(parts, dim).contiguous()] * size  # noqa: E731
        gathered = group.meet("a gather of tokens", x.detach(), parts)
        return gathered.clone() if to in (None, rank) else None
    rows = x.detach().movedim(dim, 0)
    most = max(layout.num_slots(r) for r in range(size))
    message = rows.new_zeros((most, *rows.shape[1:]))  # collectives want one size; what is beyond a shard is not read
    message[: len(rows)] = rows
    if to is None:
        parts = all_gathered(message, group)
    else:
        parts = [torch.empty_like(message) for _ in range(size)] if to == rank else None
        gather = lambda group: dist.gather(message, parts, group=group, async_op=True, group_dst=to)  # noqa: E731
        run_collective("gather", message, group, gather)
    if parts is None:
        return None
    gathered = layout.unshard([part[: layout.num_slots(r)] for r, part in enumerate(parts)])
    return gathered.movedim(0, dim).contiguous()


# -- Relayout, and whole sequences -------------------------------------------------------------------------------------
# Attention needs tokens balanced by work; a layer that scans the sequence needs them contiguous. Only rows whose owner
# changes travel, one message per pair of ranks.


@torch.compiler.disable()
def relayout(x_local: Tensor, source: Layout, target: Layout, group: Group, dim: int) -> Tensor:
    """This rank's rows in `target`, from its rows in `source`, along `dim`. Gradients take the way back.

    Shards may differ in length. Padding of `target` holds zeros; padding of `source` is dropped and gets no gradient.
    Compiled code stops before and goes on after.
    """
    for layout in (source, target):
        check_layout(layout, "relayout")
    check_no_tangent(x_local=x_local)
    members = process_group(group, "relayout")
    if (source.seq_len, source.world_size) != (target.seq_len, target.world_size):
        raise BatchError(f"relayout from {source} to {target}: both must be of one sequence on the same ranks.")
    check_size(source, members, "relayout")
    source._check_size(x_local, dim, source.num_slots(members.rank()), f"the shard of rank {members.rank()}")
    check_carried(source, dim % x_local.ndim, x_local=x_local)
    if source == target:
        return x_local
    if isinstance(members, SimulatedRank):
        return members.meet("relayout", x_local, lambda parts: _shards(source.unshard(parts, dim), target, dim))
    return Relayout.apply(x_local, source, target, members, dim % x_local.ndim)  # type: ignore[return-value]


@torch.compiler.disable()
def gather_outputs(x_local: Tensor, layout: Layout, group: Group, dim: int, *, to: int | None = None) -> Tensor | None:
    """Logits, hidden states or losses of the whole sequence in global order, without padding: on every rank, or on
    group rank `to` alone (None on the others). For evaluation: no gradients; `gather_tokens` has them.
    """
    members, layout = group_and_layout(x_local, layout, group, dim, "gather_outputs")
    if x_local.requires_grad and torch.is_grad_enabled():
        raise BatchError(
            "gather_outputs is for evaluation, but this tensor wants gradients, which would be dropped. Call it under"
            " torch.no_grad(); for a loss of whole sequences use gather_tokens, to train on other rows relayout."
        )
    size = members.size()
    if to is not None and not 0 <= to < size:
        raise BatchError(f"gather_outputs was asked to gather to rank {to}, but the group has ranks 0 to {size - 1}.")
    return whole_rows(x_local, layout, members, dim, to)


def _shards(whole: Tensor, layout: Layout, dim: int) -> list[Tensor]:
    return [layout.shard(whole, rank, dim) for rank in range(layout.world_size)]


# -- Numbers per sequence, and back to tokens --------------------------------------------------------------------------
# A sequence is a document of a packed batch, or a batch row. Its numbers are the same on every rank, and so is
# everything computed from them, such as the loss. Tokens and their gradients belong to one rank: every rank's backward
# gives its share, and shares are summed (or averaged) with the parameters' gradients.
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
