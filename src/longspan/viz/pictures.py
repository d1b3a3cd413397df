"""Three pictures: a mask and its layout, the timeline of a plan, and its memory over time.

Pairs of a mask are counted in closed form: the cost depends on the number of bands and tiles, not on the length.
matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.errors import LongspanError, PlanError
from longspan.formatting import BYTE_UNITS, SECOND_UNITS, bytes_text, count_text, seconds_text, unit_of
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.masks import bands as bd
from longspan.masks.tiles import tile_pairs
from longspan.planning.cost import live_bytes
from longspan.planning.machine import queue_times, steps_work
from longspan.planning.plan import Plan
from longspan.planning.simulator import Timeline, simulate
from longspan.planning.steps import Schedule
from longspan.spans import Ints, by_position, check_int, join, run_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- figures and colours -----------------------------------------------------------------------------------------------

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8500", "#7b4fa3")
"""Okabe and Ito's colours without black and yellow."""
RAMP = ("#6b4fb3", "#4f6cc0", "#3786b9", "#2a9a9d", "#35ad7b", "#66bd55", "#a3c93c")
"""An ordered scale for more ranks: its brightness rises steadily, so that it can be read without colours."""
FORWARD, BACKWARD, NEAR, FAR = "#0072b2", "#cc79a7", "#009e73", "#d55e00"
LANE, MIXED, INK = "#e6e9ed", "#8a9099", "#1f2328"
FEW, MOST = 8, 64
"""Ranks up to which each has its own colour, and that a picture shows at most."""


def new_figure(width: float, height: float, title: str, remark: str) -> Figure:
    """Return a figure of this size in inches, with a title and a remark above its axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LongspanError(
            "`matplotlib` is required to draw pictures, but it is not installed. Run: pip install matplotlib."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    heading = textwrap.shorten(title, int(11 * width), placeholder=" ...")
    text = textwrap.fill(remark, int(14 * width))
    figure.suptitle(f"{heading}\n{text}", x=0.01, ha="left", fontsize=9, parse_math=False)
    return figure


def rank_colors(world_size: int) -> list[tuple[float, float, float]]:
    """Return a colour for each rank: distinct ones for up to 8, places on the ordered scale for more."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    if world_size <= FEW:
        return [to_rgb(color) for color in SERIES[:world_size]]
    scale = LinearSegmentedColormap.from_list("ranks", RAMP)
    return [to_rgb(scale(rank / (world_size - 1))) for rank in range(world_size)]


