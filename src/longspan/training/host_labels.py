"""Labels on the host: how many tokens have one decides sizes, which the host must know before it can go on.

Reading labels of a device when the loss is computed would wait for all that was queued before, the model's forward.
Whoever has the labels earlier starts a copy then (`start_copy`), and the loss finds it done.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.execution._torch import version


class _Copy(NamedTuple):
    labels: Tensor
    """Held, so that its memory is not that of other labels."""
    version: int
    host: Tensor
    event: Any

    def is_of(self, labels: Tensor) -> bool:
        """Whether these are the same numbers, unchanged, in any shape."""
        known = self.labels
        return (
            (labels.data_ptr(), labels.numel(), labels.dtype) == (known.data_ptr(), known.numel(), known.dtype)
            and labels.is_contiguous()
            and version(labels) == self.version
        )


_copies: deque[_Copy] = deque(maxlen=4)


def start_copy(labels: Tensor) -> None:
    """Begin to copy labels to the host, unless they are there or compiled code is traced."""
    if labels.device.type in ("cpu", "meta") or not labels.is_contiguous() or torch.compiler.is_compiling():
        return
    host = torch.empty(labels.numel(), dtype=labels.dtype, pin_memory=True)
    host.copy_(labels.detach().view(-1), non_blocking=True)
    event = torch.accelerator.current_stream(labels.device).record_event()
    _copies.append(_Copy(labels.detach(), version(labels), host, event))


def labels_on_host(labels: Tensor) -> Tensor:
    """Return flat labels as a CPU tensor. Waits for the device only if no copy of them was started before."""
    if labels.device.type == "cpu":
        return labels
    for copy in reversed(_copies):
        if copy.is_of(labels):
            if not copy.event.query():
                copy.event.synchronize()
            return copy.host
    return labels.cpu()


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device, without waiting for it."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)
