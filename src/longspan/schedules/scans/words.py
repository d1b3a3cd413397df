"""The words of a scan's schedule: pieces of chains, folds, and what they weigh.

The tokens of a document that lie together on a rank are a *segment*, and the segments of a document in order are its
*chain*. A segment maps the state that enters it to the one that leaves it, S -> M S + U, and so do several in a row:

    piece [1:3)   what segments 1 and 2 do to a state that enters 1: a map (M, U)
    piece [0:2)   nothing enters a document, so U alone says what leaves segment 1: a state

A *fold* joins two pieces that meet: [i:k) and [k:j) become [i:j), with M = M_right M_left and U = M_right U_left +
U_right. A rank computes the pieces [i:i+1) of its own segments; the scan is done when the owner of every segment i > 0
has [0:i), the state that enters it.

Four segments on ranks 0 to 3, one after the other:

    step 0   0 ── state[0:1] ──► 1
    step 1   1 folds state[0:1] map[1:2],  1 ── state[0:2] ──► 2
    step 2   2 folds state[0:2] map[2:3],  2 ── state[0:3] ──► 3

A step's folds come first; its transfers then carry what is there, and what they bring is usable from the next step on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from longspan.errors import LongspanError, ScheduleError
from longspan.layouts import Layout
from longspan.span import Span, checked_text, parsed_number, shortened, whole

MAX_FEATURES = 1 << 24


class ScanRole(StrEnum):
    """What a piece of a chain carries."""

    MAP = "map"  # M and U
    STATE = "state"  # U alone: the piece begins with its document
    DSTATE = "dstate"  # the gradient of U


@dataclass(frozen=True, slots=True)
class StateSizes:
    """What states and maps weigh. A state is (heads, keys, values); M acts on its keys, as a matrix if it is dense."""

    heads: int
    keys: int
    values: int
    map_rows: int
    map_cols: int
    dense: int
    itemsize: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            low = 0 if name == "dense" else 1
            whole(getattr(self, name), name, "a scan plan", ScheduleError, low=low, high=MAX_FEATURES)
        rows, cols = self.map_rows, self.map_cols
        diagonal = rows in (1, self.keys) and cols in (1, self.values)
        if not (rows == cols == self.keys if self.dense else diagonal):
            raise ScheduleError(
                f"a map of {rows} x {cols} numbers does not fit a state of {self.keys} x {self.values}. A dense one has"
                f" {self.keys} x {self.keys}; a diagonal one has 1 or {self.keys} rows and 1 or {self.values} columns."
            )

    @property
    def state_bytes(self) -> int:
        """Of one batch row."""
        return self.heads * self.keys * self.values * self.itemsize

    @property
    def map_bytes(self) -> int:
        """M of one batch row."""
        return self.heads * self.map_rows * self.map_cols * self.itemsize

    def text(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class ChainPiece:
    """What the segments start, ..., stop - 1 of a chain do together.

    >>> ChainPiece(ScanRole.MAP, 4, 1, 3, Span(0, 2))
    map[1:3]c4b0:2
    """

    role: ScanRole
    chain: int
    start: int
    stop: int
    batch: Span

    @staticmethod
    def of(chain: int, start: int, stop: int, batch: Span) -> ChainPiece:
        """In forward: a state where it begins with its document, else a map."""
        return ChainPiece(ScanRole.MAP if start else ScanRole.STATE, chain, start, stop, batch)

    def num_bytes(self, sizes: StateSizes) -> int:
        each = sizes.state_bytes + (sizes.map_bytes if self.role is ScanRole.MAP else 0)
        return len(self.batch) * each

    @property
    def order(self) -> tuple[object, ...]:
        """Both ends of a message list its pieces in this order."""
        return (self.role, self.chain, self.start, self.stop)

    def to_gradient(self) -> ChainPiece:
        return ChainPiece(ScanRole.DSTATE, self.chain, self.start, self.stop, self.batch)

    def __repr__(self) -> str:
        return f"{self.role}[{self.start}:{self.stop}]c{self.chain}b{self.batch}"

    @staticmethod
    def parse(text: str) -> ChainPiece:
        """The piece that `repr` wrote.

        >>> ChainPiece.parse("state[0:3]c0b0:1")
        state[0:3]c0b0:1
        """
        form = "a piece of a chain is written ROLE[FIRST:END]cCHAINbROWS, as in map[1:3]c0b0:1"
        role, _, rest = text.partition("[")
        reach, _, rest = rest.partition("]c")
        chain, _, batch = rest.partition("b")
        if role not in set(ScanRole) or not batch:
            raise ScheduleError(f"{form}, but {shortened(text)} was found.")
        span = Span.parse(reach)
        number = parsed_number(chain, form, text, ScheduleError)
        return ChainPiece(ScanRole(role), number, span.start, span.stop, Span.parse(batch))


@dataclass(frozen=True, slots=True)
class Fold:
    """One rank joins two pieces that meet. In backward the same fold takes the gradient of the whole apart: the left
    part gets M_right^T of it, the right part gets it as it is."""

    rank: int
    left: ChainPiece
    right: ChainPiece

    @property
    def whole(self) -> ChainPiece:
        return ChainPiece.of(self.left.chain, self.left.start, self.right.stop, self.left.batch)

    def __repr__(self) -> str:
        return f"fold {self.left!r} {self.right!r}"

    @staticmethod
    def parse(text: str, rank: int) -> Fold:
        """The fold that `repr` wrote."""
        words = text.removeprefix("fold ").split(" ")
        if len(words) != 2:
            raise ScheduleError(f"a fold is written fold LEFT RIGHT, but {shortened(text)} was found.")
        return Fold(rank, *map(ChainPiece.parse, words))


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """One piece goes from one rank to another."""

    src: int
    dst: int
    piece: ChainPiece
    until: int
    """The last step in which it may be used."""

    def __repr__(self) -> str:
        return f"{self.src}>{self.dst} {self.piece!r}"

    @staticmethod
    def parse(text: str, until: int) -> StateTransfer:
        """The transfer that `repr` wrote."""
        form = "a transfer of states is written SRC>DST PIECE"
        ends, _, piece = text.partition(" ")
        src, _, dst = ends.partition(">")
        numbers = [parsed_number(part, form, text, ScheduleError) for part in (src, dst)]
        return StateTransfer(numbers[0], numbers[1], ChainPiece.parse(piece), until)


@dataclass(frozen=True, slots=True)
class ScanStep:
    """One rank's share of a step: it folds, then sends what it has; what arrives is usable from the next step on."""

    transfers: tuple[StateTransfer, ...] = ()
    computes: tuple[Fold, ...] = ()


