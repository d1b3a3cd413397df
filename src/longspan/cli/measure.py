"""Measure this machine: kernels, copies, links, whole attention calls, and a Machine fitted to them.

Calls go through `longspan.attention`, as users call it. All ranks meet between forward and backward, so that each pass
can be compared with its own simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.launch import JobRanks, clocks
from longspan.cli.trace import COMPUTE, MESSAGE, WAIT, Slice
from longspan.kernels import choose_kernel, kernel_named
from longspan.kernels.contract import TileWork, Upstream
from longspan.masks import Mask
from longspan.masks.bands import LIMIT
from longspan.planning.machine import Machine, steps_work, tile_work
from longspan.planning.plan import Plan
from longspan.planning.simulator import simulate
from longspan.planning.steps import Schedule, Sizes
from longspan.run.transports import observe
from longspan.tile import Tile

# How fast kernels, copies and links are here, with all ranks at work at once, as they are in a step.
# Ranks that share cores slow each other down, also while this is measured, so the resulting machine is right for this
# many ranks on this many cores. Every figure is the median of several rounds.


Tiles = tuple[tuple[int, int, bool], ...]
TILES: Tiles = (  # query rows, key rows, causal
    (1024, 1024, True),
    (512, 1024, False),
    (256, 2048, False),
    (768, 768, True),
)
GPU_TILES: Tiles = ((16384, 16384, True), (8192, 16384, False), (4096, 32768, False), (12288, 12288, True))
"""Enough to fill all multiprocessors many times over."""
SMALL = 64
"""Query rows, one key: next to nothing to compute, so what is left is the call."""
MESSAGES = (1 << 16, 1 << 20, 1 << 22)
COPIED, GPU_COPIED = 1 << 20, 1 << 26
"""Numbers of a copy; a GPU's are beyond its caches."""


@dataclass(frozen=True)
class Kernels:
    """Seconds of one tile, forward and backward, by (query rows, key rows, causal)."""

    name: str
    forward: dict[tuple[int, int, bool], float]
    backward: dict[tuple[int, int, bool], float]


def median_seconds(ranks: JobRanks, act: Callable[[], object], rounds: int, together: int = 1) -> float:
    """Seconds of one act in the median round, which has `together` of them in a row; all ranks begin a round
    together."""
    act()  # to warm up; the barrier waits for it
    seconds: list[float] = []
    for _ in range(rounds):
        ranks.barrier()
        begin = time.perf_counter()
        for _ in range(together):
            act()
        ranks.finish()
        seconds.append((time.perf_counter() - begin) / together)
    return float(np.median(seconds))


def tiles_on(device: str) -> Tiles:
    return TILES if device == "cpu" else GPU_TILES


