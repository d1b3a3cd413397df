"""Start and stop a rank's companion: the watcher process (`watcher.py`), one per process and store."""

from __future__ import annotations

import atexit
import os
import subprocess  # nosec B404  # the watcher beside the rank
import sys
import threading
from pathlib import Path

from longspan.watch.processes import NOWHERE, Process
from longspan.watch.store import Store
from longspan.watch.store_client import StoreClient

MAX_MADE = 3
"""How many watchers are started for a process, should they end by themselves."""
_companions: dict[tuple[str, int], Companion] = {}
_lock = threading.Lock()


class Companion:
    """A watcher of this process that speaks to one store."""

    def __init__(self, address: tuple[str, int], me: Process, made: int) -> None:
        self.made = made
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("watcher.py"))]
        self.pid, self.keys = os.getpid(), set[bytes]()
        self.process = subprocess.Popen(  # noqa: S603  # nosec B603  # a file of this package, with numbers
            [*command, address[0], str(address[1]), str(me.pid), str(me.start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what Ctrl-C ends is the rank; the watcher says so
        )
        atexit.register(self.end)

    def writes(self, key: bytes) -> bool:
        """Whether it writes signs of life under this key from now on."""
        if self.process.poll() is not None or self.process.stdin is None:
            return False
        if key not in self.keys:
            self.keys.add(key)
            try:
                self.process.stdin.write(key + b"\n")
                self.process.stdin.flush()
            except OSError:
                return False
        return True

    def end(self) -> None:
        if os.getpid() != self.pid or self.process.stdin is None:  # a forked child has no companion
            return
        try:
            self.process.stdin.write(b"end\n")
            self.process.stdin.close()
            self.process.wait(2.0)
        except OSError:
            self.process.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def companion_of(store: Store, me: Process, key: str) -> bool:
    """Whether a watcher shows that this process lives, under this key of the store; started when first asked for."""
    if not isinstance(store, StoreClient) or me.host == NOWHERE or not sys.executable:
        return False
    with _lock:
        companion = _companions.get(store.address)
        if companion is None or companion.pid != os.getpid() or companion.process.poll() is not None:
            num_started = companion.made if companion is not None and companion.pid == os.getpid() else 0
            if num_started == MAX_MADE:
                return False
            try:
                companion = _companions[store.address] = Companion(store.address, me, num_started + 1)
            except OSError:
                return False
    return companion.writes(store.whole_key(key))
