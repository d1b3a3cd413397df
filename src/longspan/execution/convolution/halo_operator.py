"""Halos as a `torch.library` operator, with its adjoint: compiled graphs, checkpointing and autograd see plain ops.

As in `execution.ops`, a plan goes as its handle, a group by its name, and a forward pass answers with a ticket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.execution import _torch, operators
from longspan.execution.call_record import record_of
from longspan.execution.convolution.fitting_rows import check_rows
from longspan.execution.engine.halo import HaloBackward, HaloForward, HaloTask
from longspan.execution.ops import apart, call_of, pass_of, place_in, run_over, settings_of, ticket_of, told_in
from longspan.handles import found_under
from longspan.schedules.convolution import ConvPlan

FORM = 1
"""The form of both operators, as in `execution.ops`."""


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


halo = operators.defined("longspan::halo", run_forward, _fake_forward)
halo_backward = operators.defined("longspan::halo_backward", run_backward, _fake_backward)


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


operators.differentiate(halo, _with_gradients)
operators.refuse_derivative(halo_backward)
