"""The ranks of a training run as a mesh with named axes.

A recipe, for data, sequence ("context") and tensor parallelism together:

    mesh = make_mesh(dp=2, cp=4, tp=2)
    parallelize_module(model, mesh.tp, ...)            # tensor parallel: heads and features
    fully_shard(model, mesh=mesh.dp_cp)                # parameters over both: their gradients are one mean
    plan = ls.plan(mask, layout, q_heads=heads // 2, kv_heads=kv_heads // 2, ...)  # heads that one tp rank has
    out = ls.attention(q, k, v, plan, group=mesh.cp)
    loss = token_loss(logits, labels, group=mesh.dp_cp, gradients="average")

- The data loader assigns samples by `mesh.dp.get_local_rank()`: all ranks of a `cp` (and `tp`) axis get the same batch.
  `check_same(batch, mesh.cp)` checks this.
- DDP: `DistributedDataParallel(model, process_group=mesh.dp_cp.get_group())`, and the same loss.
- Neither: sum gradients over `mesh.dp_cp`, and pass `gradients="sum"`.
- Learned sinks, biases and tensors that a score function captures are parameters like others: with FSDP, DDP or your
  own sum, pass `captured_grads="share"` to `longspan.attention`, or they are counted once per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan import _torch
from longspan._compile import sealed
from longspan.spans import LIMIT, whole
from longspan.training.groups import BatchError


@sealed
@dataclass(frozen=True)
class Mesh:
    """A mesh and its axes, each of one dimension."""

    whole: DeviceMesh
    dp: DeviceMesh
    """Different samples."""
    cp: DeviceMesh
    """Parts of one sequence: the group of `longspan.attention`."""
    tp: DeviceMesh
    """Parts of one layer: the same tokens, other heads. Neighbours, as their traffic is the densest."""
    dp_cp: DeviceMesh
    """dp and cp as one axis: over these the loss is one mean, and parameters are sharded or replicated."""


def make_mesh(*, dp: int = 1, cp: int = 1, tp: int = 1, device_type: str | None = None) -> Mesh:
    """The mesh of all ranks, `dp * cp * tp` of them; the device is this machine's accelerator, or else the CPU.

    The process group must be initialised. See the recipe at the top of this file.
    """
    if not dist.is_initialized():
        raise BatchError("make_mesh was called before torch.distributed.init_process_group. Call that first.")
    for name, size in (("dp", dp), ("cp", cp), ("tp", tp)):
        whole(size, name, "make_mesh()", BatchError, low=-LIMIT)
    if min(dp, cp, tp) < 1 or dp * cp * tp != dist.get_world_size():
        raise BatchError(
            f"make_mesh(dp={dp}, cp={cp}, tp={tp}) is a mesh of {dp * cp * tp} ranks, but there are"
            f" {dist.get_world_size()}. Choose sizes of 1 or more whose product is the number of ranks."
        )
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)  # a build with CUDA, a host without
        device_type = "cpu" if accelerator is None else accelerator.type
    try:
        torch.device(device_type)
    except (RuntimeError, TypeError) as error:
        raise BatchError(f"device_type = {device_type!r} was given, which torch does not know: use 'cpu'.") from error
    mesh = init_device_mesh(device_type, (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    return Mesh(mesh, mesh["dp"], mesh["cp"], mesh["tp"], _torch.flattened(mesh["dp", "cp"], "dp_cp"))
