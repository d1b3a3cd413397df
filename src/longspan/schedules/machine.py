"""Machine: the numbers of a piece of hardware, and what a step costs on it. Everything it says is simulated.

kernel = tile FLOP / (flops * share) + tile slots * slot_seconds / slots
work   = kernel + copied bytes / copy_bandwidth + operations * op_seconds
move   = the slowest link level: latency + bytes / bandwidth, in or out
step   = max(work, move): transfers run beside computes
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from longspan.errors import PlanError
from longspan.masks import bands as bd
from longspan.schedules.steps import Compute, Sizes, Step
from longspan.span import Ints, Span, shortened, whole


def _check_number(value: object, name: str, where: str, *, zero: bool = False) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        bound = "0 or more" if zero else "above 0"
        raise PlanError(f"{where} was given {name} = {shortened(value)}. {name} must be a finite number {bound}.")


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network: ranks in blocks of `ranks` reach each other with this speed."""

    ranks: int
    bandwidth: float
    """Bytes per second of one rank, one direction."""
    latency: float

    def __post_init__(self) -> None:
        whole(self.ranks, "ranks", "Link()", PlanError, low=1)
        _check_number(self.bandwidth, "bandwidth", "Link()")
        _check_number(self.latency, "latency", "Link()", zero=True)


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile a kernel works in: rows of its outer side, and the widths it rounds the inner side to."""

    rows: int
    cut_width: int
    full_width: int
    packs_heads: bool = False
    """Whether the query heads of one key/value head fill the rows of a tile together."""

    def __post_init__(self) -> None:
        for name in ("rows", "cut_width", "full_width"):
            whole(getattr(self, name), name, "Tiling()", PlanError, low=1)


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured or published numbers of the hardware."""

    name: str
    source: str
    flops: float
    """Dense FLOP per second of one rank."""
    forward_share: float
    backward_share: float
    slots: int
    """Tiles that run at once."""
    slot_seconds: float
    copy_bandwidth: float
    op_seconds: float
    one_launch: bool
    """Whether one operation runs all slices of a compute (a variable-length kernel), or each needs its own."""
    links: tuple[Link, ...]
    """From the inside outwards; the last reaches everybody."""
    forward_tiling: Tiling
    backward_tiling: Tiling

    def __post_init__(self) -> None:
        where = f"machine {shortened(self.name)}"
        for name in ("flops", "forward_share", "backward_share", "copy_bandwidth"):
            _check_number(getattr(self, name), name, where)
        for name in ("slot_seconds", "op_seconds"):
            _check_number(getattr(self, name), name, where, zero=True)
        whole(self.slots, "slots", where, PlanError, low=1)
        for name, kind in (("forward_tiling", Tiling), ("backward_tiling", Tiling), ("links", tuple)):
            if not isinstance(getattr(self, name), kind):
                raise PlanError(
                    f"{where} was given {name} = {shortened(getattr(self, name))}. It is a {kind.__name__}."
                )
        if not all(isinstance(link, Link) for link in self.links):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"{where} was given links = {shortened(self.links)}. Links are of type Link.")
        sizes = [link.ranks for link in self.links]
        if not sizes or sizes != sorted(sizes):
            raise PlanError(
                f"machine {self.name} lists links over {sizes} ranks. Give one or more, from the inside outwards."
            )

    @property
    def node(self) -> int:
        """Ranks that share the innermost link."""
        return self.links[0].ranks

    def level(self, src: int, dst: int) -> int:
        """The number of the link that joins two ranks."""
        for number, link in enumerate(self.links):
            if src // link.ranks == dst // link.ranks:
                return number
        return len(self.links) - 1


@dataclass(frozen=True, slots=True)
class Work:
    """What a step asks of one rank's device."""

    flop: float = 0.0
    slots: float = 0.0
    copied: float = 0.0
    ops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flop + other.flop, self.slots + other.slots, self.copied + other.copied, self.ops + other.ops)

    def seconds(self, machine: Machine, direction: str) -> float:
        share = machine.forward_share if direction == "forward" else machine.backward_share
        kernel = self.flop / (machine.flops * share) + self.slots * machine.slot_seconds / machine.slots
        return kernel + self.copied / machine.copy_bandwidth + self.ops * machine.op_seconds