class Tensors:
    """q, k, v and an output's gradient for kernels to work on."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> None:
        self.sizes, self.tiles = sizes, tiles_on(device)
        most_q, most_k = (max(tile[i] for tile in self.tiles) for i in (0, 1))

        def drawn(heads: int, rows: int, dim: int) -> Tensor:
            return torch.randn(1, heads, rows, dim).to(device, dtype)

        self.q, self.dout = drawn(sizes.q_heads, most_q, sizes.head_dim), drawn(sizes.q_heads, most_q, sizes.v_head_dim)
        self.k, self.v = drawn(sizes.kv_heads, most_k, sizes.head_dim), drawn(sizes.kv_heads, most_k, sizes.v_head_dim)
        self.kernel = kernel_named(choose_kernel("auto", self.q, self.k, self.v))

    def passes(self, q_rows: int, k_rows: int, causal: bool) -> tuple[Callable[[], object], Callable[[], object]]:
        """A forward and a backward of one tile."""
        q, k, v, dout = self.q[:, :, :q_rows], self.k[:, :, :k_rows], self.v[:, :, :k_rows], self.dout[:, :, :q_rows]
        tiles, scale = [Tile(0, q_rows, 0, k_rows, lo=0 if causal else None)], q.shape[-1] ** -0.5
        work = TileWork(q, k, v, tiles, scale)
        ((out, lse),) = list(self.kernel.forward(work))
        out = out.to(q.dtype)
        upstream = Upstream(dout, out, lse, (dout.float() * out.float()).sum(-1))
        return lambda: list(self.kernel.forward(work)), lambda: list(self.kernel.backward(work, upstream))


def kernel_times(ranks: JobRanks, tensors: Tensors, rounds: int, advance: Callable[[str], None]) -> Kernels:
    """Seconds of every tile, and of one with next to nothing in it."""
    seconds: tuple[dict[tuple[int, int, bool], float], ...] = {}, {}
    for tile in (*tensors.tiles, (SMALL, 1, False)):
        advance(f"kernel, {tile[0]} x {tile[1]}")
        for direction, act in zip(seconds, tensors.passes(*tile), strict=True):
            direction[tile] = ranks.most(median_seconds(ranks, act, rounds, 20 if tile[1] == 1 else 1))
    return Kernels(tensors.kernel.name, *seconds)


def kernel_rate(times: dict[tuple[int, int, bool], float], sizes: Sizes, base: Machine, direction: str) -> float:
    """FLOP per second, counted as the model of `base` counts them, without the time that a call costs anyway."""
    call = times[SMALL, 1, False]
    work = spent = 0.0
    for q_rows, k_rows, causal in times.keys() - {(SMALL, 1, False)}:
        band = np.array([[0, q_rows, 0, k_rows, 0 if causal else -LIMIT, LIMIT]], dtype=np.int64)
        dims = sizes.head_dim + sizes.v_head_dim
        work += tile_work(band, sizes.q_heads, sizes.kv_heads, dims, base, direction).flop
        spent += max(times[q_rows, k_rows, causal] - call, 0.1 * times[q_rows, k_rows, causal])
    return work / spent


def copy_rate(ranks: JobRanks, rounds: int) -> float:
    """Bytes per second of adding float32 rows to others, which is how partial results meet: read, read, written."""
    a, b = torch.randn(2, COPIED if ranks.device == "cpu" else GPU_COPIED, device=ranks.device)
    took = median_seconds(ranks, lambda: a.add_(b), rounds, 4)
    return 12.0 * a.numel() / ranks.most(took)


@dataclass(frozen=True, slots=True)
class Wire:
    """What a message costs: seconds per message, and seconds per byte."""

    latency: float
    bandwidth: float


def wire(ranks: JobRanks, hop: int, rounds: int, advance: Callable[[str], None]) -> Wire:
    """All ranks send to the rank `hop` places on, at once, as they do in a step."""
    took: list[float] = []
    for size in MESSAGES:
        advance(f"link, {size >> 10} KiB")
        outgoing, incoming = torch.zeros(2, size, dtype=torch.uint8, device=ranks.device)

        def act(outgoing: Tensor = outgoing, incoming: Tensor = incoming) -> None:
            ends = ((dist.isend, outgoing, ranks.rank + hop), (dist.irecv, incoming, ranks.rank - hop))
            for work in dist.batch_isend_irecv([dist.P2POp(kind, t, peer % ranks.size) for kind, t, peer in ends]):
                work.wait()

        took.append(ranks.most(median_seconds(ranks, act, rounds, max(1, (1 << 20) // size))))
    slope = max((took[-1] - took[0]) / (MESSAGES[-1] - MESSAGES[0]), 1e-12)
    return Wire(max(took[0] - slope * MESSAGES[0], 0.0), 1 / slope)


# -- Passes, timed and traced ------------------------------------------------------------------------------------------


DIRECTIONS = ("forward", "backward")
KINDS = (COMPUTE, MESSAGE, WAIT)
_ANCHOR = "longspan anchor"


@dataclass(frozen=True)
class Passes:
    """Seconds of each repetition of each pass, from the moment all ranks began to the end of the last one."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def median(self, direction: str) -> float:
        return sorted(getattr(self, direction))[len(self.forward) // 2]


class MeasuredRun:
    """One rank's tensors and the plan they are for."""

    def __init__(self, plan: Plan, ranks: JobRanks, seed: int = 0) -> None:
        self.plan, self.ranks = plan, ranks
        self.group = dist.group.WORLD if dist.is_initialized() else None
        chance = torch.Generator().manual_seed(seed + ranks.rank)
        s, rank = plan.sizes, ranks.rank
        slots = plan.layout.num_slots(rank)
        shapes = ((s.q_heads, s.head_dim), (s.kv_heads, s.head_dim), (s.kv_heads, s.v_head_dim))
        dtype: torch.dtype = getattr(torch, plan.dtype)

        def drawn(heads: int, dim: int) -> Tensor:
            return torch.randn(s.batch, heads, slots, dim, generator=chance).to(ranks.device, dtype)

        self.inputs = [drawn(*shape).requires_grad_() for shape in shapes]
        self.upstream = drawn(s.q_heads, s.v_head_dim)

    def once(self, times: dict[str, list[tuple[float, float]]] | None = None) -> None:
        """Forward and backward; `times` are given when each began and ended here."""
        self.ranks.barrier()
        begin = time.perf_counter()
        plan_or_mask = self.plan if self.ranks.size > 1 else self.plan.mask
        q, k, v = self.inputs
        out = attention(q, k, v, plan_or_mask, group=self.group if self.ranks.size > 1 else None)
        self.ranks.finish()
        middle = time.perf_counter()
        self.ranks.barrier()
        again = time.perf_counter()
        torch.autograd.grad(out, self.inputs, self.upstream)
        self.ranks.finish()
        end = time.perf_counter()
        if times is not None:
            times["forward"].append((begin, middle))
            times["backward"].append((again, end))


def time_passes(run: MeasuredRun, repeats: int, ahead: list[float], advance: Any = None) -> Passes:
    """The passes, after one that warms up."""
    run.once()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in DIRECTIONS}
    for number in range(repeats):
        if advance is not None:
            advance(f"repetition {number + 1}")
        run.once(times)
    took: list[tuple[float, ...]] = []
    for name in DIRECTIONS:
        by_rank = run.ranks.gather(torch.tensor(times[name], dtype=torch.float64))
        # (ranks, repeats, begin and end)
        common = torch.stack([rows - ahead[rank] for rank, rows in enumerate(by_rank)])
        # A barrier lets ranks go one after another: the pass begins when the last one may.
        took.append(tuple((common[:, :, 1].amax(0) - common[:, :, 0].amin(0)).tolist()))
    return Passes(*took)


