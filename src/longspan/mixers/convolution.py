"""`causal_conv1d` on one device or over ranks: checks, the halo exchange as an operator, and the convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from longspan import _torch
from longspan._compile import create_handle, lookup_value
from longspan.derivatives import FirstDerivative, check_derivatives
from longspan.device_tables import Copied
from longspan.errors import PlanError
from longspan.layouts import Layout, contiguous
from longspan.layouts.layout import to_device
from longspan.mixers.operators import OperatorCall, number_documents, run_operator
from longspan.planning.conv_plan import ConvPlan, build_conv_plan
from longspan.planning.steps import Sizes
from longspan.run import ops
from longspan.run.group import Call
from longspan.run.halo import HaloBackward, HaloForward, HaloTask
from longspan.run.ops import (
    clone_if_aliased,
    context_of,
    create_record,
    create_ticket,
    rank_and_size,
    run_program,
)
from longspan.run.walk import build_once
from longspan.validate import as_autocast, check_plain_numbers, check_sharding

# -- The convolution in plain PyTorch: rows with halos in, the rank's own rows out -------------------------------------


CONV2D_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that PyTorch's conv2d takes with channels last on CPUs: four times faster than `conv1d`, which copies rows so
that tokens are last, and back."""
MANY = 32
"""Segments above this number are convolved as one, and their own rows are selected by index afterwards. Fewer are
convolved one by one, so that no row has to be dropped."""


@dataclass(frozen=True, eq=False)
class OwnRows:
    """Which of the convolved rows are the rank's own.

    Row i of the output belongs to row i + width - 1 of the input, so that rows in front of a segment have no output.
    Segments of one length are convolved as batch rows, and a few others one by one: then no row has to be dropped.
    """

    fold: int
    """Rows of a segment with its halo if all segments have as many, else 0."""
    batches: list[int]
    """The numbers of consecutive batch rows with the same documents."""
    rows: list[list[int] | Tensor]
    """For each of them the rows of every segment with its halo or, for many segments, the indices of own rows."""
    num_padding: int
    copied: Copied

    @staticmethod
    def of(plan: ConvPlan, rank: int, device: torch.device) -> OwnRows:
        """Return those of a rank; they are cached, since a plan is used many times."""
        own = build_once(plan, (rank, device), lambda: OwnRows.build(plan, rank, device))
        own.copied.use()
        return own

    @staticmethod
    def build(plan: ConvPlan, rank: int, device: torch.device) -> OwnRows:
        parts = plan.haloed(rank)
        rows: list[list[int] | Tensor] = []
        for part in parts:
            sizes = part.table[:, 1] - part.table[:, 0]
            if len(sizes) > MANY:
                rows.append(to_device(torch.from_numpy(part.places() - (plan.width - 1)), device))
            else:
                counts = (sizes + plan.width - 1).tolist()
                rows.append([*counts, plan.num_rows(rank) - sum(counts)])  # the last: rows of other batch rows only
        sizes = np.concatenate([part.table[:, 1] - part.table[:, 0] for part in parts])
        is_even = len(sizes) and len({len(part.table) for part in parts}) == 1 and (sizes == sizes[0]).all()
        fold = int(sizes[0]) + plan.width - 1 if is_even else 0
        copied = Copied(device, *(part for part in rows if isinstance(part, Tensor)))
        return OwnRows(fold, [len(part.batch) for part in parts], rows, plan.layout.num_padding(rank), copied)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return own rows in local order, convolved; padding is zeros."""
        batch, num_rows, channels = rows.shape
        if self.fold:
            out = depthwise(rows.view(batch * (num_rows // self.fold), self.fold, channels), weight, bias)
            out = out.reshape(batch, -1, channels)
        else:
            parts = rows.split(self.batches) if len(self.batches) > 1 else (rows,)
            own = [_convolve_own(part, which, weight, bias) for part, which in zip(parts, self.rows, strict=True)]
            out = own[0] if len(own) == 1 else torch.cat(own)
        return functional.pad(out, (0, 0, 0, self.num_padding)) if self.num_padding else out


def _convolve_own(rows: Tensor, which: list[int] | Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(which, list):
        return depthwise(rows, weight, bias).index_select(1, which)
    if len(which) == 1:  # no segment: the output is empty, but must depend on all inputs, as on other ranks
        return depthwise(rows, weight, bias)[:, :0]
    return torch.cat([depthwise(part, weight, bias) for part in rows.split(which, 1)[:-1]], 1)


def convolve_with_halos(
    rows: Tensor, weight: Tensor, bias: Tensor | None, own: OwnRows, activation: str | None
) -> Tensor:
    """Return the rank's output from its rows with halos."""
    out = own.convolve(rows, weight, bias)
    return out if activation is None else functional.silu(out)


