"""Passes: what a forward pass leaves for its backward, beside tensors, and the ticket under which it is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.execution.engine.runner import Job
from longspan.execution.scoring.biases import check_bias
from longspan.execution.scoring.pipeline import Scoring
from longspan.execution.scoring.score_text import Operands, bias_in, scoring_of
from longspan.handles import found_under, number_of
from longspan.masks.functions.reads import Reads
from longspan.schedules.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """What compiled code says about scores: a text (see `score_text`) and the numbers in it. Its tensors are arguments
    of both operators: memory of a graph's own is used again."""

    text: str = ""
    numbers: Sequence[int] = ()
    reals: Sequence[float] = ()

    def scoring(self, captured: Sequence[Tensor], constants: Sequence[Tensor], like: Tensor, plan: Plan) -> Scoring:
        operands = Operands(captured, constants, self.numbers, self.reals)
        scoring = scoring_of(self.text, operands, like)
        if (bias := bias_in(self.text, operands)) is not None:
            check_bias(bias, plan.sizes.batch, plan.sizes.q_heads, plan.layout.seq_len)
        return scoring


NOTHING = Said()


class Kept(list[Tensor]):
    """What a plan keeps of other ranks' rows, from forward to backward."""


@dataclass(eq=False)  # frozen ones take three times as long to make
class Pass:
    """A forward pass, as its backward needs to know it."""

    job: Job
    group: str
    number: int
    """Which call over the group it was; 0 without a group."""
    name: str
    sums: bool
    """Whether gradients of what all ranks share are added up."""
    reads: tuple[Reads, ...]
    """What functions of the mask had read."""
    kept: ref[Kept]
    said: Said = NOTHING
    """What compiled code says about scores."""


class _Memory(bytearray):
    """A ticket's memory: tensors that share it keep alive what the ticket is for."""

    held: tuple[object, ...]


def ticket_of(made: object, *more: object) -> Tensor:
    """The ticket of a forward pass, which keeps it alive, and what more it needs."""
    memory = _Memory(number_of(made).to_bytes(8, "little"))
    memory.held = made, *more
    return torch.frombuffer(memory, dtype=torch.int64)


def pass_of(ticket: Tensor, kind: type[T]) -> T:
    """The forward pass of a ticket."""
    found = found_under(int(ticket))
    if not isinstance(found, kind):
        raise PlanError(
            "a backward pass was started, but its forward pass is not known in this process any more: what compiled"
            " code saved for it was copied, and the original let go. Compile without hooks that copy saved tensors"
            " (torch.autograd.graph.save_on_cpu, saved_tensors_hooks), or let them pass integer tensors on."
        )
    return found