@dataclass(frozen=True)
class ScanSchedule:
    """Every rank's steps, written out. All ranks have as many."""

    scheme: str
    direction: str
    layout: Layout
    sizes: StateSizes
    ranks: tuple[tuple[ScanStep, ...], ...]

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def num_steps(self) -> int:
        return max(len(steps) for steps in self.ranks)

    def transfers(self) -> Iterator[tuple[int, StateTransfer]]:
        """(step, transfer) of every transfer once, as its sender lists it."""
        for rank, steps in enumerate(self.ranks):
            for number, step in enumerate(steps):
                yield from ((number, t) for t in step.transfers if t.src == rank)

    def text(self) -> str:
        """A text that `parse_scan` reads back."""
        lines = [f"scan {self.scheme} {self.direction} {self.sizes.text()}", self.layout.text()]
        for rank, steps in enumerate(self.ranks):
            lines.append(f"rank {rank}")
            for number, step in enumerate(steps):
                lines.append(f"  step {number}")
                lines += [f"    {item!r}" for item in (*step.computes, *step.transfers)]
        return "\n".join(lines)


def parse_scan(text: str) -> ScanSchedule:
    """The schedule that `ScanSchedule.text` wrote; `validate_scan` proves whether it is any good."""
    lines = checked_text(text, "a scan", ScheduleError).strip("\n").split("\n")
    try:
        return _parsed(lines)
    except ScheduleError:
        raise
    except LongspanError as error:  # of a layout or a span
        raise ScheduleError(str(error)) from error


def _parsed(lines: list[str]) -> ScanSchedule:
    words = lines[0].split(" ")
    fields = [word.partition("=") for word in words[3:]]
    form = "a scan text begins 'scan SCHEME DIRECTION SIZES'"
    known = tuple(name for name, _, _ in fields) == StateSizes.__slots__
    if not known or words[0] != "scan" or words[2] not in ("forward", "backward"):
        raise ScheduleError(f"{form}, but {shortened(lines[0])} was found.")
    sizes = StateSizes(*(parsed_number(value, form, lines[0], ScheduleError) for _, _, value in fields))
    first = next((i for i, line in enumerate(lines) if line.startswith("rank ")), len(lines))
    layout = Layout.parse("\n".join(lines[1:first]))
    ranks: list[list[tuple[list[StateTransfer], list[Fold]]]] = []
    for line in lines[first:]:
        item = line.strip()
        if line == f"rank {len(ranks)}":
            ranks.append([])
        elif ranks and line == f"  step {len(ranks[-1])}":
            ranks[-1].append(([], []))
        elif ranks and ranks[-1] and item.startswith("fold "):
            ranks[-1][-1][1].append(Fold.parse(item, len(ranks) - 1))
        elif ranks and ranks[-1]:
            ranks[-1][-1][0].append(StateTransfer.parse(item, MAX_FEATURES))
        else:
            raise ScheduleError(f"a scan text lists ranks and their steps in order, but {shortened(line)} was found.")
    if len(ranks) != layout.world_size:
        raise ScheduleError(f"the scan text has steps of {len(ranks)} ranks, and a layout of {layout.world_size}.")
    steps = tuple(tuple(ScanStep(tuple(moved), tuple(folds)) for moved, folds in rank) for rank in ranks)
    return ScanSchedule(words[1], words[2], layout, sizes, steps)
