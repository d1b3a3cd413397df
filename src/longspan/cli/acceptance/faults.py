"""What happens when a rank is killed, stopped, or raises: who is named, and after how long. And when one is only late.

A few processes on loopback, started by the rank that speaks, are the job; the ranks of the command itself are left
alone, and wait.
"""

from __future__ import annotations

import os
import queue
import subprocess  # nosec B404  # ranks of a small job
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspan.cli.acceptance import fault_rank
from longspan.cli.acceptance.fault_rank import KILL, LATE, MISTAKE, RAISE, STOP, VICTIM
from longspan.cli.acceptance.lines import AcceptanceLine, Outcome, Site, compared, not_run, right, wrong
from longspan.formatting import seconds_text

NAMED_WITHIN = 3.0
"""Seconds that the promise has: docs/trust.md."""
BARS = (1.0, 3.0)
RANKS = 3
START, AFTER = 90.0, 30.0
"""Seconds for the job to begin, and for its ranks to say something after the fault."""
PROGRAM = fault_rank.__name__
"""The module that a rank of the job runs."""

Said = tuple[int, str, float, str]
"""Which rank said which word, when, and what with it."""


def fault_lines(*, is_gpu: bool) -> list[AcceptanceLine]:
    """One line for every kind of fault and of group."""
    return [
        AcceptanceLine(f"faults.{what}.{backend}", partial(_fault, what, backend), is_quick=what == KILL)
        for backend in (("gloo", "nccl") if is_gpu else ("gloo",))
        for what in (KILL, STOP, RAISE, LATE)
    ]


def _fault(what: str, backend: str, site: Site) -> Outcome:
    if backend == "nccl" and torch.cuda.device_count() < RANKS:
        return not_run(f"it needs {RANKS} GPUs on a host, and there are {torch.cuda.device_count()}")
    if not site.ranks.speaks:
        return right("")
    said = FaultJob(what, backend).run()
    return _late(said) if what == LATE else _named(what, said)


def _named(what: str, said: list[Said]) -> Outcome:
    """Every survivor must have named the victim, and what happened to it."""
    struck = [when for _, word, when, _ in said if word == "struck"]
    if not struck:
        return wrong(f"the fault did not happen; {_heard(said)}")
    fact = {KILL: "is dead", STOP: "has been stopped", RAISE: MISTAKE}[what]
    latest = 0.0
    for rank in (rank for rank in range(RANKS) if rank != VICTIM):
        last = [entry for entry in said if entry[0] == rank and entry[1] in ("named", "fine")]
        if not last:
            return wrong(f"rank {rank} said nothing for {AFTER:.0f} s after rank {VICTIM}'s fault ({what})")
        _, word, when, text = last[-1]
        if word == "fine" or "RankError" not in text or f"rank {VICTIM}" not in text or fact not in text:
            return wrong(f"rank {rank} did not name rank {VICTIM} after its fault ({what}), but said: {text or word}")
        latest = max(latest, when - struck[0])
    text = f"both others named rank {VICTIM} within {seconds_text(latest)}; promised: {NAMED_WITHIN:.0f} s"
    return compared(latest / NAMED_WITHIN, BARS, text, seconds=latest)


def _late(said: list[Said]) -> Outcome:
    """The reverse: nobody may be named who is only late."""
    fine = {rank for rank, word, _, _ in said if word == "fine"}
    if len(fine) == RANKS:
        return right(f"a rank that came {fault_rank.LATE_SECONDS:.0f} s late was waited for, and nobody was named")
    return wrong(f"a rank was only late, and that went wrong; {_heard(said)}")


def _heard(said: list[Said]) -> str:
    return "; ".join(f"rank {rank}: {word} {text}" for rank, word, _, text in said) or "no rank said a word"


class FaultJob:
    """Three ranks in processes of their own, and what they say."""

    def __init__(self, what: str, backend: str) -> None:
        self.what, self.backend = what, backend
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.lines: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self.readers: list[threading.Thread] = []

    def run(self) -> list[Said]:
        """Everything that was said until all who can have said their last word."""
        with ExitStack() as files:
            processes = [files.enter_context(self._started(rank)) for rank in range(RANKS)]
            try:
                return self._heard()
            finally:
                for process in processes:
                    process.kill()
                for reader in self.readers:
                    reader.join(5.0)

    def _started(self, rank: int) -> subprocess.Popen[str]:
        words = [str(rank), str(RANKS), str(self.store.port), self.what, self.backend]
        process = subprocess.Popen(  # noqa: S603  # nosec B603  # a module of this package, with words of our own
            [sys.executable, "-m", PROGRAM, *words],
            env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.readers.append(threading.Thread(target=self._read, args=(rank, process), daemon=True))
        self.readers[-1].start()
        return process

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        """Passes on what a rank says; one that ends without a word has said why on stderr."""
        assert process.stdout is not None
        assert process.stderr is not None
        with suppress(OSError, ValueError):
            for line in process.stdout:
                word, _, rest = line.rstrip("\n").partition("\t")
                when, _, text = rest.partition("\t")
                with suppress(ValueError):  # what others print is not for us
                    self.lines.put((rank, word, float(when), text))
            complaint = process.stderr.read().strip().splitlines()
            self.lines.put((rank, "ended", time.monotonic(), complaint[-1] if complaint else ""))

    def _heard(self) -> list[Said]:
        heard: list[Said] = []
        limit = time.monotonic() + START
        done: set[int] = set()
        while len(done) < RANKS and time.monotonic() < limit:
            try:
                heard.append(self.lines.get(timeout=0.2))
            except queue.Empty:
                continue
            rank, word, _, _ = heard[-1]
            if word == "struck":
                limit = time.monotonic() + AFTER
                if self.what in (KILL, STOP):
                    done.add(rank)
            elif word in ("fine", "named", "ended"):
                done.add(rank)
        return heard


def _environment() -> dict[str, Any]:
    """This process's own, without its place in the launcher's job, and with all traffic on loopback."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    found = {
        name: value for name, value in os.environ.items() if name not in ours and not name.startswith("TORCHELASTIC_")
    }
    if Path("/sys/class/net/lo").exists():
        found |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return found | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
