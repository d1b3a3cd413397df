"""Schedules as text: a table for people, and a parser of the text form.

The parser treats its input as data, never as code: the input is bounded and checked line by line. The result is well
formed: ranks, positions, heads and batch rows exist, and sends and receives name this rank. Whether it computes what a
mask requires is for `validate` to prove; call it for every schedule from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longspan.errors import LongspanError, ScheduleError
from longspan.layouts import Layout
from longspan.masks import Band
from longspan.planning.steps import Compute, Piece, Role, Schedule, Sizes, Step, Transfer
from longspan.spans import MAX_TEXT, Span, checked_text, parsed_number, shortened

# -- Table: ranks down, steps across -----------------------------------------------------------------------------------


_NEAR = 4


def table(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """One cell per rank and step: peers sent to (>), peers received from (<), computes (*); the mark stands in !! !!.

    Large schedules are cut to the neighbourhood of the mark.
    """
    rows, columns = range(schedule.world_size), range(schedule.num_steps)
    if mark is not None:
        rows = [r for r in rows if len(rows) <= 2 * _NEAR + 1 or abs(r - mark[0]) <= _NEAR]
        columns = [c for c in columns if len(columns) <= 2 * _NEAR + 1 or abs(c - mark[1]) <= _NEAR]
    lines = [["rank", *(f"step {c}" for c in columns)]]
    for rank in rows:
        line = [str(rank)]
        for c in columns:
            text = _cell(schedule.ranks[rank][c], rank) if c < len(schedule.ranks[rank]) else ""
            line.append(f"!! {text} !!" if (rank, c) == mark else text)
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join("  ".join(word.ljust(w) for word, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    left_out = schedule.world_size - len(rows), schedule.num_steps - len(columns)
    return text + (f"\n({left_out[0]} ranks and {left_out[1]} steps left out)" if any(left_out) else "")


def _cell(step: Step, rank: int) -> str:
    sent = sorted({t.dst for t in step.transfers if t.src == rank})
    received = sorted({t.src for t in step.transfers if t.dst == rank})
    words = [_peers(">", sent), _peers("<", received), f"*{len(step.computes)}" if step.computes else ""]
    return " ".join(word for word in words if word) or "."


def _peers(sign: str, peers: list[int]) -> str:
    return sign + ",".join(map(str, peers)) if 0 < len(peers) <= 4 else f"{sign}({len(peers)})" if peers else ""


# -- Parser ------------------------------------------------------------------------------------------------------------


MAX_LINE = 1 << 20
MAX_STEPS = 1 << 16
HEAD = "a schedule text begins 'schedule SCHEME DIRECTION SIZES'"

__all__ = ["MAX_LINE", "MAX_STEPS", "MAX_TEXT", "parse_schedule"]


@dataclass(slots=True)
class _Lines:
    """What was read of one rank; steps are lists until the text ends."""

    kept: list[Piece] = field(default_factory=list[Piece])
    transfers: list[list[Transfer]] = field(default_factory=list[list[Transfer]])
    computes: list[list[Compute]] = field(default_factory=list[list[Compute]])

    def steps(self) -> tuple[Step, ...]:
        both = zip(self.transfers, self.computes, strict=True)
        return tuple(Step(tuple(transfers), tuple(computes)) for transfers, computes in both)


def parse_schedule(text: str) -> Schedule:
    """The schedule that `Schedule.text` wrote."""
    lines = checked_text(text, "a schedule", ScheduleError).strip("\n").split("\n")
    long = next((i for i, line in enumerate(lines) if len(line) > MAX_LINE), None)
    if long is not None:
        raise ScheduleError(
            f"line {long + 1} of the schedule text has {len(lines[long])} characters; the limit is {MAX_LINE}."
        )
    words = lines[0].split(" ")
    if len(words) < 4 or words[0] != "schedule":
        raise ScheduleError(f"{HEAD}, but {shortened(lines[0])} was found.")
    sizes = _sizes(words[3:])
    first = next((i for i, line in enumerate(lines) if line.startswith("rank ")), len(lines))
    layout = Layout.parse("\n".join(lines[1:first]))
    reader = _Reader(layout, sizes)
    for at, line in enumerate(lines[first:], start=first + 1):
        try:
            reader.read(line)
        except LongspanError as error:
            raise ScheduleError(
                f"line {at} of the schedule text, {shortened(line)}, cannot be read: {error}"
            ) from error
    if words[2] == "forward" and any(rank.kept for rank in reader.ranks):
        raise ScheduleError(
            "a forward schedule begins with nothing kept, but the text has 'kept' lines. Take them out."
        )
    ranks = tuple(rank.steps() for rank in reader.ranks)
    kept = tuple(tuple(rank.kept) for rank in reader.ranks) if words[2] == "backward" else ()
    return Schedule(words[1], words[2], layout, sizes, ranks, kept)


def _sizes(words: list[str]) -> Sizes:
    form = f"sizes are written {' '.join(f'{name}=N' for name in Sizes.__slots__)}"
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    if fields.keys() != set(Sizes.__slots__) or len(words) != len(fields):
        raise ScheduleError(f"{form}, but {shortened(' '.join(words))} was found.")
    return Sizes(**{name: parsed_number(value, form, " ".join(words), ScheduleError) for name, value in fields.items()})


class _Reader:
    """Takes up one line after another."""

    def __init__(self, layout: Layout, sizes: Sizes) -> None:
        self.layout, self.sizes = layout, sizes
        self.ranks: list[_Lines] = []

    def read(self, line: str) -> None:
        body = line.strip(" ")
        word, _, rest = body.partition(" ")
        if word == "rank":
            self._next(rest, len(self.ranks), "rank", self.layout.world_size)
            self.ranks.append(_Lines())
            return
        mine = self.ranks[-1]  # the first line begins with "rank "
        if word == "kept":
            mine.kept.append(self._piece(Piece.parse(rest)))
        elif word == "step":
            self._next(rest, len(mine.transfers), "step", MAX_STEPS)
            mine.transfers.append([])
            mine.computes.append([])
        elif not mine.transfers:
            raise ScheduleError("'step 0' comes before transfers and computes.")
        elif word == "compute":
            mine.computes[-1].append(self._compute(Compute.parse(body, len(self.ranks) - 1)))
        else:
            mine.transfers[-1].append(self._transfer(Transfer.parse(body)))

    def _next(self, text: str, expected: int, what: str, limit: int) -> None:
        if text != str(expected):
            raise ScheduleError(f"{what} {expected} comes next.")
        if expected >= limit:
            raise ScheduleError(f"there are {limit} {what}s at most.")

    def _piece(self, piece: Piece) -> Piece:
        heads = self.sizes.kv_heads if piece.role in (Role.KV, Role.DKV) else self.sizes.q_heads
        self._within(piece.spans, self.layout.seq_len, "positions")
        self._within((piece.heads,), heads, f"heads of {piece.role}")
        self._within(piece.apart, self.layout.seq_len, "queries that are added up apart")
        if piece.apart and piece.role not in (Role.KV, Role.DKV):
            raise ScheduleError(f"only gradients of keys are added up apart by queries, but {piece!r} was found.")
        self._within(() if piece.batch is None else (piece.batch,), self.sizes.batch, "batch rows")
        return piece

    def _transfer(self, transfer: Transfer) -> Transfer:
        here, size = len(self.ranks) - 1, self.layout.world_size
        if here not in (transfer.src, transfer.dst) or transfer.src == transfer.dst:
            raise ScheduleError(f"rank {here} lists transfers that it sends to or receives from another rank.")
        if max(transfer.src, transfer.dst) >= size or transfer.until > MAX_STEPS:
            raise ScheduleError(f"ranks run from 0 to {size - 1}, and steps up to {MAX_STEPS}.")
        self._piece(transfer.piece)
        return transfer

    def _compute(self, compute: Compute) -> Compute:
        if (compute.q.role, compute.kv.role) != (Role.Q, Role.KV):
            raise ScheduleError("a compute works on q and kv pieces.")
        self._piece(compute.q)
        self._piece(compute.kv)
        self._bands((*compute.bands, *compute.maybe))
        return compute

    def _bands(self, bands: Sequence[Band]) -> None:
        for band in bands:
            self._within((band.q, band.kv), self.layout.seq_len, "positions")

    def _within(self, spans: Sequence[Span], size: int, what: str) -> None:
        for span in spans:
            if span.stop > size or not len(span):
                raise ScheduleError(f"{what} are spans of one or more within 0:{size}, but {span!r} was found.")