def depthwise(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve (batch, rows, channels) along rows, each channel with its own weights: width - 1 rows fewer.

    >>> rows, weight = torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[10.0, 1.0]])
    >>> depthwise(rows, weight, None).flatten().tolist()
    [12.0, 24.0]
    """
    channels = len(weight)
    if rows.device.type == "cpu" and rows.dtype in CONV2D_DTYPES:
        image = rows.unsqueeze(2).permute(0, 3, 1, 2)  # one pixel wide; channels are last in memory already
        return functional.conv2d(image, weight[:, None, :, None], bias, groups=channels).squeeze(3).mT
    return functional.conv1d(rows.mT, weight.unsqueeze(1), bias, groups=channels).mT


# -- Checks of tensors against each other and the plan -----------------------------------------------------------------


SHAPES = {"x": "(batch, tokens, channels)", "weight": "(channels, width)", "bias": "(channels,)"}
NUM_DIMS = {"x": 3, "weight": 2, "bias": 1}


def check_tensors(x: Any, weight: Any, bias: Any, activation: Any) -> None:
    """Check types, shapes and devices of the tensors, and the activation."""
    tensors: dict[str, Any] = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"{name} must be a torch.Tensor of shape {SHAPES[name]}, but got {type(tensor).__name__}. Convert it"
                f" with torch.as_tensor."
            )
        check_plain_numbers("causal_conv1d", name, tensor)
        if tensor.ndim != NUM_DIMS[name]:
            hint = " Pass weight.squeeze(1) of a Conv1d." if name == "weight" and tensor.ndim == 3 else ""
            raise PlanError(f"{name} must be {SHAPES[name]}, but has shape {tuple(tensor.shape)}.{hint}")
        if tensor.device != x.device:
            raise PlanError(f"x is on {x.device}, but {name} is on {tensor.device}. Move it there.")
        channels = tensor.shape[2 if name == "x" else 0]
        if channels != x.shape[2]:
            raise PlanError(
                f"x has {x.shape[2]} channels, but {name} of shape {tuple(tensor.shape)} is for {channels}. x is"
                f" (batch, tokens, channels): transpose it if its tokens are last."
            )
    if not weight.shape[1]:
        raise PlanError(f"the width of weight must be >= 1, but got shape {tuple(weight.shape)}.")
    if activation not in (None, "silu", "swish"):
        raise PlanError(f"activation must be None, 'silu' or 'swish' (the same), but got {activation!r}.")


def check_plan(plan: Any, weight: Tensor) -> None:
    """Check that the plan is one of convolutions of this width."""
    if not isinstance(plan, ConvPlan):
        kind = type(plan).__name__
        raise PlanError(
            f"plan must be created by longspan.conv_plan, but got {kind}"
            f"{', which is a plan of attention' if kind == 'Plan' else ''}. Make one: {USAGE}."
        )
    if weight.shape[1] != plan.width:
        raise PlanError(
            f"weight has shape {tuple(weight.shape)}, a width of {weight.shape[1]}, but the plan is for width"
            f" {plan.width}. Plan for the width of the weight."
        )


def check_rows(plan: ConvPlan, x: Tensor, place: tuple[int, int] | None) -> None:
    """Check that rows fit the plan. `place` is this rank and the group's size."""
    size = plan.layout.world_size
    if place is None and size > 1:
        raise PlanError(f"the plan is for {size} ranks, so it needs group= (a process group or a mesh axis).")
    if place is not None and place[1] != size:
        raise PlanError(f"the plan is for {size} ranks, but the group has {place[1]}. Plan for the group's size.")
    rank = 0 if place is None else place[0]
    expected = (plan.batch, plan.layout.num_slots(rank), plan.channels)
    if tuple(x.shape) != expected:
        raise PlanError(
            f"x has shape {tuple(x.shape)}, but on rank {rank} the plan expects (batch, tokens, channels) = {expected}."
            f" Shard with layout.shard(x, rank, dim=1), or plan for these shapes."
        )
    if str(x.dtype).removeprefix("torch.") != plan.dtype:
        raise PlanError(f"x has dtype {x.dtype}, but the plan is for {plan.dtype}. Cast x, or plan for it.")


