"""Reads a schedule back from its text form. Input is data, never code, and is checked line by line."""

from __future__ import annotations

from longspan.errors import ScheduleError
from longspan.layouts import Layout
from longspan.schedules.steps import Compute, Piece, Schedule, Sizes, Step, Transfer

MAX_TEXT = 64 << 20


def parse(text: str) -> Schedule:
    """The schedule that `Schedule.text` wrote."""
    if len(text) > MAX_TEXT:
        raise ScheduleError(f"a schedule text of {len(text)} characters was given; the limit is {MAX_TEXT}.")
    head, *lines = text.strip("\n").splitlines()
    words = head.split()
    if len(words) < 4 or words[0] != "schedule":
        raise ScheduleError(f"a schedule text begins 'schedule SCHEME DIRECTION SIZES', but {head!r:.80} was found.")
    first = next((i for i, line in enumerate(lines) if line.startswith("rank ")), len(lines))
    layout = Layout.parse("\n".join(lines[:first]))
    ranks: list[list[Step]] = []
    kept: list[list[Piece]] = []
    for number, line in enumerate(lines[first:], start=first + 2):
        try:
            _read_line(line, ranks, kept)
        except (ValueError, IndexError) as error:
            raise ScheduleError(
                f"line {number} of the schedule text, {line!r:.100}, cannot be read: {error}"
            ) from error
    if any(kept) and words[2] == "forward":
        raise ScheduleError("a forward schedule begins with nothing kept, but the text has 'kept' lines.")
    return Schedule(
        words[1],
        words[2],
        layout,
        _sizes(words[3:]),
        tuple(map(tuple, ranks)),
        tuple(map(tuple, kept)) if words[2] == "backward" else (),
    )


def _sizes(words: list[str]) -> Sizes:
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    if fields.keys() != set(Sizes.__slots__) or not all(value.isdecimal() for value in fields.values()):
        raise ScheduleError(f"sizes are written {' '.join(f'{s}=N' for s in Sizes.__slots__)}, but {words} was found.")
    return Sizes(**{name: int(value) for name, value in fields.items()})


def _read_line(line: str, ranks: list[list[Step]], kept: list[list[Piece]]) -> None:
    body = line.strip()
    word, _, rest = body.partition(" ")
    if word == "rank":
        if int(rest) != len(ranks):
            raise ScheduleError(f"rank {len(ranks)} comes next.")
        ranks.append([])
        kept.append([])
    elif word == "kept":
        kept[-1].append(Piece.parse(rest))
    elif word == "step":
        if int(rest) != len(ranks[-1]):
            raise ScheduleError(f"step {len(ranks[-1])} comes next.")
        ranks[-1].append(Step())
    elif word == "compute":
        step = ranks[-1][-1]
        ranks[-1][-1] = Step(step.transfers, (*step.computes, Compute.parse(body, len(ranks) - 1)))
    else:
        step = ranks[-1][-1]
        ranks[-1][-1] = Step((*step.transfers, Transfer.parse(body)), step.computes)
