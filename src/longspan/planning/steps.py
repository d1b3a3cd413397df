"""The parts of a schedule: Piece, Transfer, Compute, Step, Schedule. Plain values with a text form.

A step's transfers start together with its computes. A transfer has arrived at the end of its step, or `early` steps
later if it was started earlier than needed, so that it travels during several computes. What it brings may be used from
the next step on, up to and including step `until`. There are only two instructions; schemes differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Protocol

from longspan.errors import PlanError, ScheduleError
from longspan.layouts import Layout
from longspan.masks import Band
from longspan.spans import Span, check_int, truncated_repr

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of dtypes by name, since planning does not import torch."""
MAX_SIZE = 1 << 24
"""Limit of heads, features and batch rows: more is taken for a mistake."""
MAX_BATCH = 256
"""Point-to-point operations that may be started in one batch: NCCL cuts longer lists differently on different ranks."""


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch dtype, which may be passed as a name too; raise if plans do not support it.

    >>> dtype_name("bfloat16")
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise PlanError(
            f"dtype must be one of {', '.join(ITEMSIZE)}, as a dtype or name, but got {truncated_repr(dtype)}."
        )
    return name


class Role(StrEnum):
    """The contents of a piece. K and V always travel together; `out` carries its log-sum-exp, `dout` also row sums."""

    Q = "q"
    KV = "kv"
    OUT = "out"
    DOUT = "dout"
    DQ = "dq"
    DKV = "dkv"


class Recall(StrEnum):
    """How backward gets a piece that was not kept after forward."""

    AGAIN = "again"  # the same source sends it again
    RETURN = "return"  # it was passed on, and comes back along with the gradient
    KEEP = "keep"  # no rank sends it: it must be kept


GRADIENT = {Role.Q: Role.DQ, Role.KV: Role.DKV, Role.OUT: Role.DOUT}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Heads, features and batch rows of the tensors, from which the bytes of a row of each role follow."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    """0 if a row is one tensor, not a key and a value: see `planning/conv_plan.py`."""
    itemsize: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            low = 0 if name == "v_head_dim" else 1
            number = check_int(getattr(self, name), name, "plan", ScheduleError, low=low, high=MAX_SIZE)
            object.__setattr__(self, name, number)  # numpy's would overflow
        if self.q_heads % self.kv_heads:
            raise ScheduleError(
                f"q_heads must be a multiple of kv_heads, but got q_heads = {self.q_heads} and kv_heads ="
                f" {self.kv_heads}, which leaves {self.q_heads % self.kv_heads} over."
            )

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_heads // self.kv_heads

    def row_bytes(self, role: Role) -> int:
        """Return the bytes of one token of one head. Statistics and gradients of K and V (partial sums) are float32."""
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
    """Rows of one role: positions, heads and batch rows (None: all).

    >>> Piece(Role.KV, (Span(0, 4), Span(9, 12)), Span(0, 2))
    kv[0:4 9:12]h0:2
    """

    role: Role
    spans: tuple[Span, ...]
    heads: Span
    batch: Span | None = None

    @property
    def num_tokens(self) -> int:
        return sum([span.stop - span.start for span in self.spans])

    def num_bytes(self, sizes: Sizes) -> int:
        batch = sizes.batch if self.batch is None else len(self.batch)
        return self.num_tokens * len(self.heads) * batch * sizes.row_bytes(self.role)

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key of the pieces of a message, the same at both ends."""
        return (self.role, self.heads, self.spans)

    def to(self, role: Role) -> Piece:
        """Return the same rows in another role."""
        return Piece(role, self.spans, self.heads, self.batch)

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f"b{self.batch}"
        return f"{self.role}[{' '.join(map(repr, self.spans))}]h{self.heads}{batch}"


class Moved(Protocol):
    """A transfer of any kind of plan."""

    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...
    @property
    def piece(self) -> Any: ...
    @property
    def until(self) -> int: ...
    @property
    def early(self) -> int: ...


class PlanStep(Protocol):
    """One rank's part of a step, of any kind of plan."""

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
    early: int = 0
    """For how many steps after its own it may travel: it has arrived at the end of the last of them."""
    back: int = 0
    """`early` of the transfer that sends it again in backward."""

    def __repr__(self) -> str:
        early = f" early {self.early} back {self.back}" if self.early or self.back else ""
        return f"{self.src}>{self.dst} {self.piece!r} until {self.until} {self.recall}{early}"