# -- The halo exchange as a `torch.library` operator with its adjoint --------------------------------------------------
# As in `run/ops.py`, a plan is passed as its handle, a group by its name, and a forward pass returns a ticket.


FORM = 1
"""The version of both operators' arguments, as in `run/ops.py`."""


@dataclass(frozen=True, eq=False)
class HaloPass:
    """What backward needs of its forward pass."""

    task: HaloTask
    group: str
    number: int
    name: str


def run_forward(
    x: Tensor, handle: Tensor, group: str, num_rows: int, saves: bool, name: str, form: int
) -> tuple[Tensor, Tensor]:
    """Return the rank's rows with halos, and the ticket of this pass; `saves` tells that a backward may follow."""
    assert form == FORM, "compiled code of another version"
    plan, place = lookup_value(int(handle)), rank_and_size(group)
    if not isinstance(plan, ConvPlan):
        raise PlanError(
            "the plan of this convolution is gone: compiled code has its handle, but no reference to it is left."
            " Keep a reference to it as long as the call runs."
        )
    check_rows(plan, x, place)
    task = HaloTask(plan, 0 if place is None else place[0], x.dtype)
    record = create_record(task, x.device, False if saves else None, name) if group else None
    call = Call(plan.fingerprint, "forward", x.device, record, name)
    rows, number = run_program(HaloForward(task, x).program(), group, call)
    assert rows.shape[1] == num_rows, "compiled code of another plan"
    ticket = create_ticket(HaloPass(task, group, number, name))
    return clone_if_aliased((rows.contiguous(),), (x,))[0], ticket


def _fake_forward(
    x: Tensor, _handle: Tensor, _group: str, num_rows: int, _saves: bool, _name: str, _form: int
) -> tuple[Tensor, Tensor]:
    rows = x.new_empty((x.shape[0], num_rows, x.shape[2]))
    return rows, torch.empty(1, dtype=torch.int64, device="cpu")


def run_backward(drows: Tensor, ticket: Tensor, num_slots: int) -> Tensor:
    """Return the gradient of the rank's `num_slots` rows."""
    forward = context_of(ticket, HaloPass)
    task = forward.task
    call = Call(task.plan.fingerprint, "backward", drows.device, name=forward.name, forward=forward.number)
    dx, _ = run_program(HaloBackward(task, drows).program(), forward.group, call)
    assert dx.shape[1] == num_slots, "compiled code of another plan"
    return clone_if_aliased((dx.contiguous(),), (drows,))[0]


def _fake_backward(drows: Tensor, _ticket: Tensor, num_slots: int) -> Tensor:
    return drows.new_empty((drows.shape[0], num_slots, drows.shape[2]))


halo = ops.define_operator("longspan::halo", run_forward, _fake_forward)
halo_backward = ops.define_operator("longspan::halo_backward", run_backward, _fake_backward)


