"""Pictures of layouts, and both passes of a plan simulated for every rank, which other pictures draw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from longspan.errors import PlanError
from longspan.formatting import count_text
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.cost import live_bytes
from longspan.planning.machine import queued_at, steps_work
from longspan.planning.plan import Plan
from longspan.planning.simulator import Timeline, simulate
from longspan.planning.steps import Schedule
from longspan.spans import Ints, join
from longspan.viz.mask import equal_runs, even_edges, stretches
from longspan.viz.scene import (
    MARGIN,
    MIXED,
    SMALL,
    WIDTH,
    Line,
    Rect,
    Scale,
    Scene,
    Text,
    bottom_axis,
    frame,
    headed,
    position_ticks,
    rank_color,
    shown_ranks,
)

# A picture of a layout: one strip per rank, filled where the rank holds tokens; documents on top.


_BINS = 620
_LANES = 64


def layout_picture(layout: Layout, mask: Mask | None = None, *, title: str | None = None) -> Scene:
    """Who holds which tokens. With a mask, the stretches that do not see each other (documents) are marked."""
    ranks = shown_ranks(layout.world_size, _LANES)
    parts = (
        np.empty((0, 2), dtype=np.int64) if mask is None else stretches(mask.resized(layout.seq_len), layout.seq_len)
    )
    scene, top = headed(title or f"Layout: {layout.name}", _remarks(layout, parts, len(ranks)), _ABOUT)
    left, right = MARGIN + 62, WIDTH - MARGIN - 108
    x = Scale(0, max(layout.seq_len, 1), left, right)
    y = top + 10
    if len(parts) > 1:
        _documents(scene, x, y, parts)
        y += 26
    lane = 22.0 if len(ranks) <= 8 else 14.0 if len(ranks) <= 16 else 11.0 if len(ranks) <= 32 else 8.5
    label_every = 1 if lane > 10 else 4
    begin = y
    scene.add(Text(right + 10, y - 5, "tokens", SMALL, "muted"))
    for order, rank in enumerate(ranks):
        scene.add(Rect(left, y + 1, right - left, lane - 2, "lane"))
        _strip(scene, layout, rank, x, y + 1, lane - 2)
        if order % label_every == 0:
            size = min(SMALL, lane + 1)
            scene.add(Text(left - 8, y + lane / 2 + 4, f"rank {rank}", size, "muted", "end"))
            scene.add(Text(right + 10, y + lane / 2 + 4, count_text(int(layout.num_tokens[rank])), size, "muted"))
        y += lane
    if 1 < len(parts) <= 48:
        for edge in parts[1:, 0].tolist():
            scene.add(Line(((x(edge), begin), (x(edge), y)), "paper", 1.2))
    frame(scene, left, begin, right, y)
    ticks = [float(tick) for tick in position_ticks(layout.seq_len)]
    bottom_axis(scene, x, y, ticks, "position in the sequence (tokens)", lambda tick: count_text(int(tick)))
    scene.height = y + 52
    return scene


_ABOUT = "One strip per rank, filled where the rank holds tokens of the sequence."


def _remarks(layout: Layout, parts: Ints, num_shown: int) -> list[str]:
    words = f"{count_text(layout.seq_len)} tokens on {layout.world_size} ranks in {count_text(len(layout.table))} spans"
    if layout.local_len is not None:
        padding = sum(layout.num_padding(rank) for rank in range(layout.world_size))
        words += f", {count_text(layout.local_len)} slots each ({count_text(padding)} of padding)"
    if len(parts) > 1:
        words += f"; {count_text(len(parts))} documents, which do not see each other"
    left_out = layout.world_size - num_shown
    return [words, *([f"{num_shown} of {layout.world_size} ranks are drawn, evenly spread."] if left_out else [])]


def _documents(scene: Scene, x: Scale, y: float, parts: Ints) -> None:
    """Documents as boxes in two alternating greys; where they are narrower than a pixel, as one."""
    scene.add(Text(x.start - 8, y + 11, "documents", SMALL, "muted", "end"))
    scene.add(Rect(x.start, y, x.stop - x.start, 14, "lane"))
    for number, (start, stop) in enumerate(parts.tolist()):
        wide = x(stop) - x(start)
        if wide >= 0.7:
            note = f"document {number}: {start:,} to {stop:,}, {stop - start:,} tokens"
            scene.add(Rect(x(start), y, wide, 14, MIXED, 0.85 if number % 2 else 0.5, note))


def _strip(scene: Scene, layout: Layout, rank: int, x: Scale, y: float, height: float) -> None:
    """The rank's spans as they are where they can be seen, else how much of each pixel they fill."""
    color, rows = rank_color(rank, layout.world_size), layout.span_table(rank)
    if len(rows) <= 400:
        for start, stop in rows.tolist():
            note = f"rank {rank}: {start:,} to {stop:,}"
            scene.add(Rect(x(start), y, max(x(stop) - x(start), 1.0), height, color, note=note))
        return
    edges = even_edges(layout.seq_len, _BINS)
    i, j = join(rows, np.stack((edges[:-1], edges[1:]), axis=1))
    held = np.minimum(rows[i, 1], edges[j + 1]) - np.maximum(rows[i, 0], edges[j])
    share = np.bincount(j, weights=held.astype(np.float64), minlength=len(edges) - 1) / np.diff(edges)
    level = np.ceil(share * 4 - 1e-9).astype(np.int64)
    for start, stop in equal_runs(level):
        if level[start]:
            wide = x(float(edges[stop])) - x(float(edges[start]))
            scene.add(Rect(x(float(edges[start])), y, wide, height, color, 0.2 + 0.2 * int(level[start])))


