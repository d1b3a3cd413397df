"""Choose a scheme: predict the cost of the schemes that can win on a machine, and list the reasons.

`choose` runs for every new batch, so it looks at few schemes. A lower bound on a scheme's time follows in closed form
from its pairs and its bytes. An exchange is estimated first, then the others in the order of their bounds, as long as a
bound is below the best time so far. Times come from `estimate`, which simulates all ranks.

The choice is a function of the arguments alone, since all ranks must choose the same scheme. It is not remembered for
similar batches: a rank that has seen other batches would choose differently.

The fastest scheme is chosen. The model cannot distinguish schemes within 1% of it; among those, the one is chosen that
would be fastest if hosts could not run ahead of their devices, since hosts also run the rest of the model.
Example: ring takes 10.00 ms with 2.0 ms of host time, exchange 10.05 ms with 0.5 ms: exchange is chosen.
A scheme whose busiest rank receives more than in an all-gather has to be `MORE_BYTES` faster than the others: links are
shared with what the model does not know, such as FSDP's messages.

`compare` adds what a person wants to know of every scheme. Bytes are exact: the maximum over ranks. Memory is that of
the ranks likely to be busiest (most pairs, most remote rows, most bytes, first, last).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.masks import bands as bd
from longspan.masks.work import pairs_in
from longspan.planning.backward_plan import reverse
from longspan.planning.cost import live_bytes, peak_bytes
from longspan.planning.estimate import LAYERS, Estimate, estimate
from longspan.planning.kernel_memory import table_bytes, workspace_bytes
from longspan.planning.machine import Machine, Work, rank_times, tile_work
from longspan.planning.planners import PLANNERS, Scheme, lent, scheme
from longspan.planning.problem import Problem
from longspan.planning.steps import Role, Sizes, Step
from longspan.spans import total, union


@dataclass(frozen=True, slots=True)
class Reason:
    """One scheme's costs: bytes and times of both passes over all ranks, memory of the busiest ranks."""

    scheme: str
    forward_seconds: float
    backward_seconds: float
    bytes_received: int
    """The most bytes that any rank receives, both passes together."""
    peak_bytes: int
    """The most memory that one of `ranks` needs at any step beyond its own tensors and the kernel's workspace."""
    chosen: bool = False
    at_least: bool = False
    """Whether the time is only a lower bound, which was already worse than another scheme."""
    ranks: tuple[int, ...] = ()
    """The ranks whose memory was predicted; the largest is reported."""
    host_seconds: float = 0.0
    """How long hosts are busy queueing both passes while the device works. 0 if the host computes itself."""
    workspace_bytes: int | None = 0
    """Memory that the machine's kernel allocates internally, and the plan's tables on the device. None: not known."""
    forward_peak_bytes: int = 0
    """`peak_bytes` of forward alone."""
    backward_peak: tuple[int, int] = (0, 0)
    """Bytes as in `peak_bytes`, and those of workspace and tables, in the backward step that has most of both: a kernel
    allocates its workspace only in steps that compute."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def __str__(self) -> str:
        mark = "*" if self.chosen else " "
        if self.at_least:
            return f"  {self.scheme:20s} at least {self.seconds * 1e3:.3f} ms in all, for its pairs and bytes alone"
        inside = "unknown" if self.workspace_bytes is None else f"{self.workspace_bytes / 2**20:.1f}"
        return (
            f"{mark} {self.scheme:20s} {self.forward_seconds * 1e3:9.3f} {self.backward_seconds * 1e3:9.3f}"
            f" {self.host_seconds * 1e3:9.3f} {self.bytes_received / 2**20:10.1f} {self.peak_bytes / 2**20:10.1f}"
            f" {inside:>10s}"
        )


_HEADS = f"{'fwd ms':>9s} {'bwd ms':>9s} {'host ms':>9s} {'recv MiB':>10s} {'peak MiB':>10s} {'kernel MiB':>10s}"
REASON_HEAD = f"  {'scheme':20s} {_HEADS}"
TIE = 0.01
MORE_BYTES = 0.05
LARGE = 6e-3
"""Seconds from which hybrids are estimated only for the largest groups and groups of whole nodes. Others win by more
than 2% only where launches and latencies count (`python -m benchmarks.auto_choice`)."""
MAX_STAGED = 256
"""Ranks up to which stages are compared: simulating them takes longer than the other schemes."""
STAGED_GAIN = 0.15
"""Where kernels take longer than `LARGE`, stages are estimated if their lower bound is below the best time by this
share. A smaller difference is mostly unequal work, which stages do not hide."""
MAX_RING = 128
"""Ranks of a ring up to which all of them are estimated: their steps grow with the square."""
GAIN = 0.02
WORTH = 300e-6
"""A scheme is estimated if, by its lower bound, it can save this share of the best time, or these seconds: an estimate
takes a few milliseconds, and a model has some tens of layers."""


def busiest(chosen: Scheme) -> list[int]:
    """Return the ranks that are likely to be the slowest."""
    problem = chosen.problem
    size = problem.layout.world_size
    borrowed, sent = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for needed in problem.needed:
        np.add.at(borrowed, needed[:, 2], needed[:, 1] - needed[:, 0])
        sent += lent(needed, problem.layout)
    # Backward fetches rows again, and returns their gradients to the ranks that sent them.
    received = borrowed * 2 * problem.sizes.row_bytes(Role.KV) + sent * problem.sizes.row_bytes(Role.DKV)
    return sorted({int(worst.argmax()) for worst in (chosen.work, borrowed, received)} | {0, size - 1})


def judge(candidate: Scheme, machine: Machine, *, keep: bool) -> Reason:
    """Return the scheme's costs on the machine."""
    problem, sizes = candidate.problem, candidate.problem.sizes
    rows: list[tuple[int, int, int]] = []
    worst = (0, 0)
    ranks = busiest(candidate)
    for rank in ranks:
        forward = candidate.steps(rank)
        backward, kept = reverse(forward, rank, keep=keep)
        ahead = peak_bytes(forward, rank, problem.layout, sizes, "forward")
        live = live_bytes(backward, rank, problem.layout, sizes, "backward", kept)
        inside = device_bytes(forward, backward, sizes, machine)
        rows.append((max(ahead, int(live.max(initial=0))), ahead, -1 if inside is None else inside))
        tables = table_bytes(forward, backward, machine)
        running = live
        if sum(bool(step.computes) for step in backward) == 1:
            running = live_bytes(backward, rank, problem.layout, sizes, "backward", kept, at_kernel=True)
        moments = [(num_bytes, tables) for num_bytes in live.tolist()]
        moments += [(running[number], inside or tables) for number, step in enumerate(backward) if step.computes]
        worst = max(worst, *((int(a), b) for a, b in moments), key=sum)
    peak, ahead, inside = (max(column) for column in zip(*rows, strict=True))
    time = estimate_scheme(candidate, machine, keep=keep)
    return Reason(
        candidate.name, time.forward, time.backward, most_received(candidate, keep=keep), int(peak), ranks=tuple(ranks),
        host_seconds=time.host_seconds, workspace_bytes=None if inside < 0 else int(inside),
        forward_peak_bytes=int(ahead), backward_peak=worst,
    )  # fmt: skip


