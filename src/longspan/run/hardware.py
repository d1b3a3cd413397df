"""The machine that a process group runs on: its devices, their kernel, and how many ranks share a host."""

from __future__ import annotations

import hashlib
import logging
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspan.errors import PlanError
from longspan.kernels.cuda_flash import implementation
from longspan.planning.machine import CPU, GPUS, Machine, assumed_machine, machine_of, on_hosts
from longspan.run.group import Members, backends_of, members_of
from longspan.run.simulated import SimulatedRank
from longspan.validate import check_axes, describe_group, group_of, init_hint

_log = logging.getLogger("longspan")
_WIDTHS = (64, 96, 16)
"""Bytes of a host, a device and a kernel in a row."""


def machine_of_group(group: Any, *, functions: bool) -> tuple[Machine, bool]:
    """Return the machine that the ranks run on, the same on every rank, and whether its speed is assumed.

    It is assumed for unknown devices and without NCCL, also on CPUs. `group` is a process group, a mesh of one axis, or
    a simulated rank. `functions`: the mask has one. Ranks exchange the names of hosts and devices once for each group.
    """
    assumed = assumed_machine(functions=functions), True
    check_axes(group := group_of(group))
    if isinstance(group, SimulatedRank):
        return assumed
    if not isinstance(group, dist.ProcessGroup):
        raise PlanError(
            f"`group` must be a process group or a mesh of one axis, but {describe_group(group)}.{init_hint()}"
        )
    if not torch.cuda.is_available() and not torch.accelerator.is_available():
        return CPU, True
    if not torch.cuda.is_available() or backends_of(str(dist.get_backend_config(group))).get("cuda") != "nccl":
        return assumed
    members = members_of(group)
    if not members.machines:
        members.machines.update(_find_machines(group, members))
    return members.machines[functions]


def _find_machines(group: dist.ProcessGroup, members: Members) -> dict[bool, tuple[Machine, bool]]:
    """Return the machine for masks without and with functions, and whether its speed is assumed."""
    texts = _host(), torch.cuda.get_device_name(group.bound_device_id), implementation()
    row = b"".join(text.encode()[:width].ljust(width) for text, width in zip(texts, _WIDTHS, strict=True))
    rows = members.gather(row, torch.device("cpu"))
    rows = rows if len(rows) == group.size() else rows * group.size()  # a single row if all are equal
    host_width, gpu_width, _ = _WIDTHS
    hosts = [row[:host_width] for row in rows]
    gpus, kernels = (
        {row[part].decode(errors="replace").strip() for row in rows}
        for part in (slice(host_width, host_width + gpu_width), slice(host_width + gpu_width, None))
    )
    if group.rank() == 0 and not gpus <= GPUS.keys():
        _log.warning(
            "scheme='auto' compares schemes by the speed of H100s: Longspan has no figures for %s. Pass machine=, one"
            " of longspan.planning.MACHINES, or a machine that `longspan doctor --out` has measured.",
            ", ".join(sorted(gpus - GPUS.keys())),
        )
    kernel = min(kernels) if len(kernels) == 1 else "FA2"
    machines: dict[bool, tuple[Machine, bool]] = {}
    for functions in (False, True):
        preset = machine_of(gpus, "flex" if functions else kernel)
        machines[functions] = on_hosts(preset or assumed_machine(functions=functions), hosts), preset is None
    return machines


def _host() -> str:
    """Return a text that is the same for all processes of a host, in containers, too."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.sha256(name.encode()).hexdigest()
