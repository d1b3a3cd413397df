"""A recurrence over ranks: every rank computes its own segments, and states go from segment to segment by a scan plan.

Forward: the maps of segments that are followed by others go into the scan, which gives the states that enter; with
these the rank computes its output. Backward: autograd runs through what the kernel did, once to get the gradient of
entering states (as if nothing came from later segments), then, after the scan turned round, with the gradient of
leaving states as well. `Tail` is where autograd meets the scan: it stands behind output and leaving states, so it is
asked first in backward, and has the second gradient ready when autograd goes on.

    tokens ──► kernel ──► out ─────► Tail ──► out
                 ▲  └──► leaving ──►  │
    entering ────┘ ◄ ─ ─ gradient ─ ─ ┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from longspan.execution.engine.transports import Program
from longspan.execution.scans.contract import ScanKernel, ScanWork, Segments
from longspan.execution.scans.walks import scan
from longspan.schedules.scans.plan import ScanPlan
from longspan.span import Ints, steps_within

Carrier = Callable[[Program[list[Tensor]], str, int], tuple[list[Tensor], int]]
"""Runs a rank's program in a direction, of the forward call with this number; gives results and the call's number."""


@dataclass(frozen=True, eq=False)
class LocalSegments:
    """A rank's segments: their states in one tensor, batch row by batch row, and which of them the scan is about."""

    segments: Segments
    entered: Ints
    """Numbers of the states that enter from before."""
    left: Ints
    """Numbers of the states that somebody needs."""
    rows: tuple[list[int], list[int]]
    """How many batch rows each entered and each left segment has."""
    first: list[bool]
    """Of each left segment, whether its document begins with it."""

    @staticmethod
    def of(plan: ScanPlan, rank: int) -> LocalSegments:
        mine = plan.chains.of_rank(rank)
        batches = [plan.chains.batches[chain] for chain in mine[:, 0].tolist()]
        lengths = np.array([len(ranks) for ranks in plan.chains.ranks()], dtype=np.int64)
        counts = np.array([len(batch) for batch in batches], dtype=np.int64)
        starts = np.array([batch.start for batch in batches], dtype=np.int64)
        each = np.repeat(np.arange(len(mine)), counts)
        batch_row = starts[each] + steps_within(counts)
        table = np.stack((batch_row, mine[each, 2], mine[each, 3]), axis=1)
        entered, left = mine[:, 1] > 0, mine[:, 1] + 1 < lengths[mine[:, 0]]
        return LocalSegments(
            Segments(table),
            np.flatnonzero(entered[each]),
            np.flatnonzero(left[each]),
            (counts[entered].tolist(), counts[left].tolist()),
            (mine[left, 1] == 0).tolist(),
        )


@dataclass(frozen=True, eq=False)
class RankScan:
    """This rank's share of a scan plan, and who carries its messages."""

    plan: ScanPlan
    rank: int
    local: LocalSegments
    carry: Carrier
    told: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside of it, an error in backward is told to the others, who wait for this rank."""

    def forward(self, maps: Tensor, states: Tensor) -> tuple[Tensor, list[Tensor], int]:
        """The states that enter, the maps that backward needs, and the call's number, from (M, U) of left segments."""
        inputs: list[Tensor] = []
        counts = self.local.rows[1]
        for m, u, is_first in zip(maps.split(counts), states.split(counts), self.local.first, strict=True):
            inputs += [u] if is_first else [m, u]
        found, number = self._run(inputs, "forward", 0, states)
        num = len(self.local.rows[0])
        return _joined(found[:num], states), found[num:], number

    def backward(self, gradients: Tensor, kept: Sequence[Tensor], number: int) -> Tensor:
        """Gradients of states that leave, from those of states that enter."""
        inputs = [*gradients.split(self.local.rows[0]), *kept]
        found, _ = self._run(inputs, "backward", number, gradients)
        return _joined(found, gradients)

    def _run(self, inputs: list[Tensor], direction: str, number: int, like: Tensor) -> tuple[list[Tensor], int]:
        return self.carry(scan(self.plan, self.rank, direction, inputs, like), direction, number)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_empty((0, *like.shape[1:]))