def profile_slices(run: MeasuredRun, ahead: list[float]) -> list[Slice]:
    """One repetition of all ranks taken apart, on the clock of rank 0, beginning at 0."""
    with _profiled() as timings:
        run.once()
    mine = torch.tensor(_rows(timings, run), dtype=torch.int64).view(-1, 7)
    mine[:, 3:5] -= round(ahead[run.ranks.rank] * 1e9)
    slices: list[Slice] = []
    every = run.ranks.gather(mine)
    zero = min(int(rows[:, 3].min()) for rows in every)
    for rank, rows in enumerate(every):
        for way, step, kind, start, stop, peer, size in rows.tolist():
            begin, end = (start - zero) / 1e9, (stop - zero) / 1e9
            slices.append(Slice(rank, DIRECTIONS[way], step, KINDS[kind], begin, end, peer, size))
    return slices


@contextmanager
def _profiled() -> Iterator[list[tuple[str, int, int]]]:
    """(name, start, stop) of what the profiler saw, in nanoseconds of `time.perf_counter`, filled in at the end."""
    timings: list[tuple[str, int, int]] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler, observe(marks=True):
        anchor = time.perf_counter_ns()
        with record_function(_ANCHOR):
            pass
        yield timings
    events: list[Any] = list(profiler.events() or [])
    zero = next(event.time_range.start for event in events if event.name == _ANCHOR)
    for event in events:
        start, stop = (anchor + round((t - zero) * 1e3) for t in (event.time_range.start, event.time_range.end))
        timings.append((event.name, start, stop))


