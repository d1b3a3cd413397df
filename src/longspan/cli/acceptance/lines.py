"""A line of the page: its name, what it does on every rank, and what came out of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from longspan.cli.launch import JobRanks
from longspan.planning.machine import Machine
from longspan.planning.steps import Sizes

PATIENCE = timedelta(seconds=120)
"""After which a line's messages are given up: a page with a red line is better than none."""


class Judgement(StrEnum):
    """What a line comes to, the best first."""

    RIGHT = "right"
    NOT_RUN = "not run"
    SLOWER = "slower"
    TOO_SLOW = "too slow"
    WRONG = "wrong"

    @property
    def is_red(self) -> bool:
        return self in (Judgement.TOO_SLOW, Judgement.WRONG)


@dataclass(frozen=True)
class Outcome:
    """What a line came to, in a sentence and in numbers."""

    judgement: Judgement
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    times: float | None = None
    """How many times slower than predicted, where a time was predicted."""

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return {"verdict": str(found.pop("judgement")), "red": self.judgement.is_red, **found}

    def to_bytes(self) -> bytes:
        return json.dumps(self.as_dict()).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Outcome:
        """
        >>> Outcome.from_bytes(right("all equal", cases=3).to_bytes())
        Outcome(judgement=<Judgement.RIGHT: 'right'>, text='all equal', figures={'cases': 3}, times=None)
        """
        found = json.loads(data)
        return Outcome(Judgement(found["verdict"]), found["text"], found["figures"], found["times"])


def right(text: str, **figures: Any) -> Outcome:
    return Outcome(Judgement.RIGHT, text, figures)


def wrong(text: str, **figures: Any) -> Outcome:
    return Outcome(Judgement.WRONG, text, figures)


def not_run(text: str) -> Outcome:
    return Outcome(Judgement.NOT_RUN, text)


def compared(times: float, bars: tuple[float, float], text: str, **figures: Any) -> Outcome:
    """The outcome of a time that is so many times the predicted one: right up to the first bar, red beyond the second.

    >>> [str(compared(times, (1.25, 2.0), "").judgement) for times in (0.9, 1.3, 2.1)]
    ['right', 'slower', 'too slow']
    """
    kinds = (Judgement.RIGHT, Judgement.SLOWER, Judgement.TOO_SLOW)
    return Outcome(kinds[sum(times > bar for bar in bars)], text, figures, times)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome for all ranks: the worst, and who says so where not all do; of equal ones that which used up most of
    what it may.

    >>> worst([right("fine"), wrong("dq is off")]).text
    'rank 1: dq is off'
    >>> worst([right("0.1 used", used=0.1), right("0.3 used", used=0.3)]).text
    '0.3 used'
    """
    order = list(Judgement)

    def badness(rank: int) -> tuple[int, float, int]:
        found = outcomes[rank]
        return order.index(found.judgement), found.times or found.figures.get("used", 0.0), -rank

    chosen = max(range(len(outcomes)), key=badness)
    found = outcomes[chosen]
    alike = all(outcome.judgement == found.judgement for outcome in outcomes)
    return found if alike else replace(found, text=f"rank {chosen}: {found.text}")


class Site:
    """Where the lines run: the ranks, how much is asked of them, and what was measured on the way."""

    def __init__(self, ranks: JobRanks, *, quick: bool) -> None:
        self.ranks, self.quick = ranks, quick
        self.machine: Machine | None = None
        """What calibration found; the speaking rank's is fitted."""
        self._groups: list[dist.ProcessGroup] = []

    @property
    def is_gpu(self) -> bool:
        return self.ranks.device != "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """What attention is measured in."""
        return torch.bfloat16

    @property
    def sizes(self) -> Sizes:
        """The tensors that times are measured on."""
        return Sizes(32, 8, 128, 128, 2) if self.is_gpu else Sizes(8, 4, 64, 64, 2)

    def group(self, backend: str | None = None) -> dist.ProcessGroup:
        """A new group of all ranks, for one line: what goes wrong in a line stays there."""
        made = dist.new_group(backend=backend or self.ranks.backend, timeout=PATIENCE)
        assert isinstance(made, dist.ProcessGroup)
        self._groups.append(made)
        return made

    def close_groups(self) -> None:
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()

    def texts(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes."""
        rows = self.ranks.gather(torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8))
        return [row.numpy().tobytes() if mine else b"" for row in rows]


@dataclass(frozen=True)
class AcceptanceLine:
    """One line of the page. Every rank runs it at the same time."""

    name: str
    """Its section and its own name, as in `exact.ring`."""
    run: Callable[[Site], Outcome]
    least_ranks: int = 1
    is_quick: bool = True
    """Whether `--quick` has it, too."""

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]
