"""Process groups and collectives of training helpers, `check_same`, `make_mesh` and `attempt_store`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from longspan import _torch
from longspan._compile import opaque
from longspan.errors import LongspanError
from longspan.layouts import Layout
from longspan.run.group import message_device
from longspan.run.simulated import TAKEN, SimulatedRank
from longspan.spans import LIMIT, Ints, check_int
from longspan.validate import Group, describe_group, group_of, init_hint

# -- Process groups, and collectives over them -------------------------------------------------------------------------


class BatchError(LongspanError, ValueError):
    """An invalid batch, or invalid arguments of a training helper."""


def check_batch(batch: object, caller: str) -> None:
    """Check that a batch is a mapping."""
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"{caller} takes a mapping of names to tensors, as in {{'input_ids': ids}}, but got {type(batch).__name__}."
        )


def check_layout(layout: object, caller: str) -> None:
    """Check that a layout is one."""
    if not isinstance(layout, Layout):
        raise BatchError(f"{caller} takes a layout (see longspan.layouts), but got {type(layout).__name__}.")


def check_gradients(gradients: object) -> None:
    """Check an argument `gradients`."""
    if gradients not in ("sum", "average"):
        raise BatchError(
            f"gradients must be 'sum' if gradients of parameters are summed over the group after backward, or 'average'"
            f" if they are averaged (FSDP and DDP do that), but got {gradients!r}."
        )


def all_summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a tensor over the ranks, in place; without gradients."""
    if isinstance(group, SimulatedRank):
        return x.copy_(group.summed(x.detach().clone()))
    dist.all_reduce(x, group=group)
    return x


