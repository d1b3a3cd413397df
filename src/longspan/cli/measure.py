"""Measure this machine: kernels, copies, links, whole attention calls, and a Machine fitted to them.

Calls go through `longspan.attention`, as users call it. All ranks meet between forward and backward, so that each pass
can be compared with its own simulation. Every figure is the median of several rounds with all ranks at work at once,
as in a step: ranks that share cores slow each other down, so the machine is right for this many ranks on this host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.launch import JobRanks, clocks
from longspan.kernels import choose_kernel, implementation_of, kernel_named
from longspan.kernels.contract import TileWork, Upstream
from longspan.masks import Mask
from longspan.masks.bands import LIMIT
from longspan.planning.machine import CPU, Link, Machine, nearest, steps_work, tile_work
from longspan.planning.plan import Plan
from longspan.planning.simulator import simulate
from longspan.planning.steps import Schedule, Sizes
from longspan.tile import Tile

DIRECTIONS = ("forward", "backward")
ALL_RANKS = 1 << 30


def measure(
    ranks: JobRanks, sizes: Sizes, dtype: str, rounds: int, name: str, advance: Callable[[str], None], *, whole: bool
) -> Machine:
    """Return the machine that these ranks run on, without `whole` from bare kernels, copies and links alone."""
    timer = KernelTimer(sizes, getattr(torch, dtype), ranks)
    kernel, base = timer.kernel.name, CPU
    if ranks.device != "cpu":
        about_gpu = torch.cuda.get_device_properties(ranks.device)
        runs = implementation_of(kernel)
        base = replace(nearest(about_gpu.major, runs), kernel=runs, slots=about_gpu.multi_processor_count)
    forward_times, backward_times = timer.measure(rounds, advance)
    forward = kernel_rate(forward_times, sizes, base, "forward")
    backward = kernel_rate(backward_times, sizes, base, "backward")
    advance("copies")
    copies = copy_rate(ranks, rounds)
    # A hop to the next rank stays inside a host for most ranks; a hop of a host's size never does.
    inside = min(ranks.local_size, ranks.size)
    links = [Link(ALL_RANKS, *link_cost(ranks, 1, rounds, advance))] if ranks.size > 1 else list(base.links)
    if 1 < inside < ranks.size:
        links = [replace(links[0], ranks=inside), Link(ALL_RANKS, *link_cost(ranks, inside, rounds, advance))]
    assumed = [f"rows and widths of tiles, as in {base.name}"]
    assumed += [] if ranks.device == "cpu" else [f"that a step takes one launch for each window, as in {base.name}"]
    assumed += [f"links, as in {base.name}, since there is one rank"] if ranks.size == 1 else []
    source = (
        f"measured by longspan doctor: {ranks.size} ranks at once, {inside} a host with {os.cpu_count()} cores,"
        f" {torch.get_num_threads()} threads a rank, kernel {kernel}, {dtype},"
        f" {sizes.q_heads}:{sizes.kv_heads} heads of {sizes.head_dim}, {ranks.backend}, torch {torch.__version__};"
        f" not measured: {'; '.join(assumed)}"
    )
    machine = replace(
        with_rates(base, forward, backward), name=name, source=source, copy_bandwidth=copies, slot_seconds=0.0,
        op_seconds=(forward_times[SMALL, 1, False] + backward_times[SMALL, 1, False]) / 2, links=tuple(links),
    )  # fmt: skip
    if ranks.device != "cpu":
        machine = fit_host(ranks, machine, sizes, dtype, rounds, advance)
    return measure_and_fit(ranks, machine, sizes, dtype, rounds, advance) if whole else machine


# -- Kernels, copies and links -----------------------------------------------------------------------------------------


TileShape = tuple[int, int, bool]
"""Query rows, key rows, causal."""
TileSeconds = dict[TileShape, float]
TILES: tuple[TileShape, ...] = ((1024, 1024, True), (512, 1024, False), (256, 2048, False), (768, 768, True))
GPU_TILES: tuple[TileShape, ...] = (
    (16384, 16384, True),
    (8192, 16384, False),
    (4096, 32768, False),
    (12288, 12288, True),
)
"""Enough to fill all multiprocessors many times over."""
SMALL = 64
"""Query rows of a tile with one key, which measures the cost of the call itself."""
MESSAGES = (1 << 16, 1 << 20, 1 << 22)
COPIED, GPU_COPIED = 1 << 20, 1 << 26
"""Numbers of a copy; on a GPU they exceed its caches."""


def median_seconds(ranks: JobRanks, call: Callable[[], object], rounds: int, together: int = 1) -> float:
    """Return the seconds of one call in the median round of `together` calls, which all ranks begin together."""
    call()  # to warm up; the barrier waits for it
    seconds: list[float] = []
    for _ in range(rounds):
        ranks.barrier()
        begin = time.perf_counter()
        for _ in range(together):
            call()
        ranks.finish()
        seconds.append((time.perf_counter() - begin) / together)
    return float(np.median(seconds))


class KernelTimer:
    """q, k, v and a gradient of the output, and the kernel that `auto` chooses for them."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, ranks: JobRanks) -> None:
        self.ranks, self.tiles = ranks, TILES if ranks.device == "cpu" else GPU_TILES
        most_q, most_k = (max(tile[i] for tile in self.tiles) for i in (0, 1))

        def draw(heads: int, rows: int, dim: int) -> Tensor:
            return torch.randn(1, heads, rows, dim).to(ranks.device, dtype)

        self.q, self.dout = draw(sizes.q_heads, most_q, sizes.head_dim), draw(sizes.q_heads, most_q, sizes.v_head_dim)
        self.k, self.v = draw(sizes.kv_heads, most_k, sizes.head_dim), draw(sizes.kv_heads, most_k, sizes.v_head_dim)
        self.kernel = kernel_named(choose_kernel("auto", self.q, self.k, self.v))

    def measure(self, rounds: int, advance: Callable[[str], None]) -> tuple[TileSeconds, TileSeconds]:
        """Return the seconds of every tile, and of the smallest one, forward and backward."""
        forward: TileSeconds = {}
        backward: TileSeconds = {}
        for q_rows, k_rows, causal in (*self.tiles, (SMALL, 1, False)):
            advance(f"kernel, {q_rows} x {k_rows}")
            q, k, v = self.q[:, :, :q_rows], self.k[:, :, :k_rows], self.v[:, :, :k_rows]
            dout = self.dout[:, :, :q_rows]
            work = TileWork(q, k, v, [Tile(0, q_rows, 0, k_rows, lo=0 if causal else None)], q.shape[-1] ** -0.5)
            ((out, lse),) = list(self.kernel.forward(work))
            out = out.to(q.dtype)
            upstream = Upstream(dout, out, lse, (dout.float() * out.float()).sum(-1))
            together = 20 if k_rows == 1 else 1

            def run_forward(work: TileWork = work) -> object:
                return list(self.kernel.forward(work))

            def run_backward(work: TileWork = work, upstream: Upstream = upstream) -> object:
                return list(self.kernel.backward(work, upstream))

            for seconds, call in ((forward, run_forward), (backward, run_backward)):
                median = median_seconds(self.ranks, call, rounds, together)
                seconds[q_rows, k_rows, causal] = self.ranks.most(median)
        return forward, backward