def spread(kernel: ScanKernel, work: ScanWork, ranks: RankScan, *, learns: bool) -> Tensor:
    """The output of this rank's tokens; `learns` says whether a backward may come."""
    if not learns:
        return _computed(kernel, work, ranks, None).out
    saved = Stash(keeps=kernel.name == "own")
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        # Entering states are a part of the graph whatever else is, so that their gradients can be asked for.
        anchor = torch.zeros((), device=work.tokens[0].device, requires_grad=True)
        found = _computed(kernel, work, ranks, anchor)
        out = found.out if found.out.requires_grad else found.out + anchor.to(found.out.dtype)  # no tokens
    ends = get_gradient_edge(out), get_gradient_edge(found.entering)
    way = Way(*ends, found.entering.shape, found.number, ranks, saved)
    given = (*work.tokens, *work.shared, *work.recurrence.captured)
    return Tail.apply(way, found.kept, out, found.leaving, *(x for x in given if x is not None))


@dataclass(frozen=True, eq=False)
class Computed:
    """What a rank finds in forward."""

    out: Tensor
    leaving: Tensor
    """States that somebody needs."""
    entering: Tensor
    kept: list[Tensor]
    """Maps that backward needs."""
    number: int
    """Of the call."""


def _computed(kernel: ScanKernel, work: ScanWork, ranks: RankScan, anchor: Tensor | None) -> Computed:
    local, device = ranks.local, work.tokens[0].device
    entered, left = (torch.as_tensor(which, device=device) for which in (local.entered, local.left))
    states, kept, number = ranks.forward(*kernel.summary(replace(work, segments=local.segments.of(local.left))))
    entering = states if anchor is None else EnteringStates.apply(states, anchor)
    whole = states.new_zeros((len(local.segments), *states.shape[1:])).index_put((entered,), entering)
    out, leaving = kernel.local(work, whole)
    return Computed(out, leaving[left], entering, kept, number)


class Stash:
    """What autograd saves of a rank's computation, held by `Tail`, because backward needs it twice.

    Somebody may stand between: a checkpoint throws it away and computes, and so calls, again when it is asked for,
    once in every pass of autograd. Tail asks in the pass that all ranks are in, and its own pass inside of that one
    finds everything here.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.packed: list[Tensor] = []
        self.found: list[Tensor | None] = []
        self.keeps = keeps
        """Whether a tensor may be asked for more than once, as functions of users may do."""

    def pack(self, tensor: Tensor) -> int:
        self.packed.append(tensor)
        return len(self.packed) - 1

    def unpack(self, at: int) -> Tensor:
        found = self.found[at]
        assert found is not None
        if not self.keeps:
            self.found[at] = None
        return found

    def taken(self) -> list[Tensor]:
        packed, self.packed = self.packed, []
        return packed

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """While it lasts, tensors are kept for those who ask after it."""
        keeps, self.keeps = self.keeps, True
        try:
            yield
        finally:
            self.keeps = keeps


@dataclass(frozen=True, eq=False)
class Way:
    """What backward has to know of its forward."""

    out: GradientEdge
    entering: GradientEdge
    shape: torch.Size
    """Of the states that enter."""
    number: int
    """Of the forward call."""
    ranks: RankScan
    saved: Stash


class EnteringStates(torch.autograd.Function):
    """States that enter, as a part of the graph: gradients are asked for here, and end here."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, anchor: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]  # noqa: ARG004
        return None, None


class Tail(torch.autograd.Function):
    """The output as it is. Its backward finds the gradient of leaving states first, by the scan turned round.

    All tensors of the call lead here, so that every rank comes by whichever of them gradients are asked for, also one
    without tokens, whose output depends on none.
    """

    @staticmethod
    def forward(ctx: Any, way: Way, kept: Sequence[Tensor], out: Tensor, *_: Tensor) -> Tensor:  # type: ignore[override]
        ctx.way, ctx.num_kept = way, len(kept)
        # Something is saved on every rank: where a checkpoint computes again, and so calls again, is when it is asked
        # for, and that must be the same moment on all ranks.
        ctx.save_for_backward(out.new_empty(0), *kept, *way.saved.taken())
        return out.view_as(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        way: Way = ctx.way
        _, *saved = ctx.saved_tensors
        kept, way.saved.found = saved[: ctx.num_kept], saved[ctx.num_kept :]
        with way.ranks.told():
            with way.saved.keeping():
                (gradients,) = torch.autograd.grad(way.out, way.entering, dout, retain_graph=True, allow_unused=True)
            if gradients is None:  # an output that does not depend on states
                gradients = dout.new_zeros(way.shape, dtype=getattr(torch, way.ranks.plan.dtype))
            leaving = way.ranks.backward(gradients, kept, way.number)
        return None, None, dout, leaving, *(None for _ in ctx.needs_input_grad[4:])
