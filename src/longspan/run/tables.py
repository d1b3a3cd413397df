"""Tables of a program on a device: the runs of its moves and the index arrays of its kernel, in one buffer.

A program's tables are one array of int64 on the host. At first use on a device it is copied from pinned memory, without
waiting, as one copy. A table has one line per run of rows, so that its size does not depend on tokens and heads. Tables
that were used last stay on the device, up to `table_limit()` bytes (`planning/kernel_memory.py`); others are copied
again when they are needed.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.device_tables import Copied, check_not_capturing
from longspan.planning.kernel_memory import table_limit
from longspan.spans import Ints

LINE_UNIT = 2
"""Index arrays begin at multiples of this many int64: kernels read 16 bytes at once."""


class HostTables:
    """The tables of a program: lines of runs, then int32 arrays by launch and name."""

    def __init__(self, lines: list[Ints], arrays: dict[int, Mapping[object, NDArray[np.int32]]]) -> None:
        parts: list[Ints] = [part.reshape(-1) for part in lines]
        size = sum(len(part) for part in parts)
        self.places: dict[int, dict[object, tuple[int, int]]] = {}
        """Where the arrays of each launch begin, and their sizes, in int32."""
        for launch, named in arrays.items():
            for name, array in named.items():
                parts.append(np.zeros(-size % LINE_UNIT, dtype=np.int64))
                size += len(parts[-1])
                self.places.setdefault(launch, {})[name] = 2 * size, len(array)
                parts.append(np.append(array, np.zeros(len(array) % 2, dtype=np.int32)).view(np.int64))
                size += len(parts[-1])
        self.numbers: Ints = np.concatenate(parts) if size else np.zeros(1, dtype=np.int64)


class DeviceTables:
    """A program's tables on a device. They may be freed at any time by those who do not use them."""

    def __init__(self, host: HostTables, device: torch.device) -> None:
        check_not_capturing(device)
        self.numbers = copy_to_device(host.numbers, device)
        self.copied = Copied(device, self.numbers)
        short = self.numbers.view(torch.int32) if host.places else self.numbers
        self.index: dict[int, dict[object, Tensor]] = {
            launch: {name: short[start : start + size] for name, (start, size) in places.items()}
            for launch, places in host.places.items()
        }
        """Index arrays by launch and name."""


def copy_to_device(numbers: Ints, device: torch.device) -> Tensor:
    """Copy an array to a device in one copy, for which the host does not wait.

    The source is new pinned memory, which PyTorch reuses only after the copy.
    """
    source = torch.from_numpy(numbers)
    if device.type in ("cpu", "meta"):
        return source.to(device)
    pinned = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
    return pinned.copy_(source).to(device, non_blocking=True)


class TableCache:
    """Tables of programs by device, those that were used last, up to a number of bytes on each device."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run inside of a method
        self._tables: dict[torch.device, OrderedDict[int, DeviceTables]] = {}
        self._sizes: dict[torch.device, int] = {}
        self._finalized: set[tuple[int, torch.device]] = set()

    def get(self, program: Any, device: torch.device) -> DeviceTables:
        """Return the tables of a program, which has `host_tables`, on a device."""
        with self._lock:
            tables, key = self._tables.setdefault(device, OrderedDict()), id(program)
            entry = tables.get(key)
            if entry is not None:
                tables.move_to_end(key)
                entry.copied.use()
                return entry
            entry = tables[key] = DeviceTables(program.host_tables, device)
            if (key, device) not in self._finalized:
                self._finalized.add((key, device))
                weakref.finalize(program, self._forget, key, device).atexit = False
            self._sizes[device] = self._sizes.get(device, 0) + entry.numbers.nbytes
            while self._sizes[device] > table_limit() and tables:
                self._drop(next(iter(tables)), device)
            return entry

    def _drop(self, program: int, device: torch.device) -> None:
        dropped = self._tables[device].pop(program, None)
        if dropped is not None:
            self._sizes[device] -= dropped.numbers.nbytes

    def _forget(self, program: int, device: torch.device) -> None:
        with self._lock:
            self._finalized.discard((program, device))
            self._drop(program, device)

    def num_bytes(self, device: torch.device) -> int:
        """Return the bytes of the tables that are kept on a device."""
        return self._sizes.get(device, 0)


CACHE = TableCache()
