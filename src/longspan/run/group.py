"""State of a process group in this process: its backends, numbers and tags of calls, and agreement on new ones."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from longspan.planning.machine import Machine
from longspan.run import agreement
from longspan.run.agreement import Record, RowStore

# -- Backends of a group -----------------------------------------------------------------------------------------------


def message_device(group: dist.ProcessGroup, wanted: torch.device | None = None) -> torch.device:
    """Return a device whose tensors this group can send: the CPU, else `wanted`, else the current accelerator.

    An accelerator always has an index: without one NCCL uses the current device, which may be the same on all ranks.
    """
    if "cpu" in backends_of(str(dist.get_backend_config(group))):
        return torch.device("cpu")
    device = wanted
    if device is None or device.type == "cpu":
        device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.index is not None:
        return device or torch.device("cpu")
    return group.bound_device_id or torch.device(device.type, torch.accelerator.current_device_index())


def first_waits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's first operation on such a device waits for all ranks (any backend except Gloo)."""
    backend = backends_of(str(dist.get_backend_config(group))).get(device.type, "gloo")
    return group.size() > 1 and backend != "gloo"


def backends_of(config: str) -> dict[str, str]:
    """Parse PyTorch's backend config into backends by device type.

    >>> backends_of("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return dict(part.split(":", 1) for part in config.split(",") if ":" in part)


# -- Members of a group, and their calls -------------------------------------------------------------------------------


MAX_AGREED = 1024
_known: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()


@dataclass(frozen=True)
class Call:
    """One pass over one plan."""

    fingerprint: str
    direction: str
    device: torch.device
    record: Record | None = None
    """Compared between ranks before data moves; None for a backward pass, whose forward was compared."""
    name: str = ""
    """The user's name for the call, which distinguishes calls of one plan."""
    forward: int = 0
    """For a backward pass, the number of its forward."""

    def tag(self, number: int) -> int:
        """Return the tag of the messages of this call's first step; those of later steps follow.

        With tags (Gloo), messages of different calls never match: if a rank skips or swaps a call, others wait until
        the group's timeout, and no data is mixed up. Tags have 31 bits, the lower 10 of which are the step's. The upper
        21 distinguish calls: those of one plan within two million calls, those of different plans, or backward passes
        of different forwards, with a chance of error of 1 in two million.
        """
        which = zlib.crc32(f"{self.fingerprint} {self.direction} {self.forward} {self.name}".encode())
        return ((which + number * 0x9E3779B1) & 0x1FFFFF) * (MAX_STEP + 1)


MAX_STEP = 0x3FF
"""The largest step that a tag tells apart. Messages of steps that share a tag arrive in order."""


class Members:
    """State of one process group in this process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)  # weak, so that a destroyed group is freed
        self.calls = 0
        self.agreed: dict[bytes, None] = {}
        self.met: set[str] = set()
        """Device types whose first operation all ranks have joined."""
        self.machines: dict[bool, tuple[Machine, bool]] = {}
        """The machine that the ranks run on, and whether it is assumed, for masks without and with functions."""

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "a group outlives the calls over it"
        return group

    @cached_property
    def store(self) -> RowStore:
        return RowStore(self.group)

    def begin(self, call: Call) -> int:
        """Return the number of a call. The first time the group makes it, all ranks compare its record."""
        self.calls += 1
        if call.record is not None and call.record.digest not in self.agreed:
            agreement.compare(self.gather(call.record.row(), call.device))
            self.agreed[call.record.digest] = None
            if len(self.agreed) > MAX_AGREED:  # all ranks made the same calls, so all forget the same one
                del self.agreed[next(iter(self.agreed))]
        if call.device.type not in self.met:
            self._meet(call.device)
        return self.calls

    def gather(self, row: bytes, device: torch.device) -> list[bytes]:
        """Return every rank's row, or one row if all are equal. Uses no accelerator, whose queue may be long."""
        if "fake" in str(dist.get_backend_config(self.group)):  # ranks that do not exist
            return [row]
        if message_device(self.group, device).type == "cpu":
            return agreement.gather_by_messages(row, self.group)
        return self.store.gather(row)

    def _meet(self, device: torch.device) -> None:
        """Wait for all ranks in the first operation on devices of this type.

        NCCL creates a group's communicator in the first operation, which waits for all ranks, but a plan may leave some
        of them without a message. Records are compared before, so that a rank with tensors on another device is named
        instead of waited for.
        """
        if first_waits(self.group, device):
            dist.all_reduce(torch.zeros(1, dtype=torch.uint8, device=device), group=self.group)
        self.met.add(device.type)


def members_of(group: dist.ProcessGroup) -> Members:
    """Return the state of a group in this process."""
    members = _known.get(group)
    if members is None:
        members = _known[group] = Members(group)
    return members
