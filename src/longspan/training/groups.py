"""Process groups and meshes of training helpers, and `check_same`: do all ranks of a sequence have the same batch?

A data loader that gives them different samples makes each rank hold parts of different sequences, which nothing else
would detect. `check_same` sends int64 tensors of known size: first one digest per rank, and a row per key only if
digests differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longspan.errors import LongspanError
from longspan.layouts import Layout
from longspan.run.group import message_device, run_collective
from longspan.run.simulated import TAKEN, SimulatedRank
from longspan.spans import Ints
from longspan.validate import Group, group_handed, group_of, not_yet

# -- Process groups and meshes, and the package's error ----------------------------------------------------------------


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


# -- Equal batches on all ranks ----------------------------------------------------------------------------------------


NAME_BYTES = 64
_DIGEST = 4
"""int64 words of a sha256 digest."""
_PLAIN = (int, float, str, bool, type(None))


class DifferentBatchesError(BatchError):
    """Ranks of one sequence were fed different batches; `differences` says key by key where."""

    def __init__(self, num_ranks: int, differences: list[str]) -> None:
        self.differences = "; ".join(differences)
        super().__init__(
            f"the {num_ranks} ranks of the group must be fed the same batch before it is sharded, but"
            f" {self.differences}. Make the data loader deal by data-parallel rank alone (one sampler rank, seed and"
            f" epoch for all ranks of a sequence), or send rank 0's batch to the others."
        )


def check_same(batch: Mapping[str, Any], group: Group) -> None:
    """Returns if every rank of the group has the same batch, with the same keys, types, shapes and values; otherwise
    every rank raises the same error, with the keys that differ and the ranks that have something else than rank 0.

    Tensors are digested on the CPU, 7 ms per million ids: call it every step, or every thousandth.
    """
    members = process_group(group, "check_same")
    check_batch(batch, "check_same")
    names = sorted(batch)
    contents = [_digest(name, batch[name]) for name in names]
    unknown = sum(content is None for content in contents)
    rows = [np.zeros(_DIGEST, dtype=np.int64) if content is None else content for content in contents]
    total = _words(hashlib.sha256(b"".join(row.tobytes() for row in rows)).digest())
    heads = _gathered(np.concatenate(([len(names), unknown], total)), members)
    if heads[:, 1].any():
        raise BatchError(_no_digest(batch, contents, np.flatnonzero(heads[:, 1]).tolist()))
    if (heads == heads[0]).all():
        return
    table = np.zeros((int(heads[:, 0].max()), NAME_BYTES // 8 + _DIGEST), dtype=np.int64)
    for row, name, content in zip(table, names, rows, strict=False):
        label = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        row[:] = np.concatenate((np.frombuffer(label, dtype=np.int64), content))
    tables = _gathered(table.ravel(), members).reshape(members.size(), *table.shape)
    raise DifferentBatchesError(members.size(), _differences(tables, heads[:, 0].tolist()))


def _digest(name: str, value: Any) -> Ints | None:
    """Words that differ when key, type, shape or values do; None for what has no values to compare."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        if value.layout != torch.strided or isinstance(value, DTensor):
            return None  # equal ones may be stored differently, or each rank has a part
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        head = f"{name} {value.dtype} {tuple(value.shape)} "
        digest = hashlib.sha256(head.encode())
        digest.update(memoryview(raw))  # type: ignore[arg-type]  (numpy's stubs for 3.11 hide the buffer)
        return _words(digest.digest())
    if _is_plain(value):
        return _words(hashlib.sha256(f"{name} {value!r}".encode()).digest())
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return isinstance(value, _PLAIN)


def _words(digest: bytes) -> Ints:
    return np.frombuffer(digest, dtype=np.int64)


def _gathered(row: Ints, group: dist.ProcessGroup) -> Ints:
    """Every rank's row, by rank."""
    if isinstance(group, SimulatedRank):
        return group.meet("check_same", row, lambda rows: [np.stack(rows)] * len(rows))
    mine = torch.as_tensor(row.copy(), device=message_device(group))
    return torch.stack(all_gathered(mine, group)).cpu().numpy()


def _no_digest(batch: Mapping[str, Any], contents: list[Ints | None], ranks: list[int]) -> str:
    unread = [f"{n!r} ({_kind(batch[n])})" for n, c in zip(sorted(batch), contents, strict=True) if c is None]
    here = f" Here these are {', '.join(unread)}." if unread else ""
    return (
        f"check_same compares dense tensors, arrays, numbers, texts and lists of these, but on ranks {ranks} the batch"
        f" has values of other types.{here} Leave them out: check_same({{...}}, group) takes any part of a batch."
    )


def _kind(value: Any) -> str:
    name = type(value).__name__
    sparse = isinstance(value, Tensor) and value.layout != torch.strided
    return f"{name} of layout {value.layout}" if sparse else name


def _differences(tables: Ints, counts: list[int]) -> list[str]:
    """What is missing or other on which ranks, for each key where ranks differ."""
    words = NAME_BYTES // 8
    by_rank: list[dict[str, bytes]] = [{} for _ in counts]
    for contents, table, count in zip(by_rank, tables, counts, strict=True):
        for row in table[:count]:
            name = row[:words].tobytes().rstrip(b"\0").decode(errors="replace")
            contents[name] = contents.get(name, b"") + row[words:].tobytes()  # long names may begin alike
    parts: list[str] = []
    for name in sorted(set().union(*by_rank)):
        missing = [rank for rank, rows in enumerate(by_rank) if name not in rows]
        other = [rank for rank, rows in enumerate(by_rank) if name in rows and rows[name] != by_rank[0].get(name)]
        if missing:
            parts.append(f"{name!r} is missing on ranks {missing}")
        elif other:
            parts.append(f"{name!r} on ranks {other} is not what rank 0 has")
    return parts