def estimate_scheme(candidate: Scheme, machine: Machine, *, keep: bool) -> Estimate:
    """Return the scheme's times: of all ranks, or of the busiest for a long ring and planners without a layer."""
    known, key = candidate.problem.estimates, (candidate.name, machine, keep)
    if key not in known:
        known[key] = _estimate_scheme(candidate, machine, keep=keep)
    return known[key]


def _estimate_scheme(candidate: Scheme, machine: Machine, *, keep: bool) -> Estimate:
    groups = candidate.problem.layout.world_size // candidate.heads
    if candidate.inner in LAYERS and (candidate.inner is not PLANNERS["ring"] or groups <= MAX_RING):
        return estimate(candidate, machine, keep=keep)
    rows: list[tuple[float, float, float]] = []
    for rank in busiest(candidate):
        forward = candidate.steps(rank)
        passes = (forward, "forward"), (reverse(forward, rank, keep=keep)[0], "backward")
        problem = candidate.problem
        times = [rank_times(steps, rank, problem.sizes, machine, name, problem.pairs_of) for steps, name in passes]
        rows.append((times[0][0], times[1][0], times[0][1] + times[1][1]))
    return Estimate(*(max(column) for column in zip(*rows, strict=True)))


def device_bytes(
    forward: tuple[Step, ...],
    backward: tuple[Step, ...],
    sizes: Sizes,
    machine: Machine,
    *,
    deterministic: bool = False,
) -> int | None:
    """Return the largest workspace of a launch plus the tables of both passes, or None if not known."""
    inside = workspace_bytes(backward, sizes, machine, deterministic=deterministic)
    return None if inside is None else inside + table_bytes(forward, backward, machine)


