"""Inspect processes through the operating system: whether one exists, is stopped, or is busy.

A process that holds the interpreter's lock for a minute cannot send heartbeats, but it can be inspected.

Run as a program (`python -I -S processes.py HOST PORT PID START`), this file is the watcher: a small process next to a
rank that writes the rank's heartbeats to the job's store, for ranks on other hosts, even while the rank holds the
interpreter's lock. Each line of its input is a key to write to. It exits on the line "end", when the rank has ended,
and when the store is lost; if its input ends without that line, the rank is about to exit. It imports the standard
library and `store_client.py` only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import select
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

GONE, STOPPED, TRACED, UNKNOWN = "X", "T", "t", "?"
"""States of a process, next to the system's own letters: has ended, is stopped, is held by a debugger (which will let
it continue), cannot be inspected (no reason to think it dead)."""
UNKNOWN_HOST = bytes(16)
"""The host of a process that cannot be inspected from anywhere."""
HEARTBEAT = struct.Struct("<4sQcd")
"""What a watcher writes: magic number, a count, the state of its rank's process, and processor seconds."""
HEARTBEAT_MAGIC = b"LSl1"
BEAT = 0.25
"""Seconds between heartbeats."""
EXIT_TIME = 2.0
"""Seconds within which a rank is gone after the watcher's input has ended."""
STORE_TIMEOUT = 30.0
"""Seconds after which a watcher gives up a store that does not answer."""


class Process(NamedTuple):
    """A process, by its host, its number there, and its start time."""

    host: bytes
    pid: int
    start: int


class ProcessState(NamedTuple):
    """The state of a process at one moment."""

    state: str
    seconds: float = 0.0
    """Processor time used so far."""


def current_process() -> Process:
    """Return this process.

    >>> inspect_process(current_process()).state in "RSD?"
    True
    """
    pid = os.getpid()
    stat = _read_stat(pid)
    if stat is None or os.readlink("/proc/self") != str(pid):  # /proc is another container's
        return Process(UNKNOWN_HOST, pid, 0)
    return Process(_host(), pid, stat[2])


def _host() -> bytes:
    """Return an id that is equal for processes that can inspect each other by pid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).digest()[:16]
    except OSError:
        return UNKNOWN_HOST


def inspect_process(process: Process) -> ProcessState:
    """Return the state of a process of this host.

    >>> inspect_process(Process(b"", os.getpid(), 1)).state  # another process had this pid before
    'X'
    """
    stat = _read_stat(process.pid)
    if stat is None:  # it has ended, or is hidden, or this process has no file descriptor left
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return ProcessState(GONE)
        except OSError:
            pass
        return ProcessState(UNKNOWN)
    state, seconds, start = stat
    return ProcessState(GONE if start != process.start or state in "ZXx" else state, seconds)


def _read_stat(pid: int | str) -> tuple[str, float, int] | None:
    """Return (state, processor seconds, start) of a process or thread, or None if they cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # plain: it is read many times a second
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def is_asleep(thread: int | None) -> bool:
    """Whether a thread of this process waits for anything but a processor; True if that cannot be read."""
    stat = None if thread is None else _read_stat(f"self/task/{thread}")
    return stat is None or stat[0] != "R"


def find_listener(port: int) -> Process | None:
    """Return the process of this host that listens on a port: the oldest that holds the socket, since forked children
    hold it, too."""
    targets = set[str]()
    for name in ("tcp", "tcp6"):
        try:
            rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        except OSError:
            continue
        targets |= {
            f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
        }
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if targets else []
    except OSError:
        return None
    holders = [(stat[2], pid) for pid in pids if _holds_socket(pid, targets) and (stat := _read_stat(pid)) is not None]
    if not holders:
        return None
    start, pid = min(holders)
    return Process(_host(), pid, start)


def _holds_socket(pid: int, targets: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}") in targets:
                return True
        except OSError:
            continue
    return False


def _run_watcher(host: str, port: int, pid: int, start: int) -> None:
    # The package around this file would import torch, so its sibling is loaded as a file.
    spec = importlib.util.spec_from_file_location("store_client", Path(__file__).with_name("store_client.py"))
    assert spec is not None
    assert spec.loader is not None
    store_client = importlib.util.module_from_spec(spec)
    sys.modules["store_client"] = store_client
    spec.loader.exec_module(store_client)
    store = store_client.StoreClient((host, port), "", STORE_TIMEOUT)
    keys, rest, count, deadline = [], b"", 0, None
    while True:
        count += 1
        sample = inspect_process(Process(b"", pid, start))
        heartbeat = HEARTBEAT.pack(HEARTBEAT_MAGIC, count, sample.state.encode(), sample.seconds)
        for key in keys:
            store.set_raw(key, heartbeat)
        if sample.state == GONE or (deadline is not None and time.monotonic() > deadline):
            return
        if deadline is not None:
            time.sleep(BEAT / 10)
        elif select.select([0], [], [], BEAT)[0]:
            data = os.read(0, 4096)
            *lines, rest = (rest + data).split(b"\n")
            if b"end" in lines:
                return
            keys += lines
            deadline = None if data else time.monotonic() + EXIT_TIME


if __name__ == "__main__":
    try:
        _run_watcher(sys.argv[1], *map(int, sys.argv[2:5]))
    except Exception:  # its output is not read
        sys.exit(1)
