"""Groups as users give them: a process group or a mesh of one axis; and the one error of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longspan.errors import LongspanError
from longspan.execution.handed import group_handed, group_of, not_yet
from longspan.execution.simulated import TAKEN, SimulatedRank
from longspan.execution.trust.backends import message_device
from longspan.execution.trust.group import run_collective
from longspan.layouts import Layout

__all__ = [
    "BatchError",
    "all_gathered",
    "all_summed",
    "check_batch",
    "check_layout",
    "message_device",
    "process_group",
    "run_collective",
]


class BatchError(LongspanError, ValueError):
    """A batch, or a training call, that cannot mean what was asked."""


def check_batch(batch: object, what: str) -> None:
    """Raises unless it is a mapping."""
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"{what} takes a mapping of names to tensors, as in {{'input_ids': ids}}, but {type(batch).__name__} was"
            f" given."
        )


def check_layout(layout: object, what: str) -> None:
    """Raises unless it is a layout."""
    if not isinstance(layout, Layout):
        raise BatchError(f"{what} takes a layout, but {type(layout).__name__} was given. See longspan.layouts.")


def all_summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of a tensor, in place; without gradients."""
    if isinstance(group, SimulatedRank):
        return x.copy_(group.summed(x.detach().clone()))
    _all_reduce(x, group)
    return x


@torch.compiler.disable(reason="ranks are watched between compiled graphs")
def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> None:
    run_collective("all_reduce", x, group, lambda group: dist.all_reduce(x, group=group, async_op=True))


def all_gathered(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, which have one shape; without gradients."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    run_collective("all_gather", x, group, lambda group: dist.all_gather(parts, x, group=group, async_op=True))
    return parts


def process_group(group: Any, what: str, *, real: bool = False) -> dist.ProcessGroup:
    """The process group of a group or a mesh of one axis; a simulated rank is as good as one, unless a real group is
    needed."""
    group = group_of(group)
    if isinstance(group, SimulatedRank):
        if real:
            raise BatchError(
                f"{what} needs a process group, but a simulated rank was given, which is no process. {TAKEN}"
            )
        return cast(dist.ProcessGroup, group)
    if isinstance(group, DeviceMesh):
        raise BatchError(
            f"{what} got a mesh of {group.ndim} axes {group.mesh_dim_names} as its group. Pass one axis, as in"
            f" mesh['cp'], or several of them flattened, as in make_mesh(...).dp_cp."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise BatchError(
            f"{what} needs a process group or a mesh of one axis, but {group_handed(group)}. The group of all ranks is"
            f" torch.distributed.group.WORLD.{not_yet()}"
        )
    return group