def kernel_rate(times: TileSeconds, sizes: Sizes, base: Machine, direction: str) -> float:
    """Return FLOP per second, counted as the model of `base` does, without the cost of the call."""
    call = times[SMALL, 1, False]
    work = spent = 0.0
    for q_rows, k_rows, causal in times.keys() - {(SMALL, 1, False)}:
        band = np.array([[0, q_rows, 0, k_rows, 0 if causal else -LIMIT, LIMIT]], dtype=np.int64)
        dims = sizes.head_dim + sizes.v_head_dim
        work += tile_work(band, sizes.q_heads, sizes.kv_heads, dims, base, direction).flop
        spent += max(times[q_rows, k_rows, causal] - call, 0.1 * times[q_rows, k_rows, causal])
    return work / spent


def copy_rate(ranks: JobRanks, rounds: int) -> float:
    """Return bytes per second of adding float32 rows, as merging partial results does: two reads and a write."""
    a, b = torch.randn(2, COPIED if ranks.device == "cpu" else GPU_COPIED, device=ranks.device)
    return 12.0 * a.numel() / ranks.most(median_seconds(ranks, lambda: a.add_(b), rounds, 4))


def link_cost(ranks: JobRanks, hop: int, rounds: int, advance: Callable[[str], None]) -> tuple[float, float]:
    """Return bandwidth and latency of messages to the rank `hop` places on, sent by all ranks at once."""
    seconds: list[float] = []
    for size in MESSAGES:
        advance(f"link, {size >> 10} KiB")
        outgoing, incoming = torch.zeros(2, size, dtype=torch.uint8, device=ranks.device)

        def exchange(outgoing: Tensor = outgoing, incoming: Tensor = incoming) -> None:
            ends = ((dist.isend, outgoing, ranks.rank + hop), (dist.irecv, incoming, ranks.rank - hop))
            for work in dist.batch_isend_irecv([dist.P2POp(kind, t, peer % ranks.size) for kind, t, peer in ends]):
                work.wait()

        seconds.append(ranks.most(median_seconds(ranks, exchange, rounds, max(1, (1 << 20) // size))))
    slope = max((seconds[-1] - seconds[0]) / (MESSAGES[-1] - MESSAGES[0]), 1e-12)
    return 1 / slope, max(seconds[0] - slope * MESSAGES[0], 0.0)


# -- Passes ------------------------------------------------------------------------------------------------------------


class MeasuredRun:
    """A plan, and one rank's tensors for it."""

    def __init__(self, plan: Plan, ranks: JobRanks, seed: int = 0) -> None:
        self.plan, self.ranks = plan, ranks
        self.group = dist.group.WORLD if dist.is_initialized() else None
        generator = torch.Generator().manual_seed(seed + ranks.rank)
        s, slots = plan.sizes, plan.layout.num_slots(ranks.rank)
        dtype: torch.dtype = getattr(torch, plan.dtype)

        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(s.batch, heads, slots, dim, generator=generator).to(ranks.device, dtype)

        shapes = ((s.q_heads, s.head_dim), (s.kv_heads, s.head_dim), (s.kv_heads, s.v_head_dim))
        self.inputs = [draw(*shape).requires_grad_() for shape in shapes]
        self.upstream = draw(s.q_heads, s.v_head_dim)

    def forward(self) -> Tensor:
        q, k, v = self.inputs
        if self.ranks.size > 1:
            return attention(q, k, v, self.plan, group=self.group)
        return attention(q, k, v, self.plan.mask)

    def once(self, times: dict[str, list[tuple[float, float]]] | None = None, *, queued: bool = False) -> None:
        """Run forward and backward; append (begin, end) of each to `times`.

        With `queued` a pass ends when the host has queued it, not when the device has finished it.
        """
        spans: list[tuple[float, float]] = []
        out: Tensor | None = None
        for direction in DIRECTIONS:
            self.ranks.barrier()
            begin = time.perf_counter()
            if direction == "forward":
                out = self.forward()
            else:
                torch.autograd.grad(out, self.inputs, self.upstream)  # type: ignore[arg-type]
            end = time.perf_counter()
            self.ranks.finish()
            spans.append((begin, end if queued else time.perf_counter()))
        if times is not None:
            for direction, span in zip(DIRECTIONS, spans, strict=True):
                times[direction].append(span)


def time_passes(run: MeasuredRun, repeats: int) -> dict[str, float]:
    """Return the median seconds of each pass, from when all ranks have begun to the end of the last one."""
    ahead = [clock.ahead for clock in clocks(run.ranks)]
    run.once()  # to warm up
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in DIRECTIONS}
    for _ in range(repeats):
        run.once(times)
    medians: dict[str, float] = {}
    for name in DIRECTIONS:
        by_rank = run.ranks.gather(torch.tensor(times[name], dtype=torch.float64))
        # (ranks, repeats, begin and end), on the clock of rank 0
        common = torch.stack([rows - ahead[rank] for rank, rows in enumerate(by_rank)])
        seconds = common[:, :, 1].amax(0) - common[:, :, 0].amin(0)
        medians[name] = float(seconds.sort().values[repeats // 2])
    return medians


# -- Host costs of a GPU: seconds for each operation, message and call -------------------------------------------------
#
# Attention calls are queued as users queue them, with so few tokens that nothing else takes time, and the clock is read
# before anything waits for the device. Plans with few and with many operations separate the cost of a call from that of
# its operations.


TOKENS = 64
"""Tokens of each rank."""
SCHEMES = ("exchange", "ring", "all_to_all", "all_gather")


def fit_host(
    ranks: JobRanks, machine: Machine, sizes: Sizes, dtype: str, rounds: int, advance: Callable[[str], None]
) -> Machine:
    """Return the machine with the largest host costs of any rank."""
    advance("host")
    message = ranks.most(_message_seconds(ranks, rounds))
    mask, layout = masks.causal(TOKENS * ranks.size), layouts.zigzag(TOKENS * ranks.size, ranks.size)
    rows: list[tuple[float, float]] = []
    for scheme in SCHEMES if ranks.size > 1 else SCHEMES[:1]:
        if scheme == "all_to_all" and ranks.size > sizes.q_heads:
            continue
        scheme_plan = plan(
            mask, layout, q_heads=sizes.q_heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, dtype=dtype,
            scheme=scheme, machine=machine,
        )  # fmt: skip
        run = MeasuredRun(scheme_plan, ranks)
        run.once()  # to warm up
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in DIRECTIONS}
        for _ in range(rounds):
            run.once(times, queued=True)
        for direction in DIRECTIONS:
            seconds = float(np.median([end - begin for begin, end in times[direction]]))
            works = steps_work(
                scheme_plan.steps(ranks.rank, direction), ranks.rank, scheme_plan.sizes, machine, direction
            )
            spent = ranks.most(seconds) - message * sum(work.messages for work in works)
            rows.append((sum(work.ops for work in works), spent))
    launch, call = fit_line(rows)
    return replace(machine, launch_seconds=launch, message_seconds=message, call_seconds=call)


def fit_line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and intercept of the least-squares line through (operations, seconds), neither below 0.

    >>> [round(value, 9) for value in fit_line([(2, 0.0002), (12, 0.0003)])]
    [1e-05, 0.00018]
    """
    ops, seconds = np.array(rows).T
    spread = float(((ops - ops.mean()) ** 2).sum())
    slope = float(((ops - ops.mean()) * (seconds - seconds.mean())).sum()) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return slope, max(float(seconds.mean() - slope * ops.mean()), 0.0)


def _message_seconds(ranks: JobRanks, rounds: int, together: int = 8) -> float:
    """Return the seconds to start one message of a batch, in the median round."""
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


# -- Whole attention calls: what packing, merging, waiting and other processes cost in addition ------------------------
#
# Calls of two sizes are run as users run them. Short ones take as long as their operations, long ones as long as their
# kernels, and windows longer than that where a kernel cannot skip tiles. The machine is fitted so that the simulator
# takes as long as they did.


SHORT, LONG = 128, 1536
GPU_SHORT, GPU_LONG = 1024, 32768
"""Tokens of each rank."""
SWEEPS = 2
MIN_FLOP_SECONDS = 1e-16
Case = tuple[dict[str, list[Schedule]], dict[str, float]]
"""Schedules of each direction, and the seconds that they took together."""


def measure_and_fit(
    ranks: JobRanks, machine: Machine, sizes: Sizes, dtype: str, rounds: int, advance: Callable[[str], None]
) -> Machine:
    """Return the machine fitted to whole attention calls on the main rank, unchanged on the others."""
    cases: list[Case] = []
    for tokens in (SHORT, LONG) if ranks.device == "cpu" else (GPU_SHORT, GPU_LONG):
        advance(f"attention, {tokens} tokens a rank")
        seq_len = tokens * ranks.size
        causal = masks.causal(seq_len)
        lengths = [seq_len // 2, seq_len // 8, seq_len - seq_len // 2 - seq_len // 8]
        windows = [causal & masks.sliding_window(width) for width in (tokens // 2, tokens + tokens // 3)]
        kinds: tuple[tuple[Mask, ...], ...] = ((causal, masks.documents(lengths) & causal), tuple(windows))
        for kind in kinds:
            plans = [
                plan(
                    mask, layouts.balanced(mask, world_size=ranks.size), q_heads=sizes.q_heads, kv_heads=sizes.kv_heads,
                    head_dim=sizes.head_dim, dtype=dtype, scheme="exchange", machine=machine,
                )
                for mask in kind
            ]  # fmt: skip
            passes = [time_passes(MeasuredRun(plan, ranks), rounds) for plan in plans]
            seconds = {direction: sum(times[direction] for times in passes) for direction in DIRECTIONS}
            schedules = {direction: [plan.schedule(direction) for plan in plans] for direction in DIRECTIONS}
            cases.append((schedules, seconds))
    return fit(machine, *cases) if ranks.is_main else machine


def fit(machine: Machine, short: Case, short_window: Case, long: Case, long_window: Case) -> Machine:
    """Return the machine on which the schedules of each direction take these seconds together.

    >>> from longspan import layouts, planning
    >>> def case(tokens, mask):
    ...     sizes = planning.Sizes(8, 8, 64, 64, 2)
    ...     problem = planning.Problem.make(mask, layouts.zigzag(tokens, 2), sizes)
    ...     forward = planning.scheme("ring", problem).schedule()
    ...     schedules = {"forward": [forward], "backward": [planning.backward(forward, keep=False)]}
    ...     return schedules, {name: total_seconds(real, steps) for name, steps in schedules.items()}
    >>> cpu = planning.MACHINES["cpu"]
    >>> real = with_windows(replace(with_rates(cpu, 50e9, 20e9), op_seconds=3e-4), 0.5, 0.25)
    >>> window = masks.causal() & masks.sliding_window(300)
    >>> fitted = fit(cpu, *(case(tokens, mask) for tokens in (256, 4096) for mask in (masks.causal(), window)))
    >>> [round(x, -9) / 1e9 for x in (fitted.flops * fitted.forward_share, fitted.flops * fitted.backward_share)]
    [50.0, 20.0]
    >>> [round(tiling.far_share, 2) for tiling in (fitted.forward_tiling, fitted.backward_tiling)]
    [0.5, 0.25]
    """
    every = [schedule for schedules, _ in (short, short_window) for name in DIRECTIONS for schedule in schedules[name]]
    seconds = sum(sum(seconds.values()) for _, seconds in (short, short_window))
    for _ in range(SWEEPS):
        machine = _fit_kernels(machine, long, long_window)
        op_seconds = solve(
            1e-6, 1.0, lambda op, machine=machine: total_seconds(replace(machine, op_seconds=op), every), seconds
        )
        machine = replace(machine, op_seconds=op_seconds)
    return _fit_kernels(machine, long, long_window)


def _fit_kernels(machine: Machine, plain: Case, window: Case) -> Machine:
    """Return the machine with the kernel rates of plain attention, and the share of them that windows reach."""

    def fit_rate(direction: str) -> float:
        schedules, seconds = plain[0][direction], plain[1][direction]

        def predict(flop_seconds: float) -> float:
            return total_seconds(with_rates(machine, 1 / flop_seconds, 1 / flop_seconds), schedules)

        if predict(MIN_FLOP_SECONDS) >= seconds:  # calls end before kernels count: keep the rate
            share = machine.forward_share if schedules[0].direction == "forward" else machine.backward_share
            return machine.flops * share
        return 1 / solve(MIN_FLOP_SECONDS, 1e-6, predict, seconds)

    machine = with_rates(machine, *map(fit_rate, DIRECTIONS))

    def fit_share(direction: str) -> float:
        schedules, seconds = window[0][direction], window[1][direction]

        def predict(slowdown: float) -> float:
            return total_seconds(with_windows(machine, 1 / slowdown, 1 / slowdown), schedules)

        return 1 / solve(0.5, 16.0, predict, seconds)

    return with_windows(machine, *map(fit_share, DIRECTIONS))


def with_windows(machine: Machine, forward: float, backward: float) -> Machine:
    """Return the machine with kernels that reach these shares of their speed on windows."""
    return replace(
        machine,
        forward_tiling=replace(machine.forward_tiling, far_share=forward),
        backward_tiling=replace(machine.backward_tiling, far_share=backward),
    )


def with_rates(machine: Machine, forward: float, backward: float) -> Machine:
    """Return the machine with kernels of these speeds, in FLOP per second."""
    flops = max(forward, backward)
    return replace(machine, flops=flops, forward_share=forward / flops, backward_share=backward / flops)


def total_seconds(machine: Machine, schedules: Sequence[Schedule]) -> float:
    return sum(simulate(schedule, machine).seconds for schedule in schedules)


def solve(low: float, high: float, predict: Callable[[float], float], seconds: float) -> float:
    """Return the cost at which an increasing prediction takes this long, or the nearest bound, by bisection.

    >>> round(solve(1e-3, 1e3, lambda x: 2 * x, 10.0), 3)
    5.0
    """
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if predict(middle) > seconds else (middle, high)
    for _ in range(8):  # linear in what is left
        middle = (low + high) / 2
        low, high = (low, middle) if predict(middle) > seconds else (middle, high)
    return (low + high) / 2