def candidates(problem: Problem) -> Iterator[str]:
    """Yield the names of the schemes worth comparing, those that move least first.

    Hybrids are compared if the heads fill their groups, and all-to-all if every rank gets a whole head. Stages are
    compared where all messages between groups cross the network. Others work only if named.
    """
    size, sizes = problem.layout.world_size, problem.sizes
    limit = min(max(sizes.kv_heads, problem.node if problem.node < size else 1), sizes.q_heads, size - 1)
    groups = [heads for heads in range(limit, 1, -1) if size % heads == 0]
    yield "exchange"
    yield from (f"hybrid({heads},exchange)" for heads in groups)
    if 1 < size <= sizes.q_heads:
        yield "all_to_all"
    if problem.node < size <= MAX_STAGED:
        yield from (f"hybrid({heads},staged)" for heads in groups if heads % problem.node == 0)
    others = [name for name in PLANNERS if name not in ("exchange", "staged")]
    yield from (f"hybrid({heads},{inner})" for heads in groups for inner in others)
    yield from others


@dataclass(frozen=True, eq=False)
class Floor:
    """Lower bounds on the times of schemes, from pairs, rows and bytes in closed form."""

    problem: Problem
    machine: Machine
    keep: bool

    @cached_property
    def kernel_seconds(self) -> tuple[float, float]:
        """Seconds of kernels, forward and backward, if all ranks had equal shares of uncut bands."""
        machine, sizes, size = self.machine, self.problem.sizes, self.problem.layout.world_size
        dims = sizes.head_dim + sizes.v_head_dim
        ahead = back = Work()
        for lane in self.problem.lanes:
            batch, head_rows = lane.weight(sizes) // len(lane.kv_heads), len(lane.kv_heads)
            for part in lane.parts:
                bands, heads = bd.tighten(part.plane.region), len(part.q_heads)
                of_heads = heads, max(heads // sizes.group, 1)
                q, kv = (total(union(bands[:, ends])) for ends in ((bd.Q0, bd.Q1), (bd.K0, bd.K1)))
                # Backward copies what it reads and adds; see `kernel_work`.
                copied = batch * (14.0 * q * heads * sizes.head_dim + 10.0 * kv * head_rows * dims)
                head_rows = 0  # keys of a lane count once
                pairs = pairs_in(part.plane, bands)
                one, two = (tile_work(bands, *of_heads, dims, machine, way, pairs) for way in ("forward", "backward"))
                ahead += Work(one.flop * batch, one.slots * batch)
                back += Work(two.flop * batch, two.slots * batch, copied)
        return ahead.seconds(machine, "forward") / size, back.seconds(machine, "backward") / size

    def seconds(self, candidate: Scheme) -> float:
        """Return a lower bound on the seconds of both passes."""
        machine, sizes, layout = self.machine, self.problem.sizes, self.problem.layout
        heads, groups = candidate.heads, layout.world_size // candidate.heads
        pairs = float(self.problem.work.reshape(-1, heads).sum(axis=1).max()) / heads  # ranks of a group share equally
        flop = 2.0 * pairs * (sizes.head_dim + sizes.v_head_dim) / machine.flops
        # What moves between groups hides behind computes at best.
        ahead = max(self.kernel_seconds[0], flop / machine.forward_share)
        back = max(self.kernel_seconds[1], 2.5 * flop / machine.backward_share)
        if candidate.inner in (PLANNERS["ring"], PLANNERS["all_gather"]) and groups > 1:
            forward, backward = self._all_rows(candidate)
            ahead, back = max(ahead, forward), max(back, backward)
        hops = groups - 1 if candidate.inner is PLANNERS["ring"] else 0
        if candidate.inner is PLANNERS["staged"] and groups > 1:
            hops = candidate.problem.num_early_stages - 1  # a kernel, and messages from one group at least
        # Operations and messages: a kernel and its copies, and for each hop a pack, a start and, in backward, a sum.
        ops, messages = [2.0 + 2 * hops, 4.0 + 3 * hops], [2.0 * hops, 2.0 * hops]
        if heads > 1:
            # Heads move within groups while nothing is computed: packed, sent and unpacked.
            peers = heads - 1
            rows = int(layout.num_tokens.max()) * sizes.batch * peers
            # With one group, only keys that are attended to move.
            q, kv = rows * sizes.q_heads / heads, rows * max(sizes.kv_heads / heads, 1.0) * (groups > 1)
            inputs = self._move(heads, q * sizes.row_bytes(Role.Q) + kv * sizes.row_bytes(Role.KV))
            ahead += inputs + self._move(heads, q * sizes.row_bytes(Role.OUT))
            back += self._move(heads, q * sizes.row_bytes(Role.DOUT)) + (0.0 if self.keep else inputs)
            back += self._move(heads, q * sizes.row_bytes(Role.DQ) + kv * sizes.row_bytes(Role.DKV))
            phases = 2 if self.keep else 3
            ops = [ops[0] + 3 * peers + 2, ops[1] + (phases + 1) * peers + phases]
            messages = [messages[0] + 4 * peers, messages[1] + 2 * phases * peers]
        bounds = 0.0
        for seconds, num, sent in zip((ahead, back), ops, messages, strict=True):
            num = num if machine.one_launch else 1.0  # an operation for each slice, however few
            host = machine.call_seconds + num * machine.launch_seconds + sent * machine.message_seconds
            bounds += max(seconds + num * machine.op_seconds, host)
        return bounds

    def _move(self, heads: int, num_bytes: float) -> float:
        """Return the seconds that a rank takes to send `num_bytes` to the other ranks of its group."""
        machine, is_outside = self.machine, heads > self.machine.node
        link = machine.links[min(int(is_outside), len(machine.links) - 1)]
        share = (heads - machine.node) / (heads - 1) if is_outside else 1.0  # over that link
        return 4.0 * num_bytes / machine.copy_bandwidth + link.latency + share * num_bytes / link.bandwidth

    def _all_rows(self, candidate: Scheme) -> tuple[float, float]:
        """Return the seconds in which all rows pass the links of a group, whatever the mask, forward and backward.

        A ring is limited by its slowest hop; gathered rows cross the network once per node and then the node's links.
        """
        problem, sizes, groups = self.problem, self.problem.sizes, self.problem.layout.world_size // candidate.heads
        heads = max(sizes.kv_heads / candidate.heads, 1.0)
        rows = int(problem.layout.num_tokens.sum()) * sizes.batch * heads * (groups - 1) / groups
        is_outside = problem.layout.world_size > self.machine.node and candidate.inner is PLANNERS["ring"]
        bandwidth = self.machine.links[-1 if is_outside else 0].bandwidth
        return rows * sizes.row_bytes(Role.KV) / bandwidth, rows * sizes.row_bytes(Role.DKV) / bandwidth


def choose(problem: Problem, machine: Machine, *, keep: bool) -> Scheme:
    """Return the scheme with the least predicted time.

    Among schemes within `TIE` of the fastest, the one with the least time plus host time is chosen.
    """
    floor = Floor(problem, machine, keep)
    first, *others = (scheme(name, problem) for name in candidates(problem))
    if problem.num_stages == 1:  # then an exchange moves no more than an all-gather, in as many steps
        others = [other for other in others if other.inner is not PLANNERS["all_gather"]]
    is_large = floor.seconds(first) > LARGE
    if is_large:
        size, most = problem.layout.world_size, max((o.heads for o in others if o.name != "all_to_all"), default=1)
        others = [o for o in others if o.heads in (1, most, size) or o.heads % machine.node == 0]
    times = [(estimate_scheme(first, machine, keep=keep), first)]
    best = times[0][0].seconds
    bounds = sorted(((floor.seconds(other), other) for other in others), key=lambda pair: pair[0])
    for bound, other in bounds:
        if bound > best - min(GAIN * best, WORTH):
            break
        if is_large and other.inner is PLANNERS["staged"] and bound > (1 - STAGED_GAIN) * best:
            continue
        times.append((estimate_scheme(other, machine, keep=keep), other))
        best = min(best, times[-1][0].seconds)
    tied = [pair for pair in times if pair[0].seconds <= (1 + TIE) * best]
    fastest = min(tied, key=lambda pair: pair[0].seconds + pair[0].host_seconds)  # the first of equals
    gather = scheme("all_gather", problem)
    gathered = most_received(gather, keep=keep)
    if most_received(fastest[1], keep=keep) <= gathered:
        return fastest[1]
    enough = fastest[0].seconds / (1 - MORE_BYTES)
    near = (first, *(other for bound, other in bounds if bound < enough), gather)
    frugal = [other for other in near if most_received(other, keep=keep) <= gathered]
    least = min(frugal, key=lambda other: estimate_scheme(other, machine, keep=keep).seconds)
    return least if estimate_scheme(least, machine, keep=keep).seconds < enough else fastest[1]


def most_received(candidate: Scheme, *, keep: bool) -> int:
    """Return the most bytes that a rank receives, both passes together."""
    return int(np.max(sum(candidate.received_bytes(direction, keep=keep) for direction in ("forward", "backward"))))


def compare(first: Reason, chosen: Scheme, machine: Machine, *, keep: bool) -> tuple[Reason, ...]:
    """Return the costs of every candidate: those of the chosen scheme, `first`, then fastest first.

    A scheme whose lower bound is above the time of the chosen one is listed with this bound.
    """
    problem = chosen.problem
    floor, others = Floor(problem, machine, keep), list[Reason]()
    for other in (scheme(name, problem) for name in candidates(problem) if name != chosen.name):
        bound = floor.seconds(other)
        is_slower = bound > first.seconds
        low = Reason(other.name, bound, 0.0, 0, 0, at_least=True)
        others.append(low if is_slower else judge(other, machine, keep=keep))
    others.sort(key=lambda reason: (reason.at_least, reason.seconds, reason.bytes_received))
    return first, *others
