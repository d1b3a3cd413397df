"""What callers hand over that is almost right: groups they are not a member of, DTensors where none can be taken, or
DTensors that are cut elsewhere than the plan cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longspan.errors import KernelError, PlanError
from longspan.execution.inputs import DTYPES
from longspan.schedules.plan import Plan

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""The ranks of a sequence, as users give them; a mesh has one axis. None is one device, and it is
`torch.distributed.group.WORLD` before ranks have met."""


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


def not_yet() -> str:
    """What to do about ranks that have not met yet; nothing where they have.

    >>> not_yet()
    ' This process has not joined the others yet: call torch.distributed.init_process_group() first, under torchrun.'
    """
    if not dist.is_available() or dist.is_initialized():
        return ""
    return (
        " This process has not joined the others yet: call torch.distributed.init_process_group() first, under"
        " torchrun."
    )


def check_axes(group: Any) -> None:
    """Refuses a mesh of several axes."""
    if isinstance(group, DeviceMesh):
        raise PlanError(
            f"group is a mesh of {group.ndim} axes {group.mesh_dim_names}. Pass the one that holds the sequence, as"
            f" in mesh['cp']."
        )


def planned_group(group: Any, plan: Any, documents: Any, how: str) -> str:
    """The name under which PyTorch knows the group of a call by a plan; "" for one device. `how` says how plans are
    made."""
    if plan is not None and documents is not None:
        raise PlanError("documents and a plan were given, but a plan has documents of its own. Leave one of them out.")
    if group is None:
        return ""
    if plan is None:
        raise PlanError(f"a group was given without a plan. Make one: {how}, and pass plan=.")
    check_axes(group)
    if not isinstance(group, dist.ProcessGroup):
        raise PlanError(f"group= takes a process group or a mesh of one axis, but {group_handed(group)}.{not_yet()}")
    return group.group_name


def check_plain_numbers(operator: str, name: str, tensor: Tensor) -> None:
    """Refuses DTensors, nested tensors and other dtypes than those that are computed with."""
    if isinstance(tensor, DTensor):
        raise PlanError(
            f"{name} is a DTensor, placed {tensor.placements}, but {operator} takes plain tensors. Pass"
            f" {name}.to_local(), or {name}.full_tensor() where every rank needs all of it."
        )
    if tensor.is_nested or tensor.dtype not in DTYPES:
        kind = "nested" if tensor.is_nested else f"of {tensor.dtype}"
        raise PlanError(
            f"{name} is {kind}, but {operator} takes plain tensors of {', '.join(map(str, DTYPES))}. Pad or cast it"
            f" first; packed documents are said by their lengths: documents=[...]."
        )


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
