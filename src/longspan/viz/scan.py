"""A picture of a scan plan: for each document and rank, which pieces of the chain reach the rank, step by step.

Chains go right, so do steps. A rank's strip shows its own segments; a segment is filled as soon as the state that
enters it is there, and below the strip lie the pieces that came or were folded in this step, coloured by the rank they
came from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from longspan.formatting import bytes_text, count_text, counted
from longspan.planning.scan_plan import ScanPlan
from longspan.planning.scan_steps import PLACE, RANK, START, STOP
from longspan.spans import Ints
from longspan.viz.scene import (
    MARGIN,
    SMALL,
    WIDTH,
    Key,
    Line,
    Rect,
    Scene,
    Text,
    headed,
    legend_row,
    rank_color,
    text_width,
)

_ROWS = 48
"""Strips that are drawn at most, of the longest chains."""
_COLUMNS = 9
_STRIP, _BAR, _GAP = 13.0, 6.0, 14.0
_WAITING, _MAP = 0.22, 0.5

Reach = tuple[int, int]
Parts = list[tuple[int, int, int]]
"""(first, end, the rank it came from) of what a piece was put together from."""


@dataclass(eq=False)
class _RankStrip:
    """What one rank has of one chain, step by step."""

    rank: int
    own: list[int]
    """Its segments' places."""
    entered: set[int] = field(default_factory=set)
    """Segments whose entering state is there."""

    def columns(self, plan: ScanPlan, chain: int) -> Iterator[tuple[list[Parts], set[int]]]:
        """For every step: the pieces that are new, and the segments that can be computed."""
        arrived: list[tuple[Reach, int]] = []
        for step in plan.steps(self.rank):
            new: dict[Reach, Parts] = {reach: [(*reach, src)] for reach, src in arrived}
            consumed: set[Reach] = set()
            self._enter(new)
            for fold in step.computes:
                if fold.left.chain == chain:
                    sides = [(fold.left.start, fold.left.stop), (fold.right.start, fold.right.stop)]
                    parts = [part for side in sides for part in new.get(side, [(*side, self.rank)])]
                    consumed.update(sides)
                    new[fold.whole.start, fold.whole.stop] = parts
                    self._enter(new)
            yield [parts for reach, parts in sorted(new.items()) if reach not in consumed], set(self.entered)
            arrived = [
                ((t.piece.start, t.piece.stop), t.src)
                for t in step.transfers
                if t.dst == self.rank and t.piece.chain == chain
            ]

    def _enter(self, new: dict[Reach, Parts]) -> None:
        alone = {0, 1} if 0 in self.own else {0}  # a document's first segment, and what leaves it
        ready = alone | {end for first, end in new if first == 0}
        self.entered |= ready.intersection(self.own)


def scan_picture(plan: ScanPlan, *, title: str | None = None) -> Scene:
    """How states get from segment to segment. Documents on one rank alone send nothing, and are only counted."""
    chains = _drawn(plan)
    scene, top = headed(title or f"Scan: {plan.scheme}", _remarks(plan, len(chains)), _ABOUT)
    y = legend_row(scene, MARGIN, top + 4, _keys(plan, chains)) + 2
    num_columns = min(plan.draft.num_steps, _COLUMNS)
    left, right = MARGIN + 62, WIDTH - MARGIN
    wide = (right - left + _GAP) / max(num_columns, 1) - _GAP
    starts = [left + (wide + _GAP) * column for column in range(num_columns)]
    for column, x in enumerate(starts):
        scene.add(Text(x, y + 12, f"step {column}" if column else "at first", SMALL, bold=True))
    y += 22
    for chain, table in chains:
        y = _chain(scene, plan, chain, table, starts, wide, y) + 16
    scene.height = y + 6
    return scene


_ABOUT = (
    "One column per step, one strip per rank of a document. A segment is filled once the state that enters it is known;"
    " bars below are pieces that arrived or were folded, in the colours of the ranks they came from."
)


_READ = (
    "Numbered boxes are a rank's segments, pale until the state that enters them is there. Bars are what came or was"
    " joined in a step, over the segments it stands for, in the colour of the rank it came from: thin ones are maps,"
    " thick ones begin with the document and are states."
)


def _drawn(plan: ScanPlan) -> list[tuple[int, Ints]]:
    """The longest chains of more than one segment, with their segments, as many as there is room for."""
    first = plan.chains.first.tolist()
    tables = [(n, plan.chains.table[start:stop]) for n, (start, stop) in enumerate(itertools.pairwise(first))]
    long = sorted((each for each in tables if len(each[1]) > 1), key=lambda each: -len(each[1]))
    kept: list[tuple[int, Ints]] = []
    room = _ROWS
    for number, table in long:
        room -= len(set(table[:, RANK].tolist()))
        if kept and room < 0:
            break
        kept.append((number, table))
    return sorted(kept, key=lambda each: each[0])


