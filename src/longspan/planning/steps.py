"""The parts of a schedule: Piece, Transfer, Compute, Step, Schedule. Plain values with a text form that parses back.

A step's transfers start together with its computes. What a transfer brings may be used from the next step on, up to
and including step `until`. There are only two instructions; schemes differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

from longspan.errors import PlanError, ScheduleError
from longspan.layouts import Layout
from longspan.masks import Band
from longspan.spans import Span, parsed_number, shortened, whole

# -- Dtypes by name, since planning does not import torch --------------------------------------------------------------


ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype, or of its name; others are refused.

    >>> dtype_name("bfloat16")
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise PlanError(
            f"dtype {shortened(dtype)} was asked for. Choose one of {', '.join(ITEMSIZE)}, as torch dtypes or names."
        )
    return name


# -- Roles, pieces, transfers, computes, steps and schedules -----------------------------------------------------------


MAX_SIZE = 1 << 24
"""Heads, features and batch rows: more is taken for a mistake."""
MAX_BATCH = 256
"""Point-to-point operations that may be started in one batch: NCCL cuts longer lists differently on different ranks."""


class Role(StrEnum):
    """What a piece holds. K and V always travel together; `out` carries its log-sum-exp, `dout` also row sums."""

    Q = "q"
    KV = "kv"
    OUT = "out"
    DOUT = "dout"
    DQ = "dq"
    DKV = "dkv"


class Recall(StrEnum):
    """How a piece that is not kept after forward gets back to where backward needs it."""

    AGAIN = "again"  # the same source sends it again
    RETURN = "return"  # it was handed on, and comes back along with the gradient
    KEEP = "keep"  # nobody brings it back: it stays


GRADIENT = {Role.Q: Role.DQ, Role.KV: Role.DKV, Role.OUT: Role.DOUT}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a row of each role weighs."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    """0 where a row is one tensor, not a key and a value: see `planning/conv_plan.py`."""
    itemsize: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            low = 0 if name == "v_head_dim" else 1
            whole(getattr(self, name), name, "a plan", ScheduleError, low=low, high=MAX_SIZE)
        if self.q_heads % self.kv_heads:
            raise ScheduleError(
                f"q_heads = {self.q_heads} query heads share kv_heads = {self.kv_heads} key/value heads, which leaves"
                f" {self.q_heads % self.kv_heads} over. Query heads must be a multiple of key/value heads."
            )

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_heads // self.kv_heads

    def row_bytes(self, role: Role) -> int:
        """Bytes of one token of one head. Statistics, and gradients of K and V, which are partial sums, are float32."""
        qk, v, item, wide = self.head_dim, self.v_head_dim, self.itemsize, max(self.itemsize, 4)
        return {
            Role.Q: qk * item,
            Role.KV: (qk + v) * item,
            Role.OUT: v * item + wide,
            Role.DOUT: v * item + 2 * wide,
            Role.DQ: qk * item,
            Role.DKV: (qk + v) * wide,
        }[role]

    def text(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one role: which positions, which heads, which batch rows (None: all).

    >>> Piece(Role.KV, (Span(0, 4), Span(9, 12)), Span(0, 2))
    kv[0:4 9:12]h0:2
    """

    role: Role
    spans: tuple[Span, ...]
    heads: Span
    batch: Span | None = None
    apart: tuple[Span, ...] = ()
    """KV pieces only: query spans whose dK/dV contributions are summed separately (bit-exact plans). Empty: one sum."""

    @property
    def num_tokens(self) -> int:
        return sum([span.stop - span.start for span in self.spans])

    def num_bytes(self, sizes: Sizes) -> int:
        batch = sizes.batch if self.batch is None else len(self.batch)
        return self.num_tokens * len(self.heads) * batch * sizes.row_bytes(self.role)

    @property
    def order(self) -> tuple[object, ...]:
        """Both ends of a message list its pieces in this order."""
        return (self.role, self.heads, self.spans, self.apart)

    def to(self, role: Role) -> Piece:
        """The same rows in another role."""
        return Piece(role, self.spans, self.heads, self.batch, self.apart)

    def gradients(self) -> tuple[Piece, ...]:
        """What comes back for the piece: one sum, or one for each stretch of queries that is kept apart."""
        gradient = self.to(GRADIENT[self.role])
        return tuple(replace(gradient, apart=(span,)) for span in self.apart) or (gradient,)

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f"b{self.batch}"
        apart = f"q{','.join(map(repr, self.apart))}" if self.apart else ""
        return f"{self.role}[{' '.join(map(repr, self.spans))}]h{self.heads}{batch}{apart}"

    @staticmethod
    def parse(text: str) -> Piece:
        """The piece that `repr` wrote."""
        role, _, rest = text.partition("[")
        spans, _, rest = rest.partition("]h")
        rest, _, apart = rest.partition("q")
        heads, _, batch = rest.partition("b")
        if role not in set(Role) or not heads:
            raise ScheduleError(
                f"a piece is written role[spans]hHEADS, as in kv[0:4]h0:2, but {shortened(text)} was found."
            )
        return Piece(
            Role(role),
            tuple(map(Span.parse, spans.split())),
            Span.parse(heads),
            Span.parse(batch) if batch else None,
            tuple(map(Span.parse, apart.split(","))) if apart else (),
        )


