"""Runs `torchrun` as a page prints it, and says how it ended: status, output, who failed first, what was left."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(sys.executable).parent / "torchrun"
TIMEOUT = 120.0  # seconds; four ranks of two jobs at once on two shared cores take half a minute to import torch
GRACE = 5.0  # seconds in which processes of a job may still end by themselves after torchrun did
FAILURE = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\n.*?exitcode +: (-?\d+) \(pid", re.DOTALL)
NOISE = (
    "terminate called",
    "SIGABRT",
    "SIGSEGV",
    "Fatal Python error",
    "Exception ignored",
    "Exception in thread",
    "leaked",
    "EnforceNotMet",
)


@dataclass(frozen=True)
class Ended:
    """How a job ended. `failures` are (rank, exit code) in the order of torchrun's summary, the root cause first."""

    status: int | None
    out: str
    err: str
    failures: tuple[tuple[int, int], ...]
    left: tuple[str, ...]
    seconds: float

    def noise(self) -> list[str]:
        """What no job should say: crashes, errors that nobody could catch, things left behind."""
        return [words for words in NOISE if words in self.err or words in self.out]

    def report(self) -> str:
        said = f"status {self.status}, failures {self.failures}, left {self.left}, {self.seconds:.1f} s"
        return f"{said}\n-- stdout\n{self.out[-3000:]}\n-- stderr\n{self.err[-6000:]}"


def failures_of(err: str) -> tuple[tuple[int, int], ...]:
    """(rank, exit code) of every failure in torchrun's summary, the root cause first.

    >>> root = "Root Cause (first observed failure):\\n[0]:\\n"
    >>> failures_of(root + "  rank      : 1 (local_rank: 1)\\n  exitcode  : 3 (pid: 7)")
    ((1, 3),)
    """
    before, _, root = err.partition("Root Cause (first observed failure):")
    others = before.partition("\nFailures:")[2]
    return tuple((int(rank), int(code)) for part in (root, others) for rank, code in FAILURE.findall(part))


def torchrun(words, folder, *, interrupt_at=None, timeout=TIMEOUT, **variables) -> Ended:
    """`torchrun *words` in a folder, on loopback. The command line is as given: what keeps traffic on loopback and the
    cores quiet is said by variables. `interrupt_at` is a line of output after which torchrun gets a SIGINT."""
    marker = uuid.uuid4().hex
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PET_LOCAL_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LONGSPAN_TEST_JOB": marker,
        **variables,
    }
    # Files, not pipes: a process that is left behind would hold a pipe open, and reading would never end.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begin = time.monotonic()
        process = subprocess.Popen(
            [str(TORCHRUN), *words], env=environment, cwd=folder, stdout=out, stderr=err, stdin=subprocess.DEVNULL
        )
        try:
            status = _wait(process, out, interrupt_at, begin + timeout)
        finally:
            left = _end_all(marker, process, grace=GRACE if process.poll() is not None else 0.0)
        seconds = time.monotonic() - begin
        said = [_read(file) for file in (out, err)]
    return Ended(status, *said, failures_of(said[1]), left, seconds)


def _wait(process, out, interrupt_at, deadline):
    """The status, or None if the job did not end in time."""
    while time.monotonic() < deadline:
        status = process.poll()
        if status is not None:
            return status
        if interrupt_at is not None and interrupt_at in _read(out):
            process.send_signal(signal.SIGINT)
            interrupt_at = None
        time.sleep(0.05)
    return None


def _read(file):
    return os.pread(file.fileno(), 1 << 22, 0).decode(errors="replace")


def marked(marker) -> dict[int, str]:
    """Living processes whose environment holds the marker, with their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() not in (path / "environ").read_bytes():
                continue
            if (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found[int(path.name)] = command.strip()[:200]
        except OSError:
            continue  # it ended while we looked
    return found


def _end_all(marker, process, grace) -> tuple[str, ...]:
    """What is still there after a while; all of it is ended."""
    deadline = time.monotonic() + grace
    left = marked(marker)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = marked(marker)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    return tuple(left.values())