def tile_work(rows: Ints, q_heads: int, kv_heads: int, dims: int, machine: Machine, direction: str) -> Work:
    """The kernel work of `(n, 6)` bands, rounded up to tiles; `dims` is head_dim + v_head_dim."""
    q, kv = (rows[:, bd.Q1] - rows[:, bd.Q0]).astype(float), (rows[:, bd.K1] - rows[:, bd.K0]).astype(float)
    pairs = bd.area(rows).astype(float)
    if direction == "forward":  # tiles hold queries and run over keys
        tiling, outer, inner, flop = machine.forward_tiling, q, kv, 2.0
        group = q_heads / kv_heads if tiling.packs_heads else 1.0
    else:  # tiles hold keys and run over queries
        tiling, outer, inner, flop, group = machine.backward_tiling, kv, q, 5.0, 1.0
    heads = q_heads / group
    tiles = np.ceil(outer * group / tiling.rows)
    reach = np.maximum(pairs / np.maximum(outer, 1) + tiling.rows / group / 2 + tiling.cut_width / 2, tiling.cut_width)
    full = np.ceil(inner / tiling.full_width) * tiling.full_width
    cut = np.minimum(reach, np.ceil(inner / tiling.cut_width) * tiling.cut_width)
    width = np.where(pairs >= q * kv, full, cut)
    return Work(float((tiles * width).sum()) * heads * tiling.rows * flop * dims, float(tiles.sum()) * heads)


def compute_work(compute: Compute, sizes: Sizes, machine: Machine, direction: str, later: bool) -> Work:
    """The work of one compute: its tiles, its launches, and merging into what earlier steps left (`later`)."""
    bands = bd.as_array((*compute.bands, *compute.maybe))
    rows = sizes.batch if compute.q.rows is None else len(compute.q.rows)
    q_heads, kv_heads = len(compute.q.heads), len(compute.kv.heads)
    tiles = tile_work(bands, q_heads, kv_heads, sizes.head_dim + sizes.v_head_dim, machine, direction)
    # A float32 row is read, read again and written where partial results meet.
    q_elements = compute.q.num_tokens * q_heads * (sizes.v_head_dim if direction == "forward" else sizes.head_dim)
    copied = 12.0 * q_elements if later else 0.0
    if direction == "backward":
        copied += 0.0 if later else 14.0 * q_elements
        copied += 10.0 * compute.kv.num_tokens * kv_heads * (sizes.head_dim + sizes.v_head_dim)
    ops = 5.0 if machine.one_launch else float(len(bands))
    return Work(tiles.flop * rows, tiles.slots * rows, copied * rows, ops)


def step_work(step: Step, rank: int, sizes: Sizes, machine: Machine, direction: str, later: bool) -> Work:
    """All computes of a step, and packing and unpacking of what it sends and receives."""
    work = Work()
    met: set[Span] = set()
    for compute in step.computes:
        again = bool(compute.kv.apart) and not met.isdisjoint(compute.q.spans)  # chunks merge within a step, too
        work += compute_work(compute, sizes, machine, direction, later or again)
        met.update(compute.q.spans)
    moved = sum(t.piece.num_bytes(sizes) for t in step.transfers if rank in (t.src, t.dst))
    return work + Work(copied=2.0 * moved, ops=2.0 if step.transfers else 0.0)


def move_seconds(step: Step, rank: int, sizes: Sizes, machine: Machine) -> float:
    """How long the step's transfers keep the rank's busiest link."""
    sums = np.zeros((len(machine.links), 2))
    for t in step.transfers:
        sums[machine.level(t.src, t.dst), int(t.dst == rank)] += t.piece.num_bytes(sizes)
    times = [
        link.latency + total / link.bandwidth
        for link, total in zip(machine.links, sums.max(axis=1), strict=True)
        if total
    ]
    return float(max(times, default=0.0))


def rank_seconds(steps: tuple[Step, ...], rank: int, sizes: Sizes, machine: Machine, direction: str) -> float:
    """The rank's steps one after another, as if it never waited for others to be ready."""
    seconds, later = 0.0, False
    for step in steps:
        work = step_work(step, rank, sizes, machine, direction, later).seconds(machine, direction)
        seconds += max(work, move_seconds(step, rank, sizes, machine))
        later = later or bool(step.computes)
    return seconds
