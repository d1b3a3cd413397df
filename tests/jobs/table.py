"""All jobs, what must come out of each, and which of them a run takes."""

import re
from dataclasses import dataclass, field
from itertools import count as numbers
from pathlib import Path
from tempfile import TemporaryDirectory

from . import pages
from .runner import ROOT, TIMEOUT, Ended, torchrun
from .scripts import ENDINGS, SCHEMES, Ending, script


@dataclass(frozen=True)
class Job:
    """One torchrun. `kind` is page, example, command, longspan or gloo (the control)."""

    kind: str
    name: str
    words: tuple[str, ...]
    code: str | None = None
    line: str = ""
    root: tuple[int | str | None, int] | None = None
    status: int = 0
    interrupt_at: str | None = None
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(self.words[1])

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}, {self.ranks} ranks"

    def run(self, timeout: float = TIMEOUT) -> Ended:
        with TemporaryDirectory() as folder:
            if self.code is not None:
                (Path(folder) / self.words[2]).write_text(self.code)
            return torchrun(self.words, folder, interrupt_at=self.interrupt_at, timeout=timeout, **self.variables)


def complaints(job: Job, ended: Ended) -> list[str]:
    """What is wrong with how a job ended; nothing if it ended as it should."""
    found = []
    if ended.status is None:
        return ["it did not end in time"]
    if ended.status != job.status:
        found.append(f"status {ended.status} instead of {job.status}")
    if job.line and not re.search(job.line, ended.out + ended.err):
        found.append(f"it never said {job.line!r}")
    found += [f"it said {words!r}" for words in ended.noise()]
    found += [f"left behind: {command}" for command in ended.left]
    if job.root is None:
        found += [f"rank {rank} failed with {code}" for rank, code in ended.failures]
        return found
    rank, code = job.root
    rank = job.ranks - 1 if rank == "last" else rank
    if not ended.failures:
        found.append("torchrun named no failure")
    elif ended.failures[0][1] != code or rank not in (None, ended.failures[0][0]):
        found.append(f"root cause (rank, exit code) {ended.failures[0]} instead of {(rank, code)}")
    found += [f"rank {rank} died by signal {-code}" for rank, code in ended.failures if code in (-6, -11)]
    return found


def _of_pages(turn: int) -> list[Job]:
    jobs = []
    for page, place, code in pages.blocks():
        ranks = pages.RANKS.get(page, (2, 3, 4))
        words = ("--nproc-per-node", str(ranks[turn % len(ranks)]), "example.py")
        jobs.append(Job("page", f"{page} block {place}", words, code, pages.LINES.get(page, "")))
    for name in pages.examples():
        jobs.append(example(name))
    return jobs


def example(name: str) -> Job:
    words = "--nproc-per-node", "2", str(ROOT / "examples" / f"{name}.py"), *pages.ARGUMENTS.get(name, ())
    return Job("example", name, words, None, pages.EXAMPLES[name])


def _of_commands() -> list[Job]:
    return [Job("command", " ".join(words[2:]), tuple(words)) for _, words in pages.commands()]


def _of_ending(turn: int, work: str, name: str, ending: Ending) -> Job:
    ranks = ending.ranks[turn % len(ending.ranks)]
    code = script(ending, work, SCHEMES[turn % len(SCHEMES)])
    stopped = ending.root is not None or ending.interrupt_at is not None
    return Job(
        work, name, ("--nproc-per-node", str(ranks), "job.py"), code, ending.line, ending.root, int(stopped),
        ending.interrupt_at, {"PYTHONOPTIMIZE": "1"} if ending.optimised else {},
    )  # fmt: skip


def _of_endings(turn: int, work: str) -> list[Job]:
    return [
        _of_ending(turn + number, work, name, ending)
        for number, (name, ending) in enumerate(ENDINGS.items())
        if work == "longspan" or ending.gloo is True
    ]


def spread(jobs: list[Job], wanted: int) -> list[Job]:
    """So many of them, evenly from first to last: all kinds of endings, which lie side by side, are among them.

    >>> spread(list("abcdefg"), 3)
    ['a', 'c', 'e']
    """
    return [jobs[i * len(jobs) // wanted] for i in range(min(wanted, len(jobs)))] if wanted < len(jobs) else jobs


def chosen(wanted: int) -> list[Job]:
    """So many jobs, always the same ones: pages and examples first, then three endings for each control. A large
    number takes rounds over everything, with another number of ranks and other schemes in each."""
    jobs: list[Job] = []
    for turn in numbers():
        documented = _of_pages(turn)
        commands, ours, gloo = _of_commands(), _of_endings(turn, "longspan"), _of_endings(turn, "gloo")
        rest = wanted - len(jobs) - len(documented)
        if rest < len(ours) + len(gloo) + len(commands):
            few = min(1, len(commands)) if rest > 4 else 0
            controls = max(0, (rest - few) // 4)
            last = [*documented, *commands[:few], *spread(ours, rest - few - controls), *spread(gloo, controls)]
            return [*jobs, *last][:wanted]
        jobs += [*documented, *commands, *ours, *gloo]
    raise AssertionError
