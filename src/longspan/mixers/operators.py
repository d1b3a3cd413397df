"""The skeleton that operators along the sequence share: describe the call, check its arguments, find ranks, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from longspan.errors import PlanError, in_context
from longspan.layouts import Layout
from longspan.masks.document_rows import document_rows
from longspan.run.simulated import SimulatedRank
from longspan.spans import Ints, truncated_repr
from longspan.validate import check_planned_group, group_of


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """The arguments that every operator takes next to its tensors."""

    operator: str
    documents: Any = None
    plan: Any = None
    group: Any = None
    name: str = ""


def run_operator(
    call: OperatorCall,
    tensors: dict[str, Any],
    *,
    num_sharded: int,
    layout: Layout | None,
    usage: str,
    check: Callable[[tuple[int, int] | None], None],
    run: Callable[[str], Tensor],
    run_whole: Callable[[Sequence[Tensor]], Tensor],
) -> Tensor:
    """Run an operator on one device or over ranks.

    Args:
        call: the arguments that are not tensors.
        tensors: by name; error messages show their shapes.
        num_sharded: how many of them, the first ones, are sharded along their tokens.
        layout: the layout of the tensors; None without a plan of this operator.
        usage: how to make a plan, for error messages.
        check: checks tensors, and also the plan if it is passed this rank and the group's size (simulated ranks).
        run: runs over the process group of this name; "" is one device.
        run_whole: runs on one device with whole sequences, in the place of all simulated ranks.
    """
    group = group_of(call.group)

    def describe() -> str:
        shapes = [f"{name} {tuple(t.shape)}" for name, t in tensors.items() if isinstance(t, Tensor)]
        parts = [f"{call.operator} of {', '.join(shapes)}" if shapes else call.operator]
        if layout is not None:
            parts.append(f"by {truncated_repr(call.plan, 160)}")
        if isinstance(group, dist.ProcessGroup):
            parts.append(f"on rank {group.rank()} of {group.size()}")
        return f"The call: {', '.join(parts)}."

    with in_context(describe):
        if not isinstance(call.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"name must be a str, the same on every rank, but got {truncated_repr(call.name)}.")
        if layout is None or not isinstance(group, SimulatedRank):
            check(None)
            return run(check_planned_group(group, call.plan, call.documents, usage))
        check((group.rank(), group.size()))

        def compute(shards: list[tuple[Tensor, ...]]) -> list[Tensor]:
            out = run_whole([layout.unshard(parts, 1) for parts in zip(*shards, strict=True)])
            return [layout.shard(out, rank, 1) for rank in range(group.size())]

        return group.meet(call.operator, tuple(tensors.values())[:num_sharded], compute)


def number_documents(documents: Any, batch: int, tokens: int) -> Ints:
    """Return document numbers of tokens, (1 or batch, tokens)."""
    numbers = document_rows(documents, tokens, PlanError)
    if len(numbers) not in (1, batch):
        raise PlanError(
            f"documents must be lengths for all batch rows, or one list per row, but got {len(numbers)} lists for"
            f" {batch} batch rows."
        )
    return numbers
