"""Groups as users give them: a process group or a mesh of one axis; and the one error of this package."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.errors import LongspanError


class BatchError(LongspanError, ValueError):
    """A batch, or a training call, that cannot mean what was asked."""


def process_group(group: Any, what: str) -> dist.ProcessGroup:
    """The process group of a group or a mesh of one axis."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise BatchError(
                f"{what} got a mesh of {group.ndim} axes {group.mesh_dim_names} as its group. Pass one axis, as in"
                f" mesh['cp'], or several of them flattened, as in make_mesh(...).dp_cp."
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise BatchError(
            f"{what} needs a process group or a mesh of one axis, but {type(group).__name__} was given. The group of"
            f" all ranks is torch.distributed.group.WORLD."
        )
    return group


def message_device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors this group can send."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else found
