"""What callers hand over that is almost right: groups they are not a member of, DTensors where none can be taken, or
DTensors that are cut elsewhere than the plan cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longspan.errors import KernelError, PlanError
from longspan.schedules.plan import Plan


def group_of(group: Any) -> Any:
    """The process group of a mesh of one axis; anything else as it was given."""
    return group.get_group() if isinstance(group, DeviceMesh) and group.ndim == 1 else group


def group_handed(group: Any) -> str:
    """What was given instead of a group, as the end of an error.

    >>> group_handed(3)
    'int was given'
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return (
            "this process is not a member of the group that was given: torch.distributed.new_group gave it a number"
            " instead. Call this on the group's members alone"
        )
    return f"{type(group).__name__} was given"


def check_plain(name: str, tensor: object) -> None:
    """Refuses a DTensor among tensors that every rank passes whole."""
    if isinstance(tensor, DTensor):
        raise KernelError(
            f"{name} is a DTensor, placed {tensor.placements}, but every rank passes a plain tensor with all query"
            f" heads that it computes. Pass {name}.to_local() where it is replicated, or {name}.full_tensor()."
        )


def check_captured(tensors: Sequence[object]) -> None:
    """Refuses DTensors among what score functions use."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            raise KernelError(
                f"a score function uses a DTensor of shape {tuple(tensor.shape)}, placed {tensor.placements}, but q, k"
                f" and v are handed to it as plain tensors. Let it use tensor.to_local() where that is replicated, or"
                f" tensor.full_tensor()."
            )


def check_cut(q: DTensor, plan_or_mask: Any) -> None:
    """Refuses a DTensor whose parts are not those of the plan's layout."""
    if not isinstance(plan_or_mask, Plan) or q.device_mesh.size() != plan_or_mask.layout.world_size:
        return  # which is refused elsewhere
    rank, layout = q.device_mesh.get_local_rank(), plan_or_mask.layout
    tokens, wanted = q.to_local().shape[2], layout.num_slots(rank)
    if tokens != wanted and q.shape[2] == layout.seq_len:
        raise PlanError(
            f"rank {rank} holds {tokens} tokens of a DTensor of {layout.seq_len}, but {layout} gives it {wanted}."
            f" DTensor cuts as torch.chunk does: plan with layouts.like_dtensor({layout.seq_len}, {layout.world_size})."
        )