def all_gathered(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, which have one shape; without gradients."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return parts


def process_group(group: Any, caller: str, *, real: bool = False) -> dist.ProcessGroup:
    """Return the process group of a group or a mesh of one axis; a simulated rank counts as one, unless `real`."""
    group = group_of(group)
    if isinstance(group, SimulatedRank):
        if real:
            raise BatchError(f"{caller} needs a process group, but got a simulated rank. {TAKEN}")
        return cast(dist.ProcessGroup, group)
    if isinstance(group, DeviceMesh):
        raise BatchError(
            f"{caller} got a mesh of {group.ndim} axes {group.mesh_dim_names} as its group. Pass one axis, as in"
            f" mesh['cp'], or several of them flattened, as in make_mesh(...).dp_cp."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise BatchError(
            f"{caller} needs a process group or a mesh of one axis, but {describe_group(group)}. The group of all ranks"
            f" is torch.distributed.group.WORLD.{init_hint()}"
        )
    return group


# -- Equal batches on all ranks ----------------------------------------------------------------------------------------
# A data loader that gives ranks of a sequence different samples makes each rank hold parts of different sequences,
# which nothing else would detect. `check_same` sends int64 tensors of known size: first one digest per rank, and a row
# per key only if digests differ.


NAME_BYTES = 64
_DIGEST = 4
"""int64 words of a sha256 digest."""


class DifferentBatchesError(BatchError):
    """Ranks of one sequence got different batches; `differences` lists the keys."""

    def __init__(self, num_ranks: int, differences: list[str]) -> None:
        self.differences = "; ".join(differences)
        super().__init__(
            f"the {num_ranks} ranks of the group must be fed the same batch before it is sharded, but"
            f" {self.differences}. Make the data loader deal by data-parallel rank alone (one sampler rank, seed and"
            f" epoch for all ranks of a sequence), or send rank 0's batch to the others."
        )


def check_same(batch: Mapping[str, Any], group: Group) -> None:
    """Check that every rank of the group has the same batch, with the same keys, types, shapes and values; otherwise
    every rank raises the same error, with the keys that differ and the ranks that differ from rank 0.

    Tensors are hashed on the CPU, 7 ms per million ids: call it every step, or every thousandth.
    """
    members = process_group(group, "check_same")
    check_batch(batch, "check_same")
    names = sorted(batch, key=str)
    contents = [_digest(name, batch[name]) for name in names]
    unknown = sum(content is None for content in contents)
    rows = [np.zeros(_DIGEST, dtype=np.int64) if content is None else content for content in contents]
    total = np.frombuffer(hashlib.sha256(b"".join(row.tobytes() for row in rows)).digest(), dtype=np.int64)
    heads = _gather_rows(np.concatenate(([len(names), unknown], total)), members)
    if heads[:, 1].any():
        unread = [f"{n!r} ({_kind(batch[n])})" for n, c in zip(names, contents, strict=True) if c is None]
        here = f" Here these are {', '.join(unread)}." if unread else ""
        raise BatchError(
            f"check_same compares dense tensors, arrays, numbers, texts and lists of these, but on ranks"
            f" {np.flatnonzero(heads[:, 1]).tolist()} the batch has values of other types.{here} Leave them out:"
            f" check_same({{...}}, group) takes any part of a batch."
        )
    if (heads == heads[0]).all():
        return
    table = np.zeros((int(heads[:, 0].max()), NAME_BYTES // 8 + _DIGEST), dtype=np.int64)
    for row, name, content in zip(table, names, rows, strict=False):
        label = str(name).encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        row[:] = np.concatenate((np.frombuffer(label, dtype=np.int64), content))
    tables = _gather_rows(table.ravel(), members).reshape(members.size(), *table.shape)
    raise DifferentBatchesError(members.size(), _differences(tables, heads[:, 0].tolist()))


def _digest(name: str, value: Any) -> Ints | None:
    """Return a hash of key, type, shape and values; None for types that cannot be compared."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSUMm" and value.dtype.char not in "gG":
        digest = hashlib.sha256(f"{name} {value.dtype.str} {value.shape} ".encode() + value.tobytes())
    elif isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized or isinstance(value, DTensor):
            return None  # equal ones may be stored differently, or each rank has a part
        dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        head = f"{name} {value.dtype} {tuple(value.shape)} "
        digest = hashlib.sha256(head.encode())
        digest.update(memoryview(dense.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]  (numpy's stubs)
    elif _is_plain(value):
        digest = hashlib.sha256(f"{name} {value!r}".encode())
    else:
        return None
    return np.frombuffer(digest.digest(), dtype=np.int64)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return isinstance(value, int | float | str | bool | None)


def _gather_rows(row: Ints, group: dist.ProcessGroup) -> Ints:
    """Return every rank's row, by rank."""
    if isinstance(group, SimulatedRank):
        return group.meet("check_same", row, lambda rows: [np.stack(rows)] * len(rows))
    mine = torch.as_tensor(row.copy(), device=message_device(group))
    return torch.stack(all_gathered(mine, group)).cpu().numpy()


def _kind(value: Any) -> str:
    name = type(value).__name__
    sparse = isinstance(value, Tensor) and value.layout != torch.strided
    return f"{name} of layout {value.layout}" if sparse else name


def _differences(tables: Ints, counts: list[int]) -> list[str]:
    """Describe, for each key, on which ranks it is missing or different."""
    words = NAME_BYTES // 8
    by_rank: list[dict[str, bytes]] = [{} for _ in counts]
    for contents, table, count in zip(by_rank, tables, counts, strict=True):
        for row in table[:count]:
            name = row[:words].tobytes().rstrip(b"\0").decode(errors="replace")
            contents[name] = contents.get(name, b"") + row[words:].tobytes()  # long names may have the same beginning
    parts: list[str] = []
    for name in sorted(set().union(*by_rank)):
        missing = [rank for rank, rows in enumerate(by_rank) if name not in rows]
        other = [rank for rank, rows in enumerate(by_rank) if name in rows and rows[name] != by_rank[0].get(name)]
        if missing:
            parts.append(f"{name!r} is missing on ranks {missing}")
        elif other:
            parts.append(f"{name!r} on ranks {other} is not what rank 0 has")
    return parts


# -- The ranks of a training run as a mesh -----------------------------------------------------------------------------


@opaque
@dataclass(frozen=True)
class Mesh:
    """A mesh and its axes, each of one dimension."""

    whole: DeviceMesh
    dp: DeviceMesh
    """Different samples."""
    cp: DeviceMesh
    """Parts of one sequence: the group of `longspan.attention`."""
    tp: DeviceMesh
    """Parts of one layer: the same tokens, other heads. Neighbouring ranks, since they exchange most."""
    dp_cp: DeviceMesh
    """dp and cp as one axis: over these the loss is one mean, and parameters are sharded or replicated."""


def make_mesh(
    *, ranks: int | None = None, dp: int = 1, cp: int | None = None, tp: int = 1, device_type: str | None = None
) -> Mesh:
    """Return the mesh of all `dp * cp * tp` ranks; the device is this machine's accelerator, or else the CPU.

    `ranks` stands for `dp * cp`, as in `longspan.batches`: `make_mesh(ranks=n)` has one axis of n ranks that share
    sequences, and `make_mesh(ranks=n, cp=m)` has groups of m (`ranks_per_group`).

    The process group must be initialized. A recipe, for data, sequence ("context") and tensor parallelism together::

        mesh = make_mesh(dp=2, cp=4, tp=2)
        parallelize_module(model, mesh.tp, ...)            # tensor parallel: heads and features
        fully_shard(model, mesh=mesh.dp_cp)                # parameters over both: their gradients are one mean
        plan = ls.plan(mask, layout, q_heads=heads // 2, kv_heads=kv_heads // 2, ...)  # heads of one tp rank
        out = ls.attention(q, k, v, plan, group=mesh.cp)
        loss = token_loss(logits, labels, group=mesh.dp_cp, gradients="average")

    - The data loader assigns samples by `mesh.dp.get_local_rank()`: all ranks of a `cp` (and `tp`) axis get the same
      batch. `check_same(batch, mesh.cp)` checks this.
    - DDP: `DistributedDataParallel(model, process_group=mesh.dp_cp.get_group())`, and the same loss.
    - Neither: sum gradients over `mesh.dp_cp`, and pass `gradients="sum"`.
    - Learned sinks, biases and tensors that a score function captures are parameters like others: with FSDP, DDP or
      your own sum, pass `captured_grads="share"` to `longspan.attention`, or they are counted once per rank.
    """
    if not dist.is_initialized():
        raise BatchError("make_mesh was called before torch.distributed.init_process_group. Call that first.")
    cp = (1 if ranks is None else ranks) if cp is None else cp
    for name, size in (("dp", dp), ("cp", cp), ("tp", tp), ("ranks", 1 if ranks is None else ranks)):
        check_int(size, name, "make_mesh()", BatchError, low=-LIMIT)
    if ranks is not None:
        if dp != 1 or min(ranks, cp) < 1 or ranks % cp:
            raise BatchError(
                f"`ranks` must be a multiple of cp, without dp, but got ranks={ranks}, cp={cp} and dp={dp}. dp is ranks"
                f" / cp."
            )
        dp = ranks // cp
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
        raise BatchError(
            f"device_type must be a device type of torch, such as 'cpu', but got {device_type!r}."
        ) from error
    mesh = init_device_mesh(device_type, (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    return Mesh(mesh, mesh["dp"], mesh["cp"], mesh["tp"], _torch.flatten_mesh(mesh["dp", "cp"], "dp_cp"))


# -- Restarts ----------------------------------------------------------------------------------------------------------


def attempt_store(timeout: float = 60.0) -> Any:
    """Return the launcher's store under a prefix of this attempt, for `init_process_group(store=..., rank=...)`.

    After `torchrun --max-restarts` has started all ranks again, the store still holds the addresses of processes that
    are gone, and Gloo would try to reach those.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        raise BatchError(
            f"attempt_store() needs the variables of a launcher, but {', '.join(missing)} are not set. Start the ranks"
            f" with torchrun, or pass a store of your own to init_process_group."
        )
    return _torch.attempt_store_of(timedelta(seconds=timeout))
