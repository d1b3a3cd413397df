"""What the operating system reports about a process: whether it exists, is stopped or is busy.

A process that holds the interpreter's lock for a minute cannot send heartbeats, but it can be examined. Only the
standard library is used: the watcher process (`watcher.py`) runs this file, too.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

GONE, STOPPED, TRACED, UNKNOWN = "X", "T", "t", "?"
"""States beside the system's own letters: has ended, is stopped, is held by a debugger (somebody looks at it, and will
let it go on), cannot be seen (no reason to think it dead)."""
NOWHERE = bytes(16)
"""The host of a process that cannot be looked at from anywhere."""
LIFE = struct.Struct("<4sQcd")
"""What a watcher writes: a mark, how often it has looked, the state it saw, and processor seconds."""
LIFE_MARK = b"LSl1"


class Process(NamedTuple):
    """A process, told from all others: where it runs, its number there, and when it began."""

    host: bytes
    pid: int
    start: int


class Sight(NamedTuple):
    """What one look at a process shows."""

    state: str
    seconds: float = 0.0
    """Processor time it has used."""


def this_process() -> Process:
    """The process that asks.

    >>> seen(this_process()).state in "RSD?"
    True
    """
    pid = os.getpid()
    stat = _read(pid)
    if stat is None or os.readlink("/proc/self") != str(pid):  # /proc is another container's
        return Process(NOWHERE, pid, 0)
    return Process(_host(), pid, stat[2])


def _host() -> bytes:
    """Processes with the same one see each other by number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).digest()[:16]
    except OSError:
        return NOWHERE


def seen(process: Process) -> Sight:
    """A look at a process of this host.

    >>> seen(Process(b"", os.getpid(), 1)).state  # another one had this number before
    'X'
    """
    stat = _read(process.pid)
    if stat is None:
        return Sight(UNKNOWN if _answers(process.pid) else GONE)
    state, seconds, start = stat
    if start != process.start or state in "ZXx":
        return Sight(GONE, seconds)
    return Sight(state, seconds)


def _read(pid: int | str) -> tuple[str, float, int] | None:
    """(state, processor seconds, start) of a process or thread, or None where nothing can be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # plain: it is read many times a second
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def is_asleep(thread: int | None) -> bool:
    """Whether a thread of this process waits for anything but a processor; so, too, where that cannot be seen."""
    stat = None if thread is None else _read(f"self/task/{thread}")
    return stat is None or stat[0] != "R"


def _answers(pid: int) -> bool:
    """Whether there is a process of this number, though it may be hidden, or this one may have no file left to open."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def listener(port: int) -> Process | None:
    """The process of this host that listens on a port: the eldest of those that hold the socket, since children that
    were forked hold it, too."""
    inodes = set[str]()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    targets = {f"socket:[{inode}]" for inode in inodes}
    holders = [(stat[2], pid) for pid in _pids() if _holds(pid, targets) and (stat := _read(pid)) is not None]
    if not targets or not holders:
        return None
    start, pid = min(holders)
    return Process(_host(), pid, start)


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _holds(pid: int, targets: set[str]) -> bool:
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
