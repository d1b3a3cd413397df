"""Tables on a device that calls share: computed once, waited for by other streams, and bounded."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.planning.kernel_memory import table_limit

T = TypeVar("T")
CPU = torch.device("cpu")


def stream_of(device: torch.device) -> Any:
    """Return the current stream of a device, or None if the device has no streams."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_not_capturing(device: torch.device) -> None:
    """Raise in a capture of a CUDA graph: replays would copy from memory of the host that was freed."""
    if is_capturing(device):
        raise PlanError(
            "a plan must have run once before a call with it is captured in a CUDA graph: its first call copies"
            " tables to the device. Run the call before the capture."
        )


class Copied:
    """Tables on a device, and the stream on which they were copied or computed: other streams wait for it."""

    in_graphs: ClassVar[set[Copied]] = set()
    """Tables whose addresses are in CUDA graphs, which may be replayed at any time."""

    def __init__(self, device: torch.device, *tensors: Tensor) -> None:
        self.device, self.tensors = device, tensors
        self._stream = stream_of(device)
        self._event = None if self._stream is None else self._stream.record_event()

    def use(self) -> None:
        """Order the copy before what the current stream does next, and the release of the tables after it.

        A capture of a CUDA graph began after the copy, since a device is synchronized before a capture. The graph has
        the tables' addresses from now on.
        """
        if self._stream is None:
            return
        if is_capturing(self.device):
            self.in_graphs.add(self)
        elif (stream := stream_of(self.device)) != self._stream:
            stream.wait_event(self._event)
            for tensor in self.tensors:
                tensor.record_stream(stream)


def has_contents() -> bool:
    """Return whether new tensors have contents: they have none under a FakeTensorMode."""
    return type(torch.empty(0, device=CPU)) is Tensor


def build_shared(build: Callable[[], T]) -> tuple[T, bool]:
    """Return tables that inference and training can share, and whether they can be cached.

    Tensors that are created in inference mode cannot be saved for backward.
    """
    with torch.inference_mode(False), torch.no_grad():
        return build(), has_contents()


def keep_recent(least: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache the tables that a function of positional arguments puts on a device.

    Keep those used last, up to `table_limit()` bytes, but at least `least` of them, so that a plan with large tables
    does not build them again in every layer.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        entries: OrderedDict[Any, tuple[T, Copied, int]] = OrderedDict()
        lock, building = threading.RLock(), threading.RLock()  # a call does not wait while a thread builds other tables
        for each in (lock, building):
            os.register_at_fork(after_in_child=each._at_fork_reinit)  # type: ignore[attr-defined]
        total = 0

        def find(key: Any) -> tuple[T, Copied, int] | None:
            with lock:
                if key in entries:
                    entries.move_to_end(key)
                return entries.get(key)

        def build(key: Any) -> tuple[T, Copied, int]:
            nonlocal total
            device = next((_device_of(leaf) for leaf in _leaves(key) if isinstance(leaf, Tensor | torch.device)), CPU)
            if not has_contents():
                device = CPU  # fake tensors need no streams, and their device may be missing
            check_not_capturing(device)
            value, can_cache = build_shared(lambda: function(*key))
            leaves = list(_leaves(value))
            copied = Copied(device, *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
            entry = value, copied, sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
            if can_cache:
                with lock:
                    entries[key] = entry
                    total += entry[2]
                    while total > table_limit() and len(entries) > least:
                        total -= entries.popitem(last=False)[1][2]
            return entry

        @wraps(function)
        def cached(*key: Any) -> T:
            entry = find(key)
            if entry is None:
                with building:
                    entry = find(key) or build(key)
            value, copied, _ = entry
            copied.use()
            return value

        def cache_clear() -> None:
            nonlocal total
            with lock:
                entries.clear()
                total = 0

        cached.cache_clear = cache_clear  # pyright: ignore[reportAttributeAccessIssue]
        return cached

    return decorate


def _device_of(value: Tensor | torch.device) -> torch.device:
    return value.device if isinstance(value, Tensor) else value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all values in tuples and dataclasses."""
    if is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in fields(value))
    if isinstance(value, tuple):
        for part in cast("tuple[Any, ...]", value):
            yield from _leaves(part)
    else:
        yield value
