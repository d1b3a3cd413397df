"""Choose a scheme: predict the cost of every applicable scheme on a machine, and list the reasons.

Bytes are exact: the maximum over ranks. Times and memory are those of the ranks likely to be busiest (most pairs, most
remote rows, most bytes, first, last), since a step ends with its slowest rank; if ranks differ much, another rank may
take somewhat more. They come from the same steps and cost functions as the simulator, without waits between ranks.

The fastest scheme is chosen. The model cannot distinguish schemes within 3% of it; among those, the one is chosen that
would be fastest if hosts could not run ahead of their devices, since hosts also run the rest of the model.
Example: ring takes 10.0 ms with 2.0 ms of host time, exchange 10.2 ms with 0.5 ms: exchange is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from longspan.planning.backward_plan import reverse
from longspan.planning.cost import peak_bytes
from longspan.planning.kernel_memory import table_bytes, workspace_bytes
from longspan.planning.machine import Machine, rank_times
from longspan.planning.planners import PLANNERS, Scheme, lent, scheme
from longspan.planning.problem import Problem
from longspan.planning.steps import Role, Sizes, Step


@dataclass(frozen=True, slots=True)
class Reason:
    """One scheme's costs: bytes of both passes over all ranks, times and memory of the busiest ranks."""

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
    """The ranks whose times and memory were predicted; the largest ones are reported."""
    host_seconds: float = 0.0
    """How long hosts are busy queueing both passes while the device works. 0 if the host computes itself."""
    workspace_bytes: int | None = 0
    """Memory that the machine's kernel allocates internally, and the plan's tables on the device. None: not known."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def __str__(self) -> str:
        mark = "*" if self.chosen else " "
        if self.at_least:
            return f"  {self.scheme:20s} at least {self.seconds * 1e3:.3f} ms in all, for its bytes alone"
        inside = "unknown" if self.workspace_bytes is None else f"{self.workspace_bytes / 2**20:.1f}"
        return (
            f"{mark} {self.scheme:20s} {self.forward_seconds * 1e3:9.3f} {self.backward_seconds * 1e3:9.3f}"
            f" {self.host_seconds * 1e3:9.3f} {self.bytes_received / 2**20:10.1f} {self.peak_bytes / 2**20:10.1f}"
            f" {inside:>10s}"
        )


_HEADS = f"{'fwd ms':>9s} {'bwd ms':>9s} {'host ms':>9s} {'recv MiB':>10s} {'peak MiB':>10s} {'kernel MiB':>10s}"
REASON_HEAD = f"  {'scheme':20s} {_HEADS}"
TIE = 0.03


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
    rows: list[tuple[float, float, float, int, int]] = []
    ranks = busiest(candidate)
    for rank in ranks:
        forward = candidate.steps(rank)
        backward, kept = reverse(forward, rank, keep=keep)
        passes = ((forward, "forward", ()), (backward, "backward", kept))
        (ahead, host), (back, host_back) = (rank_times(steps, rank, sizes, machine, name) for steps, name, _ in passes)
        peaks = (peak_bytes(steps, rank, problem.layout, sizes, name, held) for steps, name, held in passes)
        inside = device_bytes(forward, backward, sizes, machine)
        rows.append((ahead, back, host + host_back, max(peaks), -1 if inside is None else inside))
    seconds, back, host, peak, inside = (max(column) for column in zip(*rows, strict=True))
    received = sum(candidate.received(direction, keep=keep) for direction in ("forward", "backward"))
    return Reason(
        candidate.name, seconds, back, int(np.max(received)), int(peak), ranks=tuple(ranks), host_seconds=host,
        workspace_bytes=None if inside < 0 else int(inside),
    )  # fmt: skip


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

    Hybrids are compared if the heads fill their groups, and all-to-all if every rank gets a whole head. Others work
    only if named.
    """
    size, sizes = problem.layout.world_size, problem.sizes
    limit = min(max(sizes.kv_heads, problem.node if problem.node < size else 1), sizes.q_heads, size - 1)
    groups = [heads for heads in range(limit, 1, -1) if size % heads == 0]
    yield from (f"hybrid({heads},exchange)" for heads in groups)
    yield "exchange"
    if 1 < size <= sizes.q_heads:
        yield "all_to_all"
    yield from (f"hybrid({heads},{inner})" for heads in groups for inner in PLANNERS if inner != "exchange")
    yield from (name for name in PLANNERS if name != "exchange")


def floor_seconds(candidate: Scheme, machine: Machine) -> float:
    """Return a lower bound on the time of a scheme that moves all rows whatever the mask: its bytes over its links.

    A ring is limited by its slowest hop; gathered rows cross the network once per node and then the node's links.
    """
    problem, groups = candidate.problem, candidate.problem.layout.world_size // candidate.heads
    if candidate.inner is PLANNERS["exchange"] or groups == 1:
        return 0.0
    heads = max(problem.sizes.kv_heads / candidate.heads, 1.0)
    rows = int(problem.layout.num_tokens.sum()) * problem.sizes.batch * (groups - 1) / groups
    forward = rows * heads * problem.sizes.row_bytes(Role.KV)
    back = rows * heads * problem.sizes.row_bytes(Role.DKV)
    is_outside = problem.layout.world_size > machine.node and candidate.inner is PLANNERS["ring"]
    link = machine.links[-1 if is_outside else 0]
    return (forward + back) / link.bandwidth


def choose(problem: Problem, machine: Machine, *, keep: bool) -> tuple[Scheme, tuple[Reason, ...]]:
    """Return the scheme with the least predicted time, and every scheme's costs: the chosen one's, then fastest first.

    Among schemes within `TIE` of the fastest, the one with the least time plus host time is chosen.
    """
    judged: list[tuple[Reason, Scheme]] = []
    best = math.inf
    for candidate in (scheme(name, problem) for name in candidates(problem)):
        floor = floor_seconds(candidate, machine)
        if floor > best:
            judged.append((Reason(candidate.name, floor, 0.0, 0, 0, at_least=True), candidate))
            continue
        judged.append((judge(candidate, machine, keep=keep), candidate))
        best = min(best, judged[-1][0].seconds)
    judged.sort(key=lambda pair: (pair[0].at_least, pair[0].seconds, pair[0].bytes_received))
    tied = [pair for pair in judged if not pair[0].at_least and pair[0].seconds <= (1 + TIE) * best]
    chosen = min(tied, key=lambda pair: pair[0].seconds + pair[0].host_seconds)  # the first of equals
    others = [reason for reason, _ in judged if reason is not chosen[0]]
    return chosen[1], (replace(chosen[0], chosen=True), *others)
