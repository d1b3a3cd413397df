"""`causal_conv1d` on one device or over ranks: checks, the halo exchange as an operator, and the convolution."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from longspan import _torch
from longspan._compile import found_under, handle_of
from longspan.errors import PlanError, in_context
from longspan.layouts import Layout, contiguous
from longspan.masks.document_rows import document_rows
from longspan.planning.conv_plan import ConvPlan, Haloed, planned_convolution
from longspan.planning.steps import Sizes
from longspan.run import ops
from longspan.run.group import told
from longspan.run.halo import HaloBackward, HaloForward, HaloTask
from longspan.run.ops import apart, call_of, pass_of, place_in, record_of, run_over, settings_of, ticket_of, told_in
from longspan.run.simulated import SimulatedRank
from longspan.spans import shortened
from longspan.validate import as_autocast, check_carried, check_no_tangent, check_plain_numbers, group_of, planned_group

# -- The convolution in plain PyTorch: rows with halos in, the rank's own rows out -------------------------------------


BY_IMAGE = (torch.float32, torch.bfloat16)
"""What PyTorch's convolution of images takes with channels last on CPUs: four times quicker than `conv1d`, which copies
rows so that tokens are last, and back."""
MANY = 32
"""Segments that are convolved as one, and whose rows are then taken by their numbers. Fewer are convolved one by one,
which leaves nothing to drop."""
_known: WeakKeyDictionary[ConvPlan, dict[tuple[int, torch.device], OwnRows]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class OwnRows:
    """Which of the convolved rows are the rank's own.

    Row i of what comes out belongs to row i + width - 1 of what went in, so that rows in front of a segment are
    nobody's. Segments of one length are convolved as so many batch rows, and a few others one by one: then nothing has
    to be dropped.
    """

    fold: int
    """Rows of a segment with its halo where all have as many; 0 where not."""
    batches: list[int]
    """How many batch rows have the same documents."""
    rows: list[list[int] | Tensor]
    """For each of them the rows of every segment with its halo, or, of many segments, the numbers of own rows."""
    num_padding: int

    @staticmethod
    def of(plan: ConvPlan, rank: int, device: torch.device) -> OwnRows:
        """Those of a rank, remembered: a plan is used many times."""
        known = _known.setdefault(plan, {})
        if (rank, device) not in known:
            parts = plan.haloed(rank)
            rows = [_rows(part, plan.width, plan.num_rows(rank), device) for part in parts]
            batches, padding = [len(part.batch) for part in parts], plan.layout.num_padding(rank)
            known[rank, device] = OwnRows(_fold(parts, plan.width), batches, rows, padding)
        return known[rank, device]

    def convolved(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Own rows in local order, convolved; padding is zeros."""
        batch, num_rows, channels = rows.shape
        if self.fold:
            taken = depthwise(rows.view(batch * (num_rows // self.fold), self.fold, channels), weight, bias)
            taken = taken.reshape(batch, -1, channels)
        else:
            parts = rows.split(self.batches) if len(self.batches) > 1 else (rows,)
            own = [_own(part, which, weight, bias) for part, which in zip(parts, self.rows, strict=True)]
            taken = own[0] if len(own) == 1 else torch.cat(own)
        return functional.pad(taken, (0, 0, 0, self.num_padding)) if self.num_padding else taken


def _fold(parts: Sequence[Haloed], width: int) -> int:
    sizes = np.concatenate([part.table[:, 1] - part.table[:, 0] for part in parts])
    counts = {len(part.table) for part in parts}
    alike = len(sizes) and len(counts) == 1 and (sizes == sizes[0]).all()
    return int(sizes[0]) + width - 1 if alike else 0


def _rows(part: Haloed, width: int, num_rows: int, device: torch.device) -> list[int] | Tensor:
    sizes = part.table[:, 1] - part.table[:, 0]
    if len(sizes) > MANY:
        return torch.from_numpy(part.places() - (width - 1)).to(device)
    each = [own + width - 1 for own in sizes.tolist()]
    return [*each, num_rows - sum(each)]  # the last is what other batch rows have more


def _own(rows: Tensor, which: list[int] | Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(which, list):
        return depthwise(rows, weight, bias).index_select(1, which)
    if len(which) == 1:  # no segment at all: nothing is own, but all depends on everything, as on other ranks
        return depthwise(rows, weight, bias)[:, :0]
    return torch.cat([depthwise(part, weight, bias) for part in rows.split(which, 1)[:-1]], 1)


def convolved(rows: Tensor, weight: Tensor, bias: Tensor | None, own: OwnRows, activation: str | None) -> Tensor:
    """The rank's output: its rows with their halos convolved channel by channel, rows that are not its own dropped."""
    found = own.convolved(rows, weight, bias)
    return found if activation is None else functional.silu(found)


def depthwise(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(batch, rows, channels) convolved along rows, each channel with its own weights: width - 1 rows fewer.

    >>> rows, weight = torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[10.0, 1.0]])
    >>> depthwise(rows, weight, None).flatten().tolist()
    [12.0, 24.0]
    """
    channels = len(weight)
    if rows.device.type == "cpu" and rows.dtype in BY_IMAGE:
        image = rows.unsqueeze(2).permute(0, 3, 1, 2)  # one pixel wide, and channels last as they lie
        return functional.conv2d(image, weight[:, None, :, None], bias, groups=channels).squeeze(3).mT
    return functional.conv1d(rows.mT, weight.unsqueeze(1), bias, groups=channels).mT


# -- Checks of tensors against each other and the plan -----------------------------------------------------------------


ACTIVATIONS = (None, "silu", "swish")


def check_tensors(x: Any, weight: Any, bias: Any, activation: Any) -> None:
    """Refuses what is no tensor of the right kind, and shapes that do not belong together."""
    shapes = {"x": "(batch, tokens, channels)", "weight": "(channels, width)", "bias": "(channels,)"}
    dims = {"x": 3, "weight": 2, "bias": 1}
    given: dict[str, Any] = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        _check_kind(name, tensor, shapes[name])
        if tensor.ndim != dims[name]:
            hint = " Pass weight.squeeze(1) of a Conv1d." if name == "weight" and tensor.ndim == 3 else ""
            raise PlanError(f"{name} must be {shapes[name]}, but has shape {tuple(tensor.shape)}.{hint}")
        if tensor.device != x.device:
            raise PlanError(f"x is on {x.device}, but {name} is on {tensor.device}. Move it there.")
        channels = tensor.shape[2 if name == "x" else 0]
        if channels != x.shape[2]:
            raise PlanError(
                f"x has {x.shape[2]} channels, but {name} of shape {tuple(tensor.shape)} is for {channels}. x is"
                f" (batch, tokens, channels): transpose it if its tokens are last."
            )
    if not weight.shape[1]:
        raise PlanError(f"weight has shape {tuple(weight.shape)}: a width of 0. A convolution takes 1 token or more.")
    if activation not in ACTIVATIONS:
        raise PlanError(
            f"activation = {activation!r} was asked for. Choose None, 'silu' or 'swish', which is the same."
        )
    check_no_tangent(x=x, weight=weight, bias=bias)


def _check_kind(name: str, tensor: Any, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise PlanError(
            f"{name} must be a torch.Tensor of shape {shape}, but {type(tensor).__name__} was given. Convert it with"
            f" torch.as_tensor."
        )
    check_plain_numbers("causal_conv1d", name, tensor)


def check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuses different dtypes; autocast would make them the same."""
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise PlanError(
                f"x is {x.dtype}, but {name} is {tensor.dtype}. Cast one of them, or call this under torch.autocast."
            )


def check_plan(plan: Any, weight: Tensor) -> None:
    """Refuses what is no plan of a convolution, or one of another width."""
    if not isinstance(plan, ConvPlan):
        kind = type(plan).__name__
        raise PlanError(
            f"causal_conv1d takes a plan of longspan.conv_plan, but {kind} was given"
            f"{', which is a plan of attention' if kind == 'Plan' else ''}. Make one: longspan.conv_plan(documents,"
            f" layout, channels=..., width=..., dtype=...)."
        )
    if weight.shape[1] != plan.width:
        raise PlanError(
            f"weight has shape {tuple(weight.shape)}, a width of {weight.shape[1]}, but the plan is for width"
            f" {plan.width}. Plan for the width of the weight."
        )


def check_rows(plan: ConvPlan, x: Tensor, place: tuple[int, int] | None) -> None:
    """Refuses rows that do not fit the plan. `place` is this rank and the group's size."""
    size = plan.layout.world_size
    if place is None and size > 1:
        raise PlanError(
            f"the plan is for {size} ranks, so it needs group= (a process group or a mesh axis), but NoneType was"
            f" given."
        )
    if place is not None and place[1] != size:
        raise PlanError(f"the plan is for {size} ranks, but the group has {place[1]}. Plan for the group's size.")
    rank = 0 if place is None else place[0]
    wanted = (plan.batch, plan.layout.num_slots(rank), plan.channels)
    if tuple(x.shape) != wanted:
        raise PlanError(
            f"x has shape {tuple(x.shape)}, but on rank {rank} the plan expects (batch, tokens, channels) = {wanted}."
            f" Shard with layout.shard(x, rank, dim=1), or plan for these shapes."
        )
    if str(x.dtype).removeprefix("torch.") != plan.dtype:
        raise PlanError(f"x has dtype {x.dtype}, but the plan is for {plan.dtype}. Cast x, or plan for it.")


# -- The halo exchange as a `torch.library` operator with its adjoint --------------------------------------------------
# As in `run/ops.py`, a plan is passed as its handle, a group by its name, and a forward pass returns a ticket.


FORM = 1
"""The form of both operators, as in `run/ops.py`."""


@dataclass(frozen=True, eq=False)
class HaloPass:
    """A forward pass, as its backward needs to know it."""

    task: HaloTask
    group: str
    number: int
    name: str


def _plan_of(handle: Tensor) -> ConvPlan:
    found = found_under(int(handle))
    if not isinstance(found, ConvPlan):
        raise PlanError(
            "the plan of this convolution is gone: compiled code was given its handle, but nobody holds it any more."
            " Keep a reference to it as long as the call runs."
        )
    return found


def run_forward(
    x: Tensor, handle: Tensor, group: str, num_rows: int, saves: bool, name: str, form: int
) -> tuple[Tensor, Tensor]:
    """The rank's rows with their halos, and the ticket of this pass; `saves` says that a backward may come."""
    with told_in(group):
        assert form == FORM, "compiled code of another version"
        plan, place = _plan_of(handle), place_in(group)
        check_rows(plan, x, place)
        task = HaloTask(plan, 0 if place is None else place[0], x.dtype)
        settings = settings_of(group)
        record = record_of(task, x.device, False if saves else None, name, settings) if group else None
        call = call_of(task, "forward", x.device, settings, record=record, name=name)
        rows, number = run_over(HaloForward(task, x).program(), group, call)
        assert rows.shape[1] == num_rows, "compiled code of another plan"
        done = HaloPass(task, group, number, name)
        return apart((rows.contiguous(),), (x,))[0], ticket_of(done)


def _fake_forward(
    x: Tensor, _handle: Tensor, _group: str, num_rows: int, _saves: bool, _name: str, _form: int
) -> tuple[Tensor, Tensor]:
    rows = x.new_empty((x.shape[0], num_rows, x.shape[2]))
    return rows, torch.empty(1, dtype=torch.int64, device="cpu")


def run_backward(drows: Tensor, ticket: Tensor, num_slots: int) -> Tensor:
    """The gradient of the rank's rows, of which there are `num_slots`."""
    forward = pass_of(ticket, HaloPass)
    with told_in(forward.group):
        task = forward.task
        settings = settings_of(forward.group, backward=True)
        call = call_of(task, "backward", drows.device, settings, name=forward.name, forward=forward.number)
        dx, _ = run_over(HaloBackward(task, drows).program(), forward.group, call)
        assert dx.shape[1] == num_slots, "compiled code of another plan"
        return apart((dx.contiguous(),), (drows,))[0]


def _fake_backward(drows: Tensor, _ticket: Tensor, num_slots: int) -> Tensor:
    return drows.new_empty((drows.shape[0], num_slots, drows.shape[2]))


halo = ops.defined("longspan::halo", run_forward, _fake_forward)
halo_backward = ops.defined("longspan::halo_backward", run_backward, _fake_backward)


class _Halo(torch.autograd.Function):
    """The forward operator with the backward one behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with _torch.below_autograd():
            rows, ticket = halo(x, *others)
        if type(ticket) is Tensor:  # not traced
            ctx.forward_pass = pass_of(ticket, HaloPass)  # hooks may copy what is saved: the copy holds nothing
        ctx.num_slots = x.shape[1]
        ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(ticket)
        return rows, ticket

    @staticmethod
    def backward(ctx: Any, drows: Tensor, _ticket: Any) -> tuple[Any, ...]:  # type: ignore[override]
        (ticket,) = ctx.saved_tensors
        return halo_backward(drows, ticket, ctx.num_slots), *(None,) * 6


def _with_gradients(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Halo.apply(x, *others)  # type: ignore[return-value]
    with _torch.below_autograd():
        return halo(x, *others)


ops.differentiate(halo, _with_gradients)
ops.refuse_derivative(halo_backward)


# -- The call ----------------------------------------------------------------------------------------------------------


HOW = "longspan.conv_plan(documents, layout, channels=..., width=..., dtype=...)"
"""How plans of these calls are made."""


@dataclass(frozen=True, eq=False)
class ConvRequest:
    """What is asked for beside tensors; see `longspan.causal_conv1d`."""

    documents: Any = None
    plan: Any = None
    group: Any = None
    activation: str | None = None
    name: str = ""


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, asked: ConvRequest) -> Tensor:
    """The convolution of the rank's rows, with the errors of a public call."""
    group = group_of(asked.group)
    telling = told(group) if isinstance(group, dist.ProcessGroup) else nullcontext()
    with in_context(lambda: _described(x, weight, asked, group)), telling:
        check_tensors(x, weight, bias, asked.activation)
        if not isinstance(asked.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(
                f"name = {shortened(asked.name)} was given. A call's name is a str, the same on every rank."
            )
        if isinstance(asked.plan, ConvPlan):
            check_carried(asked.plan.layout, 1, x=x)
        if isinstance(group, SimulatedRank) and isinstance(asked.plan, ConvPlan):
            return _together(x, weight, bias, asked, group)
        return _run(x, weight, bias, asked, planned_group(group, asked.plan, asked.documents, HOW))


def _together(x: Tensor, weight: Tensor, bias: Tensor | None, asked: ConvRequest, here: SimulatedRank) -> Tensor:
    """All ranks are in this process: whole sequences, of which each rank takes its rows."""
    plan, layout = asked.plan, asked.plan.layout
    check_plan(plan, weight)
    check_rows(plan, x, (here.rank(), here.size()))
    alone = replace(asked, documents=[np.diff(edges) for edges in plan.edges], plan=None, group=None)

    def compute(parts: list[Tensor]) -> list[Tensor]:
        out = _run(layout.unshard(parts, 1), weight, bias, alone, "")
        return [layout.shard(out, rank, 1) for rank in range(here.size())]

    return here.meet("causal_conv1d", x, compute)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, asked: ConvRequest, group: str) -> Tensor:
    plan = asked.plan
    if plan is None:
        x = as_autocast(x)
        plan = _one_device_plan(x, weight.shape[1], asked.documents)
    check_plan(plan, weight)
    if not torch.is_autocast_enabled(x.device.type):
        check_dtypes(x, weight, bias)
    elif str(as_autocast(x).dtype).removeprefix("torch.") == plan.dtype:
        x = as_autocast(x)  # halos travel as what the convolution will make of them
    place = place_in(group)
    check_rows(plan, x, place)
    rank = 0 if place is None else place[0]
    saves = torch.is_grad_enabled() and x.requires_grad
    others = group, plan.num_rows(rank), saves, asked.name, FORM
    rows, _ = halo(x, _handle(plan), *others)
    return convolved(rows, weight, bias, OwnRows.of(plan, rank, x.device), asked.activation)


def _one_device_plan(x: Tensor, width: int, documents: Any) -> ConvPlan:
    batch, tokens, channels = x.shape
    numbers = document_rows(documents, tokens, PlanError)
    if len(numbers) not in (1, batch):
        raise PlanError(
            f"documents are given for {len(numbers)} batch rows, but x of shape {tuple(x.shape)} has {batch}. Give one"
            f" list of lengths for all rows, or one per row."
        )
    sizes = Sizes(1, 1, channels, 0, x.dtype.itemsize, batch)
    return planned_convolution(numbers, _whole(tokens), width, sizes, str(x.dtype).removeprefix("torch."))


@lru_cache(maxsize=64)
def _whole(tokens: int) -> Layout:
    return contiguous(tokens, 1)


def _handle(plan: ConvPlan) -> Tensor:
    if plan.handle is None:  # made before torch was loaded
        object.__setattr__(plan, "handle", handle_of(plan))
    handle: Any = plan.handle
    return handle


def _described(x: Any, weight: Any, asked: ConvRequest, group: Any) -> str:
    """The call in a sentence, as far as its arguments are what they should be."""
    shapes = [f"{name} {tuple(t.shape)}" for name, t in (("x", x), ("weight", weight)) if isinstance(t, Tensor)]
    parts = [f"causal_conv1d of {', '.join(shapes)}" if shapes else "causal_conv1d"]
    if isinstance(asked.plan, ConvPlan):
        parts.append(f"by {shortened(asked.plan, 160)}")
    if isinstance(group, dist.ProcessGroup):
        parts.append(f"on rank {group.rank()} of {group.size()}")
    return f"The call: {', '.join(parts)}."
