"""Whole attentions beside the bare kernels: what packing, merging, waiting and this machine's other guests cost.

Attentions of two sizes are run as users run them. Short ones take as long as their operations, long ones as long as
their kernels; the machine's figures for both are set so that the simulator takes as long as they did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from longspan import layouts, masks
from longspan.api import plan
from longspan.cli.group import Ranks
from longspan.cli.measured import DIRECTIONS, Run, clocks_ahead, timed
from longspan.masks import Mask
from longspan.schedules.machine import Machine
from longspan.schedules.plan import Plan
from longspan.schedules.simulate import simulate
from longspan.schedules.steps import Schedule, Sizes

SHORT, LONG = 128, 1536
"""Tokens of each rank."""
SWEEPS = 2
Schedules = dict[str, list[Schedule]]


def scaled(
    ranks: Ranks, machine: Machine, sizes: Sizes, dtype: str, rounds: int, advance: Callable[[str], None]
) -> Machine:
    """The machine with operations and kernels that make whole attentions take as long as they do.

    Ranks that do not speak only take part in the runs: theirs is the machine as it was.
    """
    ahead = clocks_ahead(ranks)
    found: list[tuple[Schedules, dict[str, float]]] = []
    for tokens in (SHORT, LONG):
        plans = _plans(ranks.size, tokens, machine, sizes, dtype)
        took: dict[str, float] = dict.fromkeys(DIRECTIONS, 0.0)
        for made in plans:
            passes = timed(Run(made, ranks), rounds, ahead)
            for direction in DIRECTIONS:
                took[direction] += passes.median(direction)
        found.append(({way: [made.schedule(way) for made in plans] for way in DIRECTIONS}, took))
        advance(f"attention, {tokens} tokens a rank")
    return fitted(machine, *found[0], *found[1]) if ranks.speaks else machine


def _plans(size: int, tokens: int, machine: Machine, sizes: Sizes, dtype: str) -> list[Plan]:
    seq_len = tokens * size
    lengths = [seq_len // 2, seq_len // 8, seq_len - seq_len // 2 - seq_len // 8]
    causal = masks.causal(seq_len)
    kinds: tuple[Mask, ...] = (causal, masks.documents(lengths) & causal, causal & masks.sliding_window(tokens // 2))
    return [
        plan(
            mask, layouts.balanced(mask, world_size=size), q_heads=sizes.q_heads, kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim, dtype=dtype, schedule="exchange", machine=machine,
        )
        for mask in kinds
    ]  # fmt: skip


def fitted(
    machine: Machine, short: Schedules, short_took: dict[str, float], long: Schedules, long_took: dict[str, float]
) -> Machine:
    """The machine on which the schedules of each direction take so many seconds together.

    >>> from longspan import layouts, schedules
    >>> def made(tokens):
    ...     sizes = schedules.Sizes(8, 8, 64, 64, 2)
    ...     problem = schedules.Problem.make(masks.causal(), layouts.zigzag(tokens, 2), sizes)
    ...     forward = schedules.scheme("ring", problem).schedule()
    ...     return {"forward": [forward], "backward": [schedules.backward(forward, keep=False)]}
    >>> cpu, short, long = schedules.MACHINES["cpu"], made(256), made(4096)
    >>> real = replace(with_rates(cpu, 50e9, 20e9), op_seconds=3e-4)
    >>> took = [{way: spent(real, case[way]) for way in DIRECTIONS} for case in (short, long)]
    >>> found = fitted(cpu, short, took[0], long, took[1])
    >>> [round(x, -9) / 1e9 for x in (found.flops * found.forward_share, found.flops * found.backward_share)]
    [50.0, 20.0]
    """
    for _ in range(SWEEPS):
        rates = {way: _rate(machine, long[way], long_took[way]) for way in DIRECTIONS}
        machine = with_rates(machine, rates["forward"], rates["backward"])
        machine = replace(machine, op_seconds=_op_seconds(machine, short, sum(short_took.values())))
    rates = {way: _rate(machine, long[way], long_took[way]) for way in DIRECTIONS}
    return with_rates(machine, rates["forward"], rates["backward"])


def _op_seconds(machine: Machine, schedules: Schedules, seconds: float) -> float:
    every = [schedule for way in DIRECTIONS for schedule in schedules[way]]
    return solved(1e-6, 1.0, lambda op: spent(replace(machine, op_seconds=op), every), seconds)


def _rate(machine: Machine, schedules: Sequence[Schedule], seconds: float) -> float:
    """FLOP per second of one direction's kernels."""

    def predicted(slowness: float) -> float:
        return spent(with_rates(machine, 1 / slowness, 1 / slowness), schedules)

    return 1 / solved(1e-16, 1e-6, predicted, seconds)


def with_rates(machine: Machine, forward: float, backward: float) -> Machine:
    """The machine with kernels of so many FLOP per second."""
    flops = max(forward, backward)
    return replace(machine, flops=flops, forward_share=forward / flops, backward_share=backward / flops)


def spent(machine: Machine, schedules: Sequence[Schedule]) -> float:
    """Seconds of all schedules, one after another."""
    return sum(simulate(schedule, machine).seconds for schedule in schedules)


def solved(low: float, high: float, predicted: Callable[[float], float], seconds: float) -> float:
    """The cost at which a prediction that grows with it takes so long, or the nearest bound, by bisection.

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