def _remarks(plan: ScanPlan, num_drawn: int) -> list[str]:
    total = len(plan.chains.batches)
    cut = sum(len(ranks) > 1 for ranks in plan.chains.ranks())
    most = [max(plan.bytes_received(r, d) for r in range(plan.layout.world_size)) for d in ("forward", "backward")]
    words = (
        f"{counted(total, 'document')} on {counted(plan.layout.world_size, 'rank')} ({plan.layout.name}); a"
        f" rank receives at most {bytes_text(most[0])} forward and {bytes_text(most[1])} backward."
    )
    remarks = [words, _READ]
    if plan.source is not None:
        remarks[0] = (
            f"{remarks[0]} Beside that, tokens are moved to it from {plan.home.name} and back:"
            f" {bytes_text(plan.reasons[0].bytes_received)} at most in all, both passes."
        )
    if cut < total:
        whole = total - cut
        remarks.append(
            f"{count_text(whole)} document{'s lie' if whole != 1 else ' lies'} on one rank alone: nothing to send."
        )
    if num_drawn < cut:
        remarks.append(f"Drawn: {num_drawn} of {count_text(cut)} documents on several ranks, of the most segments.")
    if plan.draft.num_steps > _COLUMNS:
        remarks.append(f"The first {_COLUMNS} of {plan.draft.num_steps} steps are drawn.")
    return remarks


def _keys(plan: ScanPlan, chains: list[tuple[int, Ints]]) -> list[Key]:
    size = plan.layout.world_size
    ranks = sorted({int(rank) for _, table in chains for rank in table[:, RANK]})
    shown = ranks if len(ranks) <= 8 else [ranks[0], ranks[len(ranks) // 2], ranks[-1]]
    keys: list[Key] = [(f"rank {rank}", rank_color(rank, size), 1.0) for rank in shown]
    color = rank_color(shown[0], size) if shown else "grid"
    return [*keys, ("waits", color, _WAITING), ("can be computed", color, 1.0)]


def _chain(scene: Scene, plan: ScanPlan, chain: int, table: Ints, starts: list[float], wide: float, y: float) -> float:
    """One document's strips; gives the height below them."""
    count, size = len(table), plan.layout.world_size
    words = f"document {chain}: {count_text(int(table[-1, STOP] - table[0, START]))} tokens in {count} segments"
    scene.add(Line(((MARGIN, y), (WIDTH - MARGIN, y)), "grid"), Text(MARGIN, y + 15, words, SMALL))
    y += 22
    unit = wide / count
    for rank in sorted(set(table[:, RANK].tolist()), key=lambda r: table[table[:, RANK] == r, PLACE].min()):
        own = table[table[:, RANK] == rank, PLACE].tolist()
        cells = list(_RankStrip(rank, own).columns(plan, chain))[: len(starts)]
        tall = _STRIP + 2 + (_BAR + 1) * max(len(new) for new, _ in cells)
        scene.add(Text(starts[0] - 8, y + 10, f"rank {rank}", SMALL, "muted", "end"))
        for x, (new, ready) in zip(starts, cells, strict=True):
            scene.add(Rect(x, y, wide, _STRIP, "lane"))
            for place in own:
                _segment(scene, table[place], x + unit * place, y, unit, size, place in ready)
            for row, parts in enumerate(new):
                _piece(scene, parts, x, y + _STRIP + 2 + (_BAR + 1) * row, unit, size)
        y += tall + 5
    return y


def _segment(scene: Scene, row: Ints, x: float, y: float, unit: float, size: int, ready: bool) -> None:
    place, start, stop, rank = (int(row[i]) for i in (PLACE, START, STOP, RANK))
    note = f"segment {place}, tokens {start:,} to {stop:,}, rank {rank}: {'can be computed' if ready else 'waits'}"
    color = rank_color(rank, size)
    scene.add(Rect(x, y, max(unit - 1, 1), _STRIP, color, 1.0 if ready else _WAITING, note))
    if unit > text_width("00", 10) + 2:
        scene.add(Text(x + (unit - 1) / 2, y + 10, str(place), 10, "#ffffff" if ready else "muted", "middle"))


def _piece(scene: Scene, parts: Parts, x: float, y: float, unit: float, size: int) -> None:
    """A bar over the segments that the piece stands for."""
    is_state = parts[0][0] == 0
    kind = "state" if is_state else "map"
    for first, end, source in parts:
        note = f"{kind}[{parts[0][0]}:{parts[-1][1]}], of which [{first}:{end}] from rank {source}"
        tall = _BAR if is_state else _BAR / 2
        wide = max(unit * (end - first) - min(1.0, unit / 4), 0.5)
        scene.add(Rect(x + unit * first, y, wide, tall, rank_color(source, size), 1.0 if is_state else _MAP, note))