class Moved(Protocol):
    """A piece on its way, of whatever kind of plan."""

    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...
    @property
    def piece(self) -> Any: ...
    @property
    def until(self) -> int: ...


class PlanStep(Protocol):
    """One rank's share of a step, of whatever kind of plan."""

    @property
    def transfers(self) -> Sequence[Moved]: ...
    @property
    def computes(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece goes from one rank to another."""

    src: int
    dst: int
    piece: Piece
    until: int
    """The last step in which `dst` uses it."""
    recall: Recall = Recall.AGAIN

    def __repr__(self) -> str:
        return f"{self.src}>{self.dst} {self.piece!r} until {self.until} {self.recall}"

    @staticmethod
    def parse(text: str) -> Transfer:
        """The transfer that `repr` wrote."""
        ends, _, rest = text.partition(" ")
        piece, _, tail = rest.partition(" until ")
        src, _, dst = ends.partition(">")
        until, _, recall = tail.partition(" ")
        form = "a transfer is written SRC>DST PIECE until STEP RECALL"
        if recall not in set(Recall):
            raise ScheduleError(f"{form}, but {shortened(text)} was found.")
        counts = [parsed_number(part, form, text, ScheduleError) for part in (src, dst, until)]
        return Transfer(counts[0], counts[1], Piece.parse(piece), counts[2], Recall(recall))


@dataclass(frozen=True, slots=True)
class Compute:
    """One rank works on the pairs of `bands`, and of `maybe` where the mask's function agrees."""

    rank: int
    q: Piece
    kv: Piece
    bands: tuple[Band, ...]
    maybe: tuple[Band, ...] = ()

    def __repr__(self) -> str:
        text = f"compute {self.q!r} {self.kv!r} : {' '.join(map(repr, self.bands))}"
        return text + (f" ? {' '.join(map(repr, self.maybe))}" if self.maybe else "")

    @staticmethod
    def parse(text: str, rank: int) -> Compute:
        """The compute that `repr` wrote."""
        pieces, colon, rest = text.removeprefix("compute ").partition(" : ")
        q, _, kv = pieces.partition(" kv[")
        if not colon or not kv:
            raise ScheduleError(f"a compute is written compute Q KV : BANDS ? MAYBE, but {shortened(text)} was found.")
        sure, _, maybe = rest.partition("? ")
        bands = tuple(map(Band.parse, sure.split())), tuple(map(Band.parse, maybe.split()))
        return Compute(rank, Piece.parse(q), Piece.parse("kv[" + kv), *bands)


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's share of a step: transfers that it sends or receives, in flight while its computes run."""

    transfers: tuple[Transfer, ...] = ()
    computes: tuple[Compute, ...] = ()

    def batches(self, world_size: int) -> tuple[tuple[Transfer, ...], ...]:
        """The transfers in the lists that are started together, at most MAX_BATCH operations each.

        Both ends sort a transfer into the same list, because both know the distance from source to target.
        """
        half = MAX_BATCH // 2
        lists: dict[int, list[Transfer]] = {}
        for transfer in self.transfers:
            lists.setdefault(((transfer.dst - transfer.src) % world_size - 1) // half, []).append(transfer)
        return tuple(tuple(lists[number]) for number in sorted(lists))


@dataclass(frozen=True)
class Schedule:
    """Every rank's steps, written out. Execution asks for one rank at a time; proofs and pictures want them all."""

    scheme: str
    direction: str
    layout: Layout
    sizes: Sizes
    ranks: tuple[tuple[Step, ...], ...]
    kept: tuple[tuple[Piece, ...], ...] = field(default=())
    """What each rank holds from forward when backward begins, beside its own tokens."""

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "backward"):
            raise ScheduleError(f"direction is 'forward' or 'backward', but {self.direction!r} was given.")
        if len(self.ranks) != self.world_size or (self.kept and len(self.kept) != self.world_size):
            raise ScheduleError(
                f"{self.layout} has {self.world_size} ranks, but the schedule lists steps for {len(self.ranks)} and"
                f" kept pieces for {len(self.kept)}."
            )

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @cached_property
    def num_steps(self) -> int:
        return max(len(steps) for steps in self.ranks)

    def transfers(self) -> Iterator[tuple[int, Transfer]]:
        """(step, transfer) of every transfer once, as its sender lists it."""
        for rank, steps in enumerate(self.ranks):
            for number, step in enumerate(steps):
                yield from ((number, transfer) for transfer in step.transfers if transfer.src == rank)

    def bytes_received(self, rank: int) -> int:
        """What the rank takes from the wire, all steps together."""
        return sum(t.piece.num_bytes(self.sizes) for s in self.ranks[rank] for t in s.transfers if t.dst == rank)

    def text(self) -> str:
        """A text that `text_parser.parse_schedule` reads back."""
        lines = [f"schedule {self.scheme} {self.direction} {self.sizes.text()}", self.layout.text()]
        for rank, steps in enumerate(self.ranks):
            lines.append(f"rank {rank}")
            lines += [f"  kept {piece!r}" for piece in (self.kept[rank] if self.kept else ())]
            for number, step in enumerate(steps):
                lines.append(f"  step {number}")
                lines += [f"    {item!r}" for item in (*step.transfers, *step.computes)]
        return "\n".join(lines)