def add_rank_legend(axes: Axes, texts: Sequence[str], others: Sequence[tuple[str, Any]]) -> None:
    """Explain the colours of ranks beside the axes, as a list of `texts` or as a scale, and those of `others`."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colors = rank_colors(len(texts))
    keys = [*(zip(texts, colors, strict=True) if len(texts) <= FEW else ()), *others]
    handles = [Patch(facecolor=color, label=text) for text, color in keys]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=8)
    if len(texts) > FEW:
        scale = ScalarMappable(cmap=ListedColormap(colors))
        scale.set_clim(-0.5, len(texts) - 0.5)
        bar = axes.figure.colorbar(scale, cax=axes.inset_axes((1.05, 0.1, 0.03, 0.5)), label="rank")
        bar.ax.tick_params(labelsize=8)


def set_token_axis(axis: Any, length: int, label: str) -> None:
    """Mark quarters of a length that has round ones, else round numbers."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=True))
    if length % 128 == 0:
        axis.set_ticks(range(0, length + 1, length // 4))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_tick_params(labelsize=8)
    axis.set_label_text(label, fontsize=9)


def shown_ranks(world_size: int, always: Sequence[int] = ()) -> list[int]:
    """Return the ranks to draw: all of up to 64, else at most as many, evenly spread, those in `always` among them.

    >>> shown_ranks(4), len(shown_ranks(100, [37])), 37 in shown_ranks(100, [37])
    ([0, 1, 2, 3], 63, True)
    """
    spread = np.linspace(0, world_size - 1, min(world_size, MOST) - len(set(always)) * (world_size > MOST))
    return sorted({*spread.round().astype(int).tolist(), *always})


# -- masks and layouts -------------------------------------------------------------------------------------------------

TILES, BINS = 104, 720
MAX_CALLED = 2048
"""Longest sequence for which a mask's function is called, on every pair. Pairs of longer ones are shown as open."""


def even_edges(seq_len: int, num: int) -> Ints:
    """Return the edges of at most `num` tiles of nearly equal numbers of tokens."""
    return np.unique(np.linspace(0, seq_len, min(num, max(seq_len, 1)) + 1).round().astype(np.int64))


def with_owner_edges(layout: Layout, edges: Ints, most: int) -> Ints:
    """Return the edges, with those between owners added where there are few enough to be seen."""
    cuts = np.unique(layout.table[:, 0])
    return np.unique(np.concatenate((edges, cuts))) if len(cuts) + len(edges) <= most else edges


def held_tokens(layout: Layout, edges: Ints) -> Ints:
    """Return how many tokens each rank (row) holds between neighbouring edges (columns).

    >>> held_tokens(layouts.zigzag(8, 2), np.array([0, 4, 8])).tolist()
    [[2, 2], [2, 2]]
    """
    i, j = join(layout.table[:, :2], np.stack((edges[:-1], edges[1:]), axis=1))
    held = np.zeros((layout.world_size, len(edges) - 1), dtype=np.int64)
    both = np.minimum(layout.table[i, 1], edges[j + 1]) - np.maximum(layout.table[i, 0], edges[j])
    np.add.at(held, (layout.table[i, 2], j), both)
    return held


def owners(layout: Layout, edges: Ints) -> Ints:
    """Return the rank that holds more than half of the tokens between neighbouring edges, -1 where none does."""
    held = held_tokens(layout, edges)
    return np.where(2 * held.max(axis=0) > np.diff(edges), held.argmax(axis=0), -1)


def row_work(mask: Mask, layout: Layout, row: int, head: int) -> Ints:
    """Return the pairs in the query rows of each rank, in one plane (an upper bound where a function decides)."""
    by_start = layout.by_position
    i, j = join(mask.plane(row, head).region[:, :2], by_start[:, :2])
    pieces = mask.plane(row, head).region[i].copy()
    pieces[:, bd.Q0] = np.maximum(pieces[:, bd.Q0], by_start[j, 0])
    pieces[:, bd.Q1] = np.minimum(pieces[:, bd.Q1], by_start[j, 1])
    pairs = np.zeros(layout.world_size, dtype=np.int64)
    np.add.at(pairs, by_start[j, 2], bd.area(pieces))
    return pairs


def stretches(mask: Mask, seq_len: int) -> Ints:
    """Return (start, stop) of the parts of the sequence that do not see each other: documents, in most cases.

    >>> stretches(masks.documents([3, 2]) & masks.causal(), 5).tolist()
    [[0, 3], [3, 5]]
    """
    extents: list[Ints] = []
    for region in mask.regions(seq_len):
        tight = bd.tighten(region)
        low, high = np.minimum(tight[:, bd.Q0], tight[:, bd.K0]), np.maximum(tight[:, bd.Q1], tight[:, bd.K1])
        extents.append(np.stack((low, high), axis=1))
    rows = by_position(np.concatenate(extents))
    reach = np.maximum.accumulate(rows[:, 1])
    first, after = run_table(rows[1:, 0] >= reach[:-1], len(rows)).T
    return np.stack((rows[first, 0], reach[after - 1]), axis=1)


def tile_shares(
    mask: Mask, layout: Layout | None, length: int, row: int = 0, head: int = 0, ask: bool = True
) -> tuple[Ints, Ints, Any, Any]:
    """Return edges of tiles of queries and of keys, and for each tile the share of its pairs that is allowed, and
    whether a function that is not called decides about more."""
    edges = even_edges(length, TILES)
    documents = stretches(mask, length)
    if len(documents) <= MOST:  # so that corners are sharp
        edges = np.unique(np.concatenate((edges, documents.ravel())))
    q_edges = edges if layout is None else with_owner_edges(layout, edges, 520)
    plane = mask.plane(row, head)
    calls = plane.predicate is not None and ask and length <= MAX_CALLED
    pairs = tile_pairs(plane if calls else plane.sure, q_edges, edges)
    is_open = np.zeros(pairs.shape, dtype=np.bool_) if calls else tile_pairs(plane.maybe, q_edges, edges) > 0
    return q_edges, edges, pairs / (np.diff(q_edges)[:, None] * np.diff(edges)), is_open


def mask_picture(
    mask: Mask,
    layout: Layout | None = None,
    *,
    seq_len: int | None = None,
    row: int = 0,
    head: int = 0,
    title: str | None = None,
    ask: bool = True,
) -> Figure:
    """Draw which queries may attend to which keys, in tiles: the darker, the more of a tile's pairs are allowed.

    Args:
        mask: The mask.
        layout: With a layout, a tile has the colour of the rank that holds its query rows.
        seq_len: Number of tokens, for a mask without a length of its own.
        row: Batch row of a mask that differs from row to row.
        head: Head of a mask that differs from head to head.
        title: Title of the picture.
        ask: Call the function of a mask on every pair of a short sequence. With False, and for long sequences, the
            pairs on which it decides are shown as open.
    """
    length = layout.seq_len if layout is not None and mask.seq_len is None else mask.length(seq_len)
    mask = mask.resized(length)
    q_edges, edges, share, is_open = tile_shares(mask, layout, length, row, head, ask)
    allowed = float(np.diff(q_edges) @ share @ np.diff(edges)) / max(length, 1) ** 2
    remark = f"{count_text(length)} tokens, {100 * allowed:.3g}% of all pairs allowed"
    remark += ", and more where its function allows them" if is_open.any() else ""
    remark += f", batch row {row} of {mask.num_rows}" if mask.num_rows > 1 else ""
    remark += f", head {head} of {mask.num_heads}" if mask.num_heads > 1 else ""
    texts = [] if layout is None else [f"rank {rank}" for rank in range(layout.world_size)]
    if layout is not None and mask.plane(row, head).predicate is None:
        work = row_work(mask, layout, row, head)
        mean = float(work.mean()) or 1.0
        texts = [
            f"{text}: {100 * pairs / (mean * len(work)):.1f}% of pairs" for text, pairs in zip(texts, work, strict=True)
        ]
        remark += f"; most pairs on a rank / mean: {float(work.max()) / mean:.3f}"
    figure = new_figure(8.6, 6.2, title or f"Mask: {mask_name(mask)}", remark)
    from matplotlib.colors import to_rgb

    light = np.array(to_rgb(FORWARD if layout is None else MIXED))
    colors = np.tile(light, (len(share), 1))
    if layout is not None:  # -1, of tiles on several ranks, is the last colour
        colors = np.array([*rank_colors(layout.world_size), light])[owners(layout, q_edges)]
    shade = np.where(share >= 1, 1.0, np.where(share > 0, 0.25 + 0.4 * share, 0.0))
    shade = np.where((share == 0) & is_open, 0.15, shade)
    axes = figure.add_subplot()
    axes.pcolormesh(edges, q_edges, 1 - shade[..., None] * (1 - colors[:, None, :]))
    axes.set(xlim=(0, max(length, 1)), ylim=(max(length, 1), 0), aspect="equal")
    set_token_axis(axes.xaxis, length, "key position (tokens)")
    set_token_axis(axes.yaxis, length, "query position (tokens)")
    others = [(text, 1 - s * (1 - light)) for text, s in (("all pairs of a tile", 1.0), ("some", 0.4))]
    others += [("a function decides", 1 - 0.15 * (1 - light))] if is_open.any() else []
    add_rank_legend(axes, texts, others)
    return figure


def mask_name(mask: Mask) -> str:
    """Return the mask's `repr` without the brackets and its length."""
    whole = repr(mask).removeprefix("<mask ").removesuffix(">")
    return whole if mask.seq_len is None else whole.removesuffix(f", {mask.seq_len} tokens")


def layout_picture(layout: Layout, mask: Mask | None = None, *, title: str | None = None) -> Figure:
    """Draw which rank holds which tokens. With a mask, lines are where documents begin that do not see each other."""
    size, length = layout.world_size, layout.seq_len
    ranks = shown_ranks(size)
    remark = f"{count_text(length)} tokens on {size} ranks in {count_text(len(layout.table))} spans"
    if layout.local_len is not None:
        padding = sum(layout.num_padding(rank) for rank in range(size))
        remark += f", {count_text(layout.local_len)} slots each ({count_text(padding)} of padding)"
    documents = [] if mask is None else stretches(mask.resized(length), length).tolist()
    remark += f"; {count_text(len(documents))} documents" if len(documents) > 1 else ""
    remark += f"; {len(ranks)} of {size} ranks are drawn" if len(ranks) < size else ""
    figure = new_figure(
        8.6, 1.4 + max(0.3 * min(len(ranks), 8), 0.09 * len(ranks)), title or f"Layout: {layout.name}", remark
    )
    from matplotlib.colors import to_rgb

    edges = with_owner_edges(layout, even_edges(length, BINS), 4 * BINS)
    share = (held_tokens(layout, edges) / np.diff(edges))[ranks]
    colors, empty = np.array(rank_colors(size))[ranks], np.array(to_rgb(LANE))
    axes = figure.add_subplot()
    axes.pcolormesh(edges, np.arange(len(ranks) + 1), empty + share[..., None] * (colors[:, None, :] - empty))
    axes.set(xlim=(0, max(length, 1)), ylim=(len(ranks), 0))
    if 1 < len(documents) <= MOST:
        axes.vlines([start for start, _ in documents[1:]], 0, len(ranks), color=INK, linewidth=0.6)
    set_rank_ticks(axes, ranks, [f"{count_text(int(layout.num_tokens[rank]))} tokens" for rank in ranks])
    set_token_axis(axes.xaxis, length, "position in the sequence (tokens)")
    return figure


def set_rank_ticks(axes: Axes, ranks: Sequence[int], notes: Sequence[str]) -> None:
    """Name the lanes, with a note each: all of up to 16, else every fourth."""
    which = range(0, len(ranks), 1 if len(ranks) <= 16 else 4)
    axes.set_yticks([order + 0.5 for order in which], [f"rank {ranks[order]}: {notes[order]}" for order in which])
    for one in axes.figure.axes:
        one.tick_params(axis="y", length=0, labelsize=8)


# -- simulated passes --------------------------------------------------------------------------------------------------

MAX_RANKS = 128
"""Most ranks whose steps are drawn one by one: simulating 256 takes half a minute."""


@dataclass(frozen=True, eq=False)
class SimulatedPass:
    """One pass: its schedule, its simulated timeline, and when each rank leaves each step."""

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
    """Simulate forward and backward of the plan."""
    size = plan.layout.world_size
    if size > MAX_RANKS:
        raise PlanError(
            f"`plan` must have at most {MAX_RANKS} ranks for a picture of every rank's steps, but got {plan!r} with"
            f" {size}. Plan for {MAX_RANKS} ranks or fewer; masks and layouts are drawn for any number."
        )
    return _simulate_pass(plan, "forward"), _simulate_pass(plan, "backward")


def _simulate_pass(plan: Plan, direction: str) -> SimulatedPass:
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
        for number, (work, queued) in enumerate(zip(works, queue_times(works, plan.machine), strict=True)):
            pack, compute, unpack = work.parts(plan.machine, direction)
            now = max(max(now + pack + compute, arrived.get((rank, number), 0.0)) + unpack, queued)
            times.append(now)
        left.append(tuple(times))
    return SimulatedPass(direction, schedule, timeline, tuple(left))


def pass_axes(figure: Figure, both: Sequence[SimulatedPass]) -> Iterator[tuple[SimulatedPass, Axes, float]]:
    """Yield each pass with axes as wide as its time, and the seconds of a unit of the time axis."""
    unit, weight = unit_of(max(run.timeline.seconds for run in both), SECOND_UNITS)
    total = sum(run.timeline.seconds for run in both) or 1.0
    widths = [max(run.timeline.seconds / total, 0.02) for run in both]
    for run, axes in zip(both, figure.subplots(1, 2, sharey=True, width_ratios=widths), strict=True):
        axes.set_xlim(0, (run.timeline.seconds or 1.0) / weight)
        axes.set_xlabel(f"{run.direction}, {unit}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        yield run, axes, weight


def timeline_picture(plan: Plan, *, title: str | None = None) -> Figure:
    """Draw when every rank computes and receives, simulated on the plan's machine; both passes on one scale."""
    both, size, machine = runs(plan), plan.layout.world_size, plan.machine
    slowest = {run.timeline.finished.index(max(run.timeline.finished)) for run in both}
    ranks = shown_ranks(size, sorted(slowest))
    times = ", ".join(f"{run.direction} {seconds_text(run.timeline.seconds)}" for run in both)
    remark = f"{times} on {machine.name}: simulated, not run. Upper bars compute, lower bars are messages that arrive."
    remark += f" {len(ranks)} of {size} ranks are drawn, the slowest among them." if len(ranks) < size else ""
    height = 1.5 + max(0.42 * min(len(ranks), 8), 0.12 * len(ranks))
    figure = new_figure(8.6, height, title or f"Timeline: {plan.scheme.name}", remark)
    from matplotlib.patches import Patch

    busy, has_far = np.zeros(size), False
    line = 0.4 if len(ranks) <= 16 else 0.0
    first: Any = None
    for run, axes, weight in pass_axes(figure, both):
        first = first or axes
        axes.set_ylim(len(ranks), 0)
        for order, rank in enumerate(ranks):
            axes.broken_barh([(0, run.timeline.seconds / weight)], (order + 0.1, 0.8), color=LANE)
            events = [event for event in run.timeline.events if event.rank == rank]
            computes = [event for event in events if event.kind == "compute"]
            messages = [event for event in events if event.kind == "message"]
            busy[rank] += sum(event.stop - event.start for event in computes)
            levels = [FAR if machine.level(event.peer, rank) > 0 else NEAR for event in messages]
            has_far |= FAR in levels
            own = FORWARD if run.direction == "forward" else BACKWARD
            for bars, colors, where in ((computes, own, (order + 0.1, 0.5)), (messages, levels, (order + 0.64, 0.26))):
                spans = [(event.start / weight, (event.stop - event.start) / weight) for event in bars]
                axes.broken_barh(spans, where, facecolors=colors, edgecolor="white", linewidth=line)
    total = sum(run.timeline.seconds for run in both) or 1.0
    set_rank_ticks(first, ranks, [f"{busy[rank] / total:.0%} busy" for rank in ranks])
    keys = [("computes, forward", FORWARD), ("computes, backward", BACKWARD)]
    keys += [("messages" if size <= machine.node else f"messages inside a node of {machine.node}", NEAR)]
    keys += [("messages between nodes", FAR)] if has_far else []
    keys += [("waits, or packs messages", LANE)]
    handles = [Patch(facecolor=color, label=text) for text, color in keys]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def memory_picture(plan: Plan, *, title: str | None = None, limit_bytes: int | None = None) -> Figure:
    """Draw the bytes alive over simulated time: a line for each of up to 8 ranks, else the range of all ranks.

    `limit_bytes` is what a device has left for these bytes: a dashed line, or a sentence if it is far above.
    """
    if limit_bytes is not None:
        limit_bytes = check_int(limit_bytes, "limit_bytes", "memory_picture()", PlanError, low=1)
    both, size = runs(plan), plan.layout.world_size
    peaks = [max(int(run.alive[rank].max(initial=0)) for run in both) for rank in range(size)]
    worst = peaks.index(max(peaks))
    workspace = plan.chosen.workspace_bytes
    inside = "not known" if workspace is None else f"{bytes_text(workspace)} at most"
    remark = (
        f"Peak {bytes_text(peaks[worst])} on rank {worst}, {bytes_text(min(peaks))} on the rank with least, beside its"
        f" own q, k, v, results and gradients, and beside what kernels allocate inside ({inside}). Times are simulated."
    )
    line = limit_bytes if limit_bytes is not None and limit_bytes <= 4 * peaks[worst] else None
    if limit_bytes is not None:
        where = "beyond this picture" if line is None else "the dashed line"
        remark += f" The device has {bytes_text(limit_bytes)} left for it ({where})."
    figure = new_figure(8.6, 4.0, title or f"Memory: {plan.scheme.name}", remark)
    unit, scale = unit_of(float(peaks[worst]), BYTE_UNITS)
    colors = rank_colors(size)
    for run, axes, weight in pass_axes(figure, both):
        axes.set_ylim(0, 1.05 * max(peaks[worst], line or 0, 1) / scale)
        axes.grid(axis="y", alpha=0.4)
        for rank in range(size) if size <= FEW else (worst,):
            ends = run.left[rank]
            text, color = (f"rank {rank}", colors[rank]) if size <= FEW else (f"rank {worst}, which needs most", FAR)
            if ends:
                edges = np.array([0.0, *ends]) / weight
                axes.stairs(run.alive[rank][: len(ends)] / scale, edges, color=color, label=text, linewidth=1.6)
        if size > FEW:
            at = np.linspace(0.0, run.timeline.seconds, 400)
            alive = [
                np.append(values[: len(ends)], 0)[np.searchsorted(ends, at)]
                for values, ends in zip(run.alive, run.left, strict=True)
            ]
            low, high, middle = (f(alive, axis=0) / scale for f in (np.min, np.max, np.median))
            axes.fill_between(at / weight, low, high, color=FORWARD, alpha=0.25, linewidth=0, label=f"all {size} ranks")
            axes.plot(at / weight, middle, color=FORWARD, label="median rank")
        if line is not None:
            axes.axhline(line / scale, color=INK, linestyle="--", label="limit")
        if run.direction == "forward":
            axes.set_ylabel(f"alive, {unit}", fontsize=9)
        else:
            figure.legend(
                *axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8
            )
    return figure
