"""Ranks of an `accelerate.Accelerator`: which of them hold parts of one sequence, and which other samples.

Accelerate has no place for another kind of context parallelism, but its data loaders look at the mesh in
`accelerator.state.device_mesh` for ranks that are to get the same batches. That is all that is needed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan.execution import _torch
from longspan.training import BatchError


@dataclass(frozen=True)
class Ranks:
    """The groups of a run: `cp` for parts of one sequence, `dp` for different samples (None where all see the same)."""

    cp: DeviceMesh
    dp: DeviceMesh | None


def split_sequences(accelerator: Any, cp_size: int | None = None) -> Ranks | None:
    """Makes every `cp_size` neighbouring ranks hold parts of one sequence; None on one process, where nothing is split.

    Call it before `accelerator.prepare`: data loaders prepared later feed these ranks the same batches. Without
    `cp_size` it is what the accelerator's ParallelismConfig says, or else all ranks. Models stay wrapped as accelerate
    wraps them, over all ranks (DDP, FSDP2): parameters are the same for all samples and all parts of a sequence.
    """
    world = accelerator.num_processes
    config = getattr(accelerator, "parallelism_config", None)
    named = config is not None and config.cp_enabled
    size = cp_size if cp_size is not None else config.cp_size if named else world  # type: ignore[union-attr]
    _check(accelerator, config, size, cp_size)
    if size == 1:
        return None
    if named:
        return _adopt_mesh(accelerator)
    if not dist.is_initialized():
        raise BatchError(f"cp_size = {size} was asked for, but torch.distributed is not initialised. Use torchrun.")
    names = ("dp_shard", "cp")  # accelerate's words
    mesh = init_device_mesh(accelerator.device.type, (world // size, size), mesh_dim_names=names)
    accelerator.state.device_mesh = mesh
    return Ranks(mesh["cp"], mesh["dp_shard"] if world > size else None)


def _adopt_mesh(accelerator: Any) -> Ranks:
    """The groups of a ParallelismConfig with cp_size > 1; accelerate's own context parallelism is left out: it would
    drop masks and refuse windows."""
    accelerator._prepare_cp = lambda *objects: objects
    mesh = accelerator.torch_device_mesh
    names = tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))
    if len(names) < 2:
        return Ranks(mesh["cp"], mesh[names[0]] if names else None)
    return Ranks(mesh["cp"], _torch.flattened(mesh[names], "samples"))


def _check(accelerator: Any, config: Any, size: int, asked: int | None) -> None:
    world = accelerator.num_processes
    if size < 1 or world % size:
        raise BatchError(
            f"cp_size = {size} was asked for, but {world} ranks cannot be cut into groups of {size}. Choose a divisor"
            f" of the number of ranks, or start another number of them."
        )
    if config is None:
        return
    if config.cp_enabled and asked not in (None, config.cp_size):
        raise BatchError(
            f"cp_size = {asked} was asked for, but the ParallelismConfig has cp_size = {config.cp_size}. Leave one out."
        )
    if size > 1 and not config.cp_enabled:
        raise BatchError(
            f"cp_size = {size} was asked for beside a ParallelismConfig without it, whose mesh would be replaced. Give"
            f" ParallelismConfig(cp_size={size}, ...)."
        )
    if size > 1 and (config.tp_enabled or config.sp_enabled):
        raise BatchError(
            f"the ParallelismConfig asks for tp_size = {config.tp_size} and sp_size = {config.sp_size} beside split"
            f" sequences. Leave them at 1 here; longspan.training.make_mesh has the recipe for tensor parallelism."
        )