class _Halo(FirstDerivative):
    """Differentiate the forward operator by the backward one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with _torch.below_autograd():
            rows, ticket = halo(x, *others)
        if type(ticket) is Tensor:  # not traced
            ctx.forward_pass = context_of(
                ticket, HaloPass
            )  # hooks may copy saved tensors, and a copy keeps nothing alive
        ctx.num_slots = x.shape[1]
        ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(ticket)
        return rows, ticket

    @staticmethod
    def backward(ctx: Any, drows: Tensor, _ticket: Any) -> tuple[Any, ...]:  # type: ignore[override]
        (ticket,) = ctx.saved_tensors
        return halo_backward(drows, ticket, ctx.num_slots), *(None,) * 6


def _with_gradients(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    check_derivatives(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Halo.apply(x, *others)  # type: ignore[return-value]
    with _torch.below_autograd():
        return halo(x, *others)


ops.differentiate(halo, _with_gradients)


# -- The call ----------------------------------------------------------------------------------------------------------


USAGE = "longspan.conv_plan(documents, layout, channels=..., width=..., dtype=...)"


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: OperatorCall, activation: str | None = None
) -> Tensor:
    """Run `longspan.causal_conv1d`."""
    plan = call.plan

    def check(place: tuple[int, int] | None) -> None:
        check_tensors(x, weight, bias, activation)
        if isinstance(plan, ConvPlan):
            check_sharding(plan.layout, 1, x=x)
        if place is not None:
            check_plan(plan, weight)
            check_rows(plan, x, place)

    def run_whole(tensors: Sequence[Tensor]) -> Tensor:
        documents = [np.diff(edges) for edges in plan.edges]
        return _run(tensors[0], weight, bias, OperatorCall(call.operator, documents, name=call.name), activation, "")

    return run_operator(
        call,
        {"x": x, "weight": weight},
        num_sharded=1,
        layout=plan.layout if isinstance(plan, ConvPlan) else None,
        usage=USAGE,
        check=check,
        run=lambda group: _run(x, weight, bias, call, activation, group),
        run_whole=run_whole,
    )


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: OperatorCall, activation: str | None, group: str
) -> Tensor:
    plan = call.plan
    if plan is None:
        x = as_autocast(x)
        batch, tokens, channels = x.shape
        numbers = number_documents(call.documents, batch, tokens)
        sizes = Sizes(1, 1, channels, 0, x.dtype.itemsize, batch)
        dtype = str(x.dtype).removeprefix("torch.")
        plan = build_conv_plan(numbers, _one_rank(tokens), weight.shape[1], sizes, dtype)
    check_plan(plan, weight)
    if not torch.is_autocast_enabled(x.device.type):
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and tensor.dtype != x.dtype:
                raise PlanError(
                    f"{name} must have the dtype of x, {x.dtype}, but has {tensor.dtype}. Cast one of them, or call"
                    f" this under torch.autocast."
                )
    elif str(as_autocast(x).dtype).removeprefix("torch.") == plan.dtype:
        x = as_autocast(x)  # halos are sent in the dtype in which the convolution runs
    place = rank_and_size(group)
    check_rows(plan, x, place)
    rank = 0 if place is None else place[0]
    if plan.handle is None:  # the plan was created before torch was imported
        object.__setattr__(plan, "handle", create_handle(plan))
    saves = torch.is_grad_enabled() and x.requires_grad
    rows, _ = halo(x, plan.handle, group, plan.num_rows(rank), saves, call.name, FORM)
    return convolve_with_halos(rows, weight, bias, OwnRows.of(plan, rank, x.device), activation)


def prepare(plan: ConvPlan, rank: int, device: torch.device, *, backward: bool) -> None:
    """Do what the first call with a plan does on a rank before its messages: record programs, copy their tables."""
    task, rows = HaloTask(plan, rank, getattr(torch, plan.dtype)), torch.empty(0, device=device)
    OwnRows.of(plan, rank, device)
    HaloForward(task, rows).start(saves=False)
    if backward:
        HaloBackward(task, rows).start(saves=False)


@lru_cache(maxsize=64)
def _one_rank(tokens: int) -> Layout:
    return contiguous(tokens, 1)