def _rows(timings: list[tuple[str, int, int]], run: MeasuredRun) -> list[list[int]]:
    """(direction, step, kind, start, stop, peer, bytes) of this rank's steps.

    A message is seen from where its step's computes begin, just after it was started, to where the rank has waited for
    all of the step's messages: it may have arrived before.
    """
    rank = run.ranks.rank
    waits = sorted((stop, start) for name, start, stop in timings if name in ("gloo:recv", "gloo:send"))
    rows: list[list[int]] = []
    for way, direction in enumerate(DIRECTIONS):
        for number, step in enumerate(run.plan.steps(rank, direction)):
            name = f"longspan {direction} rank {rank} step {number}"
            marked = [(start, stop) for label, start, stop in timings if label == name]
            if not marked:
                continue
            start, stop = marked[0]
            if step.computes:
                rows.append([way, number, 0, start, stop, -1, 0])
            # Its messages were started before the computes, and none of them was waited for before these ended.
            ends = [end for end, begun in waits if begun <= start and end >= stop]
            if not step.transfers or not ends:
                continue
            rows.append([way, number, 2, stop, max(ends), -1, 0])
            sizes: dict[int, int] = {}
            for t in step.transfers:
                if t.dst == rank:
                    sizes[t.src] = sizes.get(t.src, 0) + t.piece.num_bytes(run.plan.sizes)
            rows += [[way, number, 1, start, max(ends), src, size] for src, size in sizes.items()]
    return rows


def clocks_ahead(ranks: JobRanks) -> list[float]:
    """What every rank's clock shows beyond that of rank 0."""
    return [clock.ahead for clock in clocks(ranks)]


# What queueing costs the host of a GPU: for each operation, for each message, for each call. Whole attentions are
# queued as users queue them, with so few tokens that nothing else takes time, and the clock is read before anybody
# waits for the device. Plans with few and with many operations tell a call's fixed part from the rest.


TOKENS = 64
"""Tokens of each rank."""
SCHEMES = ("exchange", "ring", "all_to_all", "all_gather")


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the host."""

    launch: float
    message: float
    call: float

    def put_into(self, machine: Machine) -> Machine:
        return replace(machine, launch_seconds=self.launch, message_seconds=self.message, call_seconds=self.call)


def host_costs(
    ranks: JobRanks, machine: Machine, sizes: Sizes, dtype: str, rounds: int, advance: Callable[[str], None]
) -> HostCosts:
    """The host's costs, the most of any rank."""
    advance("host")
    message = ranks.most(_message_seconds(ranks, rounds))
    rows: list[tuple[float, float]] = []
    for made in _host_plans(ranks, machine, sizes, dtype):
        for way, seconds in zip(DIRECTIONS, _queueing(MeasuredRun(made, ranks), rounds), strict=True):
            works = steps_work(made.steps(ranks.rank, way), ranks.rank, made.sizes, made.machine, way)
            spent = ranks.most(seconds) - message * sum(work.messages for work in works)
            rows.append((sum(work.ops for work in works), spent))
    launch, call = line(rows)
    return HostCosts(launch, message, call)


