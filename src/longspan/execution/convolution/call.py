"""From a user's tensors to halos and back to an output: what is asked must make sense, or the call is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import PlanError, in_context
from longspan.execution.convolution import halo_operator
from longspan.execution.convolution.fitting_rows import check_dtypes, check_plan, check_rows, check_tensors
from longspan.execution.convolution.own_rows import OwnRows, convolved
from longspan.execution.handed import group_of, planned_group
from longspan.execution.inputs import as_autocast, check_carried
from longspan.execution.ops import place_in
from longspan.execution.simulated import SimulatedRank
from longspan.execution.trust.group import told
from longspan.handles import handle_of
from longspan.layouts import Layout, contiguous
from longspan.masks.document_rows import document_rows
from longspan.schedules.convolution import ConvPlan, planned_convolution
from longspan.schedules.steps import Sizes
from longspan.span import shortened

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
    others = group, plan.num_rows(rank), saves, asked.name, halo_operator.FORM
    rows, _ = halo_operator.halo(x, _handle(plan), *others)
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
