"""Whole attentions beside the bare kernels: what packing, merging, waiting and this machine's other guests cost.

Attentions of two sizes are run as users run them. Short ones take as long as their operations, long ones as long as
their kernels, windows longer than that where a kernel knows none; the machine's figures for all of these are set so
that the simulator takes as long as they did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from longspan import layouts, masks
from longspan.api import plan
from longspan.cli.launch import JobRanks
from longspan.cli.measuring.runs import DIRECTIONS, MeasuredRun, clocks_ahead, time_passes
from longspan.masks import Mask
from longspan.schedules.cost.machine import Machine
from longspan.schedules.cost.simulator import simulate
from longspan.schedules.plan import Plan
from longspan.schedules.steps import Schedule, Sizes

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

    >>> from longspan import layouts, schedules
    >>> def made(tokens, mask):
    ...     sizes = schedules.Sizes(8, 8, 64, 64, 2)
    ...     problem = schedules.Problem.make(mask, layouts.zigzag(tokens, 2), sizes)
    ...     forward = schedules.scheme("ring", problem).schedule()
    ...     ways = {"forward": [forward], "backward": [schedules.backward(forward, keep=False)]}
    ...     return ways, {way: spent(real, made) for way, made in ways.items()}
    >>> cpu = schedules.MACHINES["cpu"]
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