def line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and height of the straight line nearest to (operations, seconds); neither is below nothing.

    >>> [round(value, 9) for value in line([(2, 0.0002), (12, 0.0003)])]
    [1e-05, 0.00018]
    """
    ops, seconds = np.array(rows).T
    spread = float(((ops - ops.mean()) ** 2).sum())
    slope = float(((ops - ops.mean()) * (seconds - seconds.mean())).sum()) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return slope, max(float(seconds.mean() - slope * ops.mean()), 0.0)


def _host_plans(ranks: JobRanks, machine: Machine, sizes: Sizes, dtype: str) -> list[Plan]:
    mask = masks.causal(TOKENS * ranks.size)
    layout = layouts.zigzag(TOKENS * ranks.size, ranks.size)
    names = SCHEMES if ranks.size > 1 else SCHEMES[:1]
    return [
        plan(
            mask, layout, q_heads=sizes.q_heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, dtype=dtype,
            scheme=name, machine=machine,
        )
        for name in names
        if name != "all_to_all" or ranks.size <= sizes.q_heads
    ]  # fmt: skip


def _queueing(run: MeasuredRun, rounds: int) -> tuple[float, float]:
    """Seconds until forward and backward have been queued, in the median round."""
    run.once()  # to warm up
    spent: list[tuple[float, float]] = []
    (q, k, v), several = run.inputs, run.ranks.size > 1
    for _ in range(rounds):
        run.ranks.barrier()
        begin = time.perf_counter()
        out = attention(q, k, v, run.plan if several else run.plan.mask, group=run.group if several else None)
        middle = time.perf_counter()
        run.ranks.barrier()
        again = time.perf_counter()
        torch.autograd.grad(out, run.inputs, run.upstream)
        spent.append((middle - begin, time.perf_counter() - again))
        run.ranks.finish()
    forward, backward = np.median(np.array(spent), axis=0).tolist()
    return forward, backward


def _message_seconds(ranks: JobRanks, rounds: int, together: int = 8) -> float:
    """Seconds until a message of a batch has been started, in the median round."""
    if ranks.size == 1:
        return 0.0
    spent: list[float] = []
    buffers = torch.zeros(2, together, 256, dtype=torch.uint8, device=ranks.device)
    ahead, behind = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for _ in range(rounds + 1):
        ranks.barrier()
        begin = time.perf_counter()
        ends = [dist.P2POp(dist.isend, t, ahead) for t in buffers[0]]
        ends += [dist.P2POp(dist.irecv, t, behind) for t in buffers[1]]
        works = dist.batch_isend_irecv(ends)
        spent.append((time.perf_counter() - begin) / len(ends))
        for work in works:
            work.wait()
        ranks.finish()
    return float(np.median(spent[1:]))


# Whole attentions beside the bare kernels: what packing, merging, waiting and this machine's other guests cost.
# Attentions of two sizes are run as users run them. Short ones take as long as their operations, long ones as long as
# their kernels, windows longer than that where a kernel knows none; the machine's figures for all of these are set so
# that the simulator takes as long as they did.


SHORT, LONG = 128, 1536
GPU_SHORT, GPU_LONG = 1024, 32768
"""Tokens of each rank."""
SWEEPS = 2
FASTEST = 1e-16
"""Seconds of a FLOP below which nothing is looked for."""
Schedules = dict[str, list[Schedule]]
Case = tuple[Schedules, dict[str, float]]
"""Schedules of each direction, and how many seconds they took together."""


def measure_and_fit(
    ranks: JobRanks, machine: Machine, sizes: Sizes, dtype: str, rounds: int, advance: Callable[[str], None]
) -> Machine:
    """The machine with operations and kernels that make whole attentions take as long as they do.

    Ranks that do not speak only take part in the runs: they get the machine back as it was.
    """
    ahead = clocks_ahead(ranks)
    cases: list[Case] = []
    for tokens in (SHORT, LONG) if ranks.device == "cpu" else (GPU_SHORT, GPU_LONG):
        advance(f"attention, {tokens} tokens a rank")
        plans = _plans(ranks.size, tokens, machine, sizes, dtype)
        passes = [time_passes(MeasuredRun(plan, ranks), rounds, ahead) for plan in plans]
        for kinds in (slice(0, 2), slice(2, None)):  # windows apart
            took = {way: sum(times.median(way) for times in passes[kinds]) for way in DIRECTIONS}
            cases.append(({way: [plan.schedule(way) for plan in plans[kinds]] for way in DIRECTIONS}, took))
    return fitted(machine, *cases) if ranks.speaks else machine


def _plans(size: int, tokens: int, machine: Machine, sizes: Sizes, dtype: str) -> list[Plan]:
    seq_len = tokens * size
    lengths = [seq_len // 2, seq_len // 8, seq_len - seq_len // 2 - seq_len // 8]
    causal = masks.causal(seq_len)
    windows = [causal & masks.sliding_window(width) for width in (tokens // 2, tokens + tokens // 3)]
    kinds: tuple[Mask, ...] = (causal, masks.documents(lengths) & causal, *windows)
    return [
        plan(
            mask, layouts.balanced(mask, world_size=size), q_heads=sizes.q_heads, kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim, dtype=dtype, scheme="exchange", machine=machine,
        )
        for mask in kinds
    ]  # fmt: skip


def fitted(machine: Machine, short: Case, short_window: Case, long: Case, long_window: Case) -> Machine:
    """The machine on which the schedules of each direction take these seconds together.

    >>> from longspan import layouts, planning
    >>> def made(tokens, mask):
    ...     sizes = planning.Sizes(8, 8, 64, 64, 2)
    ...     problem = planning.Problem.make(mask, layouts.zigzag(tokens, 2), sizes)
    ...     forward = planning.scheme("ring", problem).schedule()
    ...     ways = {"forward": [forward], "backward": [planning.backward(forward, keep=False)]}
    ...     return ways, {way: spent(real, made) for way, made in ways.items()}
    >>> cpu = planning.MACHINES["cpu"]
    >>> real = with_windows(replace(with_rates(cpu, 50e9, 20e9), op_seconds=3e-4), 0.5, 0.25)
    >>> window = masks.causal() & masks.sliding_window(300)
    >>> found = fitted(cpu, *(made(tokens, mask) for tokens in (256, 4096) for mask in (masks.causal(), window)))
    >>> [round(x, -9) / 1e9 for x in (found.flops * found.forward_share, found.flops * found.backward_share)]
    [50.0, 20.0]
    >>> [round(tiling.far_share, 2) for tiling in (found.forward_tiling, found.backward_tiling)]
    [0.5, 0.25]
    """
    for _ in range(SWEEPS):
        machine = _fitted_kernels(machine, long, long_window)
        machine = replace(machine, op_seconds=_op_seconds(machine, short, short_window))
    return _fitted_kernels(machine, long, long_window)


def _op_seconds(machine: Machine, *cases: Case) -> float:
    every = [schedule for schedules, _ in cases for way in DIRECTIONS for schedule in schedules[way]]
    took = sum(sum(took.values()) for _, took in cases)
    return solved(1e-6, 1.0, lambda op: spent(replace(machine, op_seconds=op), every), took)


def _fitted_kernels(machine: Machine, plain: Case, window: Case) -> Machine:
    """The machine with the rates that plain attentions show, and the share of them that windows reach."""
    schedules, took = plain
    machine = with_rates(machine, *(_rate(machine, schedules[way], took[way]) for way in DIRECTIONS))
    schedules, took = window

    def share(way: str) -> float:
        def predicted(slowness: float) -> float:
            return spent(with_windows(machine, 1 / slowness, 1 / slowness), schedules[way])

        return 1 / solved(0.5, 16.0, predicted, took[way])

    return with_windows(machine, *map(share, DIRECTIONS))


def _rate(machine: Machine, schedules: Sequence[Schedule], seconds: float) -> float:
    """FLOP per second of one direction's kernels; as before, where the attentions were over before kernels count."""

    def predicted(slowness: float) -> float:
        return spent(with_rates(machine, 1 / slowness, 1 / slowness), schedules)

    if predicted(FASTEST) >= seconds:
        share = machine.forward_share if schedules[0].direction == "forward" else machine.backward_share
        return machine.flops * share
    return 1 / solved(FASTEST, 1e-6, predicted, seconds)


