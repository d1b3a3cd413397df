"""Attention as it really ran: passes timed on all ranks, and one of them taken apart step by step.

Everything goes through `longspan.attention`, as users call it. Between forward and backward all ranks meet, so that
either pass can be compared with its own simulation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from longspan.api import attention
from longspan.cli.launch import JobRanks, clocks
from longspan.cli.measuring.trace_file import COMPUTE, MESSAGE, WAIT, Slice
from longspan.execution.engine.observe import observe
from longspan.schedules.plan import Plan

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
