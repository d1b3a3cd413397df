"""Buffers: the memory of messages, taken again within a call as soon as nobody uses it.

A freed message goes back to PyTorch's allocator, but on GPUs not at once: sending and receiving over NCCL records that
another stream uses the memory, so it is free only when that stream has come past it. A host that runs ahead of the
GPU, as it should, would be given new memory for the messages of every step. Here they are taken again in the order of
the host: whoever reads a message has been queued on the current stream by then, and new messages begin behind that
stream.

A ring of four ranks, each message R bytes, sent on in the step after it arrived: three buffers, not six::

    step     sends    receives    held and read
    0        a        b
    1        a        c           b
    2        a        b           c
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.execution import _torch

SLACK = 8
"""A buffer may be larger than its message by one part in so many."""


class Buffers:
    """Those of one rank's run."""

    def __init__(self) -> None:
        self._all: list[Tensor] = []

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """So many bytes, in no particular state: the smallest buffer that is free and fits, or a new one.

        >>> buffers = Buffers()
        >>> first = buffers.take(80, torch.device("cpu"))
        >>> row, place = first[:16].view(torch.float32), first.data_ptr()
        >>> buffers.take(80, torch.device("cpu")).data_ptr() == place
        False
        >>> del first
        >>> buffers.take(80, torch.device("cpu")).data_ptr() == place  # the row is a view of it
        False
        >>> del row
        >>> buffers.take(76, torch.device("cpu")).data_ptr() == place
        True
        """
        fits = [
            whole
            for whole in self._all
            if num_bytes <= whole.numel() <= num_bytes + num_bytes // SLACK
            and whole.device == device
            and not is_shared(whole)
        ]
        if fits:
            return min(fits, key=Tensor.numel)[:num_bytes]
        self._all.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        return self._all[-1][:num_bytes]

    def release(self) -> None:
        """Lets go of buffers that are free: a plan's memory is that of messages that are there."""
        self._all = [whole for whole in self._all if is_shared(whole)]


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor has the same memory.

    >>> whole = torch.empty(8)
    >>> part = whole[2:]
    >>> is_shared(whole), is_shared(torch.empty(8))
    (True, False)
    """
    return _torch.num_users(tensor.untyped_storage()._cdata) > 2  # beside the tensor there is who asks