def with_windows(machine: Machine, forward: float, backward: float) -> Machine:
    """The machine with kernels that reach this share of their speed on windows."""
    tilings = (
        replace(machine.forward_tiling, far_share=forward),
        replace(machine.backward_tiling, far_share=backward),
    )
    return replace(machine, forward_tiling=tilings[0], backward_tiling=tilings[1])


def with_rates(machine: Machine, forward: float, backward: float) -> Machine:
    """The machine with kernels of this speed, in FLOP per second."""
    flops = max(forward, backward)
    return replace(machine, flops=flops, forward_share=forward / flops, backward_share=backward / flops)


def spent(machine: Machine, schedules: Sequence[Schedule]) -> float:
    """Seconds of all schedules, one after another."""
    return sum(simulate(schedule, machine).seconds for schedule in schedules)


def solved(low: float, high: float, predicted: Callable[[float], float], seconds: float) -> float:
    """The cost at which a prediction that grows with it takes this long, or the nearest bound, by bisection.

    >>> round(solved(1e-3, 1e3, lambda x: 2 * x, 10.0), 3)
    5.0
    """
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if predicted(middle) > seconds else (middle, high)
    for _ in range(8):  # what is left of the interval, straight
        middle = (low + high) / 2
        low, high = (low, middle) if predicted(middle) > seconds else (middle, high)
    return (low + high) / 2
