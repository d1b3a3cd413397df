"""Planners of scans, the transposed schedule for backward, and moving tokens to a contiguous layout instead."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.planning.machine import Floats, Machine
from longspan.planning.scan_steps import ChainPiece, Draft, ScanStep, StateTransfer
from longspan.spans import Ints, shortened

# -- Planners: how the owner of every segment gets the state that enters it --------------------------------------------
# Each planner writes one chain, given the ranks of its segments, from step 0 on; chains are independent. Eight segments
# on ranks 0 to 7, what rank 7 receives:
#
#     chain        state[0:7)                                    after 7 steps, each rank waiting for the one before
#     exchange     state[0:1) map[1:2) ... map[6:7)              after 1 step, folded locally
#     doubling     [5:6) is joined by [4:5), then by [2:4) and so on: maps double their reach in every step, and the
#                  state [0:7) comes from rank 6 in the last one (1 + log2 7 steps)
#     two_level(4) all maps within a node, only those of whole nodes between nodes


ScanPlanner = Callable[[Draft, int, Sequence[int], int], None]
"""Writes a chain, by number, with the ranks of its segments, on a machine with so many ranks a node."""


def one_after_another(draft: Draft, chain: int, ranks: Sequence[int], node: int) -> None:  # noqa: ARG001
    """A rank waits for the state that enters it, and hands on the one that leaves it. Only states travel."""
    step = 0
    for i, (rank, after) in enumerate(itertools.pairwise(ranks)):
        draft.fold(step, rank, chain, (0, i, i + 1))
        draft.send(step, (rank, after), chain, (0, i + 1))
        step += rank != after


def exchange(draft: Draft, chain: int, ranks: Sequence[int], node: int) -> None:  # noqa: ARG001
    """Every rank gets the maps of all segments before its last one, and folds them itself. One step."""
    last = {rank: i for i, rank in enumerate(ranks)}
    for i, rank in enumerate(ranks[:-1]):
        for other, place in last.items():
            if place > i:
                draft.send(0, (rank, other), chain, (i, i + 1))
    for rank, place in last.items():
        for i in range(1, place):
            draft.fold(1, rank, chain, (0, i, i + 1))


def doubling(draft: Draft, chain: int, ranks: Sequence[int], node: int) -> None:  # noqa: ARG001
    """In every step a segment's piece, which ends with it, is joined by the one before, which reaches as far."""
    units = [(i, i + 1, rank) for i, rank in enumerate(ranks[:-1])]
    step = _double(draft, chain, units, 0)
    for i, rank in enumerate(ranks[:-1]):
        draft.send(step, (rank, ranks[i + 1]), chain, (0, i + 1))


def _double(draft: Draft, chain: int, units: Sequence[tuple[int, int, int]], step: int) -> int:
    """Units (first, end, owner) in a row: each owner has [0:end) at the beginning of the step that is returned.

    Folds of a step come before its transfers, so what a transfer brought is folded in the next step.
    """
    starts = [first for first, _, _ in units]
    reach, count = 1, len(units)
    while reach < count:
        for i in range(reach, count):
            _, end, owner = units[i - reach]
            draft.send(step, (owner, units[i][2]), chain, (starts[i - reach], end))
        step += 1
        new = list(starts)
        for i in range(reach, count):
            new[i] = starts[i - reach]
            draft.fold(step, units[i][2], chain, (new[i], starts[i], units[i][1]))
        starts, reach = new, 2 * reach
    return step


def two_level(draft: Draft, chain: int, ranks: Sequence[int], node: int) -> None:
    """Neighbours in one node exchange maps; what a run of them does together goes from node to node by doubling; the
    state that enters a run is handed round inside of it."""
    runs = _runs(ranks, node)
    for first, end in runs:
        _exchange_run(draft, chain, ranks, (first, end), is_last=end == len(ranks))
    units = [(first, end, ranks[end - 1]) for first, end in runs[:-1]]
    step = _double(draft, chain, units, 1)
    for (_, end, owner), (after, _) in zip(units, runs[1:], strict=True):
        draft.send(step, (owner, ranks[after]), chain, (0, end))
    for first, end in runs[1:]:
        for i in range(first, end):
            draft.send(step + 1, (ranks[first], ranks[i]), chain, (0, first))
        for i in range(first + 1, end):
            draft.fold(step + 2, ranks[i], chain, (0, first, i))