@dataclass(frozen=True, slots=True)
class Compute:
    """One rank computes the pairs of `bands`, and those pairs of `maybe` that the mask's function allows."""

    rank: int
    q: Piece
    kv: Piece
    bands: tuple[Band, ...]
    maybe: tuple[Band, ...] = ()

    def __repr__(self) -> str:
        text = f"compute {self.q!r} {self.kv!r} : {' '.join(map(repr, self.bands))}"
        return text + (f" ? {' '.join(map(repr, self.maybe))}" if self.maybe else "")


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part of a step: transfers that it sends or receives, in flight while its computes run."""

    transfers: tuple[Transfer, ...] = ()
    computes: tuple[Compute, ...] = ()

    def batches(self, world_size: int) -> tuple[tuple[Transfer, ...], ...]:
        """Return the transfers in lists that are started together, of at most MAX_BATCH operations each.

        Both ends put a transfer into the same list, because both know the distance from source to target.
        """
        half = MAX_BATCH // 2
        lists: dict[int, list[Transfer]] = {}
        for transfer in self.transfers:
            lists.setdefault(((transfer.dst - transfer.src) % world_size - 1) // half, []).append(transfer)
        return tuple(tuple(lists[number]) for number in sorted(lists))


@dataclass(frozen=True)
class AnySchedule:
    """The common part of attention and scan schedules: every rank's steps, written out. Execution reads the steps of
    one rank at a time; the validator and the simulator need all of them."""

    scheme: str
    direction: str
    layout: Layout
    sizes: Any
    ranks: tuple[tuple[Any, ...], ...]
    kept: tuple[tuple[Any, ...], ...] = ()
    """The pieces that each rank holds from forward when backward begins, beyond its own tokens."""
    kind: ClassVar[str]
    """The first word of the text form."""

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "backward"):
            raise ScheduleError(f"direction must be 'forward' or 'backward', but got {self.direction!r}.")
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

    def transfers(self) -> Iterator[tuple[int, Any]]:
        """Yield (step, transfer) of every transfer once, as its sender lists it."""
        for rank, steps in enumerate(self.ranks):
            for number, step in enumerate(steps):
                yield from ((number, transfer) for transfer in step.transfers if transfer.src == rank)

    def bytes_received(self, rank: int) -> int:
        """Return the bytes that the rank receives in all steps."""
        return sum(t.piece.num_bytes(self.sizes) for s in self.ranks[rank] for t in s.transfers if t.dst == rank)

    def text(self) -> str:
        """Return the schedule as text, one line for each piece, transfer and compute."""
        lines = [f"{self.kind} {self.scheme} {self.direction} {self.sizes.text()}", self.layout.text()]
        for rank, steps in enumerate(self.ranks):
            lines.append(f"rank {rank}")
            lines += [f"  kept {piece!r}" for piece in (self.kept[rank] if self.kept else ())]
            for number, step in enumerate(steps):
                lines.append(f"  step {number}")
                items = (step.computes, step.transfers) if self.kind == "scan" else (step.transfers, step.computes)
                lines += [f"    {item!r}" for part in items for item in part]
        return "\n".join(lines)


@dataclass(frozen=True)
class Schedule(AnySchedule):
    """The schedule of an attention."""

    sizes: Sizes
    ranks: tuple[tuple[Step, ...], ...]
    kept: tuple[tuple[Piece, ...], ...] = ()
    kind: ClassVar[str] = "schedule"


# -- Table: ranks down, steps across -----------------------------------------------------------------------------------


_NEAR = 4


def table(schedule: AnySchedule, mark: tuple[int, int] | None = None) -> str:
    """Draw one cell per rank and step: peers sent to (>), peers received from (<), computes (*).

    The cell of `mark`, (rank, step), is set in !! !!, and large schedules are cut to its neighbourhood.
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
    hidden = schedule.world_size - len(rows), schedule.num_steps - len(columns)
    return text + (f"\n({hidden[0]} ranks and {hidden[1]} steps left out)" if any(hidden) else "")


def _cell(step: PlanStep, rank: int) -> str:
    words: list[str] = []
    targets = sorted({t.dst for t in step.transfers if t.src == rank})
    sources = sorted({t.src for t in step.transfers if t.dst == rank})
    for sign, peers in ((">", targets), ("<", sources)):
        if peers:
            words.append(sign + (",".join(map(str, peers)) if len(peers) <= 4 else f"({len(peers)})"))
    if step.computes:
        words.append(f"*{len(step.computes)}")
    return " ".join(words) or "."
