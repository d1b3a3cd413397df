"""Planners of scans: how the owner of every segment gets the state that enters it.

Each writes one chain, given the ranks of its segments, from step 0 on; chains do not know of each other. Eight segments
on ranks 0 to 7, what rank 7 receives:

    chain        state[0:7)                                    after 7 steps, each rank waiting for the one before
    exchange     state[0:1) map[1:2) ... map[6:7)              after 1 step, folded by itself
    doubling     [5:6) is joined by [4:5), then by [2:4) and so on: maps double their reach in every step, and the
                 state [0:7) comes from rank 6 in the last one (1 + log2 7 steps)
    two_level(4) within a node all maps, between nodes those of whole nodes only
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from longspan.errors import PlanError
from longspan.schedules.scans.draft import Draft
from longspan.span import shortened

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
