"""Numbers of single tokens that are no input of the model: advantages, log-probabilities of other models, values.

They are cut as the batch was, and gathered again where a loss wants whole sequences. Where does a number belong? Place
t of a rank predicts the token t + 1, and `shift_labels` has that token's label there. What is known of the *token* (its
advantage, its reward, its log-probability as a sampler told it) has to move along: `shift=1`. What belongs to the
*place* (the value of a state, anything that a model computed there and `gather_tokens` gave back) stays: `shift=0`.

Shapes: B batch rows, S tokens of the whole sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.execution.handed import Group
from longspan.execution.inputs import check_carried, check_no_tangent
from longspan.execution.simulated import SimulatedRank
from longspan.layouts import Layout
from longspan.masks.document_rows import Documents
from longspan.span import whole
from longspan.training.batch import BatchCut, Like, cut_of
from longspan.training.document_numbers import shifted
from longspan.training.groups import BatchError, all_gathered, process_group, run_collective


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
