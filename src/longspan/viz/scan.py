"""A picture of a scan plan: for each document and rank, which pieces of the chain reach the rank, step by step.

Chains go right, so do steps. A rank's strip shows its own segments; a segment is filled as soon as the state that
enters it has arrived, and below the strip lie the pieces that arrived or were folded in this step, coloured by the rank
they came from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from longspan.formatting import bytes_text, count_text, format_count
from longspan.planning.scan_plan import ScanPlan
from longspan.planning.scan_steps import PLACE, RANK, START, STOP
from longspan.spans import Ints
from longspan.viz.scene import (
    GRID,
    LANE,
    MARGIN,
    MUTED,
    ON_DARK,
    SMALL,
    WIDTH,
    Key,
    Scene,
    begin_scene,
    legend_row,
    picture,
    rank_color,
)

_ROWS, _COLUMNS = 48, 9
"""Most strips (of the longest chains) and most steps that are drawn."""
_STRIP, _BAR, _GAP = 13.0, 6.0, 14.0
_WAITING, _MAP = 0.22, 0.5
_ABOUT = (
    "One column per step, one strip per rank of a document. A segment is filled once the state that enters it is known;"
    " bars below are pieces that arrived or were folded, in the colours of the ranks they came from."
)
_HOW_TO_READ = (
    "Boxes are segments of a document. Bars are what a rank received or joined in a step: states (thick), maps (thin)."
)

Reach = tuple[int, int]
Parts = list[tuple[int, int, int]]
"""(first, end, source rank) of the parts that a piece was folded from."""


@picture
def scan_picture(plan: ScanPlan, *, title: str | None = None) -> Scene:
    """Draw how states get from segment to segment. Documents on one rank alone send nothing, and are only counted."""
    size, num_steps = plan.layout.world_size, plan.draft.num_steps
    chains = _longest_chains(plan)
    total, cut = len(plan.chains.batches), sum(len(ranks) > 1 for ranks in plan.chains.ranks())
    most = [max(plan.bytes_received(r, direction) for r in range(size)) for direction in ("forward", "backward")]
    remark = (
        f"{format_count(total, 'document')} on {format_count(size, 'rank')} ({plan.layout.name}); a rank receives at"
        f" most {bytes_text(most[0])} forward and {bytes_text(most[1])} backward."
    )
    if plan.source is not None:
        remark += (
            f" In addition, tokens are moved to it from {plan.home.name} and back:"
            f" {bytes_text(plan.reasons[0].bytes_received)} at most in all, both passes."
        )
    remarks = [remark, _HOW_TO_READ]
    if cut < total:
        verb = "s lie" if total - cut != 1 else " lies"
        remarks.append(f"{count_text(total - cut)} document{verb} on one rank alone: nothing to send.")
    if len(chains) < cut:
        remarks.append(f"Drawn: {len(chains)} of {count_text(cut)} documents on several ranks, of the most segments.")
    if num_steps > _COLUMNS:
        remarks.append(f"The first {_COLUMNS} of {num_steps} steps are drawn.")
    scene, top = begin_scene(title or f"Scan: {plan.scheme}", remarks, _ABOUT)

    ranks = sorted({int(rank) for _, table in chains for rank in table[:, RANK]})
    ranks = ranks if len(ranks) <= 8 else [ranks[0], ranks[len(ranks) // 2], ranks[-1]]
    keys: list[Key] = [(f"rank {rank}", rank_color(rank, size), 1.0) for rank in ranks]
    color = rank_color(ranks[0], size) if ranks else GRID
    keys += [("waits", color, _WAITING), ("can be computed", color, 1.0)]
    y = legend_row(scene, MARGIN, top + 4, keys) + 2

    num_columns = min(num_steps, _COLUMNS)
    left = MARGIN + 62
    width = (WIDTH - MARGIN - left + _GAP) / max(num_columns, 1) - _GAP
    starts = [left + (width + _GAP) * column for column in range(num_columns)]
    for column, x in enumerate(starts):
        scene.text(x, y + 12, f"step {column}" if column else "at first", SMALL, bold=True)
    y += 22
    for chain, table in chains:
        y = _draw_chain(scene, plan, chain, table, starts, width, y) + 16
    scene.height = y + 6
    return scene


def _longest_chains(plan: ScanPlan) -> list[tuple[int, Ints]]:
    """Return the longest chains of more than one segment, with their segments, as many as there is room for."""
    first = plan.chains.first.tolist()
    tables = [(n, plan.chains.table[start:stop]) for n, (start, stop) in enumerate(itertools.pairwise(first))]
    kept: list[tuple[int, Ints]] = []
    room = _ROWS
    for number, table in sorted(tables, key=lambda each: -len(each[1])):
        room -= len(set(table[:, RANK].tolist()))
        if len(table) < 2 or (kept and room < 0):
            break
        kept.append((number, table))
    return sorted(kept, key=lambda each: each[0])


def _draw_chain(
    scene: Scene, plan: ScanPlan, chain: int, table: Ints, starts: list[float], width: float, y: float
) -> float:
    """Draw the strips of one document; return the height below them."""
    count, size, canvas = len(table), plan.layout.world_size, scene.canvas
    canvas.plot([MARGIN, WIDTH - MARGIN], [y, y], color=GRID, linewidth=1)
    tokens = count_text(int(table[-1, STOP] - table[0, START]))
    scene.text(MARGIN, y + 15, f"document {chain}: {tokens} tokens in {count} segments", SMALL)
    y += 22
    unit = width / count
    has_numbers = unit > scene.text_width("00", 10) + 2
    for rank in sorted(set(table[:, RANK].tolist()), key=lambda r: table[table[:, RANK] == r, PLACE].min()):
        own = table[table[:, RANK] == rank, PLACE].tolist()
        cells = list(itertools.islice(_steps_of(plan, chain, rank, own), len(starts)))
        scene.text(starts[0] - 8, y + 10, f"rank {rank}", SMALL, MUTED, "right")
        for x, (new, ready) in zip(starts, cells, strict=True):
            scene.box(canvas, x, y, width, _STRIP, LANE)
            for place in own:
                start, stop, is_ready = int(table[place, START]), int(table[place, STOP]), place in ready
                note = f"segment {place}, tokens {start:,} to {stop:,}, rank {rank}: "
                note += "can be computed" if is_ready else "waits"
                alpha, box_width = 1.0 if is_ready else _WAITING, max(unit - 1, 1)
                scene.box(canvas, x + unit * place, y, box_width, _STRIP, rank_color(rank, size), alpha, note)
                if has_numbers:
                    color = ON_DARK if is_ready else MUTED
                    scene.text(x + unit * place + (unit - 1) / 2, y + 10, str(place), 10, color, "center")
            for row, parts in enumerate(new):
                is_state = parts[0][0] == 0
                name = f"{'state' if is_state else 'map'}[{parts[0][0]}:{parts[-1][1]}]"
                height, alpha = (_BAR, 1.0) if is_state else (_BAR / 2, _MAP)
                for first, end, source in parts:
                    note = f"{name}, of which [{first}:{end}] from rank {source}"
                    bar_width = max(unit * (end - first) - min(1.0, unit / 4), 0.5)
                    bar_y = y + _STRIP + 2 + (_BAR + 1) * row
                    color = rank_color(source, size)
                    scene.box(canvas, x + unit * first, bar_y, bar_width, height, color, alpha, note)
        y += _STRIP + 2 + (_BAR + 1) * max(len(new) for new, _ in cells) + 5
    return y


def _steps_of(plan: ScanPlan, chain: int, rank: int, own: list[int]) -> Iterator[tuple[list[Parts], set[int]]]:
    """Yield for every step the pieces of the chain that are new on the rank, and its segments that can be computed."""
    arrived: list[tuple[Reach, int]] = []
    ready = {0, 1} if 0 in own else {0}  # a document's first segment, and the one after it
    for step in plan.steps(rank):
        new: dict[Reach, Parts] = {reach: [(*reach, src)] for reach, src in arrived}
        consumed: set[Reach] = set()
        for fold in step.computes:
            if fold.left.chain == chain:
                sides = [(fold.left.start, fold.left.stop), (fold.right.start, fold.right.stop)]
                parts = [part for side in sides for part in new.get(side, [(*side, rank)])]
                consumed.update(sides)
                new[fold.whole.start, fold.whole.stop] = parts
        ready |= {end for first, end in new if first == 0}
        yield [parts for reach, parts in sorted(new.items()) if reach not in consumed], ready.intersection(own)
        arrived = [
            ((t.piece.start, t.piece.stop), t.src) for t in step.transfers if t.dst == rank and t.piece.chain == chain
        ]