def _runs(ranks: Sequence[int], node: int) -> list[tuple[int, int]]:
    """Segments in a row that lie in one node."""
    edges = [i for i in range(1, len(ranks)) if ranks[i] // node != ranks[i - 1] // node]
    return list(zip([0, *edges], [*edges, len(ranks)], strict=True))


def _exchange_run(draft: Draft, chain: int, ranks: Sequence[int], run: tuple[int, int], *, is_last: bool) -> None:
    """Every owner in the run gets what all segments before its last one do together; the owner of the last one, what
    the whole run does, unless the chain ends with it."""
    first, end = run
    last = {ranks[i]: i for i in range(first, end)}
    for i in range(first, end - 1):
        for other, place in last.items():
            if place > i:
                draft.send(0, (ranks[i], other), chain, (i, i + 1))
    for rank, place in last.items():
        whole = place + 1 if place == end - 1 and not is_last else place
        for i in range(first + 1, whole):
            draft.fold(1, rank, chain, (first, i, i + 1))


SCAN_PLANNERS: dict[str, ScanPlanner] = {
    "chain": one_after_another,
    "exchange": exchange,
    "doubling": doubling,
    "two_level": two_level,
}
_TWO_LEVEL = re.compile(r"two_level\((\d{1,6})\)")


def scan_planner(name: str, node: int) -> tuple[ScanPlanner, int]:
    """The planner of this name, and the ranks a node that it counts on.

    >>> scan_planner("two_level(4)", 8)[1]
    4
    """
    found = _TWO_LEVEL.fullmatch(name)
    if found and int(found[1]):
        return two_level, int(found[1])
    if name not in SCAN_PLANNERS:
        raise PlanError(
            f"scheme = {shortened(name)} was asked for a scan. There are {', '.join(SCAN_PLANNERS)},"
            f" two_level(RANKS OF A NODE), and auto."
        )
    return SCAN_PLANNERS[name], node


# -- Backward: the transposed schedule ---------------------------------------------------------------------------------
# Gradients of states travel back along the path of the states. Forward is linear in the added terms (U) for given maps
# (M), so backward is its transpose. Where forward folded [i:k) and [k:j), backward gives M_right^T times the gradient
# of the whole to the left part and the gradient itself to the right part; where a piece was sent, its gradient comes
# back, and all gradients of one piece are added. No map travels twice: a rank keeps the M of every right part that it
# folded.
#
# Backward begins with the gradient of every entering state [0:i), without contributions of later segments, and ends
# with the gradient of every [i:i+1): the gradient of the state that leaves segment i, from all segments after it.
#
#     forward    step 0  0 ── state[0:1] ──► 1      step 1  1 folds state[0:1] map[1:2], 1 ── state[0:2] ──► 2
#     backward   step 0  2 ── dstate[0:2] ──► 1     step 1  1 takes it apart, 1 ── dstate[0:1] ──► 0    step 2


def transposed(steps: tuple[ScanStep, ...]) -> tuple[ScanStep, ...]:
    """One rank's backward steps from its forward steps.

    >>> from longspan.planning.scan_steps import Fold
    >>> state, mapped, whole = map(ChainPiece.parse, ("state[0:1]c0b0:1", "map[1:2]c0b0:1", "state[0:2]c0b0:1"))
    >>> came = StateTransfer(0, 1, state, 2)
    >>> went = StateTransfer(1, 2, whole, 2)
    >>> for step in transposed((ScanStep((came,)), ScanStep((went,), (Fold(1, state, mapped),)), ScanStep())):
    ...     print(step.transfers, step.computes)
    (2>1 dstate[0:2]c0b0:1,) ()
    (1>0 dstate[0:1]c0b0:1,) (fold state[0:1]c0b0:1 map[1:2]c0b0:1,)
    () ()
    """
    count = len(steps)
    made: list[ScanStep] = []
    for number in reversed(range(count)):
        before = steps[number - 1].transfers if number else ()
        back = [StateTransfer(t.dst, t.src, t.piece.to_gradient(), count) for t in before]
        made.append(ScanStep(tuple(back), steps[number].computes[::-1]))
    return tuple(made)


def kept(steps: tuple[ScanStep, ...]) -> tuple[ChainPiece, ...]:
    """The pieces whose M the rank keeps for backward, in the order of their first fold."""
    return tuple(dict.fromkeys(fold.right for step in steps for fold in step.computes))


# -- Moving tokens to a contiguous layout and back ---------------------------------------------------------------------
# A layout that suits attention may split every document over all ranks (striped, zigzag per document), which makes
# chains long. After one relayout the tokens of a rank are contiguous. What travels is every row whose owner changes:
# inputs and outputs in forward, their gradients in backward.


def moved_tokens(source: Layout, target: Layout) -> Ints:
    """(source rank, target rank, tokens) of what changes its owner.

    >>> from longspan.layouts import contiguous, zigzag
    >>> moved_tokens(zigzag(8, 2), contiguous(8, 2)).tolist()
    [[0, 1, 2], [1, 0, 2]]
    """
    starts = np.union1d(source.by_position[:, 0], target.by_position[:, 0])
    lengths = np.diff(np.append(starts, source.seq_len))
    ends = [
        layout.by_position[np.searchsorted(layout.by_position[:, 0], starts, side="right") - 1, 2]
        for layout in (source, target)
    ]
    pair = ends[0] * source.world_size + ends[1]
    tokens = np.bincount(pair, lengths, source.world_size**2).astype(np.int64)
    found = np.flatnonzero(tokens)
    table = np.stack((found // source.world_size, found % source.world_size, tokens[found]), axis=1)
    return table[table[:, 0] != table[:, 1]]


def relayout_price(source: Layout, target: Layout, token_bytes: int, machine: Machine) -> tuple[float, Ints]:
    """Seconds of one pass, and the bytes that every rank receives in it: `token_bytes` are those of all that goes there
    and comes back."""
    moved = moved_tokens(source, target)
    weights = moved[:, 2] * token_bytes
    size = source.world_size
    ports: Floats = np.zeros((len(machine.links), 2, size))
    levels = machine.levels(moved[:, 0], moved[:, 1])
    for way in range(2):
        np.add.at(ports, (levels, np.full(len(moved), way, dtype=np.int64), moved[:, way]), weights)
    bandwidth = np.array([link.bandwidth for link in machine.links])
    latency = np.array([link.latency for link in machine.links])
    busiest = ports.max(axis=(1, 2))
    seconds = float(np.where(busiest > 0, 2 * latency + busiest / bandwidth, 0.0).max(initial=0.0))
    copied = 2.0 * float(source.num_tokens.max(initial=0)) * token_bytes / machine.copy_bandwidth
    return seconds + copied, np.bincount(moved[:, 1], weights, size).astype(np.int64)
