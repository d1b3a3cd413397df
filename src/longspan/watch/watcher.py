"""The watcher: a small process next to a rank, which writes the rank's signs of life for ranks on other hosts.

It is started as its own program (`python -I -S watcher.py HOST PORT PID START`) and needs nothing from the rank, so it
works while the rank holds the interpreter's lock. Every line that it reads is a key of the job's store to which it
writes signs of life. It ends on request, when the rank is gone, and when the store is gone; if its input ends without a
request, the rank is about to exit.
"""

from __future__ import annotations

import importlib.util
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

BEAT = 0.25
"""Seconds between signs of life."""
AFTER = 2.0
"""Seconds after the end of its input within which a rank that dies is gone."""
END = b"end"
"""The line that ends a watcher."""
DEADLINE = 30.0
"""Seconds after which a store that does not answer is given up."""


def _beside(name: str) -> Any:
    """A file of this folder, without the package around it, which would load PyTorch."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def watch(host: str, port: int, pid: int, start: int) -> None:
    """Looks at the rank until it is gone, or until nobody wants to know any more."""
    processes, clients = _beside("processes"), _beside("store_client")
    store = clients.StoreClient((host, port), "", DEADLINE)
    keys, begun, number, until = [], b"", 0, None
    while True:
        number += 1
        sight = processes.seen(processes.Process(b"", pid, start))
        record = processes.LIFE.pack(processes.LIFE_MARK, number, sight.state.encode(), sight.seconds)
        for key in keys:
            store.set_raw(key, record)
        if sight.state == processes.GONE or (until is not None and time.monotonic() > until):
            return
        if until is not None:
            time.sleep(BEAT / 10)
        elif select.select([0], [], [], BEAT)[0]:
            more = os.read(0, 4096)
            *lines, begun = (begun + more).split(b"\n")
            if END in lines:
                return
            keys += lines
            until = None if more else time.monotonic() + AFTER


if __name__ == "__main__":
    try:
        watch(sys.argv[1], *map(int, sys.argv[2:5]))
    except Exception:  # nobody reads what it says
        sys.exit(1)
