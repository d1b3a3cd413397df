"""Machine: the rates of a piece of hardware, the cost of a step on it, presets by name, and its JSON form.

All times are simulated:

    kernel = tile FLOP / (flops * share) + tile slots * slot_seconds / slots
    work   = kernel + copied bytes / copy_bandwidth + operations * op_seconds
    move   = the slowest link level: latency + bytes / bandwidth, in or out
    step   = pack + max(compute, move) + unpack, which are parts of work: messages are packed before they are sent and
             unpacked after they have arrived, and travel while computes run

A host that only queues work for its device (a GPU) runs ahead of it and has its own timeline:

    queued = call_seconds, then for each step operations * launch_seconds + messages * message_seconds more
    end    = max(end of the last step + step, queued): a step ends when it is done and all of it was queued

With call_seconds = 150 us, launch_seconds = 10 us, no messages, and three steps of 20 operations and 100 us each, the
host has queued them at 350, 550 and 750 us, and the steps end then: the host limits this call. Steps of 1 ms would
end at 1, 2 and 3 ms, and the host would not matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.masks import bands as bd
from longspan.masks.work import Pairs
from longspan.planning.cost import ADDED, BANDS, BYTES, DST, DUE, SRC, STEP, bands_of, launch_table, sides, traffic
from longspan.planning.steps import Compute, Sizes, Step
from longspan.spans import Ints, check_int, truncated_repr

Floats = NDArray[np.float64]
Count = Callable[[Compute], Pairs]
_MAY_BE_ZERO = (
    "slot_seconds", "op_seconds", "latency", "far_rows", "launch_seconds", "message_seconds", "call_seconds",
    "matmul_share", "host_bandwidth", "message_copies",
)  # fmt: skip


def _check_numbers(value: Link | Tiling | Machine, where: str) -> None:
    """Check the int and float fields of a dataclass."""
    for field in fields(value):
        number, name = getattr(value, field.name), field.name
        may_be_zero = name in _MAY_BE_ZERO
        if field.type == "int":
            number = check_int(number, name, where, PlanError, low=0 if may_be_zero else 1)
            object.__setattr__(value, name, number)  # numpy's would overflow
        elif field.type == "float":
            is_number = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
            if not is_number or number < 0 or (number == 0 and not may_be_zero):
                bound = "of at least 0" if may_be_zero else "above 0"
                raise PlanError(
                    f"{where}: {name} must be a finite number {bound}, but got {name} = {truncated_repr(number)}."
                )


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network: ranks in blocks of `ranks` reach each other with this speed."""

    ranks: int
    bandwidth: float
    """Bytes per second of one rank, one direction."""
    latency: float

    def __post_init__(self) -> None:
        _check_numbers(self, "Link()")


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile of a kernel: rows of its outer side, and the widths it rounds the inner side to."""

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
        _check_numbers(self, "Tiling()")


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
    """Number of tiles that run at once."""
    slot_seconds: float
    copy_bandwidth: float
    op_seconds: float
    one_launch: bool
    """Whether one operation runs all slices of a compute (a variable-length kernel), or each slice needs its own."""
    links: tuple[Link, ...]
    """From the innermost to the outermost, which connects all ranks."""
    forward_tiling: Tiling
    backward_tiling: Tiling
    kernel: str = ""
    """The kernel that the shares are for: FA2, FA3, FA4, cuDNN, flex, cpu_flash. Empty: not known."""
    launch_seconds: float = 0.0
    """Host time to queue one operation. 0 if operations run on the host itself."""
    message_seconds: float = 0.0
    """Host time to start one message, at either end."""
    call_seconds: float = 0.0
    """Host time of a call before its first step and after its last."""
    matmul_share: float = 0.0
    """Speed of the matrix products of a model's layers in training, as a share of `flops`. 0: not known."""
    host_bandwidth: float = 0.0
    """Bytes per second between a device and its host's pinned memory, one direction. 0: not known."""
    message_copies: float = 0.0
    """How often the processor that computes copies each byte of a message, beside packing and unpacking, at either end.
    0 where a network card or a copy engine moves messages."""

    def __post_init__(self) -> None:
        where = f"machine {truncated_repr(self.name)}"
        _check_numbers(self, where)
        kinds = {"kernel": str, "forward_tiling": Tiling, "backward_tiling": Tiling, "links": tuple}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                got = truncated_repr(getattr(self, name))
                raise PlanError(f"{where}: {name} must be a {kind.__name__}, but got {name} = {got}.")
        if not all(isinstance(link, Link) for link in self.links):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"{where}: links must be of type Link, but got links = {truncated_repr(self.links)}.")
        sizes = [link.ranks for link in self.links]
        if not sizes or sizes != sorted(sizes):
            raise PlanError(
                f"{where}: links must be one or more, from the innermost outwards, but got links over {sizes} ranks."
            )

    @property
    def node(self) -> int:
        """Number of ranks that share the innermost link."""
        return self.links[0].ranks

    def level(self, src: int, dst: int) -> int:
        """Return the number of the link that connects two ranks."""
        for number, link in enumerate(self.links):
            if src // link.ranks == dst // link.ranks:
                return number
        return len(self.links) - 1

    def levels(self, src: Ints, dst: Ints) -> Ints:
        """Return `level` of many pairs of ranks."""
        levels = np.full(len(src), len(self.links) - 1, dtype=np.int64)
        for number, link in reversed(list(enumerate(self.links))):
            levels[src // link.ranks == dst // link.ranks] = number
        return levels

    def link_seconds(self, num_bytes: Floats, hops: int = 1) -> Floats:
        """Return the time of the slowest link level, given the bytes of the busiest port of each level, (..., links).

        `hops` is how often the latency counts.
        """
        latency = np.array([link.latency for link in self.links])
        bandwidth = np.array([link.bandwidth for link in self.links])
        return np.where(num_bytes > 0, hops * latency + num_bytes / bandwidth, 0.0).max(axis=-1)


# -- The cost of steps -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step on one rank's device, and on the host that queues it."""

    flop: float = 0.0
    slots: float = 0.0
    copied: float = 0.0
    ops: float = 0.0
    messages: float = 0.0
    packed: float = 0.0
    """The part of `copied` that packs messages, before they are sent."""
    packs: float = 0.0
    """The part of `ops` that packs and starts messages."""
    unpacked: float = 0.0
    """The part of `copied` that unpacks messages, after they have arrived."""
    unpacks: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def parts(self, machine: Machine, direction: str) -> tuple[float, float, float]:
        """Return the seconds of packing, of computing and of unpacking."""
        pack = self.packed / machine.copy_bandwidth + self.packs * machine.op_seconds
        unpack = self.unpacked / machine.copy_bandwidth + self.unpacks * machine.op_seconds
        return pack, self.seconds(machine, direction) - pack - unpack, unpack

    def seconds(self, machine: Machine, direction: str) -> float:
        share = machine.forward_share if direction == "forward" else machine.backward_share
        kernel = self.flop / (machine.flops * share) + self.slots * machine.slot_seconds / machine.slots
        return kernel + self.copied / machine.copy_bandwidth + self.ops * machine.op_seconds

    def host_seconds(self, machine: Machine) -> float:
        """Return how long the host is busy queueing it."""
        return self.ops * machine.launch_seconds + self.messages * machine.message_seconds


def queue_times(works: list[Work], machine: Machine) -> list[float]:
    """Return when the host has queued each step, counted from the beginning of the call."""
    return list(accumulate((work.host_seconds(machine) for work in works), initial=machine.call_seconds))[1:]


def tile_work(
    rows: Ints, q_heads: int, kv_heads: int, dims: int, machine: Machine, direction: str, pairs: Pairs | None = None
) -> Work:
    """Return the kernel work of `(n, 6)` bands, rounded up to tiles; `dims` is head_dim + v_head_dim.

    `pairs` are those that are computed of each band, if not all.
    """
    heads = np.full(len(rows), q_heads, dtype=np.int64), np.full(len(rows), kv_heads, dtype=np.int64)
    flop, slots = (float(part.sum()) for part in _tiles(_Shapes.of(rows, pairs), *heads, dims, machine, direction))
    return Work(flop, slots)


@dataclass(frozen=True, slots=True, eq=False)
class _Shapes:
    """What tiles depend on, for each band: queries, keys, pairs, whether its near and far diagonals cut, its width."""

    q: Floats
    kv: Floats
    pairs: Pairs
    near: NDArray[np.bool_]
    far: NDArray[np.bool_]
    width: Ints

    @staticmethod
    def of(rows: Ints, pairs: Pairs | None) -> _Shapes:
        q, kv = ((rows[:, end] - rows[:, begin]).astype(float) for begin, end in ((bd.Q0, bd.Q1), (bd.K0, bd.K1)))
        pairs = bd.area(rows) if pairs is None else pairs
        return _Shapes(q, kv, pairs, *bd.borders(rows), rows[:, bd.HI] - rows[:, bd.LO] + 1)


def _tiles(
    shapes: _Shapes, q_heads: Ints, kv_heads: Ints, dims: int, machine: Machine, direction: str
) -> tuple[Floats, Floats]:
    """Return FLOP and tile slots of each band, for its own numbers of heads."""
    q, kv, pairs, near, far = shapes.q, shapes.kv, shapes.pairs, shapes.near, shapes.far
    group: Floats | float = 1.0
    if direction == "forward":  # tiles hold queries and run over keys
        tiling, outer, inner, flop = machine.forward_tiling, q, kv, 2.0
        group = q_heads / kv_heads if tiling.packs_heads else group
    else:  # tiles hold keys and run over queries
        tiling, outer, inner, flop = machine.backward_tiling, kv, q, 5.0
    heads = q_heads / group
    tiles = np.ceil(outer * group / tiling.rows)
    over = (tiling.rows / group + tiling.cut_width) / 2  # a tile ends with whole blocks
    if tiling.far_rows:
        # Half of what a panel masks is wasted work. Narrow windows use smaller panels; an open bound is far away.
        is_narrow = shapes.width < 2 * tiling.far_rows
        panel = np.where(is_narrow, max(tiling.far_rows // 4, 1), tiling.far_rows)
        masked = pairs + far * q * np.minimum(q, panel) / 2
    else:
        masked, over = pairs, over * np.where(near & far, 2.0, 1.0)
    reach = np.maximum(masked / np.maximum(outer, 1) + over, tiling.cut_width)
    full = np.ceil(inner / tiling.full_width) * tiling.full_width
    cut = np.minimum(reach, np.ceil(inner / tiling.cut_width) * tiling.cut_width)
    width = np.where(pairs >= q * kv, full, cut) / np.where(far, tiling.far_share, 1.0)
    return tiles * width * heads * tiling.rows * flop * dims, tiles * heads


def steps_work(
    steps: tuple[Step, ...],
    rank: int,
    sizes: Sizes,
    machine: Machine,
    direction: str,
    later: bool = False,
    pairs_of: Count | None = None,
) -> list[Work]:
    """Return the work of each step: its computes, merging into earlier results, and packing of its messages.

    `later` says that there were computes before the first of these steps; `pairs_of` is that of the problem: without
    it, all pairs of the bands are computed.
    """
    return _steps_work(steps, rank, sizes, machine, direction, later, traffic(steps, sizes), pairs_of)


def _steps_work(
    steps: tuple[Step, ...],
    rank: int,
    sizes: Sizes,
    machine: Machine,
    direction: str,
    later: bool,
    moved: Ints,
    pairs_of: Count | None,
) -> list[Work]:
    number = np.array([i for i, step in enumerate(steps) for _ in step.computes], dtype=np.int64)
    computes = [compute for step in steps for compute in step.computes]
    # Results merge from the second step on.
    merges = number > (-1 if later or not len(number) else number[0])
    pairs = None if pairs_of is None or not computes else np.concatenate([pairs_of(compute) for compute in computes])
    kernels = KernelTable.of(number, sides(computes, sizes), bands_of(computes), machine, pairs)
    messages = _messages(moved[moved[:, SRC] == rank], DST), _messages(moved[moved[:, DST] == rank], SRC)
    flop, slots, copied, ops = kernel_work(kernels, merges, len(steps), sizes, machine, direction)
    count, packed, packs, unpacked, unpacks = message_work(*messages, len(steps), machine)
    copied, ops = copied + packed + unpacked, ops + packs + unpacks
    columns = flop, slots, copied, ops, count, packed, packs, unpacked, unpacks
    return [Work(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class KernelTable:
    """Computes as arrays: the step of each, its `sides`, the bands of all one after another, and its launches."""

    number: Ints
    side: Ints
    each: Ints
    """The compute of each band."""
    shapes: _Shapes
    launches: Floats

    @staticmethod
    def of(number: Ints, side: Ints, bands: Ints, machine: Machine, pairs: Pairs | None = None) -> KernelTable:
        is_one = machine.one_launch
        launches = launch_table(bands, side).per_compute(len(side)) if is_one else side[:, BANDS].astype(np.float64)
        each = np.repeat(np.arange(len(side)), side[:, BANDS])
        return KernelTable(number, side, each, _Shapes.of(bands, pairs), launches)


def kernel_work(
    kernels: KernelTable, merges: NDArray[np.bool_], num: int, sizes: Sizes, machine: Machine, direction: str
) -> Floats:
    """Return FLOP, tile slots, copied bytes and operations, (4, num), of `num` numbered steps."""
    (q_heads, kv_heads, q_tokens, kv_tokens, batch, _), each = kernels.side.T, kernels.each
    dims = sizes.head_dim + sizes.v_head_dim
    tiles = _tiles(kernels.shapes, q_heads[each], kv_heads[each], dims, machine, direction)
    # A float32 row is read, read again and written where partial results meet.
    q_elements = q_tokens * q_heads * (sizes.v_head_dim if direction == "forward" else sizes.head_dim)
    copied = np.where(merges, 12.0, 0.0 if direction == "forward" else 14.0) * q_elements
    if direction == "backward":
        copied = copied + 10.0 * (kv_tokens * kv_heads * dims)
    ops = kernels.launches
    if machine.one_launch:  # keys are gathered, and each launch's results are merged
        ops = 2.0 * ops + merges if direction == "forward" else 1.0 + 3.0 * ops
    band_number, band_batch = kernels.number[each], batch[each]
    flop, slots = (_sums(band_number, part * band_batch, num) for part in tiles)
    return np.stack((flop, slots, _sums(kernels.number, copied * batch, num), _sums(kernels.number, ops, num)))


Messages = tuple[Ints, Ints, Ints | Floats, NDArray[np.bool_]]
"""The step, the step at whose end it has arrived, the bytes, and whether the rows are added to the target's own, of
each message."""


def message_work(sent: Messages, got: Messages, num: int, machine: Machine) -> Floats:
    """Return messages, packed bytes and operations, unpacked bytes and operations, (5, num), of `num` numbered steps.

    One operation packs each message, one starts all of a step that arrive together, and one adds each message whose
    rows are added.
    """
    copies = 2.0 + machine.message_copies
    packed, unpacked = (copies * np.bincount(step, m[2], num) for step, m in ((sent[0], sent), (got[1], got)))
    targets, sources, added = (np.bincount(step, minlength=num) for step in (sent[0], got[0], got[1][got[3]]))
    starts = ends = (targets + sources > 0).astype(np.int64)
    if any(m[0] is not m[1] and (m[0] != m[1]).any() for m in (sent, got)):
        batches = np.unique(np.concatenate([m[0] * num + m[1] for m in (sent, got)]))
        starts, ends = (np.bincount(step, minlength=num) for step in np.divmod(batches, num))
    ops = (starts + targets, added) if machine.one_launch else (starts, ends)
    return np.array((targets + sources, packed, ops[0], unpacked, ops[1]), dtype=np.float64)


def _messages(moved: Ints, peer: int) -> Messages:
    """Return one message for all transfers of a step with a peer that arrive together."""
    size, num = int(moved[:, peer].max(initial=0)) + 1, int(moved[:, DUE].max(initial=0)) + 1
    keys, which = np.unique((moved[:, STEP] * num + moved[:, DUE]) * size + moved[:, peer], return_inverse=True)
    num_bytes, added = (np.bincount(which, moved[:, column], len(keys)) for column in (BYTES, ADDED))
    return *np.divmod(keys // size, num), num_bytes, added > 0


def _sums(number: Ints, values: Ints | Floats, size: int) -> Floats:
    """Return the sum of the values of each number."""
    return np.bincount(number, values, size).astype(float)  # bincount of nothing returns integers


def rank_seconds(steps: tuple[Step, ...], rank: int, sizes: Sizes, machine: Machine, direction: str) -> float:
    """Return the time of the rank's steps one after another, as if it never waited for other ranks."""
    return rank_times(steps, rank, sizes, machine, direction)[0]


def rank_times(
    steps: tuple[Step, ...], rank: int, sizes: Sizes, machine: Machine, direction: str, pairs_of: Count | None = None
) -> tuple[float, float]:
    """Return `rank_seconds`, and how long the rank's host is busy queueing."""
    moved = traffic(steps, sizes)
    works = _steps_work(steps, rank, sizes, machine, direction, False, moved, pairs_of)
    ports = np.zeros((len(steps), len(machine.links), 2))
    level = machine.levels(moved[:, SRC], moved[:, DST])
    np.add.at(ports, (moved[:, STEP], level, (moved[:, DST] == rank).astype(np.int64)), moved[:, BYTES])
    end, queued = 0.0, machine.call_seconds
    for work, move, queued in zip(
        works, machine.link_seconds(ports.max(axis=2)).tolist(), queue_times(works, machine), strict=True
    ):
        pack, compute, unpack = work.parts(machine, direction)
        end = max(end + pack + max(compute, move) + unpack, queued)
    return max(end, queued), queued


# -- Presets -----------------------------------------------------------------------------------------------------------
# Machines by name, one for each kernel that they may run. No preset was measured by running Longspan on a GPU.
#
# `h100` is an H100 with the kernel that Longspan's `varlen` runs there: PyTorch's own flash attention, which is FA2,
# unless another was activated by `torch.nn.attention.activate_flash_attention_impl`. Shares of peak are set so that the
# model of tiles gives a bare kernel's published speed; `python -m benchmarks.kernels` shows how well, point by point.
#
#     machine      kernel         published TFLOP/s, bf16, heads of 128     where
#     h100         FA2 2.5.8      370 forward, 335 causal, 322 backward     FA3 paper, figures 5 and 6
#     h100-fa3     FA3            616 causal forward, 561 backward (2024)   FA3 paper; shares are those of whole systems
#                                                                           of 2025, 10% higher (MagiAttention v1.1)
#     h100-cudnn   cuDNN 9.19     673 causal forward, 579 backward          cudnn-frontend, on an H200 (the same SMs)
#     h100-flex    flex, Triton   FA2 x 1.25 forward, x 1.03 backward       PyTorch at GTC 2025
#     h200...      as h100...     the same SMs with memory of 4.8 TB/s      data sheet
#     a100         FA2            227 forward, 196 backward at most         FA2 paper (73% and 63% of peak)
#     a100-flex    flex, Triton   FA2 x 0.90 forward, x 0.85 backward       PyTorch's post on FlexAttention
#     b200         FA2, in 2.8    411 causal forward, 336 backward          cudnn-frontend
#     b200-fa4     FA4 4.0.0b15   1,636 causal forward, 1,429 backward      cudnn-frontend, on a GB200 of 2.5 PFLOP/s
#     b200-cudnn   cuDNN 9.10.2   1,332 causal forward, 1,075 backward      cudnn-frontend
#     b200-flex    flex, Triton   FA4 / 2.4 forward, / 2.1 backward         PyTorch's post on flex with FA4 (1.6 to 3.2
#                                                                           and 1.85 to 2.3)
#
# FA4 runs on Hopper too, but no figure was published for it there, so there is no such machine.
#
# Cards without NVLink (l40s, rtx4090, a6000, rtx6000ada): peak, memory and PCIe 4 are the data sheets'. Shares of peak
# are those of FA2 and of products on an A100, and the network between nodes is assumed: none of it was compared with a
# measurement.
#
# Papers: FA2 arXiv:2307.08691, FA3 arXiv:2407.08608; FA4: together.ai/blog/flashattention-4 (1,605 at most on a B200).
# Posts: pytorch.org/blog/flexattention, .../flexattention-flashattention-4-fast-and-flexible, .../pytorch-at-gtc-2025.
# Measurements: benchmark/sdpa_benchmark_training of github.com/NVIDIA/cudnn-frontend, docs/source/blog/cp_benchmark.md
# of github.com/SandAI-org/MagiAttention.
#
# Links, and copies at 0.703 of memory bandwidth, are those of the fit to whole systems (`H100_FITTED`), unchecked on
# other GPUs. An operation takes 3.8 us of the device: short kernels one after another, in NVIDIA's post on CUDA graphs
# (developer.nvidia.com/blog/cuda-graphs). Hosts: 15 us for each operation, 5 us for each message, 150 us for each call;
# set from what Longspan takes on CPUs with kernels that do nothing. `longspan doctor --out` measures them.
#
# Matrix products of layers, as a share of peak: 0.66 of what one product alone sustains, 755 TFLOP/s on an H100's SMs
# (H200) and 1,429 on a B200, 271 at best on an A100 (compute/accelerator of github.com/stas00/ml-engineering, which
# also has the breakdown of a training step of Llama-3.1-8B on H200s: the 0.66 is from it, `python -m
# benchmarks.published_models`). Copies between device and host: 50 GB/s by PCIe 5, 25 by PCIe 4, assumed. Not known for
# CPUs.


_WIRE = 0.874
_COPIES = 0.703
_LATENCY = 5e-6
_OP_SECONDS = 3.8e-6
_TRITON = Tiling(128, 64, 64)

H100_FITTED = Machine(
    name="h100-fitted",
    source="8 x H100 SXM per node: 989 TFLOP/s bf16, 132 SMs, 3.35 TB/s, NVLink 450 GB/s per direction (vendor data"
    " sheet); one 400 Gb/s InfiniBand card per GPU (assumed); shares fitted to the MagiAttention v1.1 charts",
    flops=989e12,
    forward_share=0.704,
    backward_share=0.645,
    slots=132,
    slot_seconds=0.96e-6,
    copy_bandwidth=_COPIES * 3.35e12,
    op_seconds=25.5e-6,
    one_launch=True,
    links=(Link(8, 450e9 * _WIRE, _LATENCY), Link(1 << 30, 50e9 * _WIRE, 2 * _LATENCY)),
    forward_tiling=Tiling(128, 128, 176, packs_heads=True),
    backward_tiling=Tiling(128, 64, 80),
    kernel="FA3",
    matmul_share=0.66 * 755 / 989,
    host_bandwidth=50e9,
)
"""Whole published systems on H100s, their hosts within the 25.5 us of an operation: six constants fitted to 24 points,
which predict 24 others (`python -m benchmarks.published`). Our own runs are priced on the machines below."""


def _with_host(machine: Machine, **changes: object) -> Machine:
    """Return the machine with the costs of Longspan's own operations for device and host."""
    costs = {"op_seconds": _OP_SECONDS, "launch_seconds": 15e-6, "message_seconds": 5e-6, "call_seconds": 150e-6}
    return replace(machine, **{**costs, **changes})


_H100 = "8 x H100 SXM per node, links and copies as in the published fit; "
_SHEET_B200 = (
    "8 x B200 per node: 2,250 TFLOP/s bf16, 148 SMs, 8 TB/s, NVLink 900 GB/s per direction (vendor data sheet); one 400"
    " Gb/s card per GPU (assumed); "
)
_SHEET_A100 = (
    "8 x A100 80GB SXM per node: 312 TFLOP/s bf16, 108 SMs, 2.04 TB/s, NVLink 300 GB/s per direction, one 200 Gb/s card"
    " per GPU (vendor data sheet); "
)

H100 = _with_host(
    H100_FITTED, name="h100", kernel="FA2", forward_share=0.37, backward_share=0.32, slot_seconds=2.6e-6,
    forward_tiling=Tiling(128, 64, 64), backward_tiling=Tiling(128, 64, 64),
    source=_H100 + "FA2 as PyTorch has it, from figures 5 and 6 of the FlashAttention-3 paper",
)  # fmt: skip
H100_FA3 = _with_host(
    H100_FITTED, name="h100-fa3", kernel="FA3",
    source=_H100 + "FA3 kernels fitted to the MagiAttention v1.1 charts",
)  # fmt: skip
H100_CUDNN = _with_host(
    H100_FITTED, name="h100-cudnn", kernel="cuDNN", forward_share=0.72, backward_share=0.58, slot_seconds=4e-6,
    forward_tiling=Tiling(128, 128, 128), backward_tiling=Tiling(128, 64, 64),
    source=_H100 + "cuDNN 9.19 as NVIDIA measured it on an H200, which has the same SMs (cudnn-frontend)",
)  # fmt: skip
H100_FLEX = replace(
    H100, name="h100-flex", kernel="flex", forward_share=1.25 * 0.37, backward_share=1.03 * 0.32,
    forward_tiling=_TRITON, backward_tiling=_TRITON,
    source=_H100 + "flex by Triton: 1.25 and 1.03 times FA2, from PyTorch's talk at GTC 2025",
)  # fmt: skip
A100 = replace(
    H100, name="a100", kernel="FA2", flops=312e12, forward_share=0.70, backward_share=0.60, slots=108,
    copy_bandwidth=_COPIES * 2.039e12,
    links=(Link(8, 300e9 * _WIRE, _LATENCY), Link(1 << 30, 25e9 * _WIRE, 2 * _LATENCY)),
    matmul_share=0.66 * 271 / 312, host_bandwidth=25e9,
    source=_SHEET_A100 + "FA2 from its paper; links and copies borrowed from the H100 fit and unchecked",
)  # fmt: skip
A100_FLEX = replace(
    A100, name="a100-flex", kernel="flex", forward_share=0.90 * 0.70, backward_share=0.85 * 0.60,
    forward_tiling=_TRITON, backward_tiling=_TRITON,
    source=_SHEET_A100 + "flex by Triton: 0.90 and 0.85 times FA2, from PyTorch's post on FlexAttention",
)  # fmt: skip
_H200 = (
    "8 x H200 SXM per node: an H100 with memory of 4.8 TB/s (vendor data sheet), links and copies as in the published"
    " fit; "
)


def _h200(machine: Machine) -> Machine:
    """Return the machine with the memory of an H200."""
    name = machine.name.replace("h100", "h200")
    return replace(
        machine, name=name, copy_bandwidth=_COPIES * 4.8e12, source=_H200 + machine.source.removeprefix(_H100)
    )  # fmt: skip


H200, H200_FA3, H200_CUDNN, H200_FLEX = map(_h200, (H100, H100_FA3, H100_CUDNN, H100_FLEX))


def _card(name: str, about: str, tflops: float, slots: int, bandwidth: float, pcie: int = 4) -> Machine:
    """Return a card with PCIe and FA2, from its data sheet: TFLOP/s with sums in float32, SMs, bytes per second of
    memory, and the generation of PCIe."""
    link = 32e9 if pcie == 4 else 64e9
    return replace(
        A100, name=name, flops=tflops * 1e12, slots=slots, copy_bandwidth=_COPIES * bandwidth,
        links=(Link(8, link * _WIRE, _LATENCY), Link(1 << 30, 12.5e9 * _WIRE, 2 * _LATENCY)),
        host_bandwidth=25e9 if pcie == 4 else 50e9,
        source=f"8 x {about} per node: {tflops:g} TFLOP/s bf16, {slots} SMs, {bandwidth / 1e12:g} TB/s, PCIe {pcie} of"
        f" {link / 1e9:g} GB/s per direction (vendor data sheet), no peer-to-peer link; 100 Gb/s of network per GPU"
        " (assumed); FA2 and products at an A100's shares of peak, unchecked",
    )  # fmt: skip


L40S = _card("l40s", "L40S", 362, 142, 0.864e12)
RTX4090 = _card("rtx4090", "GeForce RTX 4090", 165.2, 128, 1.008e12)
A6000 = _card("a6000", "RTX A6000", 154.8, 84, 0.768e12)
RTX6000ADA = _card("rtx6000ada", "RTX 6000 Ada Generation", 364.2, 142, 0.960e12)
RTX5090 = _card("rtx5090", "GeForce RTX 5090", 209.5, 170, 1.792e12, pcie=5)
B200 = replace(
    H100, name="b200", kernel="FA2", flops=2250e12, forward_share=0.183, backward_share=0.15, slots=148,
    slot_seconds=4e-6, copy_bandwidth=_COPIES * 8e12,
    links=(Link(8, 900e9 * _WIRE, _LATENCY), Link(1 << 30, 50e9 * _WIRE, 2 * _LATENCY)),
    matmul_share=0.66 * 1429 / 2250,
    source=_SHEET_B200 + "FA2 of PyTorch 2.8 as NVIDIA measured it on a B200 (cudnn-frontend)",
)  # fmt: skip
B200_FA4 = replace(
    B200, name="b200-fa4", kernel="FA4", forward_share=0.67, backward_share=0.55,
    forward_tiling=Tiling(256, 128, 128), backward_tiling=Tiling(128, 128, 128),
    source=_SHEET_B200 + "FA4 4.0.0b15 as NVIDIA measured it on a GB200 (cudnn-frontend)",
)  # fmt: skip
B200_CUDNN = replace(
    B200_FA4, name="b200-cudnn", kernel="cuDNN", forward_share=0.62, backward_share=0.48,
    source=_SHEET_B200 + "cuDNN 9.10.2 as NVIDIA measured it on a B200 (cudnn-frontend)",
)  # fmt: skip
B200_FLEX = replace(
    B200, name="b200-flex", kernel="flex", forward_share=0.67 / 2.4, backward_share=0.55 / 2.1,
    forward_tiling=_TRITON, backward_tiling=_TRITON,
    source=_SHEET_B200 + "flex by Triton: FA4 takes 1/2.4 of its time forward, 1/2.1 backward (PyTorch's post)",
)  # fmt: skip

CPU = Machine(
    name="cpu",
    source="2 cores, one thread per rank, Gloo on loopback, bf16, PyTorch 2.13 (measured: flash operator 219 GFLOP/s"
    " forward and 0.41 of that backward, key blocks of 512, a window's far border masked, 15 us per call;"
    " point-to-point 2.25 GB/s, 110 us; a byte of a message takes the processor 0.9 ns at either end, by"
    " `benchmarks.cpu_schemes`)",
    flops=219e9,
    forward_share=1.0,
    backward_share=0.41,
    slots=1,
    slot_seconds=0.0,
    copy_bandwidth=14e9,
    op_seconds=15e-6,
    one_launch=False,
    links=(Link(1 << 30, 2.25e9, 110e-6),),
    forward_tiling=Tiling(1, 512, 64, far_rows=1024, far_share=0.8),
    backward_tiling=Tiling(1, 512, 64, far_rows=1024, far_share=0.8),
    kernel="cpu_flash",
    message_copies=10.0,
)

MACHINES = {
    machine.name: machine
    for machine in (
        H100, H100_FA3, H100_CUDNN, H100_FLEX, H200, H200_FA3, H200_CUDNN, H200_FLEX, A100, A100_FLEX,
        B200, B200_FA4, B200_CUDNN, B200_FLEX, L40S, RTX4090, A6000, RTX6000ADA, RTX5090, CPU,
    )
}  # fmt: skip

GPU_MEMORY = {
    "h100": 80, "h200": 141, "a100": 80, "b200": 180, "l40s": 45, "rtx4090": 24, "a6000": 48, "rtx6000ada": 48,
    "rtx5090": 32,
}  # fmt: skip
"""GB of memory of each GPU, as sold; an L40S has 48, of which its ECC leaves 45. An A100 may have 40."""


def machine_named(name: str) -> Machine:
    """Return the preset of that name."""
    if name not in MACHINES:
        raise PlanError(f"machine must be a Machine or one of {', '.join(MACHINES)}, but got {name!r}.")
    return MACHINES[name]


def machines_of_gpu(gpu: str, kernel: str | None = None) -> tuple[Machine, ...]:
    """Return the presets of a GPU: with that kernel, or with those that `kernel="auto"` of `attention` may run.

    cuDNN and flex run only if they are named, or for masks with functions.

    >>> [machine.name for machine in machines_of_gpu("h200")]
    ['h200', 'h200-fa3']
    """
    if gpu not in GPU_MEMORY:
        raise PlanError(f"`gpu` must be one of {', '.join(GPU_MEMORY)}, but got {gpu!r:.40}. Or use a machine file.")
    known = {m.kernel.lower(): m for name, m in MACHINES.items() if name.partition("-")[0] == gpu}
    if kernel is None:
        return tuple(machine for name, machine in known.items() if name.startswith("fa"))
    if kernel.lower() not in known:
        names = ", ".join(machine.kernel for machine in known.values())
        raise PlanError(f"`kernel` must be one of {names} on {gpu}, but got {kernel!r:.40}.")
    return (known[kernel.lower()],)


def assumed_machine(*, functions: bool) -> Machine:
    """Return the default machine, an H100, with the kernel that would run there; `functions`: the mask has one.

    >>> assumed_machine(functions=False).kernel, assumed_machine(functions=True).kernel
    ('FA2', 'flex')
    """
    return H100_FLEX if functions else H100


def nearest(major: int, kernel: str) -> Machine:
    """Return the preset for a GPU of this compute capability and kernel, or else for PyTorch's kernel on that GPU.

    >>> nearest(9, "FA3").name, nearest(8, "FA4").name, nearest(12, "FA2").name
    ('h100-fa3', 'a100', 'b200')
    """
    gpu = "a100" if major < 9 else "h100" if major == 9 else "b200"
    return MACHINES.get(f"{gpu}-{kernel.lower()}", MACHINES[gpu])


GPUS = {
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "b200",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
}
"""Names of devices that presets are for. An H100 or A100 with PCIe has other links."""


def machine_of(gpus: Iterable[str], kernel: str) -> Machine | None:
    """Return the preset for ranks with these devices, the slowest if they differ; None if there is none for one.

    >>> machine_of(["NVIDIA H200", "NVIDIA A100-SXM4-80GB"], "FA2").name
    'a100'
    """
    names = [GPUS.get(gpu) for gpu in sorted(set(gpus))]
    presets = [MACHINES.get(f"{name}-{kernel.lower()}", MACHINES[name]) for name in names if name is not None]
    return min(presets, key=lambda machine: machine.flops) if len(presets) == len(names) else None


def on_hosts(machine: Machine, hosts: Sequence[bytes]) -> Machine:
    """Return the machine with nodes as large as the runs of ranks that share a host; `hosts` has one for each rank.

    >>> on_hosts(H100, [b"a", b"a", b"b", b"b"]).node
    2
    """
    size = len(hosts)
    nodes = (node for node in range(size, 0, -1) if size % node == 0)
    node = next(n for n in nodes if all(len(set(hosts[i : i + n])) == 1 for i in range(0, size, n)))
    inner, *outer = machine.links
    if node == inner.ranks or not outer or size == node <= inner.ranks:
        return machine
    links = outer if node == 1 else (replace(inner, ranks=node), *outer)
    return replace(machine, name=f"{machine.name}, {node} a node", links=tuple(links))


# -- JSON form: `longspan doctor --out` writes it, `--machine FILE` reads and checks it --------------------------------


FORMAT = "longspan machine 1"
MAX_TEXT = 1 << 16
MAX_LINKS = 8
MAX_RANKS = 1 << 30
T = TypeVar("T", Link, Tiling, Machine)


def machine_text(machine: Machine) -> str:
    """Return the machine as JSON that `parse_machine` reads back.

    >>> parse_machine(machine_text(CPU)) == CPU
    True
    """
    return json.dumps({"format": FORMAT, **asdict(machine)}, indent=2) + "\n"


def parse_machine(text: str) -> Machine:
    """Parse the JSON that `machine_text` wrote."""

    def refuse_constant(name: str) -> float:
        raise ValueError(f"{name} is not a measured number")

    if len(text) > MAX_TEXT:
        raise PlanError(f"a machine file has at most {MAX_TEXT} characters, but this one has {len(text)}.")
    try:
        value: Any = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"a machine file is JSON as `longspan doctor --out` writes it: {error!s:.100}.") from error
    if not isinstance(value, dict) or cast(dict[str, Any], value).get("format") != FORMAT:
        raise PlanError(f'a machine file is a JSON object with "format": "{FORMAT}", but this one is not.')
    entries = cast(dict[str, Any], value)
    del entries["format"]
    return _parse_fields(Machine, entries, "machine")


def _parse_fields(kind: type[T], value: Any, where: str) -> T:
    """Build a dataclass from JSON that has exactly its fields, each of its type and in its range."""
    types = {field.name: str(field.type) for field in fields(kind)}
    if not isinstance(value, dict):
        raise PlanError(f"{where} must be an object with {', '.join(types)}, but got {value!r:.60}.")
    entries = cast(dict[str, Any], value)
    optional = {field.name for field in fields(kind) if field.default is not MISSING}  # newer than the first files
    for name in sorted((entries.keys() ^ types.keys()) - (optional - entries.keys())):
        raise PlanError(f"{where}: {name!r:.40} {'is missing' if name in types else 'is not known'}.")
    return kind(**{name: _parse_value(types[name], entry, f"{where}.{name}") for name, entry in entries.items()})


def _parse_value(declared: str, value: Any, where: str) -> Any:
    if declared == "Tiling":
        return _parse_fields(Tiling, value, where)
    if declared.startswith("tuple"):
        if not isinstance(value, list) or not 0 < len(cast(list[Any], value)) <= MAX_LINKS:
            raise PlanError(f"{where} must be a list of 1 to {MAX_LINKS} links, but got {value!r:.60}.")
        return tuple(_parse_fields(Link, link, f"{where}[{i}]") for i, link in enumerate(cast(list[Any], value)))
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
    kind = {"bool": "true or false", "str": "a printable text", "int": "an integer", "float": "a positive number"}
    raise PlanError(f"{where} must be {kind[declared]}, but got {value!r:.60}.")