# -- The picture -------------------------------------------------------------------------------------------------------


MAX_RANKS = 128
"""Pictures that need every rank's steps are drawn up to here: simulating 256 ranks takes half a minute."""


@dataclass(frozen=True, eq=False)
class SimulatedPass:
    """One pass: its schedule, what the simulator saw, and when each rank left each step."""

    direction: str
    schedule: Schedule
    timeline: Timeline
    left: tuple[tuple[float, ...], ...]

    @cached_property
    def alive(self) -> tuple[Ints, ...]:
        """For each rank, the bytes alive in each of its steps."""
        schedule = self.schedule
        kept = schedule.kept or ((),) * schedule.world_size
        return tuple(
            live_bytes(steps, rank, schedule.layout, schedule.sizes, self.direction, kept[rank])
            for rank, steps in enumerate(schedule.ranks)
        )


@lru_cache(maxsize=4)
def runs(plan: Plan) -> tuple[SimulatedPass, SimulatedPass]:
    """Forward and backward of the plan."""
    size = plan.layout.world_size
    if size > MAX_RANKS:
        raise PlanError(
            f"a picture of every rank's steps was asked for, and {plan!r} has {size} ranks, which would be simulated"
            f" one by one. Ask for {MAX_RANKS} ranks or fewer; masks and layouts are drawn for any number."
        )
    return _run(plan, "forward"), _run(plan, "backward")


def _run(plan: Plan, direction: str) -> SimulatedPass:
    schedule = plan.schedule(direction)
    timeline = simulate(schedule, plan.machine)
    arrived: dict[tuple[int, int], float] = {}
    for event in timeline.events:
        if event.kind == "message":
            for rank in (event.rank, event.peer):
                key = rank, event.step
                arrived[key] = max(arrived.get(key, 0.0), event.stop)
    left: list[tuple[float, ...]] = []
    for rank, steps in enumerate(schedule.ranks):
        now, times = 0.0, list[float]()
        works = steps_work(steps, rank, plan.sizes, plan.machine, direction)
        for number, (work, queued) in enumerate(zip(works, queued_at(works, plan.machine), strict=True)):
            now = max(now + work.seconds(plan.machine, direction), queued, arrived.get((rank, number), 0.0))
            times.append(now)
        left.append(tuple(times))
    return SimulatedPass(direction, schedule, timeline, tuple(left))
