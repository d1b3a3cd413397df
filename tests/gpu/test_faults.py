"""What the other ranks report when one is killed, is stopped or raises, and how soon; and when one is only late.

Rank 0 starts a job of a few processes on loopback for each test; the ranks that run the tests are left alone.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longspan.formatting import seconds_text
from tests.gpu import fault_rank
from tests.gpu.fault_rank import KILL, LATE, MISTAKE, RAISE, STOP, VICTIM
from tests.gpu.site import Site

NAMED_WITHIN = 3.0
"""Seconds, as docs/trust.md promises."""
LIMITS = (1.0, 3.0)
RANKS = 3
START_SECONDS, FAULT_SECONDS = 90.0, 30.0
"""For the job to start, and for its ranks to report after the fault."""
PROGRAM = fault_rank.__name__
"""The module that a rank of the job runs."""
Message = tuple[int, str, float, str]
"""Rank, word, time and text."""


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        pytest.param(
            fault, backend, id=f"{fault}.{backend}",
            marks=[pytest.mark.cuda] * (backend == "nccl") + [pytest.mark.slow] * (fault != KILL),
        )
        for backend in ("gloo", "nccl")
        for fault in (KILL, STOP, RAISE, LATE)
    ],
)  # fmt: skip
def test_fault(site: Site, fault: str, backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"it needs {RANKS} GPUs on a host, and there are {torch.cuda.device_count()}")
    if not site.ranks.is_main:
        return
    messages = run_job(fault, backend)
    every = "; ".join(f"rank {rank}: {word} {text}" for rank, word, _, text in messages) or "no rank reported anything"
    if fault == LATE:
        if len({rank for rank, word, _, _ in messages if word == "fine"}) < RANKS:
            pytest.fail(f"a rank was only late, and that went wrong; {every}")
        site.record(f"a rank that came {fault_rank.LATE_SECONDS:.0f} s late was waited for, and no rank was named")
        return
    struck = [when for _, word, when, _ in messages if word == "struck"]
    if not struck:
        pytest.fail(f"the fault did not happen; {every}")
    expected = {KILL: "is dead", STOP: "has been stopped", RAISE: MISTAKE}[fault]
    latest = 0.0
    for rank in (rank for rank in range(RANKS) if rank != VICTIM):
        last = [message for message in messages if message[0] == rank and message[1] in ("named", "fine")]
        if not last:
            pytest.fail(f"rank {rank} said nothing for {FAULT_SECONDS:.0f} s after rank {VICTIM}'s fault ({fault})")
        _, word, when, text = last[-1]
        if word == "fine" or "RankError" not in text or f"rank {VICTIM}" not in text or expected not in text:
            pytest.fail(f"rank {rank} did not name rank {VICTIM} after its fault ({fault}), but said: {text or word}")
        latest = max(latest, when - struck[0])
    text = f"both others named rank {VICTIM} within {seconds_text(latest)}; promised: {NAMED_WITHIN:.0f} s"
    site.compare(latest / NAMED_WITHIN, LIMITS, text, seconds=latest)


def run_job(fault: str, backend: str) -> list[Message]:
    """Start the ranks, and return what they reported until each that can has sent its last message."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    messages: list[Message] = []
    done: set[int] = set()
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        try:
            for rank in range(RANKS):
                words = [str(rank), str(RANKS), str(store.port), fault, backend]
                process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, *words], env=environment(), text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                processes.append(stack.enter_context(process))
                readers.append(threading.Thread(target=read_messages, args=(rank, process, inbox), daemon=True))
                readers[-1].start()
            deadline = time.monotonic() + START_SECONDS
            while len(done) < RANKS and time.monotonic() < deadline:
                try:
                    messages.append(inbox.get(timeout=0.2))
                except queue.Empty:
                    continue
                rank, word, _, _ = messages[-1]
                if word == "struck":
                    deadline = time.monotonic() + FAULT_SECONDS
                if word in ("fine", "named", "ended") or (word == "struck" and fault in (KILL, STOP)):
                    done.add(rank)
            return messages
        finally:
            for process in processes:
                process.kill()
            for reader in readers:
                reader.join(5.0)


def read_messages(rank: int, process: subprocess.Popen[str], inbox: queue.SimpleQueue[Message]) -> None:
    """Pass on the messages of a rank, and the last line of its stderr when it ends."""
    assert process.stdout is not None
    assert process.stderr is not None
    with suppress(OSError, ValueError):
        for line in process.stdout:
            word, _, rest = line.rstrip("\n").partition("\t")
            when, _, text = rest.partition("\t")
            with suppress(ValueError):  # lines that others print
                inbox.put((rank, word, float(when), text))
        errors = process.stderr.read().strip().splitlines()
        inbox.put((rank, "ended", time.monotonic(), errors[-1] if errors else ""))


def environment() -> dict[str, str]:
    """Return this process's environment without its place in the launcher's job, and with all traffic on loopback."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    variables = {
        name: value for name, value in os.environ.items() if name not in ours and not name.startswith("TORCHELASTIC_")
    }
    if Path("/sys/class/net/lo").exists():
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return variables | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
