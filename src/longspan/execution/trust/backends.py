"""What a group can send, and how: which backend serves which device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def message_device(group: dist.ProcessGroup, wanted: torch.device | None = None) -> torch.device:
    """A device whose tensors this group can send: the CPU, or else the wanted one, or else this process's own.

    Never one without its index: NCCL would take the current device for it, which may be the same on all ranks.
    """
    if "cpu" in _backends(str(dist.get_backend_config(group))):
        return torch.device("cpu")
    device = wanted
    if device is None or device.type == "cpu":
        device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.index is not None:
        return device or torch.device("cpu")
    return group.bound_device_id or torch.device(device.type, torch.accelerator.current_device_index())


def first_waits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's first operation on such a device waits for all ranks. All backends but Gloo are assumed
    to."""
    backend = _backends(str(dist.get_backend_config(group))).get(device.type, "gloo")
    return group.size() > 1 and backend != "gloo"


def is_captured(device: torch.device) -> bool:
    """Whether what is begun here goes into a CUDA graph: it is done whenever that is replayed, and cannot be polled."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def token_on(device: torch.device) -> Tensor:
    """One byte to send."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


def works_of(started: Any) -> list[Any]:
    """The works in what was started: one, several, or several each with its peer.

    >>> works_of("a"), works_of(["a", "b"]), works_of([(1, "a"), (2, "b")])
    (['a'], ['a', 'b'], ['a', 'b'])
    """
    found = started if isinstance(started, list) else [started]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in found]


def _backends(config: str) -> dict[str, str]:
    """The backend for each type of device, as PyTorch writes it.

    >>> _backends("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return dict(part.split(":", 1) for part in config.split(",") if ":" in part)
