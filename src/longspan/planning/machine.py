"""Machine: the rates of a piece of hardware, the cost of a step on it, and its JSON form. All times are simulated."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.masks import bands as bd
from longspan.planning.cost import ADDED, BYTES, DST, SRC, STEP, bands_of, launch_table, sides, traffic
from longspan.planning.steps import Compute, Sizes, Step
from longspan.spans import Ints, Span, shortened, whole

# -- Machines and the cost of a step -----------------------------------------------------------------------------------
#     kernel = tile FLOP / (flops * share) + tile slots * slot_seconds / slots
#     work   = kernel + copied bytes / copy_bandwidth + operations * op_seconds
#     move   = the slowest link level: latency + bytes / bandwidth, in or out
#     step   = max(work, move): transfers run while computes run
#
# A host that only queues work for its device (a GPU) runs ahead of it and has its own timeline:
#
#     queued = call_seconds, then for each step operations * launch_seconds + messages * message_seconds more
#     left   = max(when the last step was left + step, queued): a step ends when it is done and all of it was queued
#
# With call_seconds = 150 us, launch_seconds = 10 us, no messages, and three steps of 20 operations and 100 us each, the
# host has queued them at 350, 550 and 750 us, and the steps end then: the host limits this call. Steps of 1 ms would
# end at 1, 2 and 3 ms, and the host would not matter.


Floats = NDArray[np.float64]


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
    far_rows: int = 0
    """For a kernel without windows: rows per panel in which a window's far border is masked. 0: it has windows."""
    far_share: float = 1.0
    """Speed where that border cuts, as a share of speed elsewhere."""

    def __post_init__(self) -> None:
        for name in ("rows", "cut_width", "full_width"):
            whole(getattr(self, name), name, "Tiling()", PlanError, low=1)
        whole(self.far_rows, "far_rows", "Tiling()", PlanError, low=0)
        _check_number(self.far_share, "far_share", "Tiling()")


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
    """How many tiles run at once."""
    slot_seconds: float
    copy_bandwidth: float
    op_seconds: float
    one_launch: bool
    """Whether one operation runs all slices of a compute (a variable-length kernel), or each needs its own."""
    links: tuple[Link, ...]
    """From the inside outwards; the last reaches everybody."""
    forward_tiling: Tiling
    backward_tiling: Tiling
    kernel: str = ""
    """Whose speed the shares are: FA2, FA3, FA4, cuDNN, flex, cpu_flash. Empty: the machine's file does not say."""
    launch_seconds: float = 0.0
    """What queueing one operation costs the host. 0 where operations run on the host itself."""
    message_seconds: float = 0.0
    """What starting one message, at either end, costs the host."""
    call_seconds: float = 0.0
    """What a call costs the host before its first step and after its last."""
    matmul_share: float = 0.0
    """What matrix products of a model's layers reach in training, as a share of `flops`. 0: not known."""
    host_bandwidth: float = 0.0
    """Bytes per second between a device and its host's pinned memory, one direction. 0: not known."""

    def __post_init__(self) -> None:
        where = f"machine {shortened(self.name)}"
        for name in ("flops", "forward_share", "backward_share", "copy_bandwidth"):
            _check_number(getattr(self, name), name, where)
        for name in (
            "slot_seconds", "op_seconds", "launch_seconds", "message_seconds", "call_seconds", "matmul_share",
            "host_bandwidth",
        ):  # fmt: skip
            _check_number(getattr(self, name), name, where, zero=True)
        whole(self.slots, "slots", where, PlanError, low=1)
        if not isinstance(self.kernel, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(
                f"{where} was given kernel = {shortened(self.kernel)}. It is the name of a kernel, or empty."
            )
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

    def levels(self, src: Ints, dst: Ints) -> Ints:
        """`level` of many pairs of ranks."""
        levels = np.full(len(src), len(self.links) - 1, dtype=np.int64)
        for number, link in reversed(list(enumerate(self.links))):
            levels[src // link.ranks == dst // link.ranks] = number
        return levels


@dataclass(frozen=True, slots=True)
class Work:
    """What a step asks of one rank's device, and of the host that queues it."""

    flop: float = 0.0
    slots: float = 0.0
    copied: float = 0.0
    ops: float = 0.0
    messages: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flop + other.flop,
            self.slots + other.slots,
            self.copied + other.copied,
            self.ops + other.ops,
            self.messages + other.messages,
        )

    def seconds(self, machine: Machine, direction: str) -> float:
        share = machine.forward_share if direction == "forward" else machine.backward_share
        kernel = self.flop / (machine.flops * share) + self.slots * machine.slot_seconds / machine.slots
        return kernel + self.copied / machine.copy_bandwidth + self.ops * machine.op_seconds

    def host_seconds(self, machine: Machine) -> float:
        """How long the host is busy with queueing it."""
        return self.ops * machine.launch_seconds + self.messages * machine.message_seconds


def queued_at(works: list[Work], machine: Machine) -> list[float]:
    """When the host has queued each step, counted from the beginning of the call."""
    return list(accumulate((work.host_seconds(machine) for work in works), initial=machine.call_seconds))[1:]


def tile_work(rows: Ints, q_heads: int, kv_heads: int, dims: int, machine: Machine, direction: str) -> Work:
    """The kernel work of `(n, 6)` bands, rounded up to tiles; `dims` is head_dim + v_head_dim."""
    heads = np.full(len(rows), q_heads, dtype=np.int64), np.full(len(rows), kv_heads, dtype=np.int64)
    flop, slots = (float(part.sum()) for part in _tiles(rows, *heads, dims, machine, direction))
    return Work(flop, slots)


def _tiles(
    rows: Ints, q_heads: Ints, kv_heads: Ints, dims: int, machine: Machine, direction: str
) -> tuple[Floats, Floats]:
    """FLOP and tile slots of each band, for its own numbers of heads."""
    q, kv = (rows[:, bd.Q1] - rows[:, bd.Q0]).astype(float), (rows[:, bd.K1] - rows[:, bd.K0]).astype(float)
    pairs = bd.area(rows).astype(float)
    group = np.ones(len(rows))
    if direction == "forward":  # tiles hold queries and run over keys
        tiling, outer, inner, flop = machine.forward_tiling, q, kv, 2.0
        group = q_heads / kv_heads if tiling.packs_heads else group
    else:  # tiles hold keys and run over queries
        tiling, outer, inner, flop = machine.backward_tiling, kv, q, 5.0
    heads = q_heads / group
    tiles = np.ceil(outer * group / tiling.rows)
    near, far = bd.borders(rows)
    over = (tiling.rows / group + tiling.cut_width) / 2  # a tile ends with whole blocks
    if tiling.far_rows:  # half of what a panel masks is worked on for nothing
        masked = pairs + far * q * np.minimum(q, _panel_rows(rows, tiling)) / 2
    else:
        masked, over = pairs, over * np.where(near & far, 2.0, 1.0)
    reach = np.maximum(masked / np.maximum(outer, 1) + over, tiling.cut_width)
    full = np.ceil(inner / tiling.full_width) * tiling.full_width
    cut = np.minimum(reach, np.ceil(inner / tiling.cut_width) * tiling.cut_width)
    width = np.where(pairs >= q * kv, full, cut) / np.where(far, tiling.far_share, 1.0)
    return tiles * width * heads * tiling.rows * flop * dims, tiles * heads


def _panel_rows(rows: Ints, tiling: Tiling) -> Ints:
    """Rows of the panels that a band with a far border is cut into: narrow windows go in smaller ones."""
    narrow = rows[:, bd.HI] - rows[:, bd.LO] + 1 < 2 * tiling.far_rows  # an open bound is far away
    return np.where(narrow, max(tiling.far_rows // 4, 1), tiling.far_rows)


def steps_work(
    steps: tuple[Step, ...], rank: int, sizes: Sizes, machine: Machine, direction: str, later: bool = False
) -> list[Work]:
    """Each step's computes, merging into what earlier steps left, and packing of what the step sends and receives.

    `later` says that there were computes before the first of these steps.
    """
    return _steps_work(steps, rank, sizes, machine, direction, later, traffic(steps, sizes))


def _steps_work(
    steps: tuple[Step, ...], rank: int, sizes: Sizes, machine: Machine, direction: str, later: bool, moved: Ints
) -> list[Work]:
    number = np.array([i for i, step in enumerate(steps) for _ in step.computes], dtype=np.int64)
    computes = [compute for step in steps for compute in step.computes]
    merges = number > (-1 if later or not len(number) else number[0])
    merges |= np.array([again for step in steps for again in _meets_again(step)], dtype=np.bool_)
    works = _computes_work(computes, merges, sizes, machine, direction)
    sums = [_sums(number, part, len(steps)) for part in works]
    moved = moved[(moved[:, SRC] == rank) | (moved[:, DST] == rank)]
    sums[2] += 2.0 * _sums(moved[:, STEP], moved[:, BYTES], len(steps))
    ops, messages = _transfer_ops(moved, rank, len(steps))
    sums[3] += ops if machine.one_launch else [2.0 if step.transfers else 0.0 for step in steps]
    return [Work(*one) for one in zip(*(part.tolist() for part in (*sums, messages)), strict=True)]


def _transfer_ops(moved: Ints, rank: int, num_steps: int) -> tuple[Floats, Floats]:
    """In each step, operations and messages of the rank's own transfers: one that packs for each peer, one that starts
    all messages, and one that adds for each peer from whom rows come home."""
    sent, added = moved[:, SRC] == rank, (moved[:, DST] == rank) & (moved[:, ADDED] > 0)
    size = int(moved[:, (SRC, DST)].max(initial=0)) + 1
    numbers = moved[:, STEP] * size + np.where(sent, moved[:, DST], moved[:, SRC])  # a step and a peer
    packed, home, taken = (np.unique(numbers[which]) // size for which in (sent, added, ~sent))
    begun = np.unique(moved[:, STEP])
    ops = np.bincount(np.concatenate((packed, begun, home)), minlength=num_steps)
    messages = np.bincount(np.concatenate((packed, taken)), minlength=num_steps)
    return ops.astype(np.float64), messages.astype(np.float64)


def _meets_again(step: Step) -> list[bool]:
    """For each compute, whether its rows met others in this very step, as they do where computes go chunk by chunk."""
    met: set[Span] = set()
    again: list[bool] = []
    for compute in step.computes:
        again.append(bool(compute.kv.apart) and not met.isdisjoint(compute.q.spans))
        met.update(compute.q.spans if compute.kv.apart else ())
    return again


def _computes_work(
    computes: list[Compute], merges: NDArray[np.bool_], sizes: Sizes, machine: Machine, direction: str
) -> tuple[Floats, Floats, Floats, Floats]:
    """FLOP, tile slots, copied bytes and operations of each compute; `merges` where rows meet earlier results."""
    table, rows = sides(computes, sizes), bands_of(computes)
    q_heads, kv_heads, q_tokens, kv_tokens, batch, count = table.T
    each = np.repeat(np.arange(len(computes)), count)
    dims = sizes.head_dim + sizes.v_head_dim
    tiles = _tiles(rows, q_heads[each], kv_heads[each], dims, machine, direction)
    flop, slots = (_sums(each, part, len(computes)) for part in tiles)
    # A float32 row is read, read again and written where partial results meet.
    q_elements = q_tokens * q_heads * (sizes.v_head_dim if direction == "forward" else sizes.head_dim)
    copied = np.where(merges, 12.0, 0.0 if direction == "forward" else 14.0) * q_elements.astype(np.float64)
    if direction == "backward":
        copied = copied + 10.0 * (kv_tokens * kv_heads * dims).astype(np.float64)
    ops = count.astype(np.float64)
    if machine.one_launch:  # keys are gathered, and each launch's results are put to those before
        launches = launch_table(rows, table).per_compute(len(computes))
        ops = 2.0 * launches + merges if direction == "forward" else 1.0 + 3.0 * launches
    weight = batch.astype(np.float64)
    return flop * weight, slots * weight, copied * weight, ops


def _sums(number: Ints, values: Ints | Floats, size: int) -> Floats:
    """The values of each number added up, in their order."""
    return np.bincount(number, values, size).astype(float)  # of nothing, bincount makes whole numbers


def _move_seconds(num_steps: int, rank: int, machine: Machine, moved: Ints) -> Floats:
    """How long the transfers of each step keep the rank's busiest link."""
    sums = np.zeros((num_steps, len(machine.links), 2))
    level = machine.levels(moved[:, SRC], moved[:, DST])
    np.add.at(sums, (moved[:, STEP], level, (moved[:, DST] == rank).astype(np.int64)), moved[:, BYTES])
    busiest = sums.max(axis=2)
    latency = np.array([link.latency for link in machine.links])
    bandwidth = np.array([link.bandwidth for link in machine.links])
    return np.where(busiest > 0, latency + busiest / bandwidth, 0.0).max(axis=1)


def rank_seconds(steps: tuple[Step, ...], rank: int, sizes: Sizes, machine: Machine, direction: str) -> float:
    """The rank's steps one after another, as if it never waited for others to be ready."""
    return rank_times(steps, rank, sizes, machine, direction)[0]


def rank_times(
    steps: tuple[Step, ...], rank: int, sizes: Sizes, machine: Machine, direction: str
) -> tuple[float, float]:
    """`rank_seconds`, and how long the rank's host is busy with queueing."""
    moved = traffic(steps, sizes)
    works = _steps_work(steps, rank, sizes, machine, direction, False, moved)
    moves = _move_seconds(len(steps), rank, machine, moved).tolist()
    left, queued = 0.0, machine.call_seconds
    for work, move, queued in zip(works, moves, queued_at(works, machine), strict=True):
        left = max(left + max(work.seconds(machine, direction), move), queued)
    return max(left, queued), queued


# -- JSON form: `longspan calibrate` writes it, `--machine FILE` reads and checks it -----------------------------------


FORMAT = "longspan machine 1"
MAX_TEXT = 1 << 16
MAX_LINKS = 8
MAX_RANKS = 1 << 30
_MAY_BE_ZERO = (
    "slot_seconds", "op_seconds", "latency", "far_rows", "launch_seconds", "message_seconds", "call_seconds",
    "matmul_share", "host_bandwidth",
)  # fmt: skip

T = TypeVar("T", Link, Tiling, Machine)


def machine_text(machine: Machine) -> str:
    """The machine as JSON that `parse_machine` reads back.

    >>> from longspan.planning.presets import CPU
    >>> parse_machine(machine_text(CPU)) == CPU
    True
    """
    return json.dumps({"format": FORMAT, **asdict(machine)}, indent=2) + "\n"


def parse_machine(text: str) -> Machine:
    """The machine that `machine_text` wrote."""
    if len(text) > MAX_TEXT:
        raise PlanError(f"a machine file has at most {MAX_TEXT} characters, but this one has {len(text)}.")
    try:
        value: Any = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as wrong:
        raise PlanError(f"a machine file is JSON as `longspan calibrate` writes it: {wrong!s:.100}.") from wrong
    if not isinstance(value, dict) or cast(dict[str, Any], value).get("format") != FORMAT:
        raise PlanError(f'a machine file is a JSON object with "format": "{FORMAT}", which was not found.')
    entries = cast(dict[str, Any], value)
    del entries["format"]
    return _parsed(Machine, entries, "machine")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a measured number")


def _parsed(kind: type[T], given: Any, where: str) -> T:
    """An object of dataclass `kind` from JSON: exactly its fields, each of its type and in its range."""
    wanted = {field.name: str(field.type) for field in fields(kind)}
    if not isinstance(given, dict):
        raise PlanError(f"{where} is an object with {', '.join(wanted)}, but {given!r:.60} was found.")
    entries = cast(dict[str, Any], given)
    optional = {field.name for field in fields(kind) if field.default is not MISSING}  # came after the first files
    for name in sorted((entries.keys() ^ wanted.keys()) - (optional - entries.keys())):
        raise PlanError(f"{where}: {name!r:.40} {'is missing' if name in wanted else 'is not known'}.")
    return kind(**{name: _value(wanted[name], value, f"{where}.{name}") for name, value in entries.items()})


def _value(declared: str, value: Any, where: str) -> Any:
    if declared == "Tiling":
        return _parsed(Tiling, value, where)
    if declared.startswith("tuple"):
        if not isinstance(value, list) or not 0 < len(cast(list[Any], value)) <= MAX_LINKS:
            raise PlanError(f"{where} is a list of 1 to {MAX_LINKS} links, but {value!r:.60} was found.")
        return tuple(_parsed(Link, link, f"{where}[{i}]") for i, link in enumerate(cast(list[Any], value)))
    if declared == "bool" and isinstance(value, bool):
        return value
    if declared == "str" and isinstance(value, str) and len(value) <= 1000 and value.isprintable():
        return value
    may_be_zero = where.rpartition(".")[2] in _MAY_BE_ZERO
    if declared == "int" and type(value) is int and (0 if may_be_zero else 1) <= value <= MAX_RANKS:
        return value
    least = 0.0 if may_be_zero else 1e-12
    if declared == "float" and type(value) in (int, float) and least <= cast(float, value) <= 1e18:
        return float(value)
    what = {"bool": "true or false", "str": "a printable text", "int": "a whole number", "float": "a positive number"}
    raise PlanError(f"{where} is {what[declared]}, but {value!r:.60} was found.")
